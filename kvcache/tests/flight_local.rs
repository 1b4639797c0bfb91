//! One flight from a write lease to a page lease, over the local backend, with the canary on.
#![allow(clippy::needless_update, reason = "a feature adds a field")]
#![cfg(not(kv_loom))]
#![allow(unsafe_code, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

use std::sync::Arc;

use kvgate_kvcache::canary::{ProvenanceTable, VerifyMode, ViolationKind, page_digests};
use kvgate_kvcache::*;
use kvgate_transfer::{
    Agent, Cause, Deadline, Epoch, PeerId, PostOptions, Side, Status, WriterRank,
};

const DEADLINE_MS: u64 = 5_000;

struct Pair {
    sender: Agent,
    receiver: Agent,
    to_receiver: PeerId,
    to_sender: PeerId,
    source: PoolSet,
    target: PoolSet,
}

fn geometry() -> V4Geometry {
    V4Geometry {
        layer_ratios: vec![0, 4, 128, 4],
        ..V4Geometry::flash()
    }
}

fn pair(index_k: IndexKFormat) -> Pair {
    let formats = Formats {
        index_k,
        ..Formats::default()
    };
    let schema = Arc::new(CacheSchema::deepseek_v4(&geometry(), &formats).unwrap());
    let config = PoolConfig {
        pages: 6,
        windows: 4,
        requests: 2,
        memory: MemoryKind::Host,
    };
    let pools = || PoolSet::new(schema.clone(), config).unwrap();
    let (source, target) = (pools(), pools());
    let agent = |name: &str| Agent::builder(name).build().unwrap();
    let (sender, receiver) = (agent("prefill"), agent("decode"));
    source.register(&sender).unwrap();
    target.register(&receiver).unwrap();
    let (to_receiver, to_sender) = Agent::connect_local(&sender, &receiver).unwrap();
    Pair {
        sender,
        receiver,
        to_receiver,
        to_sender,
        source,
        target,
    }
}

/// Writes something different into every live row.
fn fill(pools: &PoolSet, lease: &mut WriteLease, tokens: u32) {
    for layer in pools.schema().layers() {
        let rows = pools.schema().rows_of(layer).to_vec();
        let view = lease.layer_mut(layer).unwrap();
        for row in rows {
            let component = view.component(row.component).unwrap();
            for live in pools.schema().live_pages(&row, tokens) {
                let page = component.table()[live.page_ordinal as usize % component.table().len()];
                for byte in 0..row.stride_bytes {
                    let value = (u64::from(layer.0) * 31
                        + u64::from(row.pool.0) * 7
                        + u64::from(live.page_ordinal) * 13
                        + byte) as u8;
                    let offset = u64::from(page) * row.stride_bytes + byte;
                    unsafe { component.base_ptr().add(offset as usize).write(value) };
                }
            }
        }
    }
}

fn plan(pair: &Pair, tokens: u32) -> TransferPlan {
    let mut ends: Vec<u32> = (1..)
        .map(|n| n * 256)
        .take_while(|end| *end < tokens)
        .collect();
    ends.push(tokens);
    let writers = vec![WriterLayers {
        rank: WriterRank(0),
        layers: 0..pair.source.schema().layer_count(),
    }];
    TransferPlan::compile(pair.source.schema().clone(), tokens, ends, writers).unwrap()
}

fn send(pair: &Pair, lease: &mut WriteLease, plan: &TransferPlan, flight: &InFlight, epoch: Epoch) {
    let peer = pair.sender.peer(pair.to_receiver).unwrap();
    let pools: Vec<_> = peer.pools.iter().map(|pool| pool.pool).collect();
    let target = PostTarget {
        incarnation: peer.incarnation,
        pools: &pools,
        table: flight.block_table(),
        epoch,
        room: flight.room(),
        verify: VerifyMode::Canary,
    };
    for layer in pair.source.schema().layers() {
        for (segment, end) in plan.segment_ends().iter().enumerate() {
            let written = lease.commit_layer(layer, 0..*end).unwrap();
            let post = plan
                .post(&pair.source, segment as u32, &written, &target)
                .unwrap();
            if post.is_empty() {
                continue;
            }
            let (local, remote) = post.descriptors();
            let x = pair
                .sender
                .prepare(
                    kvgate_transfer::Op::Write,
                    &local,
                    &remote,
                    pair.to_receiver,
                )
                .unwrap();
            let options = PostOptions {
                arrival: Some(post.arrival),
                keepalive: Some(Box::new(post.keepalive)),
                ledger: Some(lease.ledger().clone()),
                ..PostOptions::default()
            };
            let handle = pair.sender.post(&x, post.source, options).unwrap();
            assert!(matches!(
                handle.wait(Deadline::after_ms(DEADLINE_MS)),
                Status::Done(_)
            ));
        }
    }
}

fn flight(
    pair: &Pair,
    plan: &TransferPlan,
    room: Room,
    epoch: Epoch,
) -> (InFlight, Arc<ProvenanceTable>) {
    let lease = pair.target.reserve(plan.prompt_tokens() + 8, room).unwrap();
    let mut flight = lease
        .into_inflight(plan, epoch, &[(pair.to_sender, WriterRank(0))])
        .unwrap();
    let records = Arc::new(ProvenanceTable::new(room));
    flight.arm(&pair.receiver, Some(records.clone())).unwrap();
    (flight, records)
}

#[test]
fn every_row_arrives_behind_its_gate_and_every_slot_comes_back() {
    for index_k in [IndexKFormat::Bf16, IndexKFormat::Fp8, IndexKFormat::F32] {
        let pair = pair(index_k);
        for (number, tokens) in [1, 3, 4, 5, 127, 128, 131, 255, 256, 257, 513, 700]
            .into_iter()
            .enumerate()
        {
            let room = Room(number as u64);
            let epoch = Epoch(number as u64 + 1);
            let plan = plan(&pair, tokens);
            let mut lease = pair.source.reserve(tokens, room).unwrap();
            fill(&pair.source, &mut lease, tokens);
            let (flight, records) = flight(&pair, &plan, room, epoch);
            let reader = flight.lease().unwrap();
            for layer in pair.target.schema().layers() {
                let found = records.verify_layer(
                    &pair.target,
                    reader.block_table(),
                    tokens,
                    layer,
                    VerifyMode::Canary,
                );
                assert!(
                    found.iter().all(|v| v.kind == ViolationKind::NotArrived) && !found.is_empty()
                );
            }
            send(&pair, &mut lease, &plan, &flight, epoch);
            for layer in pair.target.schema().layers() {
                let ready = reader
                    .layer(layer, Deadline::after_ms(DEADLINE_MS))
                    .unwrap();
                let found = records.verify_layer(
                    &pair.target,
                    reader.block_table(),
                    tokens,
                    layer,
                    VerifyMode::Canary,
                );
                assert_eq!(found, []);
                assert!(ready.view().component(Component::SwaLatent).is_some());
            }
            let ours = page_digests(&pair.source, lease.block_table(), tokens);
            assert_eq!(
                ours,
                page_digests(&pair.target, reader.block_table(), tokens)
            );
            let mut draining = flight.close();
            assert!(!draining.poll(), "a lease keeps the slots");
            drop(reader);
            assert!(draining.poll());
            drop(lease);
        }
        pair.source.sweep();
        for pools in [&pair.source, &pair.target] {
            let stats = pools.stats();
            assert!(stats.is_conserved(), "{stats:?}");
            assert_eq!(stats.pages.free, stats.pages.capacity);
            assert!(stats.pages.reuses > 10);
        }
    }
}

#[test]
fn an_aborted_flight_keeps_its_slots_until_the_writer_answers() {
    let pair = pair(IndexKFormat::Bf16);
    let plan = plan(&pair, 300);
    let (flight, _) = flight(&pair, &plan, Room(1), Epoch(1));
    let reader = flight.lease().unwrap();
    let cause = Cause::Aborted {
        by: Side::Local,
        reason: "test".to_owned(),
    };
    let mut draining = flight.abort(cause);
    let error = reader
        .layer(LayerId(0), Deadline::after_ms(DEADLINE_MS))
        .unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Gate { .. }), "{error}");
    drop(reader);
    assert!(!draining.poll());
    assert_eq!(pair.target.stats().pages.draining, 2);
    assert!(draining.writer_answered(pair.to_sender, WriterRank(0)));
    assert!(draining.poll());
    let stats = pair.target.stats();
    assert_eq!((stats.pages.owned, stats.pages.draining), (0, 0));
    assert!(stats.is_conserved());
}
