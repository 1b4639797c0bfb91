//! The nodes of the tree, without the slots behind them.

use std::collections::HashMap;

use kvgate_transfer::FlightLedger;
use kvgate_transfer::sync::Arc;

use crate::identity::BlockKey;
use crate::ids::PageId;
use crate::lease::inflight::{FlightCore, InFlight};
use crate::prefix::ComponentSet;
use crate::prefix::journal::Journal;
use crate::prefix::policy::EvictionPolicy;
use crate::schema::{Component, PAGE_TOKENS, Space};

/// What the mutex of the tree guards.
pub(super) struct Inner {
    pub(super) nodes: HashMap<BlockKey, Node>,
    /// The parent of first blocks.
    pub(super) root: BlockKey,
    pub(super) page_components: Vec<Component>,
    pub(super) clock: u64,
    pub(super) policy: Box<dyn EvictionPolicy>,
    /// `None`: nobody wants to know.
    pub(super) journal: Option<Journal>,
}

/// One full page of one prefix.
pub(super) struct Node {
    pub(super) parent: BlockKey,
    pub(super) page: PageId,
    pub(super) components: ComponentSet,
    pub(super) child_count: u32,
    pub(super) used_at: u64,
    pub(super) state: NodeState,
    /// The window and the states of the end of this page, where they are kept.
    pub(super) tail: Option<Tail>,
}

/// The checkpoint of a node.
pub(super) struct Tail {
    pub(super) windows: Vec<PageId>,
    pub(super) state: NodeState,
}

impl Tail {
    pub(super) fn slots(&self) -> Vec<(Space, PageId)> {
        self.windows.iter().map(|id| (Space::Window, *id)).collect()
    }
}

/// Who owns a slot of the tree.
pub(super) enum NodeState {
    /// The flight that fills it.
    Pending(Arc<FlightCore>),
    /// The tree; the ledger counts who may still use it.
    Ready(Arc<FlightLedger>),
}

impl NodeState {
    /// The flight, while it owns the slot.
    pub(super) fn pending(&self) -> Option<&Arc<FlightCore>> {
        match self {
            NodeState::Pending(core) => Some(core),
            NodeState::Ready(_) => None,
        }
    }

    /// Whether the slot is the tree's.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self, NodeState::Ready(_))
    }
}

impl Inner {
    pub(super) fn insert_node(
        &mut self,
        block: BlockKey,
        parent: BlockKey,
        page: PageId,
        components: ComponentSet,
        state: NodeState,
    ) {
        self.clock += 1;
        let node = Node {
            parent,
            page,
            components,
            child_count: 0,
            used_at: self.clock,
            state,
            tail: None,
        };
        self.nodes.insert(block, node);
        self.policy.inserted(block);
        if let Some(parent) = self.nodes.get_mut(&parent) {
            parent.child_count += 1;
        }
    }

    /// Remembers the tokens of a node that was inserted, the one behind `depth` others, if somebody is to be
    /// told of it.
    pub(super) fn note_entered(&mut self, block: BlockKey, depth: usize, tokens: &[u32]) {
        if let Some(journal) = &mut self.journal {
            let start = depth * PAGE_TOKENS as usize;
            journal.entered(block, depth, &tokens[start..start + PAGE_TOKENS as usize]);
        }
    }

    /// Enters the blocks of `tokens` that a flight brings and the tree does not have. Answers how many, and whether the
    /// flight brings the checkpoint of the last one.
    pub(super) fn enter(
        &mut self,
        blocks: &[BlockKey],
        tokens: &[u32],
        flight: &InFlight,
        components: ComponentSet,
    ) -> (u32, bool) {
        let (core, table) = (flight.core(), flight.block_table());
        let shared = (core.tenancy.shared_tokens() / PAGE_TOKENS) as usize;
        let mut parent = self.root;
        let mut new_count = 0;
        for (index, (&block, page)) in blocks.iter().zip(table.pages()).enumerate() {
            if !self.nodes.contains_key(&block) {
                // Pages that the flight shares were the tree's. Without them the rest has no place in it.
                if index < shared {
                    return (new_count, false);
                }
                let state = NodeState::Pending(core.clone());
                self.insert_node(block, parent, *page, components, state);
                self.note_entered(block, index, tokens);
                new_count += 1;
            }
            parent = block;
        }
        // Without a request slot nobody moves the window slots on: they are those of the end.
        if !table.is_prefix() || blocks.len() != table.pages().len() {
            return (new_count, false);
        }
        let state = NodeState::Pending(core.clone());
        let windows = table.windows().to_vec();
        let is_end_new = self.insert_tail(&parent, Tail { windows, state });
        (new_count, is_end_new)
    }

    /// Gives a node its checkpoint; one that it has stays. Answers whether it was taken.
    pub(super) fn insert_tail(&mut self, block: &BlockKey, tail: Tail) -> bool {
        match self.nodes.get_mut(block) {
            Some(node) if node.tail.is_none() => {
                node.tail = Some(tail);
                true
            }
            _ => false,
        }
    }

    /// The nodes from the start that hold every page component: the minimum over the components of
    /// how far each one reaches (I-22).
    pub(super) fn path(&self, blocks: &[BlockKey]) -> Vec<BlockKey> {
        let known = |block: &BlockKey| self.nodes.get(block).map(|node| node.components);
        let reach = |component: &Component| {
            let holds = |set: ComponentSet| set.contains(*component);
            blocks
                .iter()
                .take_while(|block| known(block).is_some_and(holds))
                .count()
        };
        let any = blocks
            .iter()
            .take_while(|block| known(block).is_some())
            .count();
        let length = self.page_components.iter().map(reach).min().unwrap_or(any);
        blocks[..length].to_vec()
    }

    /// How many of the blocks of a path end where a request can go on: the last one with a checkpoint
    /// among the first `limit` (I-22: the end must be admissible for the window and the states too).
    pub(super) fn resumable(&self, path: &[BlockKey], limit: usize) -> usize {
        let has_tail = |block: &BlockKey| self.nodes.get(block).is_some_and(|n| n.tail.is_some());
        let path = &path[..path.len().min(limit)];
        path.iter().rposition(has_tail).map_or(0, |last| last + 1)
    }
}
