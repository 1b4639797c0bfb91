//! What links tell the engine: arrivals, messages, completions, the end of a connection.

use std::ops::Range;

use bytes::Bytes;

use crate::{
    Arrival,
    agent::events::AgentEvent,
    backend::{Access, LinkEvents, Quiesce, ReadRequest, RemoteRun, Resolved},
    barrier::StageSel,
    deadline::Deadline,
    engine::{
        Engine, EngineEvents, FlightLedger,
        flight::Flight,
        notify::{self, Control},
        peer::Peer,
        queue::Item,
    },
    error::{Cause, Error, ErrorKind},
    ids::{OpId, PeerId},
    mem::region::RegionCore,
    obs::{Event, add},
    sync::Arc,
    visibility::Visibility,
};

/// How long the receive thread of a connection that is given up may stay inside of an event, in milliseconds.
const CLOSE_MS: u64 = 10_000;

impl LinkEvents for EngineEvents {
    fn spin(&self) -> std::time::Duration {
        std::time::Duration::from_micros(self.0.config.spin_us)
    }

    #[cfg(not(kv_loom))]
    fn attended(&self, peer: PeerId, ring: Option<Arc<dyn crate::attend::Station>>) {
        match ring {
            Some(ring) => self.0.attendance.list(peer, ring),
            None => self.0.attendance.strike(peer),
        }
    }

    fn arrived(&self, peer: PeerId, arrival: Arrival, level: Visibility) {
        // Also of a receive thread that a shutdown has left behind: whoever is down is not heard any more.
        match self.0.is_heard(peer) {
            true => self.0.dispatch(peer, &arrival, level),
            false => add(&self.0.counters.late_messages, 1),
        }
    }

    fn message(&self, peer: PeerId, bytes: Bytes) {
        self.0.touch(peer);
        self.0.control_frame(peer, bytes);
    }

    fn landed(&self, peer: PeerId, op: OpId, slots: Range<u64>) {
        let Ok(peer) = self.0.peer(peer) else { return };
        peer.touch();
        if let Some(operation) = peer.in_flight(op) {
            operation.posted.landing.landed(slots);
        }
    }

    fn settled(&self, peer: PeerId, op: OpId) {
        let operation = self.0.peer(peer).ok().and_then(|peer| peer.in_flight(op));
        if let Some(operation) = operation {
            operation.posted.landing.settle();
        }
    }

    fn completed(&self, peer: PeerId, op: OpId, result: Result<Visibility, Error>) {
        let Ok(peer) = self.0.peer(peer) else { return };
        peer.touch();
        if let Some((operation, result)) = peer.complete(op, result) {
            self.0.end(&operation, result);
        }
    }

    fn progress(&self, peer: PeerId, _counter: u64) {
        self.0.touch(peer);
    }

    fn suspended(&self, peer: PeerId, cause: Cause) {
        if let Ok(peer) = self.0.peer(peer) {
            self.0.suspend(&peer, cause);
        }
    }

    fn resumed(&self, peer: PeerId) {
        if let Ok(peer) = self.0.peer(peer) {
            self.0.resume(&peer);
        }
    }

    fn acknowledged(&self, peer: PeerId, message_count: usize, bytes: usize) {
        if let Ok(peer) = self.0.peer(peer) {
            peer.queue.frames_acknowledged(message_count, bytes as u64);
        }
    }

    fn sent_again(&self, peer: PeerId, op: Option<OpId>) {
        let counters = &self.0.counters;
        let operation = op.and_then(|op| self.0.peer(peer).ok()?.in_flight(op));
        add(&counters.retries, u64::from(op.is_some()));
        let is_note = op.is_none() || operation.is_some_and(|op| op.is_announced());
        add(&counters.notes_replayed, u64::from(is_note));
        self.0.record(|| Event::SentAgain { peer, op });
    }

    fn repeated(&self, peer: PeerId) {
        add(&self.0.counters.notes_duplicate, 1);
        self.0.record(|| Event::Repeated { peer });
    }

    fn down(&self, peer: PeerId, cause: Cause, quiesce: Quiesce) {
        if let Ok(peer) = self.0.peer(peer) {
            self.0.peer_down(&peer, cause, quiesce);
        }
    }

    fn asked(&self, peer: PeerId, request: ReadRequest) -> bool {
        let Ok(peer) = self.0.peer(peer) else {
            return true;
        };
        peer.touch();
        peer.queue.push_request(request)
    }

    fn resolve(&self, _peer: PeerId, runs: &[RemoteRun]) -> Result<Resolved, Error> {
        self.0.resolve(runs)
    }

    #[cfg(all(feature = "one-sided", not(kv_loom)))]
    fn region(&self, id: crate::ids::RegionId) -> Option<Arc<RegionCore>> {
        self.0.regions.get(id)
    }
}

impl Engine {
    /// Notes that something of a peer has come; `false` when the peer is down.
    fn is_heard(&self, peer: PeerId) -> bool {
        let Ok(peer) = self.peer(peer) else {
            return false;
        };
        peer.touch();
        !peer.is_down()
    }

    fn touch(&self, peer: PeerId) {
        if let Ok(peer) = self.peer(peer) {
            peer.touch();
        }
    }

    fn control_frame(&self, id: PeerId, frame: Bytes) {
        let Ok(peer) = self.peer(id) else { return };
        if peer.is_down() {
            return add(&self.counters.late_messages, 1);
        }
        match notify::decode(frame) {
            Some(Control::Message(bytes)) => self.deliver(&peer, bytes),
            Some(Control::Revoke(region)) => peer.revoke(region),
            Some(Control::RevokeAck(region)) => {
                if let Some(region) = self.regions.get(region) {
                    region.peer_let_go(id);
                }
                self.sweep_regions();
            }
            None => {
                let reason = "not a control frame of this version".to_owned();
                self.fail_peer(&peer, Cause::Refused { reason });
            }
        }
    }

    /// Queues a message for the owner, unless `PeerDown` has been queued.
    fn deliver(&self, peer: &Arc<Peer>, bytes: Bytes) {
        let event = AgentEvent::Message {
            peer: peer.id,
            bytes,
        };
        // Asked with the events locked: `PeerDown` is queued after the flag is set. Counted before the
        // owner can have it.
        let is_queued = self.events.update(|events| {
            let is_queued = (!peer.is_down()).then(|| events.push(event));
            if is_queued == Some(true) {
                add(&self.counters.messages, 1);
            }
            is_queued
        });
        match is_queued {
            Some(true) => {}
            None => add(&self.counters.late_messages, 1),
            Some(false) => {
                self.fail_peer(peer, self.too_many_events());
            }
        }
    }

    /// Checks an operation of a peer and holds the regions that it touches.
    pub(super) fn resolve(&self, runs: &[RemoteRun]) -> Result<Resolved, Error> {
        let mut resolved = Resolved {
            runs: Vec::with_capacity(runs.len()),
            _holds: Vec::new(),
        };
        let mut region: Option<Arc<RegionCore>> = None;
        for run in runs {
            let core = match region.take().filter(|core| core.span(run.pool).is_some()) {
                Some(core) => core,
                None => {
                    let core = self.regions.find(run.pool)?;
                    let revoked = ErrorKind::PoolRevoked { pool: run.pool };
                    resolved
                        ._holds
                        .push(RegionCore::hold(&core).ok_or(revoked)?);
                    core
                }
            };
            if core.generation != run.generation {
                return Err(ErrorKind::PoolRevoked { pool: run.pool }.into());
            }
            resolved
                .runs
                .push(core.run(run.pool, run.slot, run.slot_count)?);
            region = Some(core);
        }
        Ok(resolved)
    }

    /// A connection has broken, and its link tries to get another one: what is under way stays under way, and
    /// nothing that the peer may touch is quiet.
    fn suspend(&self, peer: &Arc<Peer>, cause: Cause) {
        peer.queue.suspend();
        peer.suspend(Some(cause.clone()));
        self.record(|| Event::PeerSuspended {
            peer: peer.id,
            cause: cause.clone(),
        });
        let id = peer.id;
        let event = AgentEvent::PeerSuspended { peer: id, cause };
        if !self.events.update(|events| events.push(event)) {
            self.fail_peer(peer, self.too_many_events());
        }
    }

    fn resume(&self, peer: &Arc<Peer>) {
        peer.suspend(None);
        peer.touch();
        add(&self.counters.reconnects, 1);
        self.record(|| Event::PeerResumed { peer: peer.id });
        let event = AgentEvent::PeerResumed { peer: peer.id };
        self.events.update(|events| events.push_always(event));
        peer.queue.push_go_on();
    }

    fn too_many_events(&self) -> Cause {
        let reason = format!("{} events wait to be taken", self.config.event_capacity);
        Cause::Refused { reason }
    }

    /// Ends a connection from this side.
    pub(super) fn fail_peer(&self, peer: &Arc<Peer>, cause: Cause) {
        let (_has_ended, quiesce) = peer.close_within(Deadline::after_ms(CLOSE_MS));
        self.peer_down(peer, cause, quiesce);
    }

    /// The connection has ended. The first report counts.
    pub(super) fn peer_down(&self, peer: &Arc<Peer>, cause: Cause, quiesce: Quiesce) {
        let Some(waiting) = peer.mark_down(cause.clone(), quiesce.clone()) else {
            return;
        };
        let is_proven = quiesce == Quiesce::Proven;
        // What was never started touches nothing.
        for item in peer.queue.close(cause.clone()) {
            if let Item::Operation(operation) = item {
                self.end(&operation, Err(peer.down_error(cause.clone())));
            }
        }
        for operation in waiting {
            match is_proven {
                true => self.end(&operation, Err(peer.down_error(cause.clone()))),
                false => self.lose(peer, operation, cause.clone()),
            }
        }
        self.end_flights_of(peer.id, &cause, is_proven);
        if is_proven {
            self.regions
                .all()
                .iter()
                .for_each(|region| region.peer_let_go(peer.id));
        }
        self.sweep_regions();
        self.record(|| Event::PeerDown {
            peer: peer.id,
            cause: cause.clone(),
            is_proven,
        });
        let event = AgentEvent::PeerDown {
            peer: peer.id,
            cause,
            is_proven,
        };
        self.events.update(|events| events.push_always(event));
        self.trim_ended_peers();
    }

    /// A lost writer fails the flights it has not finished at once; nobody waits for a deadline.
    fn end_flights_of(&self, peer: PeerId, cause: &Cause, is_proven: bool) {
        let flights: Vec<_> = self.flights.lock().values().cloned().collect();
        for flight in flights.iter().filter(|flight| flight.is_writer(peer)) {
            self.writer_gone(flight, peer, cause, is_proven);
        }
    }

    pub(crate) fn writer_gone(
        &self,
        flight: &Arc<Flight>,
        peer: PeerId,
        cause: &Cause,
        is_proven: bool,
    ) {
        if !flight.has_landed_from(peer) {
            flight.barrier.fail(StageSel::All, cause.clone());
        }
        let writer_count = flight.ledger.peer_gone(peer, is_proven);
        if writer_count > 0 {
            add(&self.counters.quarantined_writers, writer_count);
            self.record(|| Event::Quarantined {
                epoch: flight.barrier.epoch(),
                writer_count,
            });
        }
        self.settle(flight);
    }

    /// Forgets a flight that nobody asks for once it is quiet.
    pub(crate) fn settle(&self, flight: &Arc<Flight>) {
        if flight.is_orphan() && FlightLedger::poll(&flight.ledger).is_some() {
            self.forget_flight(flight);
        }
    }

    pub(crate) fn forget_flight(&self, flight: &Arc<Flight>) {
        let epoch = flight.barrier.epoch();
        let removed = self.flights.lock().remove(&epoch);
        debug_assert!(removed.is_some_and(|f| Arc::ptr_eq(&f, flight)));
        self.record(|| Event::Quiesced { epoch });
    }

    /// Tells a peer to let go of a region, if it writes by itself.
    pub(crate) fn ask_to_let_go(&self, region: &RegionCore, peer: &Peer) {
        if peer.caps().access == Access::Checked {
            return;
        }
        // Expected before it is asked, so that the answer and the end of the connection find it.
        region.await_peer(peer.id);
        if peer
            .queue
            .push_engine_frame(notify::encode_revoke(region.id))
            .is_err()
            && peer.is_proven_quiet()
        {
            region.peer_let_go(peer.id);
        }
    }

    /// Refuses new uses of a region and asks the peers to let go of it.
    pub(crate) fn revoke_region(&self, region: &Arc<RegionCore>) {
        if !region.revoke() {
            return;
        }
        self.record(|| Event::RegionRevoked { region: region.id });
        for peer in self.all_peers() {
            self.ask_to_let_go(region, &peer);
        }
    }

    /// Asks once more for the proof that connections have ended for good, which may come long after their end.
    pub(crate) fn ask_for_late_proofs(&self, region: &RegionCore) {
        for id in region.unheard() {
            if self.peer(id).is_ok_and(|peer| peer.is_proven_quiet()) {
                region.peer_let_go(id);
            }
        }
    }

    pub(crate) fn sweep_regions(&self) {
        for region in self.regions.sweep() {
            self.record(|| Event::RegionClosed { region });
        }
    }
}
