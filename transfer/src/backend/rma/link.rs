//! The link: a control channel beside a [`Mover`].

use super::Failure;
use super::mover::{Moved, Mover, Transfer};
use super::requests::Targets;
use crate::Arrival;
use crate::agent::wire::{self, Frame};
use crate::backend::channel::{self, Channel, Joined, Receiver, Reception, misplaced};
use crate::backend::reader::FrameReader;
use crate::backend::socket::{Bounds, StreamEnd};
use crate::backend::{Access, BackendKind, Caps, Link, LinkEvents, Posted, PostedOp, Quiesce};
use crate::deadline::Deadline;
use crate::engine::Op;
use crate::error::{Cause, Error, ErrorKind};
use crate::ids::PeerId;
use crate::sync::{Arc, AtomicBool, Mutex, Ordering};
use crate::visibility::Visibility;

/// How long the side that closes waits for the other one's goodbye.
const GOODBYE_MS: u64 = 250;

/// A connection whose payload goes through a library.
pub(crate) struct RmaLink {
    shared: Arc<Shared>,
    receiver: Receiver,
    /// What was read with the handshake; the receive thread takes it.
    reader: Mutex<Option<FrameReader>>,
    events: Mutex<Option<Arc<dyn LinkEvents>>>,
}

struct Shared {
    kind: BackendKind,
    channel: Channel,
    mover: Mover,
    targets: Arc<Targets>,
    /// What the peer writes is written by a thread of this side, which ends with the mover.
    is_emulated: bool,
    /// The peer has promised to store no more, and everything it stored is here.
    has_bye: AtomicBool,
}

/// What a link is made of.
pub(crate) struct Parts {
    pub(crate) kind: BackendKind,
    pub(crate) channel: Channel,
    pub(crate) reader: FrameReader,
    pub(crate) mover: Mover,
    pub(crate) targets: Arc<Targets>,
    pub(crate) is_emulated: bool,
}

impl RmaLink {
    /// A link over a connection whose handshake is done.
    pub(crate) fn new(parts: Parts) -> Self {
        Self {
            shared: Arc::new(Shared {
                kind: parts.kind,
                channel: parts.channel,
                mover: parts.mover,
                targets: parts.targets,
                is_emulated: parts.is_emulated,
                has_bye: AtomicBool::new(false),
            }),
            receiver: Receiver::new(),
            reader: Mutex::new(Some(parts.reader)),
            events: Mutex::new(None),
        }
    }

    /// Registers what the operation uses here and the handshake did not know.
    fn register_late(&self, op: &PostedOp) -> Result<(), Error> {
        let mover = self.shared.mover.shared();
        for id in mover.unknown(op.runs.local_regions()) {
            let events = self.events.lock().clone().ok_or(ErrorKind::Closed)?;
            // The operation holds it, so it stays.
            let region = events.region(id).ok_or(ErrorKind::Closed)?;
            let memory = region.memory().ok_or(ErrorKind::Closed)?;
            region.announce_end_to(Arc::clone(mover) as Arc<_>);
            mover.register(region.id, memory)?;
        }
        Ok(())
    }
}

impl Shared {
    /// The receive thread.
    fn receive(&self, mut reader: FrameReader, peer: PeerId, events: &dyn LinkEvents) {
        let channel = &self.channel;
        let mover = Arc::clone(self.mover.shared());
        let bounds = Bounds {
            process: Some(mover.death()),
            ..channel.bounds()
        };
        let last = || Bounds {
            stop: None,
            deadline: Some(Deadline::after_ms(GOODBYE_MS)),
            process: None,
            writable: None,
        };
        let end = channel::receive_to_the_end(
            channel,
            &mut reader,
            (bounds, last),
            (peer, events),
            &mut Nothing,
            // Our goodbye is under way, or the library was the first to hear of the peer's end.
            |end| channel.is_closed_here() || matches!(end, StreamEnd::PeerDead),
        );
        let was_closed_here = channel.is_closed_here();
        self.has_bye.store(end.is_ok(), Ordering::Release);
        self.end_endpoint();
        channel.socket.shutdown();
        if !was_closed_here {
            let cause = match mover.failure().filter(|_| end.is_err()) {
                Some(failure) => lost(failure),
                None => channel::cause(end),
            };
            events.down(peer, cause, self.proof());
        }
    }

    /// Ends the library's half and, if nothing was cut, tells the peer that nothing more is stored.
    fn end_endpoint(&self) {
        self.channel.stop.raise();
        self.mover.stop();
        if self.mover.shared().is_clean() {
            self.channel.farewell(wire::append_bye);
        }
    }

    fn proof(&self) -> Quiesce {
        let mover = self.mover.shared();
        let has_bye = self.has_bye.load(Ordering::Acquire);
        let reason = match () {
            () if !mover.has_ended() => "the endpoint is in use",
            // A goodbye speaks for the peer, not for the library here.
            () if mover.is_left() => "the library may still touch what was registered",
            () if has_bye || self.is_emulated => return Quiesce::Proven,
            () => "the network of the peer may still carry what it has sent",
        };
        Quiesce::Unprovable(Cause::Transfer(reason.into()))
    }
}

fn lost(failure: Failure) -> Cause {
    Cause::PeerLost {
        reason: Error::from(failure).to_string(),
    }
}

impl Link for RmaLink {
    fn start(&self, peer: PeerId, events: Arc<dyn LinkEvents>) -> Result<(), Error> {
        let reader = self.reader.lock().take().ok_or(ErrorKind::Closed)?;
        *self.events.lock() = Some(Arc::clone(&events));
        let shared = Arc::clone(&self.shared);
        let name = format!("kvgate-{}-{peer}", shared.kind);
        self.receiver
            .start(name, move || shared.receive(reader, peer, &*events))
    }

    fn kind(&self) -> BackendKind {
        self.shared.kind
    }

    fn caps(&self) -> Caps {
        Caps {
            completion: Visibility::RemoteVisible,
            max_descriptors: u64::MAX,
            arrival_in_band: true,
            access: Access::Direct,
        }
    }

    fn post(&self, op: &PostedOp) -> Result<Posted, Error> {
        if let Some(arrival) = &op.arrival {
            wire::check_arrival(arrival)?;
        }
        op.landing.begun_to(0);
        self.shared.targets.check(&op.runs)?;
        self.register_late(op)?;
        // The library does not say how much of a transfer that fails has landed.
        op.landing.begun();
        let transfer = Transfer {
            is_read: op.op == Op::Read,
            runs: Arc::clone(&op.runs),
            landing: Arc::clone(&op.landing),
        };
        match self.shared.mover.shared().transfer(transfer)? {
            Moved::All => {}
            // It may still touch memory, so this is no end of the operation. The end of the connection is
            // told next, and proves nothing.
            Moved::CutOff => return Ok(Posted::Pending),
        }
        let level = Visibility::RemoteVisible;
        if let Some(arrival) = op.arrival.as_ref().filter(|_| op.op == Op::Write) {
            self.announce(arrival, level)?;
        }
        Ok(Posted::Done(level))
    }

    fn announce(&self, arrival: &Arrival, level: Visibility) -> Result<(), Error> {
        wire::check_arrival(arrival)?;
        let frame = |words: &mut Vec<u8>| wire::append_arrival(words, level, arrival);
        self.shared.channel.send(frame)
    }

    fn send(&self, message: &[u8]) -> Result<(), Error> {
        wire::check_message(message)?;
        let frame = |words: &mut Vec<u8>| wire::append_message(words, message);
        self.shared.channel.send(frame)
    }

    fn send_progress(&self, counter: u64) -> Result<(), Error> {
        let frame = |words: &mut Vec<u8>| wire::append_progress(words, counter);
        self.shared.channel.send(frame)
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

impl RmaLink {
    fn end(&self, deadline: Option<Deadline>) -> Joined {
        self.shared.channel.close();
        self.shared.end_endpoint();
        self.shared.channel.socket.shutdown_send();
        let joined = self.receiver.join(deadline);
        *self.events.lock() = None;
        joined
    }
}

impl Drop for RmaLink {
    fn drop(&mut self) {
        self.close();
    }
}

/// Everything else goes through the library.
struct Nothing;

impl Reception for Nothing {
    fn frame(&mut self, frame: Frame, _reader: &mut FrameReader) -> Result<(), StreamEnd> {
        Err(misplaced(&frame))
    }
}
