//! The receiving side of flights: one is open at a time, each with stages of equal size.

use std::time::Duration;

use kvgate_transfer::sync::Arc;
use kvgate_transfer::{
    Agent, ArrivalSink, Barrier, BarrierPlan, ChunkId, ChunkSpec, Deadline, Epoch, Expectation,
    PeerId, StageId, WriterRank,
};

use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::transfer_failure;

/// The one writer of every flight.
const RANK: WriterRank = WriterRank(0);

/// Opens flights, one after the other.
#[derive(Debug)]
pub struct Flights {
    agent: Agent,
    peer: PeerId,
    deadline: Duration,
    epoch: u64,
    open: Option<Expectation>,
}

impl Flights {
    /// Of one peer that writes, or that is read from.
    #[must_use]
    pub fn new(agent: &Agent, peer: PeerId, deadline: Duration) -> Self {
        Self {
            agent: agent.clone(),
            peer,
            deadline,
            epoch: 0,
            open: None,
        }
    }

    /// Ends the former flight, whose operations are terminal, and arms the next one.
    pub fn next_flight(
        &mut self,
        stages: u16,
        chunks: u16,
        sink: Option<Arc<dyn ArrivalSink>>,
    ) -> Result<Arc<Barrier>, Failure> {
        if let Some(flight) = self.open.take() {
            let draining = flight.close();
            draining.writer_answered(self.peer, RANK);
            let quiet = draining.wait(Deadline::after(self.deadline));
            // Every flight fills the same slots, so nothing is reused against the proof.
            drop(quiet.map_err(|_| {
                Failure::new(
                    FailureKind::DeadlineExceeded,
                    "a flight did not become quiet",
                )
            })?);
        }
        self.epoch += 1;
        let chunk = |stage, chunk| ChunkSpec {
            stage: StageId(stage),
            chunk: ChunkId(chunk),
            writer: RANK,
            descriptor_count: 1,
        };
        let all = (0..stages).flat_map(|s| (0..chunks).map(move |c| chunk(s, c)));
        let plan =
            BarrierPlan::from_chunks(all.collect()).map_err(|error| transfer_failure(&error))?;
        let barrier = Barrier::new(plan, Epoch(self.epoch));
        let flight = self
            .agent
            .expect(&barrier, &[(self.peer, RANK)], sink)
            .map_err(|error| transfer_failure(&error))?;
        barrier
            .arm()
            .map_err(|error| Failure::internal(error.to_string()))?;
        self.open = Some(flight);
        Ok(barrier)
    }
}
