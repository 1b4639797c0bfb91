//! The receiving half: what the peer sends over one connection of a session, each item once (I-27).

use std::collections::VecDeque;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::{Shared, Told};
use crate::agent::wire::{self, Frame, Refusal, WireError, WriteHead};
use crate::backend::channel::{Channel, Reception, misplaced};
use crate::backend::reader::FrameReader;
use crate::backend::socket::{Bounds, StreamEnd};
use crate::backend::{LinkEvents, Resolved};
use crate::engine::session::{OutOfRange, Received, Take};
use crate::error::{Error, ErrorKind};
use crate::ids::{OpId, PeerId};
use crate::mem::iovec::{Held, RawVectors};
use crate::mem::span::SlotRun;
use crate::visibility::Visibility;

/// Code of a refusal whose reason the engine gave.
const REFUSED_BY_ENGINE: u16 = 16;
/// Code of a refusal because the lengths do not fit.
const REFUSED_LENGTH: u16 = 17;
/// Most refusals that are kept for a peer that may not have heard of them. With more the session ends with its
/// connection.
const REFUSALS_KEPT: usize = 4096;

/// How far the peer's items have come, over all connections of a session.
pub(super) struct Progress {
    pub(super) received: Received,
    /// Writes that were refused, and how many of their slots were applied before, for as long as the peer may not
    /// have heard of it.
    refusals: VecDeque<(u64, Refusal, u64)>,
    /// The peer has at most so many unanswered items.
    most_items: u64,
    /// A refusal was forgotten that the peer may not have heard of.
    is_forgetful: bool,
}

impl Progress {
    pub(super) fn new(every_items: u64, every_bytes: u64, most_items: u64) -> Self {
        Self {
            received: Received::new(every_items, every_bytes),
            refusals: VecDeque::new(),
            most_items,
            is_forgetful: false,
        }
    }

    /// Whether another connection could go on from here.
    pub(super) fn is_complete(&self) -> bool {
        !self.is_forgetful
    }

    fn refuse(&mut self, number: u64, refusal: Refusal, applied_slots: u64) {
        let heard = number.saturating_sub(self.most_items);
        while self.refusals.front().is_some_and(|(n, ..)| *n <= heard) {
            self.refusals.pop_front();
        }
        if self.refusals.len() == REFUSALS_KEPT {
            self.refusals.pop_front();
            self.is_forgetful = true;
        }
        self.refusals.push_back((number, refusal, applied_slots));
    }

    /// Says over a new connection how far this side has come, and what it has refused.
    pub(super) fn repeat(&mut self, channel: &Channel) {
        for (number, refusal, applied_slots) in &self.refusals {
            channel.answer(|words| {
                if *applied_slots > 0 {
                    wire::append_landed(words, *number, *applied_slots);
                }
                wire::append_nack(words, *number, refusal);
            });
        }
        let through = self.received.tell();
        channel.answer(|words| wire::append_ack(words, through, Visibility::RemoteVisible));
    }
}

pub(super) fn refused_by_engine(error: &Error) -> Refusal {
    Refusal {
        code: REFUSED_BY_ENGINE,
        reason: error.to_string(),
    }
}

/// Whether the slots hold as many bytes as the peer says.
pub(super) fn check_length(resolved: &Resolved, payload_bytes: u64) -> Result<(), Refusal> {
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
pub(super) struct Incoming<'a> {
    pub(super) shared: &'a Shared,
    /// The number of the connection.
    pub(super) connection: u64,
    pub(super) channel: &'a Channel,
    pub(super) progress: &'a mut Progress,
    pub(super) bounds: Bounds<'a>,
    pub(super) peer: PeerId,
    pub(super) events: &'a dyn LinkEvents,
    pub(super) vectors: RawVectors,
    /// Why a part of the write under way was refused: its other parts are not applied either.
    pub(super) refused: Option<Refusal>,
    /// Slots of the parts of the write under way that were applied.
    pub(super) applied_slots: u64,
    /// A frame was not handled to its end, so that what is read next may be its payload.
    pub(super) is_within: bool,
}

impl Reception for Incoming<'_> {
    fn frame(&mut self, frame: Frame, reader: &mut FrameReader) -> Result<(), StreamEnd> {
        self.is_within = true;
        self.handle(frame, reader)?;
        self.is_within = false;
        Ok(())
    }

    fn is_numbered(&self) -> bool {
        true
    }
}

fn bad_value(field: &'static str, value: u64) -> StreamEnd {
    StreamEnd::Wire(WireError::BadValue { field, value })
}

impl Incoming<'_> {
    fn handle(&mut self, frame: Frame, reader: &mut FrameReader) -> Result<(), StreamEnd> {
        match frame {
            Frame::Write(head) => self.write(head, reader),
            Frame::Numbered { number, message } => self.message(number, message),
            Frame::Ack {
                through,
                level: Visibility::RemoteVisible,
            } => self.answered_through(through, None),
            Frame::Landed { number, slot_count } => {
                if let Some(op) = self.shared.write_of(number) {
                    self.events.landed(self.peer, op, 0..slot_count);
                }
                Ok(())
            }
            // Every part that was applied by this attempt has been told before, on the same stream.
            Frame::Nack { number, refusal } => self.answered_through(number, Some(refusal)),
            Frame::Read(mut request) => {
                let request_id = request.id;
                request.connection = self.connection;
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
                let asked = self.shared.reads.take(request);
                let asked = asked.ok_or_else(|| bad_value("answer without a request", request))?;
                self.answered(asked.op, Err(refusal));
                Ok(())
            }
            other => Err(misplaced(&other)),
        }
    }

    /// Whether the item with this number is to be handled now.
    fn takes(&self, number: u64) -> Result<bool, StreamEnd> {
        match self.progress.received.take(number) {
            Take::Fresh => Ok(true),
            Take::Duplicate => {
                self.events.repeated(self.peer);
                Ok(false)
            }
            Take::Gap => Err(bad_value("number of an item", number)),
        }
    }

    fn message(&mut self, number: u64, message: bytes::Bytes) -> Result<(), StreamEnd> {
        if !self.takes(number)? {
            return Ok(());
        }
        let bytes = message.len() as u64;
        self.events.message(self.peer, message);
        if self.progress.received.handled(bytes) {
            self.acknowledge();
        }
        Ok(())
    }

    /// Everything of the peer so far was handled, and what was not refused is visible.
    fn acknowledge(&mut self) {
        let through = self.progress.received.tell();
        self.channel
            .answer(|words| wire::append_ack(words, through, Visibility::RemoteVisible));
    }

    /// The peer has handled everything of this side up to `through`.
    fn answered_through(&self, through: u64, refusal: Option<Refusal>) -> Result<(), StreamEnd> {
        let (peer, events) = (self.peer, self.events);
        let tell = |item, refusal| Told { peer, events }.tell(item, refusal);
        let answered = self
            .shared
            .session
            .answered(self.connection, through, refusal, tell);
        answered.map_err(|OutOfRange(number)| bad_value("acknowledged item", number))
    }

    fn write(&mut self, head: WriteHead, reader: &mut FrameReader) -> Result<(), StreamEnd> {
        if !self.takes(head.number)? {
            return reader.discard(head.payload_bytes, &self.channel.socket, self.bounds);
        }
        if self.refused.is_none() {
            match self.resolve(&head) {
                Ok(resolved) => self.apply(&resolved, &resolved.runs, reader, |_| {})?,
                Err(refusal) => self.refused = Some(refusal),
            }
        }
        if self.refused.is_some() {
            reader.discard(head.payload_bytes, &self.channel.socket, self.bounds)?;
        }
        if !head.is_last {
            self.tell_applied(&head);
            return Ok(());
        }
        let applied_slots = std::mem::take(&mut self.applied_slots);
        let number = head.number;
        if let Some(refusal) = self.refused.take() {
            self.channel
                .answer(|words| wire::append_nack(words, number, &refusal));
            self.progress.refuse(number, refusal, applied_slots);
            let _ = self.progress.received.handled(0);
            self.progress.received.tell();
            return Ok(());
        }
        if let Some(arrival) = head.arrival {
            self.events
                .arrived(self.peer, arrival, Visibility::RemoteVisible);
        }
        let _ = self.progress.received.handled(0); // a write is answered in any case
        self.acknowledge();
        Ok(())
    }

    /// Tells how much of a write has landed, part by part.
    fn tell_applied(&mut self, head: &WriteHead) {
        if self.refused.is_some() {
            return;
        }
        let in_part = head.runs.iter().map(|run| u64::from(run.slot_count));
        self.applied_slots = in_part.fold(self.applied_slots, u64::saturating_add);
        let slot_count = self.applied_slots;
        self.channel
            .answer(|words| wire::append_landed(words, head.number, slot_count));
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
        let asked = self.shared.reads.take(request);
        let asked = asked.ok_or_else(|| bad_value("answer without a request", request))?;
        if asked.payload_bytes != payload_bytes {
            self.shared.reads.put_back(request, asked);
            return Err(bad_value("payload_bytes", payload_bytes));
        }
        let moved = |bytes| asked.landing.moved(bytes);
        let applied = self.apply(&asked, &asked.local, reader, moved);
        if let Err(end) = applied {
            self.shared.reads.put_back(request, asked);
            return Err(end);
        }
        asked.landing.landed(asked.slots);
        self.answered(asked.op, Ok(()));
        Ok(())
    }

    /// A part of a read of ours is over; asks for what has room now.
    fn answered(&self, op: OpId, answer: Result<(), Refusal>) {
        match self.shared.reads.answered(op, answer) {
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
        while self.shared.reads.ask(self.connection, &mut words) {
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
