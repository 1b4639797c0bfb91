//! The heartbeat of a peer that shares memory: a thread there that is stuck is told by its silence, and an idle
//! peer answers whenever it is asked.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use kvgate_transfer::sync::{Arc, Condvar, Mutex};
use kvgate_transfer::{
    Address, Agent, AgentEvent, Arrival, ArrivalSink, Barrier, BarrierPlan, ChunkId, ChunkSpec,
    Deadline, DescriptorList, Epoch, Event, Expectation, Memory, MemoryRegion, Op, PeerId,
    PoolGeometry, PostOptions, Recorder, SourceReady, StageId, StallCause, Status, TransferConfig,
    TransferHandle, WriterRank,
};

/// Far more than a busy machine lets the watcher oversleep: its question has to be open for half of that.
const STALL_MS: u64 = 500;
const EPOCH: Epoch = Epoch(3);

fn soon() -> Deadline {
    Deadline::after_ms(20_000)
}

/// What was said of stalls.
#[derive(Default)]
struct Said {
    events: Mutex<Vec<Event>>,
    changed: Condvar,
}

impl Recorder for Said {
    fn record(&self, event: &Event) {
        if matches!(event, Event::Stalled { .. } | Event::Resumed { .. }) {
            self.events.lock().push(event.clone());
            self.changed.notify_all();
        }
    }
}

impl Said {
    /// The event with this number.
    fn get(&self, number: usize) -> Event {
        let deadline = soon();
        let mut events = self.events.lock();
        while events.len() <= number {
            assert!(!deadline.has_passed(), "{events:?}");
            self.changed.wait_until(&mut events, deadline.instant());
        }
        events[number].clone()
    }
}

/// Keeps the thread that brings an arrival, until it is opened.
#[derive(Default)]
struct Gate {
    /// Whether somebody is inside, and whether it is open.
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl ArrivalSink for Gate {
    fn arrived(&self, _: PeerId, _: &Arrival) {
        let mut state = self.state.lock();
        state.0 = true;
        self.changed.notify_all();
        while !state.1 {
            self.changed.wait(&mut state);
        }
    }
}

impl Gate {
    fn open(&self) {
        self.state.lock().1 = true;
        self.changed.notify_all();
    }

    fn await_entered(&self) {
        let deadline = soon();
        let mut state = self.state.lock();
        while !state.0 {
            assert!(!deadline.has_passed(), "nobody has come");
            self.changed.wait_until(&mut state, deadline.instant());
        }
    }
}

/// Opens the gate also when the test fails: nobody else would.
struct OpenedAtTheEnd(Arc<Gate>);

impl Drop for OpenedAtTheEnd {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// Two agents of one process, connected through shared memory.
struct Pair {
    from: Agent,
    to: Agent,
    to_target: PeerId,
    to_source: PeerId,
    source: MemoryRegion,
    _target: MemoryRegion,
    said: Arc<Said>,
}

impl Pair {
    fn new(name: &str) -> Self {
        let name = format!("kvgate-heartbeat-{}-{name}", std::process::id());
        Self::over(&Address::Shm(name))
    }

    fn over(address: &Address) -> Self {
        let said = Arc::new(Said::default());
        let config = TransferConfig {
            stall_ms: STALL_MS,
            ..TransferConfig::default()
        };
        let agent = |name: &str| {
            let builder = Agent::builder(name).config(config.clone());
            let agent = builder.recorder(said.clone()).build().unwrap();
            let pool = PoolGeometry {
                offset_bytes: 0,
                stride_bytes: 64,
                slot_bytes: 64,
                slot_count: 8,
            };
            let memory = Arc::new(Memory::shared(name, 512).unwrap());
            let region = agent.register(memory, &[pool]).unwrap();
            (agent, region)
        };
        let ((from, source), (to, target)) = (agent("from"), agent("to"));
        let bound = to.listen(address).unwrap();
        let to_target = from.connect(&bound, soon()).unwrap();
        let Some(AgentEvent::PeerUp { peer }) = to.next_event(soon()) else {
            panic!("the connection is the first event");
        };
        Self {
            from,
            to,
            to_target,
            to_source: peer,
            source,
            _target: target,
            said,
        }
    }

    fn post(&self, options: PostOptions) -> TransferHandle {
        let info = self.from.peer(self.to_target).unwrap();
        let mut local = DescriptorList::new();
        let mut remote = DescriptorList::remote(info.incarnation);
        local.push(self.source.pools()[0], &[1]);
        remote.push(info.pools[0].pool, &[2]);
        let from = &self.from;
        let transfer = from.prepare(Op::Write, &local, &remote, self.to_target);
        let source = SourceReady::host_written();
        from.post(&transfer.unwrap(), source, options).unwrap()
    }

    /// A flight whose only chunk brings the receive thread of the target into the gate.
    fn stick(&self, gate: &Arc<Gate>) -> (Expectation, TransferHandle) {
        let chunk = ChunkSpec {
            stage: StageId(0),
            chunk: ChunkId(0),
            writer: WriterRank(0),
            descriptor_count: 1,
        };
        let barrier = Barrier::new(BarrierPlan::from_chunks(vec![chunk]).unwrap(), EPOCH);
        let writers = [(self.to_source, WriterRank(0))];
        let flight = self.to.expect(&barrier, &writers, Some(gate.clone()));
        barrier.arm().unwrap();
        let arrival = Arrival {
            epoch: EPOCH,
            tickets: vec![(StageId(0), ChunkId(0))],
            note: bytes::Bytes::new(),
        };
        let first = self.post(PostOptions {
            arrival: Some(arrival),
            ..PostOptions::default()
        });
        gate.await_entered();
        (flight.unwrap(), first)
    }

    /// How long the target has been silent, as its peer sees it.
    fn silence_ms(&self) -> u64 {
        let status = self.from.status();
        status.peers[0].heartbeat_age_ms.expect("shared memory")
    }
}

#[test]
fn a_peer_whose_thread_is_stuck_is_silent_and_a_stall_says_so() {
    let pair = Pair::new("stuck");
    let gate = Arc::new(Gate::default());
    let _opened = OpenedAtTheEnd(gate.clone());
    let (flight, first) = pair.stick(&gate);
    // More than its ring and its socket take; what is behind them waits.
    const LONG: usize = 100_000;
    for _ in 0..10 {
        pair.from.send(pair.to_target, vec![0; LONG]).unwrap();
    }
    let behind = pair.post(PostOptions::default());
    let Event::Stalled { op, cause, .. } = pair.said.get(0) else {
        panic!("nothing has resumed");
    };
    assert_eq!((op, cause), (behind.id(), StallCause::PeerSilent));
    let deadline = soon();
    while pair.silence_ms() < 2 * STALL_MS {
        assert!(!deadline.has_passed());
        std::thread::yield_now();
    }
    let text = pair.from.status().to_string();
    assert!(text.contains("no heartbeat for"), "{text}");
    assert!(
        matches!(behind.status(), Status::InFlight),
        "nothing ends by it"
    );

    gate.open();
    for handle in [first, behind] {
        let status = handle.wait(soon());
        assert!(matches!(status, Status::Done(_)), "{status:?}");
    }
    assert!(matches!(pair.said.get(1), Event::Resumed { .. }));
    let deadline = soon();
    while pair.silence_ms() > 0 {
        assert!(!deadline.has_passed(), "it attends to its ring again");
        std::thread::yield_now();
    }
    drop(flight.close().wait(soon()).unwrap());
}

/// It sleeps, is asked, and answers: whoever looks a while later sees no silence.
#[test]
fn an_idle_peer_answers_whenever_it_is_asked() {
    let pair = Pair::new("idle");
    // Asked at each look, it would have been silent for as long as the two looks are apart.
    let has_answered = || {
        let (asked, first) = (Instant::now(), pair.silence_ms());
        while asked.elapsed() < Duration::from_millis(20) {
            std::thread::yield_now();
        }
        (first, pair.silence_ms()) == (0, 0)
    };
    let deadline = soon();
    for round in 0..10 {
        while !has_answered() {
            assert!(!deadline.has_passed(), "round {round}");
        }
    }
    assert_eq!(pair.said.events.lock().len(), 0);
    let _ = pair.to.shutdown(soon());
    let deadline = soon();
    while pair.from.status().peers[0].down.is_none() {
        assert!(!deadline.has_passed());
        std::thread::yield_now();
    }
    assert_eq!(pair.from.status().peers[0].heartbeat_age_ms, None);
}

/// A sink that does not return keeps its thread and nobody else: the shutdown ends, names the thread, and gives no
/// memory back that the peer might write.
#[test]
fn a_shutdown_leaves_a_thread_that_is_stuck_in_a_sink_and_says_so() {
    let name = format!("kvgate-heartbeat-{}-left", std::process::id());
    for address in [
        Address::Shm(name),
        Address::Tcp("127.0.0.1:0".parse().unwrap()),
    ] {
        let pair = Pair::over(&address);
        let gate = Arc::new(Gate::default());
        let _opened = OpenedAtTheEnd(gate.clone());
        let (flight, _first) = pair.stick(&gate);
        let began = Instant::now();
        let report = pair.to.shutdown(Deadline::after_ms(3_000));
        assert!(began.elapsed() < Duration::from_secs(15), "{address}");
        assert_eq!(report.running_threads, 1, "{address}: {report:?}");
        assert_eq!(report.unquiet_flights, [EPOCH], "{address}");
        let draining = flight.close().wait(Deadline::now());
        assert!(draining.is_err(), "{address}: its memory is free");
        gate.open();
    }
}
