//! The simulation: links over a virtual clock, one thread, every fault from a seed.
//!
//! Everything above the link is production code: queues, operations, ledgers, barriers, notification. Agents
//! of a [`SimNet`] have no threads; [`SimNet::step`] runs their queues and then the earliest event. An
//! operation is a copy of each run at its own moment, then a completion where it was posted, and for a write
//! an arrival at the peer. Messages never overtake a write that was posted before them, as on every link.
//!
//! **What is protected by what.** One mutex guards the whole network. It is free while an engine is
//! called, so a call may post, close or kill.

mod link;
mod options;
mod session;
mod session_link;

use std::{collections::BTreeMap, fmt, ops::Range};

use bytes::Bytes;

use link::SimLink;
pub use options::{Death, SimCounts, SimFaults};
use session::SessionEnd;

use crate::{
    Agent, AgentBuilder, Arrival, arc_dyn,
    backend::{Link, LinkEvents, PostedOp, Quiesce, Resolved},
    engine::{Engine, Op},
    error::{Cause, Error, ErrorKind},
    ids::{OpId, PeerId},
    landed::Landing,
    mem::{
        copy::{copy_pair, restore, snapshot},
        span::SlotRun,
    },
    sync::{Arc, Mutex},
    visibility::Visibility,
};

/// A network of agents on one thread and one virtual clock.
pub struct SimNet {
    net: Arc<Net>,
}

struct Net {
    faults: SimFaults,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    random: u64,
    now_ns: u64,
    sequence: u64,
    events: BTreeMap<(u64, u64), Event>,
    /// Per end of a connection; the other end is `index ^ 1`.
    ends: Vec<End>,
    /// The number of the connection that carries a session, by the higher end of its pair; none while it is broken.
    wires: BTreeMap<usize, u64>,
    counts: SimCounts,
}

struct End {
    engine: Arc<Engine>,
    receiver: Option<(PeerId, Arc<dyn LinkEvents>)>,
    is_closed: bool,
    /// Where the connection is of a session that has not ended.
    session: Option<SessionEnd>,
    /// What this end asks when the other one is lost.
    quiesce: Quiesce,
    /// Nothing of this end happens at the other end before this moment, unless it may overtake.
    in_order_ns: u64,
    /// Last moment of an operation, which messages do not overtake.
    operations_ns: u64,
}

/// A run of an operation under way.
#[derive(Clone)]
struct RunCopy {
    op: Op,
    ours: SlotRun,
    theirs: SlotRun,
    /// Which slots of the operation, and where it is noted that they have landed.
    slots: Range<u64>,
    landing: Arc<Landing>,
    /// The regions of the peer.
    _held: Arc<Resolved>,
}

impl RunCopy {
    fn both_ends(&self) -> (&SlotRun, &SlotRun) {
        let (ours, theirs) = (&self.ours, &self.theirs);
        match self.op {
            Op::Write => (ours, theirs),
            Op::Read => (theirs, ours),
        }
    }

    /// The end whose memory the bytes come from, of an operation that `end` has posted.
    fn source(&self, end: usize) -> usize {
        match self.op {
            Op::Write => end,
            Op::Read => end ^ 1,
        }
    }
}

struct Event {
    /// The end that caused it.
    from: usize,
    what: What,
}

enum What {
    /// A run of an operation reaches the memory that it is for.
    Copy(RunCopy),
    /// The same, from the memory of a process that is dead.
    Late {
        bytes: Vec<u8>,
        copy: RunCopy,
    },
    Arrive {
        arrival: Arrival,
        level: Visibility,
    },
    Complete {
        op: OpId,
        result: Result<Visibility, Error>,
    },
    Message(Bytes),
    Progress(u64),
    Down {
        cause: Cause,
        quiesce: Quiesce,
    },
    Session(session::Frame),
}

impl SimNet {
    /// An empty network; the same seed and calls give the same run.
    pub fn new(seed: u64, faults: SimFaults) -> Self {
        let state = State {
            random: seed,
            ..State::default()
        };
        Self {
            net: Arc::new(Net {
                faults,
                state: Mutex::new(state),
            }),
        }
    }

    /// Starts to build an agent of this network. It has no threads: nothing happens outside
    /// [`SimNet::step`].
    pub fn agent(&self, name: &str) -> AgentBuilder {
        Agent::builder(name).without_workers()
    }

    /// Connects two agents: the number of `b` at `a`, and of `a` at `b`.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] when one of them is shut down.
    pub fn connect(&self, a: &Agent, b: &Agent) -> Result<(PeerId, PeerId), Error> {
        let (a, b) = (a.engine(), b.engine());
        let (told_a, told_b) = (a.describe(), b.describe());
        let first = self.net.state.lock().add_pair(a, b);
        let link = |end| arc_dyn!(SimLink { net: self.net.clone(), end } => dyn Link);
        let b_at_a = Engine::attach(a, link(first), told_b.metadata.clone(), &told_a)?;
        let a_at_b = Engine::attach(b, link(first + 1), told_a.metadata.clone(), &told_b)
            .inspect_err(|error| a.drop_peer(b_at_a, Cause::lost(error)))?;
        Ok((b_at_a, a_at_b))
    }

    /// Runs the queues of all agents, then the earliest event; `false` when there was none.
    pub fn step(&self) -> bool {
        self.run_queues();
        let next = {
            let mut state = self.net.state.lock();
            state
                .events
                .pop_first()
                .inspect(|((at, _), _)| state.now_ns = *at)
        };
        let Some((_, event)) = next else { return false };
        self.net.happen(event);
        true
    }

    /// Steps until nothing is left to happen.
    pub fn run_until_idle(&self) {
        while self.step() {}
    }

    /// The virtual clock.
    pub fn now_ns(&self) -> u64 {
        self.net.state.lock().now_ns
    }

    /// What was injected so far.
    pub fn counts(&self) -> SimCounts {
        self.net.state.lock().counts
    }

    /// A number below `limit` from the seed of the network.
    pub fn random(&self, limit: u64) -> u64 {
        self.net.state.lock().random(limit)
    }

    /// Kills the process of an agent: it does nothing any more, and its peers hear of it. The agent is to
    /// be dropped.
    pub fn kill(&self, agent: &Agent, death: Death) {
        let mut state = self.net.state.lock();
        let is_of = |end: &End| Arc::ptr_eq(&end.engine, agent.engine());
        let killed: Vec<usize> = (0..state.ends.len())
            .filter(|i| is_of(&state.ends[*i]))
            .collect();
        let mut closed = Vec::new();
        for end in killed {
            if !state.ends[end].is_closed {
                closed.push(state.end_connection(end, death, &self.net.faults));
            }
        }
        drop(state);
        drop(closed);
    }

    fn run_queues(&self) {
        let peers: Vec<_> = {
            let state = self.net.state.lock();
            let open = state.ends.iter().filter(|end| !end.is_closed);
            open.filter_map(|end| Some((end.engine.clone(), end.receiver.as_ref()?.0)))
                .collect()
        };
        for (engine, peer) in peers {
            engine.run_queued(peer);
        }
    }
}

impl Net {
    /// Lets one event happen, with the state free while an engine is called.
    fn happen(&self, Event { from, what }: Event) {
        match what {
            What::Copy(copy) => {
                let (from, to) = copy.both_ends();
                copy_pair(from, to);
                copy.landing.landed(copy.slots.clone());
            }
            What::Late { bytes, copy } => {
                self.state.lock().counts.late_writes += 1;
                restore(&bytes, copy.both_ends().1);
            }
            What::Complete { op, result } => {
                if let Some((peer, events)) = self.receiver(from) {
                    if result.is_err() {
                        events.settled(peer, op);
                    }
                    events.completed(peer, op, result);
                }
            }
            What::Session(frame) => self.session_event(from, frame),
            other => {
                let Some((peer, events)) = self.receiver(from ^ 1) else {
                    return;
                };
                match other {
                    What::Arrive { arrival, level } => events.arrived(peer, arrival, level),
                    What::Message(bytes) => events.message(peer, bytes),
                    What::Progress(counter) => events.progress(peer, counter),
                    What::Down { cause, quiesce } => {
                        let session = self.state.lock().ends[from ^ 1].session.take();
                        drop(session);
                        events.down(peer, cause, quiesce);
                    }
                    What::Copy(_)
                    | What::Late { .. }
                    | What::Complete { .. }
                    | What::Session(_) => {}
                }
            }
        }
    }

    /// `end` closes its connection.
    fn close(&self, end: usize) {
        let mut state = self.state.lock();
        if state.ends[end].is_closed {
            return;
        }
        let garbage = state.end_connection(end, Death::Proven, &self.faults);
        drop(state);
        drop(garbage);
    }

    fn receiver(&self, end: usize) -> Option<(PeerId, Arc<dyn LinkEvents>)> {
        self.state.lock().ends[end].receiver.clone()
    }
}

impl End {
    fn new(engine: Arc<Engine>) -> Self {
        Self {
            engine,
            receiver: None,
            is_closed: false,
            session: None,
            quiesce: Quiesce::Proven,
            in_order_ns: 0,
            operations_ns: 0,
        }
    }
}

impl State {
    /// The two ends of another connection: the number of the first one.
    fn add_pair(&mut self, a: &Arc<Engine>, b: &Arc<Engine>) -> usize {
        let pair = [a, b].map(|engine| End::new(engine.clone()));
        self.ends.extend(pair);
        self.ends.len() - 2
    }

    /// The next number below `limit` (splitmix64).
    fn random(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit.max(1)
    }

    fn happens(&mut self, per_mille: u32) -> bool {
        self.random(1000) < u64::from(per_mille)
    }

    fn delay(&mut self, faults: &SimFaults) -> u64 {
        let Range { start, end } = faults.delay_ns;
        start + self.random(end.saturating_sub(start))
    }

    fn schedule(&mut self, at_ns: u64, from: usize, what: What) {
        self.sequence += 1;
        self.events
            .insert((at_ns, self.sequence), Event { from, what });
    }

    /// An operation of `end`: its copies, the arrival of a write, its completion.
    fn operation(&mut self, end: usize, op: &PostedOp, theirs: Resolved, faults: &SimFaults) {
        let theirs = Arc::new(theirs);
        let start = match faults.reorder {
            true => self.now_ns,
            false => self.ends[end].in_order_ns.max(self.now_ns),
        };
        let fails = self.happens(faults.fail_per_mille);
        let run_count = theirs.runs.len();
        let written_count = if fails {
            self.random(run_count as u64) as usize
        } else {
            run_count
        };
        let (mut landed, mut slot) = (start, 0);
        let pairs = op.runs.iter().zip(theirs.runs.iter().copied());
        for ((ours, remote), run) in pairs.take(written_count) {
            let at = start + self.delay(faults);
            landed = landed.max(at);
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
            self.schedule(at, end, What::Copy(copy));
        }
        let told = landed + self.delay(faults);
        let result = if fails {
            self.counts.failed += 1;
            Err(ErrorKind::Refused {
                reason: "simulated failure".to_owned(),
            }
            .into())
        } else {
            if let Some(arrival) = op.arrival.as_ref().filter(|_| op.op == Op::Write) {
                self.announce(end, arrival, start..landed, told, faults);
            }
            Ok(Visibility::RemoteVisible)
        };
        self.schedule(told, end, What::Complete { op: op.id, result });
        let end = &mut self.ends[end];
        end.in_order_ns = end.in_order_ns.max(told);
        end.operations_ns = end.operations_ns.max(told);
    }

    /// The arrival of an operation whose bytes are written `during` and complete at its end.
    fn announce(
        &mut self,
        end: usize,
        arrival: &Arrival,
        during: Range<u64>,
        told: u64,
        faults: &SimFaults,
    ) {
        let arrive = |level| What::Arrive {
            arrival: arrival.clone(),
            level,
        };
        if self.happens(faults.split_per_mille) {
            self.counts.split += 1;
            let level = match self.random(2) {
                0 => Visibility::LocalDone,
                _ => Visibility::RemoteDelivered,
            };
            let early = during.start + self.random(during.end - during.start);
            self.schedule(early, end, arrive(level));
        }
        if self.happens(faults.drop_per_mille) {
            self.counts.dropped += 1;
            return;
        }
        self.schedule(told, end, arrive(Visibility::RemoteVisible));
        if self.happens(faults.duplicate_per_mille) {
            self.counts.duplicated += 1;
            let again = told + self.delay(faults);
            self.schedule(again, end, arrive(Visibility::RemoteVisible));
            let end = &mut self.ends[end];
            end.operations_ns = end.operations_ns.max(again);
        }
    }

    /// Something small that keeps its place behind everything posted before.
    fn in_order(&mut self, end: usize, what: What, faults: &SimFaults) {
        let behind = self.ends[end].in_order_ns.max(self.ends[end].operations_ns);
        let at = behind.max(self.now_ns) + self.delay(faults);
        self.ends[end].in_order_ns = at;
        self.schedule(at, end, what);
    }

    /// `end` ends the connection. What is given back is to be dropped with the state free.
    fn end_connection(&mut self, end: usize, death: Death, faults: &SimFaults) -> Vec<Garbage> {
        let (ours, theirs) = (end, end ^ 1);
        let mut garbage = Vec::new();
        self.ends[ours].is_closed = true;
        garbage.push(Garbage::Receiver(self.ends[ours].receiver.take()));
        garbage.push(Garbage::Session(self.ends[ours].session.take()));
        self.wires.remove(&(end | 1));
        let of_pair: Vec<_> = self
            .events
            .iter()
            .filter(|(_, e)| e.from | 1 == end | 1)
            .map(|(key, _)| *key)
            .collect();
        for key in of_pair {
            let Some(event) = self.events.remove(&key) else {
                continue;
            };
            match event.what {
                What::Copy(copy)
                    if copy.source(event.from) == ours && death == Death::Unprovable =>
                {
                    let bytes = snapshot(copy.both_ends().0);
                    let at = key.0 + self.delay(faults) * 8;
                    garbage.push(Garbage::Copy(copy.clone()));
                    self.schedule(at, event.from, What::Late { bytes, copy });
                }
                what @ What::Late { .. } => {
                    self.events.insert(
                        key,
                        Event {
                            from: event.from,
                            what,
                        },
                    );
                }
                // The survivor hears the end of the connection instead of the end of its operations.
                what => garbage.push(Garbage::Event(what)),
            }
        }
        if !self.ends[theirs].is_closed {
            let quiesce = match death {
                Death::Proven => Quiesce::Proven,
                Death::Unprovable => Quiesce::Unprovable(Cause::PeerLost {
                    reason: "killed".to_owned(),
                }),
            };
            self.ends[theirs].quiesce = quiesce.clone();
            let at = self.now_ns + self.delay(faults);
            let cause = Cause::PeerLost {
                reason: "the connection has ended".to_owned(),
            };
            self.schedule(at, ours, What::Down { cause, quiesce });
        }
        garbage
    }
}

/// Things whose drop may call an engine.
#[allow(dead_code)] // Kept for their drops.
enum Garbage {
    Receiver(Option<(PeerId, Arc<dyn LinkEvents>)>),
    Session(Option<SessionEnd>),
    Copy(RunCopy),
    Event(What),
}

/// What is left of the connections lets go of the engines.
impl Drop for SimNet {
    fn drop(&mut self) {
        let (events, receivers) = {
            let mut state = self.net.state.lock();
            state.wires.clear();
            let receivers: Vec<_> = state
                .ends
                .iter_mut()
                .map(|end| (end.receiver.take(), end.session.take()))
                .collect();
            (std::mem::take(&mut state.events), receivers)
        };
        // With the state free: these drops call engines.
        drop((events, receivers));
    }
}

impl fmt::Debug for SimNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.net.state.lock();
        f.debug_struct("SimNet")
            .field("now_ns", &state.now_ns)
            .field("event_count", &state.events.len())
            .field("counts", &state.counts)
            .finish_non_exhaustive()
    }
}
