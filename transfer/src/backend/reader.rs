//! Frames out of a stream socket, and out of a ring where there is one.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::Duration;

use bytes::Bytes;
use rustix::event::PollFlags;
use rustix::io::Errno;

use super::ring::Inlet;
use super::socket::{Bounds, Socket, StreamEnd};
use crate::agent::wire::{CRC_BYTES, Frame, HEADER_BYTES, Header, WireError};
use crate::mem::ring::{Inbox, Taken};

/// Bytes of a read buffer; a longer body grows its own buffer in steps of this.
const READ_BYTES: usize = 64 * 1024;

/// Bytes that were read and not used.
pub(super) struct Ahead {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl Ahead {
    pub(super) fn new() -> Self {
        Self {
            buffer: vec![0; READ_BYTES],
            start: 0,
            end: 0,
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Marks `count` bytes as used.
    pub(super) fn consume(&mut self, count: usize) {
        self.start = (self.start + count).min(self.end);
    }

    /// Room behind the bytes.
    pub(super) fn space(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.buffer[self.end..]
    }

    /// `count` bytes of the space were filled.
    pub(super) fn grow(&mut self, count: usize) {
        self.end = (self.end + count).min(self.buffer.len());
    }
}

/// Reads frames; keeps what it read ahead.
pub(crate) struct FrameReader {
    /// What came over the socket.
    read: Ahead,
    inlet: Option<Inlet>,
    fds: Option<VecDeque<OwnedFd>>,
    is_between_frames: bool,
    limit_bytes: usize,
}

/// What an attendant finds in the ring.
pub(super) enum InRing {
    Frame(Frame),
    Nothing,
    /// Something for the owner.
    NotMine,
}

/// Longest body that is taken from somebody who has not said who it is.
const STRANGER_LIMIT_BYTES: usize = 2048;

impl FrameReader {
    /// A reader without read-ahead, for a stranger: bodies are short. With `takes_fds` it keeps the file
    /// descriptors that arrive.
    pub(crate) fn new(takes_fds: bool) -> Self {
        Self {
            read: Ahead::new(),
            inlet: None,
            fds: takes_fds.then(VecDeque::new),
            is_between_frames: true,
            limit_bytes: STRANGER_LIMIT_BYTES,
        }
    }

    /// The next frame. The allocation for a body grows with the bytes that have really arrived.
    pub(crate) fn next(&mut self, socket: &Socket, bounds: Bounds<'_>) -> Result<Frame, StreamEnd> {
        loop {
            if self.ahead().is_empty() {
                self.fill(socket, bounds, StreamEnd::Closed)?;
            }
            if !self.take_sign() {
                break;
            }
        }
        while self.ahead().len() < HEADER_BYTES {
            self.check_prefix()?;
            self.fill(socket, bounds, StreamEnd::Cut)?;
        }
        let mut header_bytes = [0; HEADER_BYTES];
        header_bytes.copy_from_slice(&self.ahead()[..HEADER_BYTES]);
        let header = Header::parse(&header_bytes)?;
        if header.body_bytes > self.limit_bytes {
            return Err(header.too_long(self.limit_bytes).into());
        }
        self.consume(HEADER_BYTES);
        self.is_between_frames = false;
        let (body, crc) = self.rest(header.body_bytes, socket, bounds)?;
        self.is_between_frames = true;
        Ok(Frame::decode(&header_bytes, header, body, crc)?)
    }

    /// From here on frames come through the ring.
    pub(super) fn read_ring(&mut self, ring: Inbox) {
        self.inlet = Some(Inlet::new(ring));
    }

    /// Looks for so long for more before it sleeps, where there is a ring.
    pub(super) fn spin_for(&mut self, spin: Duration) {
        if let Some(inlet) = &mut self.inlet {
            inlet.spin_for(spin);
        }
    }

    /// Whether [`FrameReader::next`] would find something; waits for nothing. `true` where only it can tell.
    pub(super) fn look(&mut self, socket: &Socket) -> Result<bool, StreamEnd> {
        while self.take_sign() {}
        match &mut self.inlet {
            Some(inlet) if !inlet.is_on_socket() && inlet.ahead().bytes().is_empty() => {
                inlet.look(socket, &mut self.read)
            }
            _ => Ok(true),
        }
    }

    /// A whole frame out of the ring, for an attendant; waits for nothing and hears nothing of the socket. What
    /// else is there is left to [`FrameReader::next`], which finds it as it was.
    pub(super) fn next_in_ring(
        &mut self,
        socket: &Socket,
        bounds: Bounds<'_>,
    ) -> Result<InRing, StreamEnd> {
        let Some(inlet) = self.inlet.as_mut().filter(|inlet| !inlet.is_on_socket()) else {
            return Ok(InRing::NotMine);
        };
        if inlet.ahead().bytes().is_empty() {
            match inlet.take() {
                Ok(Taken::Chunk(_)) => {}
                Ok(Taken::Nothing) => return Ok(InRing::Nothing),
                Ok(Taken::Mark) | Err(_) => return Ok(InRing::NotMine),
            }
        }
        if !self.has_whole_frame() {
            return Ok(InRing::NotMine);
        }
        self.next(socket, bounds).map(InRing::Frame)
    }

    fn has_whole_frame(&self) -> bool {
        let Some(header_bytes) = self.ahead().first_chunk::<HEADER_BYTES>() else {
            return false;
        };
        let length = |header: Header| HEADER_BYTES + header.body_bytes + CRC_BYTES;
        Header::parse(header_bytes).is_ok_and(|header| self.ahead().len() >= length(header))
    }

    /// The ring, while nothing but a frame in it is to be waited for.
    pub(super) fn resting(&self) -> Option<&Inlet> {
        let inlet = self.inlet.as_ref()?;
        (!inlet.is_on_socket() && inlet.ahead().bytes().is_empty()).then_some(inlet)
    }

    /// How long to look for more before the sleep; nothing where not only a frame in the ring is to be waited for.
    pub(super) fn spin(&mut self) -> Duration {
        match self.resting() {
            Some(_) => self.inlet.as_mut().map_or(Duration::ZERO, Inlet::spin),
            None => Duration::ZERO,
        }
    }

    /// The ring, if there is one.
    pub(super) fn ring(&self) -> Option<&Inlet> {
        self.inlet.as_ref()
    }

    /// [`FrameReader::ring`], to change it.
    pub(super) fn inlet(&mut self) -> Option<&mut Inlet> {
        self.inlet.as_mut()
    }

    /// Takes bodies of up to `limit_bytes` from now on, within the limits of their kinds.
    pub(crate) fn trust(&mut self, limit_bytes: usize) {
        self.limit_bytes = limit_bytes;
    }

    /// Whether [`FrameReader::next`] may be called again after it ended without a frame.
    pub(crate) fn is_between_frames(&self) -> bool {
        self.is_between_frames
    }

    /// Bytes that were read and not used.
    pub(crate) fn ahead(&self) -> &[u8] {
        match &self.inlet {
            Some(inlet) if !inlet.is_on_socket() => inlet.ahead().bytes(),
            _ => self.read.bytes(),
        }
    }

    /// Marks `count` bytes of [`FrameReader::ahead`] as used.
    pub(crate) fn consume(&mut self, count: usize) {
        match &mut self.inlet {
            Some(inlet) if !inlet.is_on_socket() => inlet.ahead_mut().consume(count),
            _ => self.read.consume(count),
        }
    }

    /// Reads and drops `left_bytes` bytes.
    pub(crate) fn discard(
        &mut self,
        mut left_bytes: u64,
        socket: &Socket,
        bounds: Bounds<'_>,
    ) -> Result<(), StreamEnd> {
        while left_bytes > 0 {
            if self.ahead().is_empty() {
                self.fill(socket, bounds, StreamEnd::Cut)?;
            }
            let count = (self.ahead().len() as u64).min(left_bytes);
            self.consume(count as usize);
            left_bytes -= count;
        }
        Ok(())
    }

    /// The oldest file descriptor that has arrived.
    pub(crate) fn take_fd(&mut self) -> Option<OwnedFd> {
        self.fds.as_mut()?.pop_front()
    }

    /// Whether file descriptors are left that no frame asked for.
    pub(crate) fn has_fds(&self) -> bool {
        self.fds.as_ref().is_some_and(|fds| !fds.is_empty())
    }

    /// From here on file descriptors are not taken; the kernel closes what a peer still sends.
    pub(crate) fn refuse_fds(&mut self) {
        self.fds = None;
    }

    fn take_sign(&mut self) -> bool {
        self.inlet
            .as_mut()
            .is_some_and(|inlet| inlet.take_sign(&mut self.read))
    }

    /// Garbage is refused with its first bytes, also when it is shorter than a header.
    fn check_prefix(&self) -> Result<(), StreamEnd> {
        let ahead = self.ahead();
        let shown = ahead.len().min(4);
        if ahead[..shown] == crate::agent::wire::MAGIC[..shown] {
            return Ok(());
        }
        let mut found = [0; 4];
        found[..shown].copy_from_slice(&ahead[..shown]);
        Err(WireError::BadMagic(found).into())
    }

    /// The body of a frame, and its check sum.
    fn rest(
        &mut self,
        body_bytes: usize,
        socket: &Socket,
        bounds: Bounds<'_>,
    ) -> Result<(Bytes, [u8; CRC_BYTES]), StreamEnd> {
        let count = body_bytes + CRC_BYTES;
        let whole = self.ahead().get(..count);
        if let Some((body, crc)) = whole.and_then(|whole| whole.split_last_chunk()) {
            let rest = (Bytes::copy_from_slice(body), *crc);
            self.consume(count);
            return Ok(rest);
        }
        let mut rest = Vec::with_capacity(count.min(READ_BYTES));
        while rest.len() < count {
            if self.ahead().is_empty() {
                self.fill(socket, bounds, StreamEnd::Cut)?;
            }
            let taken = self.ahead().len().min(count - rest.len());
            rest.extend_from_slice(&self.ahead()[..taken]);
            self.consume(taken);
        }
        let crc = *rest.last_chunk().ok_or(StreamEnd::Cut)?;
        rest.truncate(body_bytes);
        Ok((rest.into(), crc))
    }

    /// Reads once, at least one byte; `at_end` is the answer to the end of the stream.
    fn fill(
        &mut self,
        socket: &Socket,
        bounds: Bounds<'_>,
        at_end: StreamEnd,
    ) -> Result<(), StreamEnd> {
        while let Some(inlet) = self.inlet.as_mut().filter(|inlet| !inlet.is_on_socket()) {
            inlet.fill(socket, &mut self.read, bounds)?;
            if !self.ahead().is_empty() {
                return Ok(());
            }
        }
        loop {
            // The order goes on here, and nobody looks into the ring.
            if let Some(inlet) = &mut self.inlet {
                inlet.beat();
            }
            if bounds.is_stopped() {
                return Err(StreamEnd::Stopped);
            }
            match socket.receive_some(self.read.space(), self.fds.as_mut()) {
                Ok(0) => return Err(at_end),
                Ok(count) => {
                    self.read.grow(count);
                    return Ok(());
                }
                Err(Errno::AGAIN) => {
                    socket.wait(PollFlags::IN, bounds)?;
                }
                Err(errno) => return Err(StreamEnd::Io(errno)),
            }
        }
    }
}
