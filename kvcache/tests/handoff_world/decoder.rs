//! The receiving process of a simulation: its pools, and who gets which message.

use std::collections::{BTreeMap, BTreeSet};

use kvgate_kvcache::canary::page_digests;
use kvgate_kvcache::handoff::*;
use kvgate_kvcache::*;
use kvgate_transfer::sim::SimNet;
use kvgate_transfer::{AgentEvent, Cause, Deadline, Epoch, Incarnation, PeerId, Side, WriterRank};

use super::desk::*;
use super::flight::{Flight, Freed};

pub const PAGES: u32 = 9;

pub struct Decoder {
    pub node: Node,
    pub life: u32,
    /// The current process of each rank.
    pub writers: Vec<Incarnation>,
    pub flights: BTreeMap<u64, Flight>,
    /// The newest try of each request.
    seen: BTreeMap<Room, Attempt>,
    freed: Vec<Freed>,
}

impl Decoder {
    pub fn new(net: &SimNet, life: u32) -> Decoder {
        Decoder {
            node: Node::new(net, &format!("decode {life}"), PAGES),
            life,
            writers: Vec::new(),
            flights: BTreeMap::new(),
            seen: BTreeMap::new(),
            freed: Vec::new(),
        }
    }

    /// Events of the agent: in reliable runs the messages, always the ends of connections.
    pub fn take_events(&mut self, desk: &mut Desk) {
        while let Some(event) = self.node.agent.next_event(Deadline::now()) {
            match event {
                AgentEvent::Message { peer, bytes } => {
                    if let Some(from) = self.node.incarnation_of(peer) {
                        self.deliver(desk, from, &bytes);
                    }
                }
                AgentEvent::PeerDown {
                    peer,
                    cause,
                    is_proven,
                } => {
                    let Some(incarnation) = self.node.incarnation_of(peer) else {
                        continue;
                    };
                    for flight in self.flights.values_mut() {
                        let input = DecodeInput::PeerDown {
                            incarnation,
                            cause: cause.clone(),
                            is_proven,
                        };
                        if flight.writers.iter().any(|w| w.incarnation == incarnation) {
                            flight.feed(&self.node, desk, input);
                        }
                    }
                }
                _ => {}
            }
        }
    }

    /// A message, from whatever carried it.
    pub fn deliver(&mut self, desk: &mut Desk, from: Incarnation, bytes: &[u8]) {
        let Ok(envelope) = Envelope::decode(bytes) else {
            return;
        };
        let Identity { room, attempt, .. } = envelope.identity;
        if let Message::Submit { prompt, .. } = &envelope.message {
            let tokens = prompt.len() as u32;
            return self.submitted(desk, from, room, attempt, tokens);
        }
        // Whose it is, is for the machines to see.
        for flight in self.flights.values_mut() {
            let envelope = envelope.clone();
            flight.feed(&self.node, desk, DecodeInput::Message { from, envelope });
        }
    }

    fn submitted(
        &mut self,
        desk: &mut Desk,
        from: Incarnation,
        room: Room,
        attempt: Attempt,
        tokens: u32,
    ) {
        let is_new = self.seen.get(&room).is_none_or(|seen| *seen < attempt);
        if !is_new || !self.writers.contains(&from) {
            return;
        }
        self.seen.insert(room, attempt);
        // A newer try takes the place of an older one.
        for flight in self
            .flights
            .values_mut()
            .filter(|flight| flight.room == room)
        {
            let cause = Cause::Aborted {
                by: Side::Local,
                reason: "another attempt".to_owned(),
            };
            flight.feed(&self.node, desk, DecodeInput::LocalAbort(cause));
        }
        match self.node.pools.reserve(tokens + 8, room) {
            Ok(lease) => self.admit(desk, lease, room, attempt, tokens),
            Err(error) => self.refuse(desk, room, attempt, error.to_string()),
        }
    }

    fn refuse(&self, desk: &mut Desk, room: Room, attempt: Attempt, reason: String) {
        let identity = Identity {
            incarnation: self.node.incarnation,
            room,
            attempt,
            epoch: Epoch(0),
        };
        let message = Message::OfferRefused { reason };
        let bytes = Envelope { identity, message }.encode();
        for to in self.writers.clone() {
            let (from, bytes) = (self.node.incarnation, bytes.clone());
            desk.mail.push(Letter { from, to, bytes });
        }
    }

    fn admit(
        &mut self,
        desk: &mut Desk,
        lease: WriteLease,
        room: Room,
        attempt: Attempt,
        tokens: u32,
    ) {
        let table = lease.block_table().clone();
        self.check_untouched(desk, &table);
        let epoch = lease.number();
        let plan = plan(tokens, self.writers.len() as u16);
        let writers: Vec<Writer> = (0..)
            .zip(&self.writers)
            .map(|(rank, incarnation)| Writer {
                rank: WriterRank(rank),
                incarnation: *incarnation,
            })
            .collect();
        let peers: Vec<(PeerId, WriterRank)> = writers
            .iter()
            .map(|writer| (self.node.peer_of(writer.incarnation).unwrap(), writer.rank))
            .collect();
        let in_flight = lease
            .into_inflight(&plan, epoch, &peers)
            .map_err(|refused| refused.1)
            .unwrap();
        let spec = DecodeSpec {
            incarnation: self.node.incarnation,
            room,
            attempt,
            epoch,
            offer: SlotOffer::of(tokens, &segment_ends(tokens), &table),
            writers: writers.clone(),
            designated: WriterRank(0),
            timeouts: desk.timeouts(),
        };
        let machine = DecodeMachine::new(spec).unwrap();
        let content = content(self.life, epoch.0);
        let mut flight = Flight::new(desk.now, machine, in_flight, tokens, content, writers);
        (flight.room, flight.attempt) = (room, attempt);
        flight.feed(&self.node, desk, DecodeInput::Start);
        self.flights.insert(epoch.0, flight);
    }

    /// Slots that had no owner must be as they were left.
    fn check_untouched(&mut self, desk: &mut Desk, table: &BlockTable) {
        let taken: BTreeSet<_> = table.iter().map(|(space, id)| (space, id.index)).collect();
        for freed in &mut self.freed {
            if freed.slots.is_disjoint(&taken) {
                continue;
            }
            desk.tally.slots_reused += 1;
            let found = page_digests(&self.node.pools, &freed.table, freed.tokens);
            for (before, after) in freed.digests.iter().zip(&found) {
                let slot = freed.slot_of(before);
                if freed.slots.contains(&slot) && before != after {
                    desk.violate(format!("slot {slot:?} was written after its proof"));
                }
            }
            freed.slots.retain(|slot| !taken.contains(slot));
        }
        self.freed.retain(|freed| !freed.slots.is_empty());
    }

    /// Lets one flight go on.
    pub fn tick(&mut self, net: &SimNet, desk: &mut Desk, epoch: u64) {
        let Some(flight) = self.flights.get_mut(&epoch) else {
            return;
        };
        flight.report(&self.node, desk);
        flight.read_one(net, desk);
        flight.use_it(net, &self.node, desk);
        if let Some(freed) = flight.collect(&self.node, desk) {
            self.freed.push(freed);
        }
        if flight.is_over() {
            desk.tally.machines += flight.machine.counters();
            self.flights.remove(&epoch);
        }
    }

    /// Waits that are over, and the rule that every wait ends.
    pub fn expire(&mut self, desk: &mut Desk) {
        let (now, limits) = (desk.now, desk.timeouts());
        for (epoch, flight) in &mut self.flights {
            if flight.machine.poll_deadline().is_some_and(|at| at <= now) {
                flight.machine.handle_timeout(now);
                flight.act(&self.node, desk);
            }
            if flight.is_late(now, &limits) {
                let state = flight.machine.state().name();
                desk.violate(format!("flight {epoch} is {state} past its limits"));
            }
        }
    }

    pub fn cancel(&mut self, desk: &mut Desk, epoch: u64) {
        if let Some(flight) = self.flights.get_mut(&epoch) {
            desk.tally.cancelled += 1;
            let cause = Cause::Aborted {
                by: Side::Local,
                reason: "cancelled by decode".to_owned(),
            };
            flight.feed(&self.node, desk, DecodeInput::LocalAbort(cause));
        }
    }

    /// At the end of everything: what has no owner is as it was left.
    pub fn check_all_untouched(&mut self, desk: &mut Desk) {
        let tables: Vec<BlockTable> = self.freed.iter().map(|freed| freed.table.clone()).collect();
        for table in tables {
            self.check_untouched(desk, &table);
        }
    }
}
