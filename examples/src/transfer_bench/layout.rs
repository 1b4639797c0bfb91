//! The pools of a run, and the lists of pages that are moved.

use std::ops::Range;

use kvgate_kvcache::{
    BlockTable, CacheSchema, ComponentRow, Formats, IndexKFormat, PageId, Space, V4Geometry,
};
use kvgate_transfer::bare::{AwaySlots, Slots, View};
use kvgate_transfer::sync::Arc;
use kvgate_transfer::{Error, PoolGeometry};
use serde::{Deserialize, Serialize};

use super::options::{Load, ModelName, Order};
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::model::cache_failure;
use crate::handoff::options::IndexK;

/// Lists of a run, unless more requests are in flight.
pub const LISTS: u32 = 4;
/// Most slots of a pool, unless a request is longer.
const SLOTS: u64 = 65_536;

/// Pools in one memory, the same on both sides.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Layout {
    /// In this order, one behind the other.
    pub pools: Vec<PoolShape>,
}

/// One pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolShape {
    /// First byte in the memory.
    pub offset_bytes: u64,
    /// Bytes of a slot; they follow each other without a gap.
    pub slot_bytes: u64,
    /// Slots.
    pub slot_count: u32,
}

/// Pages here and pages there, for neighbouring pools that share the list.
#[derive(Clone, Debug)]
pub struct Group {
    /// The pools.
    pub pools: Range<usize>,
    /// Slots here.
    pub here: Vec<u32>,
    /// Slots there, in the same order.
    pub there: Vec<u32>,
}

/// What one request moves.
pub type PageList = Vec<Group>;

impl Layout {
    /// The memory of one side.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.pools.last().map_or(0, |pool| {
            pool.offset_bytes + pool.slot_bytes * u64::from(pool.slot_count)
        })
    }

    /// The pools as the engine takes them.
    #[must_use]
    pub fn geometries(&self) -> Vec<PoolGeometry> {
        self.pools.iter().map(PoolShape::geometry).collect()
    }

    /// The slots of one side of a list, for the bare loops.
    pub fn slots(
        &self,
        view: &View,
        list: &PageList,
        side: impl Fn(&Group) -> &Vec<u32>,
    ) -> Result<Slots, Error> {
        Slots::new(view, self.pools_and_slots(list, side))
    }

    /// The slots there of a list, by their addresses in the peer's process.
    pub fn away_slots(&self, address: u64, list: &PageList) -> Result<AwaySlots, Error> {
        let there = self.pools_and_slots(list, |group| &group.there);
        AwaySlots::new(address, self.memory_bytes(), there)
    }

    fn pools_and_slots(
        &self,
        list: &PageList,
        side: impl Fn(&Group) -> &Vec<u32>,
    ) -> Vec<(PoolGeometry, Vec<u32>)> {
        let of_group = |group: &Group| {
            let slots = side(group).clone();
            let pools = self.pools.get(group.pools.clone()).unwrap_or_default();
            let pair = move |pool: &PoolShape| (pool.geometry(), slots.clone());
            pools.iter().map(pair).collect::<Vec<_>>()
        };
        list.iter().flat_map(of_group).collect()
    }
}

impl PoolShape {
    /// As the engine takes it.
    #[must_use]
    pub fn geometry(&self) -> PoolGeometry {
        PoolGeometry {
            offset_bytes: self.offset_bytes,
            stride_bytes: self.slot_bytes,
            slot_bytes: self.slot_bytes,
            slot_count: self.slot_count,
        }
    }
}

/// The pools of a load.
pub fn pools(load: &Load) -> Result<Layout, Failure> {
    match (load.model, load.tokens) {
        (Some(model), Some(tokens)) => {
            let schema = schema(model, load.index_k)?;
            let counts = schema.slots_for(tokens);
            let mut layout = Layout { pools: Vec::new() };
            for row in listed_rows(&schema) {
                layout.pools.push(PoolShape {
                    offset_bytes: layout.memory_bytes(),
                    slot_bytes: row.stride_bytes,
                    // Slot 0 stays empty: the null page.
                    slot_count: (counts.of(row.space) + 1) * row.pages_per_slot,
                });
            }
            Ok(layout)
        }
        _ => {
            let least = u64::from(load.pages) * u64::from(lists_apart(load));
            let usual = ((load.pool_mib << 20) / load.page_bytes).min(SLOTS);
            let slot_count = u32::try_from(usual.max(least)).map_err(|_| too_much(load))?;
            let pool = PoolShape {
                offset_bytes: 0,
                slot_bytes: load.page_bytes,
                slot_count,
            };
            Ok(Layout { pools: vec![pool] })
        }
    }
}

/// What the requests of a load move. Lists of requests that are in flight together share no page.
pub fn lists(load: &Load, layout: &Layout, seed: u64) -> Result<Vec<PageList>, Failure> {
    match (load.model, load.tokens) {
        (Some(model), Some(tokens)) => lists_of_model(load, model, tokens, seed),
        _ => {
            let slot_count = layout.pools.first().map_or(0, |pool| pool.slot_count);
            let (here, there) = (
                sides_of(load, slot_count, seed),
                sides_of(load, slot_count, seed + 50),
            );
            let group = |(here, there)| Group {
                pools: 0..1,
                here,
                there,
            };
            Ok(here
                .into_iter()
                .zip(there)
                .map(|pair| vec![group(pair)])
                .collect())
        }
    }
}

/// Lists that share no page: more than one request is in flight.
fn lists_apart(load: &Load) -> u32 {
    match load.concurrency {
        1 => 1,
        several => several.max(LISTS),
    }
}

/// One side of every list.
fn sides_of(load: &Load, slot_count: u32, seed: u64) -> Vec<Vec<u32>> {
    let (apart, seed) = (lists_apart(load), seed * 100);
    if apart == 1 {
        let side = |number| {
            order(
                load.order,
                load.pages,
                slot_count,
                seed + u64::from(number),
                number,
            )
        };
        return (0..LISTS).map(side).collect();
    }
    let all = order(load.order, load.pages * apart, slot_count, seed, 0);
    all.chunks(load.pages as usize)
        .map(<[u32]>::to_vec)
        .collect()
}

/// `count` different slots; a sequential list with another `number` begins elsewhere.
fn order(order: Order, count: u32, slot_count: u32, seed: u64, number: u32) -> Vec<u32> {
    match order {
        Order::Random => shuffled(count, slot_count, seed),
        Order::Sequential => {
            let room = u64::from(slot_count - count) + 1;
            let first = (u64::from(number) * u64::from(count) % room) as u32;
            (first..first + count).collect()
        }
    }
}

/// The first `count` of a random order of `0..slot_count`.
#[must_use]
pub fn shuffled(count: u32, slot_count: u32, seed: u64) -> Vec<u32> {
    let mut all: Vec<u32> = (0..slot_count).collect();
    let mut state = seed;
    for index in 0..count as usize {
        state = crate::handoff::prompt::mix(seed, state, index as u64);
        let other = index + (state % (all.len() - index) as u64) as usize;
        all.swap(index, other);
    }
    all.truncate(count as usize);
    all
}

fn too_much(load: &Load) -> Failure {
    Failure::input(
        "pages",
        format!("{} with {} in flight", load.pages, load.concurrency),
        "fewer than 2^32 pages in flight",
    )
}

/// The formats of a model's cache.
pub fn schema(model: ModelName, index_k: IndexK) -> Result<Arc<CacheSchema>, Failure> {
    let geometry = match model {
        ModelName::Flash => V4Geometry::flash(),
        ModelName::Pro => V4Geometry::pro(),
    };
    let formats = Formats {
        index_k: match index_k {
            IndexK::Bf16 => IndexKFormat::Bf16,
            IndexK::Fp8 => IndexKFormat::Fp8,
            IndexK::F32 => IndexKFormat::F32,
        },
        ..Formats::default()
    };
    CacheSchema::deepseek_v4(&geometry, &formats)
        .map(Arc::new)
        .map_err(|error| cache_failure(&error))
}

/// Pools with the same list stand together.
fn listed_rows(schema: &CacheSchema) -> Vec<&ComponentRow> {
    let mut rows: Vec<_> = schema.rows().iter().collect();
    rows.sort_by_key(|row| (row.space.index(), row.pages_per_slot));
    rows
}

fn lists_of_model(
    load: &Load,
    model: ModelName,
    tokens: u32,
    seed: u64,
) -> Result<Vec<PageList>, Failure> {
    if load.order == Order::Sequential || load.concurrency != 1 {
        return Err(Failure::new(
            FailureKind::Usage,
            "--model goes with random order and one request in flight",
        )
        .with_field("model", model.id()));
    }
    let schema = schema(model, load.index_k)?;
    let rows = listed_rows(&schema);
    let list = |number| {
        let here = block_table(&schema, tokens, seed * 100 + number);
        let there = block_table(&schema, tokens, seed * 100 + number + 50);
        let mut list = PageList::new();
        for (index, row) in rows.iter().enumerate() {
            let (here, there) = (here.table_of(row), there.table_of(row));
            match list.last_mut() {
                Some(group) if group.here == here && group.there == there => {
                    group.pools.end = index + 1;
                }
                _ => list.push(Group {
                    pools: index..index + 1,
                    here: here.to_vec(),
                    there: there.to_vec(),
                }),
            }
        }
        list
    };
    Ok((0..u64::from(LISTS)).map(list).collect())
}

/// A request that owns its slots in random order.
#[must_use]
pub fn block_table(schema: &CacheSchema, tokens: u32, seed: u64) -> BlockTable {
    let counts = schema.slots_for(tokens);
    let ids = |space| -> Vec<PageId> {
        let drawn = shuffled(counts.of(space), counts.of(space), seed);
        drawn.into_iter().map(page_id).collect()
    };
    let (pages, windows) = (ids(Space::Page), ids(Space::Window));
    BlockTable::new(schema, tokens, pages, windows, page_id(0))
}

fn page_id(slot: u32) -> PageId {
    PageId {
        index: slot + 1,
        generation: 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_draws_every_slot_once() {
        let mut drawn = shuffled(1000, 1000, 7);
        assert_ne!(drawn, (0..1000).collect::<Vec<_>>());
        assert_ne!(drawn, shuffled(1000, 1000, 8));
        drawn.sort_unstable();
        assert_eq!(drawn, (0..1000).collect::<Vec<_>>());
    }
}
