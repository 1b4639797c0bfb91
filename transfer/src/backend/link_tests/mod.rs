//! Links between two hosts of one process, over real sockets. What only two processes can show is in
//! `tests/two_processes.rs`.

#![allow(clippy::unwrap_used)] // the lint does not see that this module is for tests only

use std::ops::Range;
use std::time::Duration;

mod frames;
mod greetings;
mod moves;
mod reads;
mod sessions;

use bytes::Bytes;

use super::handshake::OwnRegion;
use super::net::{Established, Introduction, LinkHost, Listener, connect, listen};
use super::*;
use crate::agent::address::Address;
use crate::agent::metadata::{AgentMetadata, PoolInfo, RegionInfo};
use crate::deadline::Deadline;
use crate::error::ErrorKind;
use crate::ids::{ChunkId, Epoch, Incarnation, RegionId, StageId};
use crate::landed::{Landing, SlotState};
use crate::mem::{Memory, PoolGeometry, span::PoolSpan};
use crate::sync::{AtomicU64, Condvar, Mutex, Ordering};

const SLOT_BYTES: u64 = 8_448;
const SLOT_COUNT: u32 = 64;
const POOL: PoolId = PoolId(3);
const GENERATION: u32 = 9;
const PEER: PeerId = PeerId(1);

/// Long enough for a loaded machine; a test that waits for it fails.
fn soon() -> Deadline {
    Deadline::after_ms(10_000)
}

fn pause_ms(milliseconds: u64) {
    crate::sync::thread::sleep(Duration::from_millis(milliseconds));
}

#[derive(Debug, Clone, PartialEq)]
enum Seen {
    Arrived(Arrival, Visibility, u8),
    Message(Bytes),
    Landed(OpId, u64),
    Settled(OpId),
    Completed(OpId, Result<Visibility, ErrorKind>),
    Progress(u64),
    Down(Quiesce),
}

/// One agent's worth of memory, ears and mouth.
struct Host {
    name: &'static str,
    secret: Option<Vec<u8>>,
    memory: Arc<Memory>,
    seen: Mutex<Vec<Seen>>,
    established: Mutex<Vec<Established>>,
    refused: Mutex<Vec<String>>,
    changed: Condvar,
    refuses_writes: bool,
    /// Reads of the peer, for whoever plays the worker.
    requests: Mutex<Vec<ReadRequest>>,
    /// Messages that the peer has acknowledged.
    acknowledged_count: AtomicU64,
}

impl Host {
    fn with(name: &'static str, secret: Option<&str>, refuses_writes: bool) -> Arc<Self> {
        let memory = Memory::shared(name, SLOT_BYTES * u64::from(SLOT_COUNT)).unwrap();
        Arc::new(Self {
            name,
            secret: secret.map(|secret| secret.as_bytes().to_vec()),
            memory: Arc::new(memory),
            seen: Mutex::new(Vec::new()),
            established: Mutex::new(Vec::new()),
            refused: Mutex::new(Vec::new()),
            changed: Condvar::new(),
            refuses_writes,
            requests: Mutex::new(Vec::new()),
            acknowledged_count: AtomicU64::new(0),
        })
    }

    fn new(name: &'static str) -> Arc<Self> {
        Self::with(name, None, false)
    }

    fn span(&self) -> PoolSpan {
        PoolSpan::new(self.memory.base_ptr(), self.memory.len_bytes(), geometry()).unwrap()
    }

    fn stretch(&self, slot: u32) -> super::SlotRun {
        self.span().run(slot, 1).unwrap()
    }

    /// Fills a slot. Only while nobody posts it.
    fn fill(&self, slot: u32, byte: u8) {
        let pattern = Memory::host(SLOT_BYTES).unwrap();
        let mut pattern = pattern;
        pattern
            .write_at(0, &vec![byte; SLOT_BYTES as usize])
            .unwrap();
        let source = PoolSpan::new(
            pattern.base_ptr(),
            SLOT_BYTES,
            PoolGeometry {
                slot_count: 1,
                ..geometry()
            },
        );
        crate::mem::copy::copy_pair(&source.unwrap().run(0, 1).unwrap(), &self.stretch(slot));
    }

    /// First and last byte of a slot, which must be equal.
    fn byte(&self, slot: u32) -> u8 {
        let mut copy = Memory::host(SLOT_BYTES).unwrap();
        let target = PoolSpan::new(
            copy.base_ptr(),
            SLOT_BYTES,
            PoolGeometry {
                slot_count: 1,
                ..geometry()
            },
        );
        crate::mem::copy::copy_pair(&self.stretch(slot), &target.unwrap().run(0, 1).unwrap());
        let mut bytes = vec![0; SLOT_BYTES as usize];
        copy.read_at(0, &mut bytes).unwrap();
        assert!(
            bytes.iter().all(|byte| *byte == bytes[0]),
            "slot {slot} is torn"
        );
        bytes[0]
    }

    fn push(&self, seen: Seen) {
        self.seen.lock().push(seen);
        self.changed.notify_all();
    }

    /// The first thing seen that `pick` takes.
    fn await_seen<T>(&self, pick: impl Fn(&Seen) -> Option<T>) -> T {
        let deadline = soon();
        let mut seen = self.seen.lock();
        loop {
            if let Some(found) = seen.iter().find_map(&pick) {
                return found;
            }
            assert!(!deadline.has_passed(), "{} saw only {seen:?}", self.name);
            self.changed.wait_until(&mut seen, deadline.instant());
        }
    }

    fn await_refusal(&self) -> String {
        let deadline = soon();
        let mut refused = self.refused.lock();
        while refused.is_empty() {
            assert!(!deadline.has_passed(), "nobody was refused");
            self.changed.wait_until(&mut refused, deadline.instant());
        }
        refused.remove(0)
    }

    fn await_established(&self) -> Established {
        let deadline = soon();
        let mut established = self.established.lock();
        while established.is_empty() {
            assert!(!deadline.has_passed(), "nobody came");
            self.changed
                .wait_until(&mut established, deadline.instant());
        }
        established.remove(0)
    }
}

fn geometry() -> PoolGeometry {
    PoolGeometry {
        offset_bytes: 0,
        stride_bytes: SLOT_BYTES,
        slot_bytes: SLOT_BYTES,
        slot_count: SLOT_COUNT,
    }
}

impl LinkHost for Host {
    fn introduction(&self) -> Introduction {
        let region = RegionInfo {
            id: RegionId(1),
            generation: GENERATION,
            len_bytes: self.memory.len_bytes(),
            kind: self.memory.kind(),
        };
        let metadata = AgentMetadata {
            incarnation: Incarnation(7),
            name: self.name.into(),
            regions: vec![region],
            pools: vec![PoolInfo {
                id: POOL,
                region: region.id,
                geometry: geometry(),
            }],
            app: Bytes::from_static(b"app"),
        };
        let region = OwnRegion {
            id: region.id,
            generation: GENERATION,
            memory: Arc::clone(&self.memory),
        };
        Introduction {
            metadata,
            regions: vec![region],
            keep: Box::new(()),
        }
    }

    fn secret(&self) -> Option<Vec<u8>> {
        self.secret.clone()
    }

    fn established(&self, established: Established) {
        self.established.lock().push(established);
        self.changed.notify_all();
    }

    fn refused(&self, _: String, _: crate::obs::RefusedField, reason: String) {
        self.refused.lock().push(reason);
        self.changed.notify_all();
    }
}

impl LinkEvents for Host {
    fn arrived(&self, _peer: PeerId, arrival: Arrival, level: Visibility) {
        let byte = self.byte(u32::from(arrival.tickets[0].1.0));
        self.push(Seen::Arrived(arrival, level, byte));
    }

    fn message(&self, _peer: PeerId, bytes: Bytes) {
        self.push(Seen::Message(bytes));
    }

    fn landed(&self, _peer: PeerId, op: OpId, slots: Range<u64>) {
        assert_eq!(slots.start, 0);
        self.push(Seen::Landed(op, slots.end));
    }

    fn settled(&self, _peer: PeerId, op: OpId) {
        self.push(Seen::Settled(op));
    }

    fn completed(&self, _peer: PeerId, op: OpId, result: Result<Visibility, Error>) {
        self.push(Seen::Completed(
            op,
            result.map_err(|error| error.kind().clone()),
        ));
    }

    fn progress(&self, _peer: PeerId, counter: u64) {
        self.push(Seen::Progress(counter));
    }

    fn acknowledged(&self, _peer: PeerId, message_count: usize, _bytes: usize) {
        let seen = self.seen.lock(); // of those who wait
        self.acknowledged_count
            .fetch_add(message_count as u64, Ordering::Relaxed);
        drop(seen);
        self.changed.notify_all();
    }

    fn down(&self, _peer: PeerId, _cause: Cause, quiesce: Quiesce) {
        self.push(Seen::Down(quiesce));
    }

    fn asked(&self, _peer: PeerId, request: ReadRequest) -> bool {
        let mut requests = self.requests.lock();
        requests.push(request);
        self.changed.notify_all();
        requests.len() <= READ_WINDOW
    }

    fn resolve(&self, _peer: PeerId, runs: &[RemoteRun]) -> Result<Resolved, Error> {
        let resolve = |run: &RemoteRun| {
            if self.refuses_writes || run.pool != POOL || run.generation != GENERATION {
                return Err(ErrorKind::PoolRevoked { pool: run.pool });
            }
            let pool = run.pool;
            self.span()
                .run(run.slot, run.slot_count)
                .ok_or(ErrorKind::UnknownPool { pool })
        };
        Ok(Resolved {
            runs: runs.iter().map(resolve).collect::<Result<_, _>>()?,
            _holds: Vec::new(),
        })
    }
}

struct Pair {
    a: Arc<Host>,
    b: Arc<Host>,
    a_link: Arc<dyn Link>,
    b_link: Arc<dyn Link>,
    _listener: Listener,
}

fn addresses(name: &str) -> [Address; 4] {
    let unique = format!(
        "kvgate-test-{}-{name}",
        rustix::process::getpid().as_raw_nonzero()
    );
    [
        Address::Shm(unique.clone()),
        Address::Tcp("127.0.0.1:0".parse().unwrap()),
        Address::Tcp("[::1]:0".parse().unwrap()),
        Address::Cma(format!("{unique}-cma")),
    ]
}

fn pair(address: &Address, a: Arc<Host>, b: Arc<Host>) -> Pair {
    let listener = listen(address, b.clone()).unwrap();
    let at_a = connect(listener.address(), soon(), &*a).unwrap();
    let at_b = b.await_established();
    assert_eq!(at_a.metadata, b.introduction().metadata);
    assert_eq!(at_b.metadata, a.introduction().metadata);
    at_a.link.start(PEER, a.clone()).unwrap();
    at_b.link.start(PEER, b.clone()).unwrap();
    Pair {
        a,
        b,
        a_link: at_a.link,
        b_link: at_b.link,
        _listener: listener,
    }
}

fn each_transport(name: &str, body: impl Fn(Pair)) {
    for address in addresses(name) {
        body(pair(&address, Host::new("a"), Host::new("b")));
    }
}

/// Local slots `from` to remote slots `to`; the arrival names the last of them.
fn op(host: &Host, id: u64, from: (u32, u32), to: u32) -> PostedOp {
    let local = host.span().run(from.0, from.1).unwrap();
    let remote = RemoteRun {
        pool: POOL,
        generation: GENERATION,
        slot: to,
        slot_count: from.1,
    };
    let last = (to + from.1 - 1) as u16;
    PostedOp {
        id: OpId(id),
        op: Op::Write,
        priority: crate::Priority::Foreground,
        bytes: local.payload_bytes(),
        runs: Arc::new(RunPairs::of([(local, remote)])),
        arrival: Some(Arrival {
            epoch: Epoch(id),
            tickets: vec![(StageId(0), ChunkId(last))],
            note: Bytes::from_static(b"note"),
        }),
        landing: Arc::new(Landing::new(u64::from(from.1))),
    }
}

fn await_done(host: &Host, posted: Posted, id: u64) -> Result<Visibility, ErrorKind> {
    match posted {
        Posted::Done(level) => Ok(level),
        Posted::Pending => host.await_seen(|seen| match seen {
            Seen::Completed(op, result) if *op == OpId(id) => Some(result.clone()),
            _ => None,
        }),
    }
}
