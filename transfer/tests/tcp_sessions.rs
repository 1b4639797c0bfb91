//! Connections that break between two agents that keep sessions: whatever is cut wherever, every message is
//! delivered once and in order, every write lands once, no page is quiet too early, and an end is an end.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unused_macros)] // Only the nodes are used here.
mod contract;
#[allow(dead_code)]
mod proxy;

mod session_ends;
mod session_pair;

use std::time::{Duration, Instant};

use contract::{Backend, Node, SLOT_COUNT, STAGE, WRITER, arrival, done, expect, patience};
use kvgate_transfer::{sync::Arc, *};
use proxy::{Fault, WAYS, Way};
use session_pair::{
    Proxied, Random, WINDOW_MS, end, message, next, pair, pair_of, resumed, suspended,
};

/// Rounds of writes, reads and messages both ways, with a cut somewhere in each.
#[test]
fn seeded_cuts_lose_nothing_and_repeat_nothing() {
    const SEEDS: u64 = 12;
    const ROUNDS: u64 = 24;
    let mut cut_count = 0;
    for seed in 0..SEEDS {
        let mut random = Random(seed);
        let pair = pair();
        let mut breaks = [0, 0];
        let mut chunk_count = 0;
        for round in 0..ROUNDS {
            let epoch = round + 1;
            let writes = 1 + random.below(u64::from(SLOT_COUNT)) as usize;
            let value = (seed * ROUNDS + round) as u8;
            let (gates, flight) = expect(&pair.b, pair.a_at_b, epoch, writes);
            (0..SLOT_COUNT).for_each(|slot| pair.a.fill(slot, value));
            let way = WAYS[random.below(2) as usize];
            let fault = [Fault::Cut, Fault::Cut, Fault::HalfClose, Fault::Abandon]
                [random.below(4) as usize];
            let budget = match way {
                Way::ToListener => writes as u64 * 230 + 120,
                Way::ToConnector => writes as u64 * 25 + 120,
            };
            pair.proxy.arm(way, random.below(budget) as usize, fault);
            let mut handles = Vec::new();
            for index in 0..writes {
                let slot = index as u32;
                let of_chunk = arrival(epoch, 0, index as u16);
                handles.push(pair.a.send(pair.b_at_a, slot, slot, of_chunk));
                let text = format!("{round}.{index}");
                pair.a.agent.send(pair.b_at_a, &text).unwrap();
                pair.b.agent.send(pair.a_at_b, &text).unwrap();
            }
            for index in 0..writes {
                let text = format!("{round}.{index}").into_bytes();
                for (node, breaks) in [&pair.a, &pair.b].into_iter().zip(&mut breaks) {
                    assert_eq!(message(&node.agent, breaks), text, "seed {seed}");
                }
            }
            handles
                .iter()
                .for_each(|handle| done(&Proxied::new(), handle));
            gates.wait(STAGE, patience()).unwrap();
            assert!(
                (0..writes as u32).all(|slot| pair.b.holds(slot, value)),
                "seed {seed}"
            );
            let proof = flight.close().wait(patience());
            assert_eq!(proof.expect("all has landed").epoch(), Epoch(epoch));
            chunk_count += writes as u64;
        }
        let (at_a, at_b) = (pair.a.agent.counters(), pair.b.agent.counters());
        assert_eq!(at_b.landed, chunk_count, "seed {seed}");
        assert_eq!(
            (at_b.duplicate, at_b.stale, at_b.unknown),
            (0, 0, 0),
            "seed {seed}"
        );
        assert_eq!(
            (at_a.transfers, at_a.failed_transfers),
            (chunk_count, 0),
            "seed {seed}"
        );
        assert_eq!((at_a.messages, at_b.messages), (chunk_count, chunk_count));
        assert_eq!(at_a.notes_sent, 2 * chunk_count);
        assert_eq!(at_b.notes_sent, chunk_count);
        assert!(at_a.reconnects >= breaks[0] && at_b.reconnects >= breaks[1]);
        cut_count += pair.proxy.connection_count() - 1;
        end(pair);
    }
    println!("{cut_count} connections were broken");
    assert!(cut_count > SEEDS * ROUNDS / 2, "{cut_count} breaks");
}

/// A write of many parts is cut in the middle; what has landed stays known, and the rest comes again.
#[test]
fn a_long_write_and_a_long_read_go_on_over_another_connection() {
    const MIB: u64 = 1 << 20;
    const COUNT: u32 = 24;
    for op in [Op::Write, Op::Read] {
        let backend = Proxied::new();
        let node = |name, value: u8| {
            let agent = backend.agent(name, TransferConfig::default());
            let geometry = PoolGeometry {
                offset_bytes: 0,
                stride_bytes: MIB,
                slot_bytes: MIB,
                slot_count: COUNT,
            };
            let mut memory = backend.memory(MIB * u64::from(COUNT));
            for slot in 0..u64::from(COUNT) {
                let page = vec![value.wrapping_add(slot as u8); MIB as usize];
                memory.write_at(slot * MIB, &page).unwrap();
            }
            let memory = Arc::new(memory);
            let region = agent.register(memory.clone(), &[geometry]).unwrap();
            (agent, memory, region)
        };
        let (here, there) = (node("a", 1), node("b", 100));
        let (to_there, from_here) = backend.connect(&here.0, &there.0);
        let proxy = backend.proxy.take().unwrap();
        let slots: Vec<u32> = (0..COUNT).collect();
        let mut remote = DescriptorList::remote(there.0.incarnation());
        let mut local = DescriptorList::new();
        local.push(here.2.pools()[0], &slots);
        remote.push(there.2.pools()[0], &slots);
        let transfer = here.0.prepare(op, &local, &remote, to_there).unwrap();
        let (way, source) = match op {
            Op::Write => (Way::ToListener, SourceReady::host_written()),
            _ => {
                there.0.send(from_here, "complete").unwrap();
                let told = next(&here.0);
                (Way::ToConnector, SourceReady::announced(&told).unwrap())
            }
        };
        proxy.arm(way, 9 << 20, Fault::Cut);
        let handle = here.0.post(&transfer, source, PostOptions::default());
        let handle = handle.unwrap();
        proxy.await_fault(way);
        proxy.arm(way, 9 << 20, Fault::Cut);
        proxy.await_fault(way);
        let status = handle.wait(patience());
        assert!(
            matches!(status, Status::Done(Visibility::RemoteVisible)),
            "{op} {status:?}"
        );
        let (from, to) = match op {
            Op::Write => (1, &there),
            _ => (100, &here),
        };
        let mut page = vec![0; MIB as usize];
        for slot in 0..COUNT {
            let at = to.1.base_ptr().wrapping_add(slot as usize * MIB as usize);
            // SAFETY: I-16: the slot lies in the memory, and its only operation is over.
            unsafe { at.copy_to(page.as_mut_ptr(), MIB as usize) };
            assert!(
                page.iter().all(|byte| *byte == from + slot as u8),
                "{op} {slot}"
            );
        }
        let counters = here.0.counters();
        assert!(
            counters.retries >= 2 && counters.reconnects == 2,
            "{counters:?}"
        );
        drop((here.2, there.2));
    }
}

/// The listener still takes the old connection for alive when the next one comes.
#[test]
fn the_newer_connection_wins_over_one_that_is_half_open() {
    let pair = pair();
    let (gates, flight) = expect(&pair.b, pair.a_at_b, 1, 1);
    pair.a.fill(0, 7);
    // The connector loses its end in the middle of a frame; the listener hears nothing of it.
    pair.proxy.arm(Way::ToListener, 30, Fault::Abandon);
    let handle = pair.a.send(pair.b_at_a, 0, 3, arrival(1, 0, 0));
    pair.proxy.await_fault(Way::ToListener);
    done(&Proxied::new(), &handle);
    gates.wait(STAGE, patience()).unwrap();
    assert!(pair.b.holds(3, 7));
    for node in [&pair.a, &pair.b] {
        suspended(&node.agent);
        resumed(&node.agent);
    }
    assert!(flight.close().wait(patience()).is_ok());
    #[cfg(feature = "metrics")]
    for line in [
        "kvgate_reconnects_total{backend=\"tcp\"} 1",
        "kvgate_retries_total 1",
        "kvgate_notifications_total{outcome=\"sent\"} 1",
        "kvgate_notifications_total{outcome=\"replayed\"} 1",
        "kvgate_notifications_total{outcome=\"duplicate\"} 0",
    ] {
        let text = pair.a.agent.metrics_text();
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
    end(pair);
}

/// Bytes that nobody sent, between two frames of either way.
#[test]
fn garbage_ends_a_connection_and_not_the_session() {
    for way in WAYS {
        for garbage in [&b"\0"[..], b"KVGX", b"KVGL\x01\x00\xff\xff\x00\x00\x00\x00"] {
            let pair = pair();
            pair.proxy.inject(way, garbage);
            let hit = match way {
                Way::ToListener => &pair.b,
                Way::ToConnector => &pair.a,
            };
            pair.a.agent.send(pair.b_at_a, "one").unwrap();
            pair.b.agent.send(pair.a_at_b, "two").unwrap();
            let mut breaks = [0, 0];
            assert_eq!(message(&pair.b.agent, &mut breaks[1]), b"one");
            assert_eq!(message(&pair.a.agent, &mut breaks[0]), b"two");
            // A message may have come before the garbage: then the break comes after it.
            if breaks[usize::from(way == Way::ToListener)] == 0 {
                suspended(&hit.agent);
            }
            let counters = hit.agent.counters();
            assert_eq!(counters.messages, 1, "{counters:?}");
            end(pair);
        }
    }
}

/// Old frames that come once more over the same connection.
#[test]
fn what_comes_twice_is_dropped_and_counted() {
    // Numbered message 1: a control frame of the application.
    let old = include_bytes!("golden/link_message_1.bin");
    let pair = pair();
    pair.a.agent.send(pair.b_at_a, "once").unwrap();
    let mut breaks = 0;
    assert_eq!(message(&pair.b.agent, &mut breaks), b"once");
    pair.proxy.inject(Way::ToListener, old);
    pair.proxy.inject(Way::ToListener, old);
    pair.a.agent.send(pair.b_at_a, "more").unwrap();
    assert_eq!(message(&pair.b.agent, &mut breaks), b"more");
    let counters = pair.b.agent.counters();
    assert_eq!(
        (counters.notes_duplicate, counters.messages, breaks),
        (2, 2, 0)
    );
    end(pair);
}

/// While the writer is away its pages are held; they are quiet once it is back and has answered.
#[test]
fn pages_of_a_writer_that_is_away_are_held_until_it_answers() {
    let pair = pair();
    // The second chunk never comes.
    let (_, flight) = expect(&pair.b, pair.a_at_b, 1, 2);
    pair.a.fill(0, 7);
    pair.proxy.turn_away(6);
    pair.proxy.cut();
    for node in [&pair.a, &pair.b] {
        suspended(&node.agent);
    }
    let info = pair.b.agent.peer(pair.a_at_b).unwrap();
    assert!(matches!(info.state, PeerState::Suspended(_)), "{info:?}");
    let status = pair.b.agent.status();
    assert!(status.peers[0].suspended.is_some() && status.to_string().contains("suspended"));
    let handle = pair.a.send(pair.b_at_a, 0, 3, arrival(1, 0, 0));
    let mut draining = flight.abort(Cause::Aborted {
        by: Side::Local,
        reason: "not wanted any more".into(),
    });
    assert!(draining.poll().is_none(), "the writer may still write");
    // The writer is back, what it had posted lands in pages that are still held, and only then it answers.
    done(&Proxied::new(), &handle);
    assert!(pair.b.holds(3, 7));
    assert!(
        draining.poll().is_none(),
        "landing behind an abort is no answer"
    );
    pair.a
        .agent
        .send(pair.b_at_a, "nothing more of epoch 1")
        .unwrap();
    for node in [&pair.a, &pair.b] {
        resumed(&node.agent);
    }
    assert_eq!(message(&pair.b.agent, &mut 0), b"nothing more of epoch 1");
    assert!(draining.writer_answered(pair.a_at_b, WRITER));
    assert!(draining.poll().is_some());
    end(pair);
}

/// A write that had landed and whose answer was lost is not written again: its page has another owner.
#[test]
fn a_write_whose_answer_was_lost_is_not_written_again() {
    for after_bytes in [0, 1, 20, 24] {
        let pair = pair();
        let (gates, flight) = expect(&pair.b, pair.a_at_b, 1, 1);
        pair.a.fill(0, 7);
        pair.proxy.arm(Way::ToConnector, after_bytes, Fault::Stop);
        let handle = pair.a.send(pair.b_at_a, 0, 3, arrival(1, 0, 0));
        gates.wait(STAGE, patience()).unwrap();
        pair.proxy.await_fault(Way::ToConnector);
        assert!(flight.close().wait(patience()).is_ok(), "all has landed");
        pair.b.fill(3, 0xee); // the next owner
        assert!(matches!(handle.status(), Status::InFlight));
        pair.proxy.cut();
        done(&Proxied::new(), &handle);
        assert!(pair.b.holds(3, 0xee), "cut after {after_bytes} bytes");
        let (at_a, at_b) = (pair.a.agent.counters(), pair.b.agent.counters());
        assert_eq!((at_a.retries, at_b.notes_duplicate, at_b.landed), (0, 0, 1));
        end(pair);
    }
}

/// A refusal is not forgotten over a break, and what was sent behind it is as it was.
#[test]
fn a_refusal_that_was_lost_is_told_again() {
    let pair = pair();
    let transfer = pair.a.prepare(pair.b_at_a, &[0], &[3]).unwrap();
    pair.a.fill(0, 7);
    pair.b.fill(3, 0xee);
    let mut pair = pair;
    let region = pair.b.region.take().unwrap();
    region
        .close(patience())
        .map_err(|(_, error)| error)
        .unwrap();
    pair.proxy.arm(Way::ToConnector, 0, Fault::Stop);
    let post = || {
        let posted = pair.a.agent.post(
            &transfer,
            SourceReady::host_written(),
            PostOptions::default(),
        );
        posted.unwrap()
    };
    let handles = [post(), post(), post()];
    pair.a.agent.send(pair.b_at_a, "behind").unwrap();
    assert_eq!(message(&pair.b.agent, &mut 0), b"behind");
    pair.proxy.await_fault(Way::ToConnector);
    pair.proxy.cut();
    for handle in &handles {
        match handle.wait(patience()) {
            Status::Failed(error) => {
                assert!(matches!(error.kind(), ErrorKind::Refused { .. }), "{error}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(handle.landed().count(SlotState::NotLanded), 1);
    }
    assert!(pair.b.holds(3, 0xee));
    assert_eq!(pair.b.agent.counters().messages, 1);
}

/// A write of parts into two registrations, of which the second one is over when its turn comes; the connection
/// breaks behind the refusal, or in the middle of the first attempt. What has landed is never said not to have.
#[test]
fn a_refusal_over_a_break_denies_nothing_that_has_landed() {
    const MIB: u64 = 1 << 20;
    const HALF: u32 = 12;
    for is_cut_within in [false, true] {
        let backend = Proxied::new();
        let geometry = PoolGeometry {
            offset_bytes: 0,
            stride_bytes: MIB,
            slot_bytes: MIB,
            slot_count: HALF,
        };
        let agents = ["a", "b"].map(|name| backend.agent(name, TransferConfig::default()));
        let [here, there] = &agents;
        let register = |agent: &Agent| {
            let memory = Arc::new(backend.memory(MIB * u64::from(HALF)));
            let region = agent.register(memory.clone(), &[geometry]);
            (region.unwrap(), memory)
        };
        let [source, kept, over] = [here, there, there].map(register);
        let (to_there, _) = backend.connect(here, there);
        let proxy = backend.proxy.take().unwrap();
        let slots: Vec<u32> = (0..HALF).collect();
        let mut remote = DescriptorList::remote(there.incarnation());
        let mut local = DescriptorList::new();
        for target in [&kept, &over] {
            local.push(source.0.pools()[0], &slots);
            remote.push(target.0.pools()[0], &slots);
        }
        let transfer = here.prepare(Op::Write, &local, &remote, to_there).unwrap();
        let close = |region: MemoryRegion| {
            let closed = region.close(patience()).map_err(|(_, error)| error);
            closed.unwrap();
        };
        proxy.arm(Way::ToConnector, 0, Fault::Stop);
        let post = || {
            let ready = SourceReady::host_written();
            here.post(&transfer, ready, PostOptions::default()).unwrap()
        };
        let handle = if is_cut_within {
            proxy.arm(Way::ToListener, 10 << 20, Fault::Stop);
            let handle = post();
            proxy.await_fault(Way::ToListener);
            proxy.turn_away(u64::MAX);
            proxy.cut();
            suspended(there);
            close(kept.0);
            close(over.0);
            proxy.turn_away(0);
            handle
        } else {
            close(over.0);
            let handle = post();
            proxy.await_fault(Way::ToConnector);
            here.send(to_there, "behind").unwrap();
            assert_eq!(message(there, &mut 0), b"behind");
            proxy.cut();
            drop(kept.0);
            handle
        };
        let status = handle.wait(patience());
        assert!(matches!(status, Status::Failed(_)), "{status:?}");
        let landed = handle.landed();
        let count = |state| landed.count(state);
        match is_cut_within {
            // Nobody has told of the parts of the first attempt.
            true => assert!(landed.slot(0) == Some(SlotState::Unknown), "{landed:?}"),
            false => assert!(count(SlotState::Landed) >= 8, "{landed:?}"),
        }
        drop(source.0);
    }
}

/// While there is no connection messages wait up to their bound; then there is back-pressure and no loss.
#[test]
fn messages_wait_within_their_bounds_and_come_in_order() {
    let by_count = TransferConfig {
        message_capacity: 8,
        ..TransferConfig::default()
    };
    let by_bytes = TransferConfig {
        message_bytes: 64,
        ..TransferConfig::default()
    };
    for config in [by_count, by_bytes] {
        let pair = pair_of(Proxied::new(), config);
        pair.proxy.turn_away(5);
        pair.proxy.cut();
        suspended(&pair.a.agent);
        let mut sent = Vec::new();
        let full = loop {
            let text = format!("message {:03}", sent.len());
            match pair.a.agent.send(pair.b_at_a, &text) {
                Ok(()) => sent.push(text),
                Err(error) => break error,
            }
            assert!(sent.len() <= 8, "no bound");
        };
        assert!(matches!(full.kind(), ErrorKind::QueueFull { .. }) && full.is_retryable());
        for text in &sent {
            assert_eq!(message(&pair.b.agent, &mut 0), text.as_bytes());
        }
        // The peer has acknowledged them in time for more than the bound, without a word of its own.
        for number in 0..100 {
            let text = format!("more {number}");
            let began = Instant::now();
            while let Err(error) = pair.a.agent.send(pair.b_at_a, &text) {
                assert!(error.is_retryable(), "{error}");
                assert!(began.elapsed() < Duration::from_secs(20), "{error}");
                std::thread::yield_now();
            }
            assert_eq!(message(&pair.b.agent, &mut 0), text.as_bytes());
        }
        end(pair);
    }
}

/// When the window is over the session is, on both sides: nothing is replayed to anybody.
#[test]
fn a_session_whose_window_is_over_is_over_for_good() {
    let pair = pair_of(Proxied::within(100), TransferConfig::default());
    let (gates, flight) = expect(&pair.b, pair.a_at_b, 1, 1);
    pair.proxy.turn_away(u64::MAX);
    pair.proxy.cut();
    suspended(&pair.a.agent);
    let handle = pair.a.send(pair.b_at_a, 0, 3, arrival(1, 0, 0));
    pair.a.agent.send(pair.b_at_a, "lost").unwrap();
    suspended(&pair.b.agent);
    for (node, peer) in [(&pair.a, pair.b_at_a), (&pair.b, pair.a_at_b)] {
        match next(&node.agent) {
            AgentEvent::PeerDown {
                peer: down,
                cause,
                is_proven,
            } => {
                assert!(down == peer && is_proven);
                assert!(cause.to_string().contains("within 100 ms"), "{cause}");
            }
            other => panic!("{other:?}"),
        }
    }
    match handle.wait(patience()) {
        Status::Failed(error) => assert!(matches!(error.kind(), ErrorKind::PeerDown { .. })),
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        gates.wait(STAGE, patience()),
        Err(BarrierError::Failed(_))
    ));
    assert!(flight.close().wait(patience()).is_ok(), "proven");
    pair.proxy.turn_away(0);
    let address = Address::Tcp(pair.proxy.address);
    let again = pair.a.agent.connect(&address, patience()).unwrap();
    assert_ne!(again, pair.b_at_a, "another peer");
    pair.a.agent.send(again, "new").unwrap();
    let up = next(&pair.b.agent);
    assert!(matches!(up, AgentEvent::PeerUp { .. }), "{up:?}");
    assert_eq!(message(&pair.b.agent, &mut 0), b"new");
    end(pair);
}

/// A listener that is gone is noticed by the host that refuses, not by the window.
#[test]
fn nobody_waits_for_an_agent_that_is_gone() {
    let backend = Proxied::new();
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (b_at_a, _) = backend.connect(&a.agent, &b.agent);
    // Whoever listened is gone; the connection breaks afterwards.
    let proxy = backend.proxy.take().unwrap();
    let began = Instant::now();
    drop(proxy);
    suspended(&a.agent);
    match next(&a.agent) {
        AgentEvent::PeerDown { peer, cause, .. } => {
            assert_eq!(peer, b_at_a);
            assert!(cause.to_string().contains("nobody listens"), "{cause}");
        }
        other => panic!("{other:?}"),
    }
    assert!(
        began.elapsed() < Duration::from_secs(10),
        "the window is a minute"
    );
}

/// Closing from this side ends a session that waits for its next connection, and its thread.
#[test]
fn a_shutdown_does_not_wait_for_the_window() {
    let pair = pair();
    pair.proxy.turn_away(u64::MAX);
    pair.proxy.cut();
    for node in [&pair.a, &pair.b] {
        suspended(&node.agent);
    }
    let began = Instant::now();
    for node in [&pair.a, &pair.b] {
        let _ = node.agent.shutdown(Deadline::after_ms(2_000));
    }
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );
    drop(pair);
}

/// A side that wants no sessions has none, whatever the other one wants.
#[test]
fn without_a_window_a_break_is_the_end() {
    for (at_a, at_b) in [(0, WINDOW_MS), (WINDOW_MS, 0)] {
        let (with_a, with_b) = (Proxied::within(at_a), Proxied::within(at_b));
        let a = Node::new(&with_a, "a");
        let b = Node::new(&with_b, "b");
        with_a.connect(&a.agent, &b.agent);
        with_a.proxy.borrow().as_ref().unwrap().cut();
        for node in [&a, &b] {
            let down = next(&node.agent);
            assert!(matches!(down, AgentEvent::PeerDown { .. }), "{down:?}");
        }
    }
}
