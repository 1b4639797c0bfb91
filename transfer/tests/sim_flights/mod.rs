//! Flights from two senders to one receiver, with the checks that know nothing of the engine.

#![allow(
    unreachable_pub,
    dead_code,
    reason = "this module belongs to several test programs"
)]

mod sender;

use std::collections::{BTreeMap, BTreeSet};

use kvgate_transfer::{
    sim::{Death, SimCounts, SimFaults, SimNet},
    sync::Arc,
    *,
};

use crate::sim_node::{Node, SLOT_BYTES};
use sender::{Sender, numbered};

const SLOT_COUNT: u32 = 24;
const STAGES: u16 = 2;
const SENDERS: usize = 2;
/// The slot of each sender that is read and never written, and what it holds.
const LIBRARY: u32 = SLOT_COUNT;
const LIBRARY_PAGE: [u8; SLOT_BYTES] = [0x7b; SLOT_BYTES];
/// Begins a message that has a number.
const NUMBERED: u64 = u64::MAX;

/// What a slot of a flight must hold.
fn pattern(epoch: u64, chunk: u16) -> [u8; SLOT_BYTES] {
    let mut bytes = [chunk as u8; SLOT_BYTES];
    bytes[..8].copy_from_slice(&epoch.to_le_bytes());
    bytes[SLOT_BYTES - 8..].copy_from_slice(&epoch.to_le_bytes());
    bytes
}

/// A read of the receiver, into one slot.
struct Read {
    handle: TransferHandle,
    slot: u32,
}

enum State {
    Open(Expectation),
    Draining(Draining),
}

/// A flight as the receiver sees it: per stage and sender one chunk of one slot.
struct Flight {
    barrier: Arc<Barrier>,
    slots: Vec<u32>,
    writers: Vec<(PeerId, WriterRank)>,
    state: State,
    checked: BTreeSet<u16>,
}

/// What goes wrong between the agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wires {
    /// Everything but a break, which is the end.
    Faulty,
    /// Connections under sessions, which break at any moment; senders die provably.
    Breaking,
}

pub struct World {
    pub net: SimNet,
    wires: Wires,
    pub receiver: Node,
    senders: Vec<Sender>,
    flights: BTreeMap<u64, Flight>,
    reads: Vec<Read>,
    free: Vec<u32>,
    /// Slots without an owner, as they were when the proof came.
    quiet: BTreeMap<u32, [u8; SLOT_BYTES]>,
    next_epoch: u64,
    /// Numbered messages by connection, at the receiver: the next one to come.
    heard: BTreeMap<PeerId, u64>,
    pub finished: u64,
    pub aborted: u64,
    pub quarantined: u32,
    pub killed: u64,
    /// Sessions that ended because no connection came in time.
    pub parted: u64,
    pub messages: u64,
    pub reads_done: u64,
}

impl World {
    pub fn new(seed: u64, wires: Wires) -> Self {
        let net = SimNet::new(seed, SimFaults::all());
        let receiver = Node::new(&net, "receiver", SLOT_COUNT);
        let mut world = Self {
            wires,
            receiver,
            senders: Vec::new(),
            flights: BTreeMap::new(),
            reads: Vec::new(),
            heard: BTreeMap::new(),
            parted: 0,
            messages: 0,
            reads_done: 0,
            free: (0..SLOT_COUNT).collect(),
            quiet: BTreeMap::new(),
            next_epoch: 1,
            finished: 0,
            aborted: 0,
            quarantined: 0,
            killed: 0,
            net,
        };
        for index in 0..SENDERS {
            let sender = world.new_sender(&format!("sender {index}"));
            world.senders.push(sender);
        }
        world
    }

    fn new_sender(&self, name: &str) -> Sender {
        let node = Node::new(&self.net, name, SLOT_COUNT + 1);
        node.fill(LIBRARY, LIBRARY_PAGE);
        let (to_receiver, at_receiver) = self.connect(&node);
        Sender {
            node,
            to_receiver,
            at_receiver,
            ledgers: BTreeMap::new(),
            aborted: Vec::new(),
            busy: BTreeMap::new(),
            said: 0,
            told: 0,
            heard: 0,
            is_parted: false,
        }
    }

    fn connect(&self, node: &Node) -> (PeerId, PeerId) {
        let (from, to) = (&node.agent, &self.receiver.agent);
        let connected = match self.wires {
            Wires::Faulty => self.net.connect(from, to),
            Wires::Breaking => self.net.connect_in_session(from, to),
        };
        connected.unwrap()
    }

    pub fn run(&mut self) -> SimCounts {
        for _ in 0..400 {
            match (self.net.random(100), self.wires) {
                (0..20, _) => self.start_flight(),
                (20..23, _) => self.abort_one(),
                (23, _) => self.kill_one(),
                (24..28, Wires::Breaking) => drop(self.net.break_one()),
                (28..38, Wires::Breaking) => self.say_something(),
                (38..42, Wires::Breaking) => self.read_one(),
                _ => drop(self.net.step()),
            }
            self.observe();
        }
        self.finish();
        self.net.counts()
    }

    /// Starts a flight, if its slots are free on both sides.
    fn start_flight(&mut self) {
        let chunk_count = STAGES as usize * SENDERS;
        if self.free.len() < chunk_count || self.senders.iter().any(|s| s.busy.len() == 4) {
            return;
        }
        let slots: Vec<u32> = (0..chunk_count).map(|_| self.take_slot()).collect();
        let epoch = self.next_epoch;
        self.next_epoch += 1;
        let chunk = |index: usize| ChunkSpec {
            stage: StageId((index / SENDERS) as u16),
            chunk: ChunkId((index % SENDERS) as u16),
            writer: WriterRank((index % SENDERS) as u16),
            descriptor_count: 1,
        };
        let plan = BarrierPlan::from_chunks((0..chunk_count).map(chunk).collect()).unwrap();
        let barrier = Barrier::new(plan, Epoch(epoch));
        let writers: Vec<_> = self
            .senders
            .iter()
            .enumerate()
            .map(|(i, s)| (s.at_receiver, WriterRank(i as u16)))
            .collect();
        let expectation = match self.receiver.agent.expect(&barrier, &writers, None) {
            Ok(expectation) => expectation,
            // A writer was lost a moment ago: nothing was told to anybody.
            Err(_) => return self.free.extend(slots),
        };
        barrier.arm().unwrap();
        for (rank, sender) in self.senders.iter_mut().enumerate() {
            for (index, handle) in sender.post(epoch, rank, &slots) {
                if let Status::Done(_) = handle.wait(Deadline::now()) {
                    let (seen, sent) = (
                        self.receiver.read(slots[index]),
                        pattern(epoch, index as u16),
                    );
                    assert_eq!(
                        seen, sent,
                        "epoch {epoch} is done before its bytes are there"
                    );
                }
            }
        }
        let state = State::Open(expectation);
        let flight = Flight {
            barrier,
            slots,
            writers,
            state,
            checked: BTreeSet::new(),
        };
        self.flights.insert(epoch, flight);
    }

    /// A free slot, which must be as it was left.
    fn take_slot(&mut self) -> u32 {
        let index = self.net.random(self.free.len() as u64) as usize;
        let slot = self.free.swap_remove(index);
        if let Some(left) = self.quiet.remove(&slot) {
            assert_eq!(
                self.receiver.read(slot),
                left,
                "slot {slot} was written after the proof"
            );
        }
        slot
    }

    fn open_flights(&self) -> Vec<u64> {
        let is_open = |flight: &Flight| matches!(flight.state, State::Open(_));
        let open = self.flights.iter().filter(|(_, flight)| is_open(flight));
        open.map(|(epoch, _)| *epoch).collect()
    }

    fn abort_one(&mut self) {
        let open = self.open_flights();
        if !open.is_empty() {
            let epoch = open[self.net.random(open.len() as u64) as usize];
            self.abort(epoch);
        }
    }

    fn abort(&mut self, epoch: u64) {
        let flight = self.flights.remove(&epoch).unwrap();
        let State::Open(expectation) = flight.state else {
            panic!("flight {epoch} ends twice")
        };
        let cause = Cause::Aborted {
            by: Side::Local,
            reason: "simulated".into(),
        };
        let state = State::Draining(expectation.abort(cause));
        self.flights.insert(epoch, Flight { state, ..flight });
        self.aborted += 1;
        self.ask(epoch);
    }

    /// Asks the writers of a flight for an answer; a lost one does not give it.
    fn ask(&self, epoch: u64) {
        for (peer, _) in &self.flights[&epoch].writers {
            let _ = self.receiver.agent.send(*peer, epoch.to_le_bytes());
        }
    }

    /// A sender dies and comes back as another incarnation.
    fn kill_one(&mut self) {
        let index = self.net.random(SENDERS as u64) as usize;
        let death = match (self.net.random(2), self.wires) {
            (1, Wires::Faulty) => Death::Unprovable,
            // The receiver of a session does the copying itself.
            _ => Death::Proven,
        };
        self.net.kill(&self.senders[index].node.agent, death);
        let reborn = self.new_sender(&format!("sender {index}"));
        let old = std::mem::replace(&mut self.senders[index], reborn);
        let Node { agent, region, .. } = old.node;
        drop(region);
        let _ = agent.shutdown(Deadline::now());
        self.killed += 1;
    }

    /// Handles messages, opens gates, collects proofs.
    fn observe(&mut self) {
        for index in 0..SENDERS {
            self.senders[index].answer();
            if std::mem::take(&mut self.senders[index].is_parted) {
                self.meet_again(index);
            }
        }
        while let Some(event) = self.receiver.agent.next_event(Deadline::now()) {
            let AgentEvent::Message { peer, bytes } = event else {
                continue;
            };
            match numbered(&bytes) {
                Some(number) => {
                    let next = self.heard.entry(peer).or_default();
                    assert_eq!(number, *next, "a message was lost or repeated");
                    *next += 1;
                    self.messages += 1;
                }
                None => self.abort_ack(peer, u64::from_le_bytes(bytes[..].try_into().unwrap())),
            }
        }
        self.collect_reads();
        for flight in self.flights.values_mut() {
            check_gates(&self.receiver, flight);
        }
        let epochs: Vec<u64> = self.flights.keys().copied().collect();
        for epoch in epochs {
            self.collect(epoch);
        }
    }

    /// The session of this sender is over, and nobody has died.
    fn meet_again(&mut self, index: usize) {
        self.parted += 1;
        let (to_receiver, at_receiver) = self.connect(&self.senders[index].node);
        let sender = &mut self.senders[index];
        (sender.to_receiver, sender.at_receiver) = (to_receiver, at_receiver);
        (sender.said, sender.told, sender.heard) = (0, 0, 0);
    }

    /// A numbered message, one way or the other.
    fn say_something(&mut self) {
        let index = self.net.random(SENDERS as u64) as usize;
        let is_told = self.net.random(2) == 0;
        let sender = &mut self.senders[index];
        let (agent, peer, number) = match is_told {
            true => (&self.receiver.agent, sender.at_receiver, &mut sender.told),
            false => (&sender.node.agent, sender.to_receiver, &mut sender.said),
        };
        let text = [NUMBERED.to_le_bytes(), number.to_le_bytes()].concat();
        if agent.send(peer, text).is_ok() {
            *number += 1;
        }
    }

    /// The receiver reads the page that each sender keeps.
    fn read_one(&mut self) {
        let index = self.net.random(SENDERS as u64) as usize;
        let peer = self.senders[index].at_receiver;
        let Some(info) = self.receiver.agent.peer(peer) else {
            return;
        };
        if self.free.is_empty() {
            return;
        }
        let slot = self.take_slot();
        let mut local = DescriptorList::new();
        let mut remote = DescriptorList::remote(info.incarnation);
        local.push(self.receiver.region.pools()[0], &[slot]);
        remote.push(info.pools[0].pool, &[LIBRARY]);
        let agent = &self.receiver.agent;
        let told = AgentEvent::Message {
            peer,
            bytes: Default::default(),
        };
        let source = SourceReady::announced(&told).unwrap();
        let Ok(transfer) = agent.prepare(Op::Read, &local, &remote, peer) else {
            return self.free.push(slot);
        };
        let posted = agent.post(&transfer, source, PostOptions::default());
        match posted {
            Ok(handle) => self.reads.push(Read { handle, slot }),
            Err(_) => self.free.push(slot),
        }
    }

    fn collect_reads(&mut self) {
        for Read { handle, slot } in std::mem::take(&mut self.reads) {
            match handle.wait(Deadline::now()) {
                Status::InFlight => self.reads.push(Read { handle, slot }),
                Status::Done(_) => {
                    assert_eq!(
                        self.receiver.read(slot),
                        LIBRARY_PAGE,
                        "a read is done too early"
                    );
                    self.reads_done += 1;
                    self.let_go(slot);
                }
                Status::Failed(_) => self.let_go(slot),
                Status::Unknown(cause) => panic!("the peer cannot write by itself: {cause}"),
            }
        }
    }

    /// Nobody writes this slot any more.
    fn let_go(&mut self, slot: u32) {
        self.quiet.insert(slot, self.receiver.read(slot));
        self.free.push(slot);
    }

    fn abort_ack(&mut self, peer: PeerId, epoch: u64) {
        if let Some(flight) = self.flights.get(&epoch)
            && let State::Draining(draining) = &flight.state
        {
            for (_, rank) in &flight.writers {
                draining.writer_answered(peer, *rank);
            }
        }
    }

    fn collect(&mut self, epoch: u64) {
        let mut flight = self.flights.remove(&epoch).unwrap();
        flight.state = match flight.state {
            State::Open(expectation) if flight.barrier.all_landed() => {
                self.finished += 1;
                State::Draining(expectation.close())
            }
            State::Open(expectation)
                if matches!(flight.barrier.check(StageId(0)), StageState::Failed(_)) =>
            {
                self.aborted += 1;
                let cause = Cause::PeerLost {
                    reason: "seen at the gate".into(),
                };
                State::Draining(expectation.abort(cause))
            }
            other => other,
        };
        let proof = match &mut flight.state {
            State::Draining(draining) => draining.poll(),
            State::Open(_) => None,
        };
        match proof {
            Some(proof) => {
                assert_eq!(proof.epoch(), Epoch(epoch));
                flight.slots.into_iter().for_each(|slot| self.let_go(slot));
            }
            None => drop(self.flights.insert(epoch, flight)),
        }
    }

    /// Lets everything end: flights whose arrival was lost are aborted, the rest lands.
    fn finish(&mut self) {
        for _ in 0..3 {
            while self.net.step() {
                self.observe();
            }
            self.observe();
            for epoch in self.open_flights() {
                self.abort(epoch);
            }
            // Flights that failed with a lost writer: the other one is asked.
            let draining: Vec<u64> = self.flights.keys().copied().collect();
            draining.into_iter().for_each(|epoch| self.ask(epoch));
        }
        assert!(self.reads.is_empty(), "every read has ended");
        for sender in &self.senders {
            let heard = self.heard.get(&sender.at_receiver).copied();
            assert_eq!(heard.unwrap_or_default(), sender.said, "a message was lost");
            assert_eq!(sender.heard, sender.told, "a message was lost");
        }
        for flight in self.flights.values() {
            let State::Draining(draining) = &flight.state else {
                panic!("a flight is open")
            };
            let unquiet = draining.ledger().unquiet();
            assert!(
                !unquiet.unprovable_writers.is_empty(),
                "only a missing proof keeps memory: {unquiet:?}"
            );
            assert_eq!((unquiet.operations, unquiet.fences), (0, 0));
            assert_eq!(unquiet.writers, [], "every living writer has answered");
            self.quarantined += flight.slots.len() as u32;
        }
        assert_eq!(
            self.free.len() as u32 + self.quarantined,
            SLOT_COUNT,
            "slots are conserved"
        );
        for (slot, left) in &self.quiet {
            assert_eq!(
                self.receiver.read(*slot),
                *left,
                "slot {slot} was written after the proof"
            );
        }
    }
}

fn check_gates(receiver: &Node, flight: &mut Flight) {
    for stage in 0..STAGES {
        if flight.barrier.check(StageId(stage)) == StageState::Ready && flight.checked.insert(stage)
        {
            for sender in 0..SENDERS {
                let index = usize::from(stage) * SENDERS + sender;
                let epoch = flight.barrier.epoch().0;
                let seen = receiver.read(flight.slots[index]);
                assert_eq!(
                    seen,
                    pattern(epoch, index as u16),
                    "epoch {epoch} stage {stage}"
                );
            }
        }
    }
}
