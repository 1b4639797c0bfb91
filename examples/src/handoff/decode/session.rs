//! The main thread of the decode side: messages of the peer, ends of workers, answers of the reference.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use kvgate_kvcache::DrainingFlight;
use kvgate_transfer::{AgentEvent, Cause, PeerId, Side as Which, WriterRank};

use super::flight::Flight;
use super::{Conclude, Inbox, Side, verdict, worker};
use crate::handoff::cancel::{self, CancelMoment};
use crate::handoff::compare::Comparison;
use crate::handoff::console;
use crate::handoff::control::Progress;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::{PeerWatch, transfer_failure};
use crate::handoff::observer::Phase;
use crate::handoff::options::OutputOptions;
use crate::handoff::plan::{self, Message, PrefillSummary, RunPlan, SideMessage};
use crate::handoff::protocol::{self, FromDecode, FromPrefill, Hello, Submission};
use crate::handoff::reference::{ReferenceEvent, ReferenceLink};

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
    pub(super) peer: Option<Peer>,
    pub(super) waiting: VecDeque<Submission>,
    pub(super) flights: BTreeMap<u64, Flight>,
    pub(super) draining: Vec<Drain>,
    pub(super) fates: BTreeMap<u32, Fate>,
    pub(super) comparison: Comparison,
    pub(super) first_prompt: Option<Vec<u32>>,
    pub(super) peak_in_flight: u32,
    pub(super) most_quarantined: u64,
    pub(super) summary: Option<PrefillSummary>,
    pub(super) refused_connections: u64,
    pub(super) clock_shift_us: i64,
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
        Self {
            side,
            output,
            reference,
            inbox,
            peer: None,
            waiting: VecDeque::new(),
            flights: BTreeMap::new(),
            draining: Vec::new(),
            fates: BTreeMap::new(),
            comparison: Comparison::default(),
            first_prompt: None,
            peak_in_flight: 0,
            most_quarantined: 0,
            summary: None,
            refused_connections: 0,
            clock_shift_us: 0,
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
        if let Some(peer) = &self.peer {
            // A peer that is gone needs no verdict.
            let told = self.side.agent.send(peer.id, plan::encode(&message));
            if told.is_ok() {
                wait_for_goodbye(events, peer.id);
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
            AgentEvent::Message { peer, bytes } => match plan::parse(&bytes)? {
                Message::Side(message) => self.on_side_message(peer, *message),
                Message::Handoff(bytes) => self.on_handoff(peer, protocol::parse(&bytes)?),
            },
            AgentEvent::PeerDown { peer, cause, .. } if self.is_peer(peer) => Err(Failure::new(
                FailureKind::PeerLost,
                format!("prefill was lost: {cause}"),
            )),
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
                self.peer = Some(Peer {
                    id: from,
                    watch,
                    plan,
                    moments,
                });
                self.show_progress();
                Ok(())
            }
            SideMessage::Summary(summary) => {
                self.summary = Some(summary);
                Ok(())
            }
            SideMessage::Failed(failure) => Err(failure),
            SideMessage::Finish { .. } => Err(Failure::new(
                FailureKind::BadInput,
                "prefill told a verdict",
            )),
        }
    }

    fn on_handoff(&mut self, from: PeerId, message: FromPrefill) -> Result<(), Failure> {
        match message {
            FromPrefill::Hello(hello) => self.on_hello(from, &hello),
            FromPrefill::Submit(submission) => {
                self.on_submit(submission);
                Ok(())
            }
            FromPrefill::Aux { epoch, first_token } => {
                if let Some(first) = self
                    .flights
                    .get_mut(&epoch)
                    .and_then(|flight| flight.first_token.take())
                {
                    // A worker that has ended says so itself.
                    let _ = first.send(first_token);
                }
                Ok(())
            }
            FromPrefill::Abort {
                request,
                epoch,
                reason,
            } => {
                if self
                    .waiting
                    .iter()
                    .any(|waiting| waiting.request == request)
                {
                    self.waiting.retain(|waiting| waiting.request != request);
                    self.tell(&FromDecode::OfferRefused {
                        request,
                        reason: "withdrawn".to_owned(),
                    })?;
                }
                if let Some(epoch) = epoch.or_else(|| self.epoch_of(request)) {
                    self.end_by_abort(
                        epoch,
                        Cause::Aborted {
                            by: Which::Remote,
                            reason,
                        },
                    );
                }
                self.set_fate(request, Fate::Cancelled);
                Ok(())
            }
            FromPrefill::AbortAck { epoch, rank } => {
                for drain in self.draining.iter().filter(|drain| drain.epoch == epoch) {
                    drain.flight.writer_quiet(WriterRank(rank));
                }
                Ok(())
            }
        }
    }

    fn epoch_of(&self, request: u32) -> Option<u64> {
        self.flights
            .values()
            .find(|flight| flight.request == request)
            .map(|flight| flight.epoch)
    }

    fn on_submit(&mut self, submission: Submission) {
        let request = submission.request;
        self.fates.remove(&request);
        if self.submitted.insert(request)
            && let Some(peer) = &self.peer
        {
            self.reference
                .submit(request, peer.plan.steps, &submission.prompt_ids);
            self.last_reference_at = Instant::now();
        }
        if request == 0 {
            self.first_prompt = Some(submission.prompt_ids.clone());
        }
        self.waiting.push_back(submission);
        let in_flight = self.waiting.len() + self.flights.len();
        self.peak_in_flight = self.peak_in_flight.max(in_flight as u32);
    }

    fn on_worker(&mut self, ended: worker::Ended) -> Result<(), Failure> {
        let outcome = ended.result?;
        // A flight that the peer has aborted meanwhile is not in the list any more.
        let Some(flight) = self.flights.get(&ended.flight) else {
            return Ok(());
        };
        let (request, epoch) = (flight.request, flight.epoch);
        match outcome {
            Some(outcome) => {
                self.comparison.got(request, outcome);
                self.side.note(|notes| drop(notes.finished.insert(request)));
                self.tell(&FromDecode::Done { request })?;
                if let Some(flight) = self.flights.remove(&epoch) {
                    self.drain(epoch, flight.slot_count, flight.close(), false);
                }
                self.set_fate(request, Fate::Finished);
            }
            None => {
                let reason = "cancelled by decode".to_owned();
                self.tell(&FromDecode::Abort {
                    request,
                    reason: reason.clone(),
                })?;
                self.end_by_abort(
                    epoch,
                    Cause::Aborted {
                        by: Which::Local,
                        reason,
                    },
                );
                self.set_fate(request, Fate::Cancelled);
            }
        }
        self.show_progress();
        Ok(())
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
    fn on_hello(&mut self, from: PeerId, hello: &Hello) -> Result<(), Failure> {
        let answer = match hello.check(&self.side.host.schema) {
            Ok(()) => FromDecode::Hello(Hello::of(&self.side.host.schema)),
            Err(failure) => FromDecode::HelloRefused(failure.clone()),
        };
        let bytes = plan::wrap(&protocol::encode(&answer));
        self.side
            .agent
            .send(from, bytes)
            .map_err(|error| transfer_failure(&error))?;
        match answer {
            FromDecode::HelloRefused(failure) => Err(failure),
            _ => Ok(()),
        }
    }

    fn set_fate(&mut self, request: u32, fate: Fate) {
        self.fates.insert(request, fate);
        if fate == Fate::Cancelled {
            self.reference.cancel(request);
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

    /// Pages go back against the proof that nobody writes to them; until then they are quarantined.
    fn poll_draining(&mut self) {
        self.draining.retain_mut(|drain| !drain.flight.poll());
        let quarantined = self
            .draining
            .iter()
            .filter(|drain| drain.is_aborted)
            .map(|drain| drain.slot_count);
        self.most_quarantined = self.most_quarantined.max(quarantined.sum());
    }

    pub(super) fn tell(&self, message: &FromDecode) -> Result<(), Failure> {
        let Some(peer) = &self.peer else {
            return Err(Failure::internal("there is no peer to tell"));
        };
        let bytes = plan::wrap(&protocol::encode(message));
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
