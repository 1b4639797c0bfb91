//! The host tier: a slab of pools of its own, with the slot geometry of the device pools.
//!
//! Its pages have generations and a tree as those of the device have, so what holds there holds here: a
//! prefix is there with every component or not at all, a page that somebody leases is not given up, and a
//! slot is used again only against the proof that nobody touches it. A pin is a [`HostLease`]; it moves
//! into the operation that reads the pages, and ends when that is terminal.

use kvgate_kvcache::identity::Namespace;
use kvgate_kvcache::prefix::EvictionPolicy;
use kvgate_kvcache::schema::PAGE_TOKENS;
use kvgate_kvcache::{CacheSchema, Hit, MemoryKind, PoolConfig, PoolSet, PrefixLease, PrefixTree};
use kvgate_transfer::Agent;
use kvgate_transfer::sync::Arc;

use crate::policy::S3Fifo;
use crate::side::Side;

/// How much the host tier holds, and what goes first.
#[derive(Debug)]
pub struct HostConfig {
    /// Logical pages of 256 tokens.
    pub pages: u32,
    /// Boundaries that can be gone on from. Each takes the window slots of
    /// [`CacheSchema::boundary_windows`], one for windows of up to 256 tokens.
    pub checkpoints: u32,
    /// Where the memory lives.
    pub memory: MemoryKind,
    /// What goes first. `None`: S3-FIFO.
    pub policy: Option<Box<dyn EvictionPolicy>>,
}

/// A pin on a prefix of the host tier: its pages and its checkpoint stay while it lives.
#[derive(Clone, Debug)]
#[must_use = "the prefix is kept only while this lives"]
pub struct HostLease(Arc<PrefixLease>);

impl HostLease {
    pub(crate) fn new(lease: PrefixLease) -> HostLease {
        HostLease(Arc::new(lease))
    }

    /// Tokens of the prefix.
    pub fn tokens(&self) -> u32 {
        self.0.tokens()
    }

    pub(crate) fn prefix(&self) -> &Arc<PrefixLease> {
        &self.0
    }
}

/// Builds the host tier: an agent, the pools registered with it, an empty tree.
///
/// # Errors
/// Those of the pools (`ImpossiblePool`, `OutOfMemory`) and of the agent.
pub fn host_side(
    schema: &Arc<CacheSchema>,
    namespace: Namespace,
    config: HostConfig,
) -> Result<Side, kvgate_kvcache::Error> {
    let agent = Agent::builder("host tier").build()?;
    // Far enough from the start that a whole window lies before it.
    let far_tokens = (schema.geometry().window_tokens / PAGE_TOKENS + 2) * PAGE_TOKENS;
    let slots_each = schema.boundary_windows(far_tokens).len() as u32;
    let pools = PoolSet::new(
        schema.clone(),
        PoolConfig {
            pages: config.pages,
            windows: config.checkpoints.saturating_mul(slots_each.max(1)),
            // Nobody computes in the host tier; a space has at least one slot.
            requests: 1,
            memory: config.memory,
        },
    )?;
    pools.register(&agent)?;
    let policy = config.policy.unwrap_or_else(|| Box::<S3Fifo>::default());
    let tree = PrefixTree::in_namespace(&pools, namespace, policy)?;
    Side::new(&agent, &pools, tree)
}

/// A pin on the longest prefix of the host tier that is whole and ready and that a request can go on from.
pub(crate) fn pin(host: &Side, tokens: &[u32]) -> Option<HostLease> {
    match host.tree().resumable(tokens) {
        Hit::Ready { lease, .. } => Some(HostLease::new(lease)),
        // A backup that is still under way is no source yet.
        Hit::Pending { .. } | Hit::Miss => None,
    }
}
