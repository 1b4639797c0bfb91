//! [`InFlight`]: slots that writers elsewhere fill.

use std::fmt;

use kvgate_transfer::sync::{Arc, AtomicBool, Ordering};
use kvgate_transfer::{
    Agent, ArrivalSink, Barrier, Cause, Epoch, Expectation, FlightLedger, PeerId, Side, StepClock,
    WriterRank,
};

use crate::block_table::BlockTable;
use crate::error::{Error, ErrorKind};
use crate::ids::Room;
use crate::lease::append::AppendLease;
use crate::lease::read::PageLease;
use crate::lease::tenancy::Tenancy;
use crate::lease::write::WriteLease;
use crate::page::Slot;
use crate::plan::TransferPlan;
use crate::pool::drain::DrainingFlight;

/// A flight that this process receives: slots, the barrier over every chunk that must land in them,
/// and the engine's expectation of its writers.
///
/// Dropped, it is aborted: its gates shut, and its slots drain until each writer is known to be quiet.
#[must_use = "dropping it aborts the flight"]
pub struct InFlight {
    core: Arc<FlightCore>,
    writers: Vec<(PeerId, WriterRank)>,
    expectation: Option<Expectation>,
    has_ended: bool,
}

/// What a flight shares with its leases.
pub(crate) struct FlightCore {
    pub(crate) tenancy: Arc<Tenancy>,
    pub(crate) barrier: Arc<Barrier>,
    /// Tokens that the writers bring. Their rows are read only for whoever appends (I-19): the tree may
    /// have given them to others.
    pub(crate) landing_tokens: u32,
    /// Whether somebody holds the append right (I-19).
    is_appending: AtomicBool,
}

impl WriteLease {
    /// Promises the slots to the writers of `plan`. Nothing is readable before [`InFlight::arm`].
    ///
    /// # Errors
    /// The lease comes back with the reason: the plan needs more slots than the lease has, or there are
    /// more writers than a slot counts.
    pub fn into_inflight(
        mut self,
        plan: &TransferPlan,
        epoch: Epoch,
        writers: &[(PeerId, WriterRank)],
    ) -> Result<InFlight, Box<(WriteLease, Error)>> {
        let tenancy = self.take();
        match promise(&tenancy, plan, epoch, writers.len()) {
            Ok(barrier) => {
                let core = FlightCore {
                    tenancy,
                    barrier,
                    landing_tokens: plan.prompt_tokens(),
                    is_appending: AtomicBool::new(false),
                };
                let (core, writers) = (Arc::new(core), writers.to_vec());
                Ok(InFlight {
                    core,
                    writers,
                    expectation: None,
                    has_ended: false,
                })
            }
            Err(error) => {
                self.restore(tenancy);
                Err(Box::new((self, error)))
            }
        }
    }
}

/// Moves every slot to InFlight, or none.
fn promise(
    tenancy: &Tenancy,
    plan: &TransferPlan,
    epoch: Epoch,
    writer_count: usize,
) -> Result<Arc<Barrier>, Error> {
    plan.check_fits(&tenancy.table)?;
    plan.check_start(tenancy.shared_tokens())?;
    let barrier = Barrier::new(plan.barrier_plan()?, epoch);
    let writer_count = u16::try_from(writer_count).unwrap_or(u16::MAX);
    let expect = |slot: &Slot, generation| slot.expect_writers(generation, writer_count);
    tenancy
        .pools
        .allocator
        .each(tenancy.own_slots(), expect, Slot::unexpect_writers)?;
    Ok(barrier)
}

impl InFlight {
    /// Begins to count what arrives. Call it before the writers are told where to write.
    ///
    /// `sink` is told of every arrival after its bytes are visible and before its chunks count.
    ///
    /// # Errors
    /// `AlreadyArmed`; `NotRegistered`, `OtherAgent` and `Unregistering` when the pools are not registered
    /// with `agent`; `Transfer` with the agent's reason (a writer is lost, the epoch is in use): the flight is
    /// then as before the call.
    pub fn arm(&mut self, agent: &Agent, sink: Option<Arc<dyn ArrivalSink>>) -> Result<(), Error> {
        if self.expectation.is_some() {
            return Err(ErrorKind::AlreadyArmed.into());
        }
        self.core.tenancy.pools.check_agent(agent.incarnation())?;
        let expectation = agent.expect(&self.core.barrier, &self.writers, sink)?;
        self.core
            .barrier
            .arm()
            .map_err(|_| ErrorKind::AlreadyArmed)?;
        self.expectation = Some(expectation);
        Ok(())
    }

    /// Begins to count without an agent. For models, whose writers count on [`InFlight::ledger`].
    ///
    /// # Errors
    /// `AlreadyArmed`.
    #[cfg(kv_loom)]
    pub fn arm_detached(&self) -> Result<(), Error> {
        Ok(self
            .core
            .barrier
            .arm()
            .map_err(|_| ErrorKind::AlreadyArmed)?)
    }

    /// What may still touch the slots from this process: leases, steps, local copies.
    pub fn ledger(&self) -> &Arc<FlightLedger> {
        &self.core.tenancy.ledger
    }

    /// The gates, one stage per layer.
    pub fn barrier(&self) -> &Arc<Barrier> {
        &self.core.barrier
    }

    /// The slots.
    pub fn block_table(&self) -> &BlockTable {
        &self.core.tenancy.table
    }

    /// The request.
    pub fn room(&self) -> Room {
        self.core.tenancy.room
    }

    /// The right to wait for its layers and read them.
    ///
    /// # Errors
    /// `Slot` when a reader count is full.
    pub fn lease(&self) -> Result<PageLease, Error> {
        PageLease::of_flight(&self.core)
    }

    /// The right to append rows; one at a time per flight.
    ///
    /// # Errors
    /// `AppendTaken` while another one exists; `Slot` when a reader count is full.
    pub fn append_lease(&self) -> Result<AppendLease, Error> {
        AppendLease::of_flight(&self.core)
    }

    /// Keeps the slots until the newest step of `clock` has passed, whatever else is over (I-20).
    ///
    /// # Errors
    /// `Transfer` when the slots were proven quiet already.
    pub fn fence(&self, clock: &StepClock) -> Result<(), Error> {
        match clock.latest() {
            Some(step) => Ok(FlightLedger::fence(&self.core.tenancy.ledger, clock, step)?),
            None => Ok(()),
        }
    }

    /// Ends the flight after use. The slots are free when each writer has delivered everything or is
    /// known to be quiet, and every lease is gone.
    pub fn close(mut self) -> DrainingFlight {
        self.end(None)
    }

    /// Ends the flight and shuts its gates with `cause`.
    pub fn abort(mut self, cause: Cause) -> DrainingFlight {
        self.end(Some(cause))
    }

    /// What the flight shares with its leases and with the prefix tree.
    pub(crate) fn core(&self) -> &Arc<FlightCore> {
        &self.core
    }

    fn end(&mut self, cause: Option<Cause>) -> DrainingFlight {
        self.has_ended = true;
        let draining = match (self.expectation.take(), cause) {
            (Some(expectation), Some(cause)) => Some(expectation.abort(cause)),
            (Some(expectation), None) => Some(expectation.close()),
            // Never armed, so nobody was told of these slots.
            (None, _) => None,
        };
        let tenancy = &self.core.tenancy;
        DrainingFlight::new(tenancy.pools.clone(), tenancy.end(draining))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if !self.has_ended {
            let reason = "the flight was dropped".to_owned();
            drop(self.end(Some(Cause::Aborted {
                by: Side::Local,
                reason,
            })));
        }
    }
}

impl FlightCore {
    /// Whether the append right was free and now is the caller's.
    pub(super) fn take_append_right(&self) -> bool {
        !self.is_appending.swap(true, Ordering::AcqRel)
    }

    pub(super) fn give_append_right_back(&self) {
        self.is_appending.store(false, Ordering::Release);
    }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight")
            .field("core", &self.core)
            .field("is_armed", &self.expectation.is_some())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for FlightCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlightCore")
            .field("tenancy", &self.tenancy)
            .field("epoch", &self.barrier.epoch())
            .finish_non_exhaustive()
    }
}
