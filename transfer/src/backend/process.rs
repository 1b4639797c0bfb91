//! The process of a peer on this host, watched by a pidfd.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::shm;
use super::socket::timespec;
use crate::deadline::Deadline;

/// The process at the other end of a Unix socket.
pub(crate) struct PeerProcess {
    pidfd: OwnedFd,
    pid: Pid,
}

/// Why there is no process to watch at the other end.
#[derive(Debug)]
pub(crate) enum NoProcess {
    /// It has ended.
    Ended,
    /// It is none to talk to; a sentence for the refusal.
    Refused(String),
}

impl AsFd for PeerProcess {
    /// The pidfd: readable when the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl PeerProcess {
    /// The peer of a connected socket, if it belongs to the same user.
    ///
    /// `SO_PEERPIDFD` names the process without a race. Where the kernel lacks it, the pidfd is opened
    /// by number *before* the handshake; the peer's `Ready`, which answers what is sent afterwards,
    /// then proves that the process with that number was still the one that connected.
    ///
    /// # Errors
    /// See [`NoProcess`].
    pub(crate) fn of(socket: impl AsFd) -> Result<Self, NoProcess> {
        let peer = rustix::net::sockopt::socket_peercred(&socket)
            .map_err(|errno| NoProcess::Refused(format!("peer credentials: {errno}")))?;
        let own = rustix::process::geteuid();
        if peer.uid != own {
            return Err(NoProcess::Refused(format!(
                "peer runs as user {}, this process as {}",
                peer.uid.as_raw(),
                own.as_raw()
            )));
        }
        let pidfd = match shm::peer_pidfd(socket.as_fd()) {
            Ok(pidfd) => pidfd,
            Err(Errno::NOPROTOOPT | Errno::INVAL) => pidfd_by_number(peer.pid)?,
            Err(errno) => return Err(unwatched(errno)),
        };
        let pid = peer.pid;
        Ok(Self { pidfd, pid })
    }

    /// Its number here. Good only while the process has not ended.
    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Whether it is stopped by a signal or a debugger, as far as this process may see.
    pub(super) fn is_stopped(&self) -> bool {
        is_stopped(self.pid)
    }

    /// Whether the process has ended; waits for it up to `deadline`.
    pub(super) fn has_ended(&self, deadline: Deadline) -> bool {
        loop {
            let timeout = timespec(deadline.remaining());
            match poll(
                &mut [PollFd::new(&self.pidfd, PollFlags::IN)],
                Some(&timeout),
            ) {
                Ok(count) => return count > 0,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }
}

/// The letter behind the name in `/proc/PID/stat`; the name is in brackets and may hold anything.
fn is_stopped(pid: Pid) -> bool {
    let path = format!("/proc/{}/stat", pid.as_raw_nonzero());
    let Ok(stat) = std::fs::read(path) else {
        return false;
    };
    let behind = stat.iter().rposition(|byte| *byte == b')');
    let letter = behind.and_then(|at| stat.get(at + 2));
    matches!(letter, Some(b'T' | b't'))
}

fn pidfd_by_number(pid: Pid) -> Result<OwnedFd, NoProcess> {
    pidfd_open(pid, PidfdFlags::empty()).map_err(unwatched)
}

fn unwatched(errno: Errno) -> NoProcess {
    match errno {
        Errno::SRCH => NoProcess::Ended,
        _ => NoProcess::Refused(format!("process of the peer cannot be watched: {errno}")),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use rustix::process::{Signal, WaitOptions, kill_process, waitpid};

    use super::*;

    #[test]
    fn a_stopped_process_is_told_from_one_that_runs() {
        let mut command = Command::new("sleep");
        let child = command.arg("60").stdin(Stdio::null()).spawn();
        let mut child = child.unwrap();
        let pid = Pid::from_raw(child.id() as i32).unwrap();
        assert!(!is_stopped(pid));
        kill_process(pid, Signal::STOP).unwrap();
        waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
        assert!(is_stopped(pid));
        kill_process(pid, Signal::CONT).unwrap();
        waitpid(Some(pid), WaitOptions::CONTINUED).unwrap();
        assert!(!is_stopped(pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_stopped(pid), "it is gone");
    }
}
