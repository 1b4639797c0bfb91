//! [`PrefixSink`]: who is told what a tree has.

use std::collections::{HashMap, HashSet};

use crate::identity::BlockKey;
use crate::prefix::node::{Inner, NodeState};
use crate::prefix::{ComponentSet, PrefixTree};

/// A block that can be read.
#[derive(Clone, Copy, Debug)]
pub struct StoredBlock<'a> {
    /// Its key.
    pub key: BlockKey,
    /// The key of the block before it; `None` for the first one of a prefix.
    pub parent: Option<BlockKey>,
    /// Its tokens, 256 of them.
    pub tokens: &'a [u32],
}

/// Is told which blocks a tree has, each change once and in order.
///
/// A block is reported when it, and with it every block before it, is there in all components: never while
/// the flight that fills it is under way. It is reported as removed before its slot can be used
/// again. Both are called with the tree locked, so neither may call the tree, or wait.
pub trait PrefixSink: Send {
    /// The block can be read from now on.
    fn stored(&mut self, block: StoredBlock<'_>);

    /// The block is not in the tree any more.
    fn removed(&mut self, key: BlockKey);
}

/// What the sink was told, and what it will be told.
pub(super) struct Journal {
    sink: Box<dyn PrefixSink>,
    told: HashSet<BlockKey>,
    waiting: HashMap<BlockKey, Waiting>,
}

struct Waiting {
    /// Blocks before it.
    depth: usize,
    tokens: Box<[u32]>,
}

impl PrefixTree {
    /// Tells `sink` from now on which blocks are there. Answers `false`, and does nothing, when the tree is
    /// not empty: it would not be told of what is there already.
    pub fn report_to(&self, sink: Box<dyn PrefixSink>) -> bool {
        let mut inner = self.inner.lock();
        let is_empty = inner.nodes.is_empty();
        if is_empty {
            inner.journal = Some(Journal {
                sink,
                told: HashSet::new(),
                waiting: HashMap::new(),
            });
        }
        is_empty
    }
}

impl Journal {
    /// Remembers a block that was entered, with its tokens.
    pub(super) fn entered(&mut self, key: BlockKey, depth: usize, tokens: &[u32]) {
        let tokens = tokens.into();
        self.waiting.insert(key, Waiting { depth, tokens });
    }

    /// Forgets a block that has left the tree.
    pub(super) fn removed(&mut self, key: BlockKey) {
        self.waiting.remove(&key);
        if self.told.remove(&key) {
            self.sink.removed(key);
        }
    }

    /// Forgets all blocks.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        for key in std::mem::take(&mut self.told) {
            self.sink.removed(key);
        }
    }
}

impl Inner {
    /// Tells of the blocks that can be read since the last time, parents first.
    pub(super) fn tell(&mut self) {
        let Some(journal) = &mut self.journal else {
            return;
        };
        let root = self.root;
        let is_whole = |key: &BlockKey| {
            let node = self.nodes.get(key);
            node.is_some_and(|node| {
                matches!(node.state, NodeState::Ready(_)) && node.components == ComponentSet::ALL
            })
        };
        let mut ready: Vec<(usize, BlockKey)> = journal
            .waiting
            .iter()
            .filter(|(key, _)| is_whole(key))
            .map(|(key, waiting)| (waiting.depth, *key))
            .collect();
        ready.sort_unstable();
        for (_, key) in ready {
            let Some(node) = self.nodes.get(&key) else {
                continue;
            };
            let parent = (node.parent != root).then_some(node.parent);
            // Nobody could get there yet.
            if parent.is_some_and(|parent| !journal.told.contains(&parent)) {
                continue;
            }
            let Some(waiting) = journal.waiting.remove(&key) else {
                continue;
            };
            let tokens = &waiting.tokens;
            journal.told.insert(key);
            journal.sink.stored(StoredBlock {
                key,
                parent,
                tokens,
            });
        }
    }
}
