//! [`PrefixTree`]: finished and arriving pages by the tokens they stand for.
//!
//! A node is one full logical page: a slot of the page space, with the compressed components of all
//! layers. It is *pending* while the flight that fills it is under way, and then belongs to that
//! flight; once everything has landed the tree takes the slot over and the node is *ready*. A pending
//! node can be found and leased, but the lease reads through the barrier of its flight, and the node
//! disappears when the flight fails or ends early (I-12).
//!
//! The length of a hit is the minimum over all page components (I-22): a page that lacks one ends it.
//!
//! **What is protected by what.** One mutex guards the tree. **Lock order.** It comes before every
//! other lock of this crate; nothing of this crate takes it with a lock held.

mod lease;

use std::collections::HashMap;
use std::fmt;

use kvgate_transfer::sync::{Arc, Mutex};
use kvgate_transfer::{Barrier, FlightLedger, StageState};

pub use lease::{PrefixLayer, PrefixLease};

use crate::error::{Error, ErrorKind};
use crate::identity::{BlockKey, KeyChain, Namespace};
use crate::ids::PageId;
use crate::lease::inflight::{FlightCore, InFlight};
use crate::lease::stage_of;
use crate::pool::PoolSet;
use crate::pool::drain::Parked;
use crate::prefix::lease::Run;
use crate::schema::{Component, PAGE_TOKENS, Space};

/// What the tree knows of a token sequence.
#[derive(Debug)]
#[must_use = "a hit keeps its pages only while it lives"]
pub enum Hit {
    /// The first `tokens` tokens are there, in every component.
    Ready {
        /// The right to read them.
        lease: PrefixLease,
        /// Length of the hit, a multiple of 256.
        tokens: u32,
    },
    /// The first `tokens` tokens are there or on their way: layers open as they land, or fail.
    Pending {
        /// The right to wait for them and to read them.
        lease: PrefixLease,
        /// Length of the hit, a multiple of 256.
        tokens: u32,
    },
    /// Nothing.
    Miss,
}

/// The components that a page holds, one bit per [`Component`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComponentSet(u32);

impl ComponentSet {
    /// Every component.
    pub const ALL: ComponentSet = ComponentSet((1 << Component::COUNT) - 1);

    /// Every component but one.
    pub fn without(self, component: Component) -> ComponentSet {
        ComponentSet(self.0 & !(1 << component.index()))
    }

    /// Whether the component is in the set.
    pub fn contains(self, component: Component) -> bool {
        self.0 >> component.index() & 1 == 1
    }
}

/// Pages of all sequences by their tokens. Nodes own their slots; the tree gives them back when they
/// are evicted, when their flight fails, and when it is dropped itself.
pub struct PrefixTree {
    pools: PoolSet,
    inner: Mutex<Inner>,
}

struct Inner {
    nodes: HashMap<BlockKey, Node>,
    namespace: Namespace,
    page_components: Vec<Component>,
    clock: u64,
}

struct Node {
    parent: BlockKey,
    page: PageId,
    components: ComponentSet,
    child_count: u32,
    used_at: u64,
    state: NodeState,
}

enum NodeState {
    /// The flight owns the slot.
    Pending(Arc<FlightCore>),
    /// The tree owns the slot; the ledger counts who may still read it.
    Ready(Arc<FlightLedger>),
}

/// How far a flight is.
enum Progress {
    Landed,
    UnderWay,
    Failed,
}

impl PrefixTree {
    /// An empty tree over these pools, in the namespace of their schema without a salt.
    pub fn new(pools: &PoolSet) -> PrefixTree {
        let namespace = Namespace::of_schema(pools.schema());
        let schema = pools.schema();
        let has_pages = |component: &Component| {
            component.spec().space == Space::Page
                && schema.rows().iter().any(|row| row.component == *component)
        };
        let inner = Inner {
            nodes: HashMap::new(),
            namespace,
            page_components: Component::ALL.into_iter().filter(has_pages).collect(),
            clock: 0,
        };
        PrefixTree {
            pools: pools.clone(),
            inner: Mutex::new(inner),
        }
    }

    /// Enters the full pages of `prompt` that a flight fills. Pages that the tree has already are
    /// left to it. Answers how many pages are new.
    ///
    /// # Errors
    /// `InvalidRequest` when the flight has fewer pages than the prompt.
    pub fn insert(&self, prompt: &[u32], flight: &InFlight) -> Result<u32, Error> {
        self.insert_with(prompt, flight, ComponentSet::ALL)
    }

    /// As [`PrefixTree::insert`], for pages that hold only some components.
    ///
    /// # Errors
    /// As [`PrefixTree::insert`].
    pub fn insert_with(
        &self,
        prompt: &[u32],
        flight: &InFlight,
        components: ComponentSet,
    ) -> Result<u32, Error> {
        let pages = flight.block_table().pages();
        let page_count = prompt.len() / PAGE_TOKENS as usize;
        if page_count > pages.len() {
            let expected = format!("at most the {} pages of the flight", pages.len());
            let value = page_count as u64;
            return Err(ErrorKind::InvalidRequest {
                field: "prompt pages",
                value,
                expected,
            }
            .into());
        }
        let mut inner = self.inner.lock();
        self.drop_failed(&mut inner);
        let chain = KeyChain::of(&inner.namespace, prompt);
        let mut parent = inner.namespace.root();
        let mut new_count = 0;
        for (&block, page) in chain.keys().iter().zip(pages) {
            if !inner.nodes.contains_key(&block) {
                let state = NodeState::Pending(flight.core().clone());
                inner.insert_node(block, parent, *page, components, state);
                new_count += 1;
            }
            parent = block;
        }
        Ok(new_count)
    }

    /// The longest prefix of `tokens` that the tree has in every page component, in whole pages.
    pub fn lookup(&self, tokens: &[u32]) -> Hit {
        let mut inner = self.inner.lock();
        self.drop_failed(&mut inner);
        let path = inner.path(tokens);
        let mut runs = Vec::new();
        for block in &path {
            match self.run_of(&mut inner, block) {
                Some(run) => runs.push(run),
                // The flight ended just now; what lies behind it goes with it.
                None => break,
            }
        }
        if runs.is_empty() {
            return Hit::Miss;
        }
        let tokens = runs.len() as u32 * PAGE_TOKENS;
        let is_ready = runs.iter().all(Run::is_ready);
        let lease = PrefixLease::new(&self.pools, runs, tokens);
        match is_ready {
            true => Hit::Ready { lease, tokens },
            false => Hit::Pending { lease, tokens },
        }
    }

    /// Takes over what has landed and removes what has failed. `lookup` and `insert` do it as well;
    /// call it before a flight that has landed is closed, or its pages are not kept.
    pub fn settle(&self) {
        self.drop_failed(&mut self.inner.lock());
    }

    /// Gives up to `page_count` ready pages back, the least recently used first; only pages that
    /// nobody leases and that no other node stands behind. Answers how many.
    pub fn evict(&self, page_count: u32) -> u32 {
        let mut inner = self.inner.lock();
        self.drop_failed(&mut inner);
        let mut evicted = 0;
        while evicted < page_count {
            let is_free = |node: &&Node| {
                let slot = self.pools.inner.allocator.slot(Space::Page, node.page);
                let is_ready = matches!(node.state, NodeState::Ready(_));
                is_ready && node.child_count == 0 && slot.state().readers == 0
            };
            let candidates = inner.nodes.iter().filter(|(_, node)| is_free(node));
            let Some((&block, _)) = candidates.min_by_key(|(_, node)| node.used_at) else {
                break;
            };
            self.remove(&mut inner, block);
            evicted += 1;
        }
        evicted
    }

    /// Pages in the tree: ready, pending.
    pub fn page_counts(&self) -> (u32, u32) {
        let inner = self.inner.lock();
        let is_ready = |node: &&Node| matches!(node.state, NodeState::Ready(_));
        let ready = inner.nodes.values().filter(is_ready).count();
        (ready as u32, (inner.nodes.len() - ready) as u32)
    }

    /// A lease of one node's page; `None` when its flight is over.
    fn run_of(&self, inner: &mut Inner, block: &BlockKey) -> Option<Run> {
        inner.clock += 1;
        let clock = inner.clock;
        let node = inner.nodes.get_mut(block)?;
        node.used_at = clock;
        let (ledger, barrier) = match &node.state {
            NodeState::Pending(core) => (core.tenancy.ledger.clone(), core.barrier.clone()),
            NodeState::Ready(ledger) => (ledger.clone(), Barrier::ready()),
        };
        Run::new(&self.pools, node.page, barrier, &ledger).ok()
    }

    /// Brings every pending node up to date.
    fn drop_failed(&self, inner: &mut Inner) {
        let pending = |(block, node): (&BlockKey, &Node)| match &node.state {
            NodeState::Pending(core) => Some((*block, core.clone())),
            NodeState::Ready(_) => None,
        };
        let nodes: Vec<_> = inner.nodes.iter().filter_map(pending).collect();
        for (block, core) in nodes {
            let is_kept = match progress_of(&self.pools, &core) {
                Progress::Landed => self.take_over(inner, block, &core),
                Progress::UnderWay => !core.tenancy.has_ended(),
                Progress::Failed => false,
            };
            if !is_kept {
                self.remove(inner, block);
            }
        }
    }

    /// Makes a landed page the tree's own; `false` when its flight has ended before.
    fn take_over(&self, inner: &mut Inner, block: BlockKey, core: &Arc<FlightCore>) -> bool {
        let Some(node) = inner.nodes.get_mut(&block) else {
            return true;
        };
        let ledger = FlightLedger::new(self.pools.inner.next_number());
        if core.tenancy.hand_over(node.page, &ledger) {
            node.state = NodeState::Ready(ledger);
            return true;
        }
        false
    }

    /// Removes a node and everything behind it.
    fn remove(&self, inner: &mut Inner, block: BlockKey) {
        let children: Vec<BlockKey> = inner
            .nodes
            .iter()
            .filter(|(_, node)| node.parent == block)
            .map(|(child, _)| *child)
            .collect();
        for child in children {
            self.remove(inner, child);
        }
        let Some(node) = inner.nodes.remove(&block) else {
            return;
        };
        if let Some(parent) = inner.nodes.get_mut(&node.parent) {
            parent.child_count -= 1;
        }
        self.give_back(node);
    }

    fn give_back(&self, node: Node) {
        let NodeState::Ready(ledger) = node.state else {
            return;
        };
        let pools = &self.pools.inner;
        let drained = pools
            .allocator
            .slot(Space::Page, node.page)
            .drain(node.page.generation);
        debug_assert!(
            drained.is_ok(),
            "I-10: page {} was ended twice: {drained:?}",
            node.page
        );
        pools.park(Parked::new(vec![(Space::Page, node.page)], ledger, None));
    }
}

impl Inner {
    fn insert_node(
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
        };
        self.nodes.insert(block, node);
        if let Some(parent) = self.nodes.get_mut(&parent) {
            parent.child_count += 1;
        }
    }

    /// The nodes from the start that hold every page component: the minimum over the components of
    /// how far each one reaches (I-22).
    fn path(&self, tokens: &[u32]) -> Vec<BlockKey> {
        let chain = KeyChain::of(&self.namespace, tokens);
        let blocks = chain.keys();
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
}

/// Failed if any gate is shut for good, landed if all are open.
fn progress_of(pools: &PoolSet, core: &FlightCore) -> Progress {
    let mut all_ready = true;
    for layer in pools.schema().layers() {
        match core.barrier.check(stage_of(layer)) {
            StageState::Ready => {}
            StageState::Failed(_) => return Progress::Failed,
            StageState::NotArmed | StageState::Pending { .. } => all_ready = false,
        }
    }
    if all_ready {
        Progress::Landed
    } else {
        Progress::UnderWay
    }
}

impl Drop for PrefixTree {
    fn drop(&mut self) {
        let nodes = std::mem::take(&mut self.inner.lock().nodes);
        for node in nodes.into_values() {
            self.give_back(node);
        }
    }
}

impl fmt::Debug for PrefixTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ready, pending) = self.page_counts();
        f.debug_struct("PrefixTree")
            .field("ready", &ready)
            .field("pending", &pending)
            .finish()
    }
}
