//! The end of an agent: no admission, flights failed, queues drained, links closed, threads joined, all
//! within one deadline, and a second more for each receive thread that is inside of a callback; what stays in use is
//! named.

use crate::{
    barrier::StageSel,
    deadline::Deadline,
    engine::{Engine, WorkerSet, handle::Operation},
    error::Cause,
    ids::{Epoch, RegionId},
    sync::{Arc, Ordering},
};

/// What was left when an agent was shut down.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "it names what is still in use"]
pub struct ShutdownReport {
    /// Flights whose memory may still be written or read.
    pub unquiet_flights: Vec<Epoch>,
    /// Regions that are registered still; their memory stays mapped.
    pub open_regions: Vec<RegionId>,
    /// Operations whose end nobody can tell.
    pub unknown_operations: u64,
    /// Messages that were queued and not sent, or sent over a connection that broke before the peer acknowledged
    /// them and was not made again in time: whether they came nobody can tell.
    pub unsent_messages: u64,
    /// Threads that did not end in time: workers, and receive threads inside of a sink or a recorder that does not
    /// return. What a peer of these may have written is quarantined.
    pub running_threads: usize,
}

impl ShutdownReport {
    /// Whether nothing was left.
    pub fn is_clean(&self) -> bool {
        *self == Self::default()
    }
}

impl Engine {
    pub(crate) fn shutdown(&self, deadline: Deadline) -> ShutdownReport {
        self.is_stopping.store(true, Ordering::Release);
        let flights: Vec<_> = self.flights.lock().values().cloned().collect();
        for flight in &flights {
            if !flight.barrier.all_landed() {
                flight.barrier.fail(StageSel::All, Cause::Shutdown);
            }
        }
        // Half of the time to send what is queued, the other half to end.
        let drained_by = Deadline::after(deadline.remaining() / 2);
        let (mut unsent_messages, mut stuck_threads) = (0, 0);
        let peers = self.all_peers();
        // Of what was lost with the others their end has told. A session may end while this waits for it.
        let were_up: Vec<bool> = peers.iter().map(|peer| !peer.is_down()).collect();
        for (peer, was_up) in peers.iter().zip(were_up) {
            if self.has_workers {
                peer.queue.wait_drained(drained_by);
                if was_up {
                    unsent_messages += peer.unsent_messages();
                }
            }
            let closed_by = Deadline::after(deadline.remaining() / 2);
            let (has_ended, quiesce) = peer.close_within(closed_by);
            stuck_threads += usize::from(!has_ended);
            self.peer_down(peer, Cause::Shutdown, quiesce);
        }
        // Listeners end behind the peers: until then one that is away may come back, and no greeting waits for the
        // place of a session that is over. Whoever is new meanwhile is turned away when it is attached.
        self.run_shutdown_hooks();
        self.stalls.stop();
        let (running_threads, handles) = self.join_ready(deadline);
        for handle in handles {
            // A worker that panicked has been counted as ended; its panic was reported by the runtime.
            let _ = handle.join();
        }
        self.events.update(|events| events.close());
        self.forget_peers();
        ShutdownReport {
            unquiet_flights: flights
                .iter()
                .filter(|flight| !flight.ledger.unquiet().is_quiet())
                .map(|flight| flight.barrier.epoch())
                .collect(),
            open_regions: self.regions.all().iter().map(|region| region.id).collect(),
            unsent_messages,
            unknown_operations: self.counters.snapshot().unknown_transfers,
            running_threads: running_threads + stuck_threads,
        }
    }

    /// Waits for the workers; gives back the handles to join when all have ended.
    fn join_ready(&self, deadline: Deadline) -> (usize, Vec<crate::sync::thread::JoinHandle<()>>) {
        let all_ended = |workers: &mut WorkerSet| (workers.running == 0).then_some(());
        let ended = self.workers.wait(deadline, all_ended).is_some();
        self.workers.with(|workers| {
            let handles = std::mem::take(&mut workers.handles);
            (workers.running, if ended { handles } else { Vec::new() })
        })
    }

    /// Leaks an operation whose memory may still be touched: it must outlive everything.
    pub(super) fn keep_for_good(&self, operation: Arc<Operation>) {
        std::mem::forget(operation);
    }
}
