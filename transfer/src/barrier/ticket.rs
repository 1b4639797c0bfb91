//! Answers about tickets and gates.

use std::fmt;

use crate::{
    error::Cause,
    ids::{Epoch, StageId, TicketId},
    visibility::Visibility,
};

/// What a redemption did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a repeat counts for nothing"]
pub enum Redeemed {
    /// The chunk has landed now; its stage misses others.
    First,
    /// The chunk has landed now, and its stage misses no other.
    Last,
    /// The chunk had landed before: counted as a duplicate, not applied.
    Duplicate,
}

/// The state of one gate.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "only Ready allows reading"]
pub enum StageState {
    /// The barrier has not been armed: closed.
    NotArmed,
    /// Chunks have not landed.
    Pending {
        /// How many.
        missing: u32,
    },
    /// Every chunk is visible to the thread that got this answer.
    Ready,
    /// It will never open.
    Failed(Cause),
}

/// Why a gate did not open, or a ticket was not redeemed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BarrierError {
    /// The barrier has not been armed.
    NotArmed,
    /// It was armed before.
    AlreadyArmed,
    /// The ticket is of another epoch. Counted.
    Stale {
        /// The epoch of the ticket.
        found: Epoch,
        /// The epoch of the barrier.
        expected: Epoch,
    },
    /// The plan has no such chunk. Counted.
    UnknownChunk(TicketId),
    /// The plan has no such stage.
    UnknownStage(StageId),
    /// The bytes are not visible at the reader: this level opens nothing. Counted as unknown.
    NotVisible(Visibility),
    /// The flight failed.
    Failed(Cause),
    /// The caller's time is over; the gate is as it was.
    TimedOut {
        /// The length of the caller's deadline.
        deadline_ms: u64,
    },
}

impl fmt::Display for BarrierError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotArmed => f.write_str("the barrier is not armed"),
            Self::AlreadyArmed => f.write_str("the barrier is armed already"),
            Self::Stale { found, expected } => {
                write!(f, "ticket of {found:?}, the barrier is of {expected:?}")
            }
            Self::UnknownChunk(t) => write!(f, "the plan has no {:?} in {:?}", t.chunk, t.stage),
            Self::UnknownStage(stage) => write!(f, "the plan has no {stage:?}"),
            Self::NotVisible(level) => write!(f, "a completion of level {level:?} opens nothing"),
            Self::Failed(cause) => write!(f, "the flight failed: {cause}"),
            Self::TimedOut { deadline_ms } => write!(f, "not ready within {deadline_ms} ms"),
        }
    }
}

impl std::error::Error for BarrierError {}

/// Completions that were counted and not applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LateCounts {
    /// Of another epoch.
    pub stale: u64,
    /// Of a chunk that had landed.
    pub duplicate: u64,
    /// Of a chunk outside the plan, of a level that opens nothing, or before arming.
    pub unknown: u64,
}
