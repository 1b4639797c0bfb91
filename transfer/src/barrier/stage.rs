//! One gate: a bitmap of the chunks that have landed and a counter of those that are missing.
//!
//! `seen` makes a repeat harmless: only the redemption that sets a bit decrements `remaining`.
//! `remaining` holds the count in its low bits and two flags above them. A gate is open when the whole
//! word is zero: nothing missing, armed, not poisoned.
//!
//! **Memory order.** A redemption is `fetch_or` then `fetch_sub`, both AcqRel. The decrements of one
//! stage (and the flag changes, which are read-modify-writes too) form one release sequence, so whoever
//! reads 0 with Acquire synchronises with *every* redemption of the stage, and sees the bytes that were
//! written before each of them.

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Set by a failure, never cleared.
const POISON: u32 = 1 << 31;
/// Set from construction until the barrier is armed.
const UNARMED: u32 = 1 << 30;
const COUNT: u32 = UNARMED - 1;

/// What the word of a gate says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Gate {
    Unarmed,
    Poisoned,
    Missing(u32),
    Open,
}

/// What a redemption did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Counted {
    /// The chunk had landed before.
    Repeat,
    /// The chunk is counted, others are missing.
    First,
    /// The chunk is counted, and it was the last one.
    Last,
}

#[derive(Debug)]
pub(super) struct Stage {
    /// Bit c % 64 of word c / 64 is set once chunk c has been counted.
    seen: Vec<AtomicU64>,
    /// Chunks still missing, and the two flags.
    remaining: AtomicU32,
}

impl Stage {
    pub(super) fn new(chunk_count: u32) -> Self {
        debug_assert!(chunk_count <= COUNT);
        let words = chunk_count.div_ceil(64);
        Self {
            seen: (0..words).map(|_| AtomicU64::new(0)).collect(),
            remaining: AtomicU32::new(UNARMED | chunk_count),
        }
    }

    /// Opens the gate for counting; `false` when it was armed before.
    pub(super) fn arm(&self) -> bool {
        self.remaining.fetch_and(!UNARMED, Ordering::AcqRel) & UNARMED != 0
    }

    pub(super) fn poison(&self) {
        self.remaining.fetch_or(POISON, Ordering::AcqRel);
    }

    pub(super) fn gate(&self) -> Gate {
        let word = self.remaining.load(Ordering::Acquire);
        if word == 0 {
            Gate::Open
        } else if word & POISON != 0 {
            Gate::Poisoned
        } else if word & UNARMED != 0 {
            Gate::Unarmed
        } else {
            Gate::Missing(word & COUNT)
        }
    }

    /// Chunks that have not landed, whatever the flags say.
    pub(super) fn missing(&self) -> u32 {
        self.remaining.load(Ordering::Acquire) & COUNT
    }

    /// Whether it was armed; a failed stage still counts what lands.
    pub(super) fn is_armed(&self) -> bool {
        self.remaining.load(Ordering::Acquire) & UNARMED == 0
    }

    /// Counts chunk `chunk`, which the caller knows to be in the plan.
    pub(super) fn count(&self, chunk: u16) -> Counted {
        let bit = 1u64 << (chunk % 64);
        if self.seen[usize::from(chunk / 64)].fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            return Counted::Repeat;
        }
        match self.remaining.fetch_sub(1, Ordering::AcqRel) & COUNT {
            1 => Counted::Last,
            _ => Counted::First,
        }
    }

    pub(super) fn landed(&self) -> Vec<u64> {
        self.seen
            .iter()
            .map(|word| word.load(Ordering::Acquire))
            .collect()
    }
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_opens_only_armed_complete_and_unpoisoned() {
        let stage = Stage::new(2);
        assert_eq!(stage.gate(), Gate::Unarmed);
        assert!(stage.arm());
        assert!(!stage.arm(), "only once");
        assert_eq!(stage.count(1), Counted::First);
        assert_eq!(stage.count(1), Counted::Repeat);
        assert_eq!(stage.gate(), Gate::Missing(1));
        assert_eq!(stage.count(0), Counted::Last);
        assert_eq!(stage.gate(), Gate::Open);
        stage.poison();
        assert_eq!(stage.gate(), Gate::Poisoned);
        assert_eq!(stage.missing(), 0);
    }

    #[test]
    fn more_chunks_than_one_word_holds() {
        let stage = Stage::new(259);
        assert!(stage.arm());
        for chunk in (1..259).rev() {
            assert_eq!(stage.count(chunk), Counted::First);
        }
        assert_eq!(
            stage.landed(),
            [u64::MAX - 1, u64::MAX, u64::MAX, u64::MAX, 7]
        );
        assert_eq!(stage.gate(), Gate::Missing(1));
        assert_eq!(stage.count(0), Counted::Last);
        assert_eq!(stage.gate(), Gate::Open);
    }
}
