//! Which way a run takes, and to whom.

use std::fmt;
use std::time::Duration;

use kvgate_transfer::BackendKind;

use super::options::Backend;

/// The way to the peer.
#[derive(Clone, Debug)]
pub struct Route {
    /// The path that was asked for.
    pub backend: Backend,
    /// The peer on another host; without one, the run starts its own.
    pub far: Option<Far>,
    /// Bound of every wait for the peer.
    pub deadline: Duration,
}

/// A `transfer-bench serve` that somebody has started.
#[derive(Clone)]
pub struct Far {
    /// `HOST:PORT`.
    pub address: String,
    /// The secret of both sides.
    pub token: Option<Vec<u8>>,
}

impl fmt::Debug for Far {
    /// Without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Far({}, token: {})", self.address, self.token.is_some())
    }
}

impl Route {
    /// To a peer that the run starts.
    #[must_use]
    pub fn here(backend: Backend, deadline: Duration) -> Self {
        Self {
            backend,
            far: None,
            deadline,
        }
    }
}

/// The path as the engine names it; `None` for the choice among them.
#[must_use]
pub fn kind_of(backend: Backend) -> Option<BackendKind> {
    Some(match backend {
        Backend::Auto => return None,
        Backend::Local => BackendKind::Local,
        Backend::Shm => BackendKind::Shm,
        Backend::Cma => BackendKind::Cma,
        Backend::Tcp => BackendKind::Tcp,
        Backend::Ucx => BackendKind::Ucx,
        Backend::Libfabric => BackendKind::Libfabric,
    })
}

/// The path that carries a connection.
#[must_use]
pub fn backend_of(kind: BackendKind) -> Backend {
    match kind {
        BackendKind::Local => Backend::Local,
        BackendKind::Shm => Backend::Shm,
        BackendKind::Cma => Backend::Cma,
        BackendKind::Tcp => Backend::Tcp,
        BackendKind::Ucx => Backend::Ucx,
        BackendKind::Libfabric => Backend::Libfabric,
        // The simulation has no addresses, so no run gets there.
        _ => Backend::Auto,
    }
}
