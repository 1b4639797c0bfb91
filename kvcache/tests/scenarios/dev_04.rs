//! DEV-04: done after the first of several components.
//!
//! **Given** a request whose writers send each component as an operation of its own, with its own
//! completion. **When** the completions come in any order, some of them twice, and one component long after
//! the others. **Expected** a layer, and with it the room, is complete with the last (writer, component) and
//! not before; repetitions are counted and change nothing. **In the field** the receiver noted "this rank has
//! sent some state" and released the request after the first component.
//!
//! Guard: I-2, I-5. A stage counts each chunk of the plan once (`transfer/src/barrier/stage.rs`), and the
//! plan has a chunk for each component (`kvcache/src/plan.rs`).

use kvgate_kvcache::{Component, LayerId, PageLease};
use kvgate_transfer::Deadline;
use kvgate_transfer::sim::{SimFaults, SimNet};

use crate::host::{Host, Net, Piece, Request, Shape, Target, rows, seeds};

const TOKENS: u32 = 300;

fn host(seed: u64) -> Host {
    println!("DEV-04: seed {seed}");
    let faults = SimFaults {
        reorder: true,
        duplicate_per_mille: 400,
        ..SimFaults::none()
    };
    let net = Net::Sim(SimNet::new(seed, faults));
    Host::new(net, Shape::of(&[0, 4, 128], 4), 2)
}

/// Every component of every layer by every writer, not yet posted.
fn pieces(host: &Host, request: Request, to: &Target) -> Vec<(usize, Piece)> {
    let plan = host.plan(request.tokens);
    let mut pieces = Vec::new();
    for (index, writer) in host.writers.iter().enumerate() {
        let pools = &writer.node.pools;
        let mut lease = pools.reserve(request.tokens, request.room).unwrap();
        for layer in writer.layers.clone().map(LayerId) {
            let tokens = 0..request.tokens;
            rows::write(pools.schema(), &mut lease, layer, request, tokens.clone());
            let written = lease.commit_layer(layer, tokens).unwrap();
            for segment in 0..plan.segment_ends().len() as u32 {
                let of_segment = writer.pieces(&plan, segment, &written, to);
                pieces.extend(of_segment.into_iter().map(|piece| (index, piece)));
            }
        }
    }
    pieces
}

/// Whoever passes a gate finds every row of the layer. Answers how many gates are open.
fn read_open_layers(host: &Host, lease: &PageLease, request: Request) -> usize {
    let schema = host.receiver.pools.schema();
    let is_open = |layer: &LayerId| {
        let Ok(ready) = lease.layer(*layer, Deadline::now()) else {
            return false;
        };
        let foreign = rows::foreign(schema, &ready.view(), request);
        assert_eq!(foreign, None, "complete with a component that has not come");
        true
    };
    schema.layers().filter(is_open).count()
}

#[test]
fn dev_04_a_room_is_complete_with_its_last_component() {
    let mut repeated = 0;
    for seed in seeds(24) {
        let host = host(seed);
        let request = Request::new(3, TOKENS);
        let flight = host.flight(request);
        let lease = flight.lease().unwrap();
        let mut pieces = pieces(&host, request, &Target::of(&flight));
        assert!(pieces.len() > 10, "chunks of 9 components in two segments");
        let random = |limit: usize| host.net.sim().random(limit as u64) as usize;
        let (late_writer, late) = pieces.swap_remove(random(pieces.len()));
        let (late_layer, late_component): (LayerId, Component) = (late.layer, late.component);
        while !pieces.is_empty() {
            let (writer, piece) = pieces.swap_remove(random(pieces.len()));
            drop(host.writers[writer].send(piece));
            host.net.steps(random(3) as u64);
            read_open_layers(&host, &lease, request);
        }
        while host.net.sim().step() {
            read_open_layers(&host, &lease, request);
        }
        let open = read_open_layers(&host, &lease, request);
        assert_eq!(open, 2, "{late_component} of layer {late_layer} is missing");
        assert!(!flight.barrier().all_landed());

        let handle = host.writers[late_writer].send(late);
        host.net.run();
        drop(handle);
        assert_eq!(read_open_layers(&host, &lease, request), 3);
        assert!(flight.barrier().all_landed());
        // Each operation has one ticket.
        let counted = host.receiver.agent.counters().duplicate;
        assert_eq!(counted, host.net.sim().counts().duplicated);
        repeated += counted;
        drop(lease);
        assert!(flight.close().poll());
    }
    assert!(repeated > 0, "no completion came twice");
}
