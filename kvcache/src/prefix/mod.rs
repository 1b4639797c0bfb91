//! [`PrefixTree`]: finished and arriving pages by the tokens they stand for.
//!
//! A node is one full logical page: a slot of the page space, with the compressed components of all
//! layers. It is *pending* while the flight that fills it is under way, and then belongs to that
//! flight; once everything has landed the tree takes the slot over and the node is *ready*. A pending
//! node can be found and leased, but the lease reads through the barrier of its flight, and the node
//! disappears when the flight fails or ends early (I-12).
//!
//! The length of a hit is the minimum over all page components (I-22): a page that lacks one ends it.
//! A request can go on behind a prefix only where the window and the states of its end are kept: a
//! node may have a *checkpoint*, window slots of its own. [`PrefixTree::lookup`] asks for pages,
//! [`PrefixTree::resumable`] for the longest prefix with such an end.
//!
//! **What is protected by what.** One mutex guards the tree. **Lock order.** It comes before every
//! other lock of this crate; nothing of this crate takes it with a lock held.

mod checkpoint;
pub(crate) mod hold;
mod journal;
mod lease;
mod node;
mod policy;
mod publish;
pub(crate) mod resume;

use std::collections::HashMap;
use std::fmt;

use kvgate_transfer::sync::{Arc, Mutex};
use kvgate_transfer::{Barrier, FlightLedger, StageState};

pub use checkpoint::{Checkpoint, CheckpointWriter};
pub use journal::{PrefixSink, StoredBlock};
pub use lease::{PrefixLayer, PrefixLease};
pub use policy::{EvictionPolicy, Lru};

use crate::error::Error;
use crate::identity::{BlockKey, KeyChain, Namespace, NamespaceDigest};
use crate::ids::PageId;
use crate::lease::inflight::{FlightCore, InFlight};
use crate::lease::stage_of;
use crate::lease::tenancy::Tenancy;
use crate::pool::PoolSet;
use crate::pool::drain::Parked;
use crate::prefix::lease::Run;
use crate::prefix::node::{Inner, Node, NodeState, Tail};
use crate::prefix::resume::invalid;
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
    namespace: Namespace,
    inner: Mutex<Inner>,
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
        PrefixTree::over(
            pools,
            Namespace::of_schema(pools.schema()),
            Box::<Lru>::default(),
        )
    }

    /// An empty tree over these pools for one tenant, with an order of its own in which pages are given
    /// up: prefixes of other namespaces are not found.
    ///
    /// # Errors
    /// `InvalidRequest` when its blocks are not logical pages of 256 tokens.
    pub fn in_namespace(
        pools: &PoolSet,
        namespace: Namespace,
        policy: Box<dyn EvictionPolicy>,
    ) -> Result<PrefixTree, Error> {
        match namespace.block_tokens() {
            PAGE_TOKENS => Ok(PrefixTree::over(pools, namespace, policy)),
            other => Err(invalid("block_tokens", other, PAGE_TOKENS.to_string())),
        }
    }

    /// Whether its pages are pages of these pools.
    pub fn is_over(&self, pools: &PoolSet) -> bool {
        Arc::ptr_eq(&self.pools.inner, &pools.inner)
    }

    /// Which prefixes it can hold.
    pub fn namespace(&self) -> NamespaceDigest {
        self.namespace.digest()
    }

    fn over(pools: &PoolSet, namespace: Namespace, policy: Box<dyn EvictionPolicy>) -> PrefixTree {
        let schema = pools.schema();
        let has_pages = |component: &Component| {
            component.spec().space == Space::Page
                && schema.rows().iter().any(|row| row.component == *component)
        };
        let inner = Inner {
            nodes: HashMap::new(),
            root: namespace.root(),
            page_components: Component::ALL.into_iter().filter(has_pages).collect(),
            clock: 0,
            policy,
            journal: None,
        };
        PrefixTree {
            pools: pools.clone(),
            namespace,
            inner: Mutex::new(inner),
        }
    }

    /// Enters the full pages of `prompt` that a flight fills. Pages that the tree has already are
    /// left to it. Answers how many pages are new.
    ///
    /// # Errors
    /// `InvalidRequest` when the flight brings fewer whole pages than the prompt has: what it has slots for
    /// behind them is never filled by it.
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
        let landing_pages = flight.core().landing_tokens / PAGE_TOKENS;
        let page_count = prompt.len() / PAGE_TOKENS as usize;
        if page_count > landing_pages as usize {
            let expected =
                format!("at most the {landing_pages} whole pages that the flight brings");
            return Err(invalid("prompt pages", page_count as u32, expected));
        }
        let chain = self.keys(prompt);
        let mut inner = self.inner.lock();
        self.drop_failed(&mut inner);
        Ok(inner.enter(chain.keys(), prompt, flight, components).0)
    }

    /// As [`PrefixTree::insert`], for a flight that brings a prefix and its end
    /// ([`PoolSet::reserve_prefix`]): its window slots become the checkpoint.
    ///
    /// This is where two flights with the same prefix are told apart, before anything is sent: `false`, and
    /// nothing entered, when the end is there or on its way already. Such a flight is of no use, and is
    /// to be dropped before it is posted.
    ///
    /// # Errors
    /// `InvalidRequest` when the flight is not of these tokens.
    pub fn insert_prefix(&self, tokens: &[u32], flight: &InFlight) -> Result<bool, Error> {
        let table = flight.block_table();
        let landing_tokens = flight.core().landing_tokens;
        let is_whole = landing_tokens == table.tokens();
        if !table.is_prefix() || !is_whole || landing_tokens as usize != tokens.len() {
            let expected = format!("the {landing_tokens} tokens that a flight of a prefix brings");
            return Err(invalid("tokens", tokens.len() as u32, expected));
        }
        let chain = self.keys(tokens);
        let mut inner = self.inner.lock();
        self.drop_failed(&mut inner);
        let end = inner.nodes.get(&chain.parent());
        if end.is_some_and(|node| node.tail.is_some()) {
            return Ok(false);
        }
        let entered = inner.enter(chain.keys(), tokens, flight, ComponentSet::ALL);
        Ok(entered.1)
    }

    /// The longest prefix of `tokens` that the tree has in every page component, in whole pages.
    pub fn lookup(&self, tokens: &[u32]) -> Hit {
        let chain = self.keys(tokens);
        let mut inner = self.inner.lock();
        self.drop_failed(&mut inner);
        let path = inner.path(chain.keys());
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
        let lease = PrefixLease::new(&self.pools, runs, Vec::new(), tokens);
        hit(lease, tokens, is_ready)
    }

    /// The longest prefix of `tokens` behind which a request can go on: every page component of every page,
    /// and the checkpoint of its end. It ends before the last token, which a request always computes.
    ///
    /// Ready to be taken over with [`PoolSet::resume`].
    pub fn resumable(&self, tokens: &[u32]) -> Hit {
        let limit = tokens.len().saturating_sub(1) / PAGE_TOKENS as usize;
        self.resumable_within(tokens, limit)
    }

    /// The prefix that is exactly `tokens`, with its checkpoint: what another tier can take over.
    pub fn boundary(&self, tokens: &[u32]) -> Hit {
        match self.resumable_within(tokens, tokens.len() / PAGE_TOKENS as usize) {
            Hit::Ready { tokens: t, .. } | Hit::Pending { tokens: t, .. }
                if t as usize != tokens.len() =>
            {
                Hit::Miss
            }
            hit => hit,
        }
    }

    fn resumable_within(&self, tokens: &[u32], limit: usize) -> Hit {
        // Runs are given up after the lock.
        let mut spare: Vec<Run> = Vec::new();
        let chain = self.keys(tokens);
        let mut inner = self.inner.lock();
        self.drop_failed(&mut inner);
        let path = inner.path(chain.keys());
        let mut length = inner.resumable(&path, limit);
        while length > 0 {
            let last = &path[length - 1];
            let runs: Vec<Run> = path[..length]
                .iter()
                .map_while(|block| self.run_of(&mut inner, block))
                .collect();
            match self.tail_runs(&inner, last) {
                Some(tail) if runs.len() == length => {
                    let tokens = length as u32 * PAGE_TOKENS;
                    let is_ready = runs.iter().chain(&tail).all(Run::is_ready);
                    let lease = PrefixLease::new(&self.pools, runs, tail, tokens);
                    return hit(lease, tokens, is_ready);
                }
                // A flight ended just now; an earlier end may do.
                _ => {
                    let reach = runs.len().min(length - 1);
                    spare.extend(runs);
                    length = inner.resumable(&path, reach);
                }
            }
        }
        Hit::Miss
    }

    /// Tokens of the longest prefix of `tokens` that is ready, and of the longest of those that a request
    /// can go on from. A look: it leases nothing, and keeps nothing from being evicted.
    pub fn probe(&self, tokens: &[u32]) -> (u32, u32) {
        let limit = tokens.len().saturating_sub(1) / PAGE_TOKENS as usize;
        let chain = self.keys(tokens);
        let mut inner = self.inner.lock();
        self.drop_failed(&mut inner);
        let path = inner.path(chain.keys());
        let is_ready = |block: &&BlockKey| inner.nodes[*block].state.is_ready();
        let ready = path.iter().take_while(is_ready).count();
        let has_end = |block: &BlockKey| {
            let tail = inner.nodes[block].tail.as_ref();
            tail.is_some_and(|tail| tail.state.is_ready())
        };
        let end = path[..ready.min(limit)].iter().rposition(has_end);
        let resumable = end.map_or(0, |last| last + 1);
        (ready as u32 * PAGE_TOKENS, resumable as u32 * PAGE_TOKENS)
    }

    /// Takes over what has landed and removes what has failed. `lookup` and `insert` do it as well;
    /// call it before a flight that has landed is closed, or its pages are not kept.
    pub fn settle(&self) {
        self.drop_failed(&mut self.inner.lock());
    }

    /// Gives up to `page_count` ready pages back, in the order of the policy; only pages that
    /// nobody leases and that no other node stands behind. Answers how many.
    pub fn evict(&self, page_count: u32) -> u32 {
        let mut inner = self.inner.lock();
        self.drop_failed(&mut inner);
        let mut evicted = 0;
        while evicted < page_count {
            let Inner { nodes, policy, .. } = &mut *inner;
            let mut is_free = |block: &BlockKey| {
                let Some(node) = nodes.get(block) else {
                    return false;
                };
                let tail_is_free = node.tail.as_ref().is_none_or(|tail| self.is_unused(tail));
                let slot = self.pools.inner.allocator.slot(Space::Page, node.page);
                let is_ready = node.state.is_ready() && node.child_count == 0;
                is_ready && tail_is_free && slot.state().readers == 0
            };
            // A policy proposes; what is leased, unknown or has others behind it stays.
            let Some(block) = policy.victim(&mut is_free).filter(&mut is_free) else {
                break;
            };
            self.remove(&mut inner, block);
            evicted += 1;
        }
        evicted
    }

    /// Gives up to `count` ready checkpoints back, those of the least recently used pages first; only
    /// checkpoints that nobody leases. The pages stay, and the prefix can be resumed at an earlier end
    /// only. Answers how many.
    pub fn evict_checkpoints(&self, count: u32) -> u32 {
        let mut inner = self.inner.lock();
        self.drop_failed(&mut inner);
        let mut evicted = 0;
        while evicted < count {
            let is_free = |node: &Node| node.tail.as_ref().is_some_and(|tail| self.is_unused(tail));
            let candidates = inner.nodes.values_mut().filter(|node| is_free(node));
            let Some(node) = candidates.min_by_key(|node| node.used_at) else {
                break;
            };
            if let Some(tail) = node.tail.take() {
                self.give_tail_back(tail);
            }
            evicted += 1;
        }
        evicted
    }

    /// Checkpoints in the tree: ready, pending.
    pub fn checkpoint_counts(&self) -> (u32, u32) {
        let inner = self.inner.lock();
        let tails = inner.nodes.values().filter_map(|node| node.tail.as_ref());
        let (pending, ready): (Vec<_>, Vec<_>) =
            tails.partition(|tail| tail.state.pending().is_some());
        (ready.len() as u32, pending.len() as u32)
    }

    /// Pages in the tree: ready, pending.
    pub fn page_counts(&self) -> (u32, u32) {
        let inner = self.inner.lock();
        let is_ready = |node: &&Node| matches!(node.state, NodeState::Ready(_));
        let ready = inner.nodes.values().filter(is_ready).count();
        (ready as u32, (inner.nodes.len() - ready) as u32)
    }

    /// The keys of the full blocks of `tokens`. Made without the lock: they are most of the work of a lookup.
    fn keys(&self, tokens: &[u32]) -> KeyChain {
        KeyChain::of(&self.namespace, tokens)
    }

    /// A lease of one node's page; `None` when its flight is over.
    fn run_of(&self, inner: &mut Inner, block: &BlockKey) -> Option<Run> {
        inner.clock += 1;
        let clock = inner.clock;
        let node = inner.nodes.get_mut(block)?;
        node.used_at = clock;
        inner.policy.used(*block);
        let (ledger, barrier) = gate_of(&node.state);
        Run::new(&self.pools, Space::Page, node.page, barrier, &ledger).ok()
    }

    /// Leases of the window slots of one node's checkpoint; `None` without one, or when its flight is over.
    fn tail_runs(&self, inner: &Inner, block: &BlockKey) -> Option<Vec<Run>> {
        let tail = inner.nodes.get(block)?.tail.as_ref()?;
        let (ledger, barrier) = gate_of(&tail.state);
        let run = |id: &PageId| {
            let barrier = barrier.clone();
            Run::new(&self.pools, Space::Window, *id, barrier, &ledger).ok()
        };
        tail.windows.iter().map(run).collect()
    }

    /// Whether a checkpoint is the tree's, and nobody leases it.
    fn is_unused(&self, tail: &Tail) -> bool {
        let slot = |id: &PageId| self.pools.inner.allocator.slot(Space::Window, *id);
        let has_readers = |id: &PageId| slot(id).state().readers > 0;
        tail.state.is_ready() && !tail.windows.iter().any(has_readers)
    }

    /// Brings every pending node up to date.
    fn drop_failed(&self, inner: &mut Inner) {
        let pending =
            |(block, node): (&BlockKey, &Node)| Some((*block, node.state.pending()?.clone()));
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
        self.settle_tails(inner);
        inner.tell();
    }

    /// Makes a landed page the tree's own; `false` when its flight has ended before.
    fn take_over(&self, inner: &mut Inner, block: BlockKey, core: &Arc<FlightCore>) -> bool {
        let Some(node) = inner.nodes.get_mut(&block) else {
            return true;
        };
        match self.own(&[(Space::Page, node.page)], &core.tenancy) {
            Some(state) => {
                node.state = state;
                true
            }
            None => false,
        }
    }

    /// Takes over the checkpoints that have landed and removes those that have failed.
    fn settle_tails(&self, inner: &mut Inner) {
        for node in inner.nodes.values_mut() {
            let tail = node.tail.as_mut();
            let Some((tail, core)) = tail.and_then(|tail| {
                let core = tail.state.pending()?.clone();
                Some((tail, core))
            }) else {
                continue;
            };
            let is_kept = match progress_of(&self.pools, &core) {
                Progress::Landed => match self.own(&tail.slots(), &core.tenancy) {
                    Some(state) => {
                        tail.state = state;
                        true
                    }
                    None => false,
                },
                Progress::UnderWay => !core.tenancy.has_ended(),
                Progress::Failed => false,
            };
            if !is_kept {
                node.tail = None;
            }
        }
    }

    /// Makes slots that are written whole the tree's own, all of them or none; `None` when their owner has
    /// ended before.
    fn own(&self, slots: &[(Space, PageId)], owner: &Tenancy) -> Option<NodeState> {
        let ledger = FlightLedger::new(self.pools.inner.next_number());
        let is_ours = owner.hand_over(slots, &ledger);
        is_ours.then_some(NodeState::Ready(ledger))
    }

    /// Removes a node and everything behind it.
    fn remove(&self, inner: &mut Inner, block: BlockKey) {
        let Some(node) = inner.nodes.remove(&block) else {
            return;
        };
        if node.child_count > 0 {
            let is_child = |(_, other): &(&BlockKey, &Node)| other.parent == block;
            let children = inner.nodes.iter().filter(is_child);
            let children: Vec<BlockKey> = children.map(|(child, _)| *child).collect();
            for child in children {
                self.remove(inner, child);
            }
        }
        inner.policy.removed(block);
        if let Some(journal) = &mut inner.journal {
            journal.removed(block);
        }
        if let Some(parent) = inner.nodes.get_mut(&node.parent) {
            parent.child_count -= 1;
        }
        self.give_back(node);
    }

    fn give_back(&self, node: Node) {
        if let Some(tail) = node.tail {
            self.give_tail_back(tail);
        }
        self.give_slots_back(vec![(Space::Page, node.page)], node.state);
    }

    fn give_tail_back(&self, tail: Tail) {
        self.give_slots_back(tail.slots(), tail.state);
    }

    /// Slots of a flight are the flight's to give back.
    fn give_slots_back(&self, slots: Vec<(Space, PageId)>, state: NodeState) {
        let NodeState::Ready(ledger) = state else {
            return;
        };
        let pools = &self.pools.inner;
        for &(space, id) in &slots {
            let drained = pools.allocator.slot(space, id).drain(id.generation);
            debug_assert!(
                drained.is_ok(),
                "I-10: {space} slot {id} was ended twice: {drained:?}"
            );
        }
        pools.park(Parked::new(slots, ledger, None));
    }
}

/// What a slot is used on, and the gate that it is read through.
fn gate_of(state: &NodeState) -> (Arc<FlightLedger>, Arc<Barrier>) {
    match state {
        NodeState::Pending(core) => (core.tenancy.ledger.clone(), core.barrier.clone()),
        NodeState::Ready(ledger) => (ledger.clone(), Barrier::ready()),
    }
}

fn hit(lease: PrefixLease, tokens: u32, is_ready: bool) -> Hit {
    match is_ready {
        true => Hit::Ready { lease, tokens },
        false => Hit::Pending { lease, tokens },
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
        let mut inner = self.inner.lock();
        if let Some(journal) = &mut inner.journal {
            journal.clear();
        }
        let nodes = std::mem::take(&mut inner.nodes);
        drop(inner);
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
