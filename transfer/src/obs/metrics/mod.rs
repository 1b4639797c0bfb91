//! What happened, as Prometheus text: a recorder that counts events, and the text of its counts.
//!
//! The values that [`crate::Counters`] has anyway are taken from there when the text is made, so nothing is
//! counted twice. Everything else comes from events and from two stopwatches (a post, a wait at a gate).
//! **Lock order.** Nothing of this crate is taken below `peers` and `drains`; the families of the library have locks of their own,
//! which are leaves below them.

mod drains;
mod families;
mod lane;

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use prometheus_client::{
    encoding::prometheus_text, metrics::histogram::Histogram, registry::Registry,
};

use self::{drains::Drains, families::Families, lane::Lane};
use crate::{
    backend::BackendKind,
    ids::{Incarnation, PeerId},
    obs::{Counters, Event, Recorder},
    op::Op,
    status::TransferState,
    stopwatch::Stopwatch,
    sync::{Arc, Mutex},
};

/// Ended connections and incarnations that stay known.
const ENDED_KEPT: usize = 1024;

/// The counts of one agent.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    families: Families,
    peers: Mutex<Peers>,
    drains: Mutex<Drains>,
}

#[derive(Debug, Default)]
struct Peers {
    lanes: BTreeMap<BackendKind, Arc<Lane>>,
    by_id: BTreeMap<PeerId, Arc<Lane>>,
    ended: VecDeque<PeerId>,
    seen: VecDeque<Incarnation>,
}

impl Metrics {
    /// Everything, as Prometheus text.
    pub(crate) fn text(
        &self,
        counters: &Counters,
        oldest: &BTreeMap<TransferState, Duration>,
    ) -> String {
        let mut registry = Registry::with_prefix("kvgate");
        self.families.register(&mut registry);
        families::register_counters(&mut registry, counters);
        families::register_oldest(&mut registry, oldest);
        let mut text = String::new();
        prometheus_text::encode(&mut text, &registry)
            .expect("a string takes everything that is written to it");
        text
    }

    /// An operation was admitted.
    pub(crate) fn posted(&self, peer: PeerId, op: Op, stopwatch: Stopwatch) {
        let seconds = stopwatch.seconds();
        self.of_operation(peer, op, |lane| lane.post_seconds.observe(seconds));
    }

    /// What takes the sleeps at gates.
    pub(crate) fn stage_waits(&self) -> Histogram {
        self.families.barrier_wait("stage")
    }

    fn lane(&self, peer: PeerId) -> Option<Arc<Lane>> {
        self.peers.lock().by_id.get(&peer).cloned()
    }

    fn peer_up(&self, peer: PeerId, incarnation: Incarnation, backend: BackendKind) {
        let (lane, is_known) = {
            let mut peers = self.peers.lock();
            let made = || Arc::new(Lane::new(&self.families, backend));
            let lane = peers.lanes.entry(backend).or_insert_with(made).clone();
            peers.by_id.insert(peer, lane.clone());
            let is_known = peers.seen.contains(&incarnation);
            if !is_known {
                peers.seen.push_back(incarnation);
            }
            if peers.seen.len() > ENDED_KEPT {
                peers.seen.pop_front();
            }
            (lane, is_known)
        };
        lane.up.inc();
        lane.reconnects.inc_by(u64::from(is_known));
    }

    fn peer_down(&self, peer: PeerId, is_proven: bool) {
        let Some(lane) = self.lane(peer) else { return };
        lane.up.dec();
        lane.lost(is_proven).inc();
        let mut peers = self.peers.lock();
        peers.ended.push_back(peer);
        if peers.ended.len() > ENDED_KEPT
            && let Some(oldest) = peers.ended.pop_front()
        {
            peers.by_id.remove(&oldest);
        }
    }

    fn of_operation(&self, peer: PeerId, op: Op, count: impl FnOnce(&lane::OpLane)) {
        if let Some(lane) = self.lane(peer) {
            count(lane.of(op));
        }
    }

    fn drained(&self, outcome: Option<(&'static str, Duration)>) {
        if let Some((outcome, elapsed)) = outcome {
            self.families.drain(outcome).observe(elapsed.as_secs_f64());
        }
    }
}

impl Recorder for Metrics {
    fn record(&self, event: &Event) {
        match *event {
            Event::PeerUp {
                peer,
                incarnation,
                backend,
            } => self.peer_up(peer, incarnation, backend),
            Event::PeerDown {
                peer, is_proven, ..
            } => self.peer_down(peer, is_proven),
            Event::PeerResumed { peer } => {
                if let Some(lane) = self.lane(peer) {
                    lane.reconnects.inc();
                }
            }
            Event::ConnectionRefused { field } => {
                self.families.refused(field).inc();
            }
            Event::BackPressure { peer } => {
                if let Some(lane) = self.lane(peer) {
                    lane.back_pressure.inc();
                }
            }
            Event::SourceRefused {
                kind, announced_by, ..
            } => {
                let cause = match (kind, announced_by) {
                    (Op::Write, _) => "not_written_here",
                    (Op::Read, None) => "not_announced",
                    (Op::Read, Some(_)) => "announced_by_another",
                };
                self.families.source_not_ready(cause).inc();
            }
            Event::Stalled { cause, .. } => {
                self.families.stalls(cause.name()).inc();
            }
            Event::Completed {
                peer,
                kind,
                bytes,
                descriptor_count,
                is_announced,
                elapsed,
                ..
            } => self.of_operation(peer, kind, |lane| {
                lane.completed(bytes, descriptor_count, is_announced, elapsed);
            }),
            Event::OperationFailed { peer, kind, .. } => {
                self.of_operation(peer, kind, |lane| _ = lane.failed.inc());
            }
            Event::OperationUnknown { peer, kind, .. } => {
                self.of_operation(peer, kind, |lane| _ = lane.unknown.inc());
            }
            Event::Arrived { peer, .. } => {
                if let Some(lane) = self.lane(peer) {
                    lane.notifications_received.inc();
                }
            }
            Event::Draining { epoch } => {
                let outcome = self.drains.lock().began(epoch);
                self.drained(outcome);
            }
            Event::Quarantined { epoch, .. } => {
                let outcome = self.drains.lock().quarantined(epoch);
                self.drained(outcome);
            }
            Event::Quiesced { epoch } => {
                let outcome = self.drains.lock().quiet(epoch);
                self.drained(outcome);
            }
            // Counted by the agent itself, or of no interest as a number.
            _ => {}
        }
    }
}
