//! A peer on this host whose memory this side reaches by itself: what shm and cma have in common.
//!
//! Control goes through a ring in each direction, and over an abstract Unix socket beside it (`ring.rs`). A
//! write is: copy the runs, then one arrival frame. A read is the copy alone. The ring orders the copies before
//! the frame as the socket does, so the peer sees the bytes when it reads the frame; local completion and
//! visibility at the peer coincide here, and only here.
//!
//! Death: a pidfd of the peer's process. Readable means that its whole thread group is gone, and with
//! it every store it could make (I-9). A closed socket alone proves nothing: a process that lives may
//! still copy; so after it the pidfd gets a little patience, and then the answer is `Unprovable`. A
//! stopped process is neither: nothing happens until it goes on, and its heartbeat (`pulse.rs`) says no more
//! than that nobody attends there. `Bye` is the peer's word that it stores no more, sent under the same lock
//! that every copy holds.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::time::Duration;

use super::channel::{self, Channel, Joined, Receiver};
use super::mailbox::{Line, Mailbox};
use super::process::PeerProcess;
use super::reader::FrameReader;
use super::socket::{Bounds, StreamEnd};
use super::{
    Access, BackendKind, Caps, Link, LinkEvents, PoolPair, Posted, PostedOp, Quiesce, Readiness,
    RemoteRun,
};
use crate::Arrival;
use crate::agent::metadata::AgentMetadata;
use crate::agent::wire::{self, Frame};
use crate::deadline::Deadline;
use crate::engine::Op;
use crate::error::{Cause, Error, ErrorKind};
use crate::ids::{PeerId, PoolId, RegionId};
use crate::mem::span::{PoolSpan, SlotRun};
use crate::stall::StallCause;
use crate::sync::{Arc, AtomicBool, Mutex, Ordering, fence};
use crate::visibility::Visibility;

/// The thread that posts sends arrivals of at most so much itself.
const SHORT_NOTE_BYTES: usize = 1024;
const SHORT_TICKETS: usize = 64;
/// An arrival with so much is no longer than this.
const SHORT_FRAME_BYTES: usize = 64 + SHORT_NOTE_BYTES + 4 * SHORT_TICKETS;
/// How long the side that closes waits for the other one's goodbye.
const GOODBYE_MS: u64 = 250;
/// How long a process may take to end after its socket has closed before it counts as alive. Memory
/// is torn down before the socket closes, so this does not grow with the pools.
const DEATH_PATIENCE_MS: u64 = 2_000;

/// How the bytes get from one process to the other.
pub(super) trait Reach: Send + Sync + 'static {
    /// Which backend this is.
    const KIND: BackendKind;
    /// Copies every run of an operation, unless `copying` says that it is to stop.
    fn copy(&self, op: &PostedOp, copying: &Copying<'_>) -> Result<(), Error>;
    /// Length of the pages of a region that is mapped here.
    fn granule_bytes(&self, region: RegionId) -> Option<u64> {
        let _ = region;
        None
    }
}

/// What a copy needs of its link.
pub(super) struct Copying<'a> {
    pub(super) process: &'a PeerProcess,
    is_closing: &'a AtomicBool,
}

impl<'a> Copying<'a> {
    pub(super) fn new(process: &'a PeerProcess, is_closing: &'a AtomicBool) -> Self {
        Self {
            process,
            is_closing,
        }
    }
    /// Asked between two pieces.
    pub(super) fn go_on(&self) -> Result<(), Error> {
        match self.is_closing.load(Ordering::Relaxed) {
            true => Err(ErrorKind::Closed.into()),
            false => Ok(()),
        }
    }
}

/// The pools of the peer, at the addresses at which this side reaches them.
pub(super) struct PeerPools {
    spans: BTreeMap<PoolId, PoolSpan>,
}

impl PeerPools {
    /// The pools of the regions that `place` knows: first byte and length.
    pub(super) fn new(
        peer: &AgentMetadata,
        place: impl Fn(RegionId) -> Option<(*mut u8, u64)>,
    ) -> Self {
        let spans = peer.pools.iter().filter_map(|pool| {
            let (base, len_bytes) = place(pool.region)?;
            Some((pool.id, PoolSpan::new(base, len_bytes, pool.geometry)?))
        });
        Self {
            spans: spans.collect(),
        }
    }

    /// Every slot of the peer's side of a pair of pools, checked to have slot `last` and their length.
    pub(super) fn whole(&self, pools: &PoolPair, last: u32) -> Result<SlotRun, Error> {
        let local = pools.local.section(0, 1);
        let remote = RemoteRun {
            pool: pools.remote,
            generation: pools.generation,
            slot: last,
            slot_count: 1,
        };
        self.find(&local, &remote)?;
        let pool = pools.remote;
        let span = self
            .spans
            .get(&pool)
            .ok_or(ErrorKind::UnknownPool { pool })?;
        let all = span.run(0, span.geometry().slot_count);
        Ok(all.ok_or(ErrorKind::UnknownPool { pool })?)
    }

    /// The peer's side of a run, checked against its geometry.
    pub(super) fn find(&self, local: &SlotRun, remote: &RemoteRun) -> Result<SlotRun, Error> {
        let pool = remote.pool;
        let span = self
            .spans
            .get(&pool)
            .ok_or(ErrorKind::UnknownPool { pool })?;
        let found = span
            .run(remote.slot, remote.slot_count)
            .ok_or(ErrorKind::SlotOutOfRange {
                pool,
                slot: remote.slot,
                slot_count: span.geometry().slot_count,
            })?;
        if local.slot_bytes != found.slot_bytes || local.slot_count != found.slot_count {
            return Err(ErrorKind::LengthMismatch {
                local_count: local.payload_bytes(),
                remote_count: found.payload_bytes(),
            }
            .into());
        }
        Ok(found)
    }
}

/// A connection to such a peer.
pub(super) struct NeighbourLink<R: Reach> {
    shared: Arc<Shared<R>>,
    receiver: Receiver,
    /// What was read with the handshake; the receive thread takes it.
    reader: Mutex<Option<FrameReader>>,
}

struct Shared<R> {
    line: Arc<Line>,
    reach: R,
    /// Copies stop at the next piece.
    is_closing: AtomicBool,
    /// The peer has promised to store no more.
    has_bye: AtomicBool,
    /// The peer's end of the socket is closed: its process ends now, or has broken the protocol.
    has_hung_up: AtomicBool,
}

impl<R: Reach> NeighbourLink<R> {
    /// A link to `process`, whose handshake is done.
    pub(super) fn new(
        channel: Channel,
        reader: FrameReader,
        process: PeerProcess,
        reach: R,
    ) -> Result<Self, Error> {
        let line = Arc::new(Line::new(channel, process)?);
        Ok(Self {
            shared: Arc::new(Shared {
                line,
                reach,
                is_closing: AtomicBool::new(false),
                has_bye: AtomicBool::new(false),
                has_hung_up: AtomicBool::new(false),
            }),
            receiver: Receiver::new(),
            reader: Mutex::new(Some(reader)),
        })
    }
}

impl<R: Reach> Shared<R> {
    /// The receive thread.
    fn receive(&self, reader: FrameReader, peer: PeerId, events: Arc<dyn LinkEvents>) {
        let channel = &self.line.channel;
        let mailbox = Mailbox::new(reader, self.line.clone(), peer, events.clone());
        let (mut mailbox, mut end) = mailbox.receive();
        // The peer's goodbye is the proof that it stores no more, and one that has come is kept.
        if end.is_err() && mailbox.reader.is_between_frames() && channel.is_closed_here() {
            end = mailbox.receive_last(self.last_bounds());
        }
        let was_closed_here = channel.is_closed_here();
        self.note_end(&end);
        self.stop_storing();
        channel.socket.shutdown();
        if !was_closed_here {
            events.down(peer, channel::cause(end), self.proof());
        }
    }

    /// How long a goodbye is waited for.
    fn last_bounds(&self) -> Bounds<'_> {
        Bounds {
            stop: None,
            deadline: Some(Deadline::after_ms(GOODBYE_MS)),
            process: Some(self.line.process.as_fd()),
            writable: None,
        }
    }

    fn note_end(&self, end: &Result<(), StreamEnd>) {
        let is_silent = matches!(end, Err(StreamEnd::Stopped | StreamEnd::TimedOut));
        self.has_hung_up
            .store(end.is_err() && !is_silent, Ordering::Release);
        self.has_bye.store(end.is_ok(), Ordering::Release);
    }

    /// The goodbye of a peer whose link ends before it was started: nobody hears what comes before it.
    fn hear_out(&self, reader: &mut FrameReader) {
        let bounds = self.last_bounds();
        let end = loop {
            match reader.next(&self.line.channel.socket, bounds) {
                Ok(Frame::Bye | Frame::Refuse(_)) => break Ok(()),
                Ok(_) => {}
                Err(end) => break Err(end),
            }
        };
        self.note_end(&end);
        self.line.channel.socket.shutdown();
    }

    /// Ends what the worker does, and tells the peer that nothing is stored any more: the goodbye
    /// needs the lock that every copy holds.
    fn stop_storing(&self) {
        self.is_closing.store(true, Ordering::Release);
        self.line.channel.stop.raise();
        self.line.channel.farewell(wire::append_bye);
    }

    /// Waits only for the process behind a socket that was closed without a goodbye.
    fn proof(&self) -> Quiesce {
        let patience_ms = match self.has_hung_up.load(Ordering::Acquire) {
            true => DEATH_PATIENCE_MS,
            false => 0,
        };
        let deadline = Deadline::after_ms(patience_ms);
        if self.has_bye.load(Ordering::Acquire) || self.line.process.has_ended(deadline) {
            return Quiesce::Proven;
        }
        // It had its patience; who asks later hears at once.
        self.has_hung_up.store(false, Ordering::Release);
        Quiesce::Unprovable(Cause::Transfer(
            "the process of the peer lives and may still write".into(),
        ))
    }
}

impl<R: Reach> Link for NeighbourLink<R> {
    fn start(&self, peer: PeerId, events: Arc<dyn LinkEvents>) -> Result<(), Error> {
        // Held until the thread is known, so that a close finds either of the two.
        let mut slot = self.reader.lock();
        let reader = slot.take().ok_or(ErrorKind::Closed)?;
        let shared = Arc::clone(&self.shared);
        self.receiver
            .start(format!("kvgate-{}-{peer}", R::KIND), move || {
                shared.receive(reader, peer, events);
            })
    }

    fn kind(&self) -> BackendKind {
        R::KIND
    }

    fn caps(&self) -> Caps {
        Caps {
            completion: Visibility::RemoteVisible,
            max_descriptors: u64::MAX,
            arrival_in_band: true,
            access: Access::Direct,
        }
    }

    fn readiness(&self, op: &PostedOp) -> Readiness {
        let has_frame = |arrival: &Arrival| {
            arrival.note.len() <= SHORT_NOTE_BYTES && arrival.tickets.len() <= SHORT_TICKETS
        };
        let is_short = op.op == Op::Read || op.arrival.as_ref().is_none_or(has_frame);
        match is_short && self.shared.line.channel.takes_at_once(SHORT_FRAME_BYTES) {
            true => Readiness::Copies,
            false => Readiness::Waits,
        }
    }

    fn rouse(&self) {
        self.shared.line.channel.rouse();
    }

    fn post(&self, op: &PostedOp) -> Result<Posted, Error> {
        if let Some(arrival) = &op.arrival {
            wire::check_arrival(arrival)?;
        }
        let shared = &self.shared;
        op.landing.begun_to(0);
        // Held over the copy, so that a goodbye comes only after it.
        let mut sender = shared.line.channel.sender()?;
        let copying = Copying::new(&shared.line.process, &shared.is_closing);
        op.landing.begun();
        shared.reach.copy(op, &copying).inspect_err(|error| {
            // Whoever copies knows what it has copied; what a process that has ended got is void.
            if !matches!(error.kind(), ErrorKind::PeerLost { .. }) {
                op.landing.settle();
            }
        })?;
        // The ring and the socket order the copies before the frame; this is for a copy by the kernel too.
        fence(Ordering::Release);
        let level = Visibility::RemoteVisible;
        if let Some(arrival) = op.arrival.as_ref().filter(|_| op.op == Op::Write) {
            sender.send(|words| wire::append_arrival(words, level, arrival))?;
        }
        Ok(Posted::Done(level))
    }

    fn announce(&self, arrival: &Arrival, level: Visibility) -> Result<(), Error> {
        wire::check_arrival(arrival)?;
        let frame = |words: &mut Vec<u8>| wire::append_arrival(words, level, arrival);
        self.shared.line.channel.send(frame)
    }

    fn send(&self, message: &[u8]) -> Result<(), Error> {
        wire::check_message(message)?;
        let frame = |words: &mut Vec<u8>| wire::append_message(words, message);
        self.shared.line.channel.send(frame)
    }

    fn send_progress(&self, counter: u64) -> Result<(), Error> {
        let frame = |words: &mut Vec<u8>| wire::append_progress(words, counter);
        self.shared.line.channel.send(frame)
    }

    fn stalled_on(&self, op: &PostedOp) -> StallCause {
        if self.shared.line.process.is_stopped() {
            return StallCause::PeerStopped;
        }
        // Behind the copy there is only the frame that tells of it; before it, what others send.
        let channel = &self.shared.line.channel;
        match op.landing.now().is_complete() || !channel.takes_bytes() {
            true => StallCause::SocketFull,
            false => StallCause::Copy,
        }
    }

    fn heartbeat(&self) -> Option<Duration> {
        self.shared.line.channel.heartbeat()
    }

    fn granule_bytes(&self, region: RegionId) -> Option<u64> {
        self.shared.reach.granule_bytes(region)
    }

    fn quiesce(&self) -> Quiesce {
        self.shared.proof()
    }

    fn close(&self) {
        let _ = self.end(None);
    }

    fn close_within(&self, deadline: Deadline) -> bool {
        self.end(Some(deadline)) != Joined::Left
    }
}

impl<R: Reach> NeighbourLink<R> {
    fn end(&self, deadline: Option<Deadline>) -> Joined {
        self.shared.line.channel.close();
        self.shared.stop_storing();
        self.shared.line.channel.socket.shutdown_send();
        if self.shared.line.is_attended_here() {
            // The receive thread ends once this one has let go of the ring.
            return Joined::Ended;
        }
        let joined = self.receiver.join(deadline);
        if joined == Joined::NeverStarted {
            let mut slot = self.reader.lock();
            if let Some(mut reader) = slot.take() {
                self.shared.hear_out(&mut reader);
            }
        }
        joined
    }
}

impl<R: Reach> Drop for NeighbourLink<R> {
    fn drop(&mut self) {
        self.close();
    }
}
