//! A connected stream socket that never blocks for good: every wait also ends by the stop signal.
//!
//! Shared by TCP and the control socket of shared memory. Errors keep their cause; what they mean for
//! a peer is decided by the links.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown,
};

use crate::agent::wire::WireError;
use crate::deadline::Deadline;
use crate::error::Error;
use crate::sync::{AtomicBool, Ordering};

/// Most file descriptors taken with one read.
const FDS_PER_READ: usize = 8;
/// Most file descriptors that wait for their frame. More is a hostile peer.
const FD_QUEUE_LIMIT: usize = 64;

/// A flag that a waiting thread hears. Raised once, never lowered.
pub(crate) struct StopSignal {
    raised: AtomicBool,
    event: OwnedFd,
}

impl StopSignal {
    /// A signal that is not raised.
    pub(crate) fn new() -> Result<Self, Error> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::system("eventfd", errno))?;
        Ok(Self {
            raised: AtomicBool::new(false),
            event,
        })
    }

    /// Ends every wait, now and later.
    pub(crate) fn raise(&self) {
        self.raised.store(true, Ordering::Release);
        // Fails only when the counter is full, and then it is readable already.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Whether it was raised.
    pub(crate) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }
}

impl AsFd for StopSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Why a wait ended without what it waited for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StreamEnd {
    /// The peer closed between two frames.
    Closed,
    /// The peer closed inside a frame or a payload.
    Cut,
    /// The process that is watched has ended, and nothing is left to read.
    PeerDead,
    /// The stop signal.
    Stopped,
    /// The deadline.
    TimedOut,
    /// The system said no.
    Io(Errno),
    /// The bytes are not a frame.
    Wire(WireError),
}

impl std::fmt::Display for StreamEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Closed => f.write_str("connection closed by the peer"),
            Self::Cut => f.write_str("connection closed by the peer inside a frame"),
            Self::PeerDead => f.write_str("process of the peer has ended"),
            Self::Stopped => f.write_str("stopped on this side"),
            Self::TimedOut => f.write_str("deadline passed"),
            Self::Io(errno) => write!(f, "{errno}"),
            Self::Wire(error) => write!(f, "{error}"),
        }
    }
}

impl From<WireError> for StreamEnd {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

/// Whoever has bytes left to send while its thread reads.
pub(crate) trait Writable: Sync {
    /// Whether it waits for the socket.
    fn wants_out(&self) -> bool;
    /// The socket takes bytes. Must not wait.
    fn is_writable(&self);
}

/// What may end a wait besides the socket.
#[derive(Clone, Copy)]
pub(crate) struct Bounds<'a> {
    /// `None` only for a last wait that has a deadline.
    pub(crate) stop: Option<&'a StopSignal>,
    /// Only a handshake has one: an established link waits until it is closed or the peer is gone.
    pub(crate) deadline: Option<Deadline>,
    /// A pidfd: readable when the process has ended.
    pub(crate) process: Option<BorrowedFd<'a>>,
    /// Served while waiting for input.
    pub(crate) writable: Option<&'a dyn Writable>,
}

impl Bounds<'_> {
    /// Whether the stop signal was raised.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.is_some_and(StopSignal::is_raised)
    }
}

/// A connected, non-blocking stream socket.
pub(crate) struct Socket {
    fd: OwnedFd,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<Socket> for OwnedFd {
    fn from(socket: Socket) -> Self {
        socket.fd
    }
}

impl Socket {
    /// Takes over a connected socket and makes it non-blocking.
    pub(crate) fn new(fd: OwnedFd) -> Result<Self, Error> {
        rustix::io::ioctl_fionbio(&fd, true)
            .map_err(|errno| Error::system("ioctl(FIONBIO)", errno))?;
        Ok(Self { fd })
    }

    /// Waits until the socket is ready for one of `events`; returns which.
    pub(crate) fn wait(
        &self,
        events: PollFlags,
        bounds: Bounds<'_>,
    ) -> Result<PollFlags, StreamEnd> {
        loop {
            if bounds.is_stopped() {
                return Err(StreamEnd::Stopped);
            }
            let timeout = match bounds.deadline {
                None => None,
                Some(deadline) if deadline.has_passed() => return Err(StreamEnd::TimedOut),
                Some(deadline) => Some(timespec(deadline.remaining())),
            };
            // A place that is not used asks the socket for nothing.
            let own = self.fd.as_fd();
            let stop = bounds.stop.map_or(own, |stop| stop.event.as_fd());
            let stop_events = if bounds.stop.is_some() {
                PollFlags::IN
            } else {
                PollFlags::empty()
            };
            let process = bounds.process.unwrap_or(own);
            let process_events = if bounds.process.is_some() {
                PollFlags::IN
            } else {
                PollFlags::empty()
            };
            let sending = bounds.writable.filter(|writable| writable.wants_out());
            let asked = if sending.is_some() {
                events | PollFlags::OUT
            } else {
                events
            };
            let mut fds = [
                PollFd::new(&self.fd, asked),
                PollFd::new(&stop, stop_events),
                PollFd::new(&process, process_events),
            ];
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(StreamEnd::Io(errno)),
            }
            let ready = fds[0].revents();
            if let (Some(sending), true) = (sending, ready.contains(PollFlags::OUT)) {
                sending.is_writable();
            }
            // What was sent before the end is read first.
            if ready.intersects(events | PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
                return Ok(ready);
            }
            if bounds.process.is_some() && !fds[2].revents().is_empty() {
                return Err(StreamEnd::PeerDead);
            }
        }
    }

    /// Sends all of `bytes`.
    pub(crate) fn send_all(&self, mut bytes: &[u8], bounds: Bounds<'_>) -> Result<(), StreamEnd> {
        while !bytes.is_empty() {
            match self.send_some(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::AGAIN) => {
                    self.wait(PollFlags::OUT, bounds)?;
                }
                Err(errno) => return Err(StreamEnd::Io(errno)),
            }
        }
        Ok(())
    }

    /// Sends what fits now. Never raises SIGPIPE.
    pub(crate) fn send_some(&self, bytes: &[u8]) -> Result<usize, Errno> {
        loop {
            match rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                other => return other,
            }
        }
    }

    /// Sends some of `words` with a file descriptor beside the first byte; returns how many.
    pub(super) fn send_with_fd(
        &self,
        words: &[u8],
        file: BorrowedFd<'_>,
        bounds: Bounds<'_>,
    ) -> Result<usize, StreamEnd> {
        let files = [file];
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(&files));
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(&self.fd, &[IoSlice::new(words)], &mut control, flags) {
                Ok(sent) => return Ok(sent),
                Err(Errno::AGAIN) => {
                    self.wait(PollFlags::OUT, bounds)?;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(StreamEnd::Io(errno)),
            }
        }
    }

    /// Reads what is there now, file descriptors included when `fds` is given.
    pub(super) fn receive_some(
        &self,
        into: &mut [u8],
        fds: Option<&mut VecDeque<OwnedFd>>,
    ) -> Result<usize, Errno> {
        let Some(fds) = fds else {
            return loop {
                match rustix::net::recv(&self.fd, &mut *into, RecvFlags::DONTWAIT) {
                    Err(Errno::INTR) => {}
                    Ok((count, _)) => break Ok(count),
                    Err(errno) => break Err(errno),
                }
            };
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_READ))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            match rustix::net::recvmsg(&self.fd, &mut [IoSliceMut::new(into)], &mut control, flags)
            {
                Err(Errno::INTR) => {}
                other => break other?,
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(arrived) = message {
                fds.extend(arrived);
            }
        }
        if fds.len() > FD_QUEUE_LIMIT {
            return Err(Errno::TOOMANYREFS);
        }
        Ok(received.bytes)
    }

    /// No more bytes from this side; what was sent before still arrives.
    pub(crate) fn shutdown_send(&self) {
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Write);
    }

    /// Ends both directions. Waits on this socket end.
    pub(crate) fn shutdown(&self) {
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// Lets the peer read the last words of this side: a socket that is closed with unread input
    /// resets the connection and may take them back. Bounded by `bounds` and by a mebibyte. Answers whether
    /// the peer has closed its end.
    pub(crate) fn linger(&self, bounds: Bounds<'_>) -> bool {
        self.shutdown_send();
        let mut sink = [0u8; 4096];
        for _ in 0..256 {
            match self.receive_some(&mut sink, None) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(Errno::AGAIN) => {
                    if self.wait(PollFlags::IN, bounds).is_err() {
                        return false;
                    }
                }
                Err(errno) => return errno == Errno::CONNRESET,
            }
        }
        false
    }
}

pub(crate) fn timespec(duration: std::time::Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
