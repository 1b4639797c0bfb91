//! Every (page, component, segment, writer) is sent exactly once and waited for exactly once (I-4).
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use common::{fill_layer, pair};
use kvgate_kvcache::canary::VerifyMode;
use kvgate_kvcache::*;
use kvgate_transfer::{Epoch, StageId, WriterRank};
use proptest::prelude::*;

/// All lengths of cache.md 6.3 and some around page ends.
const LENGTHS: [u32; 17] = [
    1, 3, 4, 5, 127, 128, 129, 131, 255, 256, 257, 511, 512, 513, 1_000, 2_049, 9_800,
];

fn tiny(window_page: WindowPage, drafting: bool) -> Arc<CacheSchema> {
    let geometry = V4Geometry {
        layer_ratios: vec![0, 4, 128, 4, 128, 4, 0],
        drafting,
        ..V4Geometry::flash()
    };
    let formats = Formats {
        window_page,
        ..Formats::default()
    };
    Arc::new(CacheSchema::deepseek_v4(&geometry, &formats).unwrap())
}

fn segments(n: u32, segment_tokens: u64) -> Vec<u32> {
    let inner = (1..)
        .map(|index| index * segment_tokens)
        .take_while(|&end| end < u64::from(n));
    let mut ends: Vec<u32> = inner.map(|end| end as u32).collect();
    ends.push(n);
    ends
}

/// Neighbouring layers, as evenly as it goes.
fn writers(schema: &CacheSchema, count: u16) -> Vec<WriterLayers> {
    let layers = schema.layer_count();
    let bound = |rank: u16| (u32::from(layers) * u32::from(rank) / u32::from(count)) as u16;
    let of = |rank| WriterLayers {
        rank: WriterRank(rank),
        layers: bound(rank)..bound(rank + 1),
    };
    (0..count).map(of).collect()
}

/// Checks the cover against `live_pages` alone, not against how the plan enumerates.
fn check(schema: &Arc<CacheSchema>, n: u32, ends: &[u32], writer_count: u16) {
    let writers = writers(schema, writer_count);
    let plan = TransferPlan::compile(schema.clone(), n, ends.to_vec(), writers.clone()).unwrap();
    let expected = plan.barrier_plan().unwrap();
    let mut sent: BTreeMap<(PoolIndex, u32), u32> = BTreeMap::new();
    for layer in schema.layers() {
        let chunks = plan.chunks(layer);
        let owner = writers
            .iter()
            .find(|writer| writer.layers.contains(&layer.0))
            .unwrap();
        let numbers: BTreeSet<u16> = chunks.iter().map(|chunk| chunk.chunk.0).collect();
        assert_eq!(
            numbers.len(),
            chunks.len(),
            "a chunk number of layer {layer} stands twice"
        );
        assert_eq!(
            chunks.len() as u32,
            expected.chunk_count(StageId(layer.0)),
            "layer {layer}"
        );
        for chunk in &chunks {
            let row = &schema.rows()[chunk.pool.index()];
            assert_eq!((row.layer, chunk.writer), (layer, owner.rank));
            assert!(!chunk.ordinals.is_empty());
            check_segment(row, chunk, ends);
            for ordinal in chunk.ordinals.clone() {
                *sent.entry((row.pool, ordinal)).or_default() += 1;
            }
        }
    }
    for row in schema.rows() {
        for live in schema.live_pages(row, n) {
            let count = sent.remove(&(row.pool, live.page_ordinal));
            let place = (row.component, row.layer, live.page_ordinal);
            assert_eq!(count, Some(1), "{place:?} at {n}");
        }
    }
    let is_draft = |pool: &PoolIndex| schema.rows()[pool.index()].component == Component::MtpLatent;
    assert!(
        sent.keys().all(|(pool, _)| is_draft(pool)),
        "pages without a live row: {sent:?}"
    );
}

fn check_segment(row: &ComponentRow, chunk: &PlannedChunk, ends: &[u32]) {
    let segment = chunk.segment as usize;
    if row.space != Space::Page {
        assert_eq!(segment + 1, ends.len(), "{} comes last", row.component);
        return;
    }
    let start = if segment == 0 { 0 } else { ends[segment - 1] };
    let (first, last) = (chunk.ordinals.start * 256, (chunk.ordinals.end - 1) * 256);
    assert!(
        first >= start && last < ends[segment],
        "{} in segment {segment}",
        row.component
    );
}

#[test]
fn every_length_every_writer_count_every_segment_size() {
    for window_page in [WindowPage::P64, WindowPage::P256] {
        let schema = tiny(window_page, false);
        for n in LENGTHS {
            for segment_tokens in [256, 512, 2_048, 1 << 20] {
                for writer_count in 1..=3 {
                    check(&schema, n, &segments(n, segment_tokens), writer_count);
                }
            }
        }
    }
}

#[test]
fn the_draft_block_always_has_a_chunk() {
    let schema = tiny(WindowPage::P64, true);
    for n in [1, 2, 129, 300] {
        check(&schema, n, &segments(n, 256), 2);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn any_length_any_segments(
        n in 1_u32..6_000,
        cuts in proptest::collection::btree_set(1_u32..24, 0..6),
        writer_count in 1_u16..=3,
    ) {
        let schema = tiny(WindowPage::P64, false);
        let mut ends: Vec<u32> = cuts.iter().map(|cut| cut * 256).filter(|&end| end < n).collect();
        ends.push(n);
        check(&schema, n, &ends, writer_count);
    }
}

/// The posts name, in the receiver's numbers, each physical page of the receiver's table once.
#[test]
fn posts_cover_the_pages_of_the_receiver() {
    let pair = pair(12, 6, 4);
    let schema = pair.source.schema().clone();
    // Something else owns the first slots there, so that the numbers differ.
    let _other = pair.target.reserve(300, Room(9)).unwrap();
    for n in [1, 4, 5, 129, 257, 513, 1_000] {
        let mut source = pair.source.reserve(n, Room(1)).unwrap();
        let target_lease = pair.target.reserve(n + 300, Room(1)).unwrap();
        let plan = pair.plan(n);
        let peer = pair.sender.peer(pair.to_receiver).unwrap();
        let pools: Vec<_> = peer.pools.iter().map(|pool| pool.pool).collect();
        let target = PostTarget {
            incarnation: peer.incarnation,
            pools: &pools,
            table: target_lease.block_table(),
            epoch: Epoch(1),
            room: Room(1),
            verify: VerifyMode::Off,
        };
        let mut sent: BTreeMap<(PoolIndex, u32), u32> = BTreeMap::new();
        let mut row_bytes = 0;
        for layer in schema.layers() {
            fill_layer(&pair.source, &mut source, layer, n, 1);
            let written = source.commit_layer(layer, 0..n).unwrap();
            for segment in 0..plan.segment_ends().len() as u32 {
                let post = plan.post(&pair.source, segment, &written, &target).unwrap();
                row_bytes += post.row_bytes();
                assert_eq!(
                    post.moves.len(),
                    post.arrival.tickets.len(),
                    "a ticket per chunk"
                );
                let (local, remote) = post.descriptors();
                assert_eq!(local.descriptor_count(), remote.descriptor_count());
                for page_move in &post.moves {
                    assert_eq!(page_move.from.len(), page_move.to.len());
                    for &page in &page_move.to {
                        *sent.entry((page_move.pool, page)).or_default() += 1;
                    }
                }
            }
        }
        assert_eq!(row_bytes, schema.live_row_bytes(n), "row bytes at {n}");
        for row in schema.rows() {
            for live in schema.live_pages(row, n) {
                let page = target_lease
                    .block_table()
                    .physical_page(row, live.page_ordinal);
                assert_eq!(
                    sent.remove(&(row.pool, page)),
                    Some(1),
                    "{} at {n}",
                    row.component
                );
            }
        }
        assert!(sent.is_empty(), "pages that nobody waits for: {sent:?}");
    }
}

#[test]
fn a_witness_that_does_not_fit_is_refused() {
    let pair = pair(12, 6, 4);
    let mut source = pair.source.reserve(600, Room(1)).unwrap();
    let lease = pair.target.reserve(600, Room(1)).unwrap();
    let plan = pair.plan(512);
    let peer = pair.sender.peer(pair.to_receiver).unwrap();
    let pools: Vec<_> = peer.pools.iter().map(|pool| pool.pool).collect();
    let target = PostTarget {
        incarnation: peer.incarnation,
        pools: &pools,
        table: lease.block_table(),
        epoch: Epoch(1),
        room: Room(1),
        verify: VerifyMode::Off,
    };
    let half = source.commit_layer(LayerId(1), 0..256).unwrap();
    assert!(plan.post(&pair.source, 0, &half, &target).is_ok());
    let error = plan.post(&pair.source, 1, &half, &target).unwrap_err();
    assert!(
        matches!(
            error.kind(),
            ErrorKind::NotWritten {
                written_tokens: 256,
                ..
            }
        ),
        "{error}"
    );
    let beyond = source.commit_layer(LayerId(1), 256..513).unwrap();
    let error = plan.post(&pair.source, 1, &beyond, &target).unwrap_err();
    assert!(
        matches!(
            error.kind(),
            ErrorKind::NotWritten {
                written_tokens: 513,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_million_tokens_are_cheap_to_plan() {
    let flash = CacheSchema::deepseek_v4(&V4Geometry::flash(), &Formats::default());
    let schema = Arc::new(flash.unwrap());
    let n = 1_048_576;
    let started = Instant::now();
    let plan =
        TransferPlan::compile(schema.clone(), n, segments(n, 8_192), writers(&schema, 1)).unwrap();
    let chunks = plan.barrier_plan().unwrap();
    let planned = started.elapsed();
    assert_eq!(
        chunks.chunk_count(StageId(2)),
        2 * 128 + 3,
        "two components of 128 segments, three tails"
    );
    let pages = |chunk: &PlannedChunk| u64::from(chunk.ordinals.end - chunk.ordinals.start);
    let descriptors: u64 = schema
        .layers()
        .flat_map(|layer| plan.chunks(layer))
        .map(|chunk| pages(&chunk))
        .sum();
    // 62 page pools of 4,096 pages, 43 windows of 2 pages, 42 state rings; no group of 128 is open.
    assert_eq!(descriptors, 62 * 4_096 + 43 * 2 + 42);
    println!("planned in {planned:?}");
}

#[test]
fn plans_that_do_not_fit_are_refused_by_name() {
    let schema = tiny(WindowPage::P64, false);
    let refusal = |n, ends: &[u32], writers: Vec<WriterLayers>| {
        let refused = TransferPlan::compile(schema.clone(), n, ends.to_vec(), writers);
        refused.unwrap_err().to_string()
    };
    let one = || writers(&schema, 1);
    assert!(refusal(300, &[100, 300], one()).contains("segment_ends is 100"));
    assert!(refusal(300, &[256], one()).contains("segment_ends is 256"));
    assert!(refusal(300, &[], one()).contains("segment_ends is 0"));
    assert!(refusal(300, &[256, 256, 300], one()).contains("segment_ends is 256"));
    let mut half = one();
    half[0].layers = 0..4;
    assert!(refusal(300, &[300], half.clone()).contains("one writer for layer 4"));
    half.extend(one());
    assert!(refusal(300, &[300], half).contains("one writer for layer 0"));
}
