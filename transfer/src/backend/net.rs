//! From an address to a link: listening, connecting, and the threads that greet.
//!
//! A listener has one thread that accepts and a bounded number of threads that greet, one for each
//! connection that has not finished its handshake. A connection that says nothing holds its own
//! thread for two seconds and nobody else. All of them end with the listener's stop
//! signal.

use std::any::Any;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::establish::establish;
use super::handshake::{HandshakeError, OwnRegion};
use super::refusal::{Failure, too_late};
use super::socket::{Bounds, StopSignal, StreamEnd, timespec};
use super::tcp::session::Desk;
use super::{BackendKind, Link};
use crate::agent::address::Address;
use crate::agent::auth::Side;
use crate::agent::metadata::AgentMetadata;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind};
use crate::obs::RefusedField;
use crate::sync::{Arc, Mutex, thread};

/// Time for a stranger to become a peer; mapping large pools is part of it.
const GREETING_MS: u64 = 10_000;
/// Most connections that are greeted at the same time; more are closed and counted as refused.
const GREETING_LIMIT: usize = 64;
/// Pause after the system refused to accept (no file descriptor left, for instance).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Pause before the next attempt at a Unix socket whose backlog is full.
const BACKLOG_PAUSE: Duration = Duration::from_millis(5);

/// What this agent says about itself, taken at one moment.
pub(crate) struct Introduction {
    pub(crate) metadata: AgentMetadata,
    /// The regions, in the order of the metadata.
    pub(crate) regions: Vec<OwnRegion>,
    /// The host's own, kept until the connection is in service or refused.
    pub(crate) keep: Box<dyn Any + Send>,
}

/// A connection that has become a link. Nothing is received before [`Link::start`].
pub(crate) struct Established {
    pub(crate) metadata: AgentMetadata,
    /// Where the peer is, for messages.
    pub(crate) address: String,
    pub(crate) link: Arc<dyn Link>,
    /// What the peer was told.
    pub(crate) told: Introduction,
}

/// The agent, as a listener sees it.
pub(crate) trait LinkHost: Send + Sync {
    /// Who this agent is now.
    fn introduction(&self) -> Introduction;
    /// Where sessions that may outlive their connections are kept; nowhere, if none may.
    fn desk(&self) -> Option<Arc<Desk>> {
        None
    }
    /// Itself, for whoever connects again later.
    fn owned(&self) -> Option<Arc<dyn LinkHost>> {
        None
    }
    /// How libraries are used.
    #[cfg(feature = "one-sided")]
    fn one_sided(&self) -> crate::config::OneSided {
        crate::config::OneSided::default()
    }
    /// The regions of an introduction, which holds them.
    #[cfg(feature = "one-sided")]
    fn regions(&self, told: &Introduction) -> Vec<Arc<crate::mem::region::RegionCore>> {
        let _ = told;
        Vec::new()
    }
    /// The shared secret.
    fn secret(&self) -> Option<Vec<u8>>;
    /// A peer has connected.
    fn established(&self, established: Established);
    /// A connection did not become a link.
    fn refused(&self, address: String, field: RefusedField, reason: String);
}

/// A bound address with its threads. Dropping it ends them and frees the address.
pub(crate) struct Listener {
    stop: Arc<StopSignal>,
    thread: Option<thread::JoinHandle<()>>,
    address: Address,
}

enum Acceptor {
    /// Also for what only begins as a TCP connection.
    Tcp(TcpListener, Address),
    Unix(UnixListener, Address),
}

/// Binds and listens.
///
/// # Errors
/// [`ErrorKind::AuthRequired`] for an address beyond this host without a secret,
/// [`ErrorKind::AddressInUse`], [`ErrorKind::InvalidArgument`], [`ErrorKind::System`].
pub(crate) fn listen(address: &Address, host: Arc<dyn LinkHost>) -> Result<Listener, Error> {
    address.check()?;
    if !address.is_local() && host.secret().is_none() {
        let address = address.to_string();
        return Err(ErrorKind::AuthRequired { address }.into());
    }
    check_backend(address, &*host)?;
    let (acceptor, bound) = Acceptor::bind(address)?;
    let stop = Arc::new(StopSignal::new()?);
    let greeter = Greeter {
        host,
        stop: Arc::clone(&stop),
        threads: Mutex::new(Vec::new()),
    };
    let thread = spawn("kvgate-accept", move || greeter.run(&acceptor))?;
    Ok(Listener {
        stop,
        thread: Some(thread),
        address: bound,
    })
}

impl Listener {
    /// The bound address, with the port that the system chose.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Ends the threads and frees the address; connections that are being greeted are closed.
    pub(crate) fn close(&mut self) {
        self.stop.raise();
        if let Some(handle) = self.thread.take() {
            // A panic of the thread was reported by its own hook.
            let _ = handle.join();
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.close();
    }
}

impl Acceptor {
    fn bind(address: &Address) -> Result<(Self, Address), Error> {
        let refused = |call, error: std::io::Error| refusal(call, address, &error);
        match address {
            Address::Tcp(socket) | Address::Ucx(socket) | Address::Libfabric(socket) => {
                let listener = TcpListener::bind(socket).map_err(|error| refused("bind", error))?;
                listener
                    .set_nonblocking(true)
                    .map_err(|error| refused("fcntl", error))?;
                let bound = listener
                    .local_addr()
                    .map_err(|error| refused("getsockname", error))?;
                let bound = address.at(bound);
                Ok((Self::Tcp(listener, bound.clone()), bound))
            }
            Address::Shm(name) | Address::Cma(name) => {
                let listener = std::os::unix::net::SocketAddr::from_abstract_name(name)
                    .and_then(|socket| UnixListener::bind_addr(&socket))
                    .map_err(|error| refused("bind", error))?;
                listener
                    .set_nonblocking(true)
                    .map_err(|error| refused("fcntl", error))?;
                Ok((Self::Unix(listener, address.clone()), address.clone()))
            }
        }
    }

    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Self::Tcp(listener, _) => listener.as_fd(),
            Self::Unix(listener, _) => listener.as_fd(),
        }
    }

    fn accept(&self) -> std::io::Result<(OwnedFd, Address)> {
        match self {
            Self::Tcp(listener, bound) => {
                let (stream, from) = listener.accept()?;
                Ok((stream.into(), bound.at(from)))
            }
            Self::Unix(listener, address) => {
                let (stream, _) = listener.accept()?;
                Ok((stream.into(), address.clone()))
            }
        }
    }
}

fn refusal(call: &'static str, address: &Address, error: &std::io::Error) -> Error {
    if error.kind() == std::io::ErrorKind::AddrInUse {
        let address = address.to_string();
        return ErrorKind::AddressInUse { address }.into();
    }
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    ErrorKind::System { call, errno }.into()
}

struct Greeter {
    host: Arc<dyn LinkHost>,
    stop: Arc<StopSignal>,
    /// Greetings that may still run.
    threads: Mutex<Vec<thread::JoinHandle<()>>>,
}

impl Greeter {
    fn run(&self, acceptor: &Acceptor) {
        while !self.stop.is_raised() {
            match acceptor.accept() {
                Ok((stream, from)) => self.greet(stream, from),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    self.stop
                        .wait(Some((acceptor.as_fd(), PollFlags::IN)), None);
                }
                // The connection ended before it was accepted, or a signal came.
                Err(error)
                    if matches!(
                        error.kind(),
                        std::io::ErrorKind::Interrupted | std::io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(_) => self.stop.wait(None, Some(ACCEPT_PAUSE)),
            }
        }
        for greeting in self.threads.lock().drain(..) {
            let _ = greeting.join();
        }
    }

    fn greet(&self, stream: OwnedFd, from: Address) {
        let mut threads = self.threads.lock();
        threads.retain(|greeting| !greeting.is_finished());
        if threads.len() >= GREETING_LIMIT {
            let reason = format!("{GREETING_LIMIT} connections are in their handshake already");
            return self
                .host
                .refused(from.to_string(), RefusedField::Load, reason);
        }
        let (host, stop) = (Arc::clone(&self.host), Arc::clone(&self.stop));
        let address = from.to_string();
        let spawned = spawn("kvgate-greet", move || {
            let deadline = Deadline::after_ms(GREETING_MS);
            let bounds = Bounds {
                stop: Some(&stop),
                deadline: Some(deadline),
                process: None,
                writable: None,
            };
            match establish(stream, &from, Side::Listener, &*host, bounds) {
                Ok(Some(established)) => host.established(established),
                Ok(None) => {}
                Err(Failure::Handshake(HandshakeError::Stream(StreamEnd::Stopped))) => {}
                Err(failure) => host.refused(from.to_string(), failure.field(), failure.reason()),
            }
        });
        match spawned {
            Ok(greeting) => threads.push(greeting),
            Err(error) => {
                self.host
                    .refused(address, RefusedField::Here, error.to_string());
            }
        }
    }
}

/// Connects, and greets until `deadline`.
///
/// # Errors
/// [`ErrorKind::Unreachable`], [`ErrorKind::HandshakeRefused`], [`ErrorKind::VersionMismatch`],
/// [`ErrorKind::PeerLost`], [`ErrorKind::DeadlineExceeded`], [`ErrorKind::InvalidArgument`], [`ErrorKind::System`].
pub(crate) fn connect(
    address: &Address,
    deadline: Deadline,
    host: &dyn LinkHost,
) -> Result<Established, Error> {
    address.check()?;
    check_backend(address, host)?;
    let bounds = Bounds {
        stop: None,
        deadline: Some(deadline),
        process: None,
        writable: None,
    };
    let stream = match address {
        Address::Tcp(socket) | Address::Ucx(socket) | Address::Libfabric(socket) => {
            connect_tcp(address, socket, deadline)?
        }
        Address::Shm(name) | Address::Cma(name) => connect_unix(address, name, deadline)?,
    };
    let established = establish(stream, address, Side::Connector, host, bounds)
        .map_err(|failure| failure.into_error(address, deadline))?;
    // Only a listener gives a connection to a session that is there.
    established.ok_or_else(|| ErrorKind::Closed.into())
}

/// Whether the library of a backend is there, before anybody is let wait for it.
fn check_backend(address: &Address, host: &dyn LinkHost) -> Result<(), Error> {
    match address.backend() {
        #[cfg(feature = "one-sided")]
        kind @ (BackendKind::Ucx | BackendKind::Libfabric) => {
            super::rma::available(kind, &host.one_sided())
        }
        #[cfg(not(feature = "one-sided"))]
        backend @ (BackendKind::Ucx | BackendKind::Libfabric) => {
            let _ = host;
            let tried = vec![format!("this build, which was made without {backend}")];
            Err(ErrorKind::BackendUnavailable { backend, tried }.into())
        }
        _ => Ok(()),
    }
}

fn unreachable(address: &Address, reason: impl ToString) -> Error {
    ErrorKind::Unreachable {
        address: address.to_string(),
        reason: reason.to_string(),
    }
    .into()
}

fn connect_tcp(
    address: &Address,
    socket: &SocketAddr,
    deadline: Deadline,
) -> Result<OwnedFd, Error> {
    let remaining = deadline.remaining().max(Duration::from_millis(1));
    match TcpStream::connect_timeout(socket, remaining) {
        Ok(stream) => Ok(stream.into()),
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut && deadline.has_passed() => {
            Err(too_late("connect", deadline))
        }
        Err(error) => Err(unreachable(address, error)),
    }
}

fn connect_unix(address: &Address, name: &str, deadline: Deadline) -> Result<OwnedFd, Error> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|errno| Error::system("socket", errno))?;
    let target = SocketAddrUnix::new_abstract_name(name.as_bytes())
        .map_err(|errno| Error::system("connect", errno))?;
    loop {
        match rustix::net::connect(&socket, &target) {
            Ok(()) => return Ok(socket),
            Err(Errno::INTR) => {}
            // The listener's backlog is full; there is nothing to poll for.
            Err(Errno::AGAIN) if !deadline.has_passed() => {
                let pause = timespec(BACKLOG_PAUSE.min(deadline.remaining()));
                let _ = poll(&mut [], Some(&pause));
            }
            Err(Errno::AGAIN) => return Err(too_late("connect", deadline)),
            Err(errno) => return Err(unreachable(address, errno)),
        }
    }
}

fn spawn(
    name: &str,
    body: impl FnOnce() + Send + 'static,
) -> Result<thread::JoinHandle<()>, Error> {
    let spawned = thread::Builder::new().name(name.into()).spawn(body);
    spawned.map_err(|error| {
        let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
        ErrorKind::System {
            call: "clone",
            errno,
        }
        .into()
    })
}

impl StopSignal {
    /// Sleeps until the signal is raised, the descriptor is ready, or the time is over.
    pub(super) fn wait(
        &self,
        other: Option<(std::os::fd::BorrowedFd<'_>, PollFlags)>,
        at_most: Option<Duration>,
    ) {
        let own = self.as_fd();
        let (other, events) = other.unwrap_or((own, PollFlags::empty()));
        let mut fds = [
            PollFd::new(&own, PollFlags::IN),
            PollFd::new(&other, events),
        ];
        // An interruption or an error leads the caller back to its own checks.
        let _ = poll(&mut fds, at_most.map(timespec).as_ref());
    }
}
