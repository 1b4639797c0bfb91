//! A connection to a server, each of whose calls ends at an absolute deadline and reads no more than it
//! expects. A timeout of the socket alone bounds neither: a server that sends one byte at a time renews it
//! with each, and a length that it makes up is read for as long as bytes come.

use std::io::{self, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use kvgate_transfer::Deadline;
use redis::{
    Cmd, ConnectionAddr, ConnectionInfo, ConnectionLike, ErrorKind, Parser, RedisError, Value, cmd,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Most bytes of a reply that is a number, a word or an error, or of what stands around a value.
pub(super) const REPLY_BYTES: u64 = 512;
/// Bytes that are received at once.
const RECEIVE_BYTES: usize = 64 << 10;

/// A connection.
pub(super) struct Link {
    stream: BufReader<Timed>,
    parser: Parser,
    db: i64,
    is_open: bool,
}

impl Link {
    /// Connects, and says who asks and for which database as `info` has it. A host name is looked up
    /// before, as the resolver of the system is configured.
    ///
    /// # Errors
    /// The socket's; a timeout at the deadline; what the server answers.
    pub(super) fn connect(info: &ConnectionInfo, deadline: Deadline) -> Result<Link, RedisError> {
        let settings = info.redis_settings();
        let timed = Timed {
            socket: Socket::connect(info.addr(), deadline)?,
            deadline,
            left_bytes: 2 * REPLY_BYTES,
        };
        let mut link = Link {
            stream: BufReader::with_capacity(RECEIVE_BYTES, timed),
            parser: Parser::new(),
            db: settings.db(),
            is_open: true,
        };
        if let Some(password) = settings.password() {
            let mut login = cmd("AUTH");
            login.arg(settings.username()).arg(password);
            login.query::<()>(&mut link)?;
        }
        if link.db != 0 {
            cmd("SELECT").arg(link.db).query::<()>(&mut link)?;
        }
        Ok(link)
    }

    /// From here on everything ends at `deadline`, and at most `reply_bytes` bytes come.
    pub(super) fn begin(&mut self, deadline: Deadline, reply_bytes: u64) {
        let timed = self.stream.get_mut();
        timed.deadline = deadline;
        timed.left_bytes = reply_bytes;
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), RedisError> {
        let sent = self.stream.get_mut().write_all(bytes);
        self.is_open &= sent.is_ok();
        Ok(sent?)
    }

    fn receive(&mut self) -> Result<Value, RedisError> {
        let value = self.parser.parse_value(&mut self.stream);
        self.is_open &= value.is_ok();
        value
    }
}

impl ConnectionLike for Link {
    fn req_packed_command(&mut self, command: &[u8]) -> Result<Value, RedisError> {
        self.send(command)?;
        self.receive()
    }

    fn req_packed_commands(
        &mut self,
        commands: &[u8],
        offset: usize,
        count: usize,
    ) -> Result<Vec<Value>, RedisError> {
        self.send(commands)?;
        for _ in 0..offset {
            self.receive()?;
        }
        (0..count).map(|_| self.receive()).collect()
    }

    fn get_db(&self) -> i64 {
        self.db
    }

    fn check_connection(&mut self) -> bool {
        Cmd::ping().query::<()>(self).is_ok()
    }

    fn is_open(&self) -> bool {
        self.is_open
    }
}

/// A socket with what the call may still take.
struct Timed {
    socket: Socket,
    deadline: Deadline,
    left_bytes: u64,
}

impl Timed {
    /// The time that is left, for the next call of the system.
    fn left(&self) -> io::Result<Duration> {
        left_of(self.deadline)
    }
}

impl Read for Timed {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.left_bytes == 0 && !into.is_empty() {
            let reason = "the reply is longer than any right one";
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        let most = into
            .len()
            .min(usize::try_from(self.left_bytes).unwrap_or(usize::MAX));
        let count = loop {
            self.socket.set_read_timeout(self.left()?)?;
            match self.socket.read(&mut into[..most]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => break done?,
            }
        };
        self.left_bytes -= count as u64;
        Ok(count)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(self.left()?)?;
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The time that is left before `deadline`.
///
/// # Errors
/// `TimedOut` if there is none.
fn left_of(deadline: Deadline) -> io::Result<Duration> {
    match deadline.remaining() {
        left if left.is_zero() => Err(io::ErrorKind::TimedOut.into()),
        left => Ok(left),
    }
}

/// Connects to a Unix socket. A server that accepts nobody has a full backlog sooner or later, and a connect that blocks
/// would then wait for it beyond any deadline; there is nothing to poll for either, so it is tried again.
fn connect_unix(path: &Path, deadline: Deadline) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let mut pause = Duration::from_micros(100);
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::AGAIN | Errno::INTR) => std::thread::sleep(pause.min(left_of(deadline)?)),
            Err(error) => return Err(error.into()),
        }
        pause = (pause * 2).min(Duration::from_millis(10));
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    fn connect(address: &ConnectionAddr, deadline: Deadline) -> Result<Socket, RedisError> {
        match address {
            ConnectionAddr::Tcp(host, port) => {
                let mut last = io::Error::from(io::ErrorKind::NotFound);
                for address in (host.as_str(), *port).to_socket_addrs()? {
                    match TcpStream::connect_timeout(&address, left_of(deadline)?) {
                        Ok(stream) => {
                            stream.set_nodelay(true)?;
                            return Ok(Socket::Tcp(stream));
                        }
                        Err(error) => last = error,
                    }
                }
                Err(last.into())
            }
            ConnectionAddr::Unix(path) => Ok(Socket::Unix(connect_unix(path, deadline)?)),
            _ => Err((
                ErrorKind::InvalidClientConfig,
                "neither TCP nor a Unix socket",
            )
                .into()),
        }
    }

    fn set_read_timeout(&self, left: Duration) -> io::Result<()> {
        match self {
            Socket::Tcp(stream) => stream.set_read_timeout(Some(left)),
            Socket::Unix(stream) => stream.set_read_timeout(Some(left)),
        }
    }

    fn set_write_timeout(&self, left: Duration) -> io::Result<()> {
        match self {
            Socket::Tcp(stream) => stream.set_write_timeout(Some(left)),
            Socket::Unix(stream) => stream.set_write_timeout(Some(left)),
        }
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.read(into),
            Socket::Unix(stream) => stream.read(into),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.write(bytes),
            Socket::Unix(stream) => stream.write(bytes),
        }
    }
}
