//! One ownership of slots, shared by everything that counts on it: the owner, leases, posted
//! operations.

use std::fmt;

use kvgate_transfer::sync::{Arc, Mutex};
use kvgate_transfer::{
    Barrier, BarrierError, Deadline, Draining, Epoch, FlightLedger, Outstanding,
};

use crate::block_table::BlockTable;
use crate::error::{Error, ErrorKind};
use crate::ids::{LayerId, PageId, Room};
use crate::lease::stage_of;
use crate::page::Slot;
use crate::pool::PoolInner;
use crate::pool::drain::{Kept, Parked};
use crate::prefix::hold::Hold;
use crate::schema::{PAGE_TOKENS, Space};

/// What of a tenancy is still its own. The mutex is a leaf.
#[derive(Default)]
struct Ownership {
    has_ended: bool,
    /// Slots that went to the prefix tree: not drained with the rest. Each with an access on
    /// the tree's ledger of that slot, which so waits for the readers of this tenancy too.
    handed_over: Vec<((Space, PageId), Outstanding)>,
    /// Keeps the shared pages until this tenancy is proven quiet.
    shared: Vec<Hold>,
}

/// What a tenancy has of a prefix of the tree: the first pages of its table, for reading.
#[derive(Default)]
pub(crate) struct Shared {
    /// Keeps them.
    pub(crate) holds: Vec<Hold>,
    /// Gates of flights that still fill some of them.
    pub(crate) gates: Vec<Arc<Barrier>>,
}

/// The slots of one owner from reservation to draining.
pub(crate) struct Tenancy {
    pub(crate) pools: Arc<PoolInner>,
    pub(crate) table: BlockTable,
    pub(crate) room: Room,
    /// Readers and posted operations of this process. Its epoch is the number of the tenancy.
    pub(crate) ledger: Arc<FlightLedger>,
    /// Pages at the start of the table that belong to the prefix tree; read only (I-19).
    shared_pages: u32,
    gates: Vec<Arc<Barrier>>,
    ownership: Mutex<Ownership>,
}

impl Tenancy {
    pub(crate) fn new(
        pools: &Arc<PoolInner>,
        table: BlockTable,
        room: Room,
        epoch: Epoch,
        shared: Shared,
    ) -> Arc<Tenancy> {
        let shared_pages = shared.holds.len() as u32;
        let ownership = Ownership {
            shared: shared.holds,
            ..Ownership::default()
        };
        Arc::new(Tenancy {
            pools: pools.clone(),
            table,
            room,
            ledger: FlightLedger::new(epoch),
            shared_pages,
            gates: shared.gates,
            ownership: Mutex::new(ownership),
        })
    }

    /// Tokens of the shared pages at the start.
    pub(crate) fn shared_tokens(&self) -> u32 {
        self.shared_pages * PAGE_TOKENS
    }

    /// The slots of the table without the shared pages: those that this tenancy ends.
    pub(crate) fn own_slots(&self) -> impl Iterator<Item = (Space, PageId)> + Clone {
        // Page slots come first in a table.
        self.table.iter().skip(self.shared_pages as usize)
    }

    /// Blocks until the layer has landed in every shared page.
    ///
    /// # Errors
    /// `Gate` when a flight that fills one of them failed, or at the deadline.
    pub(crate) fn wait_shared(&self, layer: LayerId, deadline: Deadline) -> Result<(), Error> {
        wait_gates(&self.gates, layer, deadline)
    }

    /// Number of this tenancy; never used twice by its pools.
    pub(crate) fn number(&self) -> Epoch {
        self.ledger.epoch()
    }

    /// Drains every slot that is still owned here and packs what must be proven.
    pub(crate) fn end(&self, flight: Option<Draining>) -> Parked {
        let (handed_over, shared) = {
            let mut ownership = self.ownership.lock();
            ownership.has_ended = true;
            let ownership = &mut *ownership;
            (
                std::mem::take(&mut ownership.handed_over),
                std::mem::take(&mut ownership.shared),
            )
        };
        let is_ours = |slot: &(Space, PageId)| !handed_over.iter().any(|(gone, _)| gone == slot);
        let slots: Vec<(Space, PageId)> = self.own_slots().filter(is_ours).collect();
        for &(space, id) in &slots {
            let drained = self.slot(space, id).drain(id.generation);
            debug_assert!(
                drained.is_ok(),
                "I-10: {space} slot {id} was ended twice: {drained:?}"
            );
        }
        let handed_over = handed_over.into_iter();
        let kept = handed_over
            .map(|(_, access)| Kept::HandedOver(access))
            .chain(shared.into_iter().map(Kept::Shared));
        Parked::new(slots, self.ledger.clone(), flight).holding(kept.collect())
    }

    /// Whether the owner has ended it.
    pub(crate) fn has_ended(&self) -> bool {
        self.ownership.lock().has_ended
    }

    /// Gives the ownership of slots away that are written whole, of all or of none; `ledger` is that of the
    /// new owner. `false`, with nothing given away, when the tenancy has ended or does not own one of them.
    pub(crate) fn hand_over(&self, slots: &[(Space, PageId)], ledger: &Arc<FlightLedger>) -> bool {
        let mut ownership = self.ownership.lock();
        if ownership.has_ended {
            return false;
        }
        let is_gone = |slot: &_| ownership.handed_over.iter().any(|(gone, _)| gone == slot);
        let is_ours = |slot: &_| self.own_slots().any(|own| own == *slot) && !is_gone(slot);
        if !slots.iter().all(is_ours) {
            return false;
        }
        let accesses = slots.iter().map(|_| FlightLedger::begin(ledger));
        let Ok(accesses) = accesses.collect::<Result<Vec<_>, _>>() else {
            return false;
        };
        let seal = |&(space, id): &(Space, PageId)| {
            let slot = self.slot(space, id);
            // Writers elsewhere are over: everything has landed. A slot that this process wrote has none.
            let _no_writers = slot.all_writers_quiet(id.generation);
            slot.seal(id.generation).is_ok()
        };
        // A slot that is sealed before one that is not stays ours, and ends with the rest.
        if !slots.iter().all(seal) {
            return false;
        }
        let given = slots.iter().copied().zip(accesses);
        ownership.handed_over.extend(given);
        true
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

/// Waits at every gate for one layer.
pub(crate) fn wait_gates(
    gates: &[Arc<Barrier>],
    layer: LayerId,
    deadline: Deadline,
) -> Result<(), Error> {
    let failed = |error: BarrierError| ErrorKind::Gate { layer, error };
    for gate in gates {
        gate.wait(stage_of(layer), deadline).map_err(failed)?;
    }
    Ok(())
}

/// A reader count on every slot that a tenancy owns. The slots stay while it lives; the shared pages
/// are kept by the tenancy itself, whose ledger is not quiet before.
pub(crate) struct Pin {
    pub(crate) tenancy: Arc<Tenancy>,
    /// The slots that it counts on. Those that went to the tree before are kept as the shared ones are.
    slots: Vec<(Space, PageId)>,
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
        // Held until they are counted: a slot that goes to the tree meanwhile might drain before.
        let ownership = tenancy.ownership.lock();
        let is_gone =
            |slot: &(Space, PageId)| ownership.handed_over.iter().any(|(gone, _)| gone == slot);
        let slots: Vec<_> = tenancy.own_slots().filter(|slot| !is_gone(slot)).collect();
        let counted = slots.iter().copied();
        let allocator = &tenancy.pools.allocator;
        allocator.each(counted, Slot::acquire_reader, Slot::release_reader)?;
        drop(ownership);
        Ok(Pin {
            tenancy: tenancy.clone(),
            slots,
            _outstanding: outstanding,
        })
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        for &(space, id) in &self.slots {
            let released = self.tenancy.slot(space, id).release_reader(id.generation);
            debug_assert!(released.is_ok(), "I-10: {space} slot {id}: {released:?}");
        }
    }
}
