//! Which pages of a tree go first when room is needed.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::identity::BlockKey;

/// The order in which a [`crate::PrefixTree`] gives pages up.
///
/// A policy proposes, the tree decides: it asks for a victim and says which pages can go, namely those
/// that are ready, that nobody leases, and that no other page stands behind. So whole blocks leave
/// together with their checkpoint, and a prefix is shortened from its end only.
pub trait EvictionPolicy: fmt::Debug + Send {
    /// A page has come in.
    fn inserted(&mut self, block: BlockKey);

    /// A page was leased for a request. Looking alone is not told.
    fn used(&mut self, block: BlockKey);

    /// A page has left, for whatever reason.
    fn removed(&mut self, block: BlockKey);

    /// The page to give up next, among those that can go; `None` when none can. The tree tells of the
    /// removal by [`EvictionPolicy::removed`].
    fn victim(&mut self, can_go: &mut dyn FnMut(&BlockKey) -> bool) -> Option<BlockKey>;
}

/// Least recently used first.
#[derive(Debug, Default)]
pub struct Lru {
    order: BTreeMap<u64, BlockKey>,
    used_at: HashMap<BlockKey, u64>,
    clock: u64,
}

impl EvictionPolicy for Lru {
    fn inserted(&mut self, block: BlockKey) {
        self.used(block);
    }

    fn used(&mut self, block: BlockKey) {
        self.clock += 1;
        if let Some(before) = self.used_at.insert(block, self.clock) {
            self.order.remove(&before);
        }
        self.order.insert(self.clock, block);
    }

    fn removed(&mut self, block: BlockKey) {
        if let Some(at) = self.used_at.remove(&block) {
            self.order.remove(&at);
        }
    }

    fn victim(&mut self, can_go: &mut dyn FnMut(&BlockKey) -> bool) -> Option<BlockKey> {
        self.order.values().find(|block| can_go(block)).copied()
    }
}
