//! The main thread of the decode side: messages of the peer, ends of workers, answers of the reference.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use kvgate_kvcache::DrainingFlight;
use kvgate_transfer::{AgentEvent, Cause, PeerId, Side as Which};

use super::flight::Flight;
use super::worker::What;
use super::{Conclude, Inbox, Side, verdict, worker};
use crate::handoff::cancel::{self, CancelMoment};
use crate::handoff::compare::Comparison;
use crate::handoff::console;
use crate::handoff::control::Progress;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::fault::decode::{self as faults, Watched};
use crate::handoff::link::{self, PeerWatch, transfer_failure};
use crate::handoff::observer::Phase;
use crate::handoff::options::OutputOptions;
use crate::handoff::plan::{self, Message, PrefillSummary, RunPlan, SideMessage};
use crate::handoff::protocol::{self, FlightId, FromPrefill, Speaker, Submission};
use crate::handoff::reference::{Going, ReferenceEvent, ReferenceLink};
use crate::handoff::report::PlantedFault;
use crate::handoff::turns::schedule::{self, Turn};

/// How often waits are looked at when nothing happens.
const TICK: Duration = Duration::from_millis(10);

/// How long the peer may take to hear the verdict.
const GOODBYE_LIMIT: Duration = Duration::from_secs(1);

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Finished,
    Cancelled,
}

/// A run from the side that decodes.
pub(super) struct Session {
    pub(super) side: Arc<Side>,
    pub(super) output: OutputOptions,
    pub(super) reference: ReferenceLink,
    pub(super) inbox: Sender<Inbox>,
    /// The connection that said hello first: the prefill side of this run.
    pub(super) greeted: Option<PeerId>,
    /// Other connections that said something.
    pub(super) strangers: BTreeSet<PeerId>,
    pub(super) peer: Option<Peer>,
    pub(super) waiting: VecDeque<Submission>,
    pub(super) flights: BTreeMap<u64, Flight>,
    pub(super) draining: Vec<Drain>,
    /// Flights whose workers still hold a lease, by their epochs.
    pub(super) held_by_workers: BTreeSet<u64>,
    pub(super) fates: BTreeMap<u32, Fate>,
    pub(super) comparison: Comparison,
    pub(super) first_prompt: Option<Vec<u32>>,
    pub(super) peak_in_flight: u32,
    pub(super) most_quarantined: u64,
    pub(super) summary: Option<PrefillSummary>,
    pub(super) refused_connections: u64,
    pub(super) clock_shift_us: i64,
    pub(super) speaker: Speaker,
    /// Where the fault acts, once its request has slots.
    pub(super) planted: Option<PlantedFault>,
    last_event_at: Instant,
    last_reference_at: Instant,
    began_at: Instant,
    submitted: BTreeSet<u32>,
}

/// The prefill side, once it has said what it wants.
pub(super) struct Peer {
    pub(super) id: PeerId,
    pub(super) watch: PeerWatch,
    pub(super) plan: RunPlan,
    pub(super) moments: Vec<Option<CancelMoment>>,
    pub(super) fault: Option<Watched>,
    /// The turns that the requests are; empty without conversations.
    pub(super) order: Vec<Turn>,
}

/// A flight that has ended and may still be written to.
pub(super) struct Drain {
    epoch: u64,
    slot_count: u64,
    flight: DrainingFlight,
    is_aborted: bool,
}

impl Session {
    pub(super) fn new(
        side: Arc<Side>,
        output: OutputOptions,
        reference: ReferenceLink,
        inbox: Sender<Inbox>,
    ) -> Self {
        let now = Instant::now();
        let speaker = Speaker {
            incarnation: side.agent.incarnation(),
        };
        Self {
            side,
            output,
            reference,
            inbox,
            greeted: None,
            strangers: BTreeSet::new(),
            peer: None,
            waiting: VecDeque::new(),
            flights: BTreeMap::new(),
            draining: Vec::new(),
            held_by_workers: BTreeSet::new(),
            fates: BTreeMap::new(),
            comparison: Comparison::default(),
            first_prompt: None,
            peak_in_flight: 0,
            most_quarantined: 0,
            summary: None,
            refused_connections: 0,
            clock_shift_us: 0,
            speaker,
            planted: None,
            last_event_at: now,
            last_reference_at: now,
            began_at: now,
            submitted: BTreeSet::new(),
        }
    }

    /// Runs to the verdict. A failure is told to the peer, so that it ends with the same code.
    pub(super) fn run(
        mut self,
        events: &Receiver<Inbox>,
        conclude: Conclude<'_>,
    ) -> Result<(), Failure> {
        let ran = self.run_to_end(events);
        let (message, result) = match ran {
            Ok(()) => match verdict::judge(&self) {
                Ok((report, timeline)) => {
                    let (code, text) = conclude(report, timeline);
                    (SideMessage::Finish { code, text }, Ok(()))
                }
                Err(failure) => (SideMessage::Failed(failure.clone()), Err(failure)),
            },
            Err(failure) => (SideMessage::Failed(failure.clone()), Err(failure)),
        };
        if let Some(peer) = self.greeted {
            // A peer that is gone needs no verdict.
            let told = self.side.agent.send(peer, plan::encode(&message));
            if told.is_ok() {
                wait_for_goodbye(events, peer);
            }
        }
        let deadline = kvgate_transfer::Deadline::after(Duration::from_millis(500));
        let report = self.side.agent.shutdown(deadline);
        tracing::debug!(?report, "agent shut down");
        result
    }

    fn run_to_end(&mut self, events: &Receiver<Inbox>) -> Result<(), Failure> {
        while !self.is_over() {
            match events.recv_timeout(TICK) {
                Ok(Inbox::Agent(event)) => self.on_agent(event)?,
                Ok(Inbox::Reference(event)) => self.on_reference(event)?,
                Ok(Inbox::Worker(ended)) => self.on_worker(ended)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::internal("the event thread has ended"));
                }
            }
            self.poll_draining();
            self.admit_waiting()?;
            self.check_waits()?;
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        let Some(peer) = &self.peer else {
            return false;
        };
        self.fates.len() == peer.plan.requests as usize
            && self.flights.is_empty()
            && self.waiting.is_empty()
            && self.draining.is_empty()
            && self.summary.is_some()
            && self.comparison.waiting_count() == 0
    }

    fn on_agent(&mut self, event: AgentEvent) -> Result<(), Failure> {
        self.last_event_at = Instant::now();
        match event {
            AgentEvent::Refused { address, reason } => {
                self.refused_connections += 1;
                console::note(&format!("pd-handoff: refused {address}: {reason}"));
                Ok(())
            }
            AgentEvent::Message { peer, bytes } if self.is_of_run(peer) => {
                match plan::parse(&bytes)? {
                    Message::Side(message) => self.on_side_message(peer, *message),
                    Message::Handoff(bytes) => {
                        let incarnation = link::incarnation(&self.side.agent, peer)?;
                        match protocol::from_prefill(&bytes, incarnation)? {
                            Some(message) => self.on_handoff(peer, message),
                            None => Ok(()),
                        }
                    }
                }
            }
            AgentEvent::Message { peer, bytes } => self.on_stranger(peer, &bytes),
            AgentEvent::PeerDown { peer, cause, .. } if self.is_peer(peer) => Err(Failure::new(
                FailureKind::PeerLost,
                format!("prefill was lost: {cause}"),
            )),
            AgentEvent::PeerDown { peer, .. } => {
                // It went before it said what it wants; the next one may come.
                self.greeted = self.greeted.filter(|greeted| *greeted != peer);
                self.strangers.remove(&peer);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn is_peer(&self, peer: PeerId) -> bool {
        self.peer.as_ref().is_some_and(|known| known.id == peer)
    }

    fn on_side_message(&mut self, from: PeerId, message: SideMessage) -> Result<(), Failure> {
        match message {
            SideMessage::Plan(plan) => {
                if self.peer.is_some() {
                    return Err(Failure::new(
                        FailureKind::BadInput,
                        "a second prefill side told a plan",
                    ));
                }
                plan.check(self.side.host.context_tokens())?;
                let moments = cancel::draw(plan.seed, plan.requests, plan.cancel_share, plan.steps);
                let watch = PeerWatch::new(&self.side.agent, from, self.side.deadline);
                self.side.markers.enter(Phase::Prefill);
                self.clock_shift_us = plan.clock_shift_us();
                let fault = faults::watch(&plan, &self.side.host.schema)?;
                let order = plan.conversations.as_ref().map_or_else(Vec::new, |turns| {
                    schedule::order_of(plan.seed, turns.sessions, turns.turns)
                });
                self.peer = Some(Peer {
                    id: from,
                    watch,
                    plan,
                    moments,
                    fault,
                    order,
                });
                self.show_progress();
                Ok(())
            }
            SideMessage::Summary(summary) => {
                self.summary = Some(summary);
                Ok(())
            }
            SideMessage::Failed(failure) => Err(failure),
            SideMessage::Finish { .. }
            | SideMessage::Ended { .. }
            | SideMessage::LayerRead { .. } => Err(Failure::new(
                FailureKind::BadInput,
                "prefill told what decode tells",
            )),
        }
    }

    fn on_handoff(&mut self, from: PeerId, message: FromPrefill) -> Result<(), Failure> {
        match message {
            FromPrefill::Hello(fields) => self.on_hello(from, &fields),
            FromPrefill::Submit(_) if self.peer.is_none() => Err(Failure::new(
                FailureKind::BadInput,
                "prefill submitted a request before it told its plan",
            )),
            FromPrefill::Submit(submission) => {
                self.on_submit(submission);
                Ok(())
            }
            FromPrefill::Aux { id, first_token } => {
                if let Some(first) = self
                    .flights
                    .get_mut(&id.epoch)
                    .and_then(|flight| flight.first_token.take())
                {
                    // A worker that has ended says so itself.
                    let _ = first.send(first_token);
                }
                Ok(())
            }
            FromPrefill::Abort { id, reason } => self.on_abort(id, reason),
            FromPrefill::AbortAck { id, rank } => {
                for drain in self.draining.iter().filter(|drain| drain.epoch == id.epoch) {
                    drain.flight.writer_answered(from, rank);
                }
                Ok(())
            }
        }
    }

    /// The peer gives a request up; it may not have heard of its Offer yet, and then names no epoch.
    fn on_abort(&mut self, id: FlightId, reason: String) -> Result<(), Failure> {
        if self
            .waiting
            .iter()
            .any(|waiting| waiting.request == id.request)
        {
            self.waiting.retain(|waiting| waiting.request != id.request);
            self.tell(&self.speaker.offer_refused(id, "withdrawn"))?;
        }
        let of_request =
            |flight: &&Flight| flight.id.request == id.request && flight.id.attempt == id.attempt;
        let epoch = self
            .flights
            .values()
            .find(of_request)
            .map(|flight| flight.id.epoch);
        if let Some(epoch) = epoch {
            self.end_by_abort(
                epoch,
                Cause::Aborted {
                    by: Which::Remote,
                    reason,
                },
            );
        }
        if !matches!(self.fates.get(&id.request), Some(Fate::Finished)) {
            self.set_fate(id.request, Fate::Cancelled);
        }
        Ok(())
    }

    fn on_submit(&mut self, submission: Submission) {
        let request = submission.request;
        self.fates.remove(&request);
        if self.submitted.insert(request)
            && let Some(peer) = &self.peer
        {
            let turn = peer.order.get(request as usize);
            let conversation = turn.map(|turn| Going {
                session: turn.session,
                tokens: peer
                    .plan
                    .conversations
                    .as_ref()
                    .map_or(0, schedule::most_tokens),
            });
            self.reference
                .submit(request, &peer.plan, conversation, &submission.prompt_ids);
            self.last_reference_at = Instant::now();
        }
        if request == 0 {
            self.first_prompt = Some(submission.prompt_ids.clone());
        }
        self.waiting.push_back(submission);
        let in_flight = self.waiting.len() + self.flights.len();
        self.peak_in_flight = self.peak_in_flight.max(in_flight as u32);
    }

    fn on_worker(&mut self, said: worker::Said) -> Result<(), Failure> {
        if matches!(said.what, What::Ended(_)) {
            self.held_by_workers.remove(&said.flight);
        }
        // A flight that the peer has aborted meanwhile is not in the list any more.
        let Some(id) = self.flights.get(&said.flight).map(|flight| flight.id) else {
            return match said.what {
                What::Ended(Err(failure)) => Err(failure),
                _ => Ok(()),
            };
        };
        match said.what {
            What::Landed => self.tell(&self.speaker.done(id)),
            What::Read(layer) => self.say(&SideMessage::LayerRead {
                request: id.request,
                layer: layer.0,
            }),
            What::Ended(Err(failure)) => Err(failure),
            What::Ended(Ok(Some(outcome))) => {
                let output_ids = outcome.output_ids.clone();
                self.comparison.got(id.request, outcome);
                self.side.note(|notes| {
                    notes.finished.insert(id.request);
                });
                // What has landed goes to the prefixes before the flight gives it up.
                self.side.prefixes.settle();
                if let Some(flight) = self.flights.remove(&id.epoch) {
                    self.drain(id.epoch, flight.slot_count, flight.close(), false);
                }
                self.set_fate(id.request, Fate::Finished);
                self.say(&SideMessage::Ended {
                    request: id.request,
                    output_ids,
                })?;
                self.show_progress();
                Ok(())
            }
            What::Ended(Ok(None)) => {
                let reason = "cancelled by decode";
                self.tell(&self.speaker.abort(id, reason))?;
                self.end_by_abort(
                    id.epoch,
                    Cause::Aborted {
                        by: Which::Local,
                        reason: reason.to_owned(),
                    },
                );
                self.set_fate(id.request, Fate::Cancelled);
                Ok(())
            }
        }
    }

    fn end_by_abort(&mut self, epoch: u64, cause: Cause) {
        if let Some(flight) = self.flights.remove(&epoch) {
            self.drain(epoch, flight.slot_count, flight.abort(cause), true);
        }
    }

    fn drain(&mut self, epoch: u64, slot_count: u64, flight: DrainingFlight, is_aborted: bool) {
        self.draining.push(Drain {
            epoch,
            slot_count,
            flight,
            is_aborted,
        });
    }

    /// The peer's schema must be ours; otherwise both sides end, and both name the field.
    pub(super) fn on_hello(
        &mut self,
        from: PeerId,
        fields: &[(String, String)],
    ) -> Result<(), Failure> {
        self.greeted = Some(from);
        let schema = &self.side.host.schema;
        let difference = schema.first_difference(fields);
        let answer = match &difference {
            None => self.speaker.hello(schema),
            Some(difference) => self.speaker.hello_refused(difference),
        };
        self.side
            .agent
            .send(from, plan::wrap(&answer))
            .map_err(|error| transfer_failure(&error))?;
        difference.map_or(Ok(()), |difference| Err(protocol::mismatch(&difference)))
    }

    fn set_fate(&mut self, request: u32, fate: Fate) {
        self.fates.insert(request, fate);
        if fate == Fate::Cancelled {
            self.reference.cancel(request);
            self.submitted.remove(&request);
        }
    }

    fn on_reference(&mut self, event: ReferenceEvent) -> Result<(), Failure> {
        self.last_reference_at = Instant::now();
        // Whoever waits for this side because of the reference sees that something moves.
        self.side.activity.pulse();
        match event {
            ReferenceEvent::Progress => Ok(()),
            ReferenceEvent::Done(request, outcome) => {
                self.comparison.expect(request, outcome);
                Ok(())
            }
            ReferenceEvent::Ended(Some(failure)) => Err(failure),
            ReferenceEvent::Ended(None) => {
                Err(Failure::new(FailureKind::PeerLost, "reference was lost"))
            }
        }
    }

    /// Pages go back against the proof that nobody writes to them; until then they are quarantined. While
    /// a worker still holds its lease there is no proof, so nothing is asked.
    fn poll_draining(&mut self) {
        let held = &self.held_by_workers;
        self.draining
            .retain_mut(|drain| held.contains(&drain.epoch) || !drain.flight.poll());
        let quarantined = self
            .draining
            .iter()
            .filter(|drain| drain.is_aborted)
            .map(|drain| drain.slot_count);
        self.most_quarantined = self.most_quarantined.max(quarantined.sum());
    }

    /// Sends a message of the hand-off protocol.
    pub(super) fn tell(&self, message: &[u8]) -> Result<(), Failure> {
        self.send(plan::wrap(message))
    }

    /// Sends a message about the run.
    fn say(&self, message: &SideMessage) -> Result<(), Failure> {
        self.send(plan::encode(message))
    }

    fn send(&self, bytes: bytes::Bytes) -> Result<(), Failure> {
        let Some(peer) = &self.peer else {
            return Err(Failure::internal("there is no peer to tell"));
        };
        self.side
            .agent
            .send(peer.id, bytes)
            .map_err(|error| transfer_failure(&error))
    }

    /// A wait fails when whoever is waited for shows no progress for the deadline.
    fn check_waits(&mut self) -> Result<(), Failure> {
        let Some(peer) = &self.peer else {
            if self.began_at.elapsed() <= self.side.deadline {
                return Ok(());
            }
            return Err(Failure::new(
                FailureKind::DeadlineExceeded,
                format!(
                    "no prefill side came within {} ms",
                    self.side.deadline.as_millis()
                ),
            ));
        };
        let computes = self
            .flights
            .values()
            .any(|flight| flight.first_token.is_none());
        let waits_for_reference = self.comparison.waiting_count() > 0;
        if waits_for_reference && self.last_reference_at.elapsed() > self.side.deadline {
            return Err(Failure::new(
                FailureKind::DeadlineExceeded,
                format!(
                    "reference showed no progress for {} ms",
                    self.side.deadline.as_millis()
                ),
            ));
        }
        let has_all = self.fates.len() == peer.plan.requests as usize && self.summary.is_some();
        if computes || (has_all && self.draining.is_empty()) {
            return Ok(());
        }
        peer.watch.check(self.last_event_at, "the run")
    }

    fn show_progress(&self) {
        let Some(peer) = &self.peer else {
            return;
        };
        let total = u64::from(peer.plan.requests) * u64::from(peer.plan.steps);
        let decoded_tokens = self
            .side
            .decoded_tokens
            .load(std::sync::atomic::Ordering::Relaxed);
        self.side.observer.progress(Progress {
            decoded_tokens,
            decoded_tokens_total: total,
            ..Progress::default()
        });
    }
}

/// The peer closes the connection when it has heard the verdict; whoever closes first may cut it off.
fn wait_for_goodbye(events: &Receiver<Inbox>, from: PeerId) {
    let until = Instant::now() + GOODBYE_LIMIT;
    while let Ok(event) = events.recv_timeout(until.saturating_duration_since(Instant::now())) {
        if matches!(event, Inbox::Agent(AgentEvent::PeerDown { peer, .. }) if peer == from) {
            return;
        }
    }
}
