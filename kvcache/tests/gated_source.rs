//! What is sent on while it is still arriving: a prefix that another tier brings and that a request hands over.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::prefixes::*;
use common::*;
use kvgate_kvcache::canary::{VerifyMode, page_digests};
use kvgate_kvcache::*;
use kvgate_transfer::{Deadline, Epoch, WriterRank};

const PREFIX: u32 = 512;
const PROMPT: u32 = 600;

fn plan(pools: &PoolSet, end: u32) -> TransferPlan {
    let layers = 0..pools.schema().layer_count();
    let rank = WriterRank(0);
    let writers = vec![WriterLayers { rank, layers }];
    TransferPlan::compile(pools.schema().clone(), end, vec![end], writers).unwrap()
}

/// A request goes on behind a prefix that is on its way here, and hands everything over to a third side: the pages
/// of the prefix are posted layer by layer, each when it has landed in every component and not before.
#[test]
fn a_layer_of_a_prefix_on_its_way_is_not_sent() {
    let pair = pair(8, 8, 2);
    let (from, into) = (PrefixTree::new(&pair.source), PrefixTree::new(&pair.target));
    let computed = publish(&pair.source, &from, PREFIX, 5);
    let prefix = Arc::new(ready(&from, PREFIX + 1));
    let load = plan(&pair.source, PREFIX);
    let slots = pair.target.reserve_prefix(PREFIX, None, Room(7)).unwrap();
    let flight = slots.into_inflight(&load, Epoch(7), &[(pair.to_sender, WriterRank(0))]);
    let mut flight = flight.map_err(|refused| refused.1).unwrap();
    flight.arm(&pair.receiver, None).unwrap();
    assert!(into.insert_prefix(&tokens(PREFIX), &flight).unwrap());
    let Hit::Pending { lease, .. } = into.resumable(&tokens(PROMPT)) else {
        panic!("it is on its way");
    };
    let request = pair.target.resume(lease, PROMPT, Room(2));
    let mut request = request.map_err(|refused| refused.1).unwrap();

    let onward = plan(&pair.target, PROMPT);
    let third = pair.source.reserve(PROMPT, Room(3)).unwrap();
    let peer = pair.receiver.peer(pair.to_sender).unwrap();
    let pools: Vec<_> = peer.pools.iter().map(|pool| pool.pool).collect();
    let target = PostTarget {
        incarnation: peer.incarnation,
        pools: &pools,
        table: third.block_table(),
        epoch: Epoch(3),
        room: Room(3),
        verify: VerifyMode::Canary,
    };
    for layer in pair.layers() {
        // Not read, and not said to be written: there is no witness to post it with.
        let late = request
            .attach_layer(layer, Deadline::after_ms(0))
            .unwrap_err();
        assert!(matches!(late.kind(), ErrorKind::Gate { .. }), "{late}");
        let prefix_tokens = PREFIX;
        let refused = ErrorKind::NotAttached {
            layer,
            prefix_tokens,
        };
        let early = request.commit_layer(layer, PREFIX..PROMPT).map(drop);
        assert_eq!(
            *early.unwrap_err().kind(),
            refused,
            "nothing of {layer} has landed"
        );

        send_prefix(&pair, &load, &prefix, &flight, &[layer]);
        request.attach_layer(layer, deadline()).unwrap();
        let written = request.commit_layer(layer, PREFIX..PROMPT).unwrap();
        let post = onward.post(&pair.target, 0, &written, &target).unwrap();
        let pages = request.block_table().pages();
        for sent in &post.moves {
            let row = &pair.target.schema().rows()[sent.pool.index()];
            let has_prefix = pair
                .target
                .schema()
                .live_ordinals(row, PREFIX)
                .all(|ordinal| {
                    row.space != schema::Space::Page
                        || sent
                            .from
                            .contains(&request.block_table().physical_page(row, ordinal))
                });
            assert!(has_prefix, "{} of {layer}: {pages:?}", row.component);
        }
    }
    assert_eq!(
        page_digests(&pair.target, request.block_table(), PREFIX),
        computed
    );
    into.settle();
    drop(flight.close());
}
