//! Which slots a sequence owns, and the tables that views read.

use crate::ids::PageId;
use crate::schema::{CacheSchema, ComponentRow, PAGE_TOKENS, Space};

/// The slots of one sequence in the three spaces.
///
/// Page `i` of `pages` holds tokens `256 i .. 256 i + 255`. `windows` is a ring: the window slot of
/// token position p is `windows[(p / 256) % windows.len()]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockTable {
    tokens: u32,
    ids: [Vec<PageId>; Space::COUNT],
    /// Slot numbers per space, as views want them.
    slots: [Vec<u32>; Space::COUNT],
    /// Physical pages of window pools with several pages per slot.
    window_parts: Vec<u32>,
}

impl BlockTable {
    /// A table for `tokens` tokens over these slots. The other side of a hand-off sends such a list;
    /// it gives no access to anything.
    pub fn new(
        schema: &CacheSchema,
        tokens: u32,
        pages: Vec<PageId>,
        windows: Vec<PageId>,
        request: PageId,
    ) -> BlockTable {
        BlockTable::over(schema, tokens, [pages, windows, vec![request]])
    }

    fn over(schema: &CacheSchema, tokens: u32, ids: [Vec<PageId>; Space::COUNT]) -> BlockTable {
        let numbers = |ids: &Vec<PageId>| ids.iter().map(|id| id.index).collect::<Vec<u32>>();
        let slots = [numbers(&ids[0]), numbers(&ids[1]), numbers(&ids[2])];
        let parts = PAGE_TOKENS / schema.formats().window_page.rows();
        let part_pages = |&slot: &u32| (0..parts).map(move |part| slot * parts + part);
        let window_parts = slots[Space::Window.index()]
            .iter()
            .flat_map(part_pages)
            .collect();
        BlockTable {
            tokens,
            ids,
            slots,
            window_parts,
        }
    }

    /// A table of full pages without a request slot: a prefix. `windows` is the ring of window slots
    /// of its end; empty where the prefix cannot be resumed.
    pub(crate) fn of_prefix(
        schema: &CacheSchema,
        tokens: u32,
        pages: Vec<PageId>,
        windows: Vec<PageId>,
    ) -> BlockTable {
        BlockTable::over(schema, tokens, [pages, windows, Vec::new()])
    }

    /// Whether this is a prefix: no request slot, so nothing is open behind its last page.
    pub(crate) fn is_prefix(&self) -> bool {
        self.slots_of(Space::Request).is_empty()
    }

    /// Tokens that the sequence may reach, prompt and output.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// The logical pages in token order.
    pub fn pages(&self) -> &[PageId] {
        self.slots_of(Space::Page)
    }

    /// The ring of window slots.
    pub fn windows(&self) -> &[PageId] {
        self.slots_of(Space::Window)
    }

    /// The request slot; the null page for a prefix, which has none.
    pub fn request(&self) -> PageId {
        let null_page = PageId {
            index: 0,
            generation: 0,
        };
        self.slots_of(Space::Request)
            .first()
            .copied()
            .unwrap_or(null_page)
    }

    /// The slots in one space.
    pub fn slots_of(&self, space: Space) -> &[PageId] {
        &self.ids[space.index()]
    }

    /// Every slot with its space.
    pub fn iter(&self) -> impl Iterator<Item = (Space, PageId)> + Clone {
        Space::ALL
            .into_iter()
            .flat_map(|space| self.slots_of(space).iter().map(move |id| (space, *id)))
    }

    /// Number of slots over all spaces.
    pub fn slot_count(&self) -> usize {
        self.ids.iter().map(Vec::len).sum()
    }

    /// The physical pages of one pool, by `ordinal % len`.
    pub fn table_of(&self, row: &ComponentRow) -> &[u32] {
        if row.pages_per_slot > 1 {
            &self.window_parts
        } else {
            &self.slots[row.space.index()]
        }
    }

    /// The physical page of one pool that holds page `page_ordinal`.
    pub fn physical_page(&self, row: &ComponentRow, page_ordinal: u32) -> u32 {
        let table = self.table_of(row);
        table[page_ordinal as usize % table.len()]
    }

    /// The slot behind page `page_ordinal` of one pool.
    pub fn slot_of(&self, row: &ComponentRow, page_ordinal: u32) -> PageId {
        let slots = self.slots_of(row.space);
        slots[(page_ordinal / row.pages_per_slot) as usize % slots.len()]
    }
}
