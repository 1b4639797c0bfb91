//! [`AgentStatus`]: what an agent has in flight at one moment, for people and for tools.

use std::fmt;

macro_rules! record {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {
        $($(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[cfg_attr(feature = "status", derive(serde::Serialize, serde::Deserialize))]
        #[non_exhaustive]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        })*
    };
}

macro_rules! states {
    ($($(#[$doc:meta])* $name:ident { $($(#[$state_doc:meta])* $state:ident = $text:literal,)* })*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "status", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "status", serde(rename_all = "snake_case"))]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$state_doc])* $state,)*
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self {
                    $(Self::$state => $text,)*
                })
            }
        })*
    };
}

record! {
    /// What an agent has in flight at one moment. Ids are the numbers of the id types; each list is
    /// complete and in the order of its ids, and the lists are taken one after the other.
    AgentStatus {
        /// The name it was built with.
        name: String,
        /// Which life this is, in hexadecimal.
        incarnation: String,
        /// Operations that are not terminal, those with an unknown end among them.
        transfers: Vec<TransferStatus>,
        /// Connections, the latest ended ones among them.
        peers: Vec<PeerStatus>,
        /// Registrations that are not closed.
        regions: Vec<RegionStatus>,
        /// Flights that are received here and not proven quiet.
        flights: Vec<FlightStatus>,
        /// Operations whose end nobody can tell. Their memory stays in flight.
        unknown_transfer_count: u64,
        /// Writers of the flights above that are gone without a proof. The memory is quarantined.
        quarantined_writer_count: u64,
    }

    /// One operation.
    TransferStatus {
        /// Its number, as in events.
        id: u64,
        /// The connection.
        peer: u32,
        /// `write` or `read`.
        op: String,
        /// Bytes to move.
        bytes: u64,
        /// Slots to move.
        descriptor_count: u64,
        /// Milliseconds since it was admitted.
        age_ms: u64,
        /// Where it stands.
        state: TransferState,
        /// Why its end is unknown.
        cause: Option<String>,
        /// Bytes that the transport has taken or brought.
        bytes_moved: u64,
        /// Milliseconds that it has not gone on for, once that was said.
        stalled_ms: Option<u64>,
        /// What it waits for.
        stall: Option<String>,
    }

    /// One connection.
    PeerStatus {
        /// Its number.
        id: u32,
        /// The name of the peer.
        name: String,
        /// Which life of the peer, in hexadecimal.
        incarnation: String,
        /// What moves the bytes: the names of [`crate::BackendKind`].
        backend: String,
        /// The peer's registrations when it was connected.
        memories: Vec<PeerMemory>,
        /// Milliseconds since anything was heard from it.
        last_progress_age_ms: u64,
        /// Milliseconds for which it has left a heartbeat unanswered, 0 while it answers: each look at the status
        /// asks for the next one. Nothing where it shares no memory with this process, or has ended.
        heartbeat_age_ms: Option<u64>,
        /// Why the connection has ended; nothing while it stands.
        down: Option<String>,
        /// Why the connection has broken, while another one may take its place.
        suspended: Option<String>,
    }

    /// A registration of a peer.
    PeerMemory {
        /// Its number there.
        region: u32,
        /// The names of [`crate::MemoryKind`].
        kind: String,
        /// Length of the memory.
        len_bytes: u64,
        /// Length of its pages; nothing where it is not mapped here.
        granule_bytes: Option<u64>,
    }

    /// A registration of this agent.
    RegionStatus {
        /// Its number.
        id: u32,
        /// The names of [`crate::MemoryKind`].
        kind: String,
        /// Length of the memory.
        len_bytes: u64,
        /// How much of it the kernel backs with huge pages; nothing where the kernel does not say.
        huge_bytes: Option<u64>,
        /// Length of its pages.
        granule_bytes: u64,
        /// Why these are not huge, if they were to be.
        not_huge: Option<String>,
        /// The NUMA node of its first page; nothing where the kernel does not say.
        numa_node: Option<u32>,
        /// Whether it is being closed: no new operation.
        is_revoking: bool,
        /// Operations and handshakes that hold it.
        hold_count: u64,
        /// Peers that have been asked to let go and have not answered.
        unheard_peer_count: u64,
    }

    /// A flight that is received here.
    FlightStatus {
        /// Its number.
        epoch: u64,
        /// Milliseconds since it was expected.
        age_ms: u64,
        /// Where it stands.
        state: FlightState,
        /// Chunks that have not landed.
        missing_chunk_count: u64,
        /// Local operations that touch its memory.
        operation_count: u64,
        /// Reading steps that have not passed.
        fence_count: u64,
        /// Writers that have not been heard of.
        unquiet_writers: Vec<WriterStatus>,
    }

    /// A writer of a flight that is not quiet.
    WriterStatus {
        /// Its rank in the plan.
        rank: u16,
        /// The connection that it writes by.
        peer: u32,
        /// Whether it is gone without a proof, so that it never becomes quiet by itself.
        is_quarantined: bool,
    }
}

states! {
    /// Where an operation stands.
    TransferState {
        /// Nobody has begun it.
        Queued = "queued",
        /// Begun, and its end has not been heard of.
        Running = "running",
        /// It has ended, and what it holds is being given back.
        Ending = "ending",
        /// Nobody can tell whether it still runs.
        Unknown = "unknown",
    }

    /// Where a flight stands.
    FlightState {
        /// It takes chunks.
        Open = "open",
        /// It was ended, and its memory may still be written or read.
        Draining = "draining",
    }
}

impl fmt::Display for AgentStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "agent {} {}", self.name, self.incarnation)?;
        writeln!(f, "peers {}", self.peers.len())?;
        self.peers.iter().try_for_each(|peer| write!(f, "{peer}"))?;
        writeln!(f, "transfers {}", self.transfers.len())?;
        self.transfers.iter().try_for_each(|t| write!(f, "{t}"))?;
        writeln!(f, "flights {}", self.flights.len())?;
        self.flights.iter().try_for_each(|x| write!(f, "{x}"))?;
        writeln!(f, "regions {}", self.regions.len())?;
        self.regions.iter().try_for_each(|r| write!(f, "{r}"))?;
        writeln!(
            f,
            "unknown transfers {}, quarantined writers {}",
            self.unknown_transfer_count, self.quarantined_writer_count
        )
    }
}

impl fmt::Display for PeerStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            id, name, backend, ..
        } = self;
        write!(f, "  {id} {name} {} {backend}", self.incarnation)?;
        for memory in &self.memories {
            write!(f, ", {} {} B", memory.kind, memory.len_bytes)?;
        }
        match (&self.down, &self.suspended) {
            (Some(cause), _) => writeln!(f, ", down: {cause}"),
            (None, Some(cause)) => writeln!(f, ", suspended: {cause}"),
            (None, None) => {
                write!(f, ", heard {} ms ago", self.last_progress_age_ms)?;
                match self.heartbeat_age_ms {
                    Some(age_ms @ 1..) => writeln!(f, ", no heartbeat for {age_ms} ms"),
                    _ => writeln!(f),
                }
            }
        }
    }
}

impl fmt::Display for TransferStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "  {} {} {}, peer {}, {} B in {} slots, {} ms",
            self.id, self.op, self.state, self.peer, self.bytes, self.descriptor_count, self.age_ms
        )?;
        if let (Some(ms), Some(stall)) = (self.stalled_ms, &self.stall) {
            write!(
                f,
                ", {} B moved, stalled for {ms} ms: {stall}",
                self.bytes_moved
            )?;
        }
        match &self.cause {
            Some(cause) => writeln!(f, ": {cause}"),
            None => writeln!(f),
        }
    }
}

impl fmt::Display for FlightStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "  {} {}, {} ms, {} chunks missing, {} operations, {} fences",
            self.epoch,
            self.state,
            self.age_ms,
            self.missing_chunk_count,
            self.operation_count,
            self.fence_count
        )?;
        for writer in &self.unquiet_writers {
            let state = match writer.is_quarantined {
                true => "quarantined",
                false => "not quiet",
            };
            write!(f, ", writer {} (peer {}) {state}", writer.rank, writer.peer)?;
        }
        writeln!(f)
    }
}

impl fmt::Display for RegionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "  {} {} {} B", self.id, self.kind, self.len_bytes)?;
        if let Some(huge_bytes) = self.huge_bytes {
            write!(f, " ({huge_bytes} B huge)")?;
        }
        write!(f, ", pages of {} B", self.granule_bytes)?;
        if let Some(reason) = &self.not_huge {
            write!(f, " ({reason})")?;
        }
        if let Some(node) = self.numa_node {
            write!(f, " on node {node}")?;
        }
        write!(f, ", {} holds", self.hold_count)?;
        match self.is_revoking {
            true => writeln!(f, ", revoking, {} peers unheard", self.unheard_peer_count),
            false => writeln!(f),
        }
    }
}
