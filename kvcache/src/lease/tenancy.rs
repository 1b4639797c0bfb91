//! One ownership of slots, shared by everything that counts on it: the owner, leases, posted
//! operations.

use std::fmt;

use kvgate_transfer::sync::{Arc, Mutex};
use kvgate_transfer::{Draining, Epoch, FlightLedger, Outstanding};

use crate::block_table::BlockTable;
use crate::error::Error;
use crate::ids::{PageId, Room};
use crate::page::Slot;
use crate::pool::PoolInner;
use crate::pool::drain::Parked;
use crate::schema::Space;

/// What of a tenancy is still its own. The mutex is a leaf.
#[derive(Default)]
struct Ownership {
    has_ended: bool,
    /// Page slots that went to the prefix tree: not drained with the rest. Each with an access on
    /// the tree's ledger of that page, which so waits for the readers of this tenancy too.
    handed_over: Vec<(PageId, Outstanding)>,
}

/// The slots of one owner from reservation to draining.
pub(crate) struct Tenancy {
    pub(crate) pools: Arc<PoolInner>,
    pub(crate) table: BlockTable,
    pub(crate) room: Room,
    /// Readers and posted operations of this process. Its epoch is the number of the tenancy.
    pub(crate) ledger: Arc<FlightLedger>,
    ownership: Mutex<Ownership>,
}

impl Tenancy {
    pub(crate) fn new(
        pools: &Arc<PoolInner>,
        table: BlockTable,
        room: Room,
        epoch: Epoch,
    ) -> Arc<Tenancy> {
        Arc::new(Tenancy {
            pools: pools.clone(),
            table,
            room,
            ledger: FlightLedger::new(epoch),
            ownership: Mutex::new(Ownership::default()),
        })
    }

    /// Number of this tenancy; never used twice by its pools.
    pub(crate) fn number(&self) -> Epoch {
        self.ledger.epoch()
    }

    /// Drains every slot that is still owned here and packs what must be proven.
    pub(crate) fn end(&self, flight: Option<Draining>) -> Parked {
        let handed_over = {
            let mut ownership = self.ownership.lock();
            ownership.has_ended = true;
            std::mem::take(&mut ownership.handed_over)
        };
        let is_ours = |(space, id): &(Space, PageId)| {
            *space != Space::Page || !handed_over.iter().any(|(page, _)| page == id)
        };
        let slots: Vec<(Space, PageId)> = self.table.iter().filter(is_ours).collect();
        for &(space, id) in &slots {
            let drained = self.slot(space, id).drain(id.generation);
            debug_assert!(
                drained.is_ok(),
                "I-10: {space} slot {id} was ended twice: {drained:?}"
            );
        }
        let guards = handed_over.into_iter().map(|(_, guard)| guard).collect();
        Parked::new(slots, self.ledger.clone(), flight).holding(guards)
    }

    /// Whether the owner has ended it.
    pub(crate) fn has_ended(&self) -> bool {
        self.ownership.lock().has_ended
    }

    /// Gives the ownership of a landed page slot away; `ledger` is that of the new owner. `false`,
    /// with nothing changed, when the tenancy has ended.
    pub(crate) fn hand_over(&self, page: PageId, ledger: &Arc<FlightLedger>) -> bool {
        let mut ownership = self.ownership.lock();
        if ownership.has_ended {
            return false;
        }
        let slot = self.slot(Space::Page, page);
        let sealed = slot
            .all_writers_quiet(page.generation)
            .and_then(|()| slot.seal(page.generation));
        let Ok(guard) = FlightLedger::begin(ledger) else {
            return false;
        };
        if sealed.is_ok() {
            ownership.handed_over.push((page, guard));
        }
        sealed.is_ok()
    }

    pub(crate) fn slot(&self, space: Space, id: PageId) -> &Slot {
        self.pools.allocator.slot(space, id)
    }
}

impl fmt::Debug for Tenancy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tenancy")
            .field("room", &self.room)
            .field("number", &self.number())
            .field("slot_count", &self.table.slot_count())
            .finish_non_exhaustive()
    }
}

/// A reader count on every slot of a tenancy. The slots stay while it lives.
pub(crate) struct Pin {
    pub(crate) tenancy: Arc<Tenancy>,
    /// Given up after the reader counts: the ledger is quiet only when no pin is left.
    _outstanding: Outstanding,
}

impl Pin {
    /// Counts a reader.
    ///
    /// # Errors
    /// `Transfer` once the tenancy has ended; `Slot` when a count is full.
    pub(crate) fn new(tenancy: &Arc<Tenancy>) -> Result<Pin, Error> {
        let outstanding = FlightLedger::begin(&tenancy.ledger)?;
        tenancy
            .pools
            .allocator
            .each(&tenancy.table, Slot::acquire_reader, Slot::release_reader)?;
        Ok(Pin {
            tenancy: tenancy.clone(),
            _outstanding: outstanding,
        })
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        for (space, id) in self.tenancy.table.iter() {
            let released = self.tenancy.slot(space, id).release_reader(id.generation);
            debug_assert!(released.is_ok(), "I-10: {space} slot {id}: {released:?}");
        }
    }
}
