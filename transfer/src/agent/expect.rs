//! [`Expectation`]: a flight that this agent receives, and [`Draining`], its end.

use std::{
    fmt,
    task::{Context, Poll},
};

use crate::{
    backend::Quiesce,
    barrier::{Barrier, StageSel},
    deadline::Deadline,
    engine::{ArrivalSink, Engine, FlightLedger, Quiesced, flight::Flight},
    error::{Cause, Error, ErrorKind, PlanFault, Side, WriterFault},
    ids::{PeerId, WriterRank},
    obs::Event,
    sync::Arc,
};

/// The receiver's side of one flight: arrivals of its epoch are weighed against its barrier.
///
/// End it with [`Expectation::close`] or [`Expectation::abort`]; the memory may be reused against the
/// [`Quiesced`] that the [`Draining`] yields. Dropped instead, it is aborted, and nobody gets the proof.
#[must_use = "dropping an expectation aborts the flight"]
pub struct Expectation {
    /// `None` once it was ended.
    open: Option<Open>,
}

struct Open {
    engine: Arc<Engine>,
    flight: Arc<Flight>,
}

/// A flight that ends: its gates no longer matter, its memory may still be written or read.
///
/// Dropping it loses the proof, not the care: the memory simply is never proven quiet to anybody.
#[must_use = "memory may be reused only against the Quiesced that this yields"]
pub struct Draining {
    inner: Open,
}

impl Expectation {
    pub(crate) fn new(
        engine: &Arc<Engine>,
        barrier: &Arc<Barrier>,
        writers: &[(PeerId, WriterRank)],
        sink: Option<Arc<dyn ArrivalSink>>,
    ) -> Result<Self, Error> {
        check_writers(barrier, writers)?;
        let epoch = barrier.epoch();
        for (peer, _) in writers {
            let peer = engine.peer(*peer)?;
            if let Some((cause, _)) = peer.down() {
                return Err(peer.down_error(cause));
            }
        }
        engine.observe_waits(barrier);
        #[cfg(not(kv_loom))]
        barrier.attend(&engine.attendance, writers.iter().map(|(peer, _)| *peer));
        let flight = Arc::new(Flight::new(barrier.clone(), writers, sink));
        {
            let mut flights = engine.flights.lock();
            if flights.contains_key(&epoch) {
                return Err(ErrorKind::EpochInUse { epoch }.into());
            }
            flights.insert(epoch, flight.clone());
        }
        // A peer that was lost before the insertion has not failed this flight.
        for (peer, _) in writers {
            if let Some((cause, quiesce)) = engine.peer(*peer)?.down() {
                engine.writer_gone(&flight, *peer, &cause, quiesce == Quiesce::Proven);
            }
        }
        Ok(Self {
            open: Some(Open {
                engine: engine.clone(),
                flight,
            }),
        })
    }

    /// What may still touch the memory of this flight: the place for reader fences and local copies.
    pub fn ledger(&self) -> &Arc<FlightLedger> {
        &self.open().flight.ledger
    }

    /// The gates.
    pub fn barrier(&self) -> &Arc<Barrier> {
        &self.open().flight.barrier
    }

    /// Ends the flight. A writer whose chunks have all landed is quiet; for the others the [`Draining`]
    /// waits. If something is missing, the gates are shut as by an abort.
    pub fn close(mut self) -> Draining {
        let reason = "closed before everything had landed".to_owned();
        self.end(Cause::Aborted {
            by: Side::Local,
            reason,
        })
    }

    /// Ends the flight and shuts every gate of it that misses something.
    pub fn abort(mut self, cause: Cause) -> Draining {
        self.end(cause)
    }

    fn end(&mut self, cause: Cause) -> Draining {
        let inner = self
            .open
            .take()
            .expect("I-10: an expectation is ended once, by value or by drop");
        let flight = &inner.flight;
        if !flight.barrier.all_landed() {
            flight.barrier.fail(StageSel::All, cause);
        }
        inner.engine.record(|| Event::Draining {
            epoch: flight.barrier.epoch(),
        });
        flight.ledger.close();
        Draining { inner }
    }

    fn open(&self) -> &Open {
        self.open
            .as_ref()
            .expect("I-10: an expectation is ended once, by value or by drop")
    }
}

impl Drop for Expectation {
    fn drop(&mut self) {
        if self.open.is_some() {
            let reason = "the expectation was dropped".to_owned();
            drop(self.end(Cause::Aborted {
                by: Side::Local,
                reason,
            }));
        }
    }
}

impl Draining {
    /// `peer` has said that its operations of this flight, as `writer`, are terminal. `false`, and no
    /// effect, when this peer is not that writer: another incarnation of it cannot answer for it.
    pub fn writer_answered(&self, peer: PeerId, writer: WriterRank) -> bool {
        let is_writer = self.inner.flight.writes(peer, writer);
        if is_writer {
            self.inner.flight.ledger.writer_quiet(writer);
        }
        is_writer
    }

    /// What it waits for, and the place for reader fences.
    pub fn ledger(&self) -> &Arc<FlightLedger> {
        &self.inner.flight.ledger
    }

    /// The proof, if there is one now; once.
    pub fn poll(&mut self) -> Option<Quiesced> {
        FlightLedger::poll(&self.inner.flight.ledger).inspect(|_| self.forget())
    }

    /// [`Draining::poll`] for a task: without a proof, the waker is called when there may be one.
    pub fn poll_quiet(&mut self, cx: &mut Context<'_>) -> Poll<Quiesced> {
        let proof = FlightLedger::poll_quiet(&self.inner.flight.ledger, cx);
        if proof.is_ready() {
            self.forget();
        }
        proof
    }

    /// Blocks until there is a proof.
    ///
    /// # Errors
    /// Itself, at the deadline: nothing has changed, and the memory is still not quiet.
    pub fn wait(self, deadline: Deadline) -> Result<Quiesced, Self> {
        match FlightLedger::wait(&self.inner.flight.ledger, deadline) {
            Some(proof) => {
                self.forget();
                Ok(proof)
            }
            None => Err(self),
        }
    }

    fn forget(&self) {
        self.inner.engine.forget_flight(&self.inner.flight);
    }
}

impl Drop for Draining {
    fn drop(&mut self) {
        let Open { engine, flight } = &self.inner;
        flight.orphan();
        engine.settle(flight);
    }
}

/// Every writer of the plan is named once, and nobody else.
fn check_writers(barrier: &Barrier, writers: &[(PeerId, WriterRank)]) -> Result<(), Error> {
    if barrier.writers().is_empty() {
        return Err(ErrorKind::InvalidPlan(PlanFault::Empty).into());
    }
    let fault = |writer, fault| Err(ErrorKind::WriterMismatch { writer, fault }.into());
    for (index, (_, writer)) in writers.iter().enumerate() {
        if writers[..index].iter().any(|(_, other)| other == writer) {
            return fault(*writer, WriterFault::ListedTwice);
        }
        if !barrier
            .writers()
            .iter()
            .any(|(planned, _)| planned == writer)
        {
            return fault(*writer, WriterFault::NothingToWrite);
        }
    }
    for (planned, _) in barrier.writers() {
        if !writers.iter().any(|(_, writer)| writer == planned) {
            return fault(*planned, WriterFault::NotListed);
        }
    }
    Ok(())
}

impl fmt::Debug for Expectation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Expectation")
            .field(&self.open().flight)
            .finish()
    }
}

impl fmt::Debug for Draining {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Draining").field(&self.inner.flight).finish()
    }
}
