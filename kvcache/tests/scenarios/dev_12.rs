//! DEV-12: a receiver waits for a component that nobody sends.
//!
//! **Given** models without state, prompts whose state is empty, a prefix that decode has whole, several
//! widths of prefill. **When** the transfer runs. **Expected** both sides derive what is sent and what is
//! awaited from the same plan, so that every combination completes; a disagreement is refused by name when
//! the peers meet, when the request is planned or when it is armed; and a writer that ends early ends the
//! waits. **In the field** rules for sending and for expecting differed, and decode waited for 300 s.
//!
//! Guard: I-4, I-15. Chunks and descriptors come from one list (`kvcache/src/plan.rs`), the schemas of two
//! peers are equal (`kvcache/src/handoff/greeting.rs`), every writer of a plan is named when it is armed
//! (`transfer/src/agent/expect.rs`).

use kvgate_kvcache::handoff::{Envelope, Greeting, GreetingState, PeerHello, cover};
use kvgate_kvcache::*;
use kvgate_transfer::sim::{SimFaults, SimNet};
use kvgate_transfer::{
    Barrier, BarrierError, Deadline, Incarnation, StageId, WriterFault, WriterRank,
};

use crate::host::{Host, Net, Request, Shape, Target, patience, rows, seeds};

/// Around the ends of groups of 128 and of pages: state that is there, that is empty, that is everything.
const LENGTHS: [u32; 12] = [1, 3, 127, 128, 129, 255, 256, 257, 300, 384, 512, 600];

fn host(seed: u64, shape: Shape, writer_count: u16) -> Host {
    let faults = SimFaults {
        reorder: true,
        ..SimFaults::none()
    };
    Host::new(Net::Sim(SimNet::new(seed, faults)), shape, writer_count)
}

/// What a layer still waits for.
fn awaited(plan: &TransferPlan, schema: &CacheSchema, barrier: &Barrier) -> Vec<String> {
    let of_layer = |layer: LayerId| {
        let landed = barrier.landed(StageId(layer.0));
        let is_missing = move |chunk: &PlannedChunk| {
            let number = usize::from(chunk.chunk.0);
            landed[number / 64] >> (number % 64) & 1 == 0
        };
        plan.chunks(layer).into_iter().filter(is_missing)
    };
    let name = |chunk: PlannedChunk| {
        let row = &schema.rows()[chunk.pool.index()];
        format!("{} of layer {}", row.component, row.layer)
    };
    schema.layers().flat_map(of_layer).map(name).collect()
}

#[test]
fn dev_12_every_combination_completes() {
    let mut shapes: Vec<Shape> = [&[0, 0][..], &[4, 4], &[128, 128], &[0, 4, 128, 4]]
        .iter()
        .map(|ratios| Shape::of(ratios, 4))
        .collect();
    shapes.push(Shape {
        drafting: true,
        ..Shape::of(&[0, 4], 4)
    });
    for seed in seeds(2) {
        for (shape, writer_count) in shapes.iter().flat_map(|shape| [(shape, 1), (shape, 2)]) {
            let host = host(seed, shape.clone(), writer_count);
            for (number, tokens) in (1..).zip(LENGTHS) {
                let case = format!(
                    "seed {seed}, ratios {:?}, {tokens} tokens, {writer_count} writers",
                    shape.ratios
                );
                complete(&host, Request::new(number, tokens), &case);
            }
        }
    }
}

/// One hand-off; when nothing is under way any more, nothing is awaited.
fn complete(host: &Host, request: Request, case: &str) {
    let schema = host.receiver.pools.schema();
    let (plan, flight) = (host.plan(request.tokens), host.flight(request));
    drop(host.post_all(request, &flight));
    host.net.run();
    let awaited = awaited(&plan, schema, flight.barrier());
    assert_eq!(awaited, [""; 0], "awaited, and nobody sends it: {case}");
    let lease = flight.lease().unwrap();
    for layer in host.layers() {
        let ready = lease.layer(layer, Deadline::now()).unwrap();
        assert_eq!(
            rows::foreign(schema, &ready.view(), request),
            None,
            "{case}"
        );
    }
    drop(lease);
    assert!(flight.close().poll(), "{case}");
}

/// Decode has the whole prefix: there is no flight and nothing to wait for.
#[test]
fn dev_12_a_full_prefix_hit_waits_for_nobody() {
    let host = host(1, Shape::of(&[0, 4, 128], 4), 1);
    let request = Request::new(1, 512);
    let flight = host.flight(request);
    host.hand_over(request, &flight);
    let tree = PrefixTree::new(&host.receiver.pools);
    let prompt: Vec<u32> = (0..512).collect();
    tree.insert(&prompt, &flight).unwrap();
    tree.settle();
    assert!(flight.close().poll());
    let _left = host.writers[0].node.agent.shutdown(Deadline::now());
    let Hit::Ready { lease, tokens: 512 } = tree.lookup(&prompt) else {
        panic!("not a full hit")
    };
    for layer in host.layers() {
        let ready = lease.layer(layer, Deadline::now()).unwrap();
        let schema = host.receiver.pools.schema();
        assert_eq!(rows::foreign(schema, &ready.view(), request), None);
    }
}

/// One side has a draft block, the other has none: known when they meet.
#[test]
fn dev_12_a_component_of_one_side_only_is_refused_by_name() {
    let plain = Shape::of(&[0, 4], 4);
    let drafting = Shape {
        drafting: true,
        ..plain.clone()
    };
    let hello = |life, layers| PeerHello {
        incarnation: Incarnation(life),
        writer: WriterRank(0),
        writer_count: 1,
        layers,
    };
    let mut prefill = Greeting::new(plain.schema(), hello(1, 0..2), Incarnation(2));
    let mut decode = Greeting::new(drafting.schema(), hello(2, 0..3), Incarnation(1));
    let said = Envelope::decode(&prefill.hello()).unwrap();
    decode.handle(&said).unwrap();
    let GreetingState::Refused(difference) = decode.state() else {
        panic!("decode waits for a block that nobody sends")
    };
    assert_ne!(difference.ours, difference.theirs, "{}", difference.field);
}

/// Prefill is narrower than decode believes: refused when the writers are counted, planned, armed.
#[test]
fn dev_12_a_writer_that_is_not_there_is_refused_before_anybody_waits() {
    let host = host(1, Shape::of(&[0, 4, 128], 4), 2);
    let said = PeerHello {
        incarnation: Incarnation(1),
        writer: WriterRank(0),
        writer_count: 2,
        layers: 0..1,
    };
    assert!(cover(&[said], 3).is_err());

    let schema = host.receiver.pools.schema();
    let alone = WriterLayers {
        rank: WriterRank(0),
        layers: 0..1,
    };
    let refusal = TransferPlan::compile(schema.clone(), 300, vec![300], vec![alone]).unwrap_err();
    assert!(refusal.to_string().contains("one writer for layer 1"));

    let request = Request::new(1, 300);
    let lease = host.reserve(request).unwrap();
    let (plan, epoch) = (host.plan(request.tokens), lease.number());
    let there = [(host.writers[0].at_receiver, WriterRank(0))];
    let flight = lease.into_inflight(&plan, epoch, &there);
    let mut flight = flight.map_err(|refused| refused.1).unwrap();
    let armed = flight.arm(&host.receiver.agent, None);
    let refusal = armed.expect_err("decode waits for the layers of writer 1");
    let reason = std::error::Error::source(&refusal).unwrap();
    let reason: &kvgate_transfer::Error = reason.downcast_ref().unwrap();
    let is_named = matches!(
        reason.kind(),
        kvgate_transfer::ErrorKind::WriterMismatch {
            writer: WriterRank(1),
            fault: WriterFault::NotListed,
        }
    );
    assert!(is_named, "{refusal}");
}

/// A writer that ends without one of its layers: the wait for it ends with the cause.
#[test]
fn dev_12_a_writer_that_ends_early_ends_the_waits() {
    for seed in seeds(8) {
        println!("DEV-12: seed {seed}");
        let host = host(seed, Shape::of(&[0, 4, 128], 4), 1);
        let (request, writer) = (Request::new(1, 300), &host.writers[0]);
        let flight = host.flight(request);
        let lease = flight.lease().unwrap();
        let (plan, to) = (host.plan(300), Target::of(&flight));
        let pools = &writer.node.pools;
        let mut source = pools.reserve(300, request.room).unwrap();
        for layer in [LayerId(0), LayerId(2)] {
            rows::write(pools.schema(), &mut source, layer, request, 0..300);
            let written = source.commit_layer(layer, 0..300).unwrap();
            for segment in 0..2 {
                let piece = writer.whole(&plan, segment, &written, &to).unwrap();
                drop(piece.map(|piece| writer.send(piece)));
            }
        }
        host.net.run();
        drop(source);
        for layer in [LayerId(0), LayerId(2)] {
            assert!(lease.layer(layer, Deadline::now()).is_ok());
        }
        assert_eq!(flight.barrier().missing(StageId(1)), 7);
        let _left = writer.node.agent.shutdown(Deadline::now());
        host.net.run();
        let error = lease.layer(LayerId(1), patience()).unwrap_err();
        let is_ended = matches!(
            error.kind(),
            ErrorKind::Gate {
                error: BarrierError::Failed(_),
                ..
            }
        );
        assert!(is_ended, "{error}");
        drop(lease);
        assert!(flight.close().poll());
    }
}
