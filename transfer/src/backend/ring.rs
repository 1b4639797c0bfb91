//! The frames of two processes of one host: they lie in a ring that both map, and the socket wakes.
//!
//! Each side reads a ring in memory of its own, which it hands over in the handshake (`mem/ring.rs`). A sender
//! puts its frames there; only if the reader sleeps does it send one byte, [`WAKE`], over the socket. So the
//! one `poll` of the receive thread covers the ring, the end of the socket, the end of the process and the stop
//! signal, and no descriptor of the peer is ever read or written here.
//!
//! A frame that does not fit goes over the socket: a mark in the ring says that the order goes on there, and the
//! byte [`BACK`] behind a frame says that it goes on in the ring. So a slow reader holds up its sender as it does
//! with a socket alone, nobody waits for room in a ring, and the frames have one order.
//!
//! A sender may wake before it puts ([`Outlet::rouse`]): who wakes up for nothing looks for a moment, and sleeps
//! again.
//!
//! Both bytes stand between frames only. What the peer may write into the ring is checked in `mem/ring.rs`; here,
//! whatever does not fit ends the connection.
//!
//! **What is protected by what.** The outlet is used under the lock of the channel's sending half, the inlet by
//! whoever has the seat of its connection (`attend/seat.rs`): the receive thread, or a thread that waits.

use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::reader::Ahead;
use super::socket::{Bounds, Socket, StreamEnd};
use crate::agent::wire::{Header, Kind, WireError};
use crate::attend::{ROUSED, Sleeper};
use crate::mem::ring::{Corrupt, Inbox, Outbox, Taken};
use crate::sync::AtomicU32;

/// Between frames on the socket: look into the ring.
pub(super) const WAKE: u8 = 0;
/// Between frames on the socket: the next one lies in the ring.
pub(super) const BACK: u8 = 1;
/// Longest run of bytes that is put into the ring at once.
const CHUNK_BYTES: usize = 16 * 1024;

impl From<Corrupt> for StreamEnd {
    fn from(_: Corrupt) -> Self {
        Self::Wire(WireError::Ring)
    }
}

/// Where the frames of this side go.
pub(super) struct Outlet {
    ring: Outbox,
    is_on_socket: bool,
}

impl Outlet {
    pub(super) fn new(ring: Outbox) -> Self {
        Self {
            ring,
            is_on_socket: false,
        }
    }

    /// Takes whole frames out of `words`; what is left there afterwards has to be sent over the socket, before
    /// anything else. Never waits.
    pub(super) fn route(&mut self, words: &mut Vec<u8>, socket: &Socket) -> Result<(), StreamEnd> {
        if words.is_empty() {
            return Ok(());
        }
        if !self.is_on_socket {
            if words.len() <= CHUNK_BYTES && self.ring.put(words)? {
                words.clear();
                return self.wake(socket);
            }
            self.ring.mark()?;
            self.is_on_socket = true;
        }
        if self.ring.is_half_free()? {
            words.push(BACK);
            self.is_on_socket = false;
        }
        Ok(())
    }

    /// Whether frames of so many bytes would go into the ring now.
    pub(super) fn takes_at_once(&mut self, len_bytes: usize) -> bool {
        !self.is_on_socket && self.ring.has_room(len_bytes) == Ok(true)
    }

    /// Wakes the reader before anything is there for it.
    pub(super) fn rouse(&self, socket: &Socket) -> Result<(), StreamEnd> {
        match !self.is_on_socket && self.ring.may_sleep() {
            true => self.wake(socket),
            false => Ok(()),
        }
    }

    /// Wakes the reader to answer a question, wherever it waits. Between two frames.
    pub(super) fn ask(&self, socket: &Socket) -> Result<(), StreamEnd> {
        match self.is_on_socket {
            // It reads there, and looks for questions between two reads only.
            true => wake_over(socket),
            false => self.wake(socket),
        }
    }

    /// Wakes the peer if it sleeps.
    pub(super) fn wake(&self, socket: &Socket) -> Result<(), StreamEnd> {
        match self.ring.must_wake() {
            None => Ok(()),
            Some(Sleeper::Attendant) => {
                self.ring.wake_attendant();
                Ok(())
            }
            Some(Sleeper::Owner) => wake_over(socket),
        }
    }
}

fn wake_over(socket: &Socket) -> Result<(), StreamEnd> {
    match socket.send_some(&[WAKE]) {
        // A full socket has something to read, and wakes as well.
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(errno) => Err(StreamEnd::Io(errno)),
    }
}

/// Where the frames of the peer come from.
pub(super) struct Inlet {
    ring: Inbox,
    ahead: Ahead,
    is_on_socket: bool,
    /// Something has come through the ring.
    has_begun: bool,
    spin: Duration,
    /// The socket had something when it was asked last.
    is_readable: bool,
    /// It was woken, and nothing has come since.
    is_roused: bool,
    /// Why nothing comes any more behind what lies in the ring.
    end: Option<StreamEnd>,
}

impl Inlet {
    pub(super) fn new(ring: Inbox) -> Self {
        Self {
            ring,
            ahead: Ahead::new(),
            is_on_socket: false,
            has_begun: false,
            spin: Duration::ZERO,
            is_readable: false,
            is_roused: false,
            end: None,
        }
    }

    /// Looks for so long before it sleeps.
    pub(super) fn spin_for(&mut self, spin: Duration) {
        self.spin = spin;
    }

    /// Whether the next bytes come over the socket.
    pub(super) fn is_on_socket(&self) -> bool {
        self.is_on_socket
    }

    /// What was taken out of the ring and not used.
    pub(super) fn ahead(&self) -> &Ahead {
        &self.ahead
    }

    pub(super) fn ahead_mut(&mut self) -> &mut Ahead {
        &mut self.ahead
    }

    /// Takes a byte that is no part of a frame out of what was read from the socket; `false` when there is none.
    pub(super) fn take_sign(&mut self, beside: &mut Ahead) -> bool {
        match beside.bytes().first() {
            Some(&WAKE) if self.is_on_socket => {}
            Some(&BACK) if self.is_on_socket => self.is_on_socket = false,
            _ => return false,
        }
        beside.consume(1);
        true
    }

    /// Takes bytes out of the ring, or hears that the order goes on on the socket; sleeps until then. What comes
    /// over the socket meanwhile goes to `beside`.
    pub(super) fn fill(
        &mut self,
        socket: &Socket,
        beside: &mut Ahead,
        bounds: Bounds<'_>,
    ) -> Result<(), StreamEnd> {
        let mut has_spun = self.spin.is_zero();
        loop {
            if bounds.is_stopped() {
                return Err(StreamEnd::Stopped);
            }
            if self.look(socket, beside)? {
                return Ok(());
            }
            if !std::mem::replace(&mut has_spun, true) {
                self.look_around(self.spin, bounds);
            } else if self.park(Sleeper::Owner) {
                let woken = socket.wait(PollFlags::IN, bounds);
                self.woken(woken.map(|_| ()))?;
            }
        }
    }

    /// [`Inlet::fill`] as far as it waits for nothing; `false` when nothing is there.
    pub(super) fn look(&mut self, socket: &Socket, beside: &mut Ahead) -> Result<bool, StreamEnd> {
        loop {
            if self.take()? != Taken::Nothing {
                return Ok(true);
            }
            while beside.bytes().first() == Some(&WAKE) {
                beside.consume(1);
            }
            if !self.has_begun && is_refusal(beside.bytes()) {
                // The greeting ended there before it came to use the ring.
                self.is_on_socket = true;
                return Ok(true);
            }
            if !beside.bytes().is_empty() {
                // The mark would lie in the ring by now.
                return Err(StreamEnd::Wire(WireError::Ring));
            }
            if let Some(end) = &self.end {
                return Err(end.clone());
            }
            if !self.is_readable {
                return Ok(false);
            }
            self.hear(socket, beside);
        }
    }

    /// Takes what is next in the ring.
    pub(super) fn take(&mut self) -> Result<Taken, Corrupt> {
        let taken = self.ring.take(self.ahead.space())?;
        match taken {
            Taken::Chunk(count) => {
                self.ahead.grow(count);
                self.is_roused = false;
            }
            Taken::Mark => self.is_on_socket = true,
            Taken::Nothing => return Ok(taken),
        }
        self.has_begun = true;
        Ok(taken)
    }

    /// As [`crate::mem::ring::Reader::park`].
    pub(super) fn park(&self, sleeper: Sleeper) -> bool {
        self.ring.park(sleeper)
    }

    /// Nobody sleeps.
    pub(super) fn unpark(&self) {
        self.ring.unpark();
    }

    /// As [`crate::mem::ring::Reader::beat`].
    pub(super) fn beat(&mut self) {
        self.ring.beat();
    }

    /// What the peer changes when it wakes an attendant.
    pub(super) fn bell(&self) -> &AtomicU32 {
        self.ring.bell()
    }

    /// The owner is awake: the socket has something, or `woken` says what has ended its sleep.
    pub(super) fn woken(&mut self, woken: Result<(), StreamEnd>) -> Result<(), StreamEnd> {
        self.ring.unpark();
        match woken {
            Ok(()) => (self.is_readable, self.is_roused) = (true, true),
            // What it put before its end is taken first.
            Err(StreamEnd::PeerDead) => self.end = Some(StreamEnd::PeerDead),
            Err(end) => return Err(end),
        }
        Ok(())
    }

    /// Reads what the socket has.
    fn hear(&mut self, socket: &Socket, beside: &mut Ahead) {
        self.is_readable = false;
        match socket.receive_some(beside.space(), None) {
            Ok(0) => self.end = Some(StreamEnd::Closed),
            Ok(count) => beside.grow(count),
            Err(Errno::AGAIN) => {}
            Err(errno) => self.end = Some(StreamEnd::Io(errno)),
        }
    }

    /// Looks for `spin` at most.
    pub(super) fn look_around(&self, spin: Duration, bounds: Bounds<'_>) {
        let began = Instant::now();
        while !self.ring.has_some() && !bounds.is_stopped() && began.elapsed() < spin {
            std::hint::spin_loop();
        }
    }

    /// How long it looks before it sleeps; longer once it was woken and has found nothing.
    pub(super) fn spin(&mut self) -> Duration {
        match std::mem::take(&mut self.is_roused) {
            true => self.spin.max(ROUSED),
            false => self.spin,
        }
    }
}

/// Whether a frame begins there with which a peer refuses to greet.
fn is_refusal(bytes: &[u8]) -> bool {
    let header = bytes.first_chunk().map(Header::parse);
    header.is_some_and(|header| header.is_ok_and(|header| header.kind == Kind::Refuse))
}

#[cfg(test)]
impl Outlet {
    /// As after frames that the ring did not take.
    pub(super) fn go_on_socket(&mut self) {
        self.ring.mark().unwrap_or_else(|_| panic!("a full ring"));
        self.is_on_socket = true;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::super::reader::FrameReader;
    use super::*;
    use crate::agent::wire::{self, Frame};
    use crate::deadline::Deadline;
    use crate::mem::PeerMapping;
    use crate::mem::ring;
    use crate::sync::{Arc, AtomicBool, Ordering, thread};

    /// A side that sends, and a reader.
    fn pair() -> (Socket, Outlet, Socket, FrameReader) {
        let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
        let (here, there) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let memory = Arc::new(ring::memory().unwrap());
        let file = memory.file().unwrap().try_clone_to_owned().unwrap();
        let mapping = PeerMapping::map(&file, memory.len_bytes()).unwrap();
        let mut reader = FrameReader::new(false);
        reader.trust(usize::MAX);
        reader.read_ring(ring::inbox(memory).unwrap());
        let outlet = Outlet::new(ring::outbox(mapping).unwrap());
        let (here, there) = (Socket::new(here).unwrap(), Socket::new(there).unwrap());
        (here, outlet, there, reader)
    }

    fn soon() -> Bounds<'static> {
        Bounds {
            stop: None,
            deadline: Some(Deadline::after_ms(20_000)),
            process: None,
            writable: None,
        }
    }

    fn message(number: usize, len_bytes: usize) -> Vec<u8> {
        (0..len_bytes).map(|at| (at + number) as u8).collect()
    }

    fn send(socket: &Socket, outlet: &mut Outlet, body: &[u8]) -> Result<(), StreamEnd> {
        let mut words = Vec::new();
        wire::append_message(&mut words, body);
        outlet.route(&mut words, socket)?;
        socket.send_all(&words, soon())
    }

    /// Through the ring, beside it when they are long, and beside it when the reader is slow.
    #[test]
    fn frames_of_every_length_keep_their_order() {
        const COUNT: usize = 3_000;
        // Long ones only once the reader reads: a socket holds few of them.
        let length = |number: usize| match number % 50 {
            0 if number > 1_000 => 100_000,
            1 if number > 1_000 => CHUNK_BYTES + number,
            _ => 1 + number % 700,
        };
        let (here, mut outlet, there, mut reader) = pair();
        let is_full = Arc::new(AtomicBool::new(false));
        let was_full = is_full.clone();
        let sender = thread::spawn(move || {
            for number in 0..COUNT {
                send(&here, &mut outlet, &message(number, length(number))).unwrap();
                was_full.fetch_or(outlet.is_on_socket, Ordering::Relaxed);
            }
            here
        });
        while !is_full.load(Ordering::Relaxed) && !sender.is_finished() {
            thread::yield_now();
        }
        for number in 0..COUNT {
            let frame = reader.next(&there, soon()).unwrap();
            let expected = message(number, length(number));
            assert_eq!(frame, Frame::Message(expected.into()), "{number}");
        }
        drop(sender.join().unwrap());
        assert_eq!(reader.next(&there, soon()), Err(StreamEnd::Closed));
    }

    #[test]
    fn a_sender_that_ends_is_heard_behind_its_last_frame() {
        let (here, mut outlet, there, mut reader) = pair();
        send(&here, &mut outlet, b"first").unwrap();
        send(&here, &mut outlet, b"last").unwrap();
        drop(here);
        for body in [&b"first"[..], b"last"] {
            let frame = reader.next(&there, soon()).unwrap();
            assert_eq!(frame, Frame::Message(body.into()));
        }
        assert_eq!(reader.next(&there, soon()), Err(StreamEnd::Closed));
    }

    /// I-16: the connection ends, and nothing else happens.
    #[test]
    fn numbers_that_no_peer_writes_end_the_connection() {
        let (here, mut outlet, there, mut reader) = pair();
        send(&here, &mut outlet, b"first").unwrap();
        outlet.ring.spoil();
        let corrupt = Err(StreamEnd::Wire(WireError::Ring));
        assert_eq!(reader.next(&there, soon()), corrupt);

        let (here, _outlet, there, mut reader) = pair();
        here.send_all(&[WAKE, WAKE, BACK], soon()).unwrap();
        assert_eq!(reader.next(&there, soon()), corrupt, "nothing was marked");

        let (here, mut outlet, there, mut reader) = pair();
        let mut garbage = b"no frame".to_vec();
        outlet.route(&mut garbage, &here).unwrap();
        let end = reader.next(&there, soon()).unwrap_err();
        assert!(
            matches!(end, StreamEnd::Wire(WireError::BadMagic(_))),
            "{end}"
        );
    }

    /// I-9: of a listener that stops within the greeting, when this side has begun to read its ring.
    #[test]
    fn a_refusal_is_heard_before_anything_came_through_the_ring() {
        let refusal = wire::Refusal {
            code: 3,
            reason: "stopped".to_owned(),
        };
        let mut words = vec![WAKE];
        wire::append_refuse(&mut words, &refusal);
        let (here, _outlet, there, mut reader) = pair();
        here.send_all(&words, soon()).unwrap();
        assert_eq!(reader.next(&there, soon()), Ok(Frame::Refuse(refusal)));

        let (here, mut outlet, there, mut reader) = pair();
        send(&here, &mut outlet, b"first").unwrap();
        here.send_all(&words, soon()).unwrap();
        assert!(reader.next(&there, soon()).is_ok());
        let corrupt = Err(StreamEnd::Wire(WireError::Ring));
        assert_eq!(
            reader.next(&there, soon()),
            corrupt,
            "it is past its greeting"
        );
    }

    /// I-6: an early wake is no frame, and takes none away.
    #[test]
    fn a_reader_that_is_woken_for_nothing_sleeps_again_and_hears_the_frame() {
        let (here, mut outlet, there, mut reader) = pair();
        let receiver = thread::spawn(move || reader.next(&there, soon()));
        for wake in 0..4 {
            while !outlet.ring.may_sleep() {
                assert!(!receiver.is_finished(), "wake {wake}");
                thread::yield_now();
            }
            outlet.rouse(&here).unwrap();
        }
        send(&here, &mut outlet, b"frame").unwrap();
        let frame = receiver.join().unwrap();
        assert_eq!(frame, Ok(Frame::Message(b"frame"[..].into())));
    }

    #[test]
    fn an_awake_reader_costs_no_byte_on_the_socket() {
        let (here, mut outlet, there, mut reader) = pair();
        for number in 0..10 {
            outlet.rouse(&here).unwrap();
            send(&here, &mut outlet, &message(number, 50)).unwrap();
            reader.next(&there, soon()).unwrap();
        }
        let nothing = there.receive_some(&mut [0; 16], None);
        assert_eq!(nothing, Err(Errno::AGAIN));
    }
}
