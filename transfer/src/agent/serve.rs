//! The status of an agent from outside its process: JSON on a Unix socket that only its user may open.

use std::{
    io::Write,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    fs::{Mode, fchmod},
    io::Errno,
    net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType},
};

use crate::{
    agent::Agent,
    deadline::Deadline,
    engine::Engine,
    error::{Error, ErrorKind},
    sync::{Arc, thread},
};

/// How long one reader may keep the thread.
const READER_LIMIT: Duration = Duration::from_secs(1);
/// Pause after the system refused to accept (no file descriptor left, for instance).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
const BACKLOG: i32 = 8;

/// A bound socket and the file that it made.
struct Door {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode.
    file: (u64, u64),
}

impl Agent {
    /// Answers every connection to the Unix socket `path` with [`Agent::status`] as one line of JSON, from a
    /// thread of its own, until the agent is shut down; then the file is removed. The file has mode 0600. What
    /// a killed process left there is replaced, anything else is not.
    ///
    /// # Errors
    /// [`ErrorKind::AddressInUse`] when somebody listens there or the file is something else,
    /// [`ErrorKind::InvalidArgument`] for a path that is too long for a socket (about 100 bytes),
    /// [`ErrorKind::System`], [`ErrorKind::Closed`] after a shutdown.
    pub fn serve_status(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let engine = self.engine().clone();
        if engine.is_stopping() {
            return Err(ErrorKind::Closed.into());
        }
        let door = Arc::new(Door::open(path.as_ref())?);
        let (served, at_door) = (engine.clone(), door.clone());
        thread::Builder::new()
            .name("kvgate-status".into())
            .spawn(move || at_door.serve(&served))
            .map_err(|error| {
                door.close();
                system("thread spawn", &error)
            })?;
        engine.on_shutdown(move || door.close());
        Ok(())
    }
}

impl Door {
    fn open(path: &Path) -> Result<Self, Error> {
        let refused = |_| ErrorKind::InvalidArgument {
            what: "path of a status socket",
            value: path.display().to_string(),
        };
        let address = SocketAddrUnix::new(path).map_err(refused)?;
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(|errno| Error::system("socket", errno))?;
        // Before the file is made: it takes its mode from the socket, and nobody can be faster.
        fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(|errno| Error::system("fchmod", errno))?;
        bind(&socket, &address, path)?;
        let file = std::fs::symlink_metadata(path).map_err(|error| system("stat", &error))?;
        rustix::net::listen(&socket, BACKLOG).map_err(|errno| Error::system("listen", errno))?;
        Ok(Self {
            listener: socket.into(),
            path: path.to_owned(),
            file: (file.dev(), file.ino()),
        })
    }

    fn serve(&self, engine: &Engine) {
        loop {
            let accepted = self.listener.accept();
            if engine.is_stopping() {
                return;
            }
            match accepted {
                Ok((reader, _)) => answer(engine, reader),
                Err(error)
                    if matches!(
                        error.kind(),
                        std::io::ErrorKind::Interrupted | std::io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(_) => thread::park_timeout(ACCEPT_PAUSE),
            }
        }
    }

    /// Wakes the thread and removes the file, if it still is the one that was made.
    fn close(&self) {
        // Fails only for a socket that does not listen any more.
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
        let is_ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|file| (file.dev(), file.ino()) == self.file);
        if is_ours {
            // Somebody else may have removed it meanwhile.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A reader that goes away or does not read loses its answer, and nobody else does.
fn answer(engine: &Engine, mut reader: UnixStream) {
    let Ok(mut text) = serde_json::to_string(&engine.status()) else {
        return;
    };
    text.push('\n');
    // One limit for all of it: a reader that takes a byte at a time must not keep the thread.
    let deadline = Deadline::after(READER_LIMIT);
    let mut rest = text.as_bytes();
    while !rest.is_empty() && !deadline.has_passed() {
        let is_bounded = reader.set_write_timeout(Some(deadline.remaining())).is_ok();
        match reader.write(rest) {
            Ok(count) if is_bounded && count > 0 => rest = &rest[count..],
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            _ => return,
        }
    }
}

fn bind(socket: &OwnedFd, address: &SocketAddrUnix, path: &Path) -> Result<(), Error> {
    match rustix::net::bind(socket, address) {
        Err(Errno::ADDRINUSE) if is_left_over(path) => {
            std::fs::remove_file(path).map_err(|error| system("unlink", &error))?;
            rustix::net::bind(socket, address)
        }
        bound => bound,
    }
    .map_err(|errno| match errno {
        Errno::ADDRINUSE => ErrorKind::AddressInUse {
            address: path.display().to_string(),
        }
        .into(),
        errno => Error::system("bind", errno),
    })
}

/// Whether it is a socket that nobody listens at.
fn is_left_over(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    let refused = |error: std::io::Error| error.kind() == std::io::ErrorKind::ConnectionRefused;
    is_socket && UnixStream::connect(path).err().is_some_and(refused)
}

fn system(call: &'static str, error: &std::io::Error) -> Error {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    ErrorKind::System { call, errno }.into()
}
