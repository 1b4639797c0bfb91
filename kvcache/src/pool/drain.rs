//! Slots whose owner has ended and that somebody may still touch: [`DrainingFlight`] while the
//! owner waits, `Parked` once nobody does. There is no exit by time.

use std::fmt;
use std::task::{Context, Poll};

use kvgate_transfer::sync::Arc;
use kvgate_transfer::{
    Deadline, Draining, Epoch, FlightLedger, Outstanding, PeerId, Quiesced, Unquiet, WriterRank,
};

use crate::ids::PageId;
use crate::pool::PoolInner;
use crate::pool::allocator::Allocator;
use crate::prefix::hold::Hold;
use crate::schema::Space;

/// Draining slots with everything that must be proven before they are free.
pub(crate) struct Parked {
    slots: Vec<(Space, PageId)>,
    /// Readers and posted operations of this process.
    ledger: Arc<FlightLedger>,
    ledger_proof: Option<Quiesced>,
    /// Writers elsewhere, if the slots were ever promised to any.
    flight: Option<Draining>,
    flight_epoch: Option<Epoch>,
    flight_proof: Option<Quiesced>,
    is_quarantined: bool,
    /// What is kept of others, and given up when this is proven.
    kept: Vec<Kept>,
}

/// A use of a slot of another owner.
pub(crate) enum Kept {
    /// A slot that went to the prefix tree.
    HandedOver(Outstanding),
    /// A page of the prefix tree.
    Shared(Hold),
}

impl Parked {
    /// Closes `ledger`: no lease begins from now on.
    pub(crate) fn new(
        slots: Vec<(Space, PageId)>,
        ledger: Arc<FlightLedger>,
        flight: Option<Draining>,
    ) -> Parked {
        ledger.close();
        let flight_epoch = flight.as_ref().map(|flight| flight.ledger().epoch());
        Parked {
            slots,
            ledger,
            ledger_proof: None,
            flight,
            flight_epoch,
            flight_proof: None,
            is_quarantined: false,
            kept: Vec::new(),
        }
    }

    /// Keeps accesses to slots of other owners until everything here is proven.
    pub(crate) fn holding(mut self, kept: Vec<Kept>) -> Parked {
        self.kept = kept;
        self
    }

    pub(crate) fn flight_epoch(&self) -> Option<Epoch> {
        self.flight_epoch
    }

    pub(crate) fn writer_answered(&self, peer: PeerId, writer: WriterRank) -> bool {
        let flight = self.flight.as_ref();
        flight.is_some_and(|flight| flight.writer_answered(peer, writer))
    }

    /// Slots of a space whose proof may never come.
    pub(crate) fn quarantined_count(&self, space: Space) -> u32 {
        let unprovable =
            |flight: &Draining| !flight.ledger().unquiet().unprovable_writers.is_empty();
        if !self.is_quarantined && !self.flight.as_ref().is_some_and(unprovable) {
            return 0;
        }
        self.slots.iter().filter(|(of, _)| *of == space).count() as u32
    }

    /// Collects the proofs that are there; frees the slots once none is missing. Answers whether
    /// nothing is left.
    pub(crate) fn try_free(&mut self, allocator: &Allocator) -> bool {
        if self.ledger_proof.is_none() {
            self.ledger_proof = FlightLedger::poll(&self.ledger);
        }
        if let Some(flight) = &mut self.flight
            && self.flight_proof.is_none()
        {
            self.flight_proof = flight.poll();
        }
        self.free_if_proven(allocator)
    }

    /// [`Parked::try_free`] that leaves a waker where a proof is missing.
    fn poll_free(&mut self, allocator: &Allocator, cx: &mut Context<'_>) -> bool {
        if self.ledger_proof.is_none()
            && let Poll::Ready(proof) = FlightLedger::poll_quiet(&self.ledger, cx)
        {
            self.ledger_proof = Some(proof);
        }
        if let Some(flight) = &mut self.flight
            && self.flight_proof.is_none()
            && let Poll::Ready(proof) = flight.poll_quiet(cx)
        {
            self.flight_proof = Some(proof);
        }
        self.free_if_proven(allocator)
    }

    fn free_if_proven(&mut self, allocator: &Allocator) -> bool {
        let is_ours = |proof: &Quiesced| proof.is_for(&self.ledger);
        let is_local_quiet = self.ledger_proof.as_ref().is_some_and(is_ours);
        let is_flight_quiet = self.flight_epoch.is_none() || self.flight_proof.is_some();
        // Also with no slot left of its own: what it keeps of others waits for the same proof.
        if !is_local_quiet || !is_flight_quiet {
            return false;
        }
        for kept in self.kept.drain(..) {
            match kept {
                Kept::HandedOver(access) => drop(access),
                Kept::Shared(hold) => hold.release(allocator),
            }
        }
        self.slots = allocator.free(&self.slots);
        self.slots.is_empty()
    }

    /// Blocks for the proofs in turn; what comes is kept.
    fn wait(&mut self, allocator: &Allocator, deadline: Deadline) -> bool {
        if self.ledger_proof.is_none() {
            self.ledger_proof = FlightLedger::wait(&self.ledger, deadline);
        }
        if self.ledger_proof.is_some()
            && let Some(flight) = self.flight.take()
        {
            match flight.wait(deadline) {
                Ok(proof) => self.flight_proof = Some(proof),
                Err(flight) => self.flight = Some(flight),
            }
        }
        self.free_if_proven(allocator)
    }
}

/// A request that has ended while somebody may still touch its slots.
///
/// The slots are freed by [`DrainingFlight::poll`] or [`DrainingFlight::wait`] against the proof that
/// every writer and reader is over, and by nothing else. Dropped before, it is parked in the pools,
/// which free it later.
#[must_use = "the slots come back only against the proof; dropping parks them"]
pub struct DrainingFlight {
    pools: Arc<PoolInner>,
    /// `None` once freed.
    parked: Option<Parked>,
}

impl DrainingFlight {
    pub(crate) fn new(pools: Arc<PoolInner>, parked: Parked) -> DrainingFlight {
        DrainingFlight {
            pools,
            parked: Some(parked),
        }
    }

    /// `peer` has said that its operations of this flight, as `writer`, are terminal (its `AbortAck`
    /// came). `false`, and no effect, when this connection is not that writer: a restarted process
    /// cannot answer for what its former life may still write (I-14).
    pub fn writer_answered(&self, peer: PeerId, writer: WriterRank) -> bool {
        let parked = self.parked.as_ref();
        parked.is_some_and(|parked| parked.writer_answered(peer, writer))
    }

    /// Frees the slots if everything is quiet; `true` when they are free.
    pub fn poll(&mut self) -> bool {
        if let Some(parked) = &mut self.parked
            && parked.try_free(&self.pools.allocator)
        {
            self.parked = None;
        }
        self.parked.is_none()
    }

    /// [`DrainingFlight::poll`] for a task: while the slots are not free, the waker is called when a
    /// proof may be there.
    pub fn poll_free(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(parked) = &mut self.parked
            && parked.poll_free(&self.pools.allocator, cx)
        {
            self.parked = None;
        }
        match self.parked {
            None => Poll::Ready(()),
            Some(_) => Poll::Pending,
        }
    }

    /// Blocks until the slots are free.
    ///
    /// # Errors
    /// Itself, at the deadline; nothing but the wait is over.
    // Guards of the model checker are larger than those they stand for.
    #[cfg_attr(kv_loom, allow(clippy::result_large_err))]
    pub fn wait(mut self, deadline: Deadline) -> Result<(), DrainingFlight> {
        if let Some(parked) = &mut self.parked
            && parked.wait(&self.pools.allocator, deadline)
        {
            self.parked = None;
        }
        if self.parked.is_none() {
            Ok(())
        } else {
            Err(self)
        }
    }

    /// Frees the slots against a proof that the caller holds: of the ledger that
    /// [`DrainingFlight::ledger`] names.
    ///
    /// ```
    /// use kvgate_kvcache::DrainingFlight;
    /// fn give_back(flight: DrainingFlight, proof: kvgate_transfer::Quiesced) -> bool {
    ///     flight.free(proof).is_ok()
    /// }
    /// ```
    /// Nothing else frees them:
    /// ```compile_fail,E0308
    /// use kvgate_kvcache::DrainingFlight;
    /// fn give_back(flight: DrainingFlight, proof: kvgate_transfer::Quiesced) -> bool {
    ///     flight.free(()).is_ok()
    /// }
    /// ```
    ///
    /// # Errors
    /// Itself, when the proof is of another flight or more is to be proven.
    // Guards of the model checker are larger than those they stand for.
    #[cfg_attr(kv_loom, allow(clippy::result_large_err))]
    pub fn free(mut self, proof: Quiesced) -> Result<(), DrainingFlight> {
        if let Some(parked) = &mut self.parked
            && proof.is_for(&parked.ledger)
        {
            parked.ledger_proof = Some(proof);
        }
        if self.poll() { Ok(()) } else { Err(self) }
    }

    /// The readers and posted operations that the slots wait for.
    pub fn ledger(&self) -> Option<&Arc<FlightLedger>> {
        self.parked.as_ref().map(|parked| &parked.ledger)
    }

    /// What the slots wait for, here and at the writers.
    pub fn unquiet(&self) -> (Unquiet, Unquiet) {
        let Some(parked) = &self.parked else {
            return Default::default();
        };
        let flight = parked
            .flight
            .as_ref()
            .map(|flight| flight.ledger().unquiet());
        (parked.ledger.unquiet(), flight.unwrap_or_default())
    }

    /// Gives up waiting: the slots stay out of use, counted as quarantined, until their proof comes
    /// after all.
    pub fn quarantine(mut self) {
        if let Some(parked) = &mut self.parked {
            parked.is_quarantined = true;
        }
    }
}

impl Drop for DrainingFlight {
    fn drop(&mut self) {
        if let Some(parked) = self.parked.take() {
            self.pools.park(parked);
        }
    }
}

impl fmt::Debug for DrainingFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slot_count = self.parked.as_ref().map_or(0, |parked| parked.slots.len());
        f.debug_struct("DrainingFlight")
            .field("slot_count", &slot_count)
            .field("unquiet", &self.unquiet())
            .finish()
    }
}
