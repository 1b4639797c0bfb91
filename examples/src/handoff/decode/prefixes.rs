//! What the decode side keeps of finished prompts: their full pages, which need not cross a second time.
//!
//! Only pages that are ready are counted on, and they are pinned before the Offer names them. The window and the
//! states are those of the end of a prompt and always cross.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvgate_kvcache::canary::{Provenance, ProvenanceTable};
use kvgate_kvcache::schema::PAGE_TOKENS;
use kvgate_kvcache::{
    self as kvcache, BlockTable, CacheSchema, Hit, InFlight, PoolIndex, PoolSet, PrefixLease,
    PrefixTree, Room, Space, WriteLease,
};
use kvgate_transfer::{Arrival, ArrivalSink, Epoch, PeerId};

use crate::handoff::report::PrefixReuse;

/// The prefixes of a run.
pub(super) struct Prefixes {
    pools: PoolSet,
    tree: PrefixTree,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// What the sender said of each page when it arrived, by pool and physical page.
    records: HashMap<(PoolIndex, u32), Provenance>,
    reuse: PrefixReuse,
}

/// Slots of a request, and the tokens whose pages are there already.
pub(super) struct Reserved {
    pub(super) lease: WriteLease,
    pub(super) start_tokens: u32,
}

impl Prefixes {
    pub(super) fn new(pools: &PoolSet) -> Prefixes {
        Prefixes {
            pools: pools.clone(),
            tree: PrefixTree::new(pools),
            inner: Mutex::default(),
        }
    }

    /// Slots for a request behind the pages of its prompt that are ready.
    ///
    /// # Errors
    /// Those of the pools; retryable ones give the pages up again.
    pub(super) fn reserve(
        &self,
        prompt: &[u32],
        total_tokens: u32,
        room: Room,
    ) -> Result<Reserved, kvcache::Error> {
        let held = self.held(prompt);
        let start_tokens = held.as_ref().map_or(0, PrefixLease::tokens);
        let counts = self.pools.schema().slots_for(total_tokens);
        self.make_room(counts.of(Space::Page) - start_tokens / PAGE_TOKENS);
        let lease = match held {
            None => self.pools.reserve(total_tokens, room)?,
            Some(held) => {
                let resumed = self.pools.resume(held, total_tokens, room);
                resumed.map_err(|refused| refused.1)?
            }
        };
        Ok(Reserved {
            lease,
            start_tokens,
        })
    }

    /// The pages of a prompt that are ready. Those that are still on their way to another request may not come.
    fn held(&self, prompt: &[u32]) -> Option<PrefixLease> {
        let (ready_tokens, _) = self.tree.probe(prompt);
        let ready = prompt.get(..ready_tokens as usize).unwrap_or_default();
        match self.tree.lookup(ready) {
            Hit::Ready { lease, .. } => Some(lease),
            Hit::Pending { .. } | Hit::Miss => None,
        }
    }

    fn make_room(&self, pages: u32) {
        let missing = pages.saturating_sub(self.pools.stats().pages.free);
        // What is leased stays; the pools say so themselves then.
        let _evicted = self.tree.evict(missing);
    }

    /// The pages of a prompt are kept once they have landed.
    ///
    /// # Errors
    /// The flight is not of this prompt.
    pub(super) fn expect(&self, prompt: &[u32], flight: &InFlight) -> Result<(), kvcache::Error> {
        self.tree.insert(prompt, flight).map(drop)
    }

    /// What has landed is the tree's from now on. To be called before a flight is closed.
    pub(super) fn settle(&self) {
        self.tree.settle();
    }

    /// What arrived for the pages that a request holds already, as if it had arrived for this request.
    pub(super) fn recall(
        &self,
        start_tokens: u32,
        blocks: &BlockTable,
        into: &ProvenanceTable,
        room: Room,
        peer: PeerId,
    ) {
        let records: Vec<Provenance> = {
            let inner = self.inner();
            let held = held_pages(self.pools.schema(), start_tokens, blocks);
            held.filter_map(|page| inner.records.get(&page).cloned())
                .map(|record| Provenance { room, ..record })
                .collect()
        };
        let arrival = Arrival {
            epoch: Epoch(0),
            tickets: Vec::new(),
            note: Provenance::encode(&records),
        };
        into.arrived(peer, &arrival);
    }

    /// Keeps what the sender says of the pages that arrive. A note that is none is the table's to report.
    pub(super) fn remember(&self, arrival: &Arrival) {
        let records = Provenance::decode(&arrival.note).unwrap_or_default();
        let is_kept = |record: &Provenance| {
            let row = self.pools.schema().rows().get(record.pool.index());
            row.is_some_and(|row| row.space == Space::Page)
        };
        let records = records.into_iter().filter(is_kept);
        self.inner()
            .records
            .extend(records.map(|record| ((record.pool, record.page), record)));
    }

    /// A request whose first `start_tokens` tokens do not cross.
    pub(super) fn count(&self, start_tokens: u32) {
        if start_tokens == 0 {
            return;
        }
        let pages = u64::from(start_tokens / PAGE_TOKENS);
        let reuse = &mut self.inner().reuse;
        reuse.hits += 1;
        reuse.hit_tokens += u64::from(start_tokens);
        reuse.bytes += pages * self.pools.schema().slot_bytes(Space::Page);
    }

    /// Gives everything up, and says what it was good for.
    pub(super) fn finish(&self) -> PrefixReuse {
        while self.tree.evict(u32::MAX) > 0 {}
        self.inner().reuse
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Every physical page of the compressed components of the first `start_tokens` tokens.
fn held_pages<'a>(
    schema: &'a CacheSchema,
    start_tokens: u32,
    blocks: &'a BlockTable,
) -> impl Iterator<Item = (PoolIndex, u32)> + 'a {
    let rows = schema.rows().iter();
    let paged = rows.filter(|row| row.space == Space::Page);
    paged.flat_map(move |row| {
        let ordinals = schema.live_ordinals(row, start_tokens);
        ordinals.map(move |ordinal| (row.pool, blocks.physical_page(row, ordinal)))
    })
}
