//! A flight that is received, from its expectation to its quiet: of plain slots, or of a cache.
//!
//! **What is protected by what.** One mutex per flight guards its phase. Nobody waits with it held: a wait
//! takes it for one look at a time, so a writer's answer can come in meanwhile.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use kvgate_kvcache::{DrainingFlight, InFlight};
use kvgate_transfer::{Barrier, Cause, Draining, Expectation, StageId};

use crate::arg;
use crate::cache::receive::CacheSide;
use crate::flight::kv_writer;
use crate::status::{Failure, Outcome};
use crate::wake::wait_for;

pub(crate) struct FlightObject {
    phase: Mutex<Phase>,
    pub(crate) barrier: Arc<Barrier>,
    pub(crate) waker: Waker,
    /// What only a flight of a cache has.
    pub(crate) cache: Option<CacheSide>,
}

/// A flight that has not been ended.
pub(crate) enum Open {
    Slots(Expectation),
    Cache(InFlight),
}

/// A flight whose memory may still be touched.
enum Ending {
    Slots(Draining),
    Cache(DrainingFlight),
}

enum Phase {
    Open(Open),
    Ending(Ending),
    Quiet,
    /// Only inside one step.
    Moving,
}

impl FlightObject {
    pub(crate) fn new(open: Open, barrier: Arc<Barrier>, waker: Waker) -> Self {
        Self {
            phase: Mutex::new(Phase::Open(open)),
            barrier,
            waker,
            cache: None,
        }
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A stage that the plan has.
    pub(crate) fn stage(&self, stage: u32) -> Outcome<StageId> {
        let count = self.barrier.stage_count();
        if stage >= count {
            let message = format!("the flight has {count} stages, no stage {stage}");
            return Err(Failure::argument(message));
        }
        Ok(StageId(arg::small(stage, "stage")?))
    }

    pub(crate) fn arm(&self) -> Outcome<()> {
        let armed = match &mut *self.phase() {
            Phase::Open(Open::Slots(_)) => self.barrier.arm().map_err(Failure::from),
            Phase::Open(Open::Cache(flight)) => match &self.cache {
                Some(cache) => cache.arm(flight),
                None => Err(Failure::state("the flight has no cache")),
            },
            _ => Err(Failure::state("the flight has ended")),
        };
        self.wake_descriptor();
        armed
    }

    /// A gate that is not armed keeps no waker. Whoever looked at one before, and sees the count only after
    /// the arming or the end, has to be told by the descriptor: what lands in between tells nobody.
    fn wake_descriptor(&self) {
        self.waker.wake_by_ref();
    }

    /// Waits for the gate of a stage.
    pub(crate) fn wait(&self, stage: StageId, timeout_ms: u64) -> Outcome<()> {
        match wait_for(timeout_ms, &self.waker, |cx| self.barrier.poll(stage, cx)) {
            Some(answer) => Ok(answer?),
            None => Err(Failure::timed_out(&format!("stage {stage}"), timeout_ms)),
        }
    }

    /// Looks at a flight of a cache that has not been ended.
    pub(crate) fn with_cache<T>(
        &self,
        look: impl FnOnce(&CacheSide, &InFlight) -> Outcome<T>,
    ) -> Outcome<T> {
        let Some(cache) = &self.cache else {
            return Err(Failure::argument("the flight fills slots and no cache"));
        };
        match &*self.phase() {
            Phase::Open(Open::Cache(flight)) => look(cache, flight),
            _ => Err(Failure::state("the flight has ended")),
        }
    }

    pub(crate) fn end(&self, cause: Option<Cause>) -> Outcome<()> {
        let mut phase = self.phase();
        match std::mem::replace(&mut *phase, Phase::Moving) {
            Phase::Open(open) => {
                *phase = Phase::Ending(match (open, cause) {
                    (Open::Slots(flight), Some(cause)) => Ending::Slots(flight.abort(cause)),
                    (Open::Slots(flight), None) => Ending::Slots(flight.close()),
                    (Open::Cache(flight), Some(cause)) => Ending::Cache(flight.abort(cause)),
                    (Open::Cache(flight), None) => Ending::Cache(flight.close()),
                });
                drop(phase);
                self.wake_descriptor();
                Ok(())
            }
            other => {
                *phase = other;
                Err(Failure::state("the flight has ended before"))
            }
        }
    }

    pub(crate) fn writer_answered(&self, writer: kv_writer) -> Outcome<()> {
        let (peer, rank) = writer.parse()?;
        let is_writer = match &*self.phase() {
            Phase::Ending(Ending::Slots(draining)) => draining.writer_answered(peer, rank),
            Phase::Ending(Ending::Cache(draining)) => draining.writer_answered(peer, rank),
            Phase::Quiet => return Ok(()),
            Phase::Open(_) | Phase::Moving => {
                return Err(Failure::state("the flight has not been ended"));
            }
        };
        if is_writer {
            return Ok(());
        }
        let message = format!("peer {peer} is not writer {rank} of this flight");
        Err(Failure::argument(message))
    }

    /// Waits until nobody can touch the memory of the flight any more.
    pub(crate) fn wait_quiet(&self, timeout_ms: u64) -> Outcome<()> {
        match wait_for(timeout_ms, &self.waker, |cx| self.poll_quiet(cx)) {
            Some(answer) => answer,
            None => Err(Failure::timed_out("the quiet of the flight", timeout_ms)),
        }
    }

    fn poll_quiet(&self, cx: &mut Context<'_>) -> Poll<Outcome<()>> {
        let mut phase = self.phase();
        let answer = match &mut *phase {
            Phase::Open(_) | Phase::Moving => {
                return Poll::Ready(Err(Failure::state("the flight has not been ended")));
            }
            Phase::Ending(Ending::Slots(draining)) => draining.poll_quiet(cx).map(drop),
            Phase::Ending(Ending::Cache(draining)) => draining.poll_free(cx),
            Phase::Quiet => Poll::Ready(()),
        };
        if answer.is_ready() {
            *phase = Phase::Quiet;
        }
        answer.map(Ok)
    }
}
