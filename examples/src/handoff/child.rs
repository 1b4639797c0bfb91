//! A role as a process: how it is started, adopted, watched and ended.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use super::cli::RoleName;
use super::role::SUBCOMMAND;

/// A started role. Dropping it kills and reaps the process: nothing of a run outlives it.
#[derive(Debug)]
pub struct RoleProcess {
    /// Which one.
    pub role: RoleName,
    child: Child,
    status: Option<ExitStatus>,
}

/// Starts this program again as `role`. `control` becomes its standard input; `link`, the job socket
/// between decode and reference, its standard output. The kernel kills the child when the calling
/// *thread* ends, so call it on the main thread.
pub fn spawn(
    role: RoleName,
    control: UnixStream,
    link: Option<UnixStream>,
) -> io::Result<RoleProcess> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(SUBCOMMAND).arg(role.id());
    command.stdin(Stdio::from(OwnedFd::from(control)));
    command.stdout(link.map_or_else(Stdio::null, |link| Stdio::from(OwnedFd::from(link))));
    // The sockets in `command` are closed here when it is dropped; only the child keeps its ends.
    Ok(RoleProcess {
        role,
        child: command.spawn()?,
        status: None,
    })
}

/// The child's side of [`spawn`]: its control socket and its job socket.
pub fn adopt(role: RoleName) -> io::Result<(UnixStream, Option<UnixStream>)> {
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let link = match role {
        RoleName::Prefill => None,
        RoleName::Decode | RoleName::Reference => {
            Some(UnixStream::from(io::stdout().as_fd().try_clone_to_owned()?))
        }
    };
    Ok((control, link))
}

/// Binds this process to its parent: the kernel kills it when the parent ends. `false` if the parent
/// has ended already.
pub fn die_with_parent(parent_pid: u32) -> io::Result<bool> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let parent = getppid().map(Pid::as_raw_nonzero).map(|pid| pid.get());
    Ok(parent == i32::try_from(parent_pid).ok())
}

impl RoleProcess {
    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it did.
    pub fn poll_status(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().ok().flatten();
        }
        self.status
    }

    /// Waits for its end, and kills it when it has not ended in time.
    pub fn end_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + limit;
        while self.poll_status().is_none() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.kill();
        self.status
    }

    /// Kills and reaps it, if it has not ended.
    pub fn kill(&mut self) {
        if self.poll_status().is_none() {
            // Both can fail only for a process that has been reaped, which `status` excludes.
            let _ = self.child.kill();
            self.status = self.child.wait().ok();
        }
    }
}

impl Drop for RoleProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// How a process ended, in words.
#[must_use]
pub fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with code {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}
