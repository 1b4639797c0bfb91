//! What a lease hands out: the pages of one layer, by component.
//!
//! A view is an address and the numbers that say how to use it. Getting the address is safe; using it
//! is not, and happens in one file of the host (its bridge to the kernels). The row accessors here
//! are safe: they check every bound and copy.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use crate::block_table::BlockTable;
use crate::error::{Error, ErrorKind};
use crate::ids::LayerId;
use crate::layout::RowFormat;
use crate::lease::tenancy::Tenancy;
use crate::pool::PoolInner;
use crate::schema::{Component, ComponentRow, Space};

/// The pages of one component of one layer of one sequence.
///
/// Entry `e` (token position for windows and states, number of the compressed entry for the others)
/// lies in physical page `table[(e / entries_per_page) % table.len()]`, row `e % rows_per_page`.
/// Neither `Send` nor `Sync`: who hands the address to other threads answers for what they do.
pub struct ComponentView<'a> {
    base: *mut u8,
    row: &'a ComponentRow,
    page_count: u32,
    table: &'a [u32],
    is_writable: bool,
    /// Entries before it are shared with others.
    first_writable_entry: u32,
}

impl<'a> ComponentView<'a> {
    fn new(
        pools: &'a PoolInner,
        row: &'a ComponentRow,
        table: &'a BlockTable,
        write_floor: Option<u32>,
    ) -> ComponentView<'a> {
        let span = pools.span(row.pool);
        ComponentView {
            base: pools.bytes.pool_base(span),
            row,
            page_count: span.page_count,
            table: table.table_of(row),
            is_writable: write_floor.is_some(),
            first_writable_entry: match (write_floor, row.space) {
                (Some(tokens), Space::Page) => tokens / row.component.spec().group_tokens,
                _ => 0,
            },
        }
    }

    /// The component.
    pub fn component(&self) -> Component {
        self.row.component
    }

    /// First byte of physical page 0 (the null page) of the pool. Valid while the view lives.
    pub fn base_ptr(&self) -> *mut u8 {
        self.base
    }

    /// Distance between two physical pages.
    pub fn stride_bytes(&self) -> u64 {
        self.row.stride_bytes
    }

    /// Bytes of a page that hold rows.
    pub fn used_bytes(&self) -> u64 {
        self.row.used_bytes
    }

    /// Physical pages of the pool, the null page included.
    pub fn slot_count(&self) -> u32 {
        self.page_count
    }

    /// How a row lies in its page.
    pub fn format(&self) -> RowFormat {
        self.row.format
    }

    /// Rows of a page.
    pub fn rows_per_page(&self) -> u32 {
        self.row.rows_per_page
    }

    /// Entries after which the next page of the table begins.
    pub fn entries_per_page(&self) -> u32 {
        self.row.entries_per_page
    }

    /// The physical pages of the sequence, in order.
    pub fn table(&self) -> &'a [u32] {
        self.table
    }

    /// Whether the lease allows writing.
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Entries before this one are read only, whatever the lease allows: they lie in pages that are
    /// shared with others, or have landed and may be. 0 where nothing is shared.
    pub fn first_writable_entry(&self) -> u32 {
        self.first_writable_entry
    }

    /// Live bytes of a row: data and scales, without padding. The length of a row image.
    pub fn row_image_bytes(&self) -> usize {
        let place = self.row.format.row_place(0, self.row.rows_per_page);
        (place.data.end - place.data.start + place.scale.end - place.scale.start) as usize
    }

    /// Copies the image of the row of `entry` (data, then scales) into `into`.
    ///
    /// # Panics
    /// When `into` is not [`ComponentView::row_image_bytes`] long.
    pub fn read_row(&self, entry: u32, into: &mut [u8]) {
        assert_eq!(
            into.len(),
            self.row_image_bytes(),
            "length of a {} row",
            self.component()
        );
        let (data, scale) = self.row_ranges(entry);
        let (into_data, into_scale) = into.split_at_mut(data.len());
        // SAFETY: I-16: `row_ranges` checked that both ranges lie inside the pool, and their lengths
        // add up to that of `into`; I-1: the lease behind `'a` keeps the page.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.base.add(data.start),
                into_data.as_mut_ptr(),
                data.len(),
            );
            std::ptr::copy_nonoverlapping(
                self.base.add(scale.start),
                into_scale.as_mut_ptr(),
                scale.len(),
            );
        }
    }

    /// Writes the image of the row of `entry` (data, then scales). Padding is left as it is.
    ///
    /// # Errors
    /// `ReadOnly` when the lease does not allow writing, or when the page is shared.
    ///
    /// # Panics
    /// When `from` is not [`ComponentView::row_image_bytes`] long.
    pub fn write_row(&mut self, entry: u32, from: &[u8]) -> Result<(), Error> {
        assert_eq!(
            from.len(),
            self.row_image_bytes(),
            "length of a {} row",
            self.component()
        );
        if !self.is_writable || entry < self.first_writable_entry {
            let (component, layer) = (self.component(), self.row.layer);
            return Err(ErrorKind::ReadOnly { component, layer }.into());
        }
        let (data, scale) = self.row_ranges(entry);
        let (from_data, from_scale) = from.split_at(data.len());
        // SAFETY: I-16: as in `read_row`; I-1, I-19: the view comes from the lease that holds the
        // write or append right of this layer, which `'a` borrows exclusively.
        unsafe {
            std::ptr::copy_nonoverlapping(
                from_data.as_ptr(),
                self.base.add(data.start),
                data.len(),
            );
            std::ptr::copy_nonoverlapping(
                from_scale.as_ptr(),
                self.base.add(scale.start),
                scale.len(),
            );
        }
        Ok(())
    }

    /// Byte ranges of a row's data and scales from the start of the pool.
    fn row_ranges(&self, entry: u32) -> (Range<usize>, Range<usize>) {
        let ordinal = (entry / self.row.entries_per_page) as usize;
        let page = self.table[ordinal % self.table.len()];
        assert!(
            page < self.page_count,
            "I-16: page {page} of {}",
            self.page_count
        );
        assert!(
            !self.base.is_null(),
            "I-16: pools without memory have no bytes"
        );
        let place = self
            .row
            .format
            .row_place(self.row.row_of(entry), self.row.rows_per_page);
        let start = u64::from(page) * self.row.stride_bytes;
        let range = |part: Range<u64>| {
            assert!(
                part.end <= self.row.stride_bytes,
                "I-16: row beyond its page"
            );
            (start + part.start) as usize..(start + part.end) as usize
        };
        (range(place.data), range(place.scale))
    }
}

impl fmt::Debug for ComponentView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ComponentView")
            .field("row", self.row)
            .field("table", &self.table)
            .field("is_writable", &self.is_writable)
            .finish_non_exhaustive()
    }
}

/// One layer of a sequence, for its one writer: rows that this lease may write, and read.
#[derive(Debug)]
pub struct LayerMut<'a> {
    layer: Layer<'a>,
    /// Tokens at the start whose pages are shared.
    floor_tokens: u32,
    /// Two threads must not write through one view.
    _not_sync: PhantomData<*mut u8>,
}

/// One layer of a sequence, for reading.
#[derive(Clone, Copy, Debug)]
pub struct LayerRef<'a> {
    layer: Layer<'a>,
}

#[derive(Clone, Copy)]
struct Layer<'a> {
    pools: &'a PoolInner,
    table: &'a BlockTable,
    layer: LayerId,
}

impl<'a> LayerMut<'a> {
    pub(crate) fn new(tenancy: &'a Tenancy, layer: LayerId, floor_tokens: u32) -> LayerMut<'a> {
        LayerMut {
            layer: Layer {
                pools: &tenancy.pools,
                table: &tenancy.table,
                layer,
            },
            floor_tokens,
            _not_sync: PhantomData,
        }
    }

    /// The layer.
    pub fn layer(&self) -> LayerId {
        self.layer.layer
    }

    /// The pages of one component; `None` when this layer has none.
    pub fn component(&self, component: Component) -> Option<ComponentView<'_>> {
        self.layer.view(component, Some(self.floor_tokens))
    }
}

impl<'a> LayerRef<'a> {
    pub(crate) fn new(pools: &'a PoolInner, table: &'a BlockTable, layer: LayerId) -> LayerRef<'a> {
        LayerRef {
            layer: Layer {
                pools,
                table,
                layer,
            },
        }
    }

    /// The layer.
    pub fn layer(&self) -> LayerId {
        self.layer.layer
    }

    /// The pages of one component; `None` when this layer has none.
    pub fn component(&self, component: Component) -> Option<ComponentView<'a>> {
        self.layer.view(component, None)
    }
}

impl<'a> Layer<'a> {
    fn view(&self, component: Component, write_floor: Option<u32>) -> Option<ComponentView<'a>> {
        let row = self.pools.schema.row(self.layer, component)?;
        if self.table.table_of(row).is_empty() {
            return None;
        }
        Some(ComponentView::new(self.pools, row, self.table, write_floor))
    }
}

impl fmt::Debug for Layer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layer")
            .field("layer", &self.layer)
            .finish_non_exhaustive()
    }
}
