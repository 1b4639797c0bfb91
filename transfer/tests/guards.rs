//! Guards of an agent that the other suites would not miss: each test fails when its guard is taken away.

#![allow(clippy::unwrap_used)]

use kvgate_transfer::{sync::Arc, *};

const SLOT_BYTES: u64 = 64 << 20;

fn patience() -> Deadline {
    Deadline::after_ms(20_000)
}

fn memory(len_bytes: u64) -> Arc<Memory> {
    Arc::new(Memory::host(len_bytes).unwrap())
}

fn pool(slot_bytes: u64) -> PoolGeometry {
    PoolGeometry {
        offset_bytes: 0,
        stride_bytes: slot_bytes,
        slot_bytes,
        slot_count: 1,
    }
}

fn barrier(epoch: u64) -> Arc<Barrier> {
    let chunk = ChunkSpec {
        stage: StageId(0),
        chunk: ChunkId(0),
        writer: WriterRank(0),
        descriptor_count: 1,
    };
    Barrier::new(BarrierPlan::from_chunks(vec![chunk]).unwrap(), Epoch(epoch))
}

/// A sender with one slot, a receiver with another, and a transfer between them.
struct Pair {
    sender: Agent,
    receiver: Agent,
    from_sender: PeerId,
    target: Arc<Memory>,
    transfer: PreparedTransfer,
    regions: [MemoryRegion; 2],
}

fn pair(slot_bytes: u64) -> Pair {
    let (sender, receiver) = (
        Agent::builder("sender").build().unwrap(),
        Agent::builder("receiver").build().unwrap(),
    );
    let mut source = Memory::host(slot_bytes).unwrap();
    source.write_at(0, &vec![7; slot_bytes as usize]).unwrap();
    let target = memory(slot_bytes);
    let ours = sender
        .register(Arc::new(source), &[pool(slot_bytes)])
        .unwrap();
    let theirs = receiver
        .register(target.clone(), &[pool(slot_bytes)])
        .unwrap();
    let (to_receiver, from_sender) = Agent::connect_local(&sender, &receiver).unwrap();
    let info = sender.peer(to_receiver).unwrap();
    let mut local = DescriptorList::new();
    let mut remote = DescriptorList::remote(info.incarnation);
    local.push(ours.pools()[0], &[0]);
    remote.push(theirs.pools()[0], &[0]);
    let transfer = sender
        .prepare(Op::Write, &local, &remote, to_receiver)
        .unwrap();
    Pair {
        sender,
        receiver,
        from_sender,
        target,
        transfer,
        regions: [ours, theirs],
    }
}

/// Pools of two agents have equal numbers; what one has told is no way to the other.
#[test]
fn what_another_agent_has_told_is_refused() {
    let pair = pair(4096);
    let other = Agent::builder("receiver").build().unwrap();
    let region = other.register(memory(4096), &[pool(4096)]).unwrap();
    let (to_other, _) = Agent::connect_local(&pair.sender, &other).unwrap();
    let told = pair.sender.peer(to_other).unwrap();
    assert_ne!(region.pools(), pair.regions[1].pools());
    let to_receiver = pair.transfer.peer();
    let (mut local, mut remote) = (
        DescriptorList::new(),
        DescriptorList::remote(told.incarnation),
    );
    local.push(pair.regions[0].pools()[0], &[0]);
    remote.push(told.pools[0].pool, &[0]);
    let refused = pair.sender.prepare(Op::Write, &local, &remote, to_receiver);
    let mismatch = ErrorKind::IncarnationMismatch {
        expected: other.incarnation(),
        found: pair.receiver.incarnation(),
    };
    assert_eq!(*refused.unwrap_err().kind(), mismatch);
    assert!(
        pair.sender
            .prepare(Op::Write, &local, &remote, to_other)
            .is_ok()
    );
}

/// Two flights with one number could not be told apart by an arrival.
#[test]
fn an_epoch_is_one_flight_at_a_time() {
    let pair = pair(64);
    let writers = [(pair.from_sender, WriterRank(0))];
    let first = pair.receiver.expect(&barrier(5), &writers, None).unwrap();
    let error = pair
        .receiver
        .expect(&barrier(5), &writers, None)
        .unwrap_err();
    assert_eq!(*error.kind(), ErrorKind::EpochInUse { epoch: Epoch(5) });
    let draining = first.close();
    let still = pair.receiver.expect(&barrier(5), &writers, None);
    assert!(still.is_err(), "its memory is not quiet yet");
    assert!(draining.writer_answered(pair.from_sender, WriterRank(0)));
    assert!(draining.wait(patience()).is_ok());
    assert!(pair.receiver.expect(&barrier(5), &writers, None).is_ok());
}

#[test]
fn an_agent_that_was_shut_down_says_so() {
    let pair = pair(64);
    assert!(pair.sender.shutdown(patience()).unquiet_flights.is_empty());
    let ready = SourceReady::host_written();
    let refused = pair
        .sender
        .post(&pair.transfer, ready, PostOptions::default());
    assert_eq!(*refused.unwrap_err().error.kind(), ErrorKind::Closed);
    let writers = [(PeerId(0), WriterRank(0))];
    let refused = pair.sender.expect(&barrier(1), &writers, None);
    assert_eq!(*refused.unwrap_err().kind(), ErrorKind::Closed);
    let refused = pair.sender.register(memory(64), &[pool(64)]);
    assert_eq!(*refused.unwrap_err().kind(), ErrorKind::Closed);
}

/// The receiver ends the connection in the middle of a copy. Whatever has been copied by then has been
/// copied when the end is told: nothing is stored afterwards.
#[test]
fn an_end_by_the_receiver_waits_for_the_copy() {
    let pair = pair(SLOT_BYTES);
    let byte = |offset: u64| {
        let at = pair.target.base_ptr().wrapping_add(offset as usize);
        // SAFETY: I-16: inside the memory, which `pair` keeps; a byte is read whole.
        unsafe { at.read_volatile() }
    };
    let ready = SourceReady::host_written();
    let handle = pair
        .sender
        .post(&pair.transfer, ready, PostOptions::default())
        .unwrap();
    while byte(0) == 0 {
        std::thread::yield_now();
    }
    let _left = pair.receiver.shutdown(patience());
    let last = byte(SLOT_BYTES - 1);
    let _end = handle.wait(patience());
    assert_eq!(byte(SLOT_BYTES - 1), last, "stored behind the end");
}

/// Numbers of one agent are nothing to another agent of the process, so nothing of it can be moved by mistake.
#[test]
fn what_was_made_with_one_agent_means_nothing_to_another() {
    let (one, two) = (pair(4096), pair(4096));
    let source = SourceReady::host_written();
    let options = PostOptions::default();
    let refused = two.sender.post(&one.transfer, source, options).unwrap_err();
    let peer = one.transfer.peer();
    assert_eq!(*refused.error.kind(), ErrorKind::UnknownPeer { peer });

    let told = two.sender.peer(two.transfer.peer()).unwrap();
    let foreign = one.regions[0].pools()[0];
    let (mut local, mut remote) = (
        DescriptorList::new(),
        DescriptorList::remote(told.incarnation),
    );
    local.push(foreign, &[0]);
    remote.push(told.pools[0].pool, &[0]);
    let refused = two
        .sender
        .prepare(Op::Write, &local, &remote, two.transfer.peer());
    let unknown = ErrorKind::UnknownPool { pool: foreign };
    assert_eq!(*refused.unwrap_err().kind(), unknown);

    let (mut local, mut remote) = (
        DescriptorList::new(),
        DescriptorList::remote(told.incarnation),
    );
    let elsewhere = one.regions[1].pools()[0];
    local.push(two.regions[0].pools()[0], &[0]);
    remote.push(elsewhere, &[0]);
    let refused = two
        .sender
        .prepare(Op::Write, &local, &remote, two.transfer.peer());
    let unknown = ErrorKind::UnknownPool { pool: elsewhere };
    assert_eq!(*refused.unwrap_err().kind(), unknown);

    let writers = [(one.from_sender, WriterRank(0))];
    assert!(two.receiver.expect(&barrier(1), &writers, None).is_err());
}
