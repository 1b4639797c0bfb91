//! Hooks that break a hand-off on purpose, so that tests see the detectors fire. Exists only with the
//! feature `fault-injection`. The detectors know nothing of it.

use crate::canary::Provenance;
use crate::error::{Error, ErrorKind};
use crate::ids::LayerId;
use crate::lease::{AppendLease, LayerMut, WrittenLayer};
use crate::plan::{KvPost, PlannedChunk, TransferPlan};
use crate::pool::PoolSet;
use crate::schema::{ComponentRow, LivePage, PoolIndex};

/// Takes the page with that number at the receiver out of a post; its chunk is still reported. `false`
/// when the post has no such page. The last page of a post goes to the receiver's null page instead,
/// since a transfer of nothing reports nothing.
pub fn drop_page(post: &mut KvPost, pool: PoolIndex, to_page: u32) -> bool {
    let page_count: usize = post.moves.iter().map(|page_move| page_move.to.len()).sum();
    let mut of_pool = post
        .moves
        .iter_mut()
        .filter(|page_move| page_move.pool == pool);
    let place = of_pool.find_map(|page_move| {
        let index = page_move.to.iter().position(|page| *page == to_page)?;
        Some((page_move, index))
    });
    let Some((page_move, index)) = place else {
        return false;
    };
    if page_count == 1 {
        page_move.to[index] = 0;
        return true;
    }
    page_move.from.remove(index);
    page_move.to.remove(index);
    post.moves.retain(|page_move| !page_move.to.is_empty());
    true
}

/// Exchanges two destinations of one pool. `false` when the post lacks one of them.
pub fn swap_pages(post: &mut KvPost, pool: PoolIndex, one: u32, other: u32) -> bool {
    for page_move in post
        .moves
        .iter_mut()
        .filter(|page_move| page_move.pool == pool)
    {
        let position = |page: u32| page_move.to.iter().position(|to| *to == page);
        if let (Some(one), Some(other)) = (position(one), position(other)) {
            page_move.to.swap(one, other);
            return one != other;
        }
    }
    false
}

/// How a page is damaged on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// The second half of the live rows never arrives: zeros stand there.
    HalfPage,
    /// The page arrives 16 bytes further on, as with a stride that is 16 bytes too long.
    WrongStride,
}

/// The bytes of a damaged source page as they were. Put them back once the post is terminal.
#[derive(Debug)]
#[must_use = "the source stays damaged"]
pub struct Undamaged {
    pool: PoolIndex,
    page: u32,
    bytes: Vec<u8>,
}

/// Damages a page of the sender in place, after its provenance was written down.
pub fn damage_source(
    pools: &PoolSet,
    row: &ComponentRow,
    page: u32,
    live: &LivePage,
    damage: Damage,
) -> Undamaged {
    let inner = &pools.inner;
    let span = inner.span(row.pool);
    let mut bytes = vec![0; row.stride_bytes as usize];
    inner.bytes.read(span, page, 0, &mut bytes);
    let before = bytes.clone();
    match damage {
        Damage::HalfPage => {
            let first = live.row_count / 2;
            for offset in first..live.row_count {
                let place = row
                    .format
                    .row_place(row.row_of(live.entries.start + offset), row.rows_per_page);
                // Of a single row, the second half of its bytes.
                let data = place.data.start as usize..place.data.end as usize;
                let start = if live.row_count == 1 {
                    data.start + data.len() / 2
                } else {
                    data.start
                };
                bytes[start..data.end].fill(0);
                bytes[place.scale.start as usize..place.scale.end as usize].fill(0);
            }
        }
        Damage::WrongStride => bytes.rotate_right(16),
    }
    inner.bytes.write(span, page, 0, &bytes);
    Undamaged {
        pool: row.pool,
        page,
        bytes: before,
    }
}

impl Undamaged {
    /// Writes the bytes back.
    pub fn restore(self, pools: &PoolSet) {
        let inner = &pools.inner;
        inner
            .bytes
            .write(inner.span(self.pool), self.page, 0, &self.bytes);
    }
}

/// Splits the pages, tickets and records of one pool off a post: the rest can be sent first.
///
/// # Errors
/// `InvalidRequest` when the post has no page of the pool.
pub fn split_off(
    plan: &TransferPlan,
    mut post: KvPost,
    pool: PoolIndex,
    written: &WrittenLayer,
) -> Result<(KvPost, KvPost), Error> {
    let of_pool = |chunk: &PlannedChunk| chunk.pool == pool;
    let chunks: Vec<PlannedChunk> = plan
        .chunks(written.layer())
        .into_iter()
        .filter(of_pool)
        .collect();
    let mut later = post.empty_like(written);
    let (moves, rest) = post
        .moves
        .into_iter()
        .partition(|page_move| page_move.pool == pool);
    (later.moves, post.moves) = (moves, rest);
    if later.moves.is_empty() {
        let expected = "a pool of the post".to_owned();
        let value = pool.0.into();
        return Err(ErrorKind::InvalidRequest {
            field: "pool",
            value,
            expected,
        }
        .into());
    }
    let is_later = |ticket: &(_, _)| chunks.iter().any(|chunk| chunk.chunk == ticket.1);
    let (tickets, rest) = post.arrival.tickets.into_iter().partition(is_later);
    (later.arrival.tickets, post.arrival.tickets) = (tickets, rest);
    if let Ok(records) = Provenance::decode(&post.arrival.note)
        && !records.is_empty()
    {
        let (records, rest): (Vec<_>, Vec<_>) =
            records.into_iter().partition(|record| record.pool == pool);
        later.arrival.note = Provenance::encode(&records);
        post.arrival.note = Provenance::encode(&rest);
    }
    Ok((post, later))
}

impl AppendLease {
    /// A layer without asking its gate.
    ///
    /// # Errors
    /// `UnknownLayer`.
    pub fn layer_ungated(&mut self, layer: LayerId) -> Result<LayerMut<'_>, Error> {
        let tenancy = &self.lease().core().tenancy;
        tenancy.pools.schema.check_layer(layer)?;
        Ok(LayerMut::new(tenancy, layer, tenancy.shared_tokens()))
    }
}
