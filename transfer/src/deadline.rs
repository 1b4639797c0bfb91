//! Deadlines. Every wait takes one; a deadline ends a wait and nothing else (I-11).

use std::time::{Duration, Instant};

/// The moment at which a caller stops waiting.
///
/// A deadline that passes changes no state: memory stays in flight, an operation stays unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline {
    at: Instant,
    allowed: Duration,
}

/// Longer waits than this are cut to it; it keeps `Instant` arithmetic from overflowing.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

impl Deadline {
    /// `allowed` from now, at most a year.
    pub fn after(allowed: Duration) -> Self {
        let allowed = allowed.min(LONGEST);
        Self {
            at: Instant::now() + allowed,
            allowed,
        }
    }

    /// `milliseconds` from now.
    pub fn after_ms(milliseconds: u64) -> Self {
        Self::after(Duration::from_millis(milliseconds))
    }

    /// A deadline that has passed: look once, do not wait.
    pub fn now() -> Self {
        Self::after(Duration::ZERO)
    }

    /// The moment itself.
    pub fn instant(&self) -> Instant {
        self.at
    }

    /// What is left, zero when it has passed.
    pub fn remaining(&self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// Whether it has passed. Never in a loom model, where time stands still.
    pub fn has_passed(&self) -> bool {
        !cfg!(kv_loom) && Instant::now() >= self.at
    }

    /// The length this deadline was made with, for messages.
    pub fn allowed_ms(&self) -> u64 {
        u64::try_from(self.allowed.as_millis()).unwrap_or(u64::MAX)
    }
}
