//! [`TierGate`]: what stands between the workers and one tier: its limits, and what was written to it today.
//!
//! **Lock order.** The mutex of the wear is a leaf, as are those of the limiters.

use std::time::{Duration, Instant};

use kvgate_transfer::Deadline;
use kvgate_transfer::sync::Mutex;

use super::limit::{Limiter, Refused, TierLimits, Wear};
use crate::error::{Error, ErrorKind};

/// The limits of one tier at work.
pub(super) struct TierGate {
    read: Option<Limiter>,
    write: Option<Limiter>,
    wear_limit_bytes: Option<u64>,
    wear: Mutex<Wear>,
}

impl TierGate {
    pub(super) fn new(limits: TierLimits) -> TierGate {
        TierGate {
            read: limits.read.map(Limiter::new),
            write: limits.write.map(Limiter::new),
            wear_limit_bytes: limits.wear_bytes_per_day,
            wear: Mutex::new(Wear::default()),
        }
    }

    /// Waits until so many bytes may be read. `false` when that is not before the deadline, or the end comes.
    pub(super) fn pass_read(&self, bytes: u64, deadline: Deadline) -> bool {
        let limiter = self.read.as_ref();
        limiter.is_none_or(|limiter| limiter.pass(bytes, deadline).is_ok())
    }

    /// How long a read that comes now would wait.
    pub(super) fn read_wait(&self) -> Duration {
        let limiter = self.read.as_ref();
        limiter.map_or(Duration::ZERO, Limiter::wait_now)
    }

    /// Waits until so many bytes may be written.
    ///
    /// # Errors
    /// `Full` when the day has had its bytes, `Late` when the turn is not before the deadline, `Unavailable` at the end.
    pub(super) fn pass_write(&self, bytes: u64, deadline: Deadline) -> Result<(), Error> {
        if let Some(limit_bytes) = self.wear_limit_bytes {
            let today_bytes = self.wear.lock().today_bytes(Instant::now());
            if today_bytes.saturating_add(bytes) > limit_bytes {
                return Err(Error::new(ErrorKind::Full {
                    needed_bytes: bytes,
                    capacity_bytes: limit_bytes.saturating_sub(today_bytes),
                }));
            }
        }
        let passed = self.write.as_ref().map(|write| write.pass(bytes, deadline));
        let kind = match passed {
            None | Some(Ok(_)) => return Ok(()),
            Some(Err(Refused::Late)) => ErrorKind::Late {
                deadline_ms: deadline.allowed_ms(),
            },
            Some(Err(Refused::Closed)) => ErrorKind::Unavailable {
                store: "limit of bandwidth".to_owned(),
                reason: "the end has come".to_owned(),
            },
        };
        Err(Error::new(kind))
    }

    /// So many bytes were written.
    pub(super) fn written(&self, bytes: u64) {
        self.wear.lock().note(bytes, Instant::now());
    }

    /// Bytes written in this day, and on average in the full ones before.
    pub(super) fn wear(&self) -> (u64, Option<u64>) {
        let now = Instant::now();
        let mut wear = self.wear.lock();
        (wear.today_bytes(now), wear.mean_bytes_per_day(now))
    }

    /// Wakes whoever waits.
    pub(super) fn close(&self) {
        for limiter in [&self.read, &self.write].into_iter().flatten() {
            limiter.close();
        }
    }
}
