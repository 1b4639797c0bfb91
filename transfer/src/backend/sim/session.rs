//! Simulated sessions: connections that break at any moment, and others that take their place.
//!
//! What is numbered, kept, sent again and dropped is decided by the code that sessions over `tcp` run on
//! (`engine/session.rs`); simulated are the wire, which loses everything that it carries when it breaks, and the
//! two sides, each of which notices later. As over `tcp` the receiver does the copying: it looks at the number
//! of a write before its first byte.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::session_link::SessionLink;
use super::{Event, Garbage, Net, RunCopy, SimNet, State, What};
use crate::{
    Agent, arc_dyn,
    backend::{Link, LinkEvents, PostedOp, Quiesce, Resolved},
    engine::{
        Engine,
        session::{Received, Session, Take},
    },
    error::{Cause, Error, ErrorKind},
    ids::{OpId, PeerId},
    sync::Arc,
    visibility::Visibility,
};

/// So many messages are acknowledged at once.
const EVERY_ITEMS: u64 = 4;
/// Of a thousand breaks, so many are not followed by another connection.
const OVER_PER_MILLE: u32 = 150;
/// A side may notice a break so many times later than the other one.
const LATE: u64 = 8;

/// What has a number.
#[derive(Clone)]
pub(super) enum Item {
    Write(Arc<PostedOp>),
    Message(Bytes),
}

/// One end of a session.
pub(super) struct SessionEnd {
    pub(super) sent: Arc<Session<(), Item, String>>,
    pub(super) received: Received,
    /// Writes of the peer that were refused: it may not have heard of it.
    pub(super) refusals: Vec<(u64, String)>,
    /// Reads of this end that were not answered, and the connection that they were asked over.
    pub(super) reads: BTreeMap<OpId, (Arc<PostedOp>, u64)>,
}

/// What happens between the two ends.
pub(super) enum Frame {
    /// An item begins to arrive; its runs land at these moments, and then it is handled.
    Begin {
        number: u64,
        item: Item,
        is_copy: bool,
        moments: Vec<u64>,
        until: u64,
    },
    Handled {
        number: u64,
        item: Item,
        is_copy: bool,
        refusal: Option<String>,
    },
    Ack {
        connection: u64,
        through: u64,
        refusal: Option<String>,
    },
    Read {
        op: Arc<PostedOp>,
    },
    ReadDone {
        op: OpId,
        refusal: Option<String>,
    },
    /// The end that caused it notices that the connection has broken.
    Suspended,
    /// Both ends have noticed: another connection, or none any more.
    Reunion {
        is_over: bool,
    },
}

impl SimNet {
    /// As [`SimNet::connect`], with a session that outlives its connection: [`SimNet::break_one`].
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] when one of them is shut down.
    pub fn connect_in_session(&self, a: &Agent, b: &Agent) -> Result<(PeerId, PeerId), Error> {
        let (a, b) = (a.engine(), b.engine());
        let (told_a, told_b) = (a.describe(), b.describe());
        let first = {
            let mut state = self.net.state.lock();
            let first = state.add_pair(a, b);
            for end in [first, first + 1] {
                state.ends[end].session = Some(SessionEnd {
                    sent: Arc::new(Session::new(())),
                    received: Received::new(EVERY_ITEMS, u64::MAX),
                    refusals: Vec::new(),
                    reads: BTreeMap::new(),
                });
            }
            state.wires.insert(first | 1, 1);
            first
        };
        let link = |end| arc_dyn!(SessionLink { net: self.net.clone(), end } => dyn Link);
        let b_at_a = Engine::attach(a, link(first), told_b.metadata.clone(), &told_a)?;
        let a_at_b = Engine::attach(b, link(first + 1), told_a.metadata.clone(), &told_b)
            .inspect_err(|error| a.drop_peer(b_at_a, Cause::lost(error)))?;
        Ok((b_at_a, a_at_b))
    }

    /// Breaks one of the connections under sessions, chosen by the seed; `false` when none stands. What it carries is
    /// lost, and most of the time another one takes its place after both sides have noticed.
    pub fn break_one(&self) -> bool {
        let mut state = self.net.state.lock();
        let standing: Vec<usize> = state.wires.keys().copied().collect();
        if standing.is_empty() {
            return false;
        }
        let pair = standing[state.random(standing.len() as u64) as usize];
        state.wires.remove(&pair);
        state.counts.breaks += 1;
        let carried = state.take_events_of(pair);
        let mut last = state.now_ns;
        for end in [pair ^ 1, pair] {
            let delay = state.delay(&self.net.faults) * (1 + state.random(LATE));
            let at = state.now_ns + delay;
            last = last.max(at);
            state.schedule(at, end, What::Session(Frame::Suspended));
        }
        let is_over = state.happens(OVER_PER_MILLE);
        let at = last + state.delay(&self.net.faults);
        state.schedule(at, pair, What::Session(Frame::Reunion { is_over }));
        drop(state);
        drop(carried);
        true
    }
}

impl Net {
    pub(super) fn session_event(&self, from: usize, frame: Frame) {
        match frame {
            Frame::Begin {
                number,
                item,
                is_copy,
                moments,
                until,
            } => self.begin(from, (number, item, is_copy), moments, until),
            Frame::Handled {
                number,
                item,
                is_copy,
                refusal,
            } => self.handled(from, (number, item, is_copy), refusal),
            Frame::Ack {
                connection,
                through,
                refusal,
            } => self.acknowledged(from ^ 1, connection, through, refusal),
            Frame::Read { op } => self.asked(from, op),
            Frame::ReadDone { op, refusal } => self.answered(from, op, refusal),
            Frame::Suspended => self.suspended(from),
            Frame::Reunion { is_over: false } => self.reunited(from),
            Frame::Reunion { is_over: true } => self.parted(from),
        }
    }

    fn begin(
        &self,
        from: usize,
        (number, item, is_copy): (u64, Item, bool),
        moments: Vec<u64>,
        until: u64,
    ) {
        let Some((peer, events)) = self.receiver(from ^ 1) else {
            return;
        };
        let take = self.state.lock().session(from ^ 1).received.take(number);
        assert_ne!(
            take,
            Take::Gap,
            "item {number} before the one in front of it"
        );
        let mut refusal = None;
        if let (Take::Fresh, Item::Write(op)) = (take, &item) {
            match events.resolve(peer, &op.runs.remote()) {
                Ok(theirs) => self.state.lock().copies(from, op, theirs, &moments),
                Err(error) => refusal = Some(error.to_string()),
            }
        }
        let frame = Frame::Handled {
            number,
            item,
            is_copy,
            refusal,
        };
        self.state
            .lock()
            .schedule(until, from, What::Session(frame));
    }

    fn handled(
        &self,
        from: usize,
        (number, item, is_copy): (u64, Item, bool),
        refusal: Option<String>,
    ) {
        let here = from ^ 1;
        let Some((peer, events)) = self.receiver(here) else {
            return;
        };
        let take = self.state.lock().session(here).received.take(number);
        let bytes = match &item {
            Item::Message(bytes) => bytes.len() as u64,
            Item::Write(_) => 0,
        };
        let mut is_told = matches!(item, Item::Write(_)) || take == Take::Duplicate;
        match (take, item) {
            (Take::Duplicate, _) => {
                assert!(is_copy, "item {number} was handled, and is sent again");
                events.repeated(peer);
            }
            (_, Item::Message(bytes)) => events.message(peer, bytes),
            (_, Item::Write(op)) => {
                if let (Some(arrival), None) = (&op.arrival, &refusal) {
                    events.arrived(peer, arrival.clone(), Visibility::RemoteVisible);
                }
            }
        }
        let mut state = self.state.lock();
        // A callback may have ended the connection.
        let Some(session) = &mut state.ends[here].session else {
            return;
        };
        if take == Take::Fresh {
            is_told |= session.received.handled(bytes);
            session
                .refusals
                .extend(refusal.clone().map(|reason| (number, reason)));
        }
        let through = session.received.through();
        if is_told {
            session.received.tell();
            state.acknowledge(here, through, refusal, &self.faults);
        }
    }

    fn acknowledged(&self, here: usize, connection: u64, through: u64, refusal: Option<String>) {
        let Some((peer, events)) = self.receiver(here) else {
            return;
        };
        let sent = self.state.lock().session(here).sent.clone();
        let tell = |item, refusal| tell(peer, &*events, item, refusal);
        let checked = sent.answered(connection, through, refusal, tell);
        assert_eq!(checked, Ok(()), "more was acknowledged than was sent");
    }

    /// The peer of `from` serves a read.
    fn asked(&self, from: usize, op: Arc<PostedOp>) {
        let Some((peer, events)) = self.receiver(from ^ 1) else {
            return;
        };
        let source = events.resolve(peer, &op.runs.remote());
        let mut state = self.state.lock();
        let run_count = op.runs.remote().len();
        let (moments, until) = state.moments(from ^ 1, run_count, &self.faults);
        let refusal = match source {
            Ok(theirs) => {
                state.copies(from, &op, theirs, &moments);
                None
            }
            Err(error) => Some(error.to_string()),
        };
        let done = Frame::ReadDone { op: op.id, refusal };
        state.schedule(until, from, What::Session(done));
    }

    fn answered(&self, here: usize, op: OpId, refusal: Option<String>) {
        let Some((peer, events)) = self.receiver(here) else {
            return;
        };
        let read = self.state.lock().session(here).reads.remove(&op);
        assert!(read.is_some(), "a read is answered twice");
        tell_end(peer, &*events, op, refusal);
    }

    fn suspended(&self, here: usize) {
        let Some((peer, events)) = self.receiver(here) else {
            return;
        };
        let sent = self.state.lock().session(here).sent.clone();
        sent.suspend();
        events.suspended(peer, broken());
    }

    fn reunited(&self, pair: usize) {
        let ends = [pair ^ 1, pair];
        {
            let mut state = self.state.lock();
            let through = ends.map(|end| state.session(end ^ 1).received.through());
            for (end, through) in ends.into_iter().zip(through) {
                let resumed = state.session(end).sent.resume((), through);
                let number = resumed.expect("what the other side has handled was sent");
                let number = number.expect("nobody has ended the session");
                state.wires.insert(pair, number);
            }
            for end in ends {
                let session = state.session(end);
                let refusals = session.refusals.clone();
                let through = session.received.tell();
                for (number, reason) in refusals {
                    state.acknowledge(end, number, Some(reason), &self.faults);
                }
                state.acknowledge(end, through, None, &self.faults);
            }
        }
        for end in ends {
            if let Some((peer, events)) = self.receiver(end) {
                events.resumed(peer);
            }
        }
    }

    /// No other connection came in time: both sides are past the last one.
    fn parted(&self, pair: usize) {
        for end in [pair ^ 1, pair] {
            let (receiver, session) = {
                let mut state = self.state.lock();
                let end = &mut state.ends[end];
                end.is_closed = true;
                (end.receiver.take(), end.session.take())
            };
            drop(session);
            if let Some((peer, events)) = receiver {
                events.down(peer, broken(), Quiesce::Proven);
            }
        }
    }
}

fn broken() -> Cause {
    Cause::PeerLost {
        reason: "the connection has broken".to_owned(),
    }
}

pub(super) fn tell(peer: PeerId, events: &dyn LinkEvents, item: Item, refusal: Option<String>) {
    match item {
        Item::Message(bytes) => events.acknowledged(peer, 1, bytes.len()),
        Item::Write(op) => tell_end(peer, events, op.id, refusal),
    }
}

fn tell_end(peer: PeerId, events: &dyn LinkEvents, op: OpId, refusal: Option<String>) {
    let result = match refusal {
        None => Ok(Visibility::RemoteVisible),
        Some(reason) => {
            events.settled(peer, op);
            Err(ErrorKind::Refused { reason }.into())
        }
    };
    events.completed(peer, op, result);
}

impl State {
    /// Only while the connection of this end has not ended.
    fn session(&mut self, end: usize) -> &mut SessionEnd {
        let session = &mut self.ends[end].session;
        session.as_mut().expect("its events go with the session")
    }

    /// Takes out what is on its way between two ends. To be dropped with the state free.
    fn take_events_of(&mut self, pair: usize) -> Vec<Garbage> {
        let of_pair = self.events.iter().filter(|(_, e)| e.from | 1 == pair);
        let keys: Vec<_> = of_pair.map(|(key, _)| *key).collect();
        keys.into_iter()
            .filter_map(|key| self.events.remove(&key))
            .map(|event: Event| Garbage::Event(event.what))
            .collect()
    }

    /// When the runs of something that `end` sends land, and when it is over; in order behind all before.
    pub(super) fn moments(
        &mut self,
        end: usize,
        run_count: usize,
        faults: &super::SimFaults,
    ) -> (Vec<u64>, u64) {
        let mut at = self.ends[end].in_order_ns.max(self.now_ns) + self.delay(faults);
        let mut moments = Vec::with_capacity(run_count);
        for _ in 0..run_count {
            moments.push(at);
            at += self.delay(faults);
        }
        self.ends[end].in_order_ns = at;
        (moments, at)
    }

    /// The copies of an operation that `end` has posted.
    fn copies(&mut self, end: usize, op: &Arc<PostedOp>, theirs: Resolved, moments: &[u64]) {
        let theirs = Arc::new(theirs);
        let mut slot = 0;
        let pairs = op.runs.iter().zip(theirs.runs.iter().copied());
        for (((ours, remote), run), at) in pairs.zip(moments) {
            let first = slot;
            slot += u64::from(remote.slot_count);
            let copy = RunCopy {
                op: op.op,
                ours,
                theirs: run,
                slots: first..slot,
                landing: op.landing.clone(),
                _held: theirs.clone(),
            };
            self.schedule(*at, end, What::Copy(copy));
        }
    }

    fn acknowledge(
        &mut self,
        end: usize,
        through: u64,
        refusal: Option<String>,
        faults: &super::SimFaults,
    ) {
        let Some(connection) = self.wires.get(&(end | 1)).copied() else {
            return; // said again over the next one
        };
        let (_, at) = self.moments(end, 0, faults);
        let frame = Frame::Ack {
            connection,
            through,
            refusal,
        };
        self.schedule(at, end, What::Session(frame));
    }

    /// Whether the wire carries what an end sends over the connection that it knows. What it does not is lost: this
    /// end has not noticed.
    pub(super) fn carries(&self, end: usize, connection: u64) -> bool {
        self.wires.get(&(end | 1)) == Some(&connection)
    }
}
