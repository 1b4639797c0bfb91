//! A flight that this agent receives, as the engine keeps it from `expect` until it is quiet.

use std::{fmt, time::Instant};

use crate::{
    Arrival,
    barrier::Barrier,
    engine::quiesce::FlightLedger,
    ids::{PeerId, WriterRank},
    sync::{Arc, AtomicBool, Ordering},
};

/// Hears of every arrival of a flight before its tickets are redeemed.
pub trait ArrivalSink: Send + Sync {
    /// The bytes of this arrival are visible in this process and no gate has opened for them yet.
    /// Runs on the receive thread of the peer, where a read ends, or on a thread that waits for the flight or for
    /// an event ([`Barrier::wait`]): return soon. Until it returns, this peer and the others whose frames that
    /// thread takes are not heard.
    fn arrived(&self, peer: PeerId, arrival: &Arrival);
}

pub(crate) struct Flight {
    pub(crate) barrier: Arc<Barrier>,
    pub(crate) ledger: Arc<FlightLedger>,
    pub(crate) sink: Option<Arc<dyn ArrivalSink>>,
    pub(crate) writers: Vec<(PeerId, WriterRank)>,
    pub(crate) began_at: Instant,
    /// Nobody will ask for the witness: the engine takes it and forgets the flight.
    is_orphan: AtomicBool,
}

impl Flight {
    pub(crate) fn new(
        barrier: Arc<Barrier>,
        writers: &[(PeerId, WriterRank)],
        sink: Option<Arc<dyn ArrivalSink>>,
    ) -> Self {
        Self {
            ledger: FlightLedger::expecting(barrier.epoch(), writers),
            barrier,
            sink,
            writers: writers.to_vec(),
            began_at: Instant::now(),
            is_orphan: AtomicBool::new(false),
        }
    }

    /// Whether this peer delivers the chunks of this rank.
    pub(crate) fn writes(&self, peer: PeerId, rank: WriterRank) -> bool {
        self.writers.contains(&(peer, rank))
    }

    pub(crate) fn is_writer(&self, peer: PeerId) -> bool {
        self.writers.iter().any(|(p, _)| *p == peer)
    }

    /// Whether everything that this peer was to write has landed.
    pub(crate) fn has_landed_from(&self, peer: PeerId) -> bool {
        let ranks = self.writers.iter().filter(|(p, _)| *p == peer);
        ranks
            .into_iter()
            .all(|(_, rank)| self.barrier.writer_landed(*rank))
    }

    pub(crate) fn orphan(&self) {
        self.is_orphan.store(true, Ordering::Release);
    }

    pub(crate) fn is_orphan(&self) -> bool {
        self.is_orphan.load(Ordering::Acquire)
    }
}

impl fmt::Debug for Flight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flight")
            .field("barrier", &self.barrier)
            .field("ledger", &self.ledger)
            .field("writers", &self.writers)
            .finish_non_exhaustive()
    }
}
