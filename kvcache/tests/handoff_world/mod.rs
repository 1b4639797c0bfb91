//! Requests between writers and a receiver, any of which may die or give up, over a network that may
//! lose, delay, double and replay what is said. One thread; every choice comes from a seed.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used)]

pub mod decoder;
pub mod desk;
pub mod flight;
pub mod writer;

use std::collections::BTreeMap;
use std::time::Duration;

use decoder::Decoder;
use desk::*;
use kvgate_kvcache::handoff::DecodeState;
use kvgate_kvcache::*;
use kvgate_transfer::sim::{Death, SimFaults, SimNet};
use kvgate_transfer::{Deadline, Incarnation};
use writer::WriterSide;

const ROOMS: u64 = 7;
const ATTEMPTS: u32 = 4;
/// Prompt lengths: one page, a page and its borders, several segments.
const LENGTHS: [u32; 8] = [1, 3, 127, 128, 256, 257, 300, 520];

struct Request {
    tokens: u32,
    attempt: Attempt,
}

pub struct World {
    net: SimNet,
    pub desk: Desk,
    decoder: Decoder,
    writers: Vec<WriterSide>,
    requests: BTreeMap<Room, Request>,
    /// Letters under way in runs without reliable messages, and some that were.
    office: Vec<Letter>,
    old: Vec<Letter>,
    /// Where each process that ever was can be reached: the rank, `None` for the receiver. A letter
    /// for a dead one gets to the one that lives there now.
    addresses: BTreeMap<Incarnation, Option<usize>>,
    lives: u32,
    may_be_unprovable: bool,
}

impl World {
    pub fn new(seed: u64) -> World {
        let faults = match seed % 4 {
            0 => SimFaults::none(),
            _ => SimFaults::all(),
        };
        let net = SimNet::new(seed, faults);
        let is_reliable = net.random(2) == 0;
        let writer_count = 1 + net.random(3) as u16;
        let mut world = World {
            decoder: Decoder::new(&net, 0),
            writers: Vec::new(),
            requests: BTreeMap::new(),
            office: Vec::new(),
            old: Vec::new(),
            addresses: BTreeMap::new(),
            lives: 0,
            desk: Desk::new(is_reliable),
            may_be_unprovable: false,
            net,
        };
        for rank in 0..writer_count {
            let mut writer =
                WriterSide::new(&world.net, &format!("prefill {rank}"), rank, writer_count);
            connect(&world.net, &mut writer.node, &mut world.decoder.node);
            writer.decoder = (world.decoder.node.incarnation, 0);
            world.decoder.writers.push(writer.node.incarnation);
            let rank = usize::from(rank);
            world.addresses.insert(writer.node.incarnation, Some(rank));
            world.writers.push(writer);
        }
        let receiver = world.decoder.node.incarnation;
        world.addresses.insert(receiver, None);
        world
    }

    pub fn run(&mut self) {
        for _ in 0..1_400 {
            self.act();
            self.go_on();
        }
        self.finish();
    }

    fn chance(&self, per_mille: u64) -> bool {
        self.net.random(1000) < per_mille
    }

    /// Something that somebody decides.
    fn act(&mut self) {
        match self.net.random(1000) {
            0..60 => self.start_or_retry(),
            60..66 => self.cancel_at_decoder(),
            66..72 => self.cancel_at_writer(),
            72..74 => {
                let death = self.death();
                self.kill_writer(death);
            }
            74 => self.kill_decoder(),
            77..81 => self.cancel_and_kill(),
            75..77 => self.desk.now += Duration::from_millis(90),
            _ => {}
        }
    }

    /// Time, the network and every process go on a little.
    fn go_on(&mut self) {
        self.desk.now += Duration::from_micros(self.net.random(250));
        for _ in 0..self.net.random(4) {
            self.net.step();
        }
        self.send_mail();
        if self.net.random(3) > 0 {
            self.deliver_one();
        }
        self.decoder.take_events(&mut self.desk);
        for writer in &mut self.writers {
            writer.take_events(&mut self.desk);
        }
        if let Some(epoch) = pick(&self.net, self.decoder.flights.keys()) {
            self.decoder.tick(&self.net, &mut self.desk, epoch);
        }
        let index = self.net.random(self.writers.len() as u64) as usize;
        let writer = &mut self.writers[index];
        if let Some(key) = pick(&self.net, writer.flights.keys()) {
            if self.net.random(3) > 0 {
                writer.compute(&mut self.desk, key);
            }
            writer.tick(&self.net, &mut self.desk, key);
        }
        self.decoder.expire(&mut self.desk);
        for writer in &mut self.writers {
            writer.expire(&mut self.desk);
        }
        self.check_conservation();
    }

    fn check_conservation(&mut self) {
        let nodes = self.writers.iter().map(|writer| &writer.node);
        let nodes = nodes.chain([&self.decoder.node]);
        let lost = nodes
            .filter(|node| !node.pools.stats().is_conserved())
            .count();
        if lost > 0 {
            self.desk.violate("slots are not conserved".to_owned());
        }
    }

    /// Takes what the machines want to send to whatever carries it.
    fn send_mail(&mut self) {
        for letter in std::mem::take(&mut self.desk.mail) {
            if !self.desk.is_reliable {
                self.office.push(letter);
                continue;
            }
            let nodes = self.writers.iter().map(|writer| &writer.node);
            let sender = nodes
                .chain([&self.decoder.node])
                .find(|node| node.incarnation == letter.from);
            if let Some(node) = sender
                && let Some(peer) = node.peer_of(letter.to)
            {
                // A connection that has ended carries nothing.
                let _ = node.agent.send(peer, &letter.bytes);
            }
        }
    }

    /// One letter arrives: any of those under way, perhaps not whole, perhaps not for the last time.
    fn deliver_one(&mut self) {
        if self.chance(8) && !self.old.is_empty() {
            let index = self.net.random(self.old.len() as u64) as usize;
            self.desk.tally.letters_replayed += 1;
            self.office.push(self.old[index].clone());
        }
        if self.office.is_empty() {
            return;
        }
        let index = self.net.random(self.office.len() as u64) as usize;
        let mut letter = self.office.swap_remove(index);
        if self.chance(40) {
            self.desk.tally.letters_lost += 1;
            return;
        }
        if self.chance(80) {
            self.desk.tally.letters_doubled += 1;
            self.office.push(letter.clone());
        }
        if self.old.len() < 200 {
            self.old.push(letter.clone());
        }
        if self.chance(10) {
            self.desk.tally.letters_damaged += 1;
            let at = self.net.random(letter.bytes.len() as u64) as usize;
            letter.bytes[at] ^= 1 << self.net.random(8);
        }
        let Letter { from, to, bytes } = letter;
        match self.addresses.get(&to) {
            Some(Some(rank)) => self.writers[*rank].deliver(&mut self.desk, from, &bytes),
            Some(None) => self.decoder.deliver(&mut self.desk, from, &bytes),
            None => self.desk.violate(format!("a letter for nobody: {to:?}")),
        }
    }

    fn start_or_retry(&mut self) {
        let room = Room(1 + self.net.random(ROOMS));
        let is_open = |writer: &WriterSide| writer.flights.keys().any(|(open, _)| *open == room);
        let is_finished = self.desk.results.contains_key(&room);
        // A try that this side has given up may go on at the receiver.
        if is_finished || (self.writers.iter().any(is_open) && !self.chance(100)) {
            return;
        }
        let length = LENGTHS[self.net.random(LENGTHS.len() as u64) as usize];
        let request = self.requests.entry(room).or_insert(Request {
            tokens: length,
            attempt: Attempt(0),
        });
        if request.attempt.0 == ATTEMPTS {
            return;
        }
        request.attempt.0 += 1;
        let (attempt, tokens) = (request.attempt, request.tokens);
        for writer in &mut self.writers {
            writer.begin(&mut self.desk, room, attempt, tokens);
        }
    }

    fn cancel_at_decoder(&mut self) {
        if let Some(epoch) = pick(&self.net, self.decoder.flights.keys()) {
            self.decoder.cancel(&mut self.desk, epoch);
        }
    }

    fn cancel_at_writer(&mut self) {
        let index = self.net.random(self.writers.len() as u64) as usize;
        let writer = &mut self.writers[index];
        if let Some(key) = pick(&self.net, writer.flights.keys()) {
            writer.cancel(&mut self.desk, key);
        }
    }

    /// The worst moment: a flight has been given up, its writers are asked, and one of them dies.
    fn cancel_and_kill(&mut self) {
        let flights = self.decoder.flights.iter();
        let receiving = flights.filter(|(_, f)| f.machine.state() == DecodeState::Receiving);
        let epochs: Vec<u64> = receiving.map(|(epoch, _)| *epoch).collect();
        if let Some(epoch) = pick(&self.net, epochs.iter()) {
            self.decoder.cancel(&mut self.desk, epoch);
            self.send_mail();
            self.kill_writer(Death::Unprovable);
        }
    }

    fn death(&self) -> Death {
        match self.net.random(3) {
            0 => Death::Unprovable,
            _ => Death::Proven,
        }
    }

    /// A writer dies and comes back as another process that knows nothing.
    fn kill_writer(&mut self, death: Death) {
        self.may_be_unprovable |= death == Death::Unprovable;
        let index = self.net.random(self.writers.len() as u64) as usize;
        self.lives += 1;
        let (rank, count) = (index as u16, self.writers.len() as u16);
        let name = format!("prefill {rank} life {}", self.lives);
        let mut reborn = WriterSide::new(&self.net, &name, rank, count);
        self.net.kill(&self.writers[index].node.agent, death);
        connect(&self.net, &mut reborn.node, &mut self.decoder.node);
        reborn.decoder = (self.decoder.node.incarnation, self.decoder.life);
        self.decoder.writers[index] = reborn.node.incarnation;
        self.addresses.insert(reborn.node.incarnation, Some(index));
        let dead = std::mem::replace(&mut self.writers[index], reborn);
        for flight in dead.flights.into_values() {
            self.desk.tally.machines += flight.machine.counters();
        }
        let _ = dead.node.agent.shutdown(Deadline::now());
        self.desk.tally.writers_killed += 1;
    }

    fn kill_decoder(&mut self) {
        let death = self.death();
        self.may_be_unprovable |= death == Death::Unprovable;
        self.lives += 1;
        let mut reborn = Decoder::new(&self.net, self.lives);
        self.net.kill(&self.decoder.node.agent, death);
        for writer in &mut self.writers {
            connect(&self.net, &mut writer.node, &mut reborn.node);
            writer.decoder = (reborn.node.incarnation, reborn.life);
            reborn.writers.push(writer.node.incarnation);
        }
        self.addresses.insert(reborn.node.incarnation, None);
        let dead = std::mem::replace(&mut self.decoder, reborn);
        for flight in dead.flights.into_values() {
            self.desk.tally.machines += flight.machine.counters();
        }
        let _ = dead.node.agent.shutdown(Deadline::now());
        self.desk.tally.decoders_killed += 1;
    }

    /// Nobody decides anything any more: everything must come to its end, by its limits at the latest.
    fn finish(&mut self) {
        let limits = self.desk.timeouts();
        let all_limits = (limits.transfer + limits.idle + limits.drain) * 3;
        let youngest = |world: &Self| world.decoder.flights.keys().copied().max();
        // A request that was late on its way begins a flight, which has its own limits before it.
        loop {
            let (until, last) = (self.desk.now + all_limits, youngest(self));
            while self.desk.now < until || self.net.step() {
                self.go_on();
            }
            for _ in 0..200 {
                self.go_on();
            }
            if youngest(self) <= last {
                break;
            }
        }
        self.check_end();
    }

    fn check_end(&mut self) {
        let desk = &mut self.desk;
        for (epoch, flight) in &self.decoder.flights {
            let is_kept = flight.machine.is_settled() && flight.is_kept;
            if !is_kept {
                let state = flight.machine.state().name();
                desk.violate(format!("flight {epoch} has not ended: {state}"));
            }
            let is_explained = self.may_be_unprovable || !desk.is_reliable;
            if is_kept && !is_explained {
                desk.violate(format!("flight {epoch} keeps its slots for no reason"));
            }
            desk.tally.machines += flight.machine.counters();
        }
        let stats = self.decoder.node.pools.stats();
        let kept = || {
            self.decoder
                .flights
                .values()
                .filter(|flight| flight.is_kept)
        };
        // Parked slots may have come back by a late proof, which nobody is told of.
        let may_drain = kept().next().is_some();
        let must_drain = kept().any(|flight| !flight.is_parked);
        for space in [stats.pages, stats.windows, stats.requests] {
            let is_draining = space.draining != 0;
            if space.owned != 0 || (is_draining && !may_drain) || (must_drain && !is_draining) {
                desk.violate(format!("the receiver keeps slots: {space:?}"));
            }
        }
        for writer in &self.writers {
            for ((room, _), flight) in &writer.flights {
                // Operations whose end nobody can tell keep their flight.
                let is_kept = self.may_be_unprovable && flight.is_kept();
                if !is_kept {
                    let state = flight.machine.state().name();
                    desk.violate(format!("room {room} has not ended at a writer: {state}"));
                }
            }
            let stats = writer.node.pools.stats();
            if stats.pages.owned != 0 && writer.flights.is_empty() {
                desk.violate(format!("a writer keeps slots: {stats:?}"));
            }
        }
        self.decoder.check_all_untouched(&mut self.desk);
    }
}

/// One of the keys.
fn pick<'k, K: Copy + 'k>(net: &SimNet, keys: impl ExactSizeIterator<Item = &'k K>) -> Option<K> {
    let mut keys = keys;
    let count = keys.len() as u64;
    keys.nth(net.random(count) as usize).copied()
}
