//! Transfers over a TCP stream: one message per transfer, answered after it was applied.
//!
//! A write is its frame (what goes where, and the arrival) and then the bytes, straight from the slots
//! they lie in. The receiver checks everything before it takes the first byte of payload, reads
//! straight into the slots, tells the engine, and only then answers: the answer is what makes an
//! operation `RemoteVisible`. A write that is refused is drained and answered with the reason; bytes
//! that are no frame end the connection.
//!
//! A long operation is sent in parts, so that answers and the other direction get their turn; only the
//! last part of a write carries the arrival and is answered.
//!
//! A read is a request that makes the peer push: its worker checks the slots as for a write, and answers
//! with their bytes, straight from where they lie, or with the reason why not (`reads.rs`).
//!
//! Proof of quiescence: this side does the copying for its peer, so when the receive thread is past
//! the connection, nothing of the peer is written any more (I-9).
//!
//! A connection that breaks is not the end where both sides keep a session (`tcp/session.rs`): the receive thread
//! leaves it for good, gets the next one, by connecting again or from the listener, and everything that was not
//! handled is sent again under its old number. The thread is the same, so the proof is too.
//!
//! A peer whose host is silent keeps its connection until the kernel's own limits (keep-alive: about
//! 40 s when nothing is under way). A stopped peer is not dead, and nothing here ends by time.

mod incoming;
pub(crate) mod session;

use rustix::io::Errno;
use rustix::net::sockopt;

use self::incoming::{Incoming, Progress, check_length, refused_by_engine};
use self::session::{Attempts, Next, Terms};
use super::channel::{self, Channel, Joined, Receiver};
use super::parts::Parts;
use super::reader::FrameReader;
use super::reads::Reads;
use super::socket::{Bounds, StopSignal, StreamEnd};
use super::{
    Access, BackendKind, Caps, Link, LinkEvents, Posted, PostedOp, Quiesce, ReadRequest, Resolved,
};
use crate::Arrival;
use crate::agent::wire::{self, Refusal};
use crate::deadline::Deadline;
use crate::engine::Op;
use crate::engine::session::{Handover, Session};
use crate::error::{Cause, Error, ErrorKind};
use crate::ids::PeerId;
use crate::mem::iovec::RawVectors;
use crate::stall::StallCause;
use crate::sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering};
use crate::visibility::Visibility;

/// Bytes that each direction of a socket may hold. Over loopback the buffers that the kernel grows by
/// itself leave the caches: 2.3 GB/s against 3.8 with this length (8,448-byte slots, two cores). A host
/// that allows less gives less.
const SOCKET_BUFFER_BYTES: usize = 512 * 1024;

/// Sets a connected socket up.
pub(crate) fn tune(socket: impl std::os::fd::AsFd) -> Result<(), Error> {
    let set =
        |result: Result<(), Errno>| result.map_err(|errno| Error::system("setsockopt", errno));
    let seconds = std::time::Duration::from_secs;
    let length = SOCKET_BUFFER_BYTES;
    set(sockopt::set_tcp_nodelay(&socket, true))?;
    set(sockopt::set_socket_send_buffer_size(&socket, length))?;
    set(sockopt::set_socket_recv_buffer_size(&socket, length))?;
    set(sockopt::set_socket_keepalive(&socket, true))?;
    set(sockopt::set_tcp_keepidle(&socket, seconds(10)))?;
    set(sockopt::set_tcp_keepintvl(&socket, seconds(5)))?;
    set(sockopt::set_tcp_keepcnt(&socket, 6))
}

/// A session with one peer, over one connection after the other.
pub(crate) struct TcpLink {
    shared: Arc<Shared>,
    receiver: Receiver,
    /// What was read with the handshake; the receive thread takes it.
    reader: Mutex<Option<FrameReader>>,
}

pub(crate) struct Shared {
    session: Session<Arc<Channel>, Item, Refusal>,
    handover: Handover<Next>,
    /// Without them the session ends with its first connection.
    terms: Option<Terms>,
    /// Raised when the link is closed.
    stop: StopSignal,
    reads: Reads,
    /// Of the answers to reads of the peer.
    served_bytes: AtomicU64,
    is_closed_here: AtomicBool,
    /// The receive thread will not touch memory again.
    is_past: AtomicBool,
    /// For answers that the sending thread finds; from the start to the end.
    ears: Mutex<Option<(PeerId, Arc<dyn LinkEvents>)>>,
}

/// What has a number, and is kept until the peer has handled it. The memory of a write is kept by the engine until
/// it hears of the end (I-21).
#[derive(Clone)]
enum Item {
    Write(Arc<PostedOp>),
    Message(Arc<[u8]>),
}

/// Tells the engine that an item was handled.
#[derive(Clone, Copy)]
struct Told<'a> {
    peer: PeerId,
    events: &'a dyn LinkEvents,
}

impl Told<'_> {
    fn tell(&self, item: Item, refusal: Option<Refusal>) {
        let Self { peer, events } = *self;
        match (item, refusal) {
            (Item::Message(frame), _) => events.acknowledged(peer, 1, frame.len()),
            (Item::Write(op), None) => {
                events.completed(peer, op.id, Ok(Visibility::RemoteVisible));
            }
            (Item::Write(op), Some(Refusal { reason, .. })) => {
                events.settled(peer, op.id);
                events.completed(peer, op.id, Err(ErrorKind::Refused { reason }.into()));
            }
        }
    }
}

impl TcpLink {
    /// Over a connection that is all there is, and whose handshake is done.
    pub(super) fn alone(channel: Channel, stop: StopSignal, reader: FrameReader) -> Arc<dyn Link> {
        Arc::new(Self::new(channel, stop, reader, None))
    }

    /// Over the first connection of a session.
    pub(super) fn in_session(
        channel: Channel,
        stop: StopSignal,
        reader: FrameReader,
        terms: Terms,
    ) -> Arc<dyn Link> {
        let waits = terms
            .waits_as()
            .map(|session| (session, terms.desk.clone()));
        let link = Self::new(channel, stop, reader, Some(terms));
        if let Some((session, desk)) = waits {
            desk.enter(session, Arc::downgrade(&link.shared));
        }
        Arc::new(link)
    }

    fn new(channel: Channel, stop: StopSignal, reader: FrameReader, terms: Option<Terms>) -> Self {
        Self {
            shared: Arc::new(Shared {
                session: Session::new(Arc::new(channel)),
                handover: Handover::new(),
                terms,
                stop,
                reads: Reads::new(),
                served_bytes: AtomicU64::new(0),
                is_closed_here: AtomicBool::new(false),
                is_past: AtomicBool::new(false),
                ears: Mutex::new(None),
            }),
            receiver: Receiver::new(),
            reader: Mutex::new(Some(reader)),
        }
    }
}

/// The receive thread.
impl Shared {
    fn receive(&self, mut reader: FrameReader, peer: PeerId, events: &dyn LinkEvents) {
        let mut progress = match &self.terms {
            Some(terms) => terms.progress(),
            None => session::progress_alone(),
        };
        let mut attempts = Attempts::default();
        let end = loop {
            let Some((number, channel)) = self.session.connection() else {
                break None; // closed
            };
            let end = self.receive_on(
                (number, &channel),
                &mut reader,
                &mut progress,
                (peer, events),
            );
            if self.is_closed_here() {
                break None; // `close` says goodbye, and seals it
            }
            // A worker that waits for the socket must not wait for a peer that is gone, and none sends over
            // this connection behind the end of what it sends (I-21).
            channel.stop.raise();
            let terms = self.terms.as_ref();
            let terms = terms.filter(|_| is_break(&end) && progress.is_complete());
            if terms.is_none() {
                channel.farewell(wire::append_bye); // so that the peer does not try again
            }
            channel.socket.shutdown();
            channel.seal();
            let Some(terms) = terms.filter(|_| !self.is_closed_here()) else {
                break Some(channel::cause(end));
            };
            self.session.suspend();
            let cause = channel::cause(end);
            events.suspended(peer, cause.clone());
            let handled = progress.received.through();
            attempts.note((handled, self.session.answered_through()));
            match self.reconnect(terms, handled, &mut attempts) {
                Ok(next) => reader = next,
                Err(why) => break why.map(|why| with(&cause, &why)),
            }
            events.resumed(peer);
            // Whoever claimed the next connection meanwhile has not seen this one.
            if self.handover.is_claimed()
                && let Some((_, channel)) = self.session.connection()
            {
                give_up(&channel);
            }
        };
        if !self.is_closed_here() {
            self.end();
        }
        self.reads.settle();
        self.is_past.store(true, Ordering::Release);
        if let Some(cause) = end.filter(|_| !self.is_closed_here()) {
            events.down(peer, cause, Quiesce::Proven);
        }
    }

    fn receive_on(
        &self,
        (connection, channel): (u64, &Channel),
        reader: &mut FrameReader,
        progress: &mut Progress,
        (peer, events): (PeerId, &dyn LinkEvents),
    ) -> Result<(), StreamEnd> {
        let bounds = Bounds {
            writable: Some(channel),
            ..channel.bounds()
        };
        if connection > 1 {
            progress.repeat(channel);
        }
        let mut incoming = Incoming {
            shared: self,
            connection,
            channel,
            progress,
            bounds,
            peer,
            events,
            vectors: RawVectors::new(),
            refused: None,
            applied_slots: 0,
            is_within: false,
        };
        let end = channel::receive(channel, reader, bounds, (peer, events), &mut incoming);
        let is_whole = !incoming.is_within && reader.is_between_frames();
        if !matches!(end, Err(StreamEnd::Stopped)) || !is_whole || self.is_closed_here() {
            return end;
        }
        // Somebody else has found the end first; a goodbye that has come before it wins. Nothing is handled behind
        // a close (I-9), also one out of a callback.
        let rest = Bounds {
            stop: Some(&self.stop),
            deadline: Some(Deadline::now()),
            ..bounds
        };
        match channel::receive(channel, reader, rest, (peer, events), &mut incoming) {
            Ok(()) => Ok(()),
            Err(_) => end,
        }
    }

    /// No connection is taken and nothing is sent from here on. Gives back the last one.
    fn end(&self) -> Option<Arc<Channel>> {
        let last = self.session.close();
        self.handover.close();
        if let Some(terms) = &self.terms {
            terms.leave();
        }
        *self.ears.lock() = None;
        last
    }

    fn is_closed_here(&self) -> bool {
        self.is_closed_here.load(Ordering::Acquire)
    }
}

/// Whether another connection may go on where this one has ended: the peer has not said goodbye, and what ended it
/// may be the fault of what lies between. A frame that is whole and means nothing is the peer's own.
fn is_break(end: &Result<(), StreamEnd>) -> bool {
    match end {
        Ok(()) => false,
        Err(StreamEnd::Wire(error)) => error.may_be_noise(),
        Err(_) => true,
    }
}

/// The cause of a break, and why it was the end.
fn with(cause: &Cause, why: &str) -> Cause {
    Cause::PeerLost {
        reason: match cause {
            Cause::PeerLost { reason } => format!("{reason}; {why}"),
            cause => format!("{cause}; {why}"),
        },
    }
}

/// Whoever has the turn.
impl Shared {
    /// Takes an item in and sends what is to be sent.
    fn push(&self, item: Item) -> Result<(), Error> {
        self.session.push(item).ok_or_else(|| self.over())?;
        self.pump();
        Ok(())
    }

    /// Why nothing is taken any more.
    fn over(&self) -> Error {
        if self.is_closed_here() {
            return ErrorKind::Closed.into();
        }
        let reason = "the connection has ended".into();
        ErrorKind::PeerLost { reason }.into()
    }

    fn pump(&self) {
        let send =
            |(_, channel): (u64, &Arc<Channel>), number: u64, item: &Item, is_again: bool| {
                if is_again && let Some((peer, events)) = self.ears() {
                    let op = match item {
                        Item::Write(op) => {
                            op.landing.repeated();
                            Some(op.id)
                        }
                        Item::Message(_) => None,
                    };
                    events.sent_again(peer, op);
                }
                let sent = match item {
                    Item::Write(op) => self.write(channel, number, op),
                    Item::Message(frame) => {
                        channel.send(|words| wire::append_numbered(words, number, frame))
                    }
                };
                sent.inspect_err(|_| give_up(channel)).is_ok()
            };
        self.session.pump(send, |item, refusal| {
            if let Some((peer, events)) = self.ears() {
                Told {
                    peer,
                    events: &*events,
                }
                .tell(item, refusal);
            }
        });
    }

    fn ears(&self) -> Option<(PeerId, Arc<dyn LinkEvents>)> {
        self.ears.lock().clone()
    }

    fn write(&self, channel: &Channel, number: u64, op: &PostedOp) -> Result<(), Error> {
        let mut sender = channel.sender()?;
        let mut parts = Parts::new(op.runs.clone());
        while let Some(part) = parts.next() {
            op.landing.begun_again_to(part.slots.end);
            let arrival = op.arrival.as_ref().filter(|_| part.is_last);
            let frame = |words: &mut Vec<u8>| {
                wire::append_write(
                    words,
                    number,
                    part.is_last,
                    part.payload_bytes,
                    part.remote,
                    arrival,
                );
            };
            sender.send_payload(frame, op, part.local, |bytes| op.landing.moved(bytes))?;
        }
        Ok(())
    }

    /// The operation of a write that was not answered yet.
    fn write_of(&self, number: u64) -> Option<crate::ids::OpId> {
        match self.session.item(number)? {
            Item::Write(op) => Some(op.id),
            Item::Message(_) => None,
        }
    }

    /// Sends requests for what was not asked for, or only over a former connection.
    fn ask(&self) {
        let Some((connection, channel)) = self.session.connection() else {
            return; // asked for when there is another one
        };
        let send = |words: &mut Vec<u8>| {
            let sent = channel.send(|out| out.append(words));
            sent.inspect_err(|_| give_up(&channel)).is_ok()
        };
        let mut words = Vec::new();
        let again = self.reads.ask_again(connection, &mut words);
        if let Some((peer, events)) = self.ears().filter(|_| !again.is_empty()) {
            again
                .into_iter()
                .for_each(|op| events.sent_again(peer, Some(op)));
        }
        if !words.is_empty() && !send(&mut words) {
            return;
        }
        while self.reads.ask(connection, &mut words) {
            if !send(&mut words) {
                return;
            }
        }
    }

    /// A frame that is not kept: where there is no connection, or none any more, nobody gets it.
    fn send_if_up(&self, frame: impl FnOnce(&mut Vec<u8>)) -> Result<(), Error> {
        match self.session.connection() {
            Some((_, channel)) => {
                if channel.send(frame).is_err() {
                    give_up(&channel);
                }
                Ok(())
            }
            None if self.session.is_closed() => Err(self.over()),
            None => Ok(()),
        }
    }
}

/// Has the receive thread find the end of a connection that took no more.
fn give_up(channel: &Channel) {
    channel.stop.raise();
    channel.socket.shutdown();
}

impl Link for TcpLink {
    fn start(&self, peer: PeerId, events: Arc<dyn LinkEvents>) -> Result<(), Error> {
        let reader = self.reader.lock().take().ok_or(ErrorKind::Closed)?;
        let shared = Arc::clone(&self.shared);
        *shared.ears.lock() = Some((peer, events.clone()));
        self.receiver.start(format!("kvgate-tcp-{peer}"), move || {
            shared.receive(reader, peer, &*events);
        })
    }

    fn kind(&self) -> BackendKind {
        BackendKind::Tcp
    }

    fn caps(&self) -> Caps {
        Caps {
            completion: Visibility::RemoteVisible,
            max_descriptors: u64::MAX,
            arrival_in_band: true,
            access: Access::Checked,
        }
    }

    fn post(&self, op: &PostedOp) -> Result<Posted, Error> {
        op.landing.begun_to(0);
        match op.op {
            Op::Write => {
                if let Some(arrival) = &op.arrival {
                    wire::check_arrival(arrival)?;
                }
                self.shared.push(Item::Write(Arc::new(op.clone())))?;
            }
            Op::Read => {
                if self.shared.session.is_closed() {
                    return Err(self.shared.over());
                }
                self.shared.reads.add(op);
                self.shared.ask();
            }
        }
        Ok(Posted::Pending)
    }

    fn serve(&self, request: &ReadRequest, source: Result<Resolved, Error>) -> Result<(), Error> {
        let shared = &self.shared;
        let connection = shared.session.connection();
        // Over another connection it is asked for again.
        let Some((_, channel)) = connection.filter(|(number, _)| *number == request.connection)
        else {
            return Ok(());
        };
        let checked = source
            .map_err(|error| refused_by_engine(&error))
            .and_then(|source| {
                check_length(&source, request.payload_bytes)?;
                Ok(source)
            });
        let served = channel.sender().and_then(|mut sender| match checked {
            Ok(source) => {
                let head = |words: &mut Vec<u8>| {
                    wire::append_data(words, request.id, request.payload_bytes);
                };
                let served = &shared.served_bytes;
                let moved = |bytes| _ = served.fetch_add(bytes, Ordering::Relaxed);
                sender.send_payload(head, &source, &source.runs, moved)
            }
            Err(refusal) => sender.send(|words| wire::append_no_data(words, request.id, &refusal)),
        });
        if served.is_err() {
            give_up(&channel);
        }
        Ok(())
    }

    fn announce(&self, arrival: &Arrival, level: Visibility) -> Result<(), Error> {
        wire::check_arrival(arrival)?;
        self.shared
            .send_if_up(|words| wire::append_arrival(words, level, arrival))
    }

    fn send(&self, message: &[u8]) -> Result<(), Error> {
        wire::check_message(message)?;
        self.shared.push(Item::Message(message.into()))
    }

    fn send_progress(&self, counter: u64) -> Result<(), Error> {
        self.shared
            .send_if_up(|words| wire::append_progress(words, counter))
    }

    fn keeps_messages(&self) -> bool {
        self.shared.terms.is_some()
    }

    fn unsent_messages(&self) -> usize {
        let is_message = |item: &Item| matches!(item, Item::Message(_));
        self.shared.session.unsent_count(is_message)
    }

    fn go_on(&self) {
        self.shared.pump();
        self.shared.ask();
    }

    fn stalled_on(&self, _op: &PostedOp) -> StallCause {
        match self.shared.session.connection() {
            None => StallCause::Suspended,
            Some((_, channel)) if channel.takes_bytes() => StallCause::NotAnswered,
            Some(_) => StallCause::SocketFull,
        }
    }

    fn activity(&self) -> u64 {
        self.shared.served_bytes.load(Ordering::Relaxed)
    }

    fn quiesce(&self) -> Quiesce {
        // Before `start` nothing was read.
        if self.shared.is_past.load(Ordering::Acquire) || self.reader.lock().is_some() {
            return Quiesce::Proven;
        }
        Quiesce::Unprovable(Cause::Transfer("the connection is still being read".into()))
    }

    fn close(&self) {
        let _ = self.end(None);
    }

    fn close_within(&self, deadline: Deadline) -> bool {
        self.end(Some(deadline)) != Joined::Left
    }
}

impl TcpLink {
    fn end(&self, deadline: Option<Deadline>) -> Joined {
        let shared = &self.shared;
        shared.is_closed_here.store(true, Ordering::Release);
        shared.stop.raise();
        if let Some(channel) = shared.end() {
            channel.close();
            channel.farewell(wire::append_bye);
            channel.socket.shutdown();
        }
        if self.receiver.is_current() {
            // An event is told between two frames, and after the signal none is read.
            shared.is_past.store(true, Ordering::Release);
        }
        self.receiver.join(deadline)
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.close();
    }
}
