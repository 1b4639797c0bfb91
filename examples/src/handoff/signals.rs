//! SIGINT and SIGTERM end a run like any other failure: clean up, then 130 or 143.

use std::io;
use std::thread;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::failure::{Failure, FailureKind};

/// Calls `deliver` on a thread of its own for every SIGINT and SIGTERM from now on.
pub fn watch(deliver: impl Fn(Failure) + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            for signal in &mut signals {
                deliver(failure_of(signal));
            }
        })?;
    Ok(())
}

/// The failure that a signal stands for.
fn failure_of(signal: i32) -> Failure {
    if signal == SIGINT {
        Failure::new(FailureKind::Interrupted, "interrupted by SIGINT")
    } else {
        Failure::new(FailureKind::Terminated, "ended by SIGTERM")
    }
}
