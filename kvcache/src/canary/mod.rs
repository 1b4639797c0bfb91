//! The run-time detectors: where a page came from, and what its rows are.
//!
//! The gate says that every chunk of a layer was *reported*. The canary checks what the reports stand for:
//! for each page of each component the sender writes down who it is for ([`Provenance`]), and the
//! receiver, which derives its own expectation from its block table and the schema, compares the two and
//! recomputes the checksum over the bytes that lie in its memory. It knows nothing of how a fault may have
//! come about.
//!
//! A missing record is a violation: unknown is never fine.

mod note;
mod table;

use std::ops::Range;

use crc_fast::CrcAlgorithm;
use sha2::{Digest, Sha256};

pub use note::{NoteError, Provenance};
pub use table::{ProvenanceTable, VerifyMode, Violation, ViolationKind};

use crate::block_table::BlockTable;
use crate::ids::{LayerId, Room};
use crate::pool::PoolSet;
use crate::schema::{Component, ComponentRow, LivePage};

/// The records of pages of one pool, made by the sender after its last write to them.
///
/// `source` says where the rows lie here, `destination` whom the pages belong to at the receiver.
/// Pages of `ordinals` without a live row get no record.
pub fn provenance_of(
    pools: &PoolSet,
    row: &ComponentRow,
    source: &BlockTable,
    destination: &BlockTable,
    room: Room,
    prompt_tokens: u32,
    ordinals: Range<u32>,
) -> Vec<Provenance> {
    let live = ordinals.filter_map(|ordinal| pools.schema().live_page(row, prompt_tokens, ordinal));
    let mut rows = LiveRows::default();
    let record = |live: LivePage| Provenance {
        pool: row.pool,
        page: destination.physical_page(row, live.page_ordinal),
        generation: destination.slot_of(row, live.page_ordinal).generation,
        room,
        checksum: page_checksum(pools, row, source, prompt_tokens, &live, &mut rows),
        entries: live.entries,
    };
    live.map(record).collect()
}

/// CRC-32C over the live rows of one page: data, then scales, row by row; of a row whose group is closed
/// only the parts that are read again. Padding and dead rows do not count.
fn page_checksum(
    pools: &PoolSet,
    row: &ComponentRow,
    table: &BlockTable,
    prompt_tokens: u32,
    live: &LivePage,
    rows: &mut LiveRows,
) -> u32 {
    let bytes = rows.gather(pools, row, table, prompt_tokens, live);
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// The digest of the live rows of one page of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageDigest {
    /// The layer.
    pub layer: LayerId,
    /// The component.
    pub component: Component,
    /// Which page of the sequence: `entry / entries_per_page`.
    pub page_ordinal: u32,
    /// Live rows of the page.
    pub row_count: u32,
    /// First half of the SHA-256 over the live rows, in order.
    pub digest: [u8; 16],
}

/// Digests of everything that is live after `tokens` tokens, ordered by layer, component and page.
///
/// Two caches of the same schema hold the same rows if and only if (up to collisions of SHA-256) these
/// lists are equal; where the pages lie does not matter.
pub fn page_digests(pools: &PoolSet, table: &BlockTable, tokens: u32) -> Vec<PageDigest> {
    let schema = pools.schema();
    let mut rows = LiveRows::default();
    let digest_of = |(row, live): (&ComponentRow, LivePage)| {
        let hash = Sha256::digest(rows.gather(pools, row, table, tokens, &live));
        PageDigest {
            layer: row.layer,
            component: row.component,
            page_ordinal: live.page_ordinal,
            row_count: live.row_count,
            digest: std::array::from_fn(|index| hash[index]),
        }
    };
    let pages = |row| {
        schema
            .live_pages(row, tokens)
            .into_iter()
            .map(move |live| (row, live))
    };
    schema
        .rows()
        .iter()
        .flat_map(pages)
        .map(digest_of)
        .collect()
}

/// The live bytes of one page after the other, each without what lies between its rows.
///
/// A page is read once, in stretches as long as they come, into the same few cache lines as the page before: the
/// checksum over it then costs one pass in the cache.
#[derive(Default)]
struct LiveRows {
    bytes: Vec<u8>,
}

impl LiveRows {
    /// The live bytes of a page, row by row in entry order.
    fn gather(
        &mut self,
        pools: &PoolSet,
        row: &ComponentRow,
        table: &BlockTable,
        tokens: u32,
        live: &LivePage,
    ) -> &[u8] {
        let span = pools.inner.span(row.pool);
        let page = table.physical_page(row, live.page_ordinal);
        if self.bytes.len() < span.stride_bytes as usize {
            self.bytes.resize(span.stride_bytes as usize, 0);
        }
        let mut len = 0;
        let mut read = |stretch: Range<u64>| {
            let end = len + (stretch.end - stretch.start) as usize;
            let into = &mut self.bytes[len..end];
            pools.inner.bytes.read(span, page, stretch.start, into);
            len = end;
        };
        let mut open = 0..0;
        for_live_ranges(row, tokens, live, |range| {
            if range.start == open.end {
                open.end = range.end;
            } else {
                read(std::mem::replace(&mut open, range));
            }
        });
        read(open);
        &self.bytes[..len]
    }
}

/// Hands the places of the live bytes of one page to `take`, row by row in entry order.
fn for_live_ranges(
    row: &ComponentRow,
    tokens: u32,
    live: &LivePage,
    mut take: impl FnMut(Range<u64>),
) {
    for entry in live.entries.clone().take(live.row_count as usize) {
        let row_index = row.row_of(entry);
        if row.is_overlap_row(entry, tokens)
            && let Some(parts) = row.format.overlap_parts(row_index)
        {
            parts.into_iter().for_each(&mut take);
            continue;
        }
        let place = row.format.row_place(row_index, row.rows_per_page);
        take(place.data);
        if !place.scale.is_empty() {
            take(place.scale);
        }
    }
}
