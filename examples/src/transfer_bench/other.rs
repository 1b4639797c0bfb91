//! The other side of a run: a process, a thread, or a host that somebody else looks after.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use kvgate_transfer::Agent;

use super::control::Control;
use super::target;
use crate::handoff::console;
use crate::handoff::failure::Failure;

/// The word after the program's name that makes it the peer of a run; the number of the run's process follows.
pub const SUBCOMMAND: &str = "target";

/// The other side.
#[derive(Debug)]
pub enum Other {
    /// A process that this one has started.
    Process(Child),
    /// A thread, for `local`.
    Thread(Option<thread::JoinHandle<()>>),
    /// Another host.
    Far,
}

impl Drop for Other {
    fn drop(&mut self) {
        match self {
            Self::Process(child) => {
                // The control socket is closed: a peer that works ends by itself.
                for _ in 0..200 {
                    if !matches!(child.try_wait(), Ok(None)) {
                        return;
                    }
                    thread::sleep(Duration::from_millis(5));
                }
                let _ = child.kill();
                let _ = child.wait();
            }
            Self::Thread(handle) => {
                if let Some(handle) = handle.take() {
                    // A panic has been reported by its own hook.
                    let _ = handle.join();
                }
            }
            Self::Far => {}
        }
    }
}

/// The kernel ends the peer with the calling *thread*, which is the main one.
pub fn start_process(control: UnixStream) -> Result<Other, Failure> {
    let program = std::env::current_exe().map_err(|error| start_failure(&error))?;
    let child = Command::new(program)
        .args([SUBCOMMAND, &std::process::id().to_string()])
        .stdin(Stdio::from(OwnedFd::from(control)))
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| start_failure(&error))?;
    Ok(Other::Process(child))
}

/// The peer in this very process.
pub fn start_thread(
    control: UnixStream,
    agent: Agent,
    deadline: Duration,
) -> Result<Other, Failure> {
    let body = move || {
        let ran = Control::new(control, None)
            .and_then(|control| target::run(control, &target::Home::here(Some(agent)), deadline));
        if let Err(failure) = ran {
            console::note(&format!("transfer-bench: target: {failure}"));
        }
    };
    let spawned = thread::Builder::new().name("target".to_owned()).spawn(body);
    let handle = spawned.map_err(|error| start_failure(&error))?;
    Ok(Other::Thread(Some(handle)))
}

/// The peer could not be started.
pub fn start_failure(error: &std::io::Error) -> Failure {
    Failure::internal(format!("cannot start the peer process: {error}"))
}
