//! `handoff-bench`: how fast Flash-shaped pools go from one process to another, beside a plain copy of the
//! same pages in the same run.

pub mod copy;
pub mod receiver;
pub mod sender;
pub mod shape;

use peak_alloc::PeakAlloc;
use serde::{Deserialize, Serialize};

/// From the receiver to the sender.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FromReceiver {
    /// Where it listens.
    Listening {
        /// The name of its socket.
        name: String,
    },
    /// Slots for the next hand-off, armed.
    Offer {
        /// The flight.
        epoch: u64,
        /// Index and generation of the logical pages.
        pages: Vec<(u32, u32)>,
        /// Of the window slots.
        windows: Vec<(u32, u32)>,
        /// Of the request slot.
        request: (u32, u32),
    },
    /// Every layer is there.
    Landed {
        /// On the monotonic clock of the host.
        at_us: u64,
        /// The most heap between Offer and now, beyond what there was at the Offer.
        extra_bytes: u64,
    },
}

/// From the sender to the receiver.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToReceiver {
    /// Make pools for prompts of this length and listen.
    Start {
        /// Tokens of every hand-off.
        tokens: u32,
    },
    /// Offer slots once more.
    Next,
}

/// Heap of a process; the program installs a counting allocator and lends it.
#[derive(Clone, Copy, Debug)]
pub struct Heap(pub &'static PeakAlloc);

impl Heap {
    /// Starts to look for the peak; returns what is in use.
    #[must_use]
    pub fn begin(&self) -> u64 {
        self.0.reset_peak_usage();
        self.0.current_usage() as u64
    }

    /// The most beyond what was in use at the beginning.
    #[must_use]
    pub fn extra_since(&self, begin_bytes: u64) -> u64 {
        (self.0.peak_usage() as u64).saturating_sub(begin_bytes)
    }
}

/// The middle of the values; 0 of none.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(Vec::new()), 0.0);
    }
}
