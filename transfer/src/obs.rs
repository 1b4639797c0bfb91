//! What happened, as typed events and counters. Nothing here decides anything.

#[cfg(all(feature = "metrics", not(kv_loom)))]
pub(crate) mod metrics;

use std::{fmt, time::Duration};

use crate::{
    backend::BackendKind,
    error::Cause,
    ids::{ChunkId, Epoch, Incarnation, OpId, PeerId, RegionId, StageId},
    op::Op,
    stall::StallCause,
    sync::{AtomicU64, Ordering},
    visibility::Visibility,
};

/// Something that a test or a metrics exporter may want to know.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are the ids and values of the event.
pub enum Event {
    /// A connection was made.
    PeerUp {
        peer: PeerId,
        incarnation: Incarnation,
        backend: BackendKind,
    },
    /// Somebody connected and did not become a peer.
    ConnectionRefused { field: RefusedField },
    /// A connection ended; without a proof its memory is quarantined.
    PeerDown {
        peer: PeerId,
        cause: Cause,
        is_proven: bool,
    },
    /// A connection broke, and another one may take its place.
    PeerSuspended { peer: PeerId, cause: Cause },
    /// Another connection took the place of one that broke.
    PeerResumed { peer: PeerId },
    /// An operation, or a message, that may have been sent before is sent again, under its old number.
    SentAgain { peer: PeerId, op: Option<OpId> },
    /// The peer sent an operation or a message that was handled before. It was dropped.
    Repeated { peer: PeerId },
    /// An operation was admitted.
    Posted {
        peer: PeerId,
        op: OpId,
        kind: Op,
        bytes: u64,
        descriptor_count: u64,
    },
    /// An operation was not admitted for want of room.
    BackPressure { peer: PeerId },
    /// An operation was not admitted: its witness is of another peer, or none where one is needed.
    SourceRefused {
        peer: PeerId,
        kind: Op,
        announced_by: Option<PeerId>,
    },
    /// An operation ended well. `elapsed` since it was admitted; `is_announced`: the peer was told.
    Completed {
        peer: PeerId,
        op: OpId,
        kind: Op,
        level: Visibility,
        bytes: u64,
        descriptor_count: u64,
        is_announced: bool,
        elapsed: Duration,
    },
    /// An operation ended badly.
    OperationFailed { peer: PeerId, op: OpId, kind: Op },
    /// An operation whose end nobody can tell; its memory stays in flight.
    OperationUnknown { peer: PeerId, op: OpId, kind: Op },
    /// An operation in flight has not gone on for `age_ms` ([`crate::TransferConfig::stall_ms`]); the transport has
    /// taken or brought `bytes_moved` of it. Nothing else has changed: it is in flight, and so is its memory.
    /// `Resumed` follows, or `OperationFailed`, or `OperationUnknown`.
    Stalled {
        peer: PeerId,
        op: OpId,
        age_ms: u64,
        bytes_moved: u64,
        cause: StallCause,
    },
    /// An operation goes on, or has ended well, after it stood still for `age_ms`.
    Resumed { peer: PeerId, op: OpId, age_ms: u64 },
    /// A peer, or a read from it, says that these bytes are visible here. It is weighed next.
    Arrived {
        peer: PeerId,
        epoch: Epoch,
        ticket_count: u64,
    },
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

/// What was wrong with a connection that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RefusedField {
    /// It speaks another version of the protocol.
    Version,
    /// The shared secret is wrong, or only one side has one.
    Secret,
    /// Its bytes are no handshake, or it hung up.
    Frames,
    /// What it said about itself does not hold together.
    Metadata,
    /// It wants to go on with a session that is over, is not its own, or cannot be taken now.
    Session,
    /// The kernel does not let one side copy from the other.
    Probe,
    /// It refused this side.
    ByPeer,
    /// It took too long.
    Time,
    /// Too many are in their handshake.
    Load,
    /// This side could not go on: it is shutting down, or the system refused something.
    Here,
}

impl fmt::Display for RefusedField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Version => "version",
            Self::Secret => "secret",
            Self::Frames => "frames",
            Self::Metadata => "metadata",
            Self::Session => "session",
            Self::Probe => "probe",
            Self::ByPeer => "by_peer",
            Self::Time => "time",
            Self::Load => "load",
            Self::Here => "here",
        })
    }
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
    /// Times that an operation in flight stood still.
    stalls,
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
    /// Connections that took the place of one that broke.
    reconnects,
    /// Operations that were sent again over another connection.
    retries,
    /// Arrivals and messages that were given to a connection for the first time.
    notes_sent,
    /// Arrivals and messages that were sent again over another connection.
    notes_replayed,
    /// Writes and messages of a peer that came again and were dropped.
    notes_duplicate,
    /// Messages received.
    messages,
    /// Messages dropped because the peer's connection had ended.
    late_messages,
}

pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
