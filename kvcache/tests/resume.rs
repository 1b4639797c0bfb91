//! What goes on behind a prefix: shared pages, copied ends, and plans that leave out what is there.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::prefixes::*;
use common::*;
use kvgate_kvcache::canary::{PageDigest, VerifyMode, page_digests};
use kvgate_kvcache::*;
use kvgate_transfer::{Epoch, Op, PostOptions, Status, WriterRank};

#[test]
fn a_prefix_is_published_with_all_its_layers_or_not_at_all() {
    let pair = pair(8, 6, 2);
    let (pools, tree) = (&pair.source, PrefixTree::new(&pair.source));
    let mut lease = pools.reserve(300, Room(1)).unwrap();
    let mut other = pools.reserve(300, Room(2)).unwrap();
    let mut checkpoint = pools.reserve_checkpoint(256, Room(1)).unwrap();
    let mut written = Vec::new();
    let layers = pair.layers();
    for &layer in &layers[..2] {
        fill_layer(pools, &mut lease, layer, 256, 1);
        written.push(lease.commit_layer(layer, 0..256).unwrap());
        checkpoint.save_layer(layer, &lease).unwrap();
    }
    // The last layer: not written, written too short, written by somebody else.
    let missing = |error: Error, proven: u32| {
        let expected = ErrorKind::NotWritten {
            layer: layers[2],
            needed_tokens: 256,
            written_tokens: proven,
        };
        assert_eq!(*error.kind(), expected);
    };
    missing(checkpoint.save_layer(layers[2], &lease).unwrap_err(), 0);
    missing(
        tree.publish(&tokens(256), &mut lease, &written, None)
            .unwrap_err(),
        0,
    );
    written.push(lease.commit_layer(layers[2], 0..255).unwrap());
    missing(
        tree.publish(&tokens(256), &mut lease, &written, None)
            .unwrap_err(),
        255,
    );
    written.push(other.commit_layer(layers[2], 0..256).unwrap());
    missing(
        tree.publish(&tokens(256), &mut lease, &written, None)
            .unwrap_err(),
        255,
    );
    assert_eq!(tree.page_counts(), (0, 0));
    missing(checkpoint.finish().unwrap_err(), 0);
    written.push(lease.commit_layer(layers[2], 255..256).unwrap());
    assert_eq!(
        tree.publish(&tokens(256), &mut lease, &written, None)
            .unwrap(),
        1
    );
    assert_eq!(
        tree.publish(&tokens(256), &mut lease, &written, None)
            .unwrap(),
        0
    );
    // Pages without the end of them are a hit that nobody can go on from.
    assert!(matches!(
        tree.lookup(&tokens(300)),
        Hit::Ready { tokens: 256, .. }
    ));
    assert!(matches!(tree.resumable(&tokens(300)), Hit::Miss));
    let view = lease.layer_mut(layers[1]).unwrap();
    let mut rows = view.component(Component::IndexK).unwrap();
    let row = vec![0; rows.row_image_bytes()];
    assert!(
        rows.write_row(63, &row).is_err(),
        "published rows are read only"
    );
    rows.write_row(64, &row).unwrap();
}

#[test]
fn rows_that_the_request_has_gone_past_are_not_saved() {
    let pair = pair(8, 6, 2);
    let pools = &pair.source;
    let mut lease = pools.reserve(1_024, Room(1)).unwrap();
    let ring = lease.block_table().windows().len() as u32;
    let mut checkpoint = pools.reserve_checkpoint(256, Room(1)).unwrap();
    let layer = LayerId(0);
    drop(lease.commit_layer(layer, 0..ring * 256).unwrap());
    checkpoint.save_layer(layer, &lease).unwrap();
    drop(lease.commit_layer(layer, 0..ring * 256 + 1).unwrap());
    assert!(checkpoint.save_layer(layer, &lease).is_err());
    assert!(pools.reserve_checkpoint(255, Room(1)).is_err());
}

/// The end of one request is not published as that of another one, nor put together from two.
#[test]
fn a_checkpoint_is_of_the_request_that_is_published() {
    let pair = pair(8, 8, 2);
    let (pools, tree) = (&pair.source, PrefixTree::new(&pair.source));
    let mut ours = pools.reserve(264, Room(1)).unwrap();
    let mut theirs = pools.reserve(264, Room(2)).unwrap();
    let mut checkpoint = pools.reserve_checkpoint(256, Room(1)).unwrap();
    let mut written = Vec::new();
    for layer in pair.layers() {
        fill_layer(pools, &mut ours, layer, 256, 1);
        fill_layer(pools, &mut theirs, layer, 256, 2);
        written.push(ours.commit_layer(layer, 0..256).unwrap());
        drop(theirs.commit_layer(layer, 0..256).unwrap());
        checkpoint.save_layer(layer, &theirs).unwrap();
        assert!(checkpoint.save_layer(layer, &ours).is_err(), "{layer}");
    }
    let checkpoint = checkpoint.finish().unwrap();
    let refused = tree.publish(&tokens(256), &mut ours, &written, Some(checkpoint));
    let expected = ErrorKind::InvalidRequest {
        field: "checkpoint.source",
        value: theirs.number().0,
        expected: format!("{}, the number of the lease", ours.number()),
    };
    assert_eq!(*refused.unwrap_err().kind(), expected);
    assert_eq!(
        (tree.page_counts(), tree.checkpoint_counts()),
        ((0, 0), (0, 0))
    );
}

/// Whoever goes on behind 512 tokens has the end at 512 and no earlier one, although its ring has a place for it.
#[test]
fn an_end_before_the_prefix_is_not_saved() {
    let pair = pair(8, 8, 2);
    let (pools, tree) = (&pair.source, PrefixTree::new(&pair.source));
    publish(pools, &tree, 512, 5);
    let lease = pools.resume(ready(&tree, 513), 600, Room(2));
    let mut lease = lease.map_err(|e| e.1).unwrap();
    let mut early = pools.reserve_checkpoint(256, Room(2)).unwrap();
    let mut at_the_end = pools.reserve_checkpoint(512, Room(2)).unwrap();
    for layer in pair.layers() {
        lease.attach_layer(layer, deadline()).unwrap();
        let refused = early.save_layer(layer, &lease).unwrap_err();
        assert!(
            matches!(
                refused.kind(),
                ErrorKind::InvalidRequest {
                    field: "tokens",
                    value: 256,
                    ..
                }
            ),
            "{refused}"
        );
        at_the_end.save_layer(layer, &lease).unwrap();
    }
    assert!(early.finish().is_err());
    drop(at_the_end.finish().unwrap());
}

/// Pages of the tree are not written by a copy either, whether they were shared from the start or published.
#[test]
fn a_page_of_the_tree_is_not_copied_over() {
    let pair = pair(8, 8, 3);
    let (pools, tree) = (&pair.source, PrefixTree::new(&pair.source));
    publish(pools, &tree, 256, 5);
    let mut behind = publish_rest(&pair, &tree);
    let prefix = ready(&tree, 513);
    let before = digests_of(pools, &prefix, 512);
    for ordinal in 0..2 {
        let refused = prefix.copy_page(1 - ordinal, &mut behind, ordinal, deadline());
        assert!(refused.is_err(), "page {ordinal}");
    }
    assert_eq!(digests_of(pools, &prefix, 512), before);
    prefix.copy_page(1, &mut behind, 2, deadline()).unwrap();
}

/// A flight has slots for the answer too; a page that it does not bring whole is not entered.
#[test]
fn a_page_that_no_writer_brings_is_not_entered() {
    let pair = pair(8, 8, 2);
    let tree = PrefixTree::new(&pair.target);
    let flight = pair.hand_over(300, 600, 1, 3);
    let refused = tree.insert(&tokens(512), &flight).unwrap_err();
    let is_it = |kind: &ErrorKind| matches!(kind, ErrorKind::InvalidRequest { value: 2, .. });
    assert!(is_it(refused.kind()), "{refused}");
    assert_eq!(tree.insert(&tokens(300), &flight).unwrap(), 1);
    // Slots of a prefix of 512 tokens, promised to a writer of 256.
    let slots = pair.target.reserve_prefix(512, None, Room(2)).unwrap();
    let writer = [(pair.to_sender, WriterRank(0))];
    let short = slots.into_inflight(&pair.plan(256), Epoch(2), &writer);
    let mut short = short.map_err(|e| e.1).unwrap();
    short.arm(&pair.receiver, None).unwrap();
    assert!(tree.insert_prefix(&tokens(512), &short).is_err());
    assert!(tree.insert_prefix(&tokens(256), &short).is_err());
    assert_eq!(tree.page_counts(), (0, 1));
}

#[test]
fn a_resumed_request_shares_pages_and_copies_the_end() {
    let pair = pair(8, 8, 2);
    let (pools, tree) = (&pair.source, PrefixTree::new(&pair.source));
    let digests = publish(pools, &tree, 512, 5);
    assert!(
        matches!(tree.resumable(&tokens(512)), Hit::Miss),
        "the last token is computed"
    );
    let prefix = ready(&tree, 513);
    let refused = pools.resume(prefix, 512, Room(2)).unwrap_err();
    let mut lease = pools
        .resume(refused.0, 600, Room(2))
        .map_err(|e| e.1)
        .unwrap();
    let layers = pair.layers();
    let not_attached = ErrorKind::NotAttached {
        layer: layers[0],
        prefix_tokens: 512,
    };
    assert_eq!(
        *lease.layer_mut(layers[0]).unwrap_err().kind(),
        not_attached
    );
    assert_eq!(
        *lease.commit_layer(layers[0], 0..600).unwrap_err().kind(),
        not_attached
    );
    for &layer in &layers {
        lease.attach_layer(layer, deadline()).unwrap();
        lease.attach_layer(layer, deadline()).unwrap();
        assert_eq!(lease.committed_tokens(layer), 512);
    }
    assert_eq!(page_digests(pools, lease.block_table(), 512), digests);
    // Its own window moves on; the checkpoint stays.
    fill_layer(pools, &mut lease, layers[0], 128, 9);
    let again = pools
        .resume(ready(&tree, 513), 600, Room(3))
        .map_err(|e| e.1)
        .unwrap();
    let mut again = again;
    layers
        .iter()
        .for_each(|&layer| again.attach_layer(layer, deadline()).unwrap());
    assert_eq!(page_digests(pools, again.block_table(), 512), digests);
    // Leased pages stay, also when the request is parked; then everything can go.
    assert_eq!(tree.evict(9), 0);
    drop((lease, again));
    let pinned = ready(&tree, 513);
    assert_eq!(tree.evict_checkpoints(9), 0, "somebody copies it");
    drop(pinned);
    assert_eq!(
        (tree.evict_checkpoints(9), tree.checkpoint_counts()),
        (1, (0, 0))
    );
    assert!(matches!(tree.resumable(&tokens(513)), Hit::Miss));
    assert_eq!(tree.evict(9), 2);
    let stats = pools.stats();
    assert_eq!(
        (stats.pages.free, stats.windows.free, stats.requests.free),
        (8, 8, 2)
    );
}

#[test]
fn a_prefix_without_its_end_is_not_gone_on_from() {
    let pair = pair(8, 6, 2);
    let (pools, tree) = (&pair.source, PrefixTree::new(&pair.source));
    publish(pools, &tree, 256, 5);
    let Hit::Ready { lease, .. } = tree.lookup(&tokens(300)) else {
        panic!("published");
    };
    let mut lease = pools.resume(lease, 300, Room(2)).map_err(|e| e.1).unwrap();
    let refused = lease.attach_layer(LayerId(0), deadline()).unwrap_err();
    assert_eq!(
        *refused.kind(),
        ErrorKind::NoCheckpoint { prefix_tokens: 256 }
    );
}

/// A prefix goes from one tree to another; where a part of it is there, only the rest crosses.
#[test]
fn a_prefix_arrives_behind_what_is_there() {
    let pair = pair(8, 8, 2);
    let (from, into) = (PrefixTree::new(&pair.source), PrefixTree::new(&pair.target));
    let short = publish(&pair.source, &from, 256, 5);
    drop(publish_rest(&pair, &from));
    let layers = 0..pair.source.schema().layer_count();
    let writers = vec![WriterLayers {
        rank: WriterRank(0),
        layers,
    }];
    let mut held = None;
    for (start, end) in [(0, 256), (256, 512), (512, 512)] {
        let prefix = Arc::new(ready(&from, end + 1));
        let schema = pair.target.schema().clone();
        let plan =
            TransferPlan::compile_from(schema, start, end, vec![end], writers.clone()).unwrap();
        let moved: usize = plan
            .chunks(LayerId(1))
            .iter()
            .map(|c| c.ordinals.len())
            .sum();
        assert_eq!(
            moved as u32,
            2 * (end - start) / 256 + 4,
            "two paged components, 2 + 1 + 1 of the end"
        );
        let slots = pair
            .target
            .reserve_prefix(end, held.take(), Room(7))
            .unwrap();
        let from_the_start = TransferPlan::compile(
            pair.target.schema().clone(),
            end,
            vec![end],
            writers.clone(),
        );
        let slots = match start {
            0 => slots,
            _ => {
                let refused = slots.into_inflight(&from_the_start.unwrap(), Epoch(1), &[]);
                let (slots, error) = *refused.unwrap_err();
                assert!(matches!(error.kind(), ErrorKind::InvalidRequest { .. }));
                slots
            }
        };
        let writer = [(pair.to_sender, WriterRank(0))];
        let flight = slots.into_inflight(&plan, Epoch(u64::from(start + end)), &writer);
        let mut flight = flight.map_err(|e| e.1).unwrap();
        flight.arm(&pair.receiver, None).unwrap();
        assert_eq!(
            into.insert(&tokens(end), &flight).unwrap(),
            (end - start) / 256
        );
        if end > start {
            assert!(
                matches!(into.resumable(&tokens(end + 1)), Hit::Pending { tokens, .. } if tokens == end)
            );
        }
        send_prefix(&pair, &plan, &prefix, &flight, &pair.layers());
        into.settle();
        flight.close().wait(deadline()).unwrap();
        let there = ready(&into, end + 1);
        if end == 256 {
            assert_eq!(digests_of(&pair.target, &there, 256), short);
        }
        let same = digests_of(&pair.source, &prefix, end) == digests_of(&pair.target, &there, end);
        assert!(same, "{start}..{end}");
        held = Some(there);
    }
    drop((held, from, into));
    for stats in [pair.source.stats(), pair.target.stats()] {
        assert_eq!(
            (stats.pages.free, stats.windows.free, stats.requests.free),
            (8, 8, 2)
        );
    }
}

/// Whoever leased a prefix while it was on its way keeps also what its flight holds of others, although the
/// flight has no slot of its own left: the tree has them all. Afterwards nothing is held any more.
#[test]
fn a_lease_of_a_pending_prefix_keeps_what_its_flight_holds() {
    let pair = pair(8, 8, 2);
    let (from, into) = (PrefixTree::new(&pair.source), PrefixTree::new(&pair.target));
    publish(&pair.source, &from, 256, 5);
    drop(publish_rest(&pair, &from));
    let mut held = None;
    for (start, end) in [(0, 256), (256, 512)] {
        let prefix = Arc::new(ready(&from, end + 1));
        let writers = vec![WriterLayers {
            rank: WriterRank(0),
            layers: 0..pair.source.schema().layer_count(),
        }];
        let schema = pair.target.schema().clone();
        let plan = TransferPlan::compile_from(schema, start, end, vec![end], writers).unwrap();
        let slots = pair.target.reserve_prefix(end, held.take(), Room(7));
        let writer = [(pair.to_sender, WriterRank(0))];
        let flight = slots
            .unwrap()
            .into_inflight(&plan, Epoch(u64::from(end)), &writer);
        let mut flight = flight.map_err(|e| e.1).unwrap();
        flight.arm(&pair.receiver, None).unwrap();
        into.insert(&tokens(end), &flight).unwrap();
        let Hit::Pending { lease, .. } = into.resumable(&tokens(end + 1)) else {
            panic!("it is on its way");
        };
        send_prefix(&pair, &plan, &prefix, &flight, &pair.layers());
        into.settle();
        let mut draining = flight.close();
        assert!(!draining.poll(), "a lease of the flight is held");
        drop(draining);
        assert_eq!(into.evict(8), 0);
        held = (start == 0).then(|| ready(&into, end + 1));
        drop(lease);
    }
    assert_eq!(into.evict(8), 2);
    assert_eq!(pair.target.stats().pages.free, 8);
}

/// Goes on behind 256 tokens and publishes 512.
fn publish_rest(pair: &Pair, tree: &PrefixTree) -> WriteLease {
    let pools = &pair.source;
    let lease = pools.resume(ready(tree, 257), 520, Room(2));
    let mut lease = lease.map_err(|e| e.1).unwrap();
    let mut checkpoint = pools.reserve_checkpoint(512, Room(2)).unwrap();
    let mut written = Vec::new();
    for layer in pair.layers() {
        lease.attach_layer(layer, deadline()).unwrap();
        let view = lease.layer_mut(layer).unwrap();
        for row in pools.schema().rows_of(layer) {
            let mut rows = view.component(row.component).unwrap();
            for entry in row.live_entries(512, 128) {
                let image = image(row, entry, 6, rows.row_image_bytes());
                if entry >= rows.first_writable_entry() {
                    rows.write_row(entry, &image).unwrap();
                }
            }
        }
        written.push(lease.commit_layer(layer, 256..512).unwrap());
        checkpoint.save_layer(layer, &lease).unwrap();
    }
    let checkpoint = checkpoint.finish().unwrap();
    let published = tree.publish(&tokens(512), &mut lease, &written, Some(checkpoint));
    assert_eq!(published.unwrap(), 1);
    lease
}

fn digests_of(pools: &PoolSet, prefix: &PrefixLease, end: u32) -> Vec<PageDigest> {
    page_digests(pools, prefix.block_table(), end)
}

/// A decode side that holds a prefix receives only the rest, with the window of the whole prompt.
#[test]
fn a_hand_off_leaves_out_what_decode_holds() {
    let pair = pair(8, 8, 2);
    let tree = PrefixTree::new(&pair.target);
    let n = 600;
    let mut computed = pair.source.reserve(n, Room(1)).unwrap();
    for layer in pair.layers() {
        fill_layer(&pair.source, &mut computed, layer, n, 3);
    }
    let first = pair.hand_over(512, 512, 1, 3);
    tree.insert(&tokens(512), &first).unwrap();
    tree.settle();
    drop(first.close());
    let Hit::Ready { lease, .. } = tree.lookup(&tokens(n)) else {
        panic!("it has landed");
    };
    let layers = 0..pair.source.schema().layer_count();
    let writers = vec![WriterLayers {
        rank: WriterRank(0),
        layers,
    }];
    let plan =
        TransferPlan::compile_from(pair.target.schema().clone(), 512, n, vec![n], writers).unwrap();
    let slots = pair
        .target
        .resume(lease, n + 64, Room(2))
        .map_err(|e| e.1)
        .unwrap();
    let writer = [(pair.to_sender, WriterRank(0))];
    let mut flight = slots
        .into_inflight(&plan, Epoch(2), &writer)
        .map_err(|e| e.1)
        .unwrap();
    flight.arm(&pair.receiver, None).unwrap();
    let peer = pair.sender.peer(pair.to_receiver).unwrap();
    let pools: Vec<_> = peer.pools.iter().map(|pool| pool.pool).collect();
    for layer in pair.layers() {
        let written = computed.commit_layer(layer, 0..n).unwrap();
        let target = PostTarget {
            incarnation: peer.incarnation,
            pools: &pools,
            table: flight.block_table(),
            epoch: Epoch(2),
            room: Room(2),
            verify: VerifyMode::Canary,
        };
        let post = plan.post(&pair.source, 0, &written, &target).unwrap();
        let (local, remote) = post.descriptors();
        let transfer = pair
            .sender
            .prepare(Op::Write, &local, &remote, pair.to_receiver)
            .unwrap();
        let options = PostOptions {
            arrival: Some(post.arrival),
            keepalive: Some(Box::new(post.keepalive)),
            ledger: Some(computed.ledger().clone()),
            ..PostOptions::default()
        };
        let handle = pair.sender.post(&transfer, post.source, options).unwrap();
        assert!(matches!(handle.wait(deadline()), Status::Done(_)));
    }
    let lease = flight.lease().unwrap();
    drop(lease.all_layers(deadline()).unwrap());
    let here = page_digests(&pair.source, computed.block_table(), n);
    assert_eq!(page_digests(&pair.target, flight.block_table(), n), here);
    let mut append = flight.append_lease().unwrap();
    let ready = lease.layer(LayerId(1), deadline()).unwrap();
    let view = append.layer(&ready).unwrap();
    let mut rows = view.component(Component::C4Latent).unwrap();
    let row = vec![0; rows.row_image_bytes()];
    assert!(rows.write_row(127, &row).is_err(), "shared");
    assert!(
        rows.write_row(149, &row).is_err(),
        "landed, and perhaps the tree's"
    );
    assert_eq!(rows.first_writable_entry(), 150);
    rows.write_row(150, &row).unwrap();
}
