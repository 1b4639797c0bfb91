//! The agent of a side: how it is built, how the sides of one process find each other, and when a peer
//! that is silent counts as lost.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvgate_kvcache::{PoolConfig, PoolSet};
use kvgate_transfer::{
    self as transfer, Agent, AgentBuilder, Deadline, Incarnation, MemoryKind, PeerId,
};

use super::endpoint::{self, Target};
use super::failure::{Failure, FailureKind};
use super::model::{Host, cache_failure};
use super::options::{HostOptions, Transport};
use super::sizing::PoolSize;

/// Builds the agent of a side.
pub fn build_agent(name: &str, options: &HostOptions) -> Result<Agent, Failure> {
    let token = options
        .auth_token_file
        .as_deref()
        .map(endpoint::read_token)
        .transpose()?;
    let agent = libraries(Agent::builder(name))
        .auth_token(token)
        .build()
        .map_err(|error| transfer_failure(&error))?;
    if let Some(directory) = &options.status_dir {
        let socket = directory.join(format!("{name}.sock"));
        agent
            .serve_status(socket)
            .map_err(|error| transfer_failure(&error))?;
    }
    Ok(agent)
}

/// Libraries that `KVGATE_UCX_LIBRARY` and `KVGATE_LIBFABRIC_LIBRARY` name are tried before the system's.
#[must_use]
pub fn libraries(builder: AgentBuilder) -> AgentBuilder {
    #[cfg(any(feature = "ucx", feature = "libfabric"))]
    let named = |variable: &str| {
        let named = std::env::var_os(variable);
        named.map(std::path::PathBuf::from).into_iter().collect()
    };
    #[cfg(feature = "ucx")]
    let builder = builder.ucx(transfer::UcxConfig {
        libraries: named("KVGATE_UCX_LIBRARY"),
        ..transfer::UcxConfig::default()
    });
    #[cfg(feature = "libfabric")]
    let builder = builder.libfabric(transfer::LibfabricConfig {
        libraries: named("KVGATE_LIBFABRIC_LIBRARY"),
        ..transfer::LibfabricConfig::default()
    });
    builder
}

/// Makes and registers the pools of a side. A peer on the same host maps them with `shm`, and only then
/// they are shared.
pub fn make_pools(
    options: &HostOptions,
    host: &Host,
    size: PoolSize,
    agent: &Agent,
) -> Result<PoolSet, Failure> {
    let memory = if matches!(options.transport, Transport::Shm | Transport::Auto) {
        MemoryKind::Shared
    } else {
        MemoryKind::Host
    };
    let config = PoolConfig {
        pages: size.pages,
        windows: size.windows,
        requests: size.requests,
        memory,
    };
    let pools =
        PoolSet::new(Arc::clone(&host.schema), config).map_err(|error| cache_failure(&error))?;
    pools
        .register(agent)
        .map_err(|error| cache_failure(&error))?;
    Ok(pools)
}

/// Connects to the first address that answers.
pub fn connect(agent: &Agent, target: &Target, deadline: Duration) -> Result<PeerId, Failure> {
    let addresses = match target {
        Target::InProcess(name) => return connect_in_process(name, agent),
        Target::Agent(addresses) => addresses,
    };
    let until = Deadline::after(deadline);
    let mut refused = Failure::internal("no address to connect to");
    for address in addresses {
        match agent.connect(address, until) {
            Ok(peer) => return Ok(peer),
            Err(error) => refused = transfer_failure(&error),
        }
    }
    Err(refused)
}

/// Agents of decode sides that wait for a prefill side in the same process.
static MEETINGS: Mutex<BTreeMap<String, Agent>> = Mutex::new(BTreeMap::new());

/// Waits under `name` for the prefill side of this process.
pub fn wait_in_process(name: &str, agent: &Agent) {
    MEETINGS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(name.to_owned(), agent.clone());
}

/// Connects to the decode side that waits under `name` in this process.
fn connect_in_process(name: &str, agent: &Agent) -> Result<PeerId, Failure> {
    let decode = MEETINGS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .remove(name);
    let decode = decode.ok_or_else(|| Failure::internal(format!("nobody waits under {name}")))?;
    let (peer, _) =
        Agent::connect_local(agent, &decode).map_err(|error| transfer_failure(&error))?;
    Ok(peer)
}

/// Which life of the peer a connection belongs to.
pub fn incarnation(agent: &Agent, peer: PeerId) -> Result<Incarnation, Failure> {
    let info = agent
        .peer(peer)
        .ok_or_else(|| Failure::new(FailureKind::PeerLost, "the peer was lost"))?;
    Ok(info.incarnation)
}

/// Judges a peer by its progress: a wait fails when the peer has shown none for the deadline.
#[derive(Clone, Debug)]
pub struct PeerWatch {
    agent: Agent,
    peer: PeerId,
    deadline: Duration,
}

impl PeerWatch {
    /// Watches one peer.
    #[must_use]
    pub fn new(agent: &Agent, peer: PeerId, deadline: Duration) -> Self {
        Self {
            agent: agent.clone(),
            peer,
            deadline,
        }
    }

    /// The peer.
    #[must_use]
    pub fn peer(&self) -> PeerId {
        self.peer
    }

    /// The bound of a wait.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Whether a wait that began at `since` may go on.
    pub fn check(&self, since: Instant, what: &str) -> Result<(), Failure> {
        let Some(info) = self.agent.peer(self.peer) else {
            return Err(Failure::new(
                FailureKind::PeerLost,
                format!("the peer was lost during {what}"),
            ));
        };
        let last = info.last_progress.max(since);
        if last.elapsed() <= self.deadline {
            return Ok(());
        }
        let deadline_ms = self.deadline.as_millis();
        Err(Failure::new(
            FailureKind::DeadlineExceeded,
            format!(
                "{} showed no progress for {deadline_ms} ms during {what}",
                info.name
            ),
        )
        .with_field("deadline_ms", deadline_ms))
    }
}

/// A short slice of a longer wait, after which the peer's progress is looked at again.
#[must_use]
pub fn slice() -> Deadline {
    Deadline::after(Duration::from_millis(20))
}

/// An error of the transfer library as the failure of the run.
#[must_use]
pub fn transfer_failure(error: &transfer::Error) -> Failure {
    use transfer::ErrorKind;
    let text = error.to_string();
    match error.kind() {
        ErrorKind::OutOfMemory { asked_bytes, .. } => {
            Failure::new(FailureKind::OutOfMemory, text).with_field("pool_pages", asked_bytes)
        }
        ErrorKind::AddressInUse { address } => endpoint::in_use(address, &"the address is in use"),
        ErrorKind::AuthRequired { address } => {
            Failure::new(FailureKind::BadInput, text).with_field("auth_token_file", address)
        }
        ErrorKind::BackendUnavailable { backend, .. } => {
            Failure::new(FailureKind::BadInput, text).with_field("transport", backend)
        }
        ErrorKind::VersionMismatch { theirs, .. } => {
            Failure::new(FailureKind::SchemaMismatch, text).with_field("protocol_version", theirs)
        }
        ErrorKind::HandshakeRefused { address, .. } => {
            Failure::new(FailureKind::BadInput, text).with_field("connect", address)
        }
        ErrorKind::Unreachable { address, .. } => {
            Failure::new(FailureKind::PeerLost, text).with_field("connect", address)
        }
        ErrorKind::DeadlineExceeded { what, .. } => {
            Failure::new(FailureKind::DeadlineExceeded, text).with_field("deadline_ms", what)
        }
        ErrorKind::PeerLost { .. } | ErrorKind::PeerDown { .. } | ErrorKind::UnknownPeer { .. } => {
            Failure::new(FailureKind::PeerLost, text)
        }
        _ => Failure::internal(text),
    }
}
