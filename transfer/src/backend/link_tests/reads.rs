//! Reads over a link, and peers that answer them wrongly.

use super::*;
use crate::agent::wire;

/// Slots `from` of the peer into local slots.
fn read(host: &Host, id: u64, from: (u32, u32), to: u32) -> PostedOp {
    let PostedOp {
        runs,
        bytes,
        landing,
        ..
    } = op(host, id, (to, from.1), from.0);
    PostedOp {
        id: OpId(id),
        op: Op::Read,
        priority: crate::Priority::Foreground,
        runs,
        bytes,
        arrival: None,
        landing,
    }
}

impl Host {
    /// The next read that the peer has asked for. `requests` has its own lock, so this looks at it under
    /// the one that the condition goes with.
    fn next_request(&self) -> ReadRequest {
        let deadline = soon();
        let mut requests = self.requests.lock();
        while requests.is_empty() {
            assert!(!deadline.has_passed(), "nothing was asked for");
            self.changed.wait_until(&mut requests, deadline.instant());
        }
        requests.remove(0)
    }
}

/// What the worker of `b` does with one request.
fn serve(pair: &Pair) {
    let request = pair.b.next_request();
    let source = pair.b.resolve(PEER, &request.runs);
    pair.b_link.serve(&request, source).unwrap();
}

#[test]
fn bytes_are_there_when_the_read_is_done() {
    each_transport("read", |pair| {
        let is_stream = pair.a_link.kind() == BackendKind::Tcp;
        for round in 1..=50u8 {
            for slot in 0..4 {
                pair.b.fill(slot, round);
            }
            let id = u64::from(round);
            let posted = pair.a_link.post(&read(&pair.a, id, (0, 4), 8)).unwrap();
            if is_stream {
                serve(&pair);
            }
            let level = await_done(&pair.a, posted, id).unwrap();
            assert_eq!(level, Visibility::RemoteVisible);
            assert!((8..12).all(|slot| pair.a.byte(slot) == round));
        }
        assert_eq!(pair.a.byte(12), 0, "nothing beside the run was written");
        let is_told = |seen: &Seen| matches!(seen, Seen::Arrived(..));
        assert!(!pair.b.seen.lock().iter().any(is_told));
    });
}

#[test]
fn a_long_read_is_asked_for_a_window_at_a_time() {
    // Runs of one slot each, over all slots, some twenty parts of 4 MiB.
    const RUN_COUNT: u32 = 10_000;
    let pair = pair(&addresses("window")[1], Host::new("a"), Host::new("b"));
    (0..SLOT_COUNT).for_each(|slot| pair.b.fill(slot, slot as u8 + 1));
    let mut long = read(&pair.a, 1, (0, 1), 0);
    let first = long.runs.iter().next().unwrap().1;
    let runs = (0..RUN_COUNT).map(|index| {
        let slot = index % SLOT_COUNT;
        let local = pair.a.span().run(SLOT_COUNT - 1 - slot, 1).unwrap();
        let remote = RemoteRun { slot, ..first };
        (local, remote)
    });
    long.runs = Arc::new(RunPairs::of(runs));
    let posted = pair.a_link.post(&long).unwrap();
    assert_eq!(posted, Posted::Pending);
    let part_count = (u64::from(RUN_COUNT) * SLOT_BYTES).div_ceil(4 << 20);
    assert!(part_count > 2 * READ_WINDOW as u64);
    // Nothing is answered: so much was asked for, and no more.
    while pair.b.requests.lock().len() < READ_WINDOW {
        pause_ms(1);
    }
    pair.a_link.send(b"behind the requests").unwrap();
    pair.b
        .await_seen(|seen| matches!(seen, Seen::Message(_)).then_some(()));
    assert_eq!(pair.b.requests.lock().len(), READ_WINDOW);
    // The last one is answered first.
    pair.b.requests.lock().reverse();
    let mut served = 0;
    while served < part_count - 1 {
        serve(&pair);
        served += 1;
    }
    pair.b_link.send(b"behind all parts but one").unwrap();
    pair.a
        .await_seen(|seen| matches!(seen, Seen::Message(_)).then_some(()));
    let is_done = |seen: &Seen| matches!(seen, Seen::Completed(..));
    assert!(!pair.a.seen.lock().iter().any(is_done), "a part is missing");
    serve(&pair);
    await_done(&pair.a, posted, 1).unwrap();
    for slot in 0..SLOT_COUNT {
        assert_eq!(pair.a.byte(SLOT_COUNT - 1 - slot), slot as u8 + 1);
    }
}

/// The connection breaks within an answer, while a worker asks for more: no more is asked again than the peer allows.
#[test]
fn a_part_in_hand_has_its_place_in_the_window() {
    use crate::backend::reads::Reads;
    const RUN_COUNT: usize = 10_000;
    let host = Host::new("a");
    let mut long = read(&host, 1, (0, 1), 0);
    let pair_of_runs = long.runs.iter().next().unwrap();
    long.runs = Arc::new(RunPairs::of(vec![pair_of_runs; RUN_COUNT]));
    let reads = Reads::new();
    reads.add(&long);
    let mut words = Vec::new();
    let mut asked_count = 0;
    while reads.ask(1, &mut words) {
        asked_count += 1;
    }
    assert_eq!(asked_count, READ_WINDOW);
    let in_hand = reads.take(0).unwrap();
    assert!(!reads.ask(1, &mut words), "its answer is not over");
    reads.put_back(0, in_hand);
    assert_eq!(reads.ask_again(2, &mut words).len(), READ_WINDOW);
    let in_hand = reads.take(0).unwrap();
    assert!(reads.answered(in_hand.op, Ok(())).is_none());
    assert!(reads.ask(2, &mut words), "now there is room");
    assert!(!reads.ask(2, &mut words), "for one");
}

#[test]
fn a_refused_read_ends_when_every_part_is_answered() {
    const RUN_COUNT: u32 = 1_200;
    let pair = pair(&addresses("parts")[1], Host::new("a"), Host::new("b"));
    pair.b.fill(9, 7);
    let mut long = read(&pair.a, 1, (9, 1), 3);
    let pair_of_runs = long.runs.iter().next().unwrap();
    let mut runs = RunPairs::of(vec![pair_of_runs; RUN_COUNT as usize]);
    runs.groups[0].pools[0].generation += 1;
    long.runs = Arc::new(runs);
    long.landing = Arc::new(Landing::new(u64::from(RUN_COUNT)));
    let posted = pair.a_link.post(&long).unwrap();
    serve(&pair);
    pair.b_link.send(b"refused").unwrap();
    pair.a
        .await_seen(|seen| matches!(seen, Seen::Message(_)).then_some(()));
    let is_ended = |seen: &Seen| matches!(seen, Seen::Completed(..));
    assert!(
        !pair.a.seen.lock().iter().any(is_ended),
        "bytes may still come"
    );
    serve(&pair);
    serve(&pair);
    match await_done(&pair.a, posted, 1).unwrap_err() {
        ErrorKind::Refused { reason } => assert!(reason.contains("revoked"), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(pair.a.byte(3), 7, "the other parts have landed");
    let in_part = (4 << 20) / SLOT_BYTES;
    let expected = [
        (0..in_part, SlotState::Unknown),
        (in_part..u64::from(RUN_COUNT), SlotState::Landed),
    ];
    assert!(long.landing.now().spans().eq(expected));
    let is_settled = |seen: &Seen| matches!(seen, Seen::Settled(op) if *op == OpId(1));
    assert!(pair.a.seen.lock().iter().any(is_settled));
    // The connection stands.
    let posted = pair.a_link.post(&read(&pair.a, 2, (9, 1), 4)).unwrap();
    serve(&pair);
    await_done(&pair.a, posted, 2).unwrap();
}

#[test]
fn slots_that_the_peer_does_not_have_are_refused_by_name() {
    let refused = |id: u64, edit: fn(&mut SlotRun, &mut RemoteRun), text: &str| {
        let pair = pair(
            &addresses(&format!("refused-read-{id}"))[1],
            Host::new("a"),
            Host::new("b"),
        );
        pair.b.fill(0, 7);
        let mut wrong = read(&pair.a, id, (0, 1), 0);
        let (mut local, mut remote) = wrong.runs.iter().next().unwrap();
        edit(&mut local, &mut remote);
        wrong.runs = Arc::new(RunPairs::of([(local, remote)]));
        let posted = pair.a_link.post(&wrong).unwrap();
        serve(&pair);
        match await_done(&pair.a, posted, id).unwrap_err() {
            ErrorKind::Refused { reason } => assert!(reason.contains(text), "{reason}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(pair.a.byte(0), 0);
    };
    refused(1, |_, run| run.pool = PoolId(99), "revoked");
    refused(2, |_, run| run.generation += 1, "revoked");
    refused(3, |_, run| run.slot = SLOT_COUNT, "does not exist");
    refused(4, |run, _| run.slot_bytes /= 2, "bytes of payload");
}

/// How a link ends whose peer answers the read of slot 5 with these words.
fn end_after(name: &str, answer: &[u8]) -> Quiesce {
    use std::io::Write;
    let here = Host::new("here");
    here.fill(5, 9);
    let listener = listen(&addresses(name)[1], here.clone()).unwrap();
    let Address::Tcp(socket) = listener.address() else {
        panic!("not a TCP address")
    };
    let mut stream = std::net::TcpStream::connect(socket).unwrap();
    let mut words = Vec::new();
    wire::append_hello(&mut words, &[1; 32], false);
    let metadata = Host::new("liar").introduction().metadata;
    wire::append_metadata(&mut words, &metadata.encode());
    wire::append_ready(&mut words, None);
    stream.write_all(&words).unwrap();
    let link = here.await_established().link;
    link.start(PEER, here.clone()).unwrap();
    let posted = link.post(&read(&here, 1, (0, 1), 5)).unwrap();
    assert_eq!(posted, Posted::Pending);
    stream.write_all(answer).unwrap();
    let quiesce = here.await_seen(|seen| match seen {
        Seen::Down(quiesce) => Some(quiesce.clone()),
        _ => None,
    });
    let is_ended = |seen: &Seen| matches!(seen, Seen::Completed(..));
    assert!(!here.seen.lock().iter().any(is_ended));
    quiesce
}

#[test]
fn answers_that_nobody_asked_for_end_the_connection() {
    let payload = vec![1; 2 * SLOT_BYTES as usize];
    let data = |request, payload_bytes| {
        let mut words = Vec::new();
        wire::append_data(&mut words, request, payload_bytes);
        words.extend_from_slice(&payload);
        words
    };
    let mut no_data = Vec::new();
    let refusal = wire::Refusal {
        code: 1,
        reason: "no".into(),
    };
    wire::append_no_data(&mut no_data, 7, &refusal);
    for (name, words) in [
        ("unasked", data(1, SLOT_BYTES)),
        ("too-much", data(0, 2 * SLOT_BYTES)),
        ("too-little", data(0, SLOT_BYTES - 1)),
        ("no-data", no_data),
    ] {
        assert_eq!(end_after(name, &words), Quiesce::Proven, "{name}");
    }
}

#[test]
fn closing_beside_an_unanswered_read_proves_that_nothing_comes() {
    let pair = pair(&addresses("unanswered")[1], Host::new("a"), Host::new("b"));
    pair.b.fill(0, 7);
    let posted = pair.a_link.post(&read(&pair.a, 1, (0, 1), 5)).unwrap();
    assert_eq!(posted, Posted::Pending);
    let request = pair.b.next_request();
    pair.a_link.close();
    assert_eq!(pair.a_link.quiesce(), Quiesce::Proven);
    let source = pair.b.resolve(PEER, &request.runs);
    // The socket may take it; nobody is there to put it anywhere.
    let _ = pair.b_link.serve(&request, source);
    assert_eq!(pair.a.byte(5), 0);
    assert!(pair.a.seen.lock().is_empty());
}

#[test]
fn parts_of_the_foreground_are_asked_for_first() {
    use crate::backend::reads::Reads;
    let host = Host::new("reader");
    let reads = Reads::new();
    let mut words = Vec::new();
    for (id, priority) in [
        (1, crate::Priority::Background),
        (2, crate::Priority::Foreground),
    ] {
        reads.add(&PostedOp {
            priority,
            ..read(&host, id, (0, 1), 0)
        });
    }
    let mut asked = Vec::new();
    while reads.ask(1, &mut words) {
        let request = asked.len() as u64;
        asked.push(reads.take(request).unwrap().op);
    }
    assert_eq!(asked, [OpId(2), OpId(1)]);
}
