//! Bytes, gates, order and admission.

use std::sync::Mutex;

use kvgate_transfer::{arc_dyn, sync::Arc, *};

use super::*;

pub(crate) fn bytes_are_there_when_the_gate_opens(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    for round in 1..=40u8 {
        let (barrier, flight) = expect(&b, from_a, u64::from(round), 2);
        a.fill(1, round);
        a.fill(2, round ^ 0xff);
        let first = a.send(to_b, 1, 7, arrival(round.into(), 0, 0));
        let second = a.send(to_b, 2, 3, arrival(round.into(), 0, 1));
        backend.run();
        barrier.wait(STAGE, patience()).unwrap();
        // At this instant, whatever the handles say.
        assert!(
            b.holds(7, round) && b.holds(3, round ^ 0xff),
            "round {round}"
        );
        assert!(barrier.all_landed());
        done(&backend, &first);
        done(&backend, &second);
        let proof = flight.close().wait(patience()).unwrap();
        assert_eq!(proof.epoch(), Epoch(round.into()));
    }
    assert!(b.holds(6, 0) && b.holds(8, 0), "neighbours are untouched");
    let counters = a.agent.counters();
    assert_eq!(
        (counters.transfers, counters.bytes_written),
        (80, 80 * SLOT_BYTES)
    );
    assert_eq!(b.agent.counters().landed, 80);
}

pub(crate) fn one_sender_and_three_receivers(backend: impl Backend) {
    let a = Node::new(&backend, "a");
    let receivers: Vec<Node> = (0..3)
        .map(|i| Node::new(&backend, &format!("b{i}")))
        .collect();
    let pairs: Vec<_> = receivers
        .iter()
        .map(|b| backend.connect(&a.agent, &b.agent))
        .collect();
    let mut flights = Vec::new();
    for (index, (b, (to_b, from_a))) in receivers.iter().zip(&pairs).enumerate() {
        a.fill(index as u32, 10 + index as u8);
        // The same epoch at three receivers: epochs belong to the receiver.
        let (barrier, flight) = expect(b, *from_a, 1, 1);
        let handle = a.send(*to_b, index as u32, 0, arrival(1, 0, 0));
        flights.push((barrier, flight, handle));
    }
    backend.run();
    for (index, (barrier, _, handle)) in flights.iter().enumerate() {
        barrier.wait(STAGE, patience()).unwrap();
        assert!(receivers[index].holds(0, 10 + index as u8));
        done(&backend, handle);
    }
}

pub(crate) fn three_senders_and_one_receiver(backend: impl Backend) {
    let b = Node::new(&backend, "b");
    let senders: Vec<Node> = (0..3)
        .map(|i| Node::new(&backend, &format!("a{i}")))
        .collect();
    let pairs: Vec<_> = senders
        .iter()
        .map(|a| backend.connect(&a.agent, &b.agent))
        .collect();
    let barrier = barrier(1, &[0, 1, 2]);
    let writers: Vec<_> = pairs
        .iter()
        .enumerate()
        .map(|(i, (_, from))| (*from, WriterRank(i as u16)))
        .collect();
    let flight = b.agent.expect(&barrier, &writers, None).unwrap();
    barrier.arm().unwrap();
    let mut handles = Vec::new();
    for (index, a) in senders.iter().enumerate() {
        assert_ne!(
            barrier.check(STAGE),
            StageState::Ready,
            "a chunk is missing"
        );
        a.fill(5, 20 + index as u8);
        let chunk = arrival(1, 0, index as u16);
        handles.push(a.send(pairs[index].0, 5, index as u32, chunk));
        backend.run();
    }
    barrier.wait(STAGE, patience()).unwrap();
    for index in 0..3 {
        assert!(b.holds(index, 20 + index as u8));
    }
    handles.iter().for_each(|handle| done(&backend, handle));
    let proof = flight.close().wait(patience()).unwrap();
    assert_eq!(proof.epoch(), Epoch(1));
}

pub(crate) fn sixty_four_flights_at_once(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    let slots: Vec<u32> = (0..SLOT_COUNT).collect();
    slots.iter().for_each(|slot| a.fill(*slot, *slot as u8 + 1));
    let flights: Vec<_> = (1..=64).map(|epoch| expect(&b, from_a, epoch, 2)).collect();
    let mut handles = Vec::new();
    // Chunk 1 of every flight first, in reverse order of the epochs.
    for chunk in [1u16, 0] {
        for epoch in (1..=64u64).rev() {
            let slot = (epoch % u64::from(SLOT_COUNT)) as u32;
            handles.push(a.send(to_b, slot, slot, arrival(epoch, 0, chunk)));
        }
    }
    backend.run();
    for (barrier, _) in &flights {
        barrier.wait_all(patience()).unwrap();
    }
    handles.iter().for_each(|handle| done(&backend, handle));
    for (index, (_, flight)) in flights.into_iter().enumerate() {
        let proof = flight.close().wait(patience()).unwrap();
        assert_eq!(proof.epoch(), Epoch(index as u64 + 1));
    }
    assert!(slots.iter().all(|slot| b.holds(*slot, *slot as u8 + 1)));
}

pub(crate) fn a_prepared_transfer_is_posted_again(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    let slots: Vec<u32> = (4..12).collect();
    let transfer = a.prepare(to_b, &slots, &slots).unwrap();
    assert_eq!((transfer.run_count(), transfer.descriptor_count()), (1, 8));
    for epoch in 1..=3 {
        slots
            .iter()
            .for_each(|slot| a.fill(*slot, epoch as u8 * 16 + *slot as u8));
        let (barrier, _flight) = expect(&b, from_a, epoch, 1);
        let options = PostOptions {
            arrival: Some(arrival(epoch, 0, 0)),
            ..Default::default()
        };
        let handle = a
            .agent
            .post(&transfer, SourceReady::host_written(), options)
            .unwrap();
        backend.run();
        barrier.wait(STAGE, patience()).unwrap();
        assert!(
            slots
                .iter()
                .all(|slot| b.holds(*slot, epoch as u8 * 16 + *slot as u8))
        );
        done(&backend, &handle);
    }
}

#[derive(Default)]
struct Log(Mutex<Vec<String>>);

struct LoggingSink(Arc<Log>);

impl ArrivalSink for LoggingSink {
    fn arrived(&self, _: PeerId, arrival: &Arrival) {
        let note = String::from_utf8(arrival.note.to_vec()).unwrap();
        self.0.0.lock().unwrap().push(note);
    }
}

pub(crate) fn messages_keep_their_place_behind_posts(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    let log = Arc::new(Log::default());
    let barrier = barrier(1, &[0; 20]);
    let sink = arc_dyn!(LoggingSink(log.clone()) => dyn ArrivalSink);
    let _flight = b
        .agent
        .expect(&barrier, &[(from_a, WRITER)], Some(sink))
        .unwrap();
    barrier.arm().unwrap();
    for chunk in 0..20u16 {
        let note = format!("chunk {chunk}").into();
        let arrival = Arrival {
            note,
            ..arrival(1, 0, chunk)
        };
        drop(a.send(to_b, 0, u32::from(chunk) % SLOT_COUNT, arrival));
        a.agent.send(to_b, format!("after {chunk}")).unwrap();
    }
    for chunk in 0..20 {
        let (peer, bytes) = event(&backend, &b.agent, |event| match event {
            AgentEvent::Message { peer, bytes } => Some((peer, bytes)),
            _ => None,
        });
        assert_eq!(peer, from_a);
        assert_eq!(bytes, format!("after {chunk}"));
        // The arrival that was posted before the message has been handled before it.
        assert_eq!(log.0.lock().unwrap()[chunk], format!("chunk {chunk}"));
    }
}

struct PeekingSink {
    barrier: Arc<Barrier>,
    memory: Arc<Memory>,
    seen: Mutex<Vec<(u8, StageState)>>,
}

impl ArrivalSink for PeekingSink {
    fn arrived(&self, _: PeerId, arrival: &Arrival) {
        let slot = usize::from(arrival.tickets[0].1.0);
        // SAFETY: I-16: a byte of a slot; I-2: its bytes are visible, says the call.
        let byte = unsafe { self.memory.base_ptr().add(64 + 128 * slot).read() };
        self.seen
            .lock()
            .unwrap()
            .push((byte, self.barrier.check(STAGE)));
    }
}

pub(crate) fn the_sink_sees_the_bytes_before_the_gate_opens(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    let barrier = barrier(1, &[0]);
    let sink = Arc::new(PeekingSink {
        barrier: barrier.clone(),
        memory: b.memory.clone(),
        seen: Mutex::default(),
    });
    let flight = b
        .agent
        .expect(&barrier, &[(from_a, WRITER)], Some(sink.clone()))
        .unwrap();
    barrier.arm().unwrap();
    a.fill(9, 77);
    let handle = a.send(to_b, 9, 0, arrival(1, 0, 0));
    backend.run();
    barrier.wait(STAGE, patience()).unwrap();
    assert_eq!(
        *sink.seen.lock().unwrap(),
        [(77, StageState::Pending { missing: 1 })]
    );
    done(&backend, &handle);
    drop(flight);
}

pub(crate) fn stale_duplicate_and_unknown_arrivals_are_counted_and_open_nothing(
    backend: impl Backend,
) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let c = Node::new(&backend, "c");
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    let (c_to_b, from_c) = backend.connect(&c.agent, &b.agent);
    let barrier = barrier(7, &[0, 0, 1]);
    let writers = [(from_a, WriterRank(0)), (from_c, WriterRank(1))];
    let _flight = b.agent.expect(&barrier, &writers, None).unwrap();
    barrier.arm().unwrap();
    // Chunk 2 is completed by nothing in this test; `a` is not its writer.
    let handles = [
        a.send(to_b, 0, 0, arrival(7, 0, 0)),
        a.send(to_b, 0, 0, arrival(7, 0, 0)),
        a.send(to_b, 0, 1, arrival(6, 0, 2)),
        a.send(to_b, 0, 1, arrival(7, 0, 3)),
        a.send(to_b, 0, 1, arrival(7, 1, 0)),
        a.send(to_b, 0, 1, arrival(7, 0, 2)),
        a.send(to_b, 0, 2, arrival(7, 0, 1)),
        c.send(c_to_b, 0, 3, arrival(7, 0, 0)),
    ];
    handles.iter().for_each(|handle| done(&backend, handle));
    // A message behind them: when it is here, they have been weighed.
    for (node, peer) in [(&a, to_b), (&c, c_to_b)] {
        fence(&backend, node, peer, &b);
    }
    let counters = b.agent.counters();
    assert_eq!((counters.landed, counters.duplicate), (2, 1));
    assert_eq!((counters.stale, counters.unknown), (1, 4));
    assert_eq!(barrier.check(STAGE), StageState::Pending { missing: 1 });
    assert_eq!(barrier.landed(STAGE), [0b011]);
}

pub(crate) fn a_full_queue_is_back_pressure_and_nothing_fails(backend: impl Backend) {
    let config = TransferConfig {
        queue_capacity: 1,
        // Otherwise the posting thread executes what finds the queue empty.
        inline_bytes: 0,
        ..TransferConfig::default()
    };
    let (a, b) = (Node::with(&backend, "a", config), Node::new(&backend, "b"));
    let (to_b, _) = backend.connect(&a.agent, &b.agent);
    let slots: Vec<u32> = (0..SLOT_COUNT).collect();
    let transfer = a.prepare(to_b, &slots, &slots).unwrap();
    let mut handles = Vec::new();
    let mut refused = None;
    for _ in 0..100_000 {
        match a.agent.post(
            &transfer,
            SourceReady::host_written(),
            PostOptions::default(),
        ) {
            Ok(handle) => handles.push(handle),
            Err(error) => {
                refused = Some(error);
                break;
            }
        }
    }
    let refused = refused.expect("a queue of one is full at some time");
    let full = ErrorKind::QueueFull {
        peer: to_b,
        capacity: 1,
    };
    assert_eq!(*refused.error.kind(), full);
    assert!(refused.error.is_retryable());
    backend.run();
    // The witness and the options came back and are good for another try.
    let PostError {
        source, options, ..
    } = refused;
    handles.push(
        a.agent
            .post_within(&transfer, source, options, patience())
            .unwrap(),
    );
    handles.iter().for_each(|handle| done(&backend, handle));
    let counters = a.agent.counters();
    assert_eq!(counters.failed_transfers, 0);
    assert_eq!(counters.transfers, handles.len() as u64);
    assert!(counters.back_pressure >= 1);
}

pub(crate) fn bad_lists_are_refused_by_name(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    let kind = |from: &[u32], to: &[u32]| a.prepare(to_b, from, to).unwrap_err().kind().clone();
    let pool = b.pool;
    let slot_count = SLOT_COUNT;
    assert_eq!(
        kind(&[0], &[SLOT_COUNT]),
        ErrorKind::SlotOutOfRange {
            pool,
            slot: SLOT_COUNT,
            slot_count
        }
    );
    let local = ErrorKind::SlotOutOfRange {
        pool: a.pool,
        slot: SLOT_COUNT,
        slot_count,
    };
    assert_eq!(kind(&[SLOT_COUNT - 1, SLOT_COUNT], &[0, 1]), local);
    assert_eq!(
        kind(&[0, 1], &[5, 5]),
        ErrorKind::DuplicateDestination { pool, slot: 5 }
    );
    assert_eq!(kind(&[], &[]), ErrorKind::EmptyTransfer);
    let lengths = ErrorKind::LengthMismatch {
        local_count: 2,
        remote_count: 1,
    };
    assert_eq!(kind(&[0, 1], &[5]), lengths);
    let (mut one, mut other) = (DescriptorList::new(), DescriptorList::new());
    one.push(a.pool, &[0]);
    other.push(b.pool, &[0]);
    let error = a.agent.prepare(Op::Write, &one, &other, to_b).unwrap_err();
    assert_eq!(*error.kind(), ErrorKind::IncarnationMissing);
    let barrier = barrier(1, &[0, 1]);
    for (writers, writer, fault) in [
        (
            vec![(from_a, WriterRank(0))],
            WriterRank(1),
            WriterFault::NotListed,
        ),
        (
            vec![
                (from_a, WriterRank(0)),
                (from_a, WriterRank(1)),
                (from_a, WriterRank(2)),
            ],
            WriterRank(2),
            WriterFault::NothingToWrite,
        ),
        (
            vec![(from_a, WriterRank(0)); 2],
            WriterRank(0),
            WriterFault::ListedTwice,
        ),
    ] {
        let error = b.agent.expect(&barrier, &writers, None).unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::WriterMismatch { writer, fault });
    }
}

pub(crate) fn progress_of_a_peer_is_seen(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    let before = b.agent.peer(from_a).unwrap().last_progress;
    a.agent.report_progress();
    a.agent.send(to_b, "behind it").unwrap();
    event(&backend, &b.agent, |event| {
        matches!(event, AgentEvent::Message { .. }).then_some(())
    });
    let info = b.agent.peer(from_a).unwrap();
    assert!(info.last_progress > before);
    assert_eq!((info.name.as_str(), info.state), ("a", PeerState::Up));
    assert_eq!(info.incarnation, a.agent.incarnation());
}
