//! A sender of the simulated flights.

use std::collections::{BTreeMap, BTreeSet};

use kvgate_transfer::{sync::Arc, *};

use super::{NUMBERED, SENDERS, SLOT_COUNT, STAGES, pattern};
use crate::sim_node::Node;

/// The number of a message that has one.
pub(super) fn numbered(bytes: &[u8]) -> Option<u64> {
    let (tag, number) = bytes.split_first_chunk::<8>()?;
    let number = number.first_chunk::<8>()?;
    (u64::from_le_bytes(*tag) == NUMBERED).then_some(u64::from_le_bytes(*number))
}

/// A sender: its connection, its source slots, and the ledger per flight.
pub(super) struct Sender {
    /// Numbered messages of this connection: sent to the receiver, sent by it, and heard of these.
    pub(super) said: u64,
    pub(super) told: u64,
    pub(super) heard: u64,
    /// Its session is over.
    pub(super) is_parted: bool,
    pub(super) node: Node,
    pub(super) to_receiver: PeerId,
    pub(super) at_receiver: PeerId,
    pub(super) ledgers: BTreeMap<u64, Arc<FlightLedger>>,
    pub(super) aborted: Vec<u64>,
    pub(super) busy: BTreeMap<u64, Vec<u32>>,
}

impl Sender {
    /// Posts one chunk per stage, from its own source slots; what it posted, by index.
    pub(super) fn post(
        &mut self,
        epoch: u64,
        rank: usize,
        slots: &[u32],
    ) -> Vec<(usize, TransferHandle)> {
        let mut posted = Vec::new();
        let ledger = FlightLedger::new(Epoch(epoch));
        let used: BTreeSet<u32> = self.busy.values().flatten().copied().collect();
        let mut sources = (0..SLOT_COUNT).filter(|slot| !used.contains(slot));
        let mut taken = Vec::new();
        for stage in 0..STAGES {
            let index = usize::from(stage) * SENDERS + rank;
            let source = sources.next().unwrap();
            taken.push(source);
            self.node.fill(source, pattern(epoch, index as u16));
            let Some(info) = self.node.agent.peer(self.to_receiver) else {
                continue;
            };
            let mut local = DescriptorList::new();
            let mut remote = DescriptorList::remote(info.incarnation);
            local.push(self.node.region.pools()[0], &[source]);
            remote.push(info.pools[0].pool, &[slots[index]]);
            let prepare = |remote| {
                let agent = &self.node.agent;
                agent.prepare(Op::Write, &local, remote, self.to_receiver)
            };
            let mut former = DescriptorList::remote(Incarnation(info.incarnation.0 ^ 1));
            former.push(info.pools[0].pool, &[slots[index]]);
            assert!(prepare(&former).is_err(), "slots of another life are taken");
            let Ok(transfer) = prepare(&remote) else {
                continue;
            };
            let arrival = Arrival {
                epoch: Epoch(epoch),
                tickets: vec![(StageId(stage), ChunkId(rank as u16))],
                note: Default::default(),
            };
            let options = PostOptions {
                arrival: Some(arrival),
                ledger: Some(ledger.clone()),
                ..PostOptions::default()
            };
            let agent = &self.node.agent;
            if let Ok(handle) = agent.post(&transfer, SourceReady::host_written(), options) {
                posted.push((index, handle));
            }
        }
        self.ledgers.insert(epoch, ledger);
        self.busy.insert(epoch, taken);
        posted
    }

    /// Closes aborted flights and answers once they are quiet; gives sources back against the proof.
    pub(super) fn answer(&mut self) {
        while let Some(event) = self.node.agent.next_event(Deadline::now()) {
            match event {
                AgentEvent::Message { bytes, .. } => match numbered(&bytes) {
                    Some(number) => {
                        assert_eq!(number, self.heard, "a message was lost or repeated");
                        self.heard += 1;
                    }
                    None => self
                        .aborted
                        .push(u64::from_le_bytes(bytes[..].try_into().unwrap())),
                },
                AgentEvent::PeerDown { .. } => self.is_parted = true,
                _ => {}
            }
        }
        for ledger in self.ledgers.values() {
            ledger.close();
        }
        let quiet: Vec<u64> = self
            .ledgers
            .iter()
            .filter(|(_, l)| FlightLedger::poll(l).is_some())
            .map(|(e, _)| *e)
            .collect();
        for epoch in quiet {
            self.ledgers.remove(&epoch);
            self.busy.remove(&epoch);
        }
        let (done, waiting): (Vec<u64>, Vec<u64>) = std::mem::take(&mut self.aborted)
            .into_iter()
            .partition(|epoch| !self.ledgers.contains_key(epoch));
        self.aborted = waiting;
        for epoch in done {
            let _ = self.node.agent.send(self.to_receiver, epoch.to_le_bytes());
        }
    }
}
