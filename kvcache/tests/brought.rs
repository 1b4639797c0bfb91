//! Prefixes whose rows this process has brought from elsewhere, published in one step.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use kvgate_kvcache::canary::{PageDigest, page_digests};
use kvgate_kvcache::*;

fn tokens(count: u32) -> Vec<u32> {
    (0..count).map(|token| token % 97).collect()
}

/// What a request leaves that has computed `end` tokens.
fn computed(pools: &PoolSet, end: u32, seed: u32) -> Vec<PageDigest> {
    let mut lease = pools.reserve(end + 8, Room(1)).unwrap();
    for layer in pools.schema().layers() {
        fill_layer(pools, &mut lease, layer, end, seed);
    }
    page_digests(pools, lease.block_table(), end)
}

fn ready(tree: &PrefixTree, count: u32) -> PrefixLease {
    match tree.resumable(&tokens(count)) {
        Hit::Ready { lease, .. } => lease,
        other => panic!("{other:?}"),
    }
}

/// Writes the live rows at `end` of a prefix into slots of a prefix.
fn bring(pools: &PoolSet, lease: &mut WriteLease, end: u32, seed: u32) -> Vec<WrittenLayer> {
    let mut written = Vec::new();
    for layer in pools.schema().layers() {
        let view = lease.layer_mut(layer).unwrap();
        for row in pools.schema().rows_of(layer) {
            let Some(mut rows) = view.component(row.component) else {
                assert_eq!(row.space, Space::Request);
                continue;
            };
            for entry in row.live_entries(end, 128) {
                let image = image(row, entry, seed, rows.row_image_bytes());
                if entry >= rows.first_writable_entry() {
                    rows.write_row(entry, &image).unwrap();
                }
            }
        }
        written.push(lease.commit_layer(layer, 0..end).unwrap());
    }
    written
}

/// What was to be longer is published as far as it came, with the end of that length; the rest is free.
#[test]
fn a_prefix_that_was_brought_is_published_as_far_as_it_came() {
    let pair = pair(8, 6, 2);
    let (pools, tree) = (&pair.source, PrefixTree::new(&pair.source));
    let expected = computed(&pair.target, 512, 7);
    let mut lease = pools.reserve_prefix(768, None, Room(1)).unwrap();
    let written = bring(pools, &mut lease, 512, 7);
    assert_eq!(
        tree.publish_prefix(&tokens(512), &mut lease, &written)
            .unwrap(),
        2
    );
    assert_eq!(tree.checkpoint_counts(), (1, 0));
    drop((lease, written));
    let found = ready(&tree, 600);
    assert_eq!(found.tokens(), 512);
    assert_eq!(page_digests(pools, found.block_table(), 512), expected);
    assert_eq!(pools.stats().pages.free, 6);
    // A longer one goes on behind its pages, and brings an end of its own.
    let mut lease = pools.reserve_prefix(768, Some(found), Room(2)).unwrap();
    let written = bring(pools, &mut lease, 768, 7);
    let new = tree.publish_prefix(&tokens(768), &mut lease, &written);
    assert_eq!(new.unwrap(), 1);
    drop((lease, written));
    let found = ready(&tree, 800);
    let expected = computed(&pair.target, 768, 7);
    assert_eq!(page_digests(pools, found.block_table(), 768), expected);
    drop(found);
    assert_eq!(tree.evict(8), 3);
    let stats = pools.stats();
    assert_eq!((stats.pages.free, stats.windows.free), (8, 6), "{stats:?}");
}

/// The rows of the end are those of the length that is published, in every layer, or nothing is.
#[test]
fn a_prefix_that_was_brought_has_every_layer_up_to_its_end() {
    let pair = pair(8, 6, 2);
    let (pools, tree) = (&pair.source, PrefixTree::new(&pair.source));
    let mut lease = pools.reserve_prefix(768, None, Room(1)).unwrap();
    let refused = |lease: &mut WriteLease, written: &[WrittenLayer], count: u32| {
        let error = tree.publish_prefix(&tokens(count), lease, written);
        assert_eq!(tree.page_counts(), (0, 0));
        error.unwrap_err()
    };
    let mut written = bring(pools, &mut lease, 512, 7);
    let last = written.pop().unwrap();
    let missing = refused(&mut lease, &written, 512);
    assert!(
        matches!(missing.kind(), ErrorKind::NotWritten { layer, .. } if *layer == last.layer())
    );
    written.push(last);
    for count in [0, 100, 511, 768, 1_024] {
        refused(&mut lease, &written, count);
    }
    // The window is that of 512 now: an earlier end would have the wrong one.
    refused(&mut lease, &written, 256);
    let mut request = pools.reserve(600, Room(2)).unwrap();
    let of_request: Vec<_> = pair
        .layers()
        .into_iter()
        .map(|layer| request.commit_layer(layer, 0..512).unwrap())
        .collect();
    refused(&mut request, &of_request, 512);
    refused(&mut lease, &of_request, 512);
}
