//! The hooks that break a hand-off, and that the canary names what they broke.
#![cfg(all(feature = "fault-injection", not(kv_loom)))]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::Arc;

use common::*;
use kvgate_kvcache::canary::{ProvenanceTable, VerifyMode, Violation};
use kvgate_kvcache::fault::{self, Damage};
use kvgate_kvcache::*;
use kvgate_transfer::{Deadline, Epoch, Op, PostOptions, Status, WriterRank};

const TOKENS: u32 = 600;

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    Drop,
    Swap,
    Damage(Damage),
}

fn post_and_wait(pair: &Pair, lease: &WriteLease, post: KvPost) {
    let (local, remote) = post.descriptors();
    let x = pair
        .sender
        .prepare(Op::Write, &local, &remote, pair.to_receiver)
        .unwrap();
    let options = PostOptions {
        arrival: Some(post.arrival),
        keepalive: Some(Box::new(post.keepalive)),
        ledger: Some(lease.ledger().clone()),
        ..PostOptions::default()
    };
    let handle = pair.sender.post(&x, post.source, options).unwrap();
    assert!(matches!(handle.wait(deadline()), Status::Done(_)));
}

/// One hand-off with a fault in one page; what the canary says about every layer.
fn run(fault: Fault, place: &ComponentRow, live: &LivePage) -> (Vec<Violation>, u32) {
    let pair = pair(8, 4, 4);
    let plan = pair.plan(TOKENS);
    let table = Arc::new(ProvenanceTable::new(Room(1)));
    let lease = pair.target.reserve(TOKENS, Room(1)).unwrap();
    let writers = [(pair.to_sender, WriterRank(0))];
    let mut flight = lease
        .into_inflight(&plan, Epoch(1), &writers)
        .map_err(|e| e.1)
        .unwrap();
    flight.arm(&pair.receiver, Some(table.clone())).unwrap();
    let page = flight.block_table().physical_page(place, live.page_ordinal);
    let other = flight
        .block_table()
        .physical_page(place, live.page_ordinal.wrapping_sub(1) & 1);

    let mut source = pair.source.reserve(TOKENS, Room(1)).unwrap();
    let peer = pair.sender.peer(pair.to_receiver).unwrap();
    let pools: Vec<_> = peer.pools.iter().map(|pool| pool.pool).collect();
    let target = PostTarget {
        incarnation: peer.incarnation,
        pools: &pools,
        table: flight.block_table(),
        epoch: Epoch(1),
        room: Room(1),
        verify: VerifyMode::Canary,
    };
    for layer in pair.layers() {
        fill_layer(&pair.source, &mut source, layer, TOKENS, 5);
        let written = source.commit_layer(layer, 0..TOKENS).unwrap();
        for segment in 0..plan.segment_ends().len() as u32 {
            let mut post = plan.post(&pair.source, segment, &written, &target).unwrap();
            let is_here = post
                .moves
                .iter()
                .any(|page_move| page_move.pool == place.pool && page_move.to.contains(&page));
            let mut damaged = None;
            if is_here {
                match fault {
                    Fault::None => {}
                    Fault::Drop => assert!(fault::drop_page(&mut post, place.pool, page)),
                    Fault::Swap => assert!(fault::swap_pages(&mut post, place.pool, page, other)),
                    Fault::Damage(damage) => {
                        let from = source.block_table().physical_page(place, live.page_ordinal);
                        let pools = &pair.source;
                        damaged = Some(fault::damage_source(pools, place, from, live, damage));
                    }
                }
            }
            if !post.is_empty() {
                post_and_wait(&pair, &source, post);
            }
            if let Some(undamaged) = damaged {
                undamaged.restore(&pair.source);
            }
        }
    }
    let lease = flight.lease().unwrap();
    let mut violations = Vec::new();
    for layer in pair.layers() {
        let _ready = lease.layer(layer, deadline()).unwrap();
        let found = table.verify_layer(
            &pair.target,
            flight.block_table(),
            TOKENS,
            layer,
            VerifyMode::Canary,
        );
        violations.extend(found);
    }
    (violations, page)
}

fn place(layer: u16, component: Component, nth: usize) -> (ComponentRow, LivePage) {
    let schema = small_schema();
    let row = *schema.row(LayerId(layer), component).unwrap();
    let live = schema.live_pages(&row, TOKENS)[nth].clone();
    (row, live)
}

#[test]
fn without_a_fault_there_is_nothing_to_find() {
    let (row, live) = place(1, Component::IndexK, 0);
    assert_eq!(run(Fault::None, &row, &live).0.len(), 0);
}

#[test]
fn what_is_broken_is_named() {
    for (layer, component) in [
        (1, Component::IndexK),
        (1, Component::C4Latent),
        (1, Component::C4State),
        (2, Component::C128Latent),
        (2, Component::C128State),
        (0, Component::SwaLatent),
    ] {
        for fault in [
            Fault::Drop,
            Fault::Damage(Damage::HalfPage),
            Fault::Damage(Damage::WrongStride),
        ] {
            let (row, live) = place(layer, component, 0);
            let (violations, page) = run(fault, &row, &live);
            assert_eq!(violations.len(), 1, "{component}: {violations:?}");
            let violation = &violations[0];
            assert_eq!(
                (violation.component, violation.layer),
                (component, LayerId(layer))
            );
            assert_eq!(violation.page, page);
        }
    }
}

#[test]
fn of_swapped_pages_both_are_named() {
    let (row, live) = place(0, Component::SwaLatent, 1);
    let (violations, page) = run(Fault::Swap, &row, &live);
    assert_eq!(violations.len(), 2, "{violations:?}");
    assert!(violations.iter().any(|violation| violation.page == page));
}

#[test]
fn a_layer_can_be_read_before_its_gate_and_its_pages_sent_after() {
    let pair = pair(8, 4, 4);
    let n = 200;
    let plan = pair.plan(n);
    let flight = pair.flight(n, n, 1);
    let mut source = pair.source.reserve(n, Room(1)).unwrap();
    let layer = LayerId(1);
    fill_layer(&pair.source, &mut source, layer, n, 5);
    let written = source.commit_layer(layer, 0..n).unwrap();
    let peer = pair.sender.peer(pair.to_receiver).unwrap();
    let pools: Vec<_> = peer.pools.iter().map(|pool| pool.pool).collect();
    let target = PostTarget {
        incarnation: peer.incarnation,
        pools: &pools,
        table: flight.block_table(),
        epoch: Epoch(1),
        room: Room(1),
        verify: VerifyMode::Canary,
    };
    let row = *pair.source.schema().row(layer, Component::IndexK).unwrap();
    let post = plan.post(&pair.source, 0, &written, &target).unwrap();
    let ticket_count = post.arrival.tickets.len();
    let (first, later) = fault::split_off(&plan, post, row.pool, &written).unwrap();
    assert_eq!(
        first.arrival.tickets.len() + later.arrival.tickets.len(),
        ticket_count
    );
    assert_eq!(later.moves.len(), 1);
    post_and_wait(&pair, &source, first);
    let mut append = flight.append_lease().unwrap();
    assert!(
        append.lease().layer(layer, Deadline::after_ms(1)).is_err(),
        "the gate is shut"
    );
    let mut found = vec![1; row.row_bytes as usize];
    {
        let ungated = append.layer_ungated(layer).unwrap();
        ungated
            .component(Component::IndexK)
            .unwrap()
            .read_row(3, &mut found);
    }
    assert!(
        found.iter().all(|byte| *byte == 0),
        "what was read had not arrived"
    );
    post_and_wait(&pair, &source, later);
    let ready = append.lease().layer(layer, deadline()).unwrap();
    ready
        .view()
        .component(Component::IndexK)
        .unwrap()
        .read_row(3, &mut found);
    assert_eq!(found, image(&row, 3, 5, found.len()));
}
