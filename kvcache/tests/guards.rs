//! One test per guard that the other suites would not miss: each fails when that guard is taken away.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::*;
use kvgate_kvcache::canary::{Provenance, ProvenanceTable, VerifyMode, ViolationKind};
use kvgate_kvcache::*;
use kvgate_transfer::{
    Agent, Arrival, ArrivalSink, Deadline, Epoch, FlightLedger, Op, PostOptions, Status, StepClock,
    WriterRank,
};

fn soon() -> Deadline {
    Deadline::after_ms(1)
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).collect()
}

fn is_gate<T>(refused: Result<T, Error>) -> bool {
    refused.is_err_and(|error| matches!(error.kind(), ErrorKind::Gate { .. }))
}

/// Layer 2 is sent by nobody.
#[test]
fn all_layers_are_ready_only_when_the_last_one_is() {
    let pair = pair(4, 4, 4);
    let flight = pair.flight(256, 256, 1);
    let mut source = pair.source.reserve(256, Room(1)).unwrap();
    pair.send(&mut source, &flight, 256, 7, &[LayerId(0), LayerId(1)]);
    let lease = flight.lease().unwrap();
    assert!(lease.layer(LayerId(1), deadline()).is_ok());
    assert!(is_gate(lease.all_layers(soon())));
    pair.send(&mut source, &flight, 256, 7, &[LayerId(2)]);
    assert!(lease.all_layers(deadline()).is_ok());
}

/// The first page is ready; the second belongs to a flight that has sent nothing.
#[test]
fn a_prefix_is_ready_only_when_each_of_its_pages_is() {
    let pair = pair(8, 8, 4);
    let tree = PrefixTree::new(&pair.target);
    let tokens = prompt(512);
    let first = pair.hand_over(256, 256, 1, 3);
    tree.insert(&tokens[..256], &first).unwrap();
    tree.settle();
    first.close().wait(deadline()).unwrap();
    let second = pair.flight(512, 512, 2);
    assert_eq!(tree.insert(&tokens, &second).unwrap(), 1);
    let Hit::Pending { lease, tokens: hit } = tree.lookup(&tokens) else {
        panic!("not pending")
    };
    assert_eq!(hit, 512);
    assert!(is_gate(lease.layer(LayerId(1), soon())));
    let mut own = pair.target.reserve(300, Room(3)).unwrap();
    assert!(
        is_gate(lease.copy_page(1, &mut own, 0, soon())),
        "what has not landed is not copied"
    );
}

#[test]
fn a_reader_of_a_pending_prefix_counts_on_the_flight() {
    let pair = pair(4, 4, 4);
    let tree = PrefixTree::new(&pair.target);
    let flight = pair.flight(256, 256, 1);
    tree.insert(&prompt(256), &flight).unwrap();
    let Hit::Pending { lease, .. } = tree.lookup(&prompt(256)) else {
        panic!("not pending")
    };
    assert_eq!(flight.ledger().unquiet().operations, 1);
    drop(lease);
    assert_eq!(flight.ledger().unquiet().operations, 0);
    let reader = flight.lease().unwrap();
    assert_eq!(flight.ledger().unquiet().operations, 1);
    drop(reader);
    assert!(flight.ledger().unquiet().is_quiet());
}

/// Only a step of the prefix lease is under way.
#[test]
fn a_step_of_a_prefix_reader_keeps_the_page() {
    let pair = pair(2, 4, 4);
    let tree = PrefixTree::new(&pair.target);
    let flight = pair.hand_over(256, 256, 1, 3);
    tree.insert(&prompt(256), &flight).unwrap();
    tree.settle();
    flight.close().wait(deadline()).unwrap();
    let clock = StepClock::new();
    let step = clock.begin_step();
    let Hit::Ready { lease, .. } = tree.lookup(&prompt(256)) else {
        panic!("not ready")
    };
    lease.fence(&clock).unwrap();
    drop(lease);
    assert_eq!(tree.evict(1), 1);
    assert_eq!(pair.target.stats().pages.draining, 1);
    clock.finish(step);
    assert_eq!(pair.target.stats().pages.free, 2);
}

#[test]
fn pending_pages_are_not_evicted() {
    let pair = pair(4, 4, 4);
    let tree = PrefixTree::new(&pair.target);
    let flight = pair.flight(256, 256, 1);
    tree.insert(&prompt(256), &flight).unwrap();
    assert_eq!(tree.evict(1), 0);
    assert_eq!(tree.page_counts(), (0, 1));
}

/// Both agents are connected to the writer; the names of the pools are those of one.
#[test]
fn a_flight_is_armed_with_the_agent_of_its_pools() {
    let pair = pair(4, 4, 4);
    let third = Agent::builder("third").build().unwrap();
    let (to_sender, _) = Agent::connect_local(&third, &pair.sender).unwrap();
    let lease = pair.target.reserve(256, Room(1)).unwrap();
    let writers = [(to_sender, WriterRank(0))];
    let flight = lease.into_inflight(&pair.plan(256), Epoch(1), &writers);
    let mut flight = flight.map_err(|refused| refused.1).unwrap();
    let error = flight.arm(&third, None).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::OtherAgent { .. }),
        "{error}"
    );
    assert!(pair.target.pool_ids_of(&third).is_err());
    let pools = pair.target.pool_ids_of(&pair.receiver).unwrap();
    assert_eq!(Some(pools), pair.target.pool_ids());
    pair.target.unregister(deadline()).unwrap();
    let error = flight.arm(&pair.receiver, None).unwrap_err();
    assert_eq!(*error.kind(), ErrorKind::NotRegistered);
    assert!(flight.close().poll(), "no writer was promised anything");
}

/// A flight that was never armed ends: nothing has failed, and nothing will ever land.
#[test]
fn a_flight_that_ends_before_it_is_armed_leaves_the_tree() {
    let pair = pair(4, 4, 4);
    let tree = PrefixTree::new(&pair.target);
    let lease = pair.target.reserve(256, Room(1)).unwrap();
    let writers = [(pair.to_sender, WriterRank(0))];
    let flight = lease.into_inflight(&pair.plan(256), Epoch(1), &writers);
    let flight = flight.map_err(|refused| refused.1).unwrap();
    assert_eq!(tree.insert(&prompt(256), &flight).unwrap(), 1);
    drop(flight.close());
    let next = pair.flight(256, 256, 2);
    assert_eq!(
        tree.insert(&prompt(256), &next).unwrap(),
        1,
        "the place is free"
    );
}

/// A proof of a ledger with the same number, made by somebody else.
#[test]
fn slots_are_not_freed_against_a_proof_of_another_ledger() {
    let pair = pair(2, 4, 4);
    let flight = pair.hand_over(256, 256, 1, 3);
    let clock = StepClock::new();
    let step = clock.begin_step();
    flight.fence(&clock).unwrap();
    let foreign = FlightLedger::new(flight.ledger().epoch());
    foreign.close();
    let proof = FlightLedger::poll(&foreign).unwrap();
    let draining = flight.close();
    let draining = draining.free(proof).unwrap_err();
    assert_eq!(pair.target.stats().pages.free, 1);
    clock.finish(step);
    draining.wait(deadline()).unwrap();
    assert_eq!(pair.target.stats().pages.free, 2);
}

/// Closed, not aborted, and nothing has landed: the writer may still write.
#[test]
fn a_flight_closed_early_waits_for_its_writer() {
    let pair = pair(2, 4, 4);
    let flight = pair.flight(256, 256, 1);
    let mut draining = flight.close();
    assert!(!draining.poll());
    assert_eq!(pair.target.stats().pages.draining, 1);
    assert!(draining.writer_answered(pair.to_sender, WriterRank(0)));
    assert!(draining.poll());
}

#[test]
fn a_flight_that_does_not_fit_gives_its_lease_back() {
    let pair = pair(4, 4, 4);
    let lease = pair.target.reserve(256, Room(1)).unwrap();
    let writers = [(pair.to_sender, WriterRank(0))];
    let (lease, error) = *lease
        .into_inflight(&pair.plan(600), Epoch(1), &writers)
        .unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::InvalidRequest { .. }),
        "{error}"
    );
    let flight = lease.into_inflight(&pair.plan(256), Epoch(1), &writers);
    assert!(flight.is_ok(), "the lease is as it was");
}

#[test]
fn a_post_to_too_few_slots_or_pools_is_refused() {
    let pair = pair(8, 4, 4);
    let mut source = pair.source.reserve(600, Room(1)).unwrap();
    fill_layer(&pair.source, &mut source, LayerId(1), 600, 1);
    let written = source.commit_layer(LayerId(1), 0..600).unwrap();
    let peer = pair.sender.peer(pair.to_receiver).unwrap();
    let pools: Vec<_> = peer.pools.iter().map(|pool| pool.pool).collect();
    let twice = [pools.clone(), pools.clone()].concat();
    let (small, large) = (
        pair.target.reserve(256, Room(1)).unwrap(),
        pair.target.reserve(600, Room(1)).unwrap(),
    );
    let post = |table: &BlockTable, pools: &[_]| {
        let target = PostTarget {
            incarnation: peer.incarnation,
            pools,
            table,
            epoch: Epoch(1),
            room: Room(1),
            verify: VerifyMode::Off,
        };
        pair.plan(600).post(&pair.source, 0, &written, &target)
    };
    let is_invalid = |refused: Result<KvPost, Error>| {
        refused.is_err_and(|error| matches!(error.kind(), ErrorKind::InvalidRequest { .. }))
    };
    assert!(is_invalid(post(small.block_table(), &pools)));
    assert!(is_invalid(post(large.block_table(), &pools[1..])));
    assert!(is_invalid(post(large.block_table(), &twice)));
    assert!(post(large.block_table(), &pools).is_ok());
}

#[test]
fn a_reader_cannot_write() {
    let pair = pair(4, 4, 4);
    let flight = pair.hand_over(256, 256, 1, 3);
    let lease = flight.lease().unwrap();
    let ready = lease.layer(LayerId(1), deadline()).unwrap();
    let mut view = ready.view().component(Component::IndexK).unwrap();
    let mut before = vec![0; view.row_image_bytes()];
    view.read_row(63, &mut before);
    let error = view.write_row(63, &vec![0xee; before.len()]).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::ReadOnly { .. }),
        "{error}"
    );
    let mut after = vec![0; before.len()];
    view.read_row(63, &mut after);
    assert_eq!(before, after);
}

/// The append right is one, and is that of its own flight.
#[test]
fn the_append_right_is_one_and_of_one_flight() {
    let pair = pair(4, 4, 4);
    let one = pair.hand_over(256, 256, 1, 3);
    let other = pair.hand_over(256, 256, 2, 3);
    let mut append = one.append_lease().unwrap();
    let error = one.append_lease().unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::AppendTaken { .. }),
        "{error}"
    );
    let lease = other.lease().unwrap();
    let foreign = lease.layer(LayerId(1), deadline()).unwrap();
    let error = append.layer(&foreign).map(drop).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::OtherFlight { .. }),
        "{error}"
    );
    drop(append);
    assert!(one.append_lease().is_ok());
}

/// A pair whose schema has a draft block.
fn drafting_pair() -> Pair {
    let schema = schema_of(vec![0, 4], true);
    let config = PoolConfig {
        pages: 4,
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

#[test]
fn rows_of_the_draft_block_arrive_too() {
    let pair = drafting_pair();
    let flight = pair.hand_over(300, 300, 1, 9);
    let lease = flight.lease().unwrap();
    let mut seen = 0;
    for layer in pair.layers() {
        let ready = lease.layer(layer, deadline()).unwrap();
        for row in pair.target.schema().rows_of(layer) {
            let view = ready.view().component(row.component).unwrap();
            let mut found = vec![0; view.row_image_bytes()];
            for entry in row.live_entries(300, 128) {
                view.read_row(entry, &mut found);
                assert_eq!(
                    found,
                    image(row, entry, 9, found.len()),
                    "{}",
                    row.component
                );
                seen += u32::from(row.component == Component::MtpLatent);
            }
        }
    }
    assert!(seen > 100, "{seen} rows of the draft block");
}

/// The numbers of a witness are pages of its own pools.
#[test]
fn a_layer_is_sent_from_the_pools_of_its_witness() {
    let pair = pair(4, 4, 4);
    let flight = pair.flight(256, 256, 1);
    let mut lease = pair.source.reserve(256, Room(1)).unwrap();
    let written = lease.commit_layer(LayerId(0), 0..256).unwrap();
    let peer = pair.sender.peer(pair.to_receiver).unwrap();
    let pools: Vec<_> = peer.pools.iter().map(|pool| pool.pool).collect();
    let target = PostTarget {
        incarnation: peer.incarnation,
        pools: &pools,
        table: flight.block_table(),
        epoch: Epoch(1),
        room: Room(1),
        verify: VerifyMode::Off,
    };
    let post = |from: &PoolSet| pair.plan(256).post(from, 0, &written, &target);
    assert!(post(&pair.source).is_ok());
    let refused = post(&pair.target).unwrap_err();
    assert!(
        matches!(
            refused.kind(),
            ErrorKind::InvalidRequest { field: "pools", .. }
        ),
        "{refused}"
    );
}

/// Sends one layer with its records and answers them.
fn records_of(pair: &Pair, flight: &InFlight) -> Vec<Provenance> {
    let mut source = pair.source.reserve(256, Room(1)).unwrap();
    let layer = LayerId(1);
    fill_layer(&pair.source, &mut source, layer, 256, 7);
    let written = source.commit_layer(layer, 0..256).unwrap();
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
    let post = pair
        .plan(256)
        .post(&pair.source, 0, &written, &target)
        .unwrap();
    let records = Provenance::decode(&post.arrival.note).unwrap();
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
    records
}

/// Each field of a record is compared: one wrong field of one page is one violation of its kind.
#[test]
fn the_canary_compares_every_field_of_a_record() {
    let pair = pair(4, 4, 4);
    let flight = pair.flight(256, 256, 1);
    let records = records_of(&pair, &flight);
    let lease = flight.lease().unwrap();
    drop(lease.layer(LayerId(1), deadline()).unwrap());
    let verify = |records: &[Provenance]| {
        let table = ProvenanceTable::new(Room(1));
        let arrival = Arrival {
            epoch: Epoch(1),
            tickets: Vec::new(),
            note: Provenance::encode(records),
        };
        table.arrived(pair.to_sender, &arrival);
        let (mode, layer) = (VerifyMode::Canary, LayerId(1));
        table.verify_layer(&pair.target, lease.block_table(), 256, layer, mode)
    };
    assert_eq!(verify(&records), []);
    type Damage = fn(&mut Provenance);
    let damages: [(Damage, ViolationKind); 5] = [
        (|record| record.room = Room(2), ViolationKind::Request),
        (|record| record.generation += 1, ViolationKind::Generation),
        (|record| record.entries.end += 1, ViolationKind::Entries),
        (|record| record.checksum ^= 1, ViolationKind::Checksum),
        (|record| record.page += 1, ViolationKind::NotArrived),
    ];
    for index in 0..records.len() {
        for (damage, kind) in damages {
            let mut damaged = records.clone();
            damage(&mut damaged[index]);
            let kinds: Vec<_> = verify(&damaged).iter().map(|found| found.kind).collect();
            // A record of another page may stand in for that one's own.
            assert!(kinds.contains(&kind), "{kind:?} in {kinds:?}");
        }
    }
}
