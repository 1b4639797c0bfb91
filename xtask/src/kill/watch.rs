//! Looking at processes and files from outside.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitOptions, waitpid};

use crate::exec::{Failure, stat_of};

/// Processes whose parent dies are handed to this process, so that their exit codes can be seen.
pub(super) fn adopt_orphans() -> Result<(), Failure> {
    let me = rustix::process::getpid();
    rustix::process::set_child_subreaper(Some(me))
        .map_err(|error| Failure::new(format!("cannot adopt orphans: {error}")))
}

/// Whether the process runs; one that has ended but was not collected yet does not.
pub(super) fn is_alive(pid: u32) -> bool {
    stat_of(pid).is_some_and(|stat| stat.state != 'Z' && stat.state != 'X')
}

/// Waits until none of the processes runs; answers those that still do at the deadline.
pub(super) fn still_alive_at(pids: &[u32], deadline: Instant) -> Vec<u32> {
    loop {
        let alive: Vec<u32> = pids.iter().copied().filter(|pid| is_alive(*pid)).collect();
        if alive.is_empty() || Instant::now() >= deadline {
            return alive;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The exit code of an adopted process that has ended: negative for a signal, `None` when some
/// other parent has collected it.
pub(super) fn adopted_code(pid: u32) -> Option<i32> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    let (_, status) = waitpid(Some(pid), WaitOptions::NOHANG).ok()??;
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Some(code),
        (None, Some(signal)) => Some(-signal),
        (None, None) => None,
    }
}

/// Processes that carry this variable in their environment: all that a run ever started.
pub(super) fn carriers(variable: &str) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            fs::read(format!("/proc/{pid}/environ")).is_ok_and(|bytes| {
                bytes
                    .split(|b| *b == 0)
                    .any(|var| var == variable.as_bytes())
            })
        })
        .filter(|pid| is_alive(*pid))
        .collect()
}

/// Names in a folder; a folder that cannot be read has none.
pub(super) fn names_in(folder: &Path) -> BTreeSet<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return BTreeSet::new();
    };
    entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_carrier_is_found_until_it_ends() {
        let mut child = std::process::Command::new("sleep")
            .arg("61")
            .env("KVGATE_WATCH_TEST", "here")
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(5);
        while !carriers("KVGATE_WATCH_TEST=here").contains(&child.id()) {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
        assert_eq!(still_alive_at(&[child.id()], Instant::now()), [child.id()]);
        child.kill().unwrap();
        let later = Instant::now() + Duration::from_secs(5);
        assert!(still_alive_at(&[child.id()], later).is_empty());
        assert!(carriers("KVGATE_WATCH_TEST=here").is_empty());
        child.wait().unwrap();
    }
}
