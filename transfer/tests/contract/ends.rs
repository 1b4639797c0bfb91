//! Cancel, abort, loss, restart, deregistration, shutdown.

use kvgate_transfer::{sync::Arc, *};

use super::*;

pub(crate) fn cancelled_is_untouched_and_done_has_landed(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    let (barrier, flight) = expect(&b, from_a, 1, SLOT_COUNT as usize);
    let ledger = FlightLedger::new(Epoch(1));
    let mut handles = Vec::new();
    for slot in 0..SLOT_COUNT {
        a.fill(slot, 9);
        let transfer = a.prepare(to_b, &[slot], &[slot]).unwrap();
        let options = PostOptions {
            arrival: Some(arrival(1, 0, slot as u16)),
            ledger: Some(ledger.clone()),
            ..PostOptions::default()
        };
        handles.push(
            a.agent
                .post(&transfer, SourceReady::host_written(), options)
                .unwrap(),
        );
    }
    handles.iter().rev().for_each(TransferHandle::cancel);
    ledger.close();
    backend.run();
    let proof =
        FlightLedger::wait(&ledger, patience()).expect("cancelled or done, all are terminal");
    assert!(proof.is_for(&ledger));
    fence(&backend, &a, to_b, &b);
    let landed = barrier.landed(STAGE)[0];
    for (slot, handle) in handles.iter().enumerate() {
        let has_landed = landed >> slot & 1 == 1;
        match handle.wait(patience()) {
            Status::Done(Visibility::RemoteVisible) => {
                assert!(has_landed && b.holds(slot as u32, 9), "slot {slot}");
            }
            Status::Failed(error) => {
                assert_eq!(*error.kind(), ErrorKind::Cancelled);
                assert!(!has_landed && b.holds(slot as u32, 0), "slot {slot}");
            }
            other => panic!("slot {slot}: {other:?}"),
        }
    }
    drop(flight);
}

/// What a handle says of each slot is true of the memory of the receiver.
pub(crate) fn what_has_landed_is_known_slot_by_slot(backend: impl Backend) {
    const EACH: u32 = 4;
    let (mut a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, _) = backend.connect(&a.agent, &b.agent);
    let slots: Vec<u32> = (0..SLOT_COUNT).collect();
    slots.iter().for_each(|slot| a.fill(*slot, 9));
    let post = |a: &Node, slots: &[u32]| {
        let transfer = a.prepare(to_b, slots, slots).unwrap();
        let source = SourceReady::host_written();
        let posted = a.agent.post(&transfer, source, PostOptions::default());
        posted.unwrap()
    };
    let whole = post(&a, &slots);
    done(&backend, &whole);
    assert!(whole.landed().is_complete());
    assert_eq!(whole.landed().slot_count(), u64::from(SLOT_COUNT));

    // Several at once, some of which are taken back; then the receiver ends.
    slots.iter().for_each(|slot| a.fill(*slot, 7));
    let handles: Vec<_> = slots
        .chunks(EACH as usize)
        .map(|slots| post(&a, slots))
        .collect();
    handles.iter().skip(2).for_each(TransferHandle::cancel);
    let _ = b.agent.shutdown(patience());
    backend.run();
    let ends: Vec<_> = handles.iter().map(|h| h.wait(patience())).collect();
    // Nobody writes any more.
    let region = a.region.take().unwrap();
    region.close(patience()).map_err(|(_, e)| e).unwrap();
    let _ = a.agent.shutdown(patience());
    for (index, (handle, end)) in handles.iter().zip(&ends).enumerate() {
        let landed = handle.landed();
        assert_eq!(landed.slot_count(), u64::from(EACH));
        assert_eq!(landed.is_complete(), landed.count(SlotState::Landed) == 4);
        match end {
            Status::Done(_) => assert!(landed.is_complete()),
            Status::Failed(error) if *error.kind() == ErrorKind::Cancelled => {
                assert_eq!(landed.count(SlotState::NotLanded), u64::from(EACH));
            }
            Status::Failed(_) | Status::Unknown(_) => {}
            other => panic!("{other:?}"),
        }
        for slot in 0..EACH {
            let is_there = b.holds(index as u32 * EACH + slot, 7);
            match landed.slot(u64::from(slot)).unwrap() {
                SlotState::Landed => assert!(is_there, "{index} {slot}: {landed:?}"),
                SlotState::NotLanded => assert!(!is_there, "{index} {slot}: {landed:?}"),
                _ => {}
            }
        }
    }
}

pub(crate) fn an_abort_waits_for_the_answer_of_the_writer(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    let (barrier, flight) = expect(&b, from_a, 1, 2);
    done(&backend, &a.send(to_b, 0, 0, arrival(1, 0, 0)));
    fence(&backend, &a, to_b, &b);
    let cause = Cause::Aborted {
        by: Side::Local,
        reason: "test".into(),
    };
    let mut draining = flight.abort(cause.clone());
    assert_eq!(barrier.check(STAGE), StageState::Failed(cause));
    assert!(draining.poll().is_none());
    let draining = draining
        .wait(Deadline::after_ms(5))
        .expect_err("time proves nothing");
    assert_eq!(draining.ledger().unquiet().writers, [WRITER]);
    // The second chunk lands late: counted, nothing opens, and now the writer has written everything.
    done(&backend, &a.send(to_b, 0, 1, arrival(1, 0, 1)));
    let proof = draining
        .wait(patience())
        .expect("all chunks of the writer have landed");
    assert_eq!(proof.epoch(), Epoch(1));
    assert!(matches!(barrier.check(STAGE), StageState::Failed(_)));
    assert_eq!(b.agent.counters().late_after_close, 1);

    // Or the writer answers.
    let (_, flight) = expect(&b, from_a, 2, 1);
    let mut draining = flight.close();
    assert!(draining.poll().is_none());
    assert!(draining.writer_answered(from_a, WRITER));
    assert!(draining.poll().is_some());
    // What comes now is of an epoch that is over.
    done(&backend, &a.send(to_b, 0, 1, arrival(2, 0, 0)));
    fence(&backend, &a, to_b, &b);
    assert_eq!(b.agent.counters().stale, 1);
}

pub(crate) fn a_lost_writer_fails_the_flight_at_once(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    let (barrier, flight) = expect(&b, from_a, 1, 2);
    let (whole, whole_flight) = expect(&b, from_a, 2, 1);
    done(&backend, &a.send(to_b, 0, 0, arrival(1, 0, 0)));
    done(&backend, &a.send(to_b, 0, 1, arrival(2, 0, 0)));
    backend.run();
    whole.wait(STAGE, patience()).unwrap();
    assert!(a.agent.shutdown(patience()).running_threads == 0);
    backend.run();
    // Long before the deadline.
    let lost = barrier.wait(STAGE, patience()).unwrap_err();
    assert!(matches!(lost, BarrierError::Failed(_)), "{lost}");
    let is_proven = event(&backend, &b.agent, |event| match event {
        AgentEvent::PeerDown {
            peer, is_proven, ..
        } if peer == from_a => Some(is_proven),
        _ => None,
    });
    assert!(
        is_proven,
        "an orderly end proves that nothing is written any more"
    );
    assert!(flight.close().wait(patience()).is_ok());
    assert_eq!(
        whole.check(STAGE),
        StageState::Ready,
        "what had landed stays"
    );
    assert!(whole_flight.close().wait(patience()).is_ok());
    let late = b
        .agent
        .expect(&super::barrier(3, &[0]), &[(from_a, WRITER)], None)
        .unwrap_err();
    assert!(matches!(late.kind(), ErrorKind::PeerDown { .. }), "{late}");
}

pub(crate) fn a_lost_receiver_fails_posts(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    let transfer = a.prepare(to_b, &[0], &[0]).unwrap();
    let (barrier, _flight) = expect(&b, from_a, 1, 1);
    let report = b.agent.shutdown(patience());
    assert_eq!(report.unquiet_flights, []);
    assert_eq!(report.open_regions, [b.region.as_ref().unwrap().id()]);
    let failed = Err(BarrierError::Failed(Cause::Shutdown));
    assert_eq!(barrier.wait(STAGE, patience()), failed);
    event(&backend, &a.agent, |event| match event {
        AgentEvent::PeerDown { peer, .. } => (peer == to_b).then_some(()),
        _ => None,
    });
    let refused = a.agent.post(
        &transfer,
        SourceReady::host_written(),
        PostOptions::default(),
    );
    assert!(matches!(
        refused.unwrap_err().error.kind(),
        ErrorKind::PeerDown { .. }
    ));
    assert!(matches!(
        a.agent.peer(to_b).unwrap().state,
        PeerState::Down(_)
    ));
    assert!(a.agent.send(to_b, "anyone?").is_err());
}

pub(crate) fn a_restarted_peer_is_another_one(backend: impl Backend) {
    let a = Node::new(&backend, "a");
    let first = Node::new(&backend, "b");
    let (to_first, _) = backend.connect(&a.agent, &first.agent);
    let transfer = a.prepare(to_first, &[0], &[0]).unwrap();
    let old = first.agent.incarnation();
    drop(first);
    let second = Node::new(&backend, "b");
    let (to_second, from_a) = backend.connect(&a.agent, &second.agent);
    assert_ne!(to_first, to_second);
    backend.run();
    // Same name, same pool numbers: an old list does not reach the new memory.
    let (mut local, mut remote) = (DescriptorList::new(), DescriptorList::remote(old));
    local.push(a.pool, &[0]);
    remote.push(second.pool, &[0]);
    let refused = a
        .agent
        .prepare(Op::Write, &local, &remote, to_second)
        .unwrap_err();
    let found = second.agent.incarnation();
    assert_eq!(
        *refused.kind(),
        ErrorKind::IncarnationMismatch {
            expected: old,
            found
        }
    );
    event(&backend, &a.agent, |event| match event {
        AgentEvent::PeerDown { peer, .. } => (peer == to_first).then_some(()),
        _ => None,
    });
    let refused = a.agent.post(
        &transfer,
        SourceReady::host_written(),
        PostOptions::default(),
    );
    assert!(matches!(
        refused.unwrap_err().error.kind(),
        ErrorKind::PeerDown { .. }
    ));
    let (barrier, _flight) = expect(&second, from_a, 1, 1);
    a.fill(3, 5);
    done(&backend, &a.send(to_second, 3, 2, arrival(1, 0, 0)));
    backend.run();
    barrier.wait(STAGE, patience()).unwrap();
    assert!(second.holds(2, 5));
}

pub(crate) fn a_closed_region_refuses_and_is_quiet(backend: impl Backend) {
    let (mut a, mut b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, _) = backend.connect(&a.agent, &b.agent);
    let slots: Vec<u32> = (0..SLOT_COUNT).collect();
    slots.iter().for_each(|slot| a.fill(*slot, 4));
    let transfer = a.prepare(to_b, &slots, &slots).unwrap();
    let post = || {
        a.agent.post(
            &transfer,
            SourceReady::host_written(),
            PostOptions::default(),
        )
    };
    let handles: Vec<_> = (0..50).map(|_| post().unwrap()).collect();
    // The receiver withdraws its memory while writes are under way.
    let mut region = b.region.take().unwrap();
    loop {
        match region.close(Deadline::after_ms(10)) {
            Ok(()) => break,
            Err((back, error)) => {
                assert!(error.is_retryable(), "{error}");
                region = back;
                backend.run();
            }
        }
    }
    slots.iter().for_each(|slot| b.fill(*slot, 0));
    backend.run();
    for handle in &handles {
        match handle.wait(patience()) {
            Status::Done(_) => {}
            Status::Failed(error) => {
                let refused = matches!(
                    error.kind(),
                    ErrorKind::PoolRevoked { .. } | ErrorKind::Refused { .. }
                );
                assert!(refused, "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
    match post() {
        Err(refused) => assert!(matches!(
            refused.error.kind(),
            ErrorKind::PoolRevoked { .. }
        )),
        Ok(handle) => {
            backend.run();
            let status = handle.wait(patience());
            assert!(matches!(status, Status::Failed(_)), "{status:?}");
        }
    }
    assert!(
        slots.iter().all(|slot| b.holds(*slot, 0)),
        "nothing was written after the end"
    );
    assert_eq!(b.agent.counters().draining_regions, 0);

    // The sender withdraws its own.
    a.region.take().unwrap().close(patience()).unwrap();
    let refused = a.agent.post(
        &transfer,
        SourceReady::host_written(),
        PostOptions::default(),
    );
    assert!(matches!(
        refused.unwrap_err().error.kind(),
        ErrorKind::RegionClosed { .. }
    ));
    assert_eq!(
        Arc::strong_count(&a.memory),
        1,
        "the engine has let go of the memory"
    );
}

pub(crate) fn a_dropped_agent_ends_its_peers(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (_, from_a) = backend.connect(&a.agent, &b.agent);
    let Node {
        agent,
        region,
        memory,
        ..
    } = a;
    drop(agent);
    drop(region);
    event(&backend, &b.agent, |event| match event {
        AgentEvent::PeerDown { peer, .. } => (peer == from_a).then_some(()),
        _ => None,
    });
    assert_eq!(Arc::strong_count(&memory), 1);
}
