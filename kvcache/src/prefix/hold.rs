//! [`Hold`]: one slot of the prefix tree that somebody keeps.

use kvgate_transfer::sync::Arc;
use kvgate_transfer::{FlightLedger, Outstanding};

use crate::error::Error;
use crate::ids::PageId;
use crate::pool::allocator::{Allocator, slot_error};
use crate::schema::Space;

/// A reader count on one slot, and an access on the ledger of its owner.
///
/// It is given up with [`Hold::release`]: whoever keeps it knows the allocator, and a hold that lay in
/// the pools with a way to them would keep the pools for ever. Dropped without, it keeps its slot.
#[must_use = "the slot is kept until it is released"]
pub(crate) struct Hold {
    space: Space,
    id: PageId,
    /// Given up after the reader count.
    _outstanding: Outstanding,
}

impl Hold {
    /// # Errors
    /// `Transfer` once the owner has ended; `Slot` when the slot drains or a count is full.
    pub(crate) fn new(
        allocator: &Allocator,
        space: Space,
        id: PageId,
        ledger: &Arc<FlightLedger>,
    ) -> Result<Hold, Error> {
        let outstanding = FlightLedger::begin(ledger)?;
        let slot = allocator.slot(space, id);
        slot.acquire_reader(id.generation)
            .map_err(|fault| slot_error(space, id.index, fault))?;
        Ok(Hold {
            space,
            id,
            _outstanding: outstanding,
        })
    }

    pub(crate) fn id(&self) -> PageId {
        self.id
    }

    pub(crate) fn release(self, allocator: &Allocator) {
        let slot = allocator.slot(self.space, self.id);
        let released = slot.release_reader(self.id.generation);
        debug_assert!(
            released.is_ok(),
            "I-10: {} slot {}: {released:?}",
            self.space,
            self.id
        );
    }
}
