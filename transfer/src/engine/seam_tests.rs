//! The engine against a link that does what a test says: ends that come early, late or never.

use std::sync::mpsc::{Receiver, Sender, channel};

use bytes::Bytes;

use crate::{
    Agent, Arrival, Deadline, DescriptorList, Epoch, Event, Memory, MemoryRegion, Op, PostOptions,
    PreparedTransfer, Recorder, SourceReady, Status, TransferHandle,
    agent::metadata::{AgentMetadata, PoolInfo, RegionInfo},
    arc_dyn,
    backend::{
        Access, BackendKind, Caps, Link, LinkEvents, Posted, PostedOp, Quiesce, Readiness,
        RemoteRun,
    },
    engine::{Engine, FlightLedger, notify},
    error::{Cause, Error, ErrorKind},
    ids::{Incarnation, OpId, PeerId, PoolId, RegionId},
    mem::{MemoryKind, PoolGeometry},
    sync::{Arc, Mutex},
    visibility::Visibility,
};

const THEIR_REGION: RegionId = RegionId(0);
const THEIR_POOL: PoolId = PoolId(0);

type OnPost = fn(&Script, &PostedOp) -> Result<Posted, Error>;

/// What the test and the link share.
struct Script {
    events: Mutex<Option<(PeerId, Arc<dyn LinkEvents>)>>,
    on_post: OnPost,
    readiness: Readiness,
    is_proven: bool,
    posted: Sender<OpId>,
    frames: Sender<Vec<u8>>,
}

impl Script {
    fn events(&self) -> (PeerId, Arc<dyn LinkEvents>) {
        self.events.lock().clone().unwrap()
    }

    fn complete(&self, op: OpId) {
        let (peer, events) = self.events();
        events.completed(peer, op, Ok(Visibility::RemoteVisible));
    }

    fn lose(&self) {
        let (peer, events) = self.events();
        events.down(peer, lost(), self.verdict());
    }

    fn verdict(&self) -> Quiesce {
        match self.is_proven {
            true => Quiesce::Proven,
            false => Quiesce::Unprovable(lost()),
        }
    }
}

struct Scripted(Arc<Script>);

impl Link for Scripted {
    fn start(&self, peer: PeerId, events: Arc<dyn LinkEvents>) -> Result<(), Error> {
        *self.0.events.lock() = Some((peer, events));
        Ok(())
    }

    fn kind(&self) -> BackendKind {
        BackendKind::Local
    }

    fn caps(&self) -> Caps {
        Caps {
            completion: Visibility::RemoteVisible,
            max_descriptors: 16,
            arrival_in_band: true,
            access: Access::Direct,
        }
    }

    fn post(&self, op: &PostedOp) -> Result<Posted, Error> {
        let result = (self.0.on_post)(&self.0, op);
        // Nobody listens any more once a test has ended.
        let _ = self.0.posted.send(op.id);
        result
    }

    fn readiness(&self, _: &PostedOp) -> Readiness {
        self.0.readiness
    }

    fn announce(&self, _: &Arrival, _: Visibility) -> Result<(), Error> {
        Ok(())
    }

    fn send(&self, message: &[u8]) -> Result<(), Error> {
        let _ = self.0.frames.send(message.to_vec());
        Ok(())
    }

    fn send_progress(&self, _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn quiesce(&self) -> Quiesce {
        self.0.verdict()
    }

    fn close(&self) {
        drop(self.0.events.lock().take());
    }
}

/// An agent with one region of four slots, and a peer with another.
struct Rig {
    agent: Agent,
    peer: PeerId,
    script: Arc<Script>,
    region: MemoryRegion,
    posted: Receiver<OpId>,
    frames: Receiver<Vec<u8>>,
}

impl Rig {
    fn new(is_proven: bool, on_post: OnPost) -> Self {
        Self::with_slots_of(16, is_proven, on_post)
    }

    /// Slots of the peer have `slot_bytes` bytes, ours 16.
    fn with_slots_of(slot_bytes: u64, is_proven: bool, on_post: OnPost) -> Self {
        let agent = Agent::builder("here").build().unwrap();
        Self::of(agent, Readiness::Waits, slot_bytes, is_proven, on_post)
    }

    fn of(
        agent: Agent,
        readiness: Readiness,
        slot_bytes: u64,
        is_proven: bool,
        on_post: OnPost,
    ) -> Self {
        let memory = Arc::new(Memory::host(64).unwrap());
        let region = agent.register(memory, &[geometry(16)]).unwrap();
        let (posted_by_link, posted) = channel();
        let (frames_of_link, frames) = channel();
        let script = Arc::new(Script {
            events: Mutex::new(None),
            on_post,
            readiness,
            is_proven,
            posted: posted_by_link,
            frames: frames_of_link,
        });
        let metadata = AgentMetadata {
            incarnation: Incarnation(1),
            name: "there".to_owned(),
            regions: vec![RegionInfo {
                id: THEIR_REGION,
                generation: 1,
                len_bytes: 4 * slot_bytes,
                kind: MemoryKind::Host,
            }],
            pools: vec![PoolInfo {
                id: THEIR_POOL,
                region: THEIR_REGION,
                geometry: geometry(slot_bytes),
            }],
            app: Bytes::new(),
        };
        let told = agent.engine().describe();
        let link = arc_dyn!(Scripted(script.clone()) => dyn Link);
        let peer = Engine::attach(agent.engine(), link, metadata, &told).unwrap();
        drop(told);
        Self {
            agent,
            peer,
            script,
            region,
            posted,
            frames,
        }
    }

    fn prepare(&self) -> Result<PreparedTransfer, Error> {
        let mut local = DescriptorList::new();
        let mut remote = DescriptorList::remote(Incarnation(1));
        local.push(self.region.pools()[0], &[1]);
        remote.push(THEIR_POOL, &[2]);
        self.agent.prepare(Op::Write, &local, &remote, self.peer)
    }

    /// Posts, with a source whose life the test sees and a ledger of its own.
    fn post(&self) -> (TransferHandle, Arc<()>, Arc<FlightLedger>) {
        let (source, ledger) = (Arc::new(()), FlightLedger::new(Epoch(1)));
        let options = PostOptions {
            keepalive: Some(Box::new(source.clone())),
            ledger: Some(ledger.clone()),
            ..PostOptions::default()
        };
        let transfer = self.prepare().unwrap();
        let ready = SourceReady::host_written();
        let handle = self.agent.post(&transfer, ready, options).unwrap();
        ledger.close();
        (handle, source, ledger)
    }

    fn next_posted(&self) -> OpId {
        self.posted.recv_timeout(patience().remaining()).unwrap()
    }

    fn next_frame(&self) -> Vec<u8> {
        self.frames.recv_timeout(patience().remaining()).unwrap()
    }

    fn receives(&self, frame: Vec<u8>) {
        let (peer, events) = self.script.events();
        events.message(peer, frame.into());
    }
}

fn geometry(slot_bytes: u64) -> PoolGeometry {
    PoolGeometry {
        offset_bytes: 0,
        stride_bytes: slot_bytes,
        slot_bytes,
        slot_count: 4,
    }
}

fn lost() -> Cause {
    Cause::PeerLost {
        reason: "the test says so".to_owned(),
    }
}

fn patience() -> Deadline {
    Deadline::after_ms(20_000)
}

/// Neither the source nor the ledger has been told of an end.
fn assert_kept(source: &Arc<()>, ledger: &Arc<FlightLedger>) {
    assert_eq!(Arc::strong_count(source), 2, "the source is kept");
    assert_eq!(ledger.unquiet().operations, 1);
    assert!(FlightLedger::poll(ledger).is_none());
}

fn assert_released(source: &Arc<()>, ledger: &Arc<FlightLedger>) {
    assert_eq!(Arc::strong_count(source), 1, "the source is given back");
    assert!(FlightLedger::poll(ledger).is_some());
}

#[test]
fn the_source_is_kept_until_the_link_tells_the_end() {
    let rig = Rig::new(true, |_, _| Ok(Posted::Pending));
    let (handle, source, ledger) = rig.post();
    let op = rig.next_posted();
    handle.cancel();
    assert!(matches!(handle.status(), Status::InFlight), "too late");
    assert_kept(&source, &ledger);
    rig.script.complete(op);
    assert!(matches!(handle.wait(patience()), Status::Done(_)));
    assert_released(&source, &ledger);
    rig.script.complete(op);
    assert_eq!(rig.agent.counters().transfers, 1, "an end counts once");
}

#[test]
fn an_end_that_overtakes_the_post_is_not_lost() {
    let rig = Rig::new(true, |script, op| {
        script.complete(op.id);
        Ok(Posted::Pending)
    });
    let (handle, source, ledger) = rig.post();
    assert!(matches!(handle.wait(patience()), Status::Done(_)));
    assert_released(&source, &ledger);
}

#[test]
fn what_a_peer_lost_without_proof_may_touch_is_kept_for_good() {
    for in_post in [false, true] {
        let rig = Rig::new(
            false,
            match in_post {
                false => |_, _| Ok(Posted::Pending),
                true => |script, _| {
                    script.lose();
                    Ok(Posted::Pending)
                },
            },
        );
        let (handle, source, ledger) = rig.post();
        rig.next_posted();
        if !in_post {
            rig.script.lose();
        }
        let end = handle.wait(patience());
        assert!(matches!(end, Status::Unknown(_)), "{end:?}");
        assert_kept(&source, &ledger);
        assert_eq!(rig.agent.counters().unknown_transfers, 1);
        let status = rig.agent.status();
        let [lost] = &status.transfers[..] else {
            panic!("{status:?}");
        };
        assert_eq!(lost.state, crate::TransferState::Unknown);
        assert!(lost.cause.is_some() && status.unknown_transfer_count == 1);
        let (region, error) = rig.region.close(Deadline::now()).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::RegionBusy { .. }),
            "{error}"
        );
        let report = rig.agent.shutdown(patience());
        assert_eq!(report.unknown_operations, 1);
        drop(region);
        assert_kept(&source, &ledger);
    }
}

#[test]
fn what_a_peer_proven_dead_had_is_given_back() {
    for in_post in [false, true] {
        let rig = Rig::new(
            true,
            match in_post {
                false => |_, _| Ok(Posted::Pending),
                true => |script, _| {
                    script.lose();
                    Ok(Posted::Pending)
                },
            },
        );
        let (handle, source, ledger) = rig.post();
        rig.next_posted();
        if !in_post {
            rig.script.lose();
        }
        assert!(matches!(handle.wait(patience()), Status::Failed(_)));
        assert_released(&source, &ledger);
        assert!(rig.region.close(patience()).is_ok());
    }
}

#[test]
fn a_revocation_is_answered_behind_the_last_operation() {
    let rig = Rig::new(true, |_, _| Ok(Posted::Pending));
    let transfer = rig.prepare().unwrap();
    let (one, other) = (rig.post(), rig.post());
    let (first, second) = (rig.next_posted(), rig.next_posted());
    rig.receives(notify::encode_revoke(THEIR_REGION));
    let revoked = ErrorKind::PoolRevoked { pool: THEIR_POOL };
    assert_eq!(*rig.prepare().unwrap_err().kind(), revoked);
    let ready = SourceReady::host_written();
    let refused = rig.agent.post(&transfer, ready, PostOptions::default());
    assert_eq!(*refused.unwrap_err().error.kind(), revoked);

    // What was answered too early stands in front of the next message.
    rig.script.complete(first);
    rig.agent.send(rig.peer, b"between").unwrap();
    assert_eq!(rig.next_frame(), notify::encode_message(b"between"));
    rig.script.complete(second);
    assert_eq!(rig.next_frame(), notify::encode_revoke_ack(THEIR_REGION));
    assert!(matches!(one.0.wait(patience()), Status::Done(_)));
    assert!(matches!(other.0.wait(patience()), Status::Done(_)));
}

#[test]
fn a_revocation_of_an_unused_region_is_answered_at_once() {
    let rig = Rig::new(true, |_, _| Ok(Posted::Pending));
    rig.receives(notify::encode_revoke(THEIR_REGION));
    assert_eq!(rig.next_frame(), notify::encode_revoke_ack(THEIR_REGION));
}

#[test]
fn a_peer_that_writes_by_itself_is_asked_and_awaited() {
    let rig = Rig::new(true, |_, _| Ok(Posted::Pending));
    let id = rig.region.id();
    let (region, error) = rig.region.close(Deadline::after_ms(1)).unwrap_err();
    let expected = ErrorKind::RegionBusy {
        region: id,
        outstanding: 0,
        unheard_peers: 1,
    };
    assert_eq!(*error.kind(), expected);
    let asked = rig.frames.recv_timeout(patience().remaining()).unwrap();
    assert_eq!(asked, notify::encode_revoke(id));
    let (peer, events) = rig.script.events();
    events.message(peer, notify::encode_revoke_ack(id).into());
    assert!(region.close(patience()).is_ok());
}

#[test]
fn a_write_of_the_peer_keeps_the_region_and_another_registration_is_refused() {
    let rig = Rig::new(true, |_, _| Ok(Posted::Pending));
    let (peer, events) = rig.script.events();
    let core = rig.agent.engine().regions.get(rig.region.id()).unwrap();
    let run = |generation| RemoteRun {
        pool: rig.region.pools()[0],
        generation,
        slot: 0,
        slot_count: 2,
    };
    let refused = events
        .resolve(peer, &[run(core.generation + 1)])
        .unwrap_err();
    assert!(
        matches!(refused.kind(), ErrorKind::PoolRevoked { .. }),
        "{refused}"
    );
    assert_eq!(core.outstanding(), 0, "what is refused holds nothing");
    let resolved = events.resolve(peer, &[run(core.generation)]).unwrap();
    assert_eq!(core.outstanding(), 1);
    drop(resolved);
    assert_eq!(core.outstanding(), 0);
    assert!(core.revoke());
    let refused = events.resolve(peer, &[run(core.generation)]).unwrap_err();
    assert!(
        matches!(refused.kind(), ErrorKind::PoolRevoked { .. }),
        "{refused}"
    );
}

#[test]
fn slots_of_other_sizes_are_refused_with_both_sizes() {
    for theirs in [8, 32] {
        let rig = Rig::with_slots_of(theirs, true, |_, _| Ok(Posted::Pending));
        let expected = ErrorKind::SlotBytesMismatch {
            local: rig.region.pools()[0],
            local_bytes: 16,
            remote: THEIR_POOL,
            remote_bytes: theirs,
        };
        assert_eq!(*rig.prepare().unwrap_err().kind(), expected);
    }
}

#[test]
fn a_peer_lost_without_proof_never_lets_go() {
    let rig = Rig::new(false, |_, _| Ok(Posted::Pending));
    let (region, _) = rig.region.close(Deadline::after_ms(1)).unwrap_err();
    rig.script.lose();
    let (_region, error) = region.close(Deadline::after_ms(1)).unwrap_err();
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
}

/// Hears of stalls.
struct Stalled(Sender<OpId>);

impl Recorder for Stalled {
    fn record(&self, event: &Event) {
        if let Event::Stalled { op, .. } = event {
            let _ = self.0.send(*op);
        }
    }
}

/// Where the copy of the thread that posts waits, until somebody has heard of it.
static HEARD: std::sync::Mutex<Option<Receiver<OpId>>> = std::sync::Mutex::new(None);

#[test]
fn a_copy_by_the_thread_that_posts_is_watched_like_any_other() {
    let (stalled, heard) = channel();
    *HEARD.lock().unwrap() = Some(heard);
    let config = crate::TransferConfig {
        stall_ms: 20,
        ..Default::default()
    };
    let agent = Agent::builder("here").config(config);
    let agent = agent.recorder(Arc::new(Stalled(stalled))).build().unwrap();
    let rig = Rig::of(agent, Readiness::Copies, 16, true, |_, op| {
        let heard = HEARD.lock().unwrap().take().unwrap();
        let stalled = heard.recv_timeout(patience().remaining());
        assert_eq!(stalled, Ok(op.id), "nobody has said that it stands");
        Ok(Posted::Done(Visibility::RemoteVisible))
    });
    let (handle, ..) = rig.post();
    // It has been executed by this thread.
    assert!(matches!(handle.status(), Status::Done(_)));
}
