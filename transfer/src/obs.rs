//! What happened, as typed events and counters. Nothing here decides anything.

use crate::{
    backend::BackendKind,
    error::Cause,
    ids::{ChunkId, Epoch, OpId, PeerId, RegionId, StageId},
    sync::{AtomicU64, Ordering},
    visibility::Visibility,
};

/// Something that a test or a metrics exporter may want to know.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are the ids and values of the event.
pub enum Event {
    /// A connection was made.
    PeerUp { peer: PeerId, backend: BackendKind },
    /// A connection ended; without a proof its memory is quarantined.
    PeerDown {
        peer: PeerId,
        cause: Cause,
        is_proven: bool,
    },
    /// An operation was admitted.
    Posted {
        peer: PeerId,
        op: OpId,
        bytes: u64,
        descriptor_count: u64,
    },
    /// An operation was not admitted for want of room.
    BackPressure { peer: PeerId },
    /// An operation ended well.
    Completed {
        peer: PeerId,
        op: OpId,
        level: Visibility,
    },
    /// An operation ended badly.
    OperationFailed { peer: PeerId, op: OpId },
    /// An operation whose end nobody can tell; its memory stays in flight.
    OperationUnknown { peer: PeerId, op: OpId },
    /// A chunk landed.
    Landed {
        epoch: Epoch,
        stage: StageId,
        chunk: ChunkId,
    },
    /// A completion that no flight of this epoch waits for.
    Stale { peer: PeerId, epoch: Epoch },
    /// A completion of a chunk that had landed.
    Duplicate {
        peer: PeerId,
        epoch: Epoch,
        stage: StageId,
        chunk: ChunkId,
    },
    /// A completion outside the plan, from a peer that is not its writer, or of too low a level.
    Unknown {
        peer: PeerId,
        epoch: Epoch,
        level: Visibility,
    },
    /// A completion of a flight that is draining.
    LateAfterClose { peer: PeerId, epoch: Epoch },
    /// A flight began to drain.
    Draining { epoch: Epoch },
    /// A flight is quiet.
    Quiesced { epoch: Epoch },
    /// Writers of a flight are gone without a proof.
    Quarantined { epoch: Epoch, writer_count: u64 },
    /// A region takes no new operations.
    RegionRevoked { region: RegionId },
    /// A region is closed.
    RegionClosed { region: RegionId },
}

/// Gets every [`Event`], on the thread where it happens: return at once, and do not call the agent.
pub trait Recorder: Send + Sync {
    /// One event.
    fn record(&self, event: &Event);
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A snapshot of what an agent has counted since it was built.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug)]
        pub(crate) struct CounterCells {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl CounterCells {
            pub(crate) fn new() -> Self {
                Self { $($name: AtomicU64::new(0),)* }
            }

            pub(crate) fn snapshot(&self) -> Counters {
                Counters { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Operations that ended well.
    transfers,
    /// Operations that failed or were cancelled.
    failed_transfers,
    /// Operations whose end nobody can tell.
    unknown_transfers,
    /// Bytes of the writes that ended well.
    bytes_written,
    /// Descriptors of the writes that ended well.
    descriptors_written,
    /// Bytes of the reads that ended well.
    bytes_read,
    /// Descriptors of the reads that ended well.
    descriptors_read,
    /// Posts that found the queue full.
    back_pressure,
    /// Chunks that landed here.
    landed,
    /// Arrivals of an epoch that nobody waits for.
    stale,
    /// Tickets of chunks that had landed.
    duplicate,
    /// Tickets outside the plan, from a wrong peer, or of too low a level.
    unknown,
    /// Arrivals for a flight that was draining.
    late_after_close,
    /// Writers that are gone without a proof that they do not write.
    quarantined_writers,
    /// Regions that were dropped while in use and are not closed yet.
    draining_regions,
    /// Connections that were refused.
    refused_connections,
    /// Messages received.
    messages,
    /// Messages dropped because the peer's connection had ended.
    late_messages,
}

pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
