//! The life of one slot in one atomic word: generation 32 bits, phase 4, writers 12, readers 16.
//!
//! `Free(g) → Reserved(g, r) → InFlight(g, n, r) → Ready(g, r) → Draining(g, n, r) → Free(g + 1)`.
//! Writers are processes that may still write the slot; readers are leases, among them the ones
//! that posted operations hold. A slot never leaves `Draining` by time: only the allocator frees it,
//! against the proof that generation g is over (I-9).
//!
//! **What is protected by what.** The word is the only shared state; every transition is one
//! compare-and-swap, so of two racing transitions one sees the other's result (I-10).
//! **Memory order.** A successful transition is AcqRel: whoever reserves generation g + 1 is ordered
//! after everyone who gave up a count of generation g.

use std::fmt;

use kvgate_transfer::sync::{AtomicU64, Ordering};

const PHASE_SHIFT: u32 = 28;
const WRITERS_SHIFT: u32 = 16;
const PHASE_MASK: u64 = 0xf;
const WRITERS_MASK: u64 = 0xfff;
const READERS_MASK: u64 = 0xffff;

/// Most writers that one slot can expect.
pub const WRITERS_MAX: u16 = WRITERS_MASK as u16;
/// Most leases that one slot can have.
pub const READERS_MAX: u16 = READERS_MASK as u16;

/// Where a slot stands in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Phase {
    /// In the free list.
    Free = 0,
    /// Owned by a write lease that fills it from this process.
    Reserved = 1,
    /// Promised to writers elsewhere.
    InFlight = 2,
    /// Complete and immutable but for its append right.
    Ready = 3,
    /// Over for new leases; somebody may still touch it.
    Draining = 4,
    /// Its generations are used up. Never handed out again.
    Retired = 5,
}

const PHASES: [Phase; 6] = [
    Phase::Free,
    Phase::Reserved,
    Phase::InFlight,
    Phase::Ready,
    Phase::Draining,
    Phase::Retired,
];

/// One moment of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotState {
    /// The tenancy.
    pub generation: u32,
    /// Where it stands.
    pub phase: Phase,
    /// Writers that are not quiet.
    pub writers: u16,
    /// Leases.
    pub readers: u16,
}

impl fmt::Display for SlotState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SlotState {
            generation,
            phase,
            writers,
            readers,
        } = self;
        write!(
            f,
            "{phase:?}({generation}, {writers} writers, {readers} readers)"
        )
    }
}

/// A transition that the state does not allow. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlotFault {
    /// The caller speaks of another tenancy.
    OtherGeneration {
        /// The caller's.
        expected: u32,
        /// The slot's.
        found: u32,
    },
    /// The phase does not allow it.
    WrongPhase(SlotState),
    /// A count is full. An error, never a wrap.
    CountFull(SlotState),
    /// A count is at zero already: something was given up twice. An error, never a clamp.
    CountUnderflow(SlotState),
    /// Writers or readers are left.
    Busy(SlotState),
}

impl fmt::Display for SlotFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SlotFault::OtherGeneration { expected, found } => {
                write!(f, "generation {expected} is over, the slot is at {found}")
            }
            SlotFault::WrongPhase(state) => write!(f, "not possible in {state}"),
            SlotFault::CountFull(state) => write!(f, "count full in {state}"),
            SlotFault::CountUnderflow(state) => write!(f, "given up twice in {state}"),
            SlotFault::Busy(state) => write!(f, "still in use: {state}"),
        }
    }
}

/// The state word of one slot.
#[derive(Debug)]
pub struct Slot(AtomicU64);

impl Slot {
    /// A free slot at that generation.
    pub fn new(generation: u32) -> Slot {
        let state = SlotState {
            generation,
            phase: Phase::Free,
            writers: 0,
            readers: 0,
        };
        Slot(AtomicU64::new(pack(state)))
    }

    /// The state now.
    pub fn state(&self) -> SlotState {
        unpack(self.0.load(Ordering::Acquire))
    }

    /// `Free(g) → Reserved(g)`; answers g.
    ///
    /// # Errors
    /// `WrongPhase` unless free.
    pub fn reserve(&self) -> Result<u32, SlotFault> {
        let before = self.transition(|state| match state.phase {
            Phase::Free => Ok(SlotState {
                phase: Phase::Reserved,
                ..state
            }),
            _ => Err(SlotFault::WrongPhase(state)),
        })?;
        Ok(before.generation)
    }

    /// `Reserved(g) → Free(g)`: the reservation was not completed and nobody has seen the slot.
    ///
    /// # Errors
    /// `OtherGeneration`, `WrongPhase`, `Busy`.
    pub fn unreserve(&self, generation: u32) -> Result<(), SlotFault> {
        self.change(generation, |state| match state.phase {
            Phase::Reserved if state.readers == 0 => Ok(SlotState {
                phase: Phase::Free,
                ..state
            }),
            Phase::Reserved => Err(SlotFault::Busy(state)),
            _ => Err(SlotFault::WrongPhase(state)),
        })
    }

    /// `Reserved(g, r) → InFlight(g, n, r)`: from now on `writers` processes may write it.
    ///
    /// # Errors
    /// `OtherGeneration`, `WrongPhase`, `CountFull`.
    pub fn expect_writers(&self, generation: u32, writers: u16) -> Result<(), SlotFault> {
        self.change(generation, |state| match state.phase {
            Phase::Reserved if writers > WRITERS_MAX => Err(SlotFault::CountFull(state)),
            Phase::Reserved => Ok(SlotState {
                phase: Phase::InFlight,
                writers,
                ..state
            }),
            _ => Err(SlotFault::WrongPhase(state)),
        })
    }

    /// `InFlight(g, n, r) → Reserved(g, r)`: the promise was not completed and nobody was told of it.
    ///
    /// # Errors
    /// `OtherGeneration`, `WrongPhase`.
    pub fn unexpect_writers(&self, generation: u32) -> Result<(), SlotFault> {
        self.change(generation, |state| match state.phase {
            Phase::InFlight => Ok(SlotState {
                phase: Phase::Reserved,
                writers: 0,
                ..state
            }),
            _ => Err(SlotFault::WrongPhase(state)),
        })
    }

    /// One expected writer is quiet; the phase stays.
    ///
    /// # Errors
    /// `OtherGeneration`, `WrongPhase`, `CountUnderflow`.
    pub fn writer_quiet(&self, generation: u32) -> Result<(), SlotFault> {
        self.change(generation, |state| match state.phase {
            Phase::InFlight | Phase::Draining if state.writers == 0 => {
                Err(SlotFault::CountUnderflow(state))
            }
            Phase::InFlight | Phase::Draining => Ok(SlotState {
                writers: state.writers - 1,
                ..state
            }),
            _ => Err(SlotFault::WrongPhase(state)),
        })
    }

    /// Every expected writer is quiet; the phase stays.
    ///
    /// # Errors
    /// `OtherGeneration`, `WrongPhase`.
    pub fn all_writers_quiet(&self, generation: u32) -> Result<(), SlotFault> {
        self.change(generation, |state| match state.phase {
            Phase::InFlight | Phase::Draining | Phase::Ready => Ok(SlotState {
                writers: 0,
                ..state
            }),
            _ => Err(SlotFault::WrongPhase(state)),
        })
    }

    /// `Reserved(g, r)` or `InFlight(g, 0, r) → Ready(g, r)`.
    ///
    /// # Errors
    /// `OtherGeneration`, `WrongPhase`, `Busy` while writers are left.
    pub fn seal(&self, generation: u32) -> Result<(), SlotFault> {
        self.change(generation, |state| match state.phase {
            Phase::Reserved | Phase::InFlight if state.writers == 0 => Ok(SlotState {
                phase: Phase::Ready,
                ..state
            }),
            Phase::InFlight => Err(SlotFault::Busy(state)),
            _ => Err(SlotFault::WrongPhase(state)),
        })
    }

    /// One lease more. Not possible once the slot is draining.
    ///
    /// # Errors
    /// `OtherGeneration`, `WrongPhase`, `CountFull`.
    pub fn acquire_reader(&self, generation: u32) -> Result<(), SlotFault> {
        self.change(generation, |state| match state.phase {
            Phase::Reserved | Phase::InFlight | Phase::Ready if state.readers == READERS_MAX => {
                Err(SlotFault::CountFull(state))
            }
            Phase::Reserved | Phase::InFlight | Phase::Ready => Ok(SlotState {
                readers: state.readers + 1,
                ..state
            }),
            _ => Err(SlotFault::WrongPhase(state)),
        })
    }

    /// One lease less.
    ///
    /// # Errors
    /// `OtherGeneration`, `WrongPhase`, `CountUnderflow`.
    pub fn release_reader(&self, generation: u32) -> Result<(), SlotFault> {
        self.change(generation, |state| match state.phase {
            Phase::Free | Phase::Retired => Err(SlotFault::WrongPhase(state)),
            _ if state.readers == 0 => Err(SlotFault::CountUnderflow(state)),
            _ => Ok(SlotState {
                readers: state.readers - 1,
                ..state
            }),
        })
    }

    /// The owner has ended: `Reserved`, `InFlight` or `Ready → Draining`, counts unchanged.
    ///
    /// # Errors
    /// `OtherGeneration`, `WrongPhase`.
    pub fn drain(&self, generation: u32) -> Result<(), SlotFault> {
        self.change(generation, |state| match state.phase {
            Phase::Reserved | Phase::InFlight | Phase::Ready => Ok(SlotState {
                phase: Phase::Draining,
                ..state
            }),
            _ => Err(SlotFault::WrongPhase(state)),
        })
    }

    /// `Draining(g, 0, 0) → Free(g + 1)`, or `Retired` when g was the last generation. Answers
    /// whether the slot is free. The caller holds the proof that generation g is over.
    ///
    /// # Errors
    /// `OtherGeneration`, `WrongPhase`, `Busy`.
    pub fn free(&self, generation: u32) -> Result<bool, SlotFault> {
        self.change(generation, |state| match state.phase {
            Phase::Draining if state.writers != 0 || state.readers != 0 => {
                Err(SlotFault::Busy(state))
            }
            Phase::Draining => Ok(match state.generation.checked_add(1) {
                Some(generation) => SlotState {
                    generation,
                    phase: Phase::Free,
                    ..state
                },
                None => SlotState {
                    phase: Phase::Retired,
                    ..state
                },
            }),
            _ => Err(SlotFault::WrongPhase(state)),
        })?;
        Ok(generation != u32::MAX)
    }

    fn change(
        &self,
        generation: u32,
        next: impl Fn(SlotState) -> Result<SlotState, SlotFault>,
    ) -> Result<(), SlotFault> {
        self.transition(|state| {
            if state.generation != generation {
                let found = state.generation;
                return Err(SlotFault::OtherGeneration {
                    expected: generation,
                    found,
                });
            }
            next(state)
        })?;
        Ok(())
    }

    /// Applies `next` to the current state in one step; answers the state before.
    fn transition(
        &self,
        next: impl Fn(SlotState) -> Result<SlotState, SlotFault>,
    ) -> Result<SlotState, SlotFault> {
        let mut word = self.0.load(Ordering::Acquire);
        loop {
            let before = unpack(word);
            let after = pack(next(before)?);
            match self
                .0
                .compare_exchange(word, after, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return Ok(before),
                Err(found) => word = found,
            }
        }
    }
}

fn pack(state: SlotState) -> u64 {
    u64::from(state.generation) << 32
        | (state.phase as u64) << PHASE_SHIFT
        | u64::from(state.writers) << WRITERS_SHIFT
        | u64::from(state.readers)
}

fn unpack(word: u64) -> SlotState {
    SlotState {
        generation: (word >> 32) as u32,
        phase: PHASES[(word >> PHASE_SHIFT & PHASE_MASK) as usize],
        writers: (word >> WRITERS_SHIFT & WRITERS_MASK) as u16,
        readers: (word & READERS_MASK) as u16,
    }
}

#[cfg(all(test, not(kv_loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_life() {
        let slot = Slot::new(7);
        assert_eq!(slot.reserve(), Ok(7));
        slot.expect_writers(7, 2).unwrap();
        slot.acquire_reader(7).unwrap();
        assert!(matches!(slot.seal(7), Err(SlotFault::Busy(_))));
        slot.writer_quiet(7).unwrap();
        slot.writer_quiet(7).unwrap();
        assert!(matches!(
            slot.writer_quiet(7),
            Err(SlotFault::CountUnderflow(_))
        ));
        slot.seal(7).unwrap();
        slot.drain(7).unwrap();
        assert!(matches!(
            slot.acquire_reader(7),
            Err(SlotFault::WrongPhase(_))
        ));
        assert!(matches!(slot.free(7), Err(SlotFault::Busy(_))));
        slot.release_reader(7).unwrap();
        assert!(matches!(
            slot.release_reader(7),
            Err(SlotFault::CountUnderflow(_))
        ));
        assert_eq!(slot.free(7), Ok(true));
        let expected = SlotState {
            generation: 8,
            phase: Phase::Free,
            writers: 0,
            readers: 0,
        };
        assert_eq!(slot.state(), expected);
    }

    #[test]
    fn an_aborted_flight_keeps_its_slot_until_its_writers_are_quiet() {
        let slot = Slot::new(0);
        slot.reserve().unwrap();
        slot.expect_writers(0, 1).unwrap();
        slot.drain(0).unwrap();
        assert!(matches!(slot.free(0), Err(SlotFault::Busy(_))));
        assert!(matches!(slot.reserve(), Err(SlotFault::WrongPhase(_))));
        slot.writer_quiet(0).unwrap();
        assert_eq!(slot.free(0), Ok(true));
    }

    #[test]
    fn other_generations_have_no_effect() {
        let slot = Slot::new(4);
        slot.reserve().unwrap();
        let fault = Err(SlotFault::OtherGeneration {
            expected: 3,
            found: 4,
        });
        assert_eq!(slot.drain(3), fault);
        assert_eq!(slot.acquire_reader(3), fault);
        assert_eq!(slot.seal(3), fault);
    }

    #[test]
    fn the_last_generation_retires() {
        let slot = Slot::new(u32::MAX);
        slot.reserve().unwrap();
        slot.drain(u32::MAX).unwrap();
        assert_eq!(slot.free(u32::MAX), Ok(false));
        assert_eq!(slot.state().phase, Phase::Retired);
        assert!(slot.reserve().is_err());
    }

    #[test]
    fn a_full_count_is_an_error() {
        let slot = Slot::new(0);
        slot.reserve().unwrap();
        assert!(matches!(
            slot.expect_writers(0, WRITERS_MAX + 1),
            Err(SlotFault::CountFull(_))
        ));
        for _ in 0..READERS_MAX {
            slot.acquire_reader(0).unwrap();
        }
        assert!(matches!(
            slot.acquire_reader(0),
            Err(SlotFault::CountFull(_))
        ));
        assert_eq!(slot.state().readers, READERS_MAX);
    }
}
