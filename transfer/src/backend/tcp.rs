//! Transfers over a TCP stream: one message per transfer, answered after it was applied.
//!
//! A write is its frame (what goes where, and the arrival) and then the bytes, straight from the slots
//! they lie in. The receiver checks everything before it takes the first byte of payload, reads
//! straight into the slots, tells the engine, and only then answers: the answer is what makes an
//! operation `RemoteVisible`. A write that is refused is drained and answered with the reason; bytes
//! that are no frame end the connection.
//!
//! A long operation is sent in parts of [`PART_BYTES`], so that answers and the other direction get
//! their turn; only its last part carries the arrival and is answered.
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
use super::socket::{Bounds, FrameReader, StreamEnd};
use super::{
    Access, BackendKind, Caps, Link, LinkEvents, Posted, PostedOp, Quiesce, RemoteRun, Resolved,
};
use crate::Arrival;
use crate::agent::wire::{self, Frame, RUN_LIMIT, Refusal, WriteHead};
use crate::error::{Cause, Error, ErrorKind};
use crate::ids::{OpId, PeerId};
use crate::mem::iovec::RawVectors;
use crate::mem::span::SlotRun;
use crate::sync::{Arc, AtomicBool, Mutex, Ordering};
use crate::visibility::Visibility;

/// Payload of one frame, unless a single slot is longer.
const PART_BYTES: u64 = 4 << 20;
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
    /// The receive thread will not touch memory again.
    is_past: AtomicBool,
}

impl TcpLink {
    /// A link over a connection whose handshake is done.
    pub(crate) fn new(channel: Channel, reader: FrameReader) -> Self {
        Self {
            shared: Arc::new(Shared {
                channel,
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
        let mut writes = Writes {
            channel,
            bounds,
            peer,
            events,
            vectors: RawVectors::new(),
            refused: None,
        };
        let end = channel::receive(channel, &mut reader, bounds, (peer, events), &mut writes);
        drop(writes);
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
        if let Some(arrival) = &op.arrival {
            wire::check_arrival(arrival)?;
        }
        let mut sender = self.shared.channel.sender()?;
        let mut parts = Parts::new(&op.runs.local, &op.runs.remote);
        while let Some(part) = parts.next() {
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
            sender.send_payload(frame, op, part.local)?;
        }
        Ok(Posted::Pending)
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

/// One frame's share of an operation.
struct Part<'p> {
    local: &'p [SlotRun],
    remote: &'p [RemoteRun],
    payload_bytes: u64,
    is_last: bool,
}

/// Cuts an operation at slot borders. The two buffers are reused from part to part.
struct Parts<'a> {
    pairs: std::iter::Zip<std::slice::Iter<'a, SlotRun>, std::slice::Iter<'a, RemoteRun>>,
    open: Option<(SlotRun, RemoteRun)>,
    local: Vec<SlotRun>,
    remote: Vec<RemoteRun>,
}

impl<'a> Parts<'a> {
    fn new(local: &'a [SlotRun], remote: &'a [RemoteRun]) -> Self {
        let mut pairs = local.iter().zip(remote);
        Self {
            open: pairs.next().map(|(local, remote)| (*local, *remote)),
            pairs,
            local: Vec::with_capacity(local.len().min(RUN_LIMIT)),
            remote: Vec::with_capacity(local.len().min(RUN_LIMIT)),
        }
    }

    /// The next part; `None` behind the last one.
    fn next(&mut self) -> Option<Part<'_>> {
        self.local.clear();
        self.remote.clear();
        let mut payload_bytes = 0;
        while let Some((local, remote)) = self.open {
            let slot_bytes = local.slot_bytes as u64;
            let mut room = PART_BYTES.saturating_sub(payload_bytes) / slot_bytes.max(1);
            if self.local.is_empty() {
                room = room.max(1); // the first slot of a part always fits, however long it is
            }
            if room == 0 || self.local.len() == RUN_LIMIT {
                break;
            }
            let count = u32::try_from(room)
                .unwrap_or(u32::MAX)
                .min(remote.slot_count);
            self.local.push(local.section(0, count));
            self.remote.push(RemoteRun {
                slot_count: count,
                ..remote
            });
            payload_bytes += slot_bytes * u64::from(count);
            self.open = match remote.slot_count - count {
                0 => self.pairs.next().map(|(local, remote)| (*local, *remote)),
                slot_count => Some((
                    local.section(count, slot_count),
                    RemoteRun {
                        slot: remote.slot + count,
                        slot_count,
                        ..remote
                    },
                )),
            };
        }
        (!self.local.is_empty()).then_some(Part {
            local: &self.local,
            remote: &self.remote,
            payload_bytes,
            is_last: self.open.is_none(),
        })
    }
}

/// The receiver's side of writes, and the answers to ours.
struct Writes<'a> {
    channel: &'a Channel,
    bounds: Bounds<'a>,
    peer: PeerId,
    events: &'a dyn LinkEvents,
    vectors: RawVectors,
    /// An operation of which a part was refused: its other parts are not applied either.
    refused: Option<(OpId, Refusal)>,
}

impl Reception for Writes<'_> {
    fn frame(&mut self, frame: Frame, reader: &mut FrameReader) -> Result<(), StreamEnd> {
        match frame {
            Frame::Write(head) => self.write(head, reader),
            Frame::Ack { op, level } => {
                self.events.completed(self.peer, op, Ok(level));
                Ok(())
            }
            Frame::Nack { op, refusal } => {
                let reason = refusal.reason;
                let kind = ErrorKind::Refused { reason };
                self.events.completed(self.peer, op, Err(kind.into()));
                Ok(())
            }
            other => Err(misplaced(&other)),
        }
    }
}

impl Writes<'_> {
    fn write(&mut self, head: WriteHead, reader: &mut FrameReader) -> Result<(), StreamEnd> {
        if self.refused.as_ref().is_some_and(|(op, _)| *op != head.op) {
            self.refused = None; // that operation was cut off by its sender
        }
        if self.refused.is_none() {
            match self.resolve(&head) {
                Ok(resolved) => self.apply(&resolved, reader)?,
                Err(refusal) => self.refused = Some((head.op, refusal)),
            }
        }
        if self.refused.is_some() {
            reader.discard(head.payload_bytes, &self.channel.socket, self.bounds)?;
        }
        if !head.is_last {
            return Ok(());
        }
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

    /// Every run, checked by the engine, before the first byte of payload is read.
    fn resolve(&self, head: &WriteHead) -> Result<Resolved, Refusal> {
        let resolved = self
            .events
            .resolve(self.peer, &head.runs)
            .map_err(|error| Refusal {
                code: REFUSED_BY_ENGINE,
                reason: error.to_string(),
            })?;
        let sum = |total: u64, run: &SlotRun| total.saturating_add(run.payload_bytes());
        let slots_bytes = resolved.runs.iter().fold(0, sum);
        if slots_bytes != head.payload_bytes {
            return Err(Refusal {
                code: REFUSED_LENGTH,
                reason: format!(
                    "{} bytes of payload for slots of {slots_bytes} bytes",
                    head.payload_bytes
                ),
            });
        }
        Ok(resolved)
    }

    /// Reads the payload into the slots.
    fn apply(&mut self, resolved: &Resolved, reader: &mut FrameReader) -> Result<(), StreamEnd> {
        let mut payload = self.vectors.scatter(resolved);
        let ahead = payload.copy_from(reader.ahead());
        reader.consume(ahead);
        let socket = &self.channel.socket;
        while payload.left_bytes() > 0 {
            if self.bounds.is_stopped() {
                return Err(StreamEnd::Stopped);
            }
            match payload.receive(socket) {
                Ok(0) => return Err(StreamEnd::Cut),
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    socket.wait(PollFlags::IN, self.bounds)?;
                }
                Err(errno) => return Err(StreamEnd::Io(errno)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PoolId;
    use crate::mem::{PoolGeometry, span::PoolSpan};

    fn runs(shapes: &[(u64, u32)]) -> (Vec<SlotRun>, Vec<RemoteRun>) {
        let pair = |&(slot_bytes, slot_count): &(u64, u32)| {
            let geometry = PoolGeometry {
                offset_bytes: 0,
                stride_bytes: slot_bytes,
                slot_bytes,
                slot_count,
            };
            let base = std::ptr::without_provenance_mut(4096);
            let span = PoolSpan::new(base, u64::from(slot_count) * slot_bytes, geometry).unwrap();
            let remote = RemoteRun {
                pool: PoolId(3),
                generation: 1,
                slot: 7,
                slot_count,
            };
            (span.run(0, slot_count).unwrap(), remote)
        };
        shapes.iter().map(pair).unzip()
    }

    /// Slots, payload and whether it is the last one.
    type Shape = (Vec<(u32, u32)>, u64, bool);

    fn cut(shapes: &[(u64, u32)]) -> Vec<Shape> {
        let (local, remote) = runs(shapes);
        let mut parts = Parts::new(&local, &remote);
        let mut seen = Vec::new();
        while let Some(part) = parts.next() {
            assert_eq!(part.local.len(), part.remote.len());
            let bytes: u64 = part.local.iter().map(SlotRun::payload_bytes).sum();
            assert_eq!(bytes, part.payload_bytes);
            let slots = part.remote.iter().map(|run| (run.slot, run.slot_count));
            seen.push((slots.collect(), part.payload_bytes, part.is_last));
        }
        seen
    }

    #[test]
    fn a_short_operation_is_one_part() {
        assert_eq!(
            cut(&[(100, 3), (10, 1)]),
            [(vec![(7, 3), (7, 1)], 310, true)]
        );
        assert!(cut(&[]).is_empty());
    }

    #[test]
    fn long_operations_are_cut_at_slot_borders() {
        let mib = 1 << 20;
        assert_eq!(
            cut(&[(mib, 6), (100, 2)]),
            [
                (vec![(7, 4)], 4 * mib, false),
                (vec![(11, 2), (7, 2)], 2 * mib + 200, true)
            ]
        );
        let long = PART_BYTES + 1;
        assert_eq!(
            cut(&[(long, 2)]),
            [(vec![(7, 1)], long, false), (vec![(8, 1)], long, true)]
        );
    }

    #[test]
    fn a_frame_holds_a_bounded_number_of_runs() {
        let shapes = vec![(1, 1); RUN_LIMIT + 1];
        let parts = cut(&shapes);
        assert_eq!(parts.len(), 2);
        assert_eq!((parts[0].1, parts[0].2), (RUN_LIMIT as u64, false));
        assert_eq!((parts[1].1, parts[1].2), (1, true));
    }
}
