//! Reads: the reader's gate, its witness, its destination, and a source that goes away.

use kvgate_transfer::{sync::Arc, *};

use super::*;

/// What `from` tells `to`: its slots are complete.
pub(crate) fn announce(
    backend: &impl Backend,
    from: &Node,
    from_at: PeerId,
    to: &Node,
) -> AgentEvent {
    from.agent.send(from_at, "complete").unwrap();
    event(backend, &to.agent, |event| {
        matches!(event, AgentEvent::Message { .. }).then_some(event)
    })
}

impl Node {
    /// A transfer of `from[i]` of the peer into `to[i]` of this node.
    pub(crate) fn prepare_read(
        &self,
        peer: PeerId,
        from: &[u32],
        to: &[u32],
    ) -> Result<PreparedTransfer, Error> {
        let info = self.agent.peer(peer).unwrap();
        let (mut local, mut remote) = (
            DescriptorList::new(),
            DescriptorList::remote(info.incarnation),
        );
        local.push(self.pool, to);
        remote.push(info.pools[0].pool, from);
        self.agent.prepare(Op::Read, &local, &remote, peer)
    }

    fn post_read(
        &self,
        transfer: &PreparedTransfer,
        announced: &AgentEvent,
        options: PostOptions,
    ) -> Result<TransferHandle, PostError> {
        let source = SourceReady::announced(announced).unwrap();
        self.agent.post(transfer, source, options)
    }

    fn read_slot(
        &self,
        peer: PeerId,
        (from, to): (u32, u32),
        announced: &AgentEvent,
        options: PostOptions,
    ) -> TransferHandle {
        let transfer = self.prepare_read(peer, &[from], &[to]).unwrap();
        self.post_read(&transfer, announced, options).unwrap()
    }
}

fn with_arrival(arrival: Arrival) -> PostOptions {
    PostOptions {
        arrival: Some(arrival),
        ..PostOptions::default()
    }
}

pub(crate) fn what_was_read_is_there_when_the_gate_opens(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    for round in 1..=40u8 {
        b.fill(1, round);
        b.fill(2, round ^ 0xff);
        let announced = announce(&backend, &b, from_a, &a);
        // The reader's own flight: the peer counts as the writer of what is read from it.
        let (barrier, flight) = expect(&a, to_b, round.into(), 2);
        let counted = |chunk| PostOptions {
            ledger: Some(flight.ledger().clone()),
            ..with_arrival(arrival(round.into(), 0, chunk))
        };
        let first = a.read_slot(to_b, (1, 7), &announced, counted(0));
        let second = a.read_slot(to_b, (2, 3), &announced, counted(1));
        backend.run();
        barrier.wait(STAGE, patience()).unwrap();
        // At this instant, whatever the handles say.
        assert!(
            a.holds(7, round) && a.holds(3, round ^ 0xff),
            "round {round}"
        );
        done(&backend, &first);
        done(&backend, &second);
        let proof = flight.close().wait(patience()).unwrap();
        assert_eq!(proof.epoch(), Epoch(round.into()));
    }
    assert!(a.holds(6, 0) && a.holds(8, 0), "neighbours are untouched");
    let (counters, theirs) = (a.agent.counters(), b.agent.counters());
    let read = (counters.transfers, counters.bytes_read, counters.landed);
    assert_eq!(read, (80, 80 * SLOT_BYTES, 80));
    assert_eq!((counters.descriptors_read, counters.bytes_written), (80, 0));
    assert_eq!(
        (theirs.landed, theirs.stale, theirs.unknown),
        (0, 0, 0),
        "the source is told nothing"
    );
}

pub(crate) fn slots_are_read_in_the_order_of_the_lists(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    let slots: Vec<u32> = (0..SLOT_COUNT).collect();
    slots.iter().for_each(|slot| b.fill(*slot, *slot as u8 + 1));
    let announced = announce(&backend, &b, from_a, &a);
    // Runs on one side, single slots on the other; the source may repeat, the destination may not.
    let from: Vec<u32> = slots.iter().map(|slot| slot * 5 % 12).collect();
    for (from, to) in [
        (slots.clone(), slots.clone()),
        (slots.clone(), slots.iter().rev().copied().collect()),
        (from, slots.clone()),
    ] {
        let transfer = a.prepare_read(to_b, &from, &to).unwrap();
        assert_eq!(transfer.op(), Op::Read);
        let handle = a
            .post_read(&transfer, &announced, PostOptions::default())
            .unwrap();
        done(&backend, &handle);
        for (from, to) in from.iter().zip(&to) {
            assert!(a.holds(*to, *from as u8 + 1), "{from} into {to}");
        }
    }
    let twice = a.prepare_read(to_b, &[0, 1], &[5, 5]).unwrap_err();
    let expected = ErrorKind::DuplicateDestination {
        pool: a.pool,
        slot: 5,
    };
    assert_eq!(*twice.kind(), expected);
    let outside = a.prepare_read(to_b, &[SLOT_COUNT], &[0]).unwrap_err();
    let expected = ErrorKind::SlotOutOfRange {
        pool: b.pool,
        slot: SLOT_COUNT,
        slot_count: SLOT_COUNT,
    };
    assert_eq!(*outside.kind(), expected);
}

pub(crate) fn a_read_needs_the_word_of_its_own_peer(backend: impl Backend) {
    let (a, b, c) = (
        Node::new(&backend, "a"),
        Node::new(&backend, "b"),
        Node::new(&backend, "c"),
    );
    let (to_b, a_at_b) = backend.connect(&a.agent, &b.agent);
    let (to_c, a_at_c) = backend.connect(&a.agent, &c.agent);
    b.fill(0, 9);
    let by_c = announce(&backend, &c, a_at_c, &a);
    let by_b = announce(&backend, &b, a_at_b, &a);
    let read = a.prepare_read(to_b, &[0], &[0]).unwrap();
    let write = a.prepare(to_b, &[0], &[1]).unwrap();
    let refused = |transfer: &PreparedTransfer, source: SourceReady| {
        let refused = a.agent.post(transfer, source, PostOptions::default());
        refused.unwrap_err().error.kind().clone()
    };
    let mismatch = |op, announced_by| ErrorKind::SourceMismatch {
        op,
        peer: to_b,
        announced_by,
    };
    let announced = |by: &AgentEvent| SourceReady::announced(by).unwrap();
    assert_eq!(
        refused(&read, SourceReady::host_written()),
        mismatch(Op::Read, None)
    );
    assert_eq!(
        refused(&read, announced(&by_c)),
        mismatch(Op::Read, Some(to_c))
    );
    assert_eq!(
        refused(&write, announced(&by_b)),
        mismatch(Op::Write, Some(to_b))
    );
    assert!(SourceReady::announced(&AgentEvent::PeerUp { peer: to_b }).is_none());
    backend.run();
    assert!(a.holds(0, 0), "nothing was read");
    let handle = a
        .agent
        .post(&read, announced(&by_b), PostOptions::default())
        .unwrap();
    done(&backend, &handle);
    assert!(a.holds(0, 9));
}

pub(crate) fn reads_and_writes_cross(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, to_a) = backend.connect(&a.agent, &b.agent);
    // Slots 0 and 1 are written by the other side, 2 and 3 read from it, 8 and up are sources.
    for slot in 8..SLOT_COUNT {
        a.fill(slot, 100 + slot as u8);
        b.fill(slot, 200 + slot as u8);
    }
    let at_a = announce(&backend, &b, to_a, &a);
    let at_b = announce(&backend, &a, to_b, &b);
    let sides = [(&a, to_b, &at_a), (&b, to_a, &at_b)];
    let mut handles = Vec::new();
    for _ in 0..50 {
        for (node, peer, announced) in &sides {
            let write = node.prepare(*peer, &[8, 9], &[0, 1]).unwrap();
            let options = PostOptions::default();
            let posted = node
                .agent
                .post(&write, SourceReady::host_written(), options);
            handles.push(posted.unwrap());
            let read = node.prepare_read(*peer, &[15, 12], &[2, 3]).unwrap();
            let posted = node.post_read(&read, announced, PostOptions::default());
            handles.push(posted.unwrap());
        }
    }
    handles.iter().for_each(|handle| done(&backend, handle));
    assert!(a.holds(0, 208) && a.holds(1, 209) && a.holds(2, 215) && a.holds(3, 212));
    assert!(b.holds(0, 108) && b.holds(1, 109) && b.holds(2, 115) && b.holds(3, 112));
}

pub(crate) fn a_cancelled_read_is_untouched_and_a_done_one_has_landed(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    (0..SLOT_COUNT).for_each(|slot| b.fill(slot, 9));
    let announced = announce(&backend, &b, from_a, &a);
    let (barrier, flight) = expect(&a, to_b, 1, SLOT_COUNT as usize);
    let mut handles = Vec::new();
    for slot in 0..SLOT_COUNT {
        let options = PostOptions {
            ledger: Some(flight.ledger().clone()),
            ..with_arrival(arrival(1, 0, slot as u16))
        };
        handles.push(a.read_slot(to_b, (slot, slot), &announced, options));
    }
    handles.iter().rev().for_each(TransferHandle::cancel);
    let draining = flight.close();
    // Every read is counted in the ledger, so there is nothing else of this writer to wait for.
    assert!(draining.writer_answered(to_b, WRITER));
    backend.run();
    let proof = draining
        .wait(patience())
        .expect("cancelled or done, all are terminal");
    assert_eq!(proof.epoch(), Epoch(1));
    let landed = barrier.landed(STAGE)[0];
    for (slot, handle) in handles.iter().enumerate() {
        let has_landed = landed >> slot & 1 == 1;
        match handle.wait(patience()) {
            Status::Done(Visibility::RemoteVisible) => {
                assert!(has_landed && a.holds(slot as u32, 9), "slot {slot}");
            }
            Status::Failed(error) => {
                assert_eq!(*error.kind(), ErrorKind::Cancelled);
                assert!(!has_landed && a.holds(slot as u32, 0), "slot {slot}");
            }
            other => panic!("slot {slot}: {other:?}"),
        }
    }
}

/// Neither side's memory goes away under reads, and what was withdrawn is refused by name.
pub(crate) fn regions_are_closed_beside_reads(backend: impl Backend) {
    let (mut a, mut b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    let (region_of_a, region_of_b) = (a.region.take().unwrap(), b.region.take().unwrap());
    let slots: Vec<u32> = (0..SLOT_COUNT).collect();
    slots.iter().for_each(|slot| b.fill(*slot, 4));
    let announced = announce(&backend, &b, from_a, &a);
    let transfer = a.prepare_read(to_b, &slots, &slots).unwrap();
    let read = || a.post_read(&transfer, &announced, PostOptions::default());
    let handles: Vec<_> = (0..50).map(|_| read().unwrap()).collect();
    closed(&backend, region_of_b);
    // Nothing reads it any more: what is put there now is seen by nobody.
    slots.iter().for_each(|slot| b.fill(*slot, 66));
    backend.run();
    for handle in &handles {
        match handle.wait(patience()) {
            Status::Done(_) => {}
            Status::Failed(error) => assert!(is_refusal(&error), "{error}"),
            other => panic!("{other:?}"),
        }
    }
    let late = match read() {
        Err(refused) => refused.error,
        Ok(handle) => {
            backend.run();
            match handle.wait(patience()) {
                Status::Failed(error) => error,
                other => panic!("{other:?}"),
            }
        }
    };
    assert!(is_refusal(&late), "{late}");
    assert!(
        slots.iter().all(|slot| !a.holds(*slot, 66)),
        "something was read after the end"
    );
    assert_eq!(Arc::strong_count(&b.memory), 1);
    drop(handles);

    // The reader withdraws its own while reads of another source run into it.
    let c = Node::new(&backend, "c");
    let (to_c, a_at_c) = backend.connect(&a.agent, &c.agent);
    slots.iter().for_each(|slot| c.fill(*slot, 5));
    let announced = announce(&backend, &c, a_at_c, &a);
    let transfer = a.prepare_read(to_c, &slots, &slots).unwrap();
    let read = || a.post_read(&transfer, &announced, PostOptions::default());
    let handles: Vec<_> = (0..50).map(|_| read().unwrap()).collect();
    closed(&backend, region_of_a);
    slots.iter().for_each(|slot| a.fill(*slot, 0));
    for handle in &handles {
        assert!(!matches!(handle.wait(patience()), Status::InFlight));
    }
    fence(&backend, &c, a_at_c, &a);
    assert!(slots.iter().all(|slot| a.holds(*slot, 0)));
    let refused = read().unwrap_err().error;
    assert!(
        matches!(refused.kind(), ErrorKind::RegionClosed { .. }),
        "{refused}"
    );
}

fn closed(backend: &impl Backend, mut region: MemoryRegion) {
    loop {
        match region.close(Deadline::after_ms(10)) {
            Ok(()) => return,
            Err((back, error)) => {
                assert!(error.is_retryable(), "{error}");
                region = back;
                backend.run();
            }
        }
    }
}

fn is_refusal(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::PoolRevoked { .. } | ErrorKind::Refused { .. }
    )
}

pub(crate) fn a_lost_source_fails_reads_and_flights(backend: impl Backend) {
    let (a, b) = (Node::new(&backend, "a"), Node::new(&backend, "b"));
    let (to_b, from_a) = backend.connect(&a.agent, &b.agent);
    b.fill(0, 3);
    let announced = announce(&backend, &b, from_a, &a);
    let (barrier, flight) = expect(&a, to_b, 1, 2);
    let counted = PostOptions {
        ledger: Some(flight.ledger().clone()),
        ..with_arrival(arrival(1, 0, 0))
    };
    done(&backend, &a.read_slot(to_b, (0, 0), &announced, counted));
    let transfer = a.prepare_read(to_b, &[0], &[1]).unwrap();
    assert!(b.agent.shutdown(patience()).running_threads == 0);
    backend.run();
    let lost = barrier.wait(STAGE, patience()).unwrap_err();
    assert!(matches!(lost, BarrierError::Failed(_)), "{lost}");
    event(&backend, &a.agent, |event| match event {
        AgentEvent::PeerDown {
            peer, is_proven, ..
        } if peer == to_b => {
            assert!(is_proven, "an orderly end");
            Some(())
        }
        _ => None,
    });
    assert!(flight.close().wait(patience()).is_ok());
    assert!(a.holds(0, 3), "what had landed stays");
    let refused = a
        .post_read(&transfer, &announced, PostOptions::default())
        .unwrap_err();
    assert!(matches!(refused.error.kind(), ErrorKind::PeerDown { .. }));
}
