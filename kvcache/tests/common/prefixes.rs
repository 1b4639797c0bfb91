//! Prefixes that one side computes and another one takes over.

use std::sync::Arc;

use kvgate_kvcache::canary::{PageDigest, VerifyMode, page_digests};
use kvgate_kvcache::*;
use kvgate_transfer::{Op, PostOptions, Status};

use super::{Pair, deadline, fill_layer};

pub fn tokens(count: u32) -> Vec<u32> {
    (0..count).map(|token| token % 97).collect()
}

/// Computes `end` tokens in `pools` and publishes them with their checkpoint.
pub fn publish(pools: &PoolSet, tree: &PrefixTree, end: u32, seed: u32) -> Vec<PageDigest> {
    let mut lease = pools.reserve(end + 8, Room(1)).unwrap();
    let mut checkpoint = pools.reserve_checkpoint(end, Room(1)).unwrap();
    let mut written = Vec::new();
    for layer in pools.schema().layers() {
        fill_layer(pools, &mut lease, layer, end, seed);
        written.push(lease.commit_layer(layer, 0..end).unwrap());
        checkpoint.save_layer(layer, &lease).unwrap();
    }
    let checkpoint = checkpoint.finish().unwrap();
    let digests = page_digests(pools, lease.block_table(), end);
    let published = tree.publish(&tokens(end), &mut lease, &written, Some(checkpoint));
    assert_eq!(published.unwrap(), end / 256);
    digests
}

pub fn ready(tree: &PrefixTree, count: u32) -> PrefixLease {
    match tree.resumable(&tokens(count)) {
        Hit::Ready { lease, .. } => lease,
        other => panic!("{other:?}"),
    }
}

/// Sends some layers of a prefix of the sender's tree into a flight of the receiver.
pub fn send_prefix(
    pair: &Pair,
    plan: &TransferPlan,
    prefix: &Arc<PrefixLease>,
    flight: &InFlight,
    layers: &[LayerId],
) {
    let peer = pair.sender.peer(pair.to_receiver).unwrap();
    let pools: Vec<_> = peer.pools.iter().map(|pool| pool.pool).collect();
    let target = PostTarget {
        incarnation: peer.incarnation,
        pools: &pools,
        table: flight.block_table(),
        epoch: flight.barrier().epoch(),
        room: flight.room(),
        verify: VerifyMode::Canary,
    };
    for &layer in layers {
        let post = plan
            .post_prefix(&pair.source, prefix, layer, deadline(), &target)
            .unwrap();
        let (local, remote) = post.descriptors();
        let transfer = pair
            .sender
            .prepare(Op::Write, &local, &remote, pair.to_receiver)
            .unwrap();
        let options = PostOptions {
            arrival: Some(post.arrival),
            keepalive: Some(Box::new(post.keepalive)),
            ..PostOptions::default()
        };
        let handle = pair.sender.post(&transfer, post.source, options).unwrap();
        assert!(matches!(handle.wait(deadline()), Status::Done(_)));
    }
}
