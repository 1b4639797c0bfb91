//! Frames that lie about what they carry.

use super::*;

/// Posts, and answers why it was refused; the connection still stands afterwards.
fn refusal(pair: &Pair, op: &PostedOp) -> String {
    let posted = pair.a_link.post(op).unwrap();
    let refused = await_done(&pair.a, posted, op.id.0).unwrap_err();
    let ErrorKind::Refused { reason } = refused else {
        panic!("{refused:?}")
    };
    pair.a_link.send(b"still here").unwrap();
    pair.b
        .await_seen(|seen| matches!(seen, Seen::Message(_)).then_some(()));
    let arrived = |seen: &Seen| matches!(seen, Seen::Arrived(..));
    assert!(!pair.b.seen.lock().iter().any(arrived));
    reason
}

/// Where no session is kept, and nobody writes, a message is let go all the same.
#[test]
fn messages_alone_are_acknowledged_without_a_session() {
    const COUNT: u64 = 1_000;
    for len_bytes in [8, 40_000] {
        let pair = pair(&addresses("alone")[1], Host::new("a"), Host::new("b"));
        for _ in 0..COUNT {
            pair.a_link.send(&vec![7; len_bytes]).unwrap();
        }
        let deadline = soon();
        let acknowledged = || pair.a.acknowledged_count.load(Ordering::Relaxed);
        let mut seen = pair.a.seen.lock();
        while acknowledged() <= COUNT - 64 {
            assert!(!deadline.has_passed(), "{} of {COUNT}", acknowledged());
            pair.a.changed.wait_until(&mut seen, deadline.instant());
        }
    }
}

#[test]
fn a_payload_of_another_length_than_its_slots_is_refused() {
    let pair = pair(&addresses("length")[1], Host::new("a"), Host::new("b"));
    pair.a.fill(0, 7);
    let half = PoolGeometry {
        slot_bytes: SLOT_BYTES / 2,
        ..geometry()
    };
    let span = PoolSpan::new(pair.a.memory.base_ptr(), pair.a.memory.len_bytes(), half);
    let mut short = op(&pair.a, 1, (0, 1), 0);
    let pools = &mut Arc::get_mut(&mut short.runs).unwrap().groups[0].pools;
    pools[0].local = span.unwrap().run(0, 1).unwrap();
    let reason = refusal(&pair, &short);
    assert!(reason.contains("bytes of payload"), "{reason}");
    assert_eq!(pair.b.byte(0), 0);
}

/// The first part names a registration that is over, the last one slots that exist.
#[test]
fn no_part_of_a_refused_operation_is_applied() {
    const RUN_COUNT: u32 = 600;
    let pair = pair(&addresses("parts")[1], Host::new("a"), Host::new("b"));
    pair.a.fill(0, 7);
    let mut long = op(&pair.a, 1, (0, 1), 9);
    let pair_of_runs = long.runs.iter().next().unwrap();
    let mut runs = RunPairs::of(vec![pair_of_runs; RUN_COUNT as usize]);
    runs.groups[0].pools[0].generation += 1;
    long.bytes *= u64::from(RUN_COUNT);
    assert!(long.bytes > 4 << 20, "more than one part");
    long.runs = Arc::new(runs);
    let reason = refusal(&pair, &long);
    assert!(reason.contains("revoked"), "{reason}");
    assert_eq!(pair.b.byte(9), 0);
}

/// The last part names a registration that is over; the others have landed, and the sender knows which.
#[test]
fn what_has_landed_before_a_refusal_is_told() {
    const RUN_COUNT: u32 = 1_200;
    let pair = pair(&addresses("landed")[1], Host::new("a"), Host::new("b"));
    pair.a.fill(0, 7);
    let mut long = op(&pair.a, 1, (0, 1), 9);
    let pair_of_runs = long.runs.iter().next().unwrap();
    let mut runs = RunPairs::of(vec![pair_of_runs; RUN_COUNT as usize]);
    let last = runs.groups.last_mut().unwrap();
    last.pools[0].generation += 1;
    long.runs = Arc::new(runs);
    let reason = refusal(&pair, &long);
    assert!(reason.contains("revoked"), "{reason}");
    assert_eq!(pair.b.byte(9), 7);
    let in_part = (4 << 20) / SLOT_BYTES;
    let told: Vec<Seen> = pair.a.seen.lock()[..3].to_vec();
    let expected = [
        Seen::Landed(OpId(1), in_part),
        Seen::Landed(OpId(1), 2 * in_part),
        Seen::Settled(OpId(1)),
    ];
    assert_eq!(told, expected);
}

#[test]
fn metadata_of_another_version_is_refused_by_both_numbers() {
    let whole = Host::new("a").introduction().metadata.encode();
    assert!(AgentMetadata::decode(whole.clone().into()).is_ok());
    let mut other = whole.to_vec();
    other[0] += 1;
    let refused = AgentMetadata::decode(other.into()).unwrap_err();
    let expected = crate::agent::wire::WireError::Version { ours: 1, theirs: 2 };
    assert_eq!(refused, expected);
}

/// Memory that comes under the id or the generation of another registration.
#[test]
fn memory_of_another_registration_is_refused() {
    struct Liar(Arc<Host>, fn(&mut OwnRegion));
    impl LinkHost for Liar {
        fn introduction(&self) -> Introduction {
            let mut introduction = self.0.introduction();
            (self.1)(&mut introduction.regions[0]);
            introduction
        }
        fn secret(&self) -> Option<Vec<u8>> {
            None
        }
        fn established(&self, _: Established) {}
        fn refused(&self, _: String, _: crate::obs::RefusedField, _: String) {}
    }
    let lies: [fn(&mut OwnRegion); 2] = [
        |shared| shared.id = RegionId(2),
        |shared| shared.generation += 1,
    ];
    for (index, lie) in lies.into_iter().enumerate() {
        let b = Host::new("b");
        let address = &addresses(&format!("other-{index}"))[0];
        let listener = listen(address, b.clone()).unwrap();
        let liar = Liar(Host::new("liar"), lie);
        assert!(connect(listener.address(), soon(), &liar).is_err());
        let reason = b.await_refusal();
        assert!(reason.contains("does not fit the metadata"), "{reason}");
    }
}
