//! A sending process of a simulation: it computes its layers and posts them as its machine allows.

use std::collections::{BTreeMap, VecDeque};

use kvgate_kvcache::canary::VerifyMode;
use kvgate_kvcache::handoff::*;
use kvgate_kvcache::*;
use kvgate_transfer::sim::SimNet;
use kvgate_transfer::{
    AgentEvent, Cause, Deadline, Epoch, Incarnation, Op, PostOptions, Side, Status, TransferHandle,
    WriterRank,
};

use super::desk::*;
use crate::common::fill_layer;

const PAGES: u32 = 12;

pub struct WriterSide {
    pub node: Node,
    pub rank: WriterRank,
    pub writer_count: u16,
    /// The current receiver and which life of it that is.
    pub decoder: (Incarnation, u32),
    pub flights: BTreeMap<(Room, Attempt), Sending>,
}

pub struct Sending {
    pub machine: PrefillMachine,
    room: Room,
    attempt: Attempt,
    tokens: u32,
    receiver: Incarnation,
    decoder_life: u32,
    target: Option<(Epoch, BlockTable)>,
    plan: Option<TransferPlan>,
    lease: Option<WriteLease>,
    written: BTreeMap<LayerId, WrittenLayer>,
    todo: VecDeque<(LayerId, u32)>,
    /// Operations, and whether the machine knows of their end.
    handles: Vec<(TransferHandle, bool)>,
    draining: Option<DrainingFlight>,
    stop_asked: bool,
    all_posted: bool,
}

impl WriterSide {
    pub fn new(net: &SimNet, name: &str, rank: u16, writer_count: u16) -> WriterSide {
        WriterSide {
            node: Node::new(net, name, PAGES),
            rank: WriterRank(rank),
            writer_count,
            decoder: (Incarnation(0), 0),
            flights: BTreeMap::new(),
        }
    }

    /// A request that this writer is going to deliver its layers of.
    pub fn begin(&mut self, desk: &mut Desk, room: Room, attempt: Attempt, tokens: u32) {
        let spec = PrefillSpec {
            incarnation: self.node.incarnation,
            rank: self.rank,
            is_designated: self.rank == WriterRank(0),
            room,
            attempt,
            receiver: self.decoder.0,
            prompt_tokens: tokens,
            timeouts: desk.timeouts(),
        };
        let flight = Sending {
            machine: PrefillMachine::new(desk.now, spec),
            room,
            attempt,
            tokens,
            receiver: self.decoder.0,
            decoder_life: self.decoder.1,
            target: None,
            plan: None,
            lease: None,
            written: BTreeMap::new(),
            todo: VecDeque::new(),
            handles: Vec::new(),
            draining: None,
            stop_asked: false,
            all_posted: false,
        };
        self.flights.insert((room, attempt), flight);
        if self.rank == WriterRank(0) {
            let submit = PrefillInput::Submit {
                total_tokens: tokens + 8,
                steps: 8,
                prompt: vec![7; tokens as usize],
            };
            self.feed(desk, (room, attempt), submit);
        }
    }

    pub fn take_events(&mut self, desk: &mut Desk) {
        while let Some(event) = self.node.agent.next_event(Deadline::now()) {
            match event {
                AgentEvent::Message { peer, bytes } => {
                    if let Some(from) = self.node.incarnation_of(peer) {
                        self.deliver(desk, from, &bytes);
                    }
                }
                AgentEvent::PeerDown { peer, cause, .. } => {
                    let Some(incarnation) = self.node.incarnation_of(peer) else {
                        continue;
                    };
                    for key in self.keys() {
                        let cause = cause.clone();
                        let input = PrefillInput::PeerDown { incarnation, cause };
                        if self.flights[&key].receiver == incarnation {
                            self.feed(desk, key, input);
                        }
                    }
                }
                _ => {}
            }
        }
    }

    pub fn keys(&self) -> Vec<(Room, Attempt)> {
        self.flights.keys().copied().collect()
    }

    pub fn deliver(&mut self, desk: &mut Desk, from: Incarnation, bytes: &[u8]) {
        let Ok(envelope) = Envelope::decode(bytes) else {
            return;
        };
        let Identity { room, attempt, .. } = envelope.identity;
        if self.flights.contains_key(&(room, attempt)) {
            let input = PrefillInput::Message { from, envelope };
            self.feed(desk, (room, attempt), input);
        } else if let Some(bytes) = answer_unknown(self.node.incarnation, self.rank, &envelope) {
            let (from, to) = (self.node.incarnation, from);
            desk.mail.push(Letter { from, to, bytes });
        }
    }

    pub fn feed(&mut self, desk: &mut Desk, key: (Room, Attempt), input: PrefillInput) {
        if let Some(flight) = self.flights.get_mut(&key) {
            let _ = flight.machine.handle(desk.now, input);
            flight.act(&self.node, desk, self.rank, self.writer_count);
        }
    }

    /// Lets one flight go on: ends of operations, the end of posting, slots that are free again.
    pub fn tick(&mut self, net: &SimNet, desk: &mut Desk, key: (Room, Attempt)) {
        let Some(flight) = self.flights.get_mut(&key) else {
            return;
        };
        for result in flight.take_ends() {
            self.feed(desk, key, PrefillInput::Completed(result));
        }
        let Some(flight) = self.flights.get_mut(&key) else {
            return;
        };
        if flight.stop_asked && net.random(2) == 0 {
            flight.stop_asked = false;
            flight.todo.clear();
            if let Some(lease) = &flight.lease {
                lease.ledger().close();
            }
            self.feed(desk, key, PrefillInput::PostingStopped);
        }
        let Some(flight) = self.flights.get_mut(&key) else {
            return;
        };
        if flight.draining.as_mut().is_some_and(DrainingFlight::poll) {
            flight.draining = None;
        }
        let is_over = flight.machine.state() == PrefillState::Closed && flight.draining.is_none();
        if is_over {
            desk.tally.machines += flight.machine.counters();
            self.flights.remove(&key);
        }
    }

    /// Computes and posts one segment of one layer.
    pub fn compute(&mut self, desk: &mut Desk, key: (Room, Attempt)) {
        let Some(flight) = self.flights.get_mut(&key) else {
            return;
        };
        let Some((layer, segment)) = flight.todo.pop_front() else {
            return;
        };
        let Some(post) = flight.prepare(&self.node, layer, segment) else {
            return self.posted_all(desk, key);
        };
        self.feed(desk, key, PrefillInput::Posted);
        let Some(flight) = self.flights.get_mut(&key) else {
            return;
        };
        match flight.post(&self.node, post) {
            Ok(handle) => flight.handles.push((handle, false)),
            Err(reason) => {
                let cause = Cause::Transfer(reason);
                self.feed(desk, key, PrefillInput::Completed(Err(cause)));
            }
        }
        self.posted_all(desk, key);
    }

    fn posted_all(&mut self, desk: &mut Desk, key: (Room, Attempt)) {
        let Some(flight) = self.flights.get_mut(&key) else {
            return;
        };
        if flight.todo.is_empty() && !flight.all_posted {
            flight.all_posted = true;
            let token = first_token(flight.room, flight.attempt);
            let first_token = (self.rank == WriterRank(0)).then_some(token);
            self.feed(desk, key, PrefillInput::AllPosted { first_token });
        }
    }

    pub fn cancel(&mut self, desk: &mut Desk, key: (Room, Attempt)) {
        desk.tally.cancelled += 1;
        let cause = Cause::Aborted {
            by: Side::Local,
            reason: "cancelled by prefill".to_owned(),
        };
        self.feed(desk, key, PrefillInput::LocalAbort(cause));
    }

    pub fn expire(&mut self, desk: &mut Desk) {
        let now = desk.now;
        for flight in self.flights.values_mut() {
            if flight.machine.poll_deadline().is_some_and(|at| at <= now) {
                flight.machine.handle_timeout(now);
                flight.act(&self.node, desk, self.rank, self.writer_count);
            }
        }
    }
}

impl Sending {
    fn act(&mut self, node: &Node, desk: &mut Desk, rank: WriterRank, writer_count: u16) {
        while let Some(output) = self.machine.poll_output() {
            match output {
                PrefillOutput::Send { to, bytes } => {
                    self.check_answer(desk, rank, to, &bytes);
                    let from = node.incarnation;
                    desk.mail.push(Letter { from, to, bytes });
                }
                PrefillOutput::MayPost { epoch, offer } => {
                    self.may_post(node, desk, rank, writer_count, epoch, &offer);
                }
                PrefillOutput::StopPosting => self.stop_asked = true,
                PrefillOutput::Release => {
                    self.todo.clear();
                    self.written.clear();
                    self.draining = self.lease.take().map(WriteLease::close);
                }
                PrefillOutput::Overdue { .. } | PrefillOutput::Failed(_) => {}
            }
        }
    }

    fn may_post(
        &mut self,
        node: &Node,
        desk: &mut Desk,
        rank: WriterRank,
        writer_count: u16,
        epoch: Epoch,
        offer: &SlotOffer,
    ) {
        self.target = Some((epoch, offer.table(&schema(), self.tokens + 8)));
        match node.pools.reserve(self.tokens, self.room) {
            Ok(lease) => {
                let plan = plan(self.tokens, writer_count);
                let layers = writer_layers(writer_count)
                    .swap_remove(usize::from(rank.0))
                    .layers;
                let segments = 0..offer.segment_ends.len() as u32;
                let of_layer = |layer| {
                    segments
                        .clone()
                        .map(move |segment| (LayerId(layer), segment))
                };
                self.todo = layers.flat_map(of_layer).collect();
                (self.lease, self.plan) = (Some(lease), Some(plan));
            }
            Err(error) => {
                let cause = Cause::Refused {
                    reason: error.to_string(),
                };
                let _ = self
                    .machine
                    .handle(desk.now, PrefillInput::LocalAbort(cause));
            }
        }
    }

    /// The word that nothing is under way, against what the engine knows. A second receiver that is refused may
    /// have given its flight the same number.
    fn check_answer(&self, desk: &mut Desk, rank: WriterRank, to: Incarnation, bytes: &[u8]) {
        let envelope = Envelope::decode(bytes).unwrap();
        let epoch = self.target.as_ref().map(|(epoch, _)| *epoch);
        let is_of_flight = to == self.receiver && epoch == Some(envelope.identity.epoch);
        if is_of_flight && matches!(envelope.message, Message::AbortAck { .. }) {
            desk.tally.answers += 1;
            let is_open = |(handle, _): &(TransferHandle, bool)| {
                matches!(handle.status(), Status::InFlight | Status::Unknown(_))
            };
            if self.handles.iter().any(is_open) {
                desk.violate(format!("{rank:?} answers while operations are under way"));
            }
        }
    }

    fn take_ends(&mut self) -> Vec<Result<(), Cause>> {
        let mut ends = Vec::new();
        for (handle, is_known) in self.handles.iter_mut().filter(|(_, known)| !known) {
            let result = match handle.status() {
                Status::Done(_) => Ok(()),
                Status::Failed(error) => Err(Cause::Transfer(error.to_string())),
                Status::InFlight | Status::Unknown(_) => continue,
            };
            *is_known = true;
            ends.push(result);
        }
        ends
    }

    /// The post of a segment; the rows of a layer are computed before its first one. Before that, this
    /// sender is impatient: it tries with a witness of one row, and posts if that is taken.
    fn prepare(&mut self, node: &Node, layer: LayerId, segment: u32) -> Option<KvPost> {
        let (epoch, table) = self.target.as_ref()?;
        let (lease, plan) = (self.lease.as_mut()?, self.plan.as_ref()?);
        let peer = node.agent.peer(node.peer_of(self.receiver)?)?;
        let pools: Vec<_> = peer.pools.iter().map(|pool| pool.pool).collect();
        let target = PostTarget {
            incarnation: peer.incarnation,
            pools: &pools,
            table,
            epoch: *epoch,
            room: self.room,
            verify: VerifyMode::Off,
        };
        if !self.written.contains_key(&layer) && self.tokens > 1 {
            let early = lease.commit_layer(layer, 0..1).unwrap();
            if let Ok(post) = plan.post(&node.pools, segment, &early, &target) {
                return Some(post);
            }
        }
        if !self.written.contains_key(&layer) {
            let content = content(self.decoder_life, epoch.0);
            fill_layer(&node.pools, lease, layer, self.tokens, content);
            let written = lease.commit_layer(layer, 0..self.tokens).unwrap();
            self.written.insert(layer, written);
        }
        let post = plan
            .post(&node.pools, segment, &self.written[&layer], &target)
            .unwrap();
        (!post.is_empty()).then_some(post)
    }

    fn post(&self, node: &Node, post: KvPost) -> Result<TransferHandle, String> {
        let (local, remote) = post.descriptors();
        let peer = node.peer_of(self.receiver).ok_or("no receiver")?;
        let transfer = node
            .agent
            .prepare(Op::Write, &local, &remote, peer)
            .map_err(|error| error.to_string())?;
        let lease = self.lease.as_ref().ok_or("no lease")?;
        let options = PostOptions {
            arrival: Some(post.arrival),
            keepalive: Some(Box::new(post.keepalive)),
            ledger: Some(lease.ledger().clone()),
            ..PostOptions::default()
        };
        node.agent
            .post(&transfer, post.source, options)
            .map_err(|refused| refused.error.to_string())
    }
}

impl Sending {
    /// Whether an operation whose end nobody can tell is all that keeps the flight.
    pub fn is_kept(&self) -> bool {
        let is_lost =
            |(handle, _): &(TransferHandle, bool)| matches!(handle.status(), Status::Unknown(_));
        self.handles.iter().any(is_lost)
    }
}
