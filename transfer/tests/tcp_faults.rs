//! Connections that go wrong between two agents: cut, half closed, stopped, with foreign bytes, or a byte at
//! a time. Whatever happens, an operation ends with a reason or does not end, no wait outlasts its deadline,
//! nothing is written behind the proof, and the memory comes back.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unused_macros)] // Only the nodes are used here.
mod contract;
#[allow(dead_code)] // One connection is enough here.
mod proxy;

use std::{
    cell::RefCell,
    net::{Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use contract::{Backend, Node, SLOT_COUNT, STAGE, WRITER, arrival, done, event, expect, patience};
use kvgate_transfer::{sync::Arc, *};
use proxy::{Fault, Proxy, WAYS, Way};

/// Payload of a transfer of all slots.
const PAYLOAD_BYTES: usize = 96 * SLOT_COUNT as usize;
/// What is in the slots of the source, and what a new owner puts into those of the destination.
const SOURCE: u8 = 9;
const NEXT_OWNER: u8 = 0xee;

/// Sockets with a proxy between them.
struct Proxied(RefCell<Option<Proxy>>);

impl Backend for Proxied {
    fn new() -> Self {
        Self(RefCell::default())
    }

    /// A connection that breaks is the end here; `tcp_sessions.rs` has those that are made again.
    fn agent(&self, name: &str, config: TransferConfig) -> Agent {
        let config = TransferConfig {
            reconnect_ms: 0,
            ..config
        };
        Agent::builder(name).config(config).build().unwrap()
    }

    fn memory(&self, len_bytes: u64) -> Memory {
        Memory::host(len_bytes).unwrap()
    }

    fn connect(&self, a: &Agent, b: &Agent) -> (PeerId, PeerId) {
        let any_port = Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let Address::Tcp(bound) = b.listen(&any_port).unwrap() else {
            panic!("another transport")
        };
        let proxy = Proxy::new(bound);
        let address = Address::Tcp(proxy.address);
        self.0.replace(Some(proxy));
        let b_at_a = a.connect(&address, patience()).unwrap();
        let a_at_b = event(self, b, |event| match event {
            AgentEvent::PeerUp { peer } => Some(peer),
            _ => None,
        });
        (b_at_a, a_at_b)
    }
}

/// A writer and a receiver with an armed flight of one chunk, and the proxy between them.
struct Pair {
    writer: Node,
    receiver: Node,
    to_receiver: PeerId,
    barrier: Arc<Barrier>,
    flight: Expectation,
    from_writer: PeerId,
    proxy: Proxy,
}

fn pair() -> Pair {
    let backend = Proxied::new();
    let (writer, receiver) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_receiver, from_writer) = backend.connect(&writer.agent, &receiver.agent);
    let (barrier, flight) = expect(&receiver, from_writer, 1, 1);
    (0..SLOT_COUNT).for_each(|slot| writer.fill(slot, SOURCE));
    Pair {
        writer,
        receiver,
        to_receiver,
        barrier,
        flight,
        from_writer,
        proxy: backend.0.take().unwrap(),
    }
}

impl Pair {
    /// Posts all slots as the one chunk of the flight.
    fn post(&self) -> TransferHandle {
        let slots: Vec<u32> = (0..SLOT_COUNT).collect();
        let transfer = self.writer.prepare(self.to_receiver, &slots, &slots);
        let options = PostOptions {
            arrival: Some(arrival(1, 0, 0)),
            ..PostOptions::default()
        };
        let source = SourceReady::host_written();
        let posted = self.writer.agent.post(&transfer.unwrap(), source, options);
        posted.unwrap()
    }

    /// Both sides notice the end of the connection, and the receiver has the proof.
    fn await_end(&self) {
        for (node, lost) in [
            (&self.writer, self.to_receiver),
            (&self.receiver, self.from_writer),
        ] {
            let is_proven = event(&Proxied::new(), &node.agent, |event| match event {
                AgentEvent::PeerDown {
                    peer, is_proven, ..
                } if peer == lost => Some(is_proven),
                _ => None,
            });
            assert!(is_proven, "{}", node.agent.name());
        }
    }

    /// Takes the memory back, gives it a new owner, ends everything, and looks whether somebody wrote.
    fn nothing_lands_behind_the_proof(self) {
        let proof = self.flight.close().wait(patience());
        assert_eq!(proof.expect("the receiver knows").epoch(), Epoch(1));
        (0..SLOT_COUNT).for_each(|slot| self.receiver.fill(slot, NEXT_OWNER));
        // What the proxy holds back goes nowhere any more.
        WAYS.into_iter().for_each(|way| self.proxy.release(way));
        drop(self.proxy);
        for node in [self.writer, self.receiver] {
            let owner = if node.agent.name() == "a" {
                SOURCE
            } else {
                NEXT_OWNER
            };
            conserved(node, owner);
        }
    }
}

/// All memory of a node comes back, and holds what its owner has put there.
fn conserved(mut node: Node, owner: u8) {
    let region = node.region.take().unwrap();
    region
        .close(patience())
        .map_err(|(_, error)| error)
        .unwrap();
    let report = node.agent.shutdown(patience());
    assert!(report.is_clean(), "{report:?}");
    // No thread of the engine is left that could write.
    assert!(
        (0..SLOT_COUNT).all(|slot| node.holds(slot, owner)),
        "{}",
        node.agent.name()
    );
    assert_eq!(Arc::strong_count(&node.memory), 1, "{}", node.agent.name());
}

/// Runs a wait with a deadline that passes; it may not take much longer.
fn in_time<R>(wait: impl FnOnce(Deadline) -> R) -> R {
    let started = Instant::now();
    let answer = wait(Deadline::after_ms(40));
    let elapsed = started.elapsed();
    assert!(
        elapsed < Duration::from_secs(5),
        "{elapsed:?} instead of 40 ms"
    );
    answer
}

/// The end of an operation whose connection was lost: failed with a reason, and never done.
fn lost(handle: &TransferHandle) {
    match handle.wait(patience()) {
        Status::Failed(error) => {
            let is_lost = matches!(
                error.kind(),
                ErrorKind::PeerDown { .. } | ErrorKind::PeerLost { .. }
            );
            assert!(is_lost && !error.to_string().is_empty(), "{error:?}");
        }
        other => panic!("{other:?}"),
    }
}

fn gate_has_failed(barrier: &Barrier) {
    match barrier.wait(STAGE, patience()) {
        Err(BarrierError::Failed(cause)) => {
            assert!(
                matches!(cause, Cause::PeerLost { .. } | Cause::Refused { .. }),
                "{cause}"
            );
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_connection_that_is_cut_or_half_closed_under_a_write_fails_both_sides() {
    for fault in [Fault::Cut, Fault::HalfClose] {
        // Inside the frame in front of the payload, and inside the payload.
        for after_bytes in [0, 1, 11, 12, 40, 150, 700, PAYLOAD_BYTES] {
            let pair = pair();
            pair.proxy.arm(Way::ToListener, after_bytes, fault);
            let handle = pair.post();
            pair.proxy.await_fault(Way::ToListener);
            assert_eq!(pair.proxy.passed_bytes(Way::ToListener), after_bytes as u64);
            gate_has_failed(&pair.barrier);
            lost(&handle);
            pair.await_end();
            pair.nothing_lands_behind_the_proof();
        }
    }
}

#[test]
fn a_lost_acknowledgement_is_not_a_success() {
    for fault in [Fault::Cut, Fault::HalfClose] {
        for after_bytes in [0, 1, 12] {
            let pair = pair();
            pair.proxy.arm(Way::ToConnector, after_bytes, fault);
            let handle = pair.post();
            // The receiver has everything; the writer is not told, so it must not say so.
            pair.barrier.wait(STAGE, patience()).unwrap();
            assert!((0..SLOT_COUNT).all(|slot| pair.receiver.holds(slot, SOURCE)));
            pair.proxy.await_fault(Way::ToConnector);
            lost(&handle);
            pair.await_end();
            assert_eq!(
                pair.barrier.check(STAGE),
                StageState::Ready,
                "what had landed stays"
            );
            pair.nothing_lands_behind_the_proof();
        }
    }
}

/// A long write, stopped in its third part and then cut: two parts are known to have landed, what was on its
/// way is unknown, and what was not is known not to have.
#[test]
fn what_was_acknowledged_before_a_cut_is_known() {
    const MIB: u64 = 1 << 20;
    const COUNT: u32 = 128;
    let backend = Proxied::new();
    let node = |name| {
        let agent = backend.agent(name, TransferConfig::default());
        let geometry = PoolGeometry {
            offset_bytes: 0,
            stride_bytes: MIB,
            slot_bytes: MIB,
            slot_count: COUNT,
        };
        let memory = backend.memory(MIB * u64::from(COUNT));
        let region = agent.register(Arc::new(memory), &[geometry]).unwrap();
        (agent, region)
    };
    let ((writer, source), (receiver, target)) = (node("a"), node("b"));
    let (to_receiver, _) = backend.connect(&writer, &receiver);
    let proxy = backend.0.take().unwrap();
    let slots: Vec<u32> = (0..COUNT).collect();
    let mut remote = DescriptorList::remote(receiver.incarnation());
    let mut local = DescriptorList::new();
    local.push(source.pools()[0], &slots);
    remote.push(target.pools()[0], &slots);
    let transfer = writer.prepare(Op::Write, &local, &remote, to_receiver);
    proxy.arm(Way::ToListener, 9 << 20, Fault::Stop);
    let witness = SourceReady::host_written();
    let posted = writer.post(&transfer.unwrap(), witness, PostOptions::default());
    let handle = posted.unwrap();
    proxy.await_fault(Way::ToListener);
    let began = Instant::now();
    while handle.landed().count(SlotState::Landed) < 8 {
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "{:?}",
            handle.landed()
        );
        std::thread::yield_now();
    }
    assert!(matches!(handle.status(), Status::InFlight));
    proxy.cut();
    lost(&handle);
    let spans: Vec<_> = handle.landed().spans().collect();
    let begun = match spans.as_slice() {
        [
            (landed, SlotState::Landed),
            (unknown, SlotState::Unknown),
            (rest, SlotState::NotLanded),
        ] => {
            assert_eq!(
                (landed.start, landed.end, rest.end),
                (0, 8, u64::from(COUNT))
            );
            unknown.end
        }
        other => panic!("{other:?}"),
    };
    assert!(begun >= 12, "the third part was under way: {spans:?}");
}

#[test]
fn foreign_bytes_end_the_connection_and_land_nowhere() {
    let version = b"KVGL\x63\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00".as_slice();
    let kind = b"KVGL\x01\x00\xff\xff\x00\x00\x00\x00\x00\x00\x00\x00".as_slice();
    let check_sum = b"KVGL\x01\x00\x16\x00\x00\x00\x00\x00\x00\x00\x00\x00".as_slice();
    for garbage in [[0xff; 64].as_slice(), &[0; 64], version, kind, check_sum] {
        for way in WAYS {
            let pair = pair();
            pair.proxy.inject(way, garbage);
            pair.await_end();
            gate_has_failed(&pair.barrier);
            assert_eq!(pair.receiver.agent.counters().landed, 0);
            assert!((0..SLOT_COUNT).all(|slot| pair.receiver.holds(slot, 0)));
            pair.nothing_lands_behind_the_proof();
        }
    }
}

#[test]
fn a_stopped_connection_ends_nothing_and_goes_on_where_it_was() {
    for after_bytes in [0, 1, 12, 40, 150, 700, PAYLOAD_BYTES] {
        let Pair {
            writer,
            receiver,
            barrier,
            ..
        } = stopped_and_released(after_bytes);
        assert_eq!(barrier.check(STAGE), StageState::Ready);
        assert!((0..SLOT_COUNT).all(|slot| receiver.holds(slot, SOURCE)));
        conserved_beside(writer, receiver);
    }
}

/// A write that is held back after some bytes, waits that all run out, and the rest of the write.
fn stopped_and_released(after_bytes: usize) -> Pair {
    let pair = pair();
    pair.proxy.arm(Way::ToListener, after_bytes, Fault::Stop);
    let handle = pair.post();
    pair.proxy.await_fault(Way::ToListener);
    let status = in_time(|deadline| handle.wait(deadline));
    assert!(matches!(status, Status::InFlight), "{status:?}");
    let gate = in_time(|deadline| pair.barrier.wait(STAGE, deadline));
    assert!(
        matches!(gate, Err(BarrierError::TimedOut { .. })),
        "{gate:?}"
    );
    handle.cancel();
    assert!(matches!(handle.status(), Status::InFlight), "it has begun");
    for node in [&pair.writer, &pair.receiver] {
        let event = in_time(|deadline| node.agent.next_event(deadline));
        assert!(
            !matches!(event, Some(AgentEvent::PeerDown { .. })),
            "{event:?}"
        );
    }
    pair.proxy.release(Way::ToListener);
    done(&Proxied::new(), &handle);
    pair.barrier.wait(STAGE, patience()).unwrap();
    pair
}

fn conserved_beside(writer: Node, receiver: Node) {
    for node in [writer, receiver] {
        conserved(node, SOURCE);
    }
}

#[test]
fn memory_behind_a_stopped_connection_is_kept_until_it_ends() {
    for after_bytes in [0, 40, 700] {
        let Pair {
            writer,
            mut receiver,
            flight,
            from_writer,
            proxy,
            to_receiver,
            barrier,
        } = {
            let pair = pair();
            pair.proxy.arm(Way::ToListener, after_bytes, Fault::Stop);
            drop(pair.post());
            pair.proxy.await_fault(Way::ToListener);
            pair
        };
        let cause = Cause::Aborted {
            by: Side::Local,
            reason: "the user left".into(),
        };
        let draining = in_time(|deadline| flight.abort(cause).wait(deadline));
        let draining = draining.expect_err("time proves nothing");
        assert_eq!(draining.ledger().unquiet().writers, [WRITER]);
        assert!(matches!(barrier.check(STAGE), StageState::Failed(_)));
        // Inside the payload the thread that receives it holds the memory.
        if after_bytes == 700 {
            let region = receiver.region.take().unwrap();
            let busy = in_time(|deadline| region.close(deadline)).unwrap_err();
            assert!(
                matches!(busy.1.kind(), ErrorKind::RegionBusy { .. }),
                "{}",
                busy.1
            );
            receiver.region = Some(busy.0);
        }
        proxy.cut();
        let proof = draining.wait(patience());
        assert_eq!(proof.expect("the connection has ended").epoch(), Epoch(1));
        (0..SLOT_COUNT).for_each(|slot| receiver.fill(slot, NEXT_OWNER));
        drop(proxy);
        assert_eq!(receiver.agent.counters().landed, 0);
        assert!(receiver.agent.send(from_writer, "late").is_err());
        event(&Proxied::new(), &writer.agent, |event| match event {
            AgentEvent::PeerDown { peer, .. } => (peer == to_receiver).then_some(()),
            _ => None,
        });
        conserved(writer, SOURCE);
        conserved(receiver, NEXT_OWNER);
    }
}

#[test]
fn a_byte_at_a_time_changes_nothing() {
    let pair = pair();
    pair.proxy.bytewise();
    let handle = pair.post();
    done(&Proxied::new(), &handle);
    pair.barrier.wait(STAGE, patience()).unwrap();
    assert!((0..SLOT_COUNT).all(|slot| pair.receiver.holds(slot, SOURCE)));
    pair.writer.agent.send(pair.to_receiver, [7; 300]).unwrap();
    let message = event(&Proxied::new(), &pair.receiver.agent, |event| match event {
        AgentEvent::Message { bytes, .. } => Some(bytes),
        _ => None,
    });
    assert_eq!(message, [7; 300].as_slice());
    pair.nothing_lands_behind_the_proof();
}

/// Posting is bounded by what the caller has to do, whatever the connection does.
#[test]
fn posts_return_while_nothing_can_be_sent() {
    let pair = pair();
    pair.proxy.arm(Way::ToListener, 0, Fault::Stop);
    let slots: Vec<u32> = (0..SLOT_COUNT).collect();
    let transfer = pair.writer.prepare(pair.to_receiver, &slots, &slots);
    let transfer = transfer.unwrap();
    let post = || {
        let source = SourceReady::host_written();
        let posted = pair
            .writer
            .agent
            .post(&transfer, source, PostOptions::default());
        posted.unwrap()
    };
    let handles: Vec<_> = (0..500).map(|_| post()).collect();
    pair.proxy.await_fault(Way::ToListener);
    assert_eq!(pair.proxy.passed_bytes(Way::ToListener), 0);
    for handle in &handles {
        assert!(matches!(handle.status(), Status::InFlight));
    }
    pair.proxy.release(Way::ToListener);
    handles
        .iter()
        .for_each(|handle| done(&Proxied::new(), handle));
    pair.proxy.cut();
    pair.await_end();
    pair.nothing_lands_behind_the_proof();
}
