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
    /// Those of [`PoolSet::pool_ids_of`] when they are not; `InvalidRequest` for a tree over other pools,
    /// whose page numbers would be those of other bytes.
    pub fn new(
        agent: &Agent,
        pools: &PoolSet,
        tree: PrefixTree,
    ) -> Result<Side, kvgate_kvcache::Error> {
        pools.pool_ids_of(agent)?;
        if !tree.is_over(pools) {
            let kind = kvgate_kvcache::ErrorKind::InvalidRequest {
                field: "tree",
                value: 0,
                expected: "a tree over the pools of the side".to_owned(),
            };
            return Err(kind.into());
        }
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

    /// Gives ready pages and checkpoints up until so many page and window slots are free. Answers whether
    /// they are.
    ///
    /// No more is given up than is missing: a slot that a reading step or a flight still uses comes free
    /// later, and nothing else goes in its place, or one slow reader would cost the whole tree.
    pub fn make_room(&self, pages: u32, windows: u32) -> bool {
        self.tree
            .evict(pages.saturating_sub(self.pools.stats().pages.free));
        loop {
            let stats = self.pools.stats();
            if stats.pages.free < pages || stats.windows.free >= windows {
                return stats.pages.free >= pages;
            }
            let is_given_up = self.tree.evict_checkpoints(1) > 0;
            if !is_given_up || self.pools.stats().windows.free <= stats.windows.free {
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
