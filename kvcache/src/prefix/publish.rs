//! Prefixes that this process has computed.

use crate::error::{Error, ErrorKind};
use crate::identity::BlockKey;
use crate::ids::{LayerId, PageId};
use crate::lease::tenancy::Tenancy;
use crate::lease::write::{WriteLease, WrittenLayer};
use crate::prefix::checkpoint::Checkpoint;
use crate::prefix::node::{Inner, Node, Tail};
use crate::prefix::resume::invalid;
use crate::prefix::{ComponentSet, PrefixTree};
use crate::schema::{PAGE_TOKENS, Space};

impl PrefixTree {
    /// Enters the full pages of `tokens` that a request has computed, and the checkpoint of their end if
    /// there is one. The request goes on with them, from now on for reading only. Pages that the tree has
    /// already are left to it, and the request keeps its own. Answers how many pages are new.
    ///
    /// `written` has the witness of every layer, so a prefix is published with all its components or not
    /// at all (I-2, I-7).
    ///
    /// # Errors
    /// `NotWritten` naming the layer whose witness is missing, is of another request or proves too little;
    /// `InvalidRequest` when the request has fewer pages, or the checkpoint is of another length, of another
    /// request or of other pools.
    pub fn publish(
        &self,
        tokens: &[u32],
        lease: &mut WriteLease,
        written: &[WrittenLayer],
        checkpoint: Option<Checkpoint>,
    ) -> Result<u32, Error> {
        let page_count = tokens.len() / PAGE_TOKENS as usize;
        let end = page_count as u32 * PAGE_TOKENS;
        if !lease.is_of(&self.pools.inner) || page_count > lease.block_table().pages().len() {
            let found = lease.block_table().pages().len();
            let expected =
                format!("at most the {found} pages of the lease, in the pools of the tree");
            return Err(invalid("pages", page_count as u32, expected));
        }
        for layer in self.pools.schema().layers() {
            check_written(layer, end, lease, written)?;
        }
        if let Some(checkpoint) = &checkpoint
            && (!checkpoint.is_of(&self.pools) || checkpoint.tokens() != end)
        {
            let expected = format!("{end}, in the pools of the tree");
            return Err(invalid("checkpoint.tokens", checkpoint.tokens(), expected));
        }
        if let Some(checkpoint) = &checkpoint
            && checkpoint.source() != lease.number()
        {
            let expected = format!("{}, the number of the lease", lease.number());
            return Err(invalid(
                "checkpoint.source",
                checkpoint.source().0,
                expected,
            ));
        }
        let chain = self.keys(tokens);
        let blocks = chain.keys();
        let mut inner = self.inner.lock();
        self.drop_failed(&mut inner);
        let new_count = self.publish_pages(&mut inner, blocks, tokens, lease);
        inner.tell();
        if let (Some(checkpoint), Some(last)) = (&checkpoint, blocks.last()) {
            self.publish_tail(&mut inner, last, checkpoint);
        }
        drop(inner);
        lease.raise_floor(end);
        // Ends the checkpoint, outside the lock: its slots are the tree's or they are free.
        drop(checkpoint);
        Ok(new_count)
    }

    /// Enters a prefix that this process has filled in slots of [`crate::PoolSet::reserve_prefix`]: the pages that are
    /// new, and its end. `tokens` may be fewer than the slots were reserved for, when less was to be had; what lies
    /// behind stays with the lease and is free when that ends. Answers how many pages are new.
    ///
    /// The rows of the end must be those at the length of `tokens`, so every layer is committed up to there and no
    /// further.
    ///
    /// # Errors
    /// `NotWritten` naming the layer whose witness is missing, is of another lease or proves too little;
    /// `InvalidRequest` when the lease is none of a prefix, is of other pools or shorter, when `tokens` is no multiple
    /// of 256 or ends in the shared pages, or when a layer was committed behind it. Nothing is entered then.
    pub fn publish_prefix(
        &self,
        tokens: &[u32],
        lease: &mut WriteLease,
        written: &[WrittenLayer],
    ) -> Result<u32, Error> {
        let end = tokens.len() as u32;
        let table = lease.block_table();
        let schema = self.pools.schema();
        let least = lease.tenancy().shared_tokens().max(PAGE_TOKENS);
        let is_end = end.is_multiple_of(PAGE_TOKENS) && (least..=table.tokens()).contains(&end);
        if !lease.is_of(&self.pools.inner) || !table.is_prefix() || !is_end {
            let most = table.tokens();
            let expected =
                format!("a multiple of {PAGE_TOKENS} from {least} to {most}, in slots of a prefix");
            return Err(invalid("tokens", end, expected));
        }
        for layer in schema.layers() {
            check_written(layer, end, lease, written)?;
            let committed = lease.committed_tokens(layer);
            if committed != end {
                let expected = format!("{end}, the end that is published");
                return Err(invalid("committed tokens", committed, expected));
            }
        }
        // The ring of the lease may be longer than the end needs.
        let ordinals = schema.boundary_windows(end);
        let (ring, count) = (table.windows(), ordinals.len());
        let mut windows = ring[..count].to_vec();
        for ordinal in ordinals {
            windows[ordinal as usize % count] = ring[ordinal as usize % ring.len()];
        }
        let chain = self.keys(tokens);
        let blocks = chain.keys();
        let mut inner = self.inner.lock();
        self.drop_failed(&mut inner);
        let new_count = self.publish_pages(&mut inner, blocks, tokens, lease);
        inner.tell();
        if let Some(last) = blocks.last() {
            self.give_tail(&mut inner, last, windows, lease.tenancy());
        }
        drop(inner);
        lease.raise_floor(end);
        Ok(new_count)
    }

    fn publish_pages(
        &self,
        inner: &mut Inner,
        blocks: &[BlockKey],
        tokens: &[u32],
        lease: &WriteLease,
    ) -> u32 {
        let mut parent = inner.root;
        let mut new_count = 0;
        let pages = lease.block_table().pages();
        for (index, (&block, &page)) in blocks.iter().zip(pages).enumerate() {
            if !inner.nodes.contains_key(&block) {
                // A shared page that the tree has given up meanwhile is not the request's to enter again.
                let Some(state) = self.own(&[(Space::Page, page)], lease.tenancy()) else {
                    break;
                };
                inner.insert_node(block, parent, page, ComponentSet::ALL, state);
                inner.note_entered(block, index, tokens);
                new_count += 1;
            }
            parent = block;
        }
        new_count
    }

    fn publish_tail(&self, inner: &mut Inner, block: &BlockKey, checkpoint: &Checkpoint) {
        let owner = checkpoint.tenancy();
        let windows = owner.table.windows().to_vec();
        self.give_tail(inner, block, windows, owner);
    }

    fn give_tail(
        &self,
        inner: &mut Inner,
        block: &BlockKey,
        windows: Vec<PageId>,
        owner: &Tenancy,
    ) {
        let has_place = |node: &Node| node.tail.is_none();
        if !inner.nodes.get(block).is_some_and(has_place) {
            return;
        }
        let slots: Vec<_> = windows.iter().map(|id| (Space::Window, *id)).collect();
        if let Some(state) = self.own(&slots, owner) {
            inner.insert_tail(block, Tail { windows, state });
        }
    }
}

/// Whether a layer is written up to `end` by this request.
fn check_written(
    layer: LayerId,
    end: u32,
    lease: &WriteLease,
    written: &[WrittenLayer],
) -> Result<(), Error> {
    let is_of = |witness: &&WrittenLayer| {
        witness.layer() == layer && witness.source().is_of(lease.tenancy())
    };
    let proven = written
        .iter()
        .filter(is_of)
        .map(|witness| witness.tokens().end);
    let written_tokens = proven.max().unwrap_or(0);
    if written_tokens >= end {
        return Ok(());
    }
    Err(ErrorKind::NotWritten {
        layer,
        needed_tokens: end,
        written_tokens,
    }
    .into())
}
