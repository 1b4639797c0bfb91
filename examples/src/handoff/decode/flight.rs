//! One attempt to receive a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use kvgate_kvcache::{DrainingFlight, InFlight, LayerId, TransferPlan};
use kvgate_transfer::{Arrival, ArrivalSink, Cause, ChunkId, PeerId, StageId};

use super::Side;
use crate::handoff::plan::Moment;
use crate::handoff::protocol::FlightId;
use crate::handoff::timeline;

/// A request that is being received or decoded.
pub(super) struct Flight {
    pub(super) id: FlightId,
    pub(super) slot_count: u64,
    in_flight: InFlight,
    /// Takes the first token to the worker; `None` once it is there.
    pub(super) first_token: Option<Sender<u32>>,
    stop: Arc<AtomicBool>,
}

impl Flight {
    pub(super) fn new(
        id: FlightId,
        in_flight: InFlight,
        first_token: Sender<u32>,
        stop: Arc<AtomicBool>,
    ) -> Self {
        let slot_count = in_flight.block_table().slot_count() as u64;
        Self {
            id,
            slot_count,
            in_flight,
            first_token: Some(first_token),
            stop,
        }
    }

    /// The request is over; its pages drain.
    pub(super) fn close(self) -> DrainingFlight {
        self.in_flight.close()
    }

    /// The request is given up: every gate that misses something fails at once, and the worker ends.
    pub(super) fn abort(self, cause: Cause) -> DrainingFlight {
        self.stop.store(true, Ordering::Release);
        self.in_flight.abort(cause)
    }
}

/// Notes when each (layer, segment) has landed, after the provenance table has heard of it.
pub(super) struct LandingSink {
    pub(super) side: Arc<Side>,
    pub(super) request: u32,
    pub(super) plan: TransferPlan,
    /// The pages are kept for later prompts, and so is what the sender says of them.
    pub(super) is_kept: bool,
    pub(super) next: Option<Arc<dyn ArrivalSink>>,
}

impl ArrivalSink for LandingSink {
    fn arrived(&self, peer: PeerId, arrival: &Arrival) {
        if let Some(next) = &self.next {
            next.arrived(peer, arrival);
        }
        if self.is_kept {
            self.side.prefixes.remember(arrival);
        }
        // One arrival is one segment of one layer.
        let Some(&(stage, chunk)) = arrival.tickets.first() else {
            return;
        };
        let Some(segment) = self.segment_of(stage, chunk) else {
            return;
        };
        let moment = Moment {
            request: self.request,
            layer: stage.0,
            segment,
            at_us: timeline::now_us(),
        };
        self.side.note(|notes| notes.landings.push(moment));
    }
}

impl LandingSink {
    fn segment_of(&self, stage: StageId, chunk: ChunkId) -> Option<u16> {
        let chunks = self.plan.chunks(LayerId(stage.0));
        let planned = chunks.iter().find(|planned| planned.chunk == chunk)?;
        u16::try_from(planned.segment).ok()
    }
}
