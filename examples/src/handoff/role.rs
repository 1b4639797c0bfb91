//! One process (or thread) of a run: takes its orders, does its part, and ends when its launcher does.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::channel::{self, ChannelReceiver, ChannelSender};
use super::cli::RoleName;
use super::control::{FromRole, RoleStart, ToRole};
use super::failure::{Failure, FailureKind};
use super::observer::Supervised;
use super::report::Report;
use super::timeline::Timeline;
use super::{child, console, decode, endpoint, prefill, reference, signals};

/// What a role lives in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hosting {
    /// A process of its own, which the launcher started.
    Process,
    /// A thread of the launcher.
    Thread,
}

/// The hidden subcommand that starts a role; a program that launches must answer to it.
pub const SUBCOMMAND: &str = "role";
/// Exit code of a role whose launcher is gone.
const LAUNCHER_GONE: u8 = 3;
/// Bound of the first message and of writes before the orders name the deadline.
const START_LIMIT: Duration = Duration::from_secs(10);

/// Runs `pd-handoff role NAME` and returns the exit code.
#[must_use]
pub fn run_process(role: RoleName) -> u8 {
    match child::adopt(role) {
        Ok((control, link)) => run(role, control, link, Hosting::Process),
        Err(error) => {
            console::note(&format!(
                "pd-handoff: role {} is started by pd-handoff only: {error}",
                role.id()
            ));
            2
        }
    }
}

/// Runs a role to its end and returns the exit code.
pub fn run(role: RoleName, control: UnixStream, link: Option<UnixStream>, hosting: Hosting) -> u8 {
    let Ok((sender, mut receiver)) = channel::split(control, START_LIMIT) else {
        return LAUNCHER_GONE;
    };
    let start = match receiver.receive::<ToRole>() {
        Ok(Some((ToRole::Start(start), _))) => *start,
        _ => return LAUNCHER_GONE,
    };
    if hosting == Hosting::Process {
        if !child::die_with_parent(start.launcher_pid).unwrap_or(false) {
            return LAUNCHER_GONE;
        }
        console::start_logging(start.host.verbosity);
        // The launcher decides what a signal means for the run; the role only ends, at once.
        let watching = signals::watch(|failure| std::process::exit(i32::from(failure.exit_code())));
        if let Err(error) = watching {
            console::note(&format!("pd-handoff: {}: signals: {error}", role.id()));
        }
    }
    let orders = follow(receiver, hosting);
    match perform(role, start, link, &sender, &orders) {
        Ok(()) => 0,
        Err(failure) => {
            // A launcher that is gone needs no reason.
            let _ = sender.send(&FromRole::Failed(failure.clone()));
            failure.exit_code()
        }
    }
}

/// Reads the launcher's messages; the end of the socket ends the process.
fn follow(mut receiver: ChannelReceiver, hosting: Hosting) -> Receiver<ToRole> {
    let (orders, inbox) = mpsc::channel();
    let body = move || {
        while let Ok(Some((message, _))) = receiver.receive::<ToRole>() {
            if orders.send(message).is_err() {
                break;
            }
        }
        if hosting == Hosting::Process {
            std::process::exit(i32::from(LAUNCHER_GONE));
        }
    };
    // Without the thread the channel ends at once, and so does the role.
    let _ = thread::Builder::new().name("orders".to_owned()).spawn(body);
    inbox
}

fn perform(
    role: RoleName,
    start: RoleStart,
    link: Option<UnixStream>,
    control: &ChannelSender,
    orders: &Receiver<ToRole>,
) -> Result<(), Failure> {
    let deadline = Duration::from_millis(start.host.deadline_ms);
    let observer = Arc::new(Supervised::new(control.clone()));
    match role {
        RoleName::Decode => {
            let reference = link.ok_or_else(|| Failure::internal("decode has no job socket"))?;
            let mut told = Ok(());
            let mut conclude = |report: Report, timeline: Timeline| {
                let (code, text) = (report.exit_code(), report.verdict_line());
                let report = FromRole::Report {
                    report: Box::new(report),
                    timeline: Box::new(timeline),
                };
                told = control
                    .send(&report)
                    .map_err(|error| Failure::internal(format!("launcher: {error}")));
                (code, text)
            };
            let listen = decode::Listen::Privately(Box::new(start.prompt));
            decode::run(
                &start.host,
                &start.output,
                listen,
                reference,
                observer,
                &mut conclude,
            )?;
            told?;
        }
        RoleName::Prefill => {
            let address = match orders.recv_timeout(deadline) {
                Ok(ToRole::Connect { address }) => address,
                Ok(_) => return Err(Failure::internal("an order out of turn")),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(Failure::new(
                        FailureKind::DeadlineExceeded,
                        format!("decode did not listen within {} ms", deadline.as_millis()),
                    ));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::new(FailureKind::PeerLost, "the launcher is gone"));
                }
            };
            let target = endpoint::private_target(start.host.transport, &address)?;
            prefill::run(&start.host, &start.prompt, &target, observer)?;
        }
        RoleName::Reference => {
            let link = link.ok_or_else(|| Failure::internal("reference has no job socket"))?;
            reference::serve(&start.host, link, observer)?;
        }
    }
    // The launcher prints the verdict, then says Finish; its end is as good.
    match orders.recv_timeout(deadline) {
        Ok(ToRole::Finish) | Err(RecvTimeoutError::Disconnected) => Ok(()),
        Ok(_) => Err(Failure::internal("an order out of turn")),
        Err(RecvTimeoutError::Timeout) => Err(Failure::new(
            FailureKind::DeadlineExceeded,
            format!("the launcher said nothing for {} ms", deadline.as_millis()),
        )),
    }
}
