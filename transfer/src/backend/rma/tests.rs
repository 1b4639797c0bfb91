//! Mover and link over a library that does what a test says.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc;
use std::time::Duration;

use bytes::Bytes;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::card::{Card, Key};
use super::link::{Parts, RmaLink};
use super::mover::{Moved, Mover, Transfer};
use super::requests::Targets;
use super::{Fabric, Failure, LocalKey, Request};
use crate::Arrival;
use crate::agent::metadata::{AgentMetadata, PoolInfo, RegionInfo};
use crate::agent::wire;
use crate::backend::channel::Channel;
use crate::backend::reader::FrameReader;
use crate::backend::socket::{Socket, StopSignal};
use crate::backend::{
    BackendKind, Link, LinkEvents, Posted, PostedOp, Quiesce, ReadRequest, RemoteRun, Resolved,
    RunPairs,
};
use crate::deadline::Deadline;
use crate::engine::Op;
use crate::error::{Cause, Error, ErrorKind};
use crate::ids::{Incarnation, OpId, PeerId, PoolId, RegionId};
use crate::mem::region::Registrar;
use crate::mem::span::PoolSpan;
use crate::mem::{Memory, MemoryKind, PoolGeometry};
use crate::priority::Priority;
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, thread};
use crate::visibility::Visibility;

const POOL: PoolId = PoolId(3);
const REGION: RegionId = RegionId(1);
const PEER: PeerId = PeerId(1);
const BYTES: u64 = 4096;
/// A test that waits so long fails.
const LONG: Duration = Duration::from_secs(10);

/// What the library does, and what was asked of it.
#[derive(Default)]
struct State {
    /// Requests do not end.
    is_stuck: bool,
    /// The library has failed.
    is_broken: bool,
    /// Does not let itself be ended.
    stays: bool,
    /// Lets go of no memory.
    keeps: bool,
    /// Gives no keys.
    is_keyless: bool,
    /// Has no room for requests, and does not tell when that ends.
    is_full: bool,
    pending: usize,
    /// Requests that found no room.
    refused: usize,
    /// Handles of the requests.
    posted: Vec<usize>,
    registered: BTreeSet<usize>,
}

/// The test's hand on a [`Fake`].
struct Script {
    state: Mutex<State>,
    changed: Condvar,
    event: OwnedFd,
}

impl Script {
    fn new(state: State) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap(),
        })
    }

    fn tell(&self) -> MutexGuard<'_, State> {
        self.changed.notify_all();
        self.state.lock()
    }

    /// Something for the mover to look at.
    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.tell());
        rustix::io::write(&self.event, &1u64.to_ne_bytes()).unwrap();
    }

    fn await_state(&self, what: impl Fn(&State) -> bool) {
        let deadline = Deadline::after(LONG);
        let mut state = self.state.lock();
        while !what(&state) {
            assert!(!deadline.has_passed(), "it never came to that");
            self.changed.wait_until(&mut state, deadline.instant());
        }
    }
}

struct Fake(Arc<Script>);

impl Fake {
    fn failure(call: &'static str) -> Failure {
        Failure {
            backend: Self::KIND,
            call,
            code: -1,
            words: "as the test wants it".into(),
        }
    }
}

impl Fabric for Fake {
    const KIND: BackendKind = BackendKind::Sim;

    fn address(&mut self) -> Result<Bytes, Failure> {
        Ok(Bytes::from_static(b"here"))
    }

    fn connect(&mut self, _address: &[u8], _keys: &[Bytes]) -> Result<(), Failure> {
        Ok(())
    }

    fn register(&mut self, _memory: &Memory) -> Result<usize, Failure> {
        let mut state = self.0.tell();
        let handle = state.registered.last().map_or(0, |last| last + 1);
        state.registered.insert(handle);
        Ok(handle)
    }

    fn key(&mut self, _handle: usize, memory: &Memory) -> Result<LocalKey, Failure> {
        if self.0.tell().is_keyless {
            return Err(Self::failure("key"));
        }
        let (base, key) = (memory.base_ptr() as u64, Bytes::new());
        Ok(LocalKey { base, key })
    }

    fn unregister(&mut self, handle: usize) -> Result<(), Failure> {
        let mut state = self.0.tell();
        if state.keeps {
            return Err(Self::failure("unregister"));
        }
        state.registered.remove(&handle);
        Ok(())
    }

    fn post(&mut self, _request: &Request, handle: usize) -> Result<bool, Failure> {
        let mut state = self.0.tell();
        if state.is_full {
            state.refused += 1;
            return Ok(false);
        }
        state.posted.push(handle);
        state.pending += 1;
        Ok(true)
    }

    fn flush(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn pending(&self) -> usize {
        self.0.state.lock().pending
    }

    fn progress(&mut self) -> Result<bool, Failure> {
        let mut counter = [0u8; 8];
        let _ = rustix::io::read(&self.0.event, &mut counter);
        let mut state = self.0.tell();
        if state.is_broken {
            return Err(Self::failure("progress"));
        }
        if state.is_stuck {
            return Ok(false);
        }
        Ok(std::mem::take(&mut state.pending) > 0)
    }

    fn arm(&mut self) -> Result<bool, Failure> {
        Ok(true)
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }

    fn largest_bytes(&self) -> usize {
        usize::MAX
    }

    fn end(self) -> bool {
        let mut state = self.0.tell();
        if !state.stays {
            state.registered.clear();
        }
        !state.stays
    }
}

fn geometry() -> PoolGeometry {
    PoolGeometry {
        offset_bytes: 0,
        stride_bytes: BYTES / 4,
        slot_bytes: BYTES / 4,
        slot_count: 4,
    }
}

fn targets() -> Arc<Targets> {
    let metadata = AgentMetadata {
        incarnation: Incarnation(1),
        name: "peer".into(),
        regions: vec![RegionInfo {
            id: RegionId(9),
            generation: 5,
            len_bytes: BYTES,
            kind: MemoryKind::Host,
        }],
        pools: vec![PoolInfo {
            id: POOL,
            region: RegionId(9),
            geometry: geometry(),
        }],
        app: Bytes::new(),
    };
    let key = Key {
        region: RegionId(9),
        generation: 5,
        base: 0,
        key: Bytes::new(),
    };
    let card = Card {
        address: Bytes::new(),
        keys: vec![key],
    };
    Arc::new(Targets::new(&metadata, &card).unwrap())
}

/// One slot of `memory` and one of the peer.
fn runs(memory: &Memory) -> Arc<RunPairs> {
    let span = PoolSpan::new(memory.base_ptr(), BYTES, geometry()).unwrap();
    let remote = RemoteRun {
        pool: POOL,
        generation: 5,
        slot: 0,
        slot_count: 1,
    };
    Arc::new(RunPairs::of([(span.run(0, 1).unwrap(), remote)]))
}

/// A mover over `script` that is connected and knows `memory`.
fn mover(script: &Arc<Script>, memory: &Arc<Memory>) -> Mover {
    let fake = Fake(Arc::clone(script));
    let (mover, address) = Mover::start("kvgate-fake", move || Ok(fake)).unwrap();
    let deadline = Deadline::after(LONG);
    let shared = mover.shared();
    shared
        .connect(address, Vec::new(), targets(), deadline)
        .unwrap();
    shared.register(REGION, Arc::clone(memory)).unwrap();
    mover
}

fn memory() -> Arc<Memory> {
    Arc::new(Memory::host(BYTES).unwrap())
}

/// Runs `body` in another thread; the answer must come in time.
fn meanwhile<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> impl FnOnce() -> T {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        let _ = tell.send(body());
    });
    move || told.recv_timeout(LONG).expect("an answer in time")
}

fn transfer(mover: &Mover, runs: Arc<RunPairs>) -> impl FnOnce() -> Result<Moved, Error> {
    let shared = Arc::clone(mover.shared());
    let is_read = true;
    let landing = Arc::new(crate::landed::Landing::new(1));
    let transfer = Transfer {
        is_read,
        runs,
        landing,
    };
    meanwhile(move || shared.transfer(transfer))
}

fn has_let_go(memory: Arc<Memory>) -> bool {
    Arc::into_inner(memory).is_some()
}

#[test]
fn a_transfer_that_was_cut_off_has_ended_only_if_the_library_is_gone() {
    for (stays, is_broken) in [(false, false), (false, true), (true, false), (true, true)] {
        let script = Script::new(State {
            is_stuck: true,
            stays,
            ..State::default()
        });
        let memory = memory();
        let mover = mover(&script, &memory);
        let result = transfer(&mover, runs(&memory));
        script.await_state(|state| state.pending == 1);
        script.change(|state| state.is_broken = is_broken);
        mover.stop();
        let result = result().map_err(|error| error.kind().clone());
        let shared = mover.shared();
        assert!(shared.has_ended() && !shared.is_clean());
        assert_eq!(shared.is_left(), stays);
        match stays {
            true => assert_eq!(result, Ok(Moved::CutOff)),
            false => assert!(result.is_err(), "{result:?}"),
        }
        drop(mover);
        assert_eq!(has_let_go(memory), !stays, "the memory is as the library");
    }
}

fn forget(mover: &Mover) -> impl FnOnce() -> bool {
    let shared = Arc::clone(mover.shared());
    meanwhile(move || shared.forget(REGION))
}

#[test]
fn a_region_in_use_is_forgotten_behind_the_transfer() {
    let script = Script::new(State {
        is_stuck: true,
        ..State::default()
    });
    let memory = memory();
    let mover = mover(&script, &memory);
    let moved = transfer(&mover, runs(&memory));
    script.await_state(|state| state.pending == 1);
    let forgotten = forget(&mover);
    // Answered behind it: commands have an order.
    let again = mover.shared().register(REGION, Arc::clone(&memory));
    assert!(again.is_err(), "it is still registered");
    script.await_state(|state| state.registered.len() == 1 && state.pending == 1);
    script.change(|state| state.is_stuck = false);
    assert_eq!(
        moved().map_err(|error| error.kind().clone()),
        Ok(Moved::All)
    );
    assert!(forgotten());
    script.await_state(|state| state.registered.is_empty());
    assert!(has_let_go(memory));
}

#[test]
fn what_the_library_keeps_is_never_called_forgotten() {
    for stays in [false, true] {
        let script = Script::new(State {
            keeps: true,
            stays,
            ..State::default()
        });
        let memory = memory();
        let mover = mover(&script, &memory);
        assert!(!forget(&mover)());
        assert!(!forget(&mover)(), "and not the second time");
        assert!(!mover.shared().is_over());
        mover.stop();
        assert_eq!(mover.shared().is_over(), !stays);
        assert_eq!(forget(&mover)(), !stays, "the end is what counts");
        drop(mover);
        assert_eq!(has_let_go(memory), !stays);
    }
}

#[test]
fn a_region_is_forgotten_by_the_end_only_if_the_library_is_gone() {
    for stays in [false, true] {
        let script = Script::new(State {
            is_stuck: true,
            stays,
            ..State::default()
        });
        let memory = memory();
        let mover = mover(&script, &memory);
        let moved = transfer(&mover, runs(&memory));
        script.await_state(|state| state.pending == 1);
        let forgotten = forget(&mover);
        mover.stop();
        assert_eq!(forgotten(), !stays);
        assert_eq!(moved().is_err(), !stays);
    }
}

#[test]
fn a_registration_without_a_key_is_taken_back() {
    for keeps in [false, true] {
        let script = Script::new(State::default());
        let mover = mover(&script, &memory());
        script.change(|state| (state.is_keyless, state.keeps) = (true, keeps));
        let other = memory();
        let refused = mover.shared().register(RegionId(2), Arc::clone(&other));
        assert!(refused.is_err());
        script.await_state(|state| (state.registered.len() == 2) == keeps);
        assert_eq!(mover.shared().forget(RegionId(2)), !keeps);
        drop(mover);
        assert!(has_let_go(other), "the end lets go of everything");
    }
}

#[test]
fn a_transfer_without_room_goes_on_when_nobody_tells() {
    let script = Script::new(State {
        is_full: true,
        ..State::default()
    });
    let memory = memory();
    let mover = mover(&script, &memory);
    let moved = transfer(&mover, runs(&memory));
    script.await_state(|state| state.refused > 2);
    script.tell().is_full = false;
    assert_eq!(
        moved().map_err(|error| error.kind().clone()),
        Ok(Moved::All)
    );
}

#[test]
fn the_region_says_which_registration_is_used() {
    let script = Script::new(State::default());
    let memory = memory();
    let mover = mover(&script, &memory);
    // The same addresses, under another name.
    let shared = mover.shared();
    shared.register(RegionId(0), Arc::clone(&memory)).unwrap();
    shared.register(RegionId(2), Arc::clone(&memory)).unwrap();
    assert!(transfer(&mover, runs(&memory))().is_ok());
    script.await_state(|state| state.posted == [0]);
    assert!(forget(&mover)());
    let moved = transfer(&mover, runs(&memory))();
    assert!(
        moved.is_err(),
        "not with the registration of another region"
    );
}

/// What a link tells, in its order.
#[derive(Default)]
struct Ears {
    ends: Mutex<Vec<Quiesce>>,
    changed: Condvar,
}

impl Ears {
    fn await_end(&self) -> Quiesce {
        let deadline = Deadline::after(LONG);
        let mut ends = self.ends.lock();
        loop {
            if let Some(end) = ends.first() {
                return end.clone();
            }
            assert!(!deadline.has_passed(), "no end in time");
            self.changed.wait_until(&mut ends, deadline.instant());
        }
    }
}

impl LinkEvents for Ears {
    fn arrived(&self, _: PeerId, _: Arrival, _: Visibility) {}
    fn message(&self, _: PeerId, _: Bytes) {}
    fn completed(&self, _: PeerId, _: OpId, _: Result<Visibility, Error>) {}
    fn progress(&self, _: PeerId, _: u64) {}

    fn down(&self, _: PeerId, _: Cause, quiesce: Quiesce) {
        self.ends.lock().push(quiesce);
        self.changed.notify_all();
    }

    fn asked(&self, _: PeerId, _: ReadRequest) -> bool {
        false
    }

    fn resolve(&self, _: PeerId, _: &[RemoteRun]) -> Result<Resolved, Error> {
        Err(ErrorKind::Closed.into())
    }
}

/// A link over `mover`, and the peer's end of its channel.
fn link(mover: Mover, is_emulated: bool) -> (Arc<RmaLink>, Arc<Ears>, Socket) {
    let flags = SocketFlags::CLOEXEC;
    let (here, there) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let link = RmaLink::new(Parts {
        kind: Fake::KIND,
        channel: Channel::new(Socket::new(here).unwrap(), StopSignal::new().unwrap()),
        reader: FrameReader::new(false),
        mover,
        targets: targets(),
        is_emulated,
    });
    let ears = Arc::new(Ears::default());
    link.start(PEER, Arc::clone(&ears) as Arc<_>).unwrap();
    (Arc::new(link), ears, Socket::new(there).unwrap())
}

fn post(link: &Arc<RmaLink>, memory: &Memory) -> impl FnOnce() -> Result<Posted, Error> {
    let posted = PostedOp {
        id: OpId(1),
        op: Op::Read,
        priority: Priority::Foreground,
        runs: runs(memory),
        bytes: BYTES / 4,
        arrival: None,
        landing: Arc::new(crate::landed::Landing::new(1)),
    };
    let link = Arc::clone(link);
    meanwhile(move || link.post(&posted))
}

fn say_bye(peer: &Socket) {
    let mut words = Vec::new();
    wire::append_bye(&mut words);
    assert_eq!(peer.send_some(&words), Ok(words.len()));
}

/// The peer ends the connection, with a goodbye or without, over a transport that this side carries out.
#[test]
fn nothing_is_proven_while_a_transfer_of_this_side_may_go_on() {
    for (stays, has_bye) in [(false, false), (false, true), (true, false), (true, true)] {
        let script = Script::new(State {
            is_stuck: true,
            stays,
            ..State::default()
        });
        let memory = memory();
        let (link, ears, peer) = link(mover(&script, &memory), true);
        let posted = post(&link, &memory);
        script.await_state(|state| state.pending == 1);
        if has_bye {
            say_bye(&peer);
        }
        drop(peer);
        let end = ears.await_end();
        let posted = posted().map_err(|error| error.kind().clone());
        match stays {
            true => {
                assert!(matches!(end, Quiesce::Unprovable(_)), "{end:?}");
                assert_eq!(posted, Ok(Posted::Pending));
            }
            false => {
                assert_eq!(end, Quiesce::Proven);
                assert!(posted.is_err(), "{posted:?}");
            }
        }
        link.close();
        assert_eq!(link.quiesce(), end);
    }
}

/// Nothing of this side is under way, and the peer may have said that it is done.
#[test]
fn the_end_of_an_endpoint_that_was_left_proves_nothing() {
    for (stays, has_bye) in [(false, false), (false, true), (true, false), (true, true)] {
        let script = Script::new(State {
            stays,
            ..State::default()
        });
        let (link, ears, peer) = link(mover(&script, &memory()), true);
        if has_bye {
            say_bye(&peer);
        }
        drop(peer);
        let is_proven = ears.await_end() == Quiesce::Proven;
        assert_eq!(is_proven, !stays);
        link.close();
    }
}

/// Over a network that goes on by itself, with the goodbye here before this side closes.
#[test]
fn a_goodbye_that_came_is_the_proof_whoever_closes() {
    for has_bye in [false, true] {
        let script = Script::new(State::default());
        let (link, _ears, peer) = link(mover(&script, &memory()), false);
        if has_bye {
            say_bye(&peer);
        }
        link.close();
        assert_eq!(link.quiesce() == Quiesce::Proven, has_bye);
    }
}
