//! Free lists and slots of the three spaces.
//!
//! **What is protected by what.** `free` guards the three free lists; a slot changes between free and
//! owned only with it held, so a list and the phases agree whenever it is held. All other
//! transitions of a slot need no lock.
//! **Lock order.** `free` is a leaf.

use kvgate_transfer::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

use crate::error::{Error, ErrorKind};
use crate::ids::PageId;
use crate::page::{Phase, Slot, SlotFault};
use crate::pool::SpaceStats;
use crate::schema::{SlotCounts, Space};

pub(crate) struct Allocator {
    spaces: [SpaceSlots; Space::COUNT],
    free: Mutex<[Vec<u32>; Space::COUNT]>,
}

struct SpaceSlots {
    /// Index 0 is the null page: it stands in no list.
    slots: Vec<Slot>,
    reuses: AtomicU64,
    retired: AtomicU32,
}

impl Allocator {
    /// All slots free at `first_generation`.
    pub(crate) fn new(capacity: SlotCounts, first_generation: u32) -> Allocator {
        let space = |space: Space| SpaceSlots {
            slots: (0..=capacity.of(space))
                .map(|_| Slot::new(first_generation))
                .collect(),
            reuses: AtomicU64::new(0),
            retired: AtomicU32::new(0),
        };
        // Taken from the end: the lowest number first, so that fresh tables are runs.
        let list = |space: Space| (1..=capacity.of(space)).rev().collect();
        Allocator {
            spaces: Space::ALL.map(space),
            free: Mutex::new(Space::ALL.map(list)),
        }
    }

    /// Takes the slots of all spaces, or none (I-24).
    ///
    /// # Errors
    /// `NeverFits`, `Exhausted`; then no slot has changed.
    pub(crate) fn reserve(&self, counts: SlotCounts) -> Result<[Vec<PageId>; Space::COUNT], Error> {
        let mut free = self.free.lock();
        for space in Space::ALL {
            let asked = counts.of(space);
            let capacity = self.usable(space);
            let available = free[space.index()].len() as u32;
            if asked > capacity {
                return Err(ErrorKind::NeverFits {
                    space,
                    asked,
                    capacity,
                }
                .into());
            }
            if asked > available {
                let kind = ErrorKind::Exhausted {
                    space,
                    asked,
                    free: available,
                    capacity,
                };
                return Err(kind.into());
            }
        }
        let mut taken: [Vec<PageId>; Space::COUNT] = Default::default();
        for space in Space::ALL {
            for _ in 0..counts.of(space) {
                match self.take(space, &mut free) {
                    Ok(id) => taken[space.index()].push(id),
                    Err(error) => {
                        self.put_back(&taken, &mut free);
                        return Err(error);
                    }
                }
            }
        }
        Ok(taken)
    }

    fn take(&self, space: Space, free: &mut [Vec<u32>; Space::COUNT]) -> Result<PageId, Error> {
        let slots = &self.spaces[space.index()];
        let capacity = self.usable(space);
        let list = &mut free[space.index()];
        let index = list.pop().ok_or(ErrorKind::Exhausted {
            space,
            asked: 1,
            free: 0,
            capacity,
        })?;
        let generation = slots.slots[index as usize]
            .reserve()
            .map_err(|fault| slot_error(space, index, fault))?;
        if generation > 0 {
            slots.reuses.fetch_add(1, Ordering::Relaxed);
        }
        Ok(PageId { index, generation })
    }

    fn put_back(&self, taken: &[Vec<PageId>; Space::COUNT], free: &mut [Vec<u32>; Space::COUNT]) {
        for space in Space::ALL {
            for id in taken[space.index()].iter().rev() {
                if self.slot(space, *id).unreserve(id.generation).is_ok() {
                    free[space.index()].push(id.index);
                }
            }
        }
    }

    /// Ends the life of slots whose generation is proven over (I-9). Answers those that somebody
    /// still counts on.
    pub(crate) fn free(&self, slots: &[(Space, PageId)]) -> Vec<(Space, PageId)> {
        let mut free = self.free.lock();
        let mut busy = Vec::new();
        // Backwards, so that a table's slots come out in order again.
        for &(space, id) in slots.iter().rev() {
            let slot = self.slot(space, id);
            // A ready slot has no writers; for the others the proof covers them.
            let _already_quiet = slot.all_writers_quiet(id.generation);
            match slot.free(id.generation) {
                Ok(true) => free[space.index()].push(id.index),
                Ok(false) => {
                    self.spaces[space.index()]
                        .retired
                        .fetch_add(1, Ordering::Relaxed);
                }
                Err(_) => busy.push((space, id)),
            }
        }
        busy
    }

    /// The slot of an id, whatever its generation.
    pub(crate) fn slot(&self, space: Space, id: PageId) -> &Slot {
        &self.spaces[space.index()].slots[id.index as usize]
    }

    /// Applies one transition to every slot; on a fault the ones before are undone.
    pub(crate) fn each(
        &self,
        slots: impl Iterator<Item = (Space, PageId)> + Clone,
        step: impl Fn(&Slot, u32) -> Result<(), SlotFault>,
        undo: impl Fn(&Slot, u32) -> Result<(), SlotFault>,
    ) -> Result<(), Error> {
        for (done, (space, id)) in slots.clone().enumerate() {
            let Err(fault) = step(self.slot(space, id), id.generation) else {
                continue;
            };
            for (space, id) in slots.take(done) {
                // The step was made above and nobody else undoes it.
                let _undone = undo(self.slot(space, id), id.generation);
            }
            return Err(slot_error(space, id.index, fault));
        }
        Ok(())
    }

    /// Usable slots of a space: capacity without the retired ones.
    fn usable(&self, space: Space) -> u32 {
        let slots = &self.spaces[space.index()];
        (slots.slots.len() - 1) as u32 - slots.retired.load(Ordering::Relaxed)
    }

    /// Counts by phase, in one consistent moment between free and owned.
    pub(crate) fn stats(&self, space: Space) -> SpaceStats {
        let free = self.free.lock();
        let slots = &self.spaces[space.index()];
        let mut stats = SpaceStats {
            free: free[space.index()].len() as u32,
            capacity: (slots.slots.len() - 1) as u32,
            reuses: slots.reuses.load(Ordering::Relaxed),
            ..SpaceStats::default()
        };
        for slot in &slots.slots[1..] {
            match slot.state().phase {
                Phase::Free => {}
                Phase::Reserved | Phase::InFlight | Phase::Ready => stats.owned += 1,
                Phase::Draining => stats.draining += 1,
                Phase::Retired => stats.retired += 1,
            }
        }
        stats
    }
}

pub(crate) fn slot_error(space: Space, index: u32, fault: SlotFault) -> Error {
    ErrorKind::Slot {
        space,
        index,
        fault,
    }
    .into()
}
