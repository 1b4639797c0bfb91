//! [`Side`]: one end of the movement between two tiers of memory.

use kvgate_kvcache::{Hit, PoolSet, PrefixTree};
use kvgate_transfer::{Agent, Incarnation, PeerId, PoolId};

/// Pools, the agent that they are registered with, and the tree of what they hold.
#[derive(Debug)]
pub struct Side {
    agent: Agent,
    pools: PoolSet,
    tree: PrefixTree,
}

impl Side {
    /// `tree` is over `pools`, which are registered with `agent`.
    ///
    /// # Errors
    /// Those of [`PoolSet::pool_ids_of`] when they are not.
    pub fn new(
        agent: &Agent,
        pools: &PoolSet,
        tree: PrefixTree,
    ) -> Result<Side, kvgate_kvcache::Error> {
        pools.pool_ids_of(agent)?;
        Ok(Side {
            agent: agent.clone(),
            pools: pools.clone(),
            tree,
        })
    }

    /// The agent.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// The pools.
    pub fn pools(&self) -> &PoolSet {
        &self.pools
    }

    /// What they hold.
    pub fn tree(&self) -> &PrefixTree {
        &self.tree
    }

    /// Gives ready pages and checkpoints up until so many page and window slots are free, or nothing
    /// more can go. Answers whether they are free.
    pub fn make_room(&self, pages: u32, windows: u32) -> bool {
        loop {
            let stats = self.pools.stats();
            let missing_pages = pages.saturating_sub(stats.pages.free);
            let missing_windows = windows.saturating_sub(stats.windows.free);
            if missing_pages == 0 && missing_windows == 0 {
                return true;
            }
            let mut evicted = self.tree.evict(missing_pages);
            if missing_windows > 0 && self.pools.stats().windows.free < windows {
                evicted += self.tree.evict_checkpoints(1);
            }
            if evicted == 0 {
                return false;
            }
        }
    }

    /// What the agent of this side knows of the other one: its life, and its pools.
    pub(crate) fn knows(&self, peer: PeerId) -> Option<(Incarnation, Vec<PoolId>)> {
        let info = self.agent.peer(peer)?;
        let pools = info.pools.iter().map(|pool| pool.pool).collect();
        Some((info.incarnation, pools))
    }
}

/// Tokens of a hit, whether it is there or on its way.
pub(crate) fn tokens_of(hit: &Hit) -> u32 {
    match hit {
        Hit::Ready { tokens, .. } | Hit::Pending { tokens, .. } => *tokens,
        Hit::Miss => 0,
    }
}
