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
//! A peer whose host is silent keeps its connection until the kernel's own limits (keep-alive: about
//! 40 s when nothing is under way). A stopped peer is not dead, and nothing here ends by time.

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::sockopt;

use super::channel::{self, Channel, Receiver, Reception, misplaced};
use super::parts::Parts;
use super::reader::FrameReader;
use super::reads::Reads;
use super::socket::{Bounds, StreamEnd};
use super::{
    Access, BackendKind, Caps, Link, LinkEvents, Posted, PostedOp, Quiesce, ReadRequest, Resolved,
};
use crate::Arrival;
use crate::agent::wire::{self, Frame, Refusal, WireError, WriteHead};
use crate::engine::Op;
use crate::error::{Cause, Error, ErrorKind};
use crate::ids::{OpId, PeerId};
use crate::mem::iovec::{Held, RawVectors};
use crate::mem::span::SlotRun;
use crate::stall::StallCause;
use crate::sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering};
use crate::visibility::Visibility;

/// Code of a refusal whose reason the engine gave.
const REFUSED_BY_ENGINE: u16 = 16;
/// Code of a refusal because the lengths do not fit.
const REFUSED_LENGTH: u16 = 17;

/// Bytes that each direction of a socket may hold. Over loopback the buffers that the kernel grows by
/// itself leave the caches: 2.3 GB/s against 3.8 with this length (8,448-byte slots, two cores). A host
/// that allows less gives less.
const SOCKET_BUFFER_BYTES: usize = 512 * 1024;

/// Sets a connected socket up.
pub(crate) fn tune(socket: impl std::os::fd::AsFd) -> Result<(), Error> {
    let set =
        |result: Result<(), Errno>| result.map_err(|errno| Error::system("setsockopt", errno));
    let seconds = std::time::Duration::from_secs;
    set(sockopt::set_tcp_nodelay(&socket, true))?;
    set(sockopt::set_socket_send_buffer_size(
        &socket,
        SOCKET_BUFFER_BYTES,
    ))?;
    set(sockopt::set_socket_recv_buffer_size(
        &socket,
        SOCKET_BUFFER_BYTES,
    ))?;
    set(sockopt::set_socket_keepalive(&socket, true))?;
    set(sockopt::set_tcp_keepidle(&socket, seconds(10)))?;
    set(sockopt::set_tcp_keepintvl(&socket, seconds(5)))?;
    set(sockopt::set_tcp_keepcnt(&socket, 6))
}

/// A connection to one peer.
pub(crate) struct TcpLink {
    shared: Arc<Shared>,
    receiver: Receiver,
    /// What was read with the handshake; the receive thread takes it.
    reader: Mutex<Option<FrameReader>>,
}

struct Shared {
    channel: Channel,
    reads: Reads,
    /// Of the answers to reads of the peer.
    served_bytes: AtomicU64,
    /// The receive thread will not touch memory again.
    is_past: AtomicBool,
}

impl TcpLink {
    /// A link over a connection whose handshake is done.
    pub(crate) fn new(channel: Channel, reader: FrameReader) -> Self {
        Self {
            shared: Arc::new(Shared {
                channel,
                reads: Reads::new(),
                served_bytes: AtomicU64::new(0),
                is_past: AtomicBool::new(false),
            }),
            receiver: Receiver::new(),
            reader: Mutex::new(Some(reader)),
        }
    }
}

impl Shared {
    /// The receive thread.
    fn receive(&self, mut reader: FrameReader, peer: PeerId, events: &dyn LinkEvents) {
        let channel = &self.channel;
        let bounds = Bounds {
            writable: Some(channel),
            ..channel.bounds()
        };
        let mut incoming = Incoming {
            channel,
            reads: &self.reads,
            bounds,
            peer,
            events,
            vectors: RawVectors::new(),
            refused: None,
            applied: None,
        };
        let end = channel::receive(channel, &mut reader, bounds, (peer, events), &mut incoming);
        drop(incoming);
        self.reads.settle();
        self.is_past.store(true, Ordering::Release);
        let was_closed_here = channel.is_closed_here();
        // A worker that waits for the socket must not wait for a peer that is gone.
        channel.stop.raise();
        channel.socket.shutdown();
        if !was_closed_here {
            events.down(peer, channel::cause(end), Quiesce::Proven);
        }
    }
}

impl Shared {
    fn write(&self, op: &PostedOp) -> Result<Posted, Error> {
        if let Some(arrival) = &op.arrival {
            wire::check_arrival(arrival)?;
        }
        op.landing.begun_to(0);
        let mut sender = self.channel.sender()?;
        let mut parts = Parts::new(op.runs.clone());
        while let Some(part) = parts.next() {
            op.landing.begun_to(part.slots.end);
            let arrival = op.arrival.as_ref().filter(|_| part.is_last);
            let frame = |words: &mut Vec<u8>| {
                wire::append_write(
                    words,
                    op.id,
                    part.is_last,
                    part.payload_bytes,
                    part.remote,
                    arrival,
                );
            };
            sender.send_payload(frame, op, part.local, |bytes| op.landing.moved(bytes))?;
        }
        Ok(Posted::Pending)
    }

    fn read(&self, op: &PostedOp) -> Result<Posted, Error> {
        op.landing.begun_to(0);
        let mut sender = self.channel.sender()?;
        self.reads.add(op);
        let mut words = Vec::new();
        while self.reads.ask(&mut words) {
            if sender.send(|out| out.append(&mut words)).is_err() {
                // Bytes may come for what was asked, so this is no end of the operation: the end of the
                // connection is, once the receive thread is past it.
                self.channel.stop.raise();
                self.channel.socket.shutdown();
                break;
            }
        }
        Ok(Posted::Pending)
    }
}

impl Link for TcpLink {
    fn start(&self, peer: PeerId, events: Arc<dyn LinkEvents>) -> Result<(), Error> {
        let reader = self.reader.lock().take().ok_or(ErrorKind::Closed)?;
        let shared = Arc::clone(&self.shared);
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
        match op.op {
            Op::Write => self.shared.write(op),
            Op::Read => self.shared.read(op),
        }
    }

    fn serve(&self, request: &ReadRequest, source: Result<Resolved, Error>) -> Result<(), Error> {
        let mut sender = self.shared.channel.sender()?;
        let checked = source
            .map_err(|error| refused_by_engine(&error))
            .and_then(|source| {
                check_length(&source, request.payload_bytes)?;
                Ok(source)
            });
        match checked {
            Ok(source) => {
                let head = |words: &mut Vec<u8>| {
                    wire::append_data(words, request.id, request.payload_bytes);
                };
                let served = &self.shared.served_bytes;
                let moved = |bytes| _ = served.fetch_add(bytes, Ordering::Relaxed);
                sender.send_payload(head, &source, &source.runs, moved)
            }
            Err(refusal) => sender.send(|words| wire::append_no_data(words, request.id, &refusal)),
        }
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

    fn stalled_on(&self, _op: &PostedOp) -> StallCause {
        match self.shared.channel.takes_bytes() {
            true => StallCause::NotAnswered,
            false => StallCause::SocketFull,
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
        let channel = &self.shared.channel;
        channel.close();
        channel.farewell(wire::append_bye);
        channel.socket.shutdown();
        if self.receiver.is_current() {
            // An event is told between two frames, and after the signal none is read.
            self.shared.is_past.store(true, Ordering::Release);
        }
        self.receiver.join();
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.close();
    }
}

fn refused_by_engine(error: &Error) -> Refusal {
    Refusal {
        code: REFUSED_BY_ENGINE,
        reason: error.to_string(),
    }
}

/// Whether the slots hold as many bytes as the peer says.
fn check_length(resolved: &Resolved, payload_bytes: u64) -> Result<(), Refusal> {
    let sum = |total: u64, run: &SlotRun| total.saturating_add(run.payload_bytes());
    let slots_bytes = resolved.runs.iter().fold(0, sum);
    if slots_bytes == payload_bytes {
        return Ok(());
    }
    Err(Refusal {
        code: REFUSED_LENGTH,
        reason: format!("{payload_bytes} bytes of payload for slots of {slots_bytes} bytes"),
    })
}

/// What the receive thread does with the peer's operations, and with the answers to ours.
struct Incoming<'a> {
    channel: &'a Channel,
    reads: &'a Reads,
    bounds: Bounds<'a>,
    peer: PeerId,
    events: &'a dyn LinkEvents,
    vectors: RawVectors,
    /// A write of which a part was refused: its other parts are not applied either.
    refused: Option<(OpId, Refusal)>,
    /// A write of which parts were applied and others are to come, and the slots of those parts.
    applied: Option<(OpId, u64)>,
}

impl Reception for Incoming<'_> {
    fn frame(&mut self, frame: Frame, reader: &mut FrameReader) -> Result<(), StreamEnd> {
        match frame {
            Frame::Write(head) => self.write(head, reader),
            Frame::Ack { op, level } => {
                self.events.completed(self.peer, op, Ok(level));
                Ok(())
            }
            Frame::Landed { op, slot_count } => {
                self.events.landed(self.peer, op, 0..slot_count);
                Ok(())
            }
            Frame::Nack { op, refusal } => {
                // Every part that was applied has been told before, on the same stream.
                self.events.settled(self.peer, op);
                self.failed(op, refusal);
                Ok(())
            }
            Frame::Read(request) => {
                let request_id = request.id;
                match self.events.asked(self.peer, request) {
                    true => Ok(()),
                    false => Err(bad_value("read beyond the window", request_id)),
                }
            }
            Frame::Data {
                request,
                payload_bytes,
            } => self.data(request, payload_bytes, reader),
            Frame::NoData { request, refusal } => {
                let asked = self.reads.take(request);
                let asked = asked.ok_or_else(|| bad_value("answer without a request", request))?;
                self.answered(asked.op, Err(refusal));
                Ok(())
            }
            other => Err(misplaced(&other)),
        }
    }
}

fn bad_value(field: &'static str, value: u64) -> StreamEnd {
    StreamEnd::Wire(WireError::BadValue { field, value })
}

impl Incoming<'_> {
    fn write(&mut self, head: WriteHead, reader: &mut FrameReader) -> Result<(), StreamEnd> {
        if self.refused.as_ref().is_some_and(|(op, _)| *op != head.op) {
            self.refused = None; // that operation was cut off by its sender
        }
        if self.refused.is_none() {
            match self.resolve(&head) {
                Ok(resolved) => self.apply(&resolved, &resolved.runs, reader, |_| {})?,
                Err(refusal) => self.refused = Some((head.op, refusal)),
            }
        }
        if self.refused.is_some() {
            reader.discard(head.payload_bytes, &self.channel.socket, self.bounds)?;
        }
        if !head.is_last {
            self.tell_applied(&head);
            return Ok(());
        }
        self.applied = None;
        if let Some((op, refusal)) = self.refused.take() {
            self.channel
                .answer(|words| wire::append_nack(words, op, &refusal));
            return Ok(());
        }
        let level = Visibility::RemoteVisible;
        if let Some(arrival) = head.arrival {
            self.events.arrived(self.peer, arrival, level);
        }
        self.channel
            .answer(|words| wire::append_ack(words, head.op, level));
        Ok(())
    }

    /// Tells how much of a write has landed, part by part.
    fn tell_applied(&mut self, head: &WriteHead) {
        if self.refused.is_some() {
            return;
        }
        let before = self.applied.filter(|(op, _)| *op == head.op);
        let before = before.map_or(0, |(_, slot_count)| slot_count);
        let in_part = head.runs.iter().map(|run| u64::from(run.slot_count));
        let slot_count = in_part.fold(before, u64::saturating_add);
        self.applied = Some((head.op, slot_count));
        self.channel
            .answer(|words| wire::append_landed(words, head.op, slot_count));
    }

    /// Every run, checked by the engine, before the first byte of payload is read.
    fn resolve(&self, head: &WriteHead) -> Result<Resolved, Refusal> {
        let resolved = self.events.resolve(self.peer, &head.runs);
        let resolved = resolved.map_err(|error| refused_by_engine(&error))?;
        check_length(&resolved, head.payload_bytes)?;
        Ok(resolved)
    }

    /// The bytes of a part of a read of ours.
    fn data(
        &mut self,
        request: u64,
        payload_bytes: u64,
        reader: &mut FrameReader,
    ) -> Result<(), StreamEnd> {
        let asked = self.reads.take(request);
        let asked = asked.ok_or_else(|| bad_value("answer without a request", request))?;
        if asked.payload_bytes != payload_bytes {
            return Err(bad_value("payload_bytes", payload_bytes));
        }
        let moved = |bytes| asked.landing.moved(bytes);
        self.apply(&asked, &asked.local, reader, moved)?;
        asked.landing.landed(asked.slots);
        self.answered(asked.op, Ok(()));
        Ok(())
    }

    /// A part of a read of ours is over; asks for what has room now.
    fn answered(&self, op: OpId, answer: Result<(), Refusal>) {
        match self.reads.answered(op, answer) {
            Some(Ok(())) => {
                let level = Visibility::RemoteVisible;
                self.events.completed(self.peer, op, Ok(level));
            }
            Some(Err(refusal)) => {
                self.events.settled(self.peer, op);
                self.failed(op, refusal);
            }
            None => {}
        }
        let mut words = Vec::new();
        while self.reads.ask(&mut words) {
            self.channel.answer(|out| out.append(&mut words));
        }
    }

    fn failed(&self, op: OpId, refusal: Refusal) {
        let reason = refusal.reason;
        let error = ErrorKind::Refused { reason }.into();
        self.events.completed(self.peer, op, Err(error));
    }

    /// Reads payload into slots that `held_by` keeps; `moved` hears how many bytes have come.
    fn apply(
        &mut self,
        held_by: &impl Held,
        runs: &[SlotRun],
        reader: &mut FrameReader,
        moved: impl Fn(u64),
    ) -> Result<(), StreamEnd> {
        let mut payload = self.vectors.scatter(held_by, runs);
        let ahead = payload.copy_from(reader.ahead());
        reader.consume(ahead);
        moved(ahead as u64);
        let socket = &self.channel.socket;
        while payload.left_bytes() > 0 {
            if self.bounds.is_stopped() {
                return Err(StreamEnd::Stopped);
            }
            match payload.receive(socket) {
                Ok(0) => return Err(StreamEnd::Cut),
                Ok(count) => moved(count as u64),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    socket.wait(PollFlags::IN, self.bounds)?;
                }
                Err(errno) => return Err(StreamEnd::Io(errno)),
            }
        }
        Ok(())
    }
}
