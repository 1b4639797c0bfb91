//! A thread that waits takes frames of peers of this host out of the ring by itself (I-6): the arrival is handled
//! on its stack, whatever happens there the ring stays attended to, and the receive thread goes on where it left.

#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::ThreadId;

use kvgate_transfer::sync::{Arc, Mutex, thread};
use kvgate_transfer::{
    Address, Agent, AgentEvent, Arrival, ArrivalSink, Barrier, BarrierPlan, ChunkId, ChunkSpec,
    Deadline, DescriptorList, Epoch, Expectation, Memory, MemoryRegion, Op, PeerId, PoolGeometry,
    PostOptions, SourceReady, StageId, Status, WriterRank,
};

fn soon() -> Deadline {
    Deadline::after_ms(20_000)
}

/// Two agents of one process, connected through shared memory.
struct Pair {
    from: Agent,
    to: Agent,
    to_target: PeerId,
    to_source: PeerId,
    source: MemoryRegion,
    _target: MemoryRegion,
    next_epoch: AtomicU64,
}

impl Pair {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let agent = |name: &str| {
            let agent = Agent::builder(name).build().unwrap();
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
        let name = format!("kvgate-attend-{}-{number}", std::process::id());
        let bound = to.listen(&Address::Shm(name)).unwrap();
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
            next_epoch: AtomicU64::new(1),
        }
    }

    /// One chunk is awaited.
    fn flight(&self, sink: Option<Arc<dyn ArrivalSink>>) -> (Arc<Barrier>, Expectation) {
        let chunk = ChunkSpec {
            stage: StageId(0),
            chunk: ChunkId(0),
            writer: WriterRank(0),
            descriptor_count: 1,
        };
        let epoch = Epoch(self.next_epoch.fetch_add(1, Ordering::Relaxed));
        let barrier = Barrier::new(BarrierPlan::from_chunks(vec![chunk]).unwrap(), epoch);
        let writers = [(self.to_source, WriterRank(0))];
        let expectation = self.to.expect(&barrier, &writers, sink).unwrap();
        barrier.arm().unwrap();
        (barrier, expectation)
    }

    /// The chunk of this flight.
    fn write(&self, epoch: Epoch) {
        let info = self.from.peer(self.to_target).unwrap();
        let (mut local, mut remote) = (
            DescriptorList::new(),
            DescriptorList::remote(info.incarnation),
        );
        local.push(self.source.pools()[0], &[1]);
        remote.push(info.pools[0].pool, &[2]);
        let transfer = self
            .from
            .prepare(Op::Write, &local, &remote, self.to_target)
            .unwrap();
        let options = PostOptions {
            arrival: Some(Arrival {
                epoch,
                tickets: vec![(StageId(0), ChunkId(0))],
                note: bytes::Bytes::new(),
            }),
            ..Default::default()
        };
        let handle = self
            .from
            .post(&transfer, SourceReady::host_written(), options)
            .unwrap();
        assert!(matches!(handle.wait(soon()), Status::Done(_)));
    }
}

/// Who has handled the arrival.
#[derive(Default)]
struct Handler(Mutex<Option<ThreadId>>);

impl ArrivalSink for Handler {
    fn arrived(&self, _: PeerId, _: &Arrival) {
        *self.0.lock() = Some(thread::current().id());
    }
}

/// Flights until one arrival was handled by the thread that waited for it: before the receive thread has fallen
/// asleep it handles what comes itself.
fn until_attended(pair: &Pair, wait: impl Fn(&Barrier) + Sync) {
    let deadline = soon();
    loop {
        let handler = Arc::new(Handler::default());
        let (barrier, expectation) = pair.flight(Some(handler.clone()));
        let waiter = thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                wait(&barrier);
                thread::current().id()
            });
            pair.write(barrier.epoch());
            waiter.join().unwrap()
        });
        drop(expectation.close().wait(soon()).unwrap());
        if *handler.0.lock() == Some(waiter) {
            return;
        }
        assert!(!deadline.has_passed(), "the receive thread handles all");
    }
}

#[test]
fn a_thread_that_waits_takes_the_arrival_itself() {
    let pair = Pair::new();
    until_attended(&pair, |barrier| barrier.wait(StageId(0), soon()).unwrap());
    until_attended(&pair, |barrier| {
        barrier.wait_spinning(StageId(0), soon()).unwrap();
    });
}

#[test]
fn nobody_waits_and_arrivals_come_all_the_same() {
    let pair = Pair::new();
    for _ in 0..50 {
        until_attended(&pair, |barrier| barrier.wait(StageId(0), soon()).unwrap());
        let (barrier, expectation) = pair.flight(None);
        pair.write(barrier.epoch());
        let deadline = soon();
        while !barrier.all_landed() {
            assert!(!deadline.has_passed(), "left unattended");
            thread::yield_now();
        }
        drop(expectation.close().wait(soon()).unwrap());
    }
}

/// One thread waits for events all the time, and messages come between the arrivals; each is heard once.
#[test]
fn threads_that_wait_for_different_things_hand_the_ring_over() {
    const COUNT: u32 = 300;
    let pair = Pair::new();
    thread::scope(|scope| {
        let hears = scope.spawn(|| {
            let mut heard = 0_u32;
            while heard < COUNT {
                match pair.to.next_event(soon()) {
                    Some(AgentEvent::Message { bytes, .. }) => {
                        assert_eq!(bytes[..], heard.to_le_bytes());
                        heard += 1;
                    }
                    other => panic!("{other:?}"),
                }
            }
        });
        for number in 0..COUNT {
            let (barrier, expectation) = pair.flight(None);
            thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| barrier.wait(StageId(0), soon()).unwrap());
                }
                pair.write(barrier.epoch());
                pair.from
                    .send(pair.to_target, number.to_le_bytes())
                    .unwrap();
            });
            drop(expectation.close().wait(soon()).unwrap());
        }
        hears.join().unwrap();
    });
    assert_eq!(pair.to.counters().duplicate, 0);
}

#[test]
fn a_wait_that_runs_out_gives_the_ring_back() {
    let pair = Pair::new();
    let (barrier, expectation) = pair.flight(None);
    for _ in 0..5 {
        barrier.wait(StageId(0), Deadline::after_ms(2)).unwrap_err();
    }
    pair.write(barrier.epoch());
    let deadline = soon();
    while !barrier.all_landed() {
        assert!(!deadline.has_passed(), "left unattended");
        thread::yield_now();
    }
    drop(expectation.close().wait(soon()).unwrap());
}

/// Panics on the thread that waits, and does nothing on the receive thread.
struct Panics {
    waiter: Mutex<Option<ThreadId>>,
    has_panicked: AtomicBool,
}

impl ArrivalSink for Panics {
    fn arrived(&self, _: PeerId, _: &Arrival) {
        if *self.waiter.lock() == Some(thread::current().id()) {
            self.has_panicked.store(true, Ordering::Relaxed);
            panic!("on purpose: on the thread that waits");
        }
    }
}

#[test]
fn a_waiter_that_panics_leaves_the_ring_to_the_others() {
    let pair = Pair::new();
    let deadline = soon();
    loop {
        let sink = Arc::new(Panics {
            waiter: Mutex::new(None),
            has_panicked: AtomicBool::new(false),
        });
        let (barrier, expectation) = pair.flight(Some(sink.clone()));
        let ended = thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                *sink.waiter.lock() = Some(thread::current().id());
                barrier.wait(StageId(0), soon()).unwrap();
            });
            while sink.waiter.lock().is_none() {
                thread::yield_now();
            }
            pair.write(barrier.epoch());
            waiter.join()
        });
        // Its chunk has not landed when the sink has panicked; nobody waits for the proof.
        drop(expectation);
        assert_eq!(ended.is_err(), sink.has_panicked.load(Ordering::Relaxed));
        if ended.is_err() {
            break;
        }
        assert!(!deadline.has_passed(), "the receive thread handles all");
    }
    until_attended(&pair, |barrier| barrier.wait(StageId(0), soon()).unwrap());
}

/// Ends its own agent from inside an arrival.
struct Ends(Agent);

impl ArrivalSink for Ends {
    fn arrived(&self, _: PeerId, _: &Arrival) {
        let _ = self.0.shutdown(Deadline::after_ms(5_000));
    }
}

#[test]
fn an_agent_may_end_on_the_thread_that_waits() {
    for _ in 0..20 {
        let pair = Pair::new();
        until_attended(&pair, |barrier| barrier.wait(StageId(0), soon()).unwrap());
        let sink = Arc::new(Ends(pair.to.clone()));
        let (barrier, expectation) = pair.flight(Some(sink));
        let deadline = soon();
        thread::scope(|scope| {
            // Whoever handles it, the wait ends: by the arrival, or by the end of the agent.
            let waiter = scope.spawn(|| barrier.wait(StageId(0), soon()));
            pair.write(barrier.epoch());
            let _ = waiter.join().unwrap();
        });
        assert!(!deadline.has_passed());
        drop(expectation);
        assert!(pair.to.next_event(soon()).is_some_and(|event| {
            matches!(event, AgentEvent::PeerDown { peer, .. } if peer == pair.to_source)
        }));
    }
}

#[test]
fn a_peer_that_leaves_ends_the_wait_of_the_thread_that_has_its_ring() {
    let pair = Pair::new();
    until_attended(&pair, |barrier| barrier.wait(StageId(0), soon()).unwrap());
    let (barrier, expectation) = pair.flight(None);
    let deadline = soon();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| barrier.wait(StageId(0), soon()));
        let _ = pair.from.shutdown(soon());
        waiter.join().unwrap().unwrap_err();
    });
    assert!(!deadline.has_passed(), "it waited for its deadline");
    drop(expectation);
}
