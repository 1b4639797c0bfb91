//! What the receive thread of a neighbour and the threads that wait share: the frames of its ring.
//!
//! The receive thread owns the seat of the ring (`attend/seat.rs`) and sleeps in a poll over the socket, the end
//! of the process, the stop signal and a nudge. The socket is heard by it alone; an attendant takes whole frames
//! out of the ring and leaves everything else to the owner.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;

use super::LinkEvents;
use super::channel::{self, Channel, Handled, Reception, misplaced};
use super::process::PeerProcess;
use super::reader::{FrameReader, InRing};
use super::socket::{Bounds, StreamEnd};
use crate::agent::wire::Frame;
use crate::attend::{Found, Mail, Owned, Seat, Sleeper};
use crate::error::Error;
use crate::ids::PeerId;
use crate::sync::{Arc, AtomicU32, Mutex, thread};

/// The connection under a mailbox.
pub(super) struct Line {
    pub(super) channel: Channel,
    pub(super) process: PeerProcess,
    /// Wakes the receive thread out of its poll.
    nudge: OwnedFd,
    /// The thread that has the seat and is not the owner.
    attendant: Mutex<Option<thread::ThreadId>>,
}

impl Line {
    pub(super) fn new(channel: Channel, process: PeerProcess) -> Result<Self, Error> {
        let nudge = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::system("eventfd", errno))?;
        Ok(Self {
            channel,
            process,
            nudge,
            attendant: Mutex::new(None),
        })
    }

    /// Waits end with the stop signal and with the process.
    pub(super) fn bounds(&self) -> Bounds<'_> {
        Bounds {
            process: Some(self.process.as_fd()),
            ..self.channel.bounds()
        }
    }

    /// Whether the calling thread attends to the ring: then it is inside of one of its events, and the receive
    /// thread cannot end before it has left.
    pub(super) fn is_attended_here(&self) -> bool {
        *self.attendant.lock() == Some(thread::current().id())
    }

    /// Sleeps until the socket is readable (`true`) or an attendant nudges.
    fn wait(&self) -> Result<bool, StreamEnd> {
        let stop = &self.channel.stop;
        loop {
            if stop.is_raised() {
                return Err(StreamEnd::Stopped);
            }
            let (socket, process) = (self.channel.socket.as_fd(), self.process.as_fd());
            let mut fds = [
                PollFd::new(&socket, PollFlags::IN),
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(&process, PollFlags::IN),
                PollFd::new(&self.nudge, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(StreamEnd::Io(errno)),
            }
            let [is_readable, _, has_ended, is_nudged] = fds.map(|fd| !fd.revents().is_empty());
            if is_nudged {
                // Fails only when somebody else has taken it, and nobody else does.
                let _ = rustix::io::read(&self.nudge, &mut [0; 8]);
            }
            // What was sent before the end is read first.
            if is_readable || is_nudged {
                return Ok(is_readable);
            }
            if has_ended {
                return Err(StreamEnd::PeerDead);
            }
        }
    }
}

/// What reads the frames of one peer and handles them.
pub(super) struct Mailbox {
    pub(super) reader: FrameReader,
    /// What ends the connection, found by an attendant.
    end: Option<Result<(), StreamEnd>>,
    line: Arc<Line>,
    peer: PeerId,
    events: Arc<dyn LinkEvents>,
}

impl Mailbox {
    pub(super) fn new(
        mut reader: FrameReader,
        line: Arc<Line>,
        peer: PeerId,
        events: Arc<dyn LinkEvents>,
    ) -> Self {
        reader.spin_for(events.spin());
        Self {
            reader,
            end: None,
            line,
            peer,
            events,
        }
    }

    /// For the receive thread: handles what comes until the link ends, and says why. `Ok` is a goodbye of the
    /// peer. Threads that wait may attend to the ring while it sleeps.
    pub(super) fn receive(self) -> (Self, Result<(), StreamEnd>) {
        let (line, listed) = (self.line.clone(), Listed(self.peer, self.events.clone()));
        let mut owned = Seat::open(self);
        let seat = owned.seat().clone();
        listed.1.attended(listed.0, Some(seat.clone()));
        let end = loop {
            if let Some(end) = owned.mail().work() {
                break end;
            }
            if !owned.mail().park(Sleeper::Owner) {
                continue;
            }
            drop(owned);
            let woken = line.wait();
            owned = Seat::call_back(&seat);
            if let Err(end) = owned.mail().woken(woken) {
                break Err(end);
            }
        };
        (Owned::keep(owned), end)
    }

    /// [`channel::receive`] within other bounds, once [`Mailbox::receive`] has ended.
    pub(super) fn receive_last(&mut self, bounds: Bounds<'_>) -> Result<(), StreamEnd> {
        let to = (self.peer, &*self.events);
        let channel = &self.line.channel;
        channel::receive(channel, &mut self.reader, bounds, to, &mut NoWrites)
    }

    /// Handles what is there. `None` when nothing is left, otherwise the end of the link.
    fn work(&mut self) -> Option<Result<(), StreamEnd>> {
        let line = self.line.clone();
        let (socket, bounds) = (&line.channel.socket, line.bounds());
        let mut may_spin = true;
        loop {
            // Also with a frame in the buffer: a callback may just have closed the link.
            if bounds.is_stopped() {
                return Some(Err(StreamEnd::Stopped));
            }
            if let Some(end) = self.end.take() {
                return Some(end);
            }
            match self.reader.look(socket) {
                Err(end) => return Some(Err(end)),
                Ok(true) => match self.reader.next(socket, bounds) {
                    Ok(frame) => self.handle(frame),
                    Err(end) => return Some(Err(end)),
                },
                Ok(false) => {
                    let spin = self.reader.spin();
                    match self.reader.resting().filter(|_| may_spin) {
                        Some(inlet) if !spin.is_zero() => {
                            inlet.look_around(spin, bounds);
                            may_spin = false;
                            continue;
                        }
                        _ => return None,
                    }
                }
            }
            may_spin = true;
        }
    }

    fn handle(&mut self, frame: Frame) {
        let to = (self.peer, &*self.events);
        self.end = match channel::handle(frame, &mut self.reader, to, &mut NoWrites) {
            Ok(Handled::Frame) => None,
            Ok(Handled::Bye) => Some(Ok(())),
            Err(end) => Some(Err(end)),
        };
    }

    fn woken(&mut self, woken: Result<bool, StreamEnd>) -> Result<(), StreamEnd> {
        self.unpark();
        match (woken, self.reader.inlet()) {
            (Ok(false), _) | (Ok(true), None) => Ok(()),
            (Ok(true), Some(inlet)) => inlet.woken(Ok(())),
            (Err(end), Some(inlet)) => inlet.woken(Err(end)),
            (Err(end), None) => Err(end),
        }
    }
}

impl Mail for Mailbox {
    fn step(&mut self) -> Found {
        let line = self.line.clone();
        if self.end.is_some() || line.channel.stop.is_raised() {
            return Found::NotMine;
        }
        match self
            .reader
            .next_in_ring(&line.channel.socket, line.bounds())
        {
            Ok(InRing::Frame(frame)) => {
                self.handle(frame);
                Found::Frame
            }
            Ok(InRing::Nothing) => Found::Nothing,
            Ok(InRing::NotMine) => Found::NotMine,
            Err(end) => {
                self.end = Some(Err(end));
                Found::NotMine
            }
        }
    }

    fn park(&self, sleeper: Sleeper) -> bool {
        let is_over = self.end.is_some();
        let resting = self.reader.resting().filter(|_| !is_over);
        resting.is_some_and(|inlet| inlet.park(sleeper))
    }

    fn unpark(&self) {
        if let Some(inlet) = self.reader.ring() {
            inlet.unpark();
        }
    }

    fn word(&self) -> Option<&AtomicU32> {
        Some(self.reader.ring()?.bell())
    }

    fn nudge(&self) {
        // Fails only when the counter is full, and then it is readable already.
        let _ = rustix::io::write(&self.line.nudge, &1_u64.to_ne_bytes());
    }

    fn taken(&self, is_taken: bool) {
        *self.line.attendant.lock() = is_taken.then(|| thread::current().id());
    }
}

/// The ring is listed as one that others may attend to, until this is dropped.
struct Listed(PeerId, Arc<dyn LinkEvents>);

impl Drop for Listed {
    fn drop(&mut self) {
        self.1.attended(self.0, None);
    }
}

/// Nobody sends payload over this socket.
pub(super) struct NoWrites;

impl Reception for NoWrites {
    fn frame(&mut self, frame: Frame, _reader: &mut FrameReader) -> Result<(), StreamEnd> {
        Err(misplaced(&frame))
    }
}
