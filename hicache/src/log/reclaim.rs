//! What stays when the oldest segment goes.

use crate::record::RecordId;

/// A record of a segment that is about to go.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// The record.
    pub id: RecordId,
    /// Its length.
    pub record_bytes: u64,
    /// Reads since it was written or kept, at most 255.
    pub hits: u8,
    /// Whether the block before it is there, or there is none before it. A block without it cannot be
    /// reached any more.
    pub is_reachable: bool,
}

/// Which records are written again when the oldest segment goes. Half a segment is kept at most, whatever
/// the policy says, so that something always goes.
pub trait Reclaim: Send + Sync {
    /// Whether to keep this record.
    fn keeps(&self, candidate: &Candidate) -> bool;
}

/// Nothing is kept: first in, first out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Oldest;

impl Reclaim for Oldest {
    fn keeps(&self, _candidate: &Candidate) -> bool {
        false
    }
}

/// What was read since it was written is kept once more, if it can still be reached. A scan that reads
/// nothing twice pushes out only itself.
#[derive(Clone, Copy, Debug)]
pub struct SecondChance {
    /// Reads that a record needs to be kept.
    pub hits: u8,
}

impl Default for SecondChance {
    fn default() -> SecondChance {
        SecondChance { hits: 1 }
    }
}

impl Reclaim for SecondChance {
    fn keeps(&self, candidate: &Candidate) -> bool {
        candidate.is_reachable && candidate.hits >= self.hits
    }
}
