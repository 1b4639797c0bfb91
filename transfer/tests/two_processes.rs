//! What only two processes can show: a peer that is killed is proven dead, a peer that is stopped is not
//! dead and nothing changes until it goes on. On every transport that is there.
//!
//! The second process is this executable again, asked for the one test `child`, with its role in the
//! environment.

#![allow(clippy::unwrap_used)]

use std::{
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use kvgate_transfer::{
    Address, Agent, AgentEvent, Arrival, Barrier, BarrierPlan, ChunkId, ChunkSpec, Deadline,
    DescriptorList, Draining, Epoch, ErrorKind, Memory, MemoryRegion, Op, PeerId, PoolGeometry,
    PostOptions, PreparedTransfer, SourceReady, StageId, Status, TransferHandle, WriterRank,
    sync::Arc,
};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

const SLOT_BYTES: u64 = 64 * 1024;
const SLOT_COUNT: u32 = 128;
const ROLE: &str = "KVGATE_TEST_ROLE";
const ADDRESS: &str = "KVGATE_TEST_ADDRESS";
const EPOCH: Epoch = Epoch(7);
/// What the slots of a source hold.
const SOURCE: u8 = 0x5a;

/// Limit of everything that must happen.
fn soon() -> Deadline {
    Deadline::after_ms(10_000)
}

/// Long enough to see that something does not happen.
fn a_while() -> Deadline {
    Deadline::after_ms(600)
}

struct Side {
    agent: Agent,
    region: MemoryRegion,
    memory: Arc<Memory>,
}

fn side(name: &str, address: &Address) -> Side {
    let agent = Agent::builder(name).build().unwrap();
    let bytes = SLOT_BYTES * u64::from(SLOT_COUNT);
    let memory = match address {
        Address::Shm(_) => Memory::shared(name, bytes),
        _ => Memory::host(bytes),
    };
    let memory = Arc::new(memory.unwrap());
    let pool = PoolGeometry {
        offset_bytes: 0,
        stride_bytes: SLOT_BYTES,
        slot_bytes: SLOT_BYTES,
        slot_count: SLOT_COUNT,
    };
    let region = agent.register(memory.clone(), &[pool]).unwrap();
    Side {
        agent,
        region,
        memory,
    }
}

impl Side {
    /// All slots, each to the slot with its own number.
    fn everything(&self, peer: PeerId) -> PreparedTransfer {
        self.all_slots(Op::Write, peer)
    }

    fn all_slots(&self, op: Op, peer: PeerId) -> PreparedTransfer {
        let info = self.agent.peer(peer).unwrap();
        let slots: Vec<u32> = (0..SLOT_COUNT).collect();
        let (mut local, mut remote) = (
            DescriptorList::new(),
            DescriptorList::remote(info.incarnation),
        );
        local.push(self.region.pools()[0], &slots);
        remote.push(info.pools[0].pool, &slots);
        self.agent.prepare(op, &local, &remote, peer).unwrap()
    }

    /// Reads all slots of a peer that has announced them.
    fn read(&self, transfer: &PreparedTransfer, announced: &AgentEvent) -> TransferHandle {
        let source = SourceReady::announced(announced).expect("a message");
        self.agent
            .post_within(transfer, source, PostOptions::default(), soon())
            .unwrap()
    }

    fn holds(&self, value: u8) -> bool {
        let bytes = (SLOT_BYTES * u64::from(SLOT_COUNT)) as usize;
        // SAFETY: I-16, I-21: all bytes of the memory; no operation touches them now.
        let all = unsafe { std::slice::from_raw_parts(self.memory.base_ptr(), bytes) };
        all.iter().all(|byte| *byte == value)
    }

    fn post(&self, transfer: &PreparedTransfer, chunk: u16) -> TransferHandle {
        let tickets = vec![(StageId(0), ChunkId(chunk))];
        let arrival = Arrival {
            epoch: EPOCH,
            tickets,
            note: Default::default(),
        };
        let options = PostOptions {
            arrival: Some(arrival),
            ..Default::default()
        };
        self.agent
            .post_within(transfer, SourceReady::host_written(), options, soon())
            .unwrap()
    }

    fn next(&self) -> AgentEvent {
        self.agent
            .next_event(soon())
            .expect("an event within the deadline")
    }

    fn await_message(&self) {
        match self.next() {
            AgentEvent::Message { .. } => {}
            other => panic!("{other:?}"),
        }
    }

    /// The end of the connection, with what else was on its way before it.
    fn await_proven_end(&self) {
        loop {
            match self.next() {
                // Over tcp a peer that was killed is first one that may come back.
                AgentEvent::Message { .. } | AgentEvent::PeerSuspended { .. } => {}
                AgentEvent::PeerDown {
                    is_proven, cause, ..
                } => return assert!(is_proven, "{cause}"),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Takes the memory out of service and shows that nobody writes it any more.
    fn memory_is_quiet(self) {
        let Self {
            agent,
            region,
            memory,
        } = self;
        region.close(soon()).map_err(|(_, error)| error).unwrap();
        assert!(agent.shutdown(soon()).is_clean());
        drop(agent);
        let mut memory = Arc::into_inner(memory).expect("the engine has let go of it");
        let mut bytes = || {
            let mut bytes = vec![0; (SLOT_BYTES * u64::from(SLOT_COUNT)) as usize];
            memory.read_at(0, &mut bytes).unwrap();
            bytes
        };
        let first = bytes();
        std::thread::sleep(Duration::from_millis(100));
        assert!(first == bytes(), "somebody writes after the proof");
    }
}

/// The other process; killed when a test ends early.
struct Other {
    child: Child,
}

impl Other {
    fn signal(&self, signal: Signal) {
        let child = Pid::from_child(&self.child);
        kill_process(child, signal).unwrap();
        if signal == Signal::STOP {
            // Its other threads go on until the one that takes the signal has run.
            waitid(WaitId::Pid(child), WaitIdOptions::STOPPED).unwrap();
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A listening side and a child in `role` that has connected to it.
fn with_child(role: &str, address: &Address) -> (Side, Other, PeerId) {
    let here = side("parent", address);
    let bound = here.agent.listen(address).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(ROLE, role)
        .env(ADDRESS, bound.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let other = Other { child };
    match here.next() {
        AgentEvent::PeerUp { peer } => (here, other, peer),
        event => panic!("{event:?}"),
    }
}

fn each_transport(name: &str, body: impl Fn(&Address)) {
    body(&Address::Shm(format!(
        "kvgate-test-{}-{name}",
        std::process::id()
    )));
    body(&Address::Cma(format!(
        "kvgate-test-{}-{name}",
        std::process::id()
    )));
    body(&Address::Tcp("127.0.0.1:0".parse().unwrap()));
    for address in ["ucx:127.0.0.1:0", "libfabric:127.0.0.1:0"] {
        let address = &Address::resolve(address).unwrap()[0];
        match Agent::builder("probe").build().unwrap().listen(address) {
            Ok(_) => body(address),
            Err(error) if matches!(error.kind(), ErrorKind::BackendUnavailable { .. }) => {
                println!("SKIP: {error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// The role of the second process; nothing in the first one.
#[test]
fn child() {
    let (Ok(role), Ok(address)) = (std::env::var(ROLE), std::env::var(ADDRESS)) else {
        return;
    };
    let address = Address::resolve(&address).unwrap().remove(0);
    let here = side("child", &address);
    let peer = here.agent.connect(&address, soon()).unwrap();
    match role.as_str() {
        // Writes everything over and over, and says so each time, until it is told to stop.
        "writer" => {
            let transfer = here.everything(peer);
            loop {
                let status = here.post(&transfer, 1).wait(soon());
                if !matches!(status, Status::Done(_)) || here.agent.send(peer, b"written").is_err()
                {
                    break;
                }
                if here
                    .agent
                    .next_event(Deadline::now())
                    .is_some_and(|event| !matches!(event, AgentEvent::PeerUp { .. }))
                {
                    break;
                }
            }
        }
        // Has something to be read, says so, and keeps it until the parent goes.
        "source" => {
            let bytes = (SLOT_BYTES * u64::from(SLOT_COUNT)) as usize;
            // SAFETY: I-16: all bytes of the memory; nobody has been told of them yet.
            unsafe { here.memory.base_ptr().write_bytes(SOURCE, bytes) };
            here.agent.send(peer, b"complete").unwrap();
            while !matches!(
                here.agent.next_event(Deadline::after_ms(60_000)),
                None | Some(AgentEvent::PeerDown { .. })
            ) {}
        }
        // Takes whatever comes until the parent goes.
        "reader" => {
            while !matches!(
                here.agent.next_event(Deadline::after_ms(60_000)),
                None | Some(AgentEvent::PeerDown { .. })
            ) {}
        }
        other => panic!("{other}"),
    }
}

/// A flight of two chunks, of which the child writes only number 1.
fn flight(here: &Side, peer: PeerId) -> (Arc<Barrier>, kvgate_transfer::Expectation) {
    let chunk = |chunk| ChunkSpec {
        stage: StageId(0),
        chunk: ChunkId(chunk),
        writer: WriterRank(0),
        descriptor_count: 1,
    };
    let plan = BarrierPlan::from_chunks(vec![chunk(0), chunk(1)]).unwrap();
    let barrier = Barrier::new(plan, EPOCH);
    let flight = here
        .agent
        .expect(&barrier, &[(peer, WriterRank(0))], None)
        .unwrap();
    barrier.arm().unwrap();
    (barrier, flight)
}

fn not_quiet(draining: Draining) -> Draining {
    draining
        .wait(a_while())
        .expect_err("nobody can know that the writer is quiet")
}

#[test]
fn a_killed_writer_is_proven_dead_and_its_slots_are_free() {
    each_transport("killed-writer", |address| {
        let (here, mut other, peer) = with_child("writer", address);
        let (barrier, flight) = flight(&here, peer);
        for _ in 0..5 {
            here.await_message();
        }
        // It writes without a pause, so this falls into a transfer.
        other.signal(Signal::KILL);
        let killed = Instant::now();
        assert!(
            barrier.wait(StageId(0), soon()).is_err(),
            "the missing chunk never comes"
        );
        here.await_proven_end();
        assert!(killed.elapsed() < Duration::from_secs(5));
        let proof = flight.close().wait(soon());
        assert_eq!(proof.expect("the proof frees the slots").epoch(), EPOCH);
        other.child.wait().unwrap();
        here.memory_is_quiet();
    });
}

#[test]
fn a_stopped_writer_is_not_dead_and_goes_on() {
    each_transport("stopped-writer", |address| {
        let (here, other, peer) = with_child("writer", address);
        let (_barrier, flight) = flight(&here, peer);
        here.await_message();
        other.signal(Signal::STOP);
        // What was on its way comes in; then there is silence, and no end of the connection.
        while let Some(event) = here.agent.next_event(a_while()) {
            assert!(matches!(event, AgentEvent::Message { .. }), "{event:?}");
        }
        let draining = not_quiet(flight.close());
        assert!(here.agent.next_event(Deadline::now()).is_none());
        other.signal(Signal::CONT);
        here.await_message();
        let draining = not_quiet(draining);
        here.agent.send(peer, b"enough").unwrap();
        here.await_proven_end();
        let proof = draining.wait(soon());
        assert_eq!(
            proof
                .expect("a writer that has said goodbye is quiet")
                .epoch(),
            EPOCH
        );
        here.memory_is_quiet();
    });
}

#[test]
fn a_killed_reader_ends_the_operations() {
    each_transport("killed-reader", |address| {
        let (here, other, peer) = with_child("reader", address);
        let transfer = here.everything(peer);
        let done = here.post(&transfer, 0).wait(soon());
        assert!(matches!(done, Status::Done(_)), "{done:?}");
        let handles: Vec<_> = (0..200).map(|_| here.post(&transfer, 0)).collect();
        other.signal(Signal::KILL);
        for handle in &handles {
            let status = handle.wait(soon());
            assert!(
                matches!(status, Status::Done(_) | Status::Failed(_)),
                "{status:?}"
            );
        }
        here.await_proven_end();
        let late = here.agent.post(
            &transfer,
            SourceReady::host_written(),
            PostOptions::default(),
        );
        assert!(late.is_err());
        here.memory_is_quiet();
    });
}

#[test]
fn a_stopped_reader_changes_nothing_and_gets_everything_later() {
    each_transport("stopped-reader", |address| {
        let (here, other, peer) = with_child("reader", address);
        let transfer = here.everything(peer);
        other.signal(Signal::STOP);
        let handles: Vec<_> = (0..20).map(|_| here.post(&transfer, 0)).collect();
        let last = handles.last().unwrap();
        let status = last.wait(a_while());
        // Mapped memory needs no reader; a socket does.
        let is_mapped = matches!(address, Address::Shm(_) | Address::Cma(_));
        assert!(
            matches!(status, Status::InFlight) != is_mapped,
            "{status:?}"
        );
        assert!(
            here.agent.next_event(Deadline::now()).is_none(),
            "a stopped peer is not dead"
        );
        other.signal(Signal::CONT);
        for handle in &handles {
            let status = handle.wait(soon());
            assert!(matches!(status, Status::Done(_)), "{status:?}");
        }
        drop(other);
        here.await_proven_end();
        here.memory_is_quiet();
    });
}

#[test]
fn a_killed_source_ends_the_reads_and_the_destination_is_quiet() {
    each_transport("killed-source", |address| {
        let (here, other, peer) = with_child("source", address);
        let announced = here.next();
        let transfer = here.all_slots(Op::Read, peer);
        let done = here.read(&transfer, &announced).wait(soon());
        assert!(matches!(done, Status::Done(_)), "{done:?}");
        assert!(here.holds(SOURCE));
        let handles: Vec<_> = (0..200).map(|_| here.read(&transfer, &announced)).collect();
        other.signal(Signal::KILL);
        for handle in &handles {
            let status = handle.wait(soon());
            assert!(
                matches!(status, Status::Done(_) | Status::Failed(_)),
                "{status:?}"
            );
        }
        here.await_proven_end();
        assert!(here.holds(SOURCE), "a byte of something else was read");
        here.memory_is_quiet();
    });
}

#[test]
fn the_destination_of_a_read_is_held_while_its_source_is_stopped() {
    each_transport("stopped-source", |address| {
        let (here, other, peer) = with_child("source", address);
        let announced = here.next();
        let transfer = here.all_slots(Op::Read, peer);
        other.signal(Signal::STOP);
        let handles: Vec<_> = (0..20).map(|_| here.read(&transfer, &announced)).collect();
        let last = handles.last().unwrap();
        last.cancel();
        let status = last.wait(a_while());
        // Mapped memory needs nobody's help; a socket does. What was queued can be taken back.
        let needs_help = !matches!(address, Address::Shm(_) | Address::Cma(_));
        let first = handles.first().unwrap();
        // By then it was begun: what is not begun can be taken back.
        let _ = first.wait(a_while());
        first.cancel();
        let first = first.wait(a_while());
        assert!(
            matches!(first, Status::InFlight) == needs_help,
            "{first:?} {status:?}"
        );
        let Side {
            agent,
            region,
            memory,
        } = here;
        // Neither a cancel nor time gives the destination back. Mapped memory waits for the peer's answer.
        let (region, error) = region.close(a_while()).unwrap_err();
        let ErrorKind::RegionBusy { outstanding, .. } = error.kind() else {
            panic!("{error}")
        };
        assert_eq!(*outstanding > 0, needs_help, "{error}");
        other.signal(Signal::CONT);
        for handle in &handles {
            assert!(!matches!(handle.wait(soon()), Status::InFlight));
        }
        region.close(soon()).map_err(|(_, error)| error).unwrap();
        drop(other);
        assert!(agent.shutdown(soon()).is_clean());
        drop(agent);
        assert!(
            Arc::into_inner(memory).is_some(),
            "the engine has let go of it"
        );
    });
}

#[test]
fn shutting_down_beside_a_stopped_peer_takes_bounded_time() {
    each_transport("stopped-shutdown", |address| {
        let (here, other, peer) = with_child("reader", address);
        let transfer = here.everything(peer);
        other.signal(Signal::STOP);
        let handles: Vec<_> = (0..20).map(|_| here.post(&transfer, 0)).collect();
        let started = Instant::now();
        let report = here.agent.shutdown(Deadline::after_ms(1_000));
        assert!(
            started.elapsed() < Duration::from_secs(4),
            "{:?}",
            started.elapsed()
        );
        // The drain may have used the whole deadline up; no thread stays, though.
        assert!(report.running_threads <= 1);
        assert_eq!(here.agent.shutdown(soon()).running_threads, 0);
        for handle in handles {
            assert!(!matches!(handle.wait(soon()), Status::InFlight));
        }
    });
}

/// A peer that reaches this memory by itself is remembered beyond the shutdown, until it is proven dead.
#[test]
fn memory_that_a_stopped_peer_may_write_is_kept_beyond_the_shutdown() {
    each_transport("stopped-memory", |address| {
        if !matches!(address, Address::Shm(_) | Address::Cma(_)) {
            return;
        }
        let (here, other, _) = with_child("reader", address);
        other.signal(Signal::STOP);
        let report = here.agent.shutdown(a_while());
        assert_eq!(report.open_regions, [here.region.id()]);
        let (region, error) = here.region.close(a_while()).unwrap_err();
        assert!(
            matches!(
                error.kind(),
                ErrorKind::RegionBusy {
                    unheard_peers: 1,
                    ..
                }
            ),
            "{error}"
        );
        drop(other);
        region.close(soon()).map_err(|(_, error)| error).unwrap();
    });
}

/// Dead, stopped and slow are three things, and a look at the status tells them apart without a message.
#[test]
fn a_stopped_peer_has_no_heartbeat_and_a_dead_one_is_gone() {
    each_transport("heartbeat", |address| {
        let (here, mut other, peer) = with_child("reader", address);
        let silence_ms = || here.agent.status().peers[0].heartbeat_age_ms;
        if !matches!(address, Address::Shm(_) | Address::Cma(_)) {
            return assert_eq!(silence_ms(), None, "no memory is shared");
        }
        let until = |holds: &dyn Fn(u64) -> bool| {
            let deadline = soon();
            while !holds(silence_ms().expect("it has not ended")) {
                assert!(!deadline.has_passed(), "{:?}", silence_ms());
                std::thread::yield_now();
            }
        };
        until(&|ms| ms == 0);
        other.signal(Signal::STOP);
        until(&|ms| ms >= 200);
        assert!(here.agent.peer(peer).is_some(), "a silent peer is not dead");
        other.signal(Signal::CONT);
        until(&|ms| ms == 0);
        other.signal(Signal::KILL);
        here.await_proven_end();
        assert_eq!(silence_ms(), None);
        other.child.wait().unwrap();
    });
}
