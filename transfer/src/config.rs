//! Limits and intervals of an [`crate::Agent`].

use std::time::Duration;

use crate::error::{Error, ErrorKind};

/// Limits and intervals of an [`crate::Agent`]; [`crate::AgentBuilder::build`] refuses values that cannot
/// work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferConfig {
    /// Operations towards one peer that are queued or under way. A full queue is back-pressure
    /// ([`crate::ErrorKind::QueueFull`]), never a failed transfer.
    pub queue_capacity: usize,
    /// Control messages towards one peer that wait to be sent or, where a connection may be made again, to be
    /// acknowledged. A full queue is back-pressure ([`crate::ErrorKind::QueueFull`]).
    pub message_capacity: usize,
    /// Bytes of those messages; the one that reaches the limit is taken still.
    pub message_bytes: u64,
    /// Events that wait for [`crate::Agent::next_event`]. A peer that fills it is disconnected.
    pub event_capacity: usize,
    /// Shortest time between two progress reports to a peer.
    pub progress_interval_ms: u64,
    /// Longest operation that the posting thread executes itself, when nothing is queued before it and its
    /// connection copies without waiting for anybody. Longer ones are left to the connection's thread, or to
    /// a thread that waits for their end.
    pub inline_bytes: u64,
    /// How long the receive thread of a connection to a process of this host looks for more after each frame
    /// before it sleeps, and a thread that waits at a gate or for an event before that. Nothing on a host with two cores or fewer, where it would take one from somebody.
    pub spin_us: u64,
    /// How long an operation in flight may stand still before [`crate::Event::Stalled`] says so; 0: nobody looks.
    /// It is a report, and ends nothing.
    pub stall_ms: u64,
    /// How long a session outlives its connection (`tcp`): so long after a break the side that had connected tries
    /// again, and both keep what is under way ([`crate::AgentEvent::PeerSuspended`]). The smaller value of both
    /// sides counts; 0: a connection that breaks is a peer that is lost.
    pub reconnect_ms: u64,
    /// How long dropping the last handle of an agent may take to stop its threads.
    pub drop_deadline_ms: u64,
}

impl Default for TransferConfig {
    fn default() -> Self {
        Self {
            queue_capacity: 1024,
            message_capacity: 4096,
            message_bytes: 64 << 20,
            event_capacity: 65_536,
            progress_interval_ms: 100,
            inline_bytes: 256 * 1024,
            spin_us: default_spin_us(),
            stall_ms: 1_000,
            reconnect_ms: 2_000,
            drop_deadline_ms: 2_000,
        }
    }
}

fn default_spin_us() -> u64 {
    match std::thread::available_parallelism() {
        Ok(cores) if cores.get() > 2 => 20,
        _ => 0,
    }
}

impl TransferConfig {
    pub(crate) fn check(&self) -> Result<(), Error> {
        let capacities = [
            ("queue_capacity", self.queue_capacity),
            ("message_capacity", self.message_capacity),
            ("event_capacity", self.event_capacity),
        ];
        match capacities.into_iter().find(|(_, value)| *value == 0) {
            Some((what, value)) => Err(ErrorKind::InvalidArgument {
                what,
                value: value.to_string(),
            }
            .into()),
            None => Ok(()),
        }
    }

    pub(crate) fn progress_interval(&self) -> Duration {
        Duration::from_millis(self.progress_interval_ms)
    }
}

/// How connections over UCX are made: [`crate::AgentBuilder::ucx`].
#[cfg(all(feature = "ucx", not(kv_loom)))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UcxConfig {
    /// Libraries that are tried before `libucp.so.0` of the system, in this order. Opening one runs its
    /// code.
    pub libraries: Vec<std::path::PathBuf>,
    /// UCX's own list of transports (`UCX_TLS`), such as `tcp` or `rc,tcp`. UCX's shared-memory transports
    /// cannot be used: they do not tell when a peer dies. Only over `tcp` alone is the sudden end of a peer
    /// also the proof that nothing more is written; otherwise memory that it was told about stays
    /// quarantined.
    pub transports: String,
}

#[cfg(all(feature = "ucx", not(kv_loom)))]
impl Default for UcxConfig {
    fn default() -> Self {
        Self {
            libraries: Vec::new(),
            transports: "tcp".into(),
        }
    }
}

#[cfg(all(feature = "ucx", not(kv_loom)))]
impl UcxConfig {
    /// The thread of the passive side copies, on every transport of the list.
    pub(crate) fn is_emulated(&self) -> bool {
        self.transports.split(',').all(|name| name.trim() == "tcp")
    }
}

/// How connections over libfabric are made: [`crate::AgentBuilder::libfabric`].
#[cfg(all(feature = "libfabric", not(kv_loom)))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibfabricConfig {
    /// Libraries that are tried before `libfabric.so.1` of the system, in this order. Opening one runs its
    /// code.
    pub libraries: Vec<std::path::PathBuf>,
    /// libfabric's own name of a provider of reliable datagrams, such as `tcp` or `verbs;ofi_rxm`. It must
    /// promise delivery on completion. Only over `tcp` is the sudden end of a peer also the proof that
    /// nothing more is written; otherwise memory that it was told about stays quarantined.
    pub provider: String,
}

#[cfg(all(feature = "libfabric", not(kv_loom)))]
impl Default for LibfabricConfig {
    fn default() -> Self {
        Self {
            libraries: Vec::new(),
            provider: "tcp".into(),
        }
    }
}

#[cfg(all(feature = "libfabric", not(kv_loom)))]
impl LibfabricConfig {
    /// The thread of the passive side copies.
    pub(crate) fn is_emulated(&self) -> bool {
        self.provider == "tcp"
    }
}

/// The libraries of an agent.
#[cfg(all(feature = "one-sided", not(kv_loom)))]
#[derive(Clone, Debug, Default)]
pub(crate) struct OneSided {
    #[cfg(feature = "ucx")]
    pub(crate) ucx: UcxConfig,
    #[cfg(feature = "libfabric")]
    pub(crate) libfabric: LibfabricConfig,
}
