//! The sending half of a link and the one loop that both transports read with.
//!
//! Two threads send: the worker (posts, messages) and the receive thread (answers). `out` is the
//! socket's lock: whoever holds it writes whole frames. The receive thread must never wait for the
//! socket, or two sides that send at once would wait for each other; so it only *tries* the lock,
//! sends what fits, and leaves the rest in `deferred` (no lock) or `leftover` (half a frame, under the
//! lock). Nothing is forgotten:
//! - the worker sends `leftover` and `deferred` before its own bytes, and looks at `deferred` again
//!   after it has let the lock go; an answer that came later found the lock free;
//! - the receive thread asks for writability while it has a leftover of its own.
//!
//! A channel with an [`Outlet`] sends through the ring of its peer what fits there. Only workers send on it:
//! its receive thread has nothing to answer.
//!
//! Lock order: `out`, then `deferred`. Neither is held across a callback.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::LinkEvents;
use super::pulse::Pulse;
use super::reader::FrameReader;
use super::ring::Outlet;
use super::socket::{Bounds, Socket, StopSignal, StreamEnd, Writable, timespec};
use crate::agent::wire::{self, Frame};
use crate::deadline::Deadline;
use crate::error::{Cause, Error, ErrorKind};
use crate::ids::PeerId;
use crate::mem::iovec::{Held, RawVectors};
use crate::mem::ring::Outbox;
use crate::mem::span::SlotRun;
use crate::sync::{Arc, AtomicBool, Condvar, Mutex, MutexGuard, Ordering, thread};

/// A connected socket with its stop signal and its sending half.
pub(crate) struct Channel {
    pub(crate) socket: Socket,
    pub(crate) stop: StopSignal,
    out: Mutex<Out>,
    deferred: Mutex<Vec<u8>>,
    /// The receive thread left something that the socket did not take.
    wants_out: AtomicBool,
    is_closed_here: AtomicBool,
    /// Whether the peer attends to its ring, where it has one.
    pulse: Option<Pulse>,
}

struct Out {
    leftover: Vec<u8>,
    words: Vec<u8>,
    vectors: RawVectors,
    outlet: Option<Outlet>,
    /// Why nothing can be sent any more: a frame may have been cut.
    broken: Option<StreamEnd>,
}

impl Out {
    /// Wakes the reader of the ring; `false` when that cannot be done. A wake that fails ends the connection (I-6): the
    /// reader counts as awake by then, so nobody who sends later would wake it.
    fn wake_by(&mut self, wake: impl FnOnce(&Outlet) -> Result<(), StreamEnd>) -> bool {
        let Some(outlet) = self.outlet.as_ref().filter(|_| self.broken.is_none()) else {
            return false;
        };
        self.broken = wake(outlet).err();
        self.broken.is_none()
    }
}

impl Channel {
    pub(crate) fn new(socket: Socket, stop: StopSignal) -> Self {
        Self {
            socket,
            stop,
            out: Mutex::new(Out {
                leftover: Vec::new(),
                words: Vec::new(),
                vectors: RawVectors::new(),
                outlet: None,
                broken: None,
            }),
            deferred: Mutex::new(Vec::new()),
            wants_out: AtomicBool::new(false),
            is_closed_here: AtomicBool::new(false),
            pulse: None,
        }
    }

    /// From here on frames go through the ring of the peer.
    pub(super) fn write_ring(&mut self, ring: Outbox) {
        self.pulse = Some(Pulse::new(ring.questions()));
        self.out.get_mut().outlet = Some(Outlet::new(ring));
    }

    /// Frames go through a ring, and nothing is ever deferred: only workers send.
    fn has_ring(&self) -> bool {
        self.pulse.is_some()
    }

    /// How long the peer has left a heartbeat unanswered; asks for the next one. `None` where it has no ring. Never
    /// waits. Where there is a ring nothing is deferred that whoever has the lock would have to send.
    pub(super) fn heartbeat(&self) -> Option<Duration> {
        let pulse = self.pulse.as_ref()?;
        Some(
            pulse.silence(Instant::now(), |questions| match self.out.try_lock() {
                Some(mut out) => out.wake_by(|outlet| outlet.ask(&self.socket)),
                // Whoever holds it sends or copies. The bytes in a full socket wake a reader, and one that does
                // not sleep looks by itself.
                None => !questions.is_reader_parked() || !self.takes_bytes(),
            }),
        )
    }

    /// Whether a worker that sends frames of so many bytes now waits for nobody: nobody else sends, and the ring
    /// has room.
    pub(super) fn takes_at_once(&self, len_bytes: usize) -> bool {
        self.out.try_lock().is_some_and(|mut out| {
            let outlet = out.outlet.as_mut();
            outlet.is_some_and(|outlet| outlet.takes_at_once(len_bytes))
        })
    }

    /// Wakes a peer that sleeps at its ring, unless somebody sends just now.
    pub(super) fn rouse(&self) {
        if let Some(mut out) = self.out.try_lock() {
            out.wake_by(|outlet| outlet.rouse(&self.socket));
        }
    }

    /// Waits end by the stop signal only: an established link waits as long as its peer lives.
    pub(crate) fn bounds(&self) -> Bounds<'_> {
        Bounds {
            stop: Some(&self.stop),
            deadline: None,
            process: None,
            writable: None,
        }
    }

    /// This side ends the link: every wait on the channel ends.
    pub(crate) fn close(&self) {
        self.is_closed_here.store(true, Ordering::Release);
        self.stop.raise();
    }

    /// Whether this side ended the link, not the peer.
    pub(crate) fn is_closed_here(&self) -> bool {
        self.is_closed_here.load(Ordering::Acquire)
    }

    fn error(&self, end: &StreamEnd) -> Error {
        if self.is_closed_here() {
            return ErrorKind::Closed.into();
        }
        let reason = match end {
            StreamEnd::Stopped => "the connection has ended".into(),
            end => end.to_string(),
        };
        ErrorKind::PeerLost { reason }.into()
    }

    /// Whether the socket would take bytes now.
    pub(crate) fn takes_bytes(&self) -> bool {
        let mut socket = [PollFd::new(&self.socket, PollFlags::OUT)];
        let now = timespec(std::time::Duration::ZERO);
        poll(&mut socket, Some(&now)).is_ok_and(|count| count > 0)
    }

    /// For the worker: the right to send. What the receive thread left goes out first.
    pub(crate) fn sender(&self) -> Result<Sender<'_>, Error> {
        let mut sender = Sender {
            channel: self,
            out: Some(self.out.lock()),
        };
        match self.has_ring() {
            true => _ = sender.open()?,
            false => sender.send(|_| {})?,
        }
        Ok(sender)
    }

    /// For the worker: one frame.
    pub(crate) fn send(&self, frame: impl FnOnce(&mut Vec<u8>)) -> Result<(), Error> {
        self.sender()?.send(frame)
    }

    /// For the receive thread: one frame, as soon as the socket takes it. Never waits.
    pub(crate) fn answer(&self, frame: impl FnOnce(&mut Vec<u8>)) {
        debug_assert!(!self.has_ring(), "its receive thread answers nothing");
        frame(&mut self.deferred.lock());
        self.try_flush();
    }

    /// Sends a last frame if nothing is half sent, without waiting. The caller has raised the stop
    /// signal, so a worker inside `send` lets the lock go.
    pub(crate) fn farewell(&self, frame: impl FnOnce(&mut Vec<u8>)) {
        let mut out = self.out.lock();
        if out.broken.is_none() && out.leftover.is_empty() {
            out.words.clear();
            out.words.append(&mut self.deferred.lock());
            frame(&mut out.words);
            let Out { words, outlet, .. } = &mut *out;
            let routed = outlet.as_mut().map(|way| way.route(words, &self.socket));
            if !words.is_empty() && routed.is_none_or(|routed| routed.is_ok()) {
                let _ = self.socket.send_some(words);
            }
        }
        out.broken.get_or_insert(StreamEnd::Stopped);
    }

    /// Nothing is sent from here on, and nobody is in the middle of it when this returns. The caller has raised the
    /// stop signal, so a worker inside `send` lets the lock go.
    pub(super) fn seal(&self) {
        self.out.lock().broken.get_or_insert(StreamEnd::Stopped);
    }

    fn try_flush(&self) {
        loop {
            let Some(mut out) = self.out.try_lock() else {
                // The holder is the worker; it sends the leftover first and looks at `deferred` last.
                self.wants_out.store(false, Ordering::Relaxed);
                return;
            };
            let Out {
                leftover, broken, ..
            } = &mut *out;
            leftover.append(&mut self.deferred.lock());
            if broken.is_some() {
                leftover.clear();
            }
            match self.socket.send_some(leftover) {
                Ok(count) => {
                    leftover.drain(..count);
                }
                Err(Errno::AGAIN) => {}
                Err(errno) => *broken = Some(StreamEnd::Io(errno)),
            }
            let is_full = !leftover.is_empty() && broken.is_none();
            self.wants_out.store(is_full, Ordering::Relaxed);
            drop(out);
            if is_full || self.deferred.lock().is_empty() {
                return;
            }
        }
    }
}

impl Writable for Channel {
    fn wants_out(&self) -> bool {
        self.wants_out.load(Ordering::Relaxed)
    }

    fn is_writable(&self) {
        self.try_flush();
    }
}

/// The right to send on a channel, held by its worker.
pub(crate) struct Sender<'a> {
    channel: &'a Channel,
    out: Option<MutexGuard<'a, Out>>,
}

impl Sender<'_> {
    /// Sends one frame, and waits for the socket as long as it takes.
    pub(crate) fn send(&mut self, frame: impl FnOnce(&mut Vec<u8>)) -> Result<(), Error> {
        let channel = self.channel;
        let out = self.open()?;
        let mut words = std::mem::take(&mut out.words);
        words.clear();
        if !channel.has_ring() {
            words.append(&mut out.leftover);
            words.append(&mut channel.deferred.lock());
        }
        frame(&mut words);
        let sent = match &mut out.outlet {
            Some(outlet) => outlet.route(&mut words, &channel.socket),
            None => Ok(()),
        };
        let sent = sent.and_then(|()| channel.socket.send_all(&words, channel.bounds()));
        out.words = words;
        self.check(sent)
    }

    /// Sends one frame and, straight from where they lie, the payload runs behind it; `moved` hears how many bytes
    /// the socket has taken.
    pub(crate) fn send_payload(
        &mut self,
        frame: impl FnOnce(&mut Vec<u8>),
        held_by: &impl Held,
        runs: &[SlotRun],
        moved: impl Fn(u64),
    ) -> Result<(), Error> {
        let channel = self.channel;
        let out = self.open()?;
        let Out {
            leftover, vectors, ..
        } = out;
        let head = |words: &mut Vec<u8>| {
            words.append(leftover);
            words.append(&mut channel.deferred.lock());
            frame(words);
        };
        let mut payload = vectors.gather(held_by, head, runs);
        let sent = loop {
            if payload.left_bytes() == 0 {
                break Ok(());
            }
            match payload.send(&channel.socket) {
                Ok(count) => moved(count as u64),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => match channel.socket.wait(PollFlags::OUT, channel.bounds()) {
                    Ok(_) => {}
                    Err(end) => break Err(end),
                },
                Err(errno) => break Err(StreamEnd::Io(errno)),
            }
        };
        drop(payload);
        self.check(sent)
    }

    fn open(&mut self) -> Result<&mut Out, Error> {
        let channel = self.channel;
        // The guard leaves only in `drop`.
        let out = self.out.as_deref_mut().ok_or(ErrorKind::Closed)?;
        match &out.broken {
            Some(end) => Err(channel.error(end)),
            None => Ok(out),
        }
    }

    fn check(&mut self, sent: Result<(), StreamEnd>) -> Result<(), Error> {
        sent.map_err(|end| {
            let error = self.channel.error(&end);
            if let Some(out) = self.out.as_deref_mut() {
                out.broken = Some(end);
            }
            error
        })
    }
}

impl Drop for Sender<'_> {
    fn drop(&mut self) {
        drop(self.out.take());
        if self.channel.has_ring() {
            return;
        }
        // Answers that came while the lock was held.
        while !self.channel.deferred.lock().is_empty() {
            let Some(out) = self.channel.out.try_lock() else {
                return; // the new holder sends them
            };
            self.out = Some(out);
            let sent = self.send(|_| {});
            drop(self.out.take());
            if sent.is_err() {
                self.channel.deferred.lock().clear();
            }
        }
    }
}

/// How long a receive thread that is in no callback may take to end, whatever the deadline is.
const JOIN_MS: u64 = 1_000;

/// The receive thread of a link.
pub(crate) struct Receiver(Arc<Thread>);

struct Thread {
    state: Mutex<ThreadState>,
    ended: Condvar,
}

#[derive(Default)]
struct ThreadState {
    id: Option<thread::ThreadId>,
    handle: Option<thread::JoinHandle<()>>,
    is_running: bool,
    is_closed: bool,
    /// It did not end in time, and nobody waits for it any more.
    is_left: bool,
}

/// How a wait for the end of a receive thread ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Joined {
    /// It was never started, and never will be.
    NeverStarted,
    /// It has ended, or is the calling thread.
    Ended,
    /// It is inside of a callback still, and ends behind it.
    Left,
}

/// Says that the thread has ended, however it ended.
struct Ending(Arc<Thread>);

impl Drop for Ending {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.is_running = false;
        self.0.ended.notify_all();
    }
}

impl Receiver {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Thread {
            state: Mutex::default(),
            ended: Condvar::new(),
        }))
    }

    /// Starts it, unless [`Receiver::join`] was called.
    pub(crate) fn start(
        &self,
        name: String,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<(), Error> {
        let mut state = self.0.state.lock();
        if state.is_closed {
            return Err(ErrorKind::Closed.into());
        }
        let shared = Arc::clone(&self.0);
        let spawned = thread::Builder::new().name(name).spawn(move || {
            // Made here: a body that never runs is dropped under the lock.
            let _ending = Ending(shared);
            body();
        });
        let handle = spawned.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
            Error::from(ErrorKind::System {
                call: "clone",
                errno,
            })
        })?;
        state.id = Some(handle.thread().id());
        state.handle = Some(handle);
        state.is_running = true;
        Ok(())
    }

    /// Whether the caller is that thread.
    pub(crate) fn is_current(&self) -> bool {
        self.0.state.lock().id == Some(thread::current().id())
    }

    /// Waits for its end, whoever else does, unless called by itself: a link that is closed from inside one
    /// of its own events. Its waits have been ended before, so only a callback can keep it: with a deadline it is
    /// left there, but not sooner than after [`JOIN_MS`], and is not waited for again.
    pub(crate) fn join(&self, deadline: Option<Deadline>) -> Joined {
        let until = deadline.map(|deadline| deadline.max(Deadline::after_ms(JOIN_MS)));
        let mut state = self.0.state.lock();
        state.is_closed = true;
        let Some(id) = state.id else {
            return Joined::NeverStarted;
        };
        if id == thread::current().id() {
            return Joined::Ended;
        }
        while state.is_running {
            if state.is_left {
                return Joined::Left;
            }
            match until {
                None => self.0.ended.wait(&mut state),
                Some(until) => {
                    self.0.ended.wait_until(&mut state, until.instant());
                    if state.is_running && until.has_passed() {
                        state.is_left = true;
                        // Others wait without a deadline.
                        self.0.ended.notify_all();
                    }
                }
            }
        }
        let handle = state.handle.take();
        drop(state);
        if let Some(handle) = handle {
            // A panic of the thread was reported by its own hook.
            let _ = handle.join();
        }
        Joined::Ended
    }
}

/// How the frames of one transport are handled beyond what is common.
pub(crate) trait Reception {
    /// A frame that only this transport knows; an error ends the link.
    fn frame(&mut self, frame: Frame, reader: &mut FrameReader) -> Result<(), StreamEnd>;
    /// Whether messages of the peer have numbers, so that one without means nothing.
    fn is_numbered(&self) -> bool {
        false
    }
}

/// [`receive`] within the first bounds. If that is no goodbye and `is_ending` says that one is to be expected,
/// it gets until the second ones: the peer's goodbye is the proof that it stores no more, and one that has
/// come is kept.
#[cfg(feature = "one-sided")]
pub(crate) fn receive_to_the_end<'a>(
    channel: &Channel,
    reader: &mut FrameReader,
    (bounds, last): (Bounds<'_>, impl FnOnce() -> Bounds<'a>),
    to: (PeerId, &dyn LinkEvents),
    reception: &mut dyn Reception,
    is_ending: impl FnOnce(&StreamEnd) -> bool,
) -> Result<(), StreamEnd> {
    match receive(channel, reader, bounds, to, reception) {
        Err(end) if reader.is_between_frames() && is_ending(&end) => {
            receive(channel, reader, last(), to, reception)
        }
        end => end,
    }
}

/// Reads until the link ends, and says why. `Ok` is a goodbye of the peer.
pub(crate) fn receive(
    channel: &Channel,
    reader: &mut FrameReader,
    bounds: Bounds<'_>,
    (peer, events): (PeerId, &dyn LinkEvents),
    reception: &mut dyn Reception,
) -> Result<(), StreamEnd> {
    loop {
        // Also with a frame in the buffer: a callback may just have closed the link.
        if bounds.is_stopped() {
            return Err(StreamEnd::Stopped);
        }
        let frame = reader.next(&channel.socket, bounds)?;
        if handle(frame, reader, (peer, events), reception)? == Handled::Bye {
            return Ok(());
        }
    }
}

/// Whether more is to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Handled {
    Frame,
    /// The peer has said goodbye.
    Bye,
}

/// What is done with a frame, whoever has taken it.
pub(crate) fn handle(
    frame: Frame,
    reader: &mut FrameReader,
    (peer, events): (PeerId, &dyn LinkEvents),
    reception: &mut dyn Reception,
) -> Result<Handled, StreamEnd> {
    match frame {
        Frame::Arrival { level, arrival } => events.arrived(peer, arrival, level),
        Frame::Message(bytes) if !reception.is_numbered() => events.message(peer, bytes),
        Frame::Progress { counter } => events.progress(peer, counter),
        // Whoever refuses has ended within the greeting, when this side took itself for connected: it has stored
        // nothing, and will not.
        Frame::Bye | Frame::Refuse(_) => return Ok(Handled::Bye),
        frame => reception.frame(frame, reader)?,
    }
    Ok(Handled::Frame)
}

/// The end of a link, as the engine hears it.
pub(crate) fn cause(end: Result<(), StreamEnd>) -> Cause {
    let reason = match end {
        Ok(()) => "closed by the peer".into(),
        Err(end) => end.to_string(),
    };
    Cause::PeerLost { reason }
}

/// A frame in a place where it has no meaning.
pub(crate) fn misplaced(frame: &Frame) -> StreamEnd {
    StreamEnd::Wire(wire::WireError::Misplaced(frame.kind()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
