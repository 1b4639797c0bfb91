//! The engine as it stands: one look at each list, with the locks that guard them.

#[cfg(all(feature = "metrics", not(kv_loom)))]
use std::{collections::BTreeMap, time::Duration};
use std::{fmt, time::Instant};

use crate::{
    engine::{Engine, flight::Flight, handle::Operation, peer::Peer},
    ids::WriterRank,
    mem::{huge::HugeMap, region::RegionCore},
    status::{
        AgentStatus, FlightState, FlightStatus, PeerMemory, PeerStatus, RegionStatus,
        TransferStatus, WriterStatus,
    },
    sync::Arc,
};

fn age_ms(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

fn hex(incarnation: u128) -> String {
    format!("{incarnation:032x}")
}

fn text(value: impl fmt::Display) -> String {
    value.to_string()
}

impl Engine {
    pub(crate) fn status(&self) -> AgentStatus {
        let peers = self.all_peers();
        let mut transfers: Vec<_> = peers
            .iter()
            .flat_map(|peer| peer.queue.operations())
            .filter_map(|operation| of_operation(&operation))
            .collect();
        transfers.sort_by_key(|transfer| transfer.id);
        let flights: Vec<Arc<Flight>> = self.flights.lock().values().cloned().collect();
        let flights: Vec<_> = flights.iter().map(|flight| of_flight(flight)).collect();
        let huge = HugeMap::read();
        let regions = self.regions.all();
        AgentStatus {
            name: self.name.clone(),
            incarnation: hex(self.incarnation.0),
            transfers,
            peers: peers.iter().map(|peer| of_peer(peer)).collect(),
            regions: regions
                .iter()
                .filter_map(|region| of_region(region, &huge))
                .collect(),
            unknown_transfer_count: self.counters.snapshot().unknown_transfers,
            quarantined_writer_count: flights
                .iter()
                .flat_map(|flight| &flight.unquiet_writers)
                .filter(|writer| writer.is_quarantined)
                .count() as u64,
            flights,
        }
    }
}

#[cfg(all(feature = "metrics", not(kv_loom)))]
impl Engine {
    /// The age of the oldest operation in each state that an operation is in.
    pub(crate) fn oldest_in_flight(&self) -> BTreeMap<crate::TransferState, Duration> {
        let mut oldest = BTreeMap::new();
        for peer in self.all_peers() {
            for operation in peer.queue.operations() {
                let Some((state, _)) = operation.standing() else {
                    continue;
                };
                let age = operation.posted_at.elapsed();
                let known = oldest.entry(state).or_insert(age);
                *known = age.max(*known);
            }
        }
        oldest
    }
}

/// `None` once it has ended.
fn of_operation(operation: &Operation) -> Option<TransferStatus> {
    let (state, cause) = operation.standing()?;
    let stall = operation.watch.stall();
    Some(TransferStatus {
        id: operation.posted.id.0,
        peer: operation.peer.0,
        op: text(operation.posted.op),
        bytes: operation.posted.bytes,
        descriptor_count: operation.descriptor_count,
        age_ms: age_ms(operation.posted_at),
        state,
        cause: cause.map(text),
        bytes_moved: operation.bytes_moved(),
        stalled_ms: stall.map(|(_, since)| age_ms(since)),
        stall: stall.map(|(cause, _)| text(cause)),
    })
}

fn of_peer(peer: &Peer) -> PeerStatus {
    let memory = |region: &crate::agent::metadata::RegionInfo| PeerMemory {
        region: region.id.0,
        kind: text(region.kind),
        len_bytes: region.len_bytes,
        granule_bytes: peer.link.granule_bytes(region.id),
    };
    let down = peer.down().map(|(cause, _)| text(cause));
    let heartbeat = peer.link.heartbeat().filter(|_| down.is_none());
    PeerStatus {
        id: peer.id.0,
        name: peer.metadata.name.clone(),
        incarnation: hex(peer.incarnation().0),
        backend: text(peer.link.kind()),
        memories: peer.metadata.regions.iter().map(memory).collect(),
        last_progress_age_ms: age_ms(peer.last_progress()),
        heartbeat_age_ms: heartbeat
            .map(|silence| u64::try_from(silence.as_millis()).unwrap_or(u64::MAX)),
        down,
        suspended: peer.suspended().map(text),
    }
}

/// `None` once it is closed.
fn of_region(region: &RegionCore, huge: &HugeMap) -> Option<RegionStatus> {
    let memory = region.memory()?;
    let (kind, len_bytes) = (memory.kind(), memory.len_bytes());
    Some(RegionStatus {
        id: region.id.0,
        kind: text(kind),
        len_bytes,
        huge_bytes: huge.bytes_in(memory.base_ptr() as u64, len_bytes),
        granule_bytes: memory.placement().granule_bytes,
        not_huge: memory.placement().not_huge.clone(),
        numa_node: memory.placement().numa_node,
        is_revoking: region.is_revoked(),
        hold_count: region.outstanding(),
        unheard_peer_count: region.unheard_peers(),
    })
}

fn of_flight(flight: &Flight) -> FlightStatus {
    let (barrier, unquiet) = (&flight.barrier, flight.ledger.unquiet());
    let stages = 0..barrier.stage_count();
    let missing = |stage| u64::from(barrier.missing(crate::StageId(stage as u16)));
    let writer = |wanted: WriterRank, is_quarantined| {
        let writers = flight
            .writers
            .iter()
            .filter(move |(_, rank)| *rank == wanted);
        writers.map(move |(peer, rank)| WriterStatus {
            rank: rank.0,
            peer: peer.0,
            is_quarantined,
        })
    };
    let waited_for = unquiet.writers.iter().flat_map(|rank| writer(*rank, false));
    let lost = unquiet
        .unprovable_writers
        .iter()
        .flat_map(|rank| writer(*rank, true));
    FlightStatus {
        epoch: barrier.epoch().0,
        age_ms: age_ms(flight.began_at),
        state: match flight.ledger.is_closed() {
            true => FlightState::Draining,
            false => FlightState::Open,
        },
        missing_chunk_count: stages.map(missing).sum(),
        operation_count: unquiet.operations,
        fence_count: unquiet.fences,
        unquiet_writers: waited_for.chain(lost).collect(),
    }
}
