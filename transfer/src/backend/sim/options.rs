//! What a simulation injects.

use std::ops::Range;

/// What goes wrong, and how often. Shares are in thousandths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimFaults {
    /// Time between two things of one operation, in nanoseconds of the virtual clock.
    pub delay_ns: Range<u64>,
    /// Operations overtake each other.
    pub reorder: bool,
    /// Arrivals that come twice.
    pub duplicate_per_mille: u32,
    /// Arrivals that never come, although the bytes did.
    pub drop_per_mille: u32,
    /// Operations that write a part and fail.
    pub fail_per_mille: u32,
    /// Operations that are announced with a lower level before their bytes are there.
    pub split_per_mille: u32,
}

impl SimFaults {
    /// Delays only.
    pub fn none() -> Self {
        Self {
            delay_ns: 1..1_000,
            reorder: false,
            duplicate_per_mille: 0,
            drop_per_mille: 0,
            fail_per_mille: 0,
            split_per_mille: 0,
        }
    }

    /// Everything, with long delays.
    pub fn all() -> Self {
        Self {
            delay_ns: 1..1_000_000,
            reorder: true,
            duplicate_per_mille: 100,
            drop_per_mille: 30,
            fail_per_mille: 30,
            split_per_mille: 200,
        }
    }
}

/// What happens to the writes of a process that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// They are gone, and the survivors know it.
    Proven,
    /// They may land later, as from a network card that nobody can ask.
    Unprovable,
}

/// What was injected so far: a test checks that its window was entered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimCounts {
    /// Arrivals that came twice.
    pub duplicated: u64,
    /// Arrivals that never came.
    pub dropped: u64,
    /// Operations that failed half way.
    pub failed: u64,
    /// Operations that were announced too early, with a lower level.
    pub split: u64,
    /// Writes that landed after their process was killed.
    pub late_writes: u64,
    /// Connections under sessions that broke.
    pub breaks: u64,
}
