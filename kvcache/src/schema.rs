//! The one enumeration of everything a cache consists of. Pools, views, descriptors, expected
//! chunks, the wire fingerprint and the canary are all derived from [`CacheSchema::rows`].
//!
//! Adding a component is adding a variant, its [`ComponentSpec`] and, if it has a format of its
//! own, an arm in `row_shape`.

use std::fmt;
use std::ops::Range;

use crate::error::{Error, ErrorKind};
use crate::geometry::{Formats, IndexKFormat, LatentFormat, V4Geometry};
use crate::ids::LayerId;
use crate::layout::RowFormat;

/// Tokens of a logical page.
pub const PAGE_TOKENS: u32 = 256;
/// Rows of a `c4_state` or `index_state` ring.
pub const STATE_RING_ROWS: u32 = 8;

/// The kinds of buffers that a layer can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Component {
    /// Latents of the sliding window, every layer.
    SwaLatent = 0,
    /// Compressed latents of ratio 4.
    C4Latent = 1,
    /// Indexer keys of ratio 4.
    IndexK = 2,
    /// Compressed latents of ratio 128.
    C128Latent = 3,
    /// Projections of the open and the last group of ratio 4.
    C4State = 4,
    /// The same for the indexer's compressor.
    IndexState = 5,
    /// Running softmax of the open group of ratio 128.
    C128State = 6,
    /// Latents of the draft block's window.
    MtpLatent = 7,
}

/// The three slot spaces. Each has its own allocator, generations and null slot 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Space {
    /// One slot per logical page of 256 tokens.
    Page = 0,
    /// One slot per logical page of the window; a request owns a ring of a few.
    Window = 1,
    /// One slot per request.
    Request = 2,
}

impl Space {
    /// Number of spaces.
    pub const COUNT: usize = 3;
    /// All spaces in index order.
    pub const ALL: [Space; Space::COUNT] = [Space::Page, Space::Window, Space::Request];

    /// Position in [`Space::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["page", "window", "request"][self.index()])
    }
}

/// Which entries of a component are live after N tokens (cache.md section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LiveRule {
    /// Positions of the last W tokens.
    Window,
    /// Positions of the last W draft positions: the newest is N - 2.
    DraftWindow,
    /// One entry per closed group.
    ClosedGroups,
    /// Positions of the last closed group (half rows) and of the open one.
    OverlapAndOpen,
    /// One row while a group is open.
    OpenGroup,
}

/// What is fixed about a component, whatever the model and the formats.
#[derive(Clone, Copy, Debug)]
pub struct ComponentSpec {
    /// Name in every output.
    pub id: &'static str,
    /// The slot space that addresses it.
    pub space: Space,
    /// Tokens per entry: 1, 4 or 128.
    pub group_tokens: u32,
    /// Which entries are live at a length.
    pub live: LiveRule,
}

const SPECS: [ComponentSpec; Component::COUNT] = [
    spec("swa_latent", Space::Window, 1, LiveRule::Window),
    spec("c4_latent", Space::Page, 4, LiveRule::ClosedGroups),
    spec("index_k", Space::Page, 4, LiveRule::ClosedGroups),
    spec("c128_latent", Space::Page, 128, LiveRule::ClosedGroups),
    spec("c4_state", Space::Window, 4, LiveRule::OverlapAndOpen),
    spec("index_state", Space::Window, 4, LiveRule::OverlapAndOpen),
    spec("c128_state", Space::Request, 128, LiveRule::OpenGroup),
    spec("mtp_latent", Space::Window, 1, LiveRule::DraftWindow),
];

const fn spec(id: &'static str, space: Space, group_tokens: u32, live: LiveRule) -> ComponentSpec {
    ComponentSpec {
        id,
        space,
        group_tokens,
        live,
    }
}

impl Component {
    /// Number of components.
    pub const COUNT: usize = 8;
    /// All components in index order.
    pub const ALL: [Component; Component::COUNT] = [
        Component::SwaLatent,
        Component::C4Latent,
        Component::IndexK,
        Component::C128Latent,
        Component::C4State,
        Component::IndexState,
        Component::C128State,
        Component::MtpLatent,
    ];

    /// Position in [`Component::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }

    /// What is fixed about this component.
    pub fn spec(self) -> &'static ComponentSpec {
        &SPECS[self.index()]
    }

    /// Name in every output, for example `index_k`.
    pub fn id(self) -> &'static str {
        self.spec().id
    }

    /// The component of that name.
    pub fn from_id(id: &str) -> Option<Component> {
        Component::ALL
            .into_iter()
            .find(|component| component.id() == id)
    }

    /// The component at that position of [`Component::ALL`].
    pub fn from_index(index: usize) -> Option<Component> {
        Component::ALL.get(index).copied()
    }

    /// Format, rows per physical page and entries per physical page.
    fn row_shape(self, geometry: &V4Geometry, formats: &Formats) -> (RowFormat, u32, u32) {
        let latent = |rows: u32| match formats.latent {
            LatentFormat::PackedFp8 => RowFormat::LatentV4 { rows },
            LatentFormat::F32 => RowFormat::F32 {
                channels: geometry.head_dim,
            },
        };
        let window_rows = formats.window_page.rows();
        match self {
            Component::SwaLatent | Component::MtpLatent => {
                (latent(window_rows), window_rows, window_rows)
            }
            Component::C4Latent => (latent(64), 64, 64),
            Component::C128Latent => (latent(2), 2, 2),
            Component::IndexK => {
                let format = match formats.index_k {
                    IndexKFormat::Bf16 => RowFormat::IndexBf16,
                    IndexKFormat::Fp8 => RowFormat::IndexFp8,
                    IndexKFormat::F32 => RowFormat::F32 {
                        channels: geometry.index_head_dim,
                    },
                };
                (format, 64, 64)
            }
            Component::C4State => {
                let format = RowFormat::F32Rows {
                    channels: geometry.head_dim,
                    parts: 4,
                };
                (format, STATE_RING_ROWS, PAGE_TOKENS)
            }
            Component::IndexState => {
                let format = RowFormat::F32Rows {
                    channels: geometry.index_head_dim,
                    parts: 4,
                };
                (format, STATE_RING_ROWS, PAGE_TOKENS)
            }
            Component::C128State => {
                let format = RowFormat::F32Rows {
                    channels: geometry.head_dim,
                    parts: 3,
                };
                (format, 1, u32::MAX)
            }
        }
    }

    /// The components of a main layer with that compression ratio, in index order.
    fn of_ratio(ratio: u32) -> &'static [Component] {
        match ratio {
            4 => &[
                Component::SwaLatent,
                Component::C4Latent,
                Component::IndexK,
                Component::C4State,
                Component::IndexState,
            ],
            128 => &[
                Component::SwaLatent,
                Component::C128Latent,
                Component::C128State,
            ],
            _ => &[Component::SwaLatent],
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

/// Position of a pool in a [`CacheSchema`]: one pool per row of [`CacheSchema::rows`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolIndex(pub u32);

impl PoolIndex {
    /// The position as an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One component of one layer: one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComponentRow {
    /// The layer.
    pub layer: LayerId,
    /// The component.
    pub component: Component,
    /// The slot space that addresses its pages.
    pub space: Space,
    /// How the bytes of a row lie.
    pub format: RowFormat,
    /// Bytes of one row, pad byte included.
    pub row_bytes: u64,
    /// Bytes of a physical page that hold rows.
    pub used_bytes: u64,
    /// Distance between two physical pages; a transfer moves all of it.
    pub stride_bytes: u64,
    /// Rows of a physical page.
    pub rows_per_page: u32,
    /// Entries after which the next physical page begins. More than `rows_per_page` for rings.
    pub entries_per_page: u32,
    /// Physical pages per slot of the space: 4 for window pages of 64 rows, else 1.
    pub pages_per_slot: u32,
    /// Its pool.
    pub pool: PoolIndex,
}

impl ComponentRow {
    /// The physical page of this pool for part `part` of slot `slot`.
    pub fn physical_page(&self, slot: u32, part: u32) -> u32 {
        slot * self.pages_per_slot + part
    }

    /// The row of its page that holds entry `entry`.
    pub fn row_of(&self, entry: u32) -> u32 {
        entry % self.rows_per_page
    }

    /// The live entries (positions for window and states, entries for the compressed components)
    /// after `prompt_tokens` tokens.
    pub fn live_entries(&self, prompt_tokens: u32, window_tokens: u32) -> Range<u32> {
        let spec = self.component.spec();
        let group = spec.group_tokens;
        let closed = prompt_tokens / group;
        match spec.live {
            LiveRule::Window => prompt_tokens.saturating_sub(window_tokens)..prompt_tokens,
            LiveRule::DraftWindow => {
                let end = prompt_tokens.saturating_sub(1);
                end.saturating_sub(window_tokens)..end
            }
            LiveRule::ClosedGroups => 0..closed,
            LiveRule::OverlapAndOpen => closed.saturating_sub(1) * group..prompt_tokens,
            LiveRule::OpenGroup => closed * group..prompt_tokens,
        }
    }

    /// Whether only the overlap parts of this entry's row are live after `prompt_tokens` tokens.
    pub fn is_overlap_row(&self, entry: u32, prompt_tokens: u32) -> bool {
        let spec = self.component.spec();
        spec.live == LiveRule::OverlapAndOpen
            && entry < prompt_tokens / spec.group_tokens * spec.group_tokens
    }
}

/// The live part of one physical page at a length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LivePage {
    /// Which page: `entry / entries_per_page`. A view finds it at `table[ordinal % table.len()]`.
    pub page_ordinal: u32,
    /// The live entries of that page, absolute.
    pub entries: Range<u32>,
    /// Rows they lie in: one per entry, or one for all in `c128_state`.
    pub row_count: u32,
    /// Live bytes of these rows (half of a row where only the overlap parts are live).
    pub row_bytes_live: u64,
}

/// Slots of each space that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotCounts {
    /// Logical pages.
    pub pages: u32,
    /// Window slots.
    pub windows: u32,
    /// Request slots.
    pub requests: u32,
}

impl SlotCounts {
    /// The count of one space.
    pub fn of(&self, space: Space) -> u32 {
        [self.pages, self.windows, self.requests][space.index()]
    }
}

/// All components of all layers of one model in one set of formats.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheSchema {
    geometry: V4Geometry,
    formats: Formats,
    rows: Vec<ComponentRow>,
    /// Rows of layer `l`: `layer_rows[l]..layer_rows[l + 1]`.
    layer_rows: Vec<usize>,
}

impl CacheSchema {
    /// The cache of a DeepSeek-V4 model. Rows are ordered by layer, then by component.
    ///
    /// # Errors
    /// `ImpossibleGeometry` or `FormatNotAllowed`, naming the field.
    pub fn deepseek_v4(geometry: &V4Geometry, formats: &Formats) -> Result<CacheSchema, Error> {
        geometry.check()?;
        formats.check(geometry)?;
        let mut schema = CacheSchema {
            geometry: geometry.clone(),
            formats: *formats,
            rows: Vec::new(),
            layer_rows: vec![0],
        };
        for &ratio in &geometry.layer_ratios {
            schema.push_layer(Component::of_ratio(ratio));
        }
        if geometry.drafting {
            schema.push_layer(&[Component::MtpLatent]);
        }
        Ok(schema)
    }

    fn push_layer(&mut self, components: &[Component]) {
        let layer = LayerId((self.layer_rows.len() - 1) as u16);
        for &component in components {
            let (format, rows_per_page, entries_per_page) =
                component.row_shape(&self.geometry, &self.formats);
            let space = component.spec().space;
            let pages_per_slot = match space {
                Space::Window => PAGE_TOKENS / entries_per_page,
                Space::Page | Space::Request => 1,
            };
            self.rows.push(ComponentRow {
                layer,
                component,
                space,
                format,
                row_bytes: format.row_bytes(),
                used_bytes: format.used_bytes(rows_per_page),
                stride_bytes: format.stride_bytes(rows_per_page),
                rows_per_page,
                entries_per_page,
                pages_per_slot,
                pool: PoolIndex(self.rows.len() as u32),
            });
        }
        self.layer_rows.push(self.rows.len());
    }

    /// Every component of every layer, ordered by layer, then by component.
    pub fn rows(&self) -> &[ComponentRow] {
        &self.rows
    }

    /// The rows of one layer; empty for a layer that does not exist.
    pub fn rows_of(&self, layer: LayerId) -> &[ComponentRow] {
        let bounds = self.layer_rows.get(layer.index()..layer.index() + 2);
        bounds.map_or(&[], |bounds| &self.rows[bounds[0]..bounds[1]])
    }

    /// The row of one component of one layer.
    pub fn row(&self, layer: LayerId, component: Component) -> Option<&ComponentRow> {
        self.rows_of(layer)
            .iter()
            .find(|row| row.component == component)
    }

    /// Layers with storage: the main layers, and the draft block when drafting.
    pub fn layer_count(&self) -> u16 {
        (self.layer_rows.len() - 1) as u16
    }

    /// All layers in order.
    pub fn layers(&self) -> impl Iterator<Item = LayerId> + use<> {
        (0..self.layer_count()).map(LayerId)
    }

    /// Checks that a layer exists.
    ///
    /// # Errors
    /// `UnknownLayer`.
    pub fn check_layer(&self, layer: LayerId) -> Result<(), Error> {
        let layer_count = self.layer_count();
        if layer.0 < layer_count {
            return Ok(());
        }
        Err(Error::new(ErrorKind::UnknownLayer { layer, layer_count }))
    }

    /// The geometry it was built from.
    pub fn geometry(&self) -> &V4Geometry {
        &self.geometry
    }

    /// The formats it was built from.
    pub fn formats(&self) -> &Formats {
        &self.formats
    }

    /// Bytes of one slot over all pools of a space: 998,208 for a page of Flash with fp8 indexer
    /// keys.
    pub fn slot_bytes(&self, space: Space) -> u64 {
        let of_space = self.rows.iter().filter(|row| row.space == space);
        of_space
            .map(|row| row.stride_bytes * u64::from(row.pages_per_slot))
            .sum()
    }

    /// Window slots in the ring of a request that never ends: enough that the window of any
    /// position lies in slots of its own.
    pub fn window_ring_slots(&self) -> u32 {
        (self.geometry.window_tokens - 1).div_ceil(PAGE_TOKENS) + 1
    }

    /// Slots that a request of `total_tokens` tokens (prompt and output) needs.
    pub fn slots_for(&self, total_tokens: u32) -> SlotCounts {
        let pages = total_tokens.div_ceil(PAGE_TOKENS);
        SlotCounts {
            pages,
            windows: pages.min(self.window_ring_slots()),
            requests: 1,
        }
    }

    /// Ordinals of the window slots (position / 256) that hold a live row at a boundary of `tokens`
    /// tokens: what a request needs that goes on from there.
    pub fn boundary_windows(&self, tokens: u32) -> Range<u32> {
        let of_window = self.rows.iter().filter(|row| row.space == Space::Window);
        let first = of_window
            .map(|row| row.live_entries(tokens, self.geometry.window_tokens))
            .filter(|live| !live.is_empty())
            .map(|live| live.start / PAGE_TOKENS)
            .min();
        let end = tokens.div_ceil(PAGE_TOKENS);
        first.unwrap_or(end)..end
    }

    /// Ordinals of the physical pages of `row` that hold a live entry.
    pub fn live_ordinals(&self, row: &ComponentRow, prompt_tokens: u32) -> Range<u32> {
        let live = row.live_entries(prompt_tokens, self.geometry.window_tokens);
        if live.is_empty() {
            return 0..0;
        }
        live.start / row.entries_per_page..(live.end - 1) / row.entries_per_page + 1
    }

    /// The live part of page `page_ordinal`; `None` when it holds no live entry.
    pub fn live_page(
        &self,
        row: &ComponentRow,
        prompt_tokens: u32,
        page_ordinal: u32,
    ) -> Option<LivePage> {
        let live = row.live_entries(prompt_tokens, self.geometry.window_tokens);
        let start = page_ordinal.checked_mul(row.entries_per_page)?;
        let end = start.saturating_add(row.entries_per_page);
        let entries = live.start.max(start)..live.end.min(end);
        if entries.is_empty() {
            return None;
        }
        let row_count = (entries.end - entries.start).min(row.rows_per_page);
        let overlap_rows = entries
            .clone()
            .filter(|&e| row.is_overlap_row(e, prompt_tokens));
        let half_row_count = match row.component.spec().live {
            LiveRule::OverlapAndOpen => overlap_rows.count() as u64,
            _ => 0,
        };
        let row_bytes_live =
            u64::from(row_count) * row.row_bytes - half_row_count * (row.row_bytes / 2);
        Some(LivePage {
            page_ordinal,
            entries,
            row_count,
            row_bytes_live,
        })
    }

    /// Every page of `row` that holds a live entry after `prompt_tokens` tokens, in order.
    pub fn live_pages(&self, row: &ComponentRow, prompt_tokens: u32) -> Vec<LivePage> {
        let ordinals = self.live_ordinals(row, prompt_tokens);
        ordinals
            .filter_map(|ordinal| self.live_page(row, prompt_tokens, ordinal))
            .collect()
    }

    /// Bytes of all live rows after `prompt_tokens` tokens: what a hand-off must carry at least.
    pub fn live_row_bytes(&self, prompt_tokens: u32) -> u64 {
        let pages = |row| self.live_pages(row, prompt_tokens);
        self.rows
            .iter()
            .flat_map(pages)
            .map(|page| page.row_bytes_live)
            .sum()
    }
}

#[cfg(test)]
#[path = "schema_tests.rs"]
mod tests;
