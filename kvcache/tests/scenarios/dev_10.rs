//! DEV-10: a peer restarts at the same address.
//!
//! **Given** decode knows process 1 of prefill at an address: its life, its pools, a request under way.
//! **When** process 1 ends, process 2 starts at the same address with other memory, and late words of
//! process 1 still come. **Expected** the change is seen with the connection; waiters hear of it at once; the
//! descriptors of process 1 reach nothing; process 2 serves new requests; nobody answers for process 1. **In
//! the field** one stack crashed on stale metadata, the other hung every request for 480 s.
//!
//! Guard: I-14. A list of descriptors names the life that it is for (`transfer/src/engine/prepared.rs`), a
//! message that of its sender (`kvcache/src/handoff/decode/receiver.rs`), and only the connection of a
//! writer speaks for it (`transfer/src/agent/expect.rs`).

use std::time::Instant;

use kvgate_kvcache::handoff::{
    DecodeInput, DecodeMachine, DecodeSpec, DecodeState, Envelope, Identity, Message, SlotOffer,
    Timeouts,
};
use kvgate_kvcache::{Attempt, ErrorKind, InFlight, LayerId, WriteLease, handoff};
use kvgate_transfer::sim::{Death, SimFaults, SimNet};
use kvgate_transfer::{
    AgentEvent, BarrierError, DescriptorList, Incarnation, Op, PeerId, PostOptions, SourceReady,
    WriterRank,
};

use crate::host::{
    Host, Net, Node, Request, Shape, Writer, any_port, cancelled, connect_to, patience, rows, seeds,
};

const RANK: WriterRank = WriterRank(0);

fn shape() -> Shape {
    Shape::of(&[0, 4, 128], 6)
}

/// A life of prefill that listens, with the rows of `content` in its first slots.
fn prefill(host_net: &Net, content: u32) -> (Node, WriteLease) {
    let node = Node::new(host_net, "prefill", &shape());
    let request = Request::new(content, 300);
    let mut lease = node.pools.reserve(300, request.room).unwrap();
    for layer in node.pools.schema().layers() {
        rows::write(node.pools.schema(), &mut lease, layer, request, 0..300);
    }
    (node, lease)
}

fn writer(node: &Node, (at_receiver, to_receiver): (PeerId, PeerId)) -> Writer {
    Writer {
        node: node.clone(),
        rank: RANK,
        layers: 0..3,
        to_receiver,
        at_receiver,
    }
}

/// Decode fetches the pages of `lease` from prefill into its own `into`, by what it knows of `life`.
fn fetch(
    decode: &Node,
    into: &WriteLease,
    peer: PeerId,
    life: Incarnation,
    from: &WriteLease,
    told: &AgentEvent,
) -> Result<(), kvgate_transfer::Error> {
    // A process that starts anew numbers its pools as its former life did.
    let (_, theirs) = decode.knows(peer);
    let ours = decode.pools.pool_ids().unwrap();
    let (mut local, mut remote) = (DescriptorList::new(), DescriptorList::remote(life));
    let row = decode.pools.schema().rows()[1];
    local.push(ours[row.pool.index()], into.block_table().table_of(&row));
    remote.push(theirs[row.pool.index()], from.block_table().table_of(&row));
    let read = decode.agent.prepare(Op::Read, &local, &remote, peer)?;
    let source = SourceReady::announced(told).unwrap();
    let posted = decode.agent.post(&read, source, PostOptions::default());
    let _ended = posted.unwrap().wait(patience());
    Ok(())
}

/// What process 1 said of a request, as a gateway that has not noticed would pass it on.
fn late_words(host: &Host, old: Incarnation, request: Request, flight: &InFlight) {
    let (new, _) = host.receiver.knows(host.writers[0].at_receiver);
    let epoch = flight.barrier().epoch();
    let plan = host.plan(request.tokens);
    let spec = DecodeSpec {
        incarnation: host.receiver.agent.incarnation(),
        room: request.room,
        attempt: Attempt(1),
        epoch,
        offer: SlotOffer::of(request.tokens, plan.segment_ends(), flight.block_table()),
        writers: vec![handoff::Writer {
            rank: RANK,
            incarnation: new,
        }],
        designated: RANK,
        timeouts: Timeouts::default(),
    };
    let mut machine = DecodeMachine::new(spec).unwrap();
    let now = Instant::now();
    machine.handle(now, DecodeInput::Start).unwrap();
    machine.handle(now, DecodeInput::Armed).unwrap();
    let identity = Identity {
        incarnation: old,
        room: request.room,
        attempt: Attempt(1),
        epoch,
    };
    let aux = Message::Aux {
        prompt_tokens: request.tokens,
        first_token: 1,
    };
    let abort = Message::Abort {
        cause: "shutting down".to_owned(),
    };
    for message in [aux, abort, Message::AbortAck { writer: RANK }] {
        for from in [old, new] {
            let envelope = Envelope {
                identity,
                message: message.clone(),
            };
            let refused = machine.handle(now, DecodeInput::Message { from, envelope });
            assert_eq!(machine.state(), DecodeState::Offered, "{refused:?}");
        }
    }
    assert_eq!(machine.counters().incarnation, 6);
}

#[test]
fn dev_10_descriptors_of_a_former_life_reach_nothing() {
    let net = Net::Tcp;
    let decode = Node::new(&net, "decode", &shape());
    let (first, pages_of_first) = prefill(&net, 1);
    let address = first.listen(&any_port());
    let connection = connect_to(&decode, &address, &first);
    let to_first = connection.0;
    let (old, _) = decode.knows(to_first);
    let mut host = Host {
        net,
        shape: shape(),
        receiver: decode,
        writers: vec![writer(&first, connection)],
    };
    let a = Request::new(3, 300);
    let under_way = host.flight(a);

    // Process 1 ends; whoever waits hears of it, long before any limit.
    host.writers.clear();
    let left = first.agent.shutdown(patience());
    assert_eq!(left.running_threads, 0);
    drop((first, pages_of_first));
    let lease = under_way.lease().unwrap();
    let error = lease.layer(LayerId(0), patience()).unwrap_err();
    let is_lost = matches!(
        error.kind(),
        ErrorKind::Gate {
            error: BarrierError::Failed(_),
            ..
        }
    );
    assert!(is_lost, "{error}");
    drop(lease);
    assert!(
        under_way.close().wait(patience()).is_ok(),
        "an orderly end is a proof"
    );

    // Process 2, at the same address, with other memory.
    let (second, pages_of_second) = prefill(&host.net, 2);
    let address = second.listen(&address);
    let connection = connect_to(&host.receiver, &address, &second);
    host.writers.push(writer(&second, connection));
    assert_ne!(host.receiver.knows(connection.0).0, old);
    second.agent.send(connection.1, "complete").unwrap();
    let told = host.receiver.event(|event| {
        let is_message = matches!(event, AgentEvent::Message { .. });
        is_message.then(|| event.clone())
    });
    let own = Request::new(4, 300);
    let mut into = host.reserve(own).unwrap();
    let schema = host.receiver.pools.schema().clone();
    for layer in schema.layers() {
        rows::write(&schema, &mut into, layer, own, 0..300);
    }
    let fetched = fetch(
        &host.receiver,
        &into,
        connection.0,
        old,
        &pages_of_second,
        &told,
    );
    let foreign = rows::foreign_own(&schema, &mut into, own);
    assert_eq!(foreign, None, "stale descriptors were used on process 2");
    let refusal = fetched.expect_err("another life");
    let is_named = matches!(
        refusal.kind(),
        kvgate_transfer::ErrorKind::IncarnationMismatch { expected, .. } if *expected == old
    );
    assert!(is_named, "{refusal}");

    // The same descriptors for the life that is there, and new requests, go through.
    let (new, _) = host.receiver.knows(connection.0);
    let from = &pages_of_second;
    fetch(&host.receiver, &into, connection.0, new, from, &told).unwrap();
    assert!(rows::foreign_own(&schema, &mut into, own).is_some());
    let b = Request::new(5, 300);
    let flight = host.flight(b);
    late_words(&host, old, b, &flight);
    host.hand_over(b, &flight);
}

/// A card may still write for process 1 when process 2 is there already.
#[test]
fn dev_10_another_life_does_not_answer_for_the_former_one() {
    let mut late_writes = 0;
    for seed in seeds(16) {
        println!("DEV-10: seed {seed}");
        let net = Net::Sim(SimNet::new(seed, SimFaults::none()));
        let mut host = Host::new(net, shape(), 1);
        let a = Request::new(1, 1_024);
        let flight = host.flight(a);
        drop(host.post_all(a, &flight));
        host.net.steps(1 + host.net.sim().random(6));
        let first = host.writers.remove(0);
        host.net.sim().kill(&first.node.agent, Death::Unprovable);
        let second = Writer::new(&host.net, &shape(), &host.receiver, 0, 0..3);
        let mut draining = flight.abort(cancelled());
        let is_heard = draining.writer_answered(second.at_receiver, RANK);
        let is_free = draining.poll();

        let b = Request::new(2, 1_024);
        let schema = host.receiver.pools.schema().clone();
        let mut early = host.reserve(b).ok();
        for lease in early.iter_mut() {
            for layer in schema.layers() {
                rows::write(&schema, lease, layer, b, 0..b.tokens);
            }
        }
        host.net.run();
        late_writes += host.net.sim().counts().late_writes;
        for lease in early.iter_mut() {
            let foreign = rows::foreign_own(&schema, lease, b);
            assert_eq!(foreign, None, "B has the late write of process 1");
        }
        assert!(early.is_none() && !is_free && !is_heard);
        assert!(!draining.poll(), "and nobody will ever prove it");
        // What is left serves requests of process 2.
        host.writers.push(second);
        let c = Request::new(3, 300);
        let flight = host.flight(c);
        host.hand_over(c, &flight);
        drop(first);
    }
    assert!(late_writes > 0, "nothing was late");
}
