//! The main thread of the prefill side: what is submitted when, and what the decode side answers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use kvgate_transfer::{AgentEvent, Deadline, PeerId};

use super::compute::Computed;
use super::flight::Flight;
use super::talk::Talk;
use super::{Finish, Side};
use crate::handoff::cancel::CancelMoment;
use crate::handoff::control::Progress;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::transfer_failure;
use crate::handoff::plan::{self, Message, SideMessage};
use crate::handoff::protocol::{self, FlightId, FromDecode, Offer, Submission};
use crate::handoff::timeline;

/// A short sleep in the event queue of the agent, so that the compute thread is heard soon.
const TICK: Duration = Duration::from_millis(5);

/// Where a request stands.
enum State {
    /// Submitted; the decode side has not answered.
    Submitted,
    /// Given up before the answer came.
    Withdrawn,
    /// Offered, being computed or sent, or sent.
    Sending(Arc<Flight>),
    /// Given up; the decode side waits to hear that nothing of it is under way.
    Draining(Arc<Flight>),
}

/// A run from the side that computes prompts.
pub(super) struct Session {
    side: Arc<Side>,
    work: Sender<Arc<Flight>>,
    /// The requests are turns of these.
    talk: Option<Talk>,
    /// Requests that are not over.
    open: BTreeMap<u32, State>,
    /// Requests that are over and whose pages are still read by operations.
    releasing: Vec<Arc<Flight>>,
    /// Offered flights that the compute thread has not been given.
    ready: VecDeque<Arc<Flight>>,
    next_request: u32,
    computed_tokens: u64,
    /// Of all requests that were submitted.
    prompt_tokens: u64,
    is_welcome: bool,
    has_summed_up: bool,
    /// Since when only moves between tiers are waited for.
    moves_since: Option<Instant>,
    last_event_at: Instant,
}

impl Session {
    pub(super) fn new(side: Arc<Side>, work: Sender<Arc<Flight>>, talk: Option<Talk>) -> Self {
        Self {
            side,
            work,
            talk,
            open: BTreeMap::new(),
            releasing: Vec::new(),
            ready: VecDeque::new(),
            next_request: 0,
            computed_tokens: 0,
            prompt_tokens: 0,
            is_welcome: false,
            has_summed_up: false,
            moves_since: None,
            last_event_at: Instant::now(),
        }
    }

    /// Runs until the decode side has reported. A failure of this side is told to it.
    pub(super) fn run(mut self, computed: &Receiver<Computed>) -> Result<Finish, Failure> {
        let ran = self.run_to_end(computed);
        if let Err(failure) = &ran {
            // A peer that is gone, or that failed first, needs no reason.
            let _ = self.say(&SideMessage::Failed(failure.clone()));
        }
        let report = self
            .side
            .agent
            .shutdown(Deadline::after(Duration::from_millis(500)));
        tracing::debug!(?report, "agent shut down");
        ran
    }

    fn run_to_end(&mut self, computed: &Receiver<Computed>) -> Result<Finish, Failure> {
        self.tell(&self.side.speaker.hello(&self.side.host.schema))?;
        self.say(&SideMessage::Plan(self.side.plan.clone()))?;
        loop {
            while let Some(event) = self.side.agent.next_event(Deadline::after(TICK)) {
                self.last_event_at = Instant::now();
                if let Some(finish) = self.on_agent(event)? {
                    return Ok(finish);
                }
            }
            for said in computed.try_iter() {
                self.on_computed(said)?;
            }
            self.release()?;
            self.submit_more()?;
            self.forward()?;
            self.sum_up()?;
            for state in self.open.values() {
                if let State::Sending(flight) = state {
                    flight.check_posts()?;
                }
            }
            if self.side.activity.is_busy() {
                // Whoever waits for this side has nothing to say meanwhile.
                self.last_event_at = Instant::now();
            } else {
                self.side.watch.check(self.last_event_at, "the run")?;
            }
        }
    }

    fn on_agent(&mut self, event: AgentEvent) -> Result<Option<Finish>, Failure> {
        match event {
            AgentEvent::Message { peer, bytes } if self.is_peer(peer) => match plan::parse(&bytes)?
            {
                Message::Side(message) => match *message {
                    SideMessage::Finish { code, text } => Ok(Some(Finish { code, text })),
                    SideMessage::Failed(failure) => Err(failure),
                    SideMessage::Ended {
                        request,
                        output_ids,
                    } => {
                        self.end(request, &output_ids);
                        Ok(None)
                    }
                    SideMessage::LayerRead { request, layer } => self
                        .side
                        .planter
                        .layer_was_read(request, layer)
                        .map(|()| None),
                    SideMessage::Plan(_) | SideMessage::Summary(_) => Err(Failure::new(
                        FailureKind::BadInput,
                        "decode told a plan or a summary",
                    )),
                },
                Message::Handoff(bytes) => {
                    let Side {
                        peer_incarnation,
                        host,
                        plan,
                        ..
                    } = &*self.side;
                    let message =
                        protocol::from_decode(&bytes, *peer_incarnation, &host.schema, plan.steps)?;
                    self.on_handoff(message).map(|()| None)
                }
            },
            AgentEvent::PeerDown { peer, cause, .. } if self.is_peer(peer) => Err(Failure::new(
                FailureKind::PeerLost,
                format!("decode was lost: {cause}"),
            )),
            _ => Ok(None),
        }
    }

    fn is_peer(&self, peer: PeerId) -> bool {
        self.side.watch.peer() == peer
    }

    fn on_handoff(&mut self, message: Option<FromDecode>) -> Result<(), Failure> {
        let Some(message) = message else {
            return Ok(());
        };
        match message {
            FromDecode::Hello => {
                self.is_welcome = true;
                Ok(())
            }
            FromDecode::HelloRefused(failure) => Err(failure),
            FromDecode::Offer(offer) => self.on_offer(offer),
            FromDecode::OfferRefused { id, reason } => {
                if matches!(self.open.get(&id.request), Some(State::Withdrawn)) {
                    self.open.remove(&id.request);
                    return Ok(());
                }
                Err(Failure::new(
                    FailureKind::BadInput,
                    format!("decode refused a request: {reason}"),
                ))
            }
            FromDecode::Done { id } => {
                if let Some(State::Sending(flight)) = self.open.get(&id.request)
                    && flight.offer.id == id
                {
                    self.releasing.push(Arc::clone(flight));
                }
                Ok(())
            }
            FromDecode::Abort { id, .. } => {
                self.give_up(id);
                Ok(())
            }
        }
    }

    /// The decode side is through with a request.
    fn end(&mut self, request: u32, output_ids: &[u32]) {
        if let Some(talk) = &mut self.talk {
            talk.answer(request, output_ids);
        }
        if let Some(State::Sending(flight)) = self.open.remove(&request) {
            self.releasing.push(flight);
        }
    }

    fn give_up(&mut self, id: FlightId) {
        match self.open.remove(&id.request) {
            Some(State::Sending(flight)) if flight.offer.id == id => {
                flight.abort();
                self.ready.retain(|ready| ready.offer.id != id);
                self.open.insert(id.request, State::Draining(flight));
            }
            Some(other) => {
                self.open.insert(id.request, other);
            }
            None => {}
        }
    }

    fn on_offer(&mut self, offer: Offer) -> Result<(), Failure> {
        let id = offer.id;
        let prompt_ids = self.prompt(id.request).unwrap_or_default();
        match self.open.remove(&id.request) {
            Some(State::Submitted) => {
                let flight = Flight::new(prompt_ids, offer);
                self.open
                    .insert(id.request, State::Sending(Arc::clone(&flight)));
                if self.side.planter.gives_up_at_once(id) {
                    self.tell(&self.side.speaker.abort(id, "a former attempt"))?;
                    self.give_up(id);
                    return Ok(());
                }
                self.side.planter.offered(&flight)?;
                self.ready.push_back(flight);
                Ok(())
            }
            // The Offer crossed the abort: nothing was ever posted against it.
            Some(State::Withdrawn) => self.tell(&self.side.speaker.abort_ack(id)),
            other => {
                if let Some(state) = other {
                    self.open.insert(id.request, state);
                }
                Err(Failure::new(
                    FailureKind::BadInput,
                    format!("decode offered request {} out of turn", id.request),
                ))
            }
        }
    }

    /// Gives the compute thread what it may begin, in the order of the offers.
    fn forward(&mut self) -> Result<(), Failure> {
        let is_open = |request: u32| self.open.contains_key(&request);
        let offered = |request: u32| {
            matches!(
                self.open.get(&request),
                Some(State::Sending(_) | State::Draining(_))
            )
        };
        let picked = self.side.planter.pick(&self.ready, &is_open, &offered);
        match picked.and_then(|index| self.ready.remove(index)) {
            Some(flight) => self
                .work
                .send(flight)
                .map_err(|_| Failure::internal("the compute thread has ended")),
            None => Ok(()),
        }
    }

    fn on_computed(&mut self, said: Computed) -> Result<(), Failure> {
        match said {
            Computed::Tokens(count) => {
                self.computed_tokens += count;
                self.show_progress();
                Ok(())
            }
            Computed::Abort(flight) => {
                let id = flight.offer.id;
                self.tell(&self.side.speaker.abort(id, "cancelled by prefill"))?;
                self.give_up(id);
                Ok(())
            }
            Computed::Failed(failure) => Err(failure),
        }
    }

    /// Gives pages back, and says of every flight that was given up that nothing of it is under way, as
    /// soon as it is true.
    fn release(&mut self) -> Result<(), Failure> {
        self.releasing.retain(|flight| !flight.release());
        let draining = self
            .open
            .values()
            .filter(|state| matches!(state, State::Draining(_)))
            .count();
        let is_alone = draining == self.open.len() && self.next_request == self.side.plan.requests;
        self.side.planter.before_release(is_alone);
        let is_quiet = |state: &State| matches!(state, State::Draining(flight) if !self.side.planter.keeps(flight) && flight.release());
        let quiet: Vec<u32> = self
            .open
            .iter()
            .filter(|(_, state)| is_quiet(state))
            .map(|(request, _)| *request)
            .collect();
        for request in quiet {
            if let Some(State::Draining(flight)) = self.open.remove(&request) {
                let id = flight.offer.id;
                self.tell(&self.side.speaker.abort_ack(id))?;
                if self.side.planter.tries_again(id) {
                    let prompt_ids = self.prompt(request).unwrap_or_default();
                    self.submit(request, id.attempt + 1, prompt_ids)?;
                    self.open.insert(request, State::Submitted);
                }
            }
        }
        Ok(())
    }

    /// Keeps C requests in flight.
    fn submit_more(&mut self) -> Result<(), Failure> {
        while self.is_welcome && self.may_submit() {
            let request = self.next_request;
            let Some(prompt_ids) = self.prompt(request) else {
                // The former turn of its conversation is not answered.
                return Ok(());
            };
            self.next_request += 1;
            self.prompt_tokens += prompt_ids.len() as u64;
            self.submit(request, 0, prompt_ids)?;
            let moment = self.side.moments.get(request as usize).copied().flatten();
            if moment == Some(CancelMoment::BeforeOffer) {
                let id = FlightId {
                    request,
                    attempt: 0,
                    epoch: 0,
                };
                self.tell(&self.side.speaker.abort(id, "cancelled before the offer"))?;
                self.open.insert(request, State::Withdrawn);
            } else {
                self.open.insert(request, State::Submitted);
            }
        }
        Ok(())
    }

    fn may_submit(&self) -> bool {
        let plan = &self.side.plan;
        let is_counted = |(request, state): &(&u32, &State)| {
            !(matches!(state, State::Draining(_)) && self.side.planter.is_replaced(**request))
        };
        let in_flight = self.open.iter().filter(is_counted).count();
        let is_open = |request: u32| self.open.contains_key(&request);
        self.next_request < plan.requests
            && in_flight < plan.concurrency as usize
            && self.side.planter.lets_others_in(&is_open)
    }

    fn submit(&self, request: u32, attempt: u32, prompt_ids: Vec<u32>) -> Result<(), Failure> {
        self.tell(&self.side.speaker.submit(Submission {
            request,
            attempt,
            prompt_ids,
            steps: self.side.plan.steps,
        }))
    }

    /// The prompt of a request; `None` while what it begins with has not been said.
    fn prompt(&self, request: u32) -> Option<Vec<u32>> {
        match &self.talk {
            Some(talk) => talk.prompt(request),
            None => {
                let tokens = self.side.plan.prompt_tokens;
                Some(self.side.source.prompt(request, tokens))
            }
        }
    }

    /// After the last request: what was measured.
    fn sum_up(&mut self) -> Result<(), Failure> {
        if self.has_summed_up
            || !self.open.is_empty()
            || !self.releasing.is_empty()
            || self.next_request < self.side.plan.requests
        {
            return Ok(());
        }
        if let Some(tiers) = &self.side.tiers
            && !tiers.is_quiet()
        {
            let since = *self.moves_since.get_or_insert_with(Instant::now);
            return tiers.check_moves(since, self.side.watch.deadline());
        }
        self.has_summed_up = true;
        let mut summary = std::mem::take(
            &mut *self
                .side
                .summary
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner),
        );
        summary.cpu_ms = timeline::process_cpu_ms();
        summary.pages_conserved = true;
        if let Some(tiers) = &self.side.tiers {
            // The peer waits for the end of this: a store that is slow is no sign of death.
            let _busy = self.side.activity.busy();
            summary.prompt_tokens = self.prompt_tokens;
            let work = tiers.finish(self.side.watch.deadline());
            // A worker that is still inside a store keeps its pages of the host tier until it returns.
            let has_left_all = work
                .storage
                .as_ref()
                .is_none_or(|storage| storage.is_drained);
            summary.pages_conserved = !has_left_all || tiers.is_conserved();
            summary.tiers = Some(work);
        }
        self.last_event_at = Instant::now();
        summary.pages_conserved &= self.side.pages_conserved();
        self.say(&SideMessage::Summary(summary))
    }

    fn show_progress(&self) {
        let plan = &self.side.plan;
        let total = u64::from(plan.requests) * u64::from(plan.prompt_tokens);
        let progress = Progress {
            prefill_tokens: self.computed_tokens,
            prefill_tokens_total: total,
            ..Progress::default()
        };
        self.side.observer.progress(progress);
    }

    fn tell(&self, message: &[u8]) -> Result<(), Failure> {
        self.send(plan::wrap(message))
    }

    fn say(&self, message: &SideMessage) -> Result<(), Failure> {
        self.send(plan::encode(message))
    }

    fn send(&self, bytes: bytes::Bytes) -> Result<(), Failure> {
        self.side
            .agent
            .send(self.side.watch.peer(), bytes)
            .map_err(|error| transfer_failure(&error))
    }
}
