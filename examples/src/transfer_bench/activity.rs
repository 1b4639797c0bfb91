//! What a process and its threads have used so far.

use std::fs;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Use of a process since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activity {
    /// Processor time of all threads.
    pub cpu_ns: u64,
    /// Context switches, wanted or not, of all threads but the first one: that one measures and is told to.
    pub switches: u64,
    /// Threads but the first one.
    pub threads: u64,
}

impl Activity {
    /// Of this process.
    #[must_use]
    pub fn now() -> Self {
        let mut activity = Self {
            cpu_ns: cpu_ns(),
            ..Self::default()
        };
        let own = std::process::id().to_string();
        for thread in fs::read_dir("/proc/self/task")
            .into_iter()
            .flatten()
            .flatten()
        {
            if thread.file_name() == own.as_str() {
                continue;
            }
            // A thread may end between the listing and this.
            let status = fs::read_to_string(thread.path().join("status")).unwrap_or_default();
            activity.threads += 1;
            activity.switches += status
                .lines()
                .filter(|line| line.contains("ctxt_switches:"))
                .filter_map(|line| line.rsplit(':').next()?.trim().parse::<u64>().ok())
                .sum::<u64>();
        }
        activity
    }
}

/// Processor time of all threads of this process.
#[must_use]
pub fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// The monotonic clock, which all processes of the host share.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
