//! One flight of the receiving process: what its machine says is done to the production pools.

use std::collections::BTreeSet;
use std::time::Instant;

use kvgate_kvcache::canary::{PageDigest, page_digests};
use kvgate_kvcache::handoff::*;
use kvgate_kvcache::*;
use kvgate_transfer::sim::SimNet;
use kvgate_transfer::sync::{Arc, Mutex};
use kvgate_transfer::{
    Arrival, ArrivalSink, Barrier, Cause, Deadline, PeerId, StageId, StageState,
};

use super::desk::*;

pub struct Flight {
    pub machine: DecodeMachine,
    pub room: Room,
    pub attempt: Attempt,
    pub writers: Vec<Writer>,
    /// A proof is missing.
    pub is_kept: bool,
    /// Its slots lie in the pools until then.
    pub is_parked: bool,
    tokens: u32,
    content: u32,
    table: BlockTable,
    barrier: Arc<Barrier>,
    in_flight: Option<InFlight>,
    draining: Option<DrainingFlight>,
    lease: Option<PageLease>,
    arrivals: Arc<Arrivals>,
    read: BTreeSet<LayerId>,
    told_landed: bool,
    born: Instant,
    gave_up: Option<Instant>,
}

/// Slots without an owner, as they were when the proof came.
pub struct Freed {
    pub table: BlockTable,
    pub tokens: u32,
    pub digests: Vec<PageDigest>,
    pub slots: BTreeSet<(Space, u32)>,
}

#[derive(Default)]
struct Arrivals(Mutex<Vec<PeerId>>);

impl ArrivalSink for Arrivals {
    fn arrived(&self, peer: PeerId, _: &Arrival) {
        self.0.lock().push(peer);
    }
}

impl Freed {
    pub fn slot_of(&self, digest: &PageDigest) -> (Space, u32) {
        let schema = schema();
        let is_row =
            |row: &&ComponentRow| row.layer == digest.layer && row.component == digest.component;
        let row = schema.rows().iter().find(is_row).unwrap();
        let slot = self.table.slot_of(row, digest.page_ordinal);
        (row.space, slot.index)
    }
}

impl Flight {
    pub fn new(
        now: Instant,
        machine: DecodeMachine,
        in_flight: InFlight,
        tokens: u32,
        content: u32,
        writers: Vec<Writer>,
    ) -> Flight {
        Flight {
            machine,
            room: in_flight.room(),
            attempt: Attempt(0),
            writers,
            is_kept: false,
            is_parked: false,
            tokens,
            content,
            table: in_flight.block_table().clone(),
            barrier: in_flight.barrier().clone(),
            lease: Some(in_flight.lease().unwrap()),
            in_flight: Some(in_flight),
            draining: None,
            arrivals: Arc::default(),
            read: BTreeSet::new(),
            told_landed: false,
            born: now,
            gave_up: None,
        }
    }

    /// Half of the flights whose proof is missing stay in hand; the others are parked in the pools.
    fn quarantine(&mut self) {
        self.is_kept = true;
        if self.content.is_multiple_of(2)
            && let Some(draining) = self.draining.take()
        {
            draining.quarantine();
            self.is_parked = true;
        }
    }

    pub fn feed(&mut self, node: &Node, desk: &mut Desk, input: DecodeInput) {
        // What had no effect is in the machine's counters.
        let _ = self.machine.handle(desk.now, input);
        self.act(node, desk);
    }

    pub fn act(&mut self, node: &Node, desk: &mut Desk) {
        while let Some(output) = self.machine.poll_output() {
            match output {
                DecodeOutput::Arm => self.arm(node, desk),
                DecodeOutput::Send { to, bytes } => {
                    if matches!(message_of(&bytes), Message::Done) && !self.barrier.all_landed() {
                        desk.violate(format!("room {} is done too early", self.room));
                    }
                    let from = node.incarnation;
                    desk.mail.push(Letter { from, to, bytes });
                }
                DecodeOutput::Ready { first_token: token } => {
                    let is_right = token == first_token(self.room, self.attempt);
                    if !is_right || !self.barrier.all_landed() {
                        desk.violate(format!("room {} is ready too early", self.room));
                    }
                }
                DecodeOutput::Close => {
                    self.lease = None;
                    self.draining = self.in_flight.take().map(InFlight::close);
                }
                DecodeOutput::AbortFlight(cause) => {
                    self.gave_up = Some(desk.now);
                    self.draining = self.in_flight.take().map(|flight| flight.abort(cause));
                }
                DecodeOutput::WriterQuiet(writer) => self.writer_quiet(node, desk, writer),
                DecodeOutput::Quarantine(_) => {
                    desk.tally.quarantined += 1;
                    self.quarantine();
                }
                DecodeOutput::Failed(cause) => {
                    desk.tally.failed += 1;
                    if matches!(cause, Cause::DeadlineExceeded { .. }) {
                        desk.tally.deadlines += 1;
                    }
                }
            }
        }
    }

    fn arm(&mut self, node: &Node, desk: &mut Desk) {
        let sink = Arc::clone(&self.arrivals);
        let flight = self.in_flight.as_mut().unwrap();
        let input = match flight.arm(&node.agent, Some(sink)) {
            Ok(()) => DecodeInput::Armed,
            Err(error) => DecodeInput::LocalAbort(Cause::PeerLost {
                reason: error.to_string(),
            }),
        };
        let _ = self.machine.handle(desk.now, input);
    }

    fn writer_quiet(&mut self, node: &Node, desk: &mut Desk, writer: Writer) {
        let peer = node.peer_of(writer.incarnation).unwrap();
        let is_known = match &self.draining {
            Some(draining) => draining.writer_answered(peer, writer.rank),
            // Its last proof may have come by itself, and the slots have gone.
            None if self.is_parked => {
                let epoch = self.barrier.epoch();
                node.pools.writer_answered(epoch, peer, writer.rank);
                true
            }
            None => false,
        };
        if !is_known {
            desk.violate("a writer is quiet in a flight that is not its own".to_owned());
        }
    }

    /// Tells the machine what has landed.
    pub fn report(&mut self, node: &Node, desk: &mut Desk) {
        let arrivals = std::mem::take(&mut *self.arrivals.0.lock());
        for peer in arrivals {
            let incarnation = node.incarnation_of(peer);
            let is_it = |writer: &&Writer| Some(writer.incarnation) == incarnation;
            let rank = self.writers.iter().find(is_it).map(|writer| writer.rank);
            if let Some(rank) = rank {
                self.feed(node, desk, DecodeInput::Arrived(rank));
            }
        }
        if self.barrier.all_landed() && !self.told_landed {
            self.told_landed = true;
            self.feed(node, desk, DecodeInput::Landed);
        }
    }

    /// Reads a layer whose gate is open: its bytes are those of this flight.
    pub fn read_one(&mut self, net: &SimNet, desk: &mut Desk) {
        let layer = LayerId(net.random(3) as u16);
        let is_open = self.barrier.check(StageId(layer.0)) == StageState::Ready;
        if is_open && !self.read.contains(&layer) {
            self.read_layer(desk, layer);
        }
    }

    fn read_layer(&mut self, desk: &mut Desk, layer: LayerId) {
        let Some(lease) = &self.lease else { return };
        let Ok(ready) = lease.layer(layer, Deadline::now()) else {
            return;
        };
        desk.tally.gates_read += 1;
        let checked = check_rows(&ready.view(), self.tokens, self.content);
        self.read.insert(layer);
        if let Err(what) = checked {
            let (room, epoch) = (self.room, self.barrier.epoch());
            desk.violate(format!("room {room}, {epoch:?}: {what}"));
        }
    }

    /// Decoding, and its end: the rows are still what they were.
    pub fn use_it(&mut self, net: &SimNet, node: &Node, desk: &mut Desk) {
        match self.machine.state() {
            DecodeState::Landed => self.feed(node, desk, DecodeInput::Activated),
            DecodeState::Active if net.random(4) == 0 => {
                for layer in 0..3 {
                    self.read_layer(desk, LayerId(layer));
                }
                if self.read.len() != 3 {
                    desk.violate(format!("room {} was decoded without its rows", self.room));
                }
                desk.tally.finished += 1;
                desk.results.insert(self.room, self.attempt);
                self.feed(node, desk, DecodeInput::Finished);
            }
            // A reader that was in the middle of it.
            DecodeState::Aborting | DecodeState::Draining if net.random(2) == 0 => {
                self.lease = None;
            }
            _ => {}
        }
    }

    /// Frees the slots if the proof is there.
    pub fn collect(&mut self, node: &Node, desk: &mut Desk) -> Option<Freed> {
        let is_quiet = self.machine.state() == DecodeState::Draining && self.lease.is_none();
        let is_free = match &mut self.draining {
            Some(draining) => draining.poll(),
            None => self.is_parked && is_quiet,
        };
        if !is_free {
            return None;
        }
        // Parked slots come back by themselves, at a moment that nobody is told.
        let is_known = self.draining.is_some();
        (self.draining, self.is_parked, self.lease) = (None, false, None);
        self.is_kept = false;
        self.feed(node, desk, DecodeInput::Quiesced);
        if !is_known {
            return None;
        }
        let slots = self.table.iter().map(|(space, id)| (space, id.index));
        Some(Freed {
            table: self.table.clone(),
            tokens: self.tokens,
            digests: page_digests(&node.pools, &self.table, self.tokens),
            slots: slots.collect(),
        })
    }

    pub fn is_over(&self) -> bool {
        self.machine.state() == DecodeState::Closed
            && self.draining.is_none()
            && self.lease.is_none()
    }

    /// Whether a wait goes on that should have ended.
    pub fn is_late(&self, now: Instant, limits: &Timeouts) -> bool {
        match (self.machine.state(), self.gave_up) {
            (DecodeState::Reserved | DecodeState::Offered | DecodeState::Receiving, _) => {
                now >= self.born + limits.transfer + limits.idle
            }
            (DecodeState::Aborting, Some(at)) => {
                !self.machine.is_settled() && now >= at + limits.drain
            }
            (DecodeState::Aborting, None) => true,
            _ => false,
        }
    }
}
