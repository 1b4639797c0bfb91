//! [`PrefillMachine`]: the table of the module above as code.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kvgate_transfer::{Cause, Epoch, Incarnation, Side, WriterRank};

use super::{PrefillInput, PrefillOutput, PrefillSpec, PrefillState};
use crate::handoff::machine::{Counters, Foreign, MachineError, SlotOffer, Speaker};
use crate::handoff::wire::{Envelope, Identity, Message};

/// Whose end of a flight it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// Ours: the receiver must be told, and hear when all is quiet.
    Ours,
    /// The receiver's: it waits to hear when all is quiet.
    Theirs,
    /// The receiver is gone.
    Lost,
}

/// One flight at one writer. See the module.
#[derive(Debug)]
pub struct PrefillMachine {
    spec: PrefillSpec,
    speaker: Speaker,
    state: PrefillState,
    epoch: Option<Epoch>,
    is_submitted: bool,
    first_token: Option<u32>,
    /// Posts that may still begin.
    may_post: bool,
    /// Operations that began and are not terminal.
    outstanding_count: u64,
    is_done: bool,
    /// What the receiver is told once nothing is under way.
    owes_answer: bool,
    /// Given up without an Offer; one may be under way, and is to be answered.
    awaits_offer: bool,
    was_offered: bool,
    transfer_until: Option<Instant>,
    idle_until: Option<Instant>,
    drain_until: Option<Instant>,
    retry_at: Option<Instant>,
    outputs: VecDeque<PrefillOutput>,
    counters: Counters,
}

impl PrefillMachine {
    /// A machine for a request that may be offered slots from `now` on.
    pub fn new(now: Instant, spec: PrefillSpec) -> PrefillMachine {
        PrefillMachine {
            speaker: Speaker {
                incarnation: spec.incarnation,
                room: spec.room,
                attempt: spec.attempt,
            },
            state: PrefillState::Idle,
            epoch: None,
            is_submitted: false,
            first_token: None,
            may_post: false,
            outstanding_count: 0,
            is_done: false,
            owes_answer: false,
            awaits_offer: false,
            was_offered: false,
            transfer_until: None,
            idle_until: Some(now + spec.timeouts.idle),
            drain_until: None,
            retry_at: None,
            outputs: VecDeque::new(),
            counters: Counters::default(),
            spec,
        }
    }

    /// Where the flight stands.
    pub fn state(&self) -> PrefillState {
        self.state
    }

    /// The flight, once it is known.
    pub fn epoch(&self) -> Option<Epoch> {
        self.epoch
    }

    /// Operations that began and are not terminal.
    pub fn outstanding_count(&self) -> u64 {
        self.outstanding_count
    }

    /// What had no effect so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<PrefillOutput> {
        self.outputs.pop_front()
    }

    /// When [`PrefillMachine::handle_timeout`] is to be called, if nothing happens before.
    pub fn poll_deadline(&self) -> Option<Instant> {
        let ends = match self.state {
            PrefillState::Idle => [self.idle_until, None, None],
            PrefillState::Held | PrefillState::Sending => {
                [self.transfer_until, self.idle_until, None]
            }
            PrefillState::Sent => [self.transfer_until, self.idle_until, self.retry_at],
            PrefillState::Aborting => [self.drain_until, None, None],
            PrefillState::Closed => [None; 3],
        };
        ends.into_iter().flatten().min()
    }

    /// Takes an event.
    ///
    /// # Errors
    /// [`MachineError`], counted; the event has no effect beyond what the error says.
    pub fn handle(&mut self, now: Instant, input: PrefillInput) -> Result<(), MachineError> {
        use PrefillState as S;
        let event = input.name();
        match (self.state, input) {
            (
                S::Idle,
                PrefillInput::Submit {
                    total_tokens,
                    steps,
                    prompt,
                },
            ) if !self.is_submitted => {
                self.is_submitted = true;
                let message = Message::Submit {
                    total_tokens,
                    steps,
                    prompt,
                };
                self.tell(Epoch(0), message);
                Ok(())
            }
            (_, PrefillInput::Message { from, envelope }) => self.message(now, from, envelope),
            (_, PrefillInput::Posted) => self.posted(now),
            (_, PrefillInput::Completed(result)) => self.completed(now, result),
            (S::Held | S::Sending, PrefillInput::AllPosted { first_token }) if self.may_post => {
                self.all_posted(now, first_token)
            }
            (S::Aborting, PrefillInput::AllPosted { .. } | PrefillInput::PostingStopped) => {
                self.may_post = false;
                self.try_close();
                Ok(())
            }
            (_, PrefillInput::Progress) => {
                self.sign_of_life(now);
                Ok(())
            }
            (S::Aborting | S::Closed, PrefillInput::LocalAbort(_)) => {
                self.counters.late += 1;
                Ok(())
            }
            (_, PrefillInput::LocalAbort(cause)) => {
                self.give_up(now, cause, Ending::Ours);
                Ok(())
            }
            (_, PrefillInput::PeerDown { incarnation, cause }) => {
                self.peer_down(now, incarnation, cause)
            }
            _ => Err(self.counters.out_of_table(self.state.name(), event)),
        }
    }

    /// Ends a wait that is over, or says again what was not answered.
    pub fn handle_timeout(&mut self, now: Instant) {
        let is_over = |until: Option<Instant>| until.is_some_and(|until| until <= now);
        match self.state {
            PrefillState::Aborting if is_over(self.drain_until) => {
                self.drain_until = None;
                self.overdue();
            }
            PrefillState::Aborting | PrefillState::Closed => {}
            _ if is_over(self.transfer_until) => self.exceeded(now, self.spec.timeouts.transfer),
            _ if is_over(self.idle_until) => self.exceeded(now, self.spec.timeouts.idle),
            PrefillState::Sent if is_over(self.retry_at) => {
                self.retry_at = self.retry_after(now);
                self.tell_first_token();
            }
            _ => {}
        }
    }

    fn tell(&mut self, epoch: Epoch, message: Message) {
        let bytes = self.speaker.say(epoch, message);
        self.outputs.push_back(PrefillOutput::Send {
            to: self.spec.receiver,
            bytes,
        });
    }

    fn answer_abort(&mut self, epoch: Epoch) {
        let writer = self.spec.rank;
        self.tell(epoch, Message::AbortAck { writer });
    }

    fn retry_after(&self, now: Instant) -> Option<Instant> {
        self.spec.timeouts.retry.map(|retry| now + retry)
    }

    fn sign_of_life(&mut self, now: Instant) {
        self.idle_until = Some(now + self.spec.timeouts.idle);
    }

    fn message(
        &mut self,
        now: Instant,
        from: Incarnation,
        envelope: Envelope,
    ) -> Result<(), MachineError> {
        let Envelope { identity, message } = envelope;
        let name = message.name();
        if identity.incarnation != from {
            return Err(self.counters.foreign(Foreign::Incarnation, name));
        }
        if let Some(what) = self.speaker.foreign_request(&identity) {
            return Err(self.counters.foreign(what, name));
        }
        if identity.epoch == Epoch(0) && !matches!(message, Message::OfferRefused { .. }) {
            return Err(self.counters.foreign(Foreign::Epoch, name));
        }
        let is_ours = from == self.spec.receiver;
        let is_known = |epoch: Epoch| epoch == identity.epoch;
        if matches!(message, Message::Offer { .. }) {
            return match self.epoch {
                None if is_ours => self.offer(now, identity, message),
                Some(epoch) if is_ours && is_known(epoch) => self.offer_again(),
                _ => self.second_offer(from, identity),
            };
        }
        if !is_ours {
            return Err(self.counters.foreign(Foreign::Incarnation, name));
        }
        match (message, self.epoch) {
            (Message::OfferRefused { reason }, None) => self.offer_refused(now, reason),
            (Message::OfferRefused { .. }, Some(_)) => {
                Err(self.counters.out_of_table(self.state.name(), name))
            }
            (_, Some(epoch)) if !is_known(epoch) => {
                Err(self.counters.foreign(Foreign::Epoch, name))
            }
            (Message::Abort { cause }, _) => {
                self.abort_of_receiver(now, identity.epoch, cause);
                Ok(())
            }
            (Message::Done, Some(_)) => self.done(now),
            _ => Err(self.counters.out_of_table(self.state.name(), name)),
        }
    }

    fn offer(
        &mut self,
        now: Instant,
        identity: Identity,
        message: Message,
    ) -> Result<(), MachineError> {
        let Message::Offer {
            prompt_tokens,
            segment_ends,
            pages,
            windows,
            request,
        } = message
        else {
            return Err(self
                .counters
                .out_of_table(self.state.name(), message.name()));
        };
        self.epoch = Some(identity.epoch);
        if self.state != PrefillState::Idle {
            // It crossed our abort; nothing was or will be posted against it.
            self.counters.late += 1;
            self.answer_late_offer();
            return Ok(());
        }
        let ours = self.spec.prompt_tokens;
        if prompt_tokens != ours {
            let reason = format!("an offer for {prompt_tokens} tokens, the prompt has {ours}");
            self.give_up(now, Cause::Refused { reason }, Ending::Ours);
            return Err(self
                .counters
                .contradiction("prompt_tokens", ours, prompt_tokens));
        }
        self.state = PrefillState::Held;
        self.may_post = true;
        self.was_offered = true;
        self.transfer_until = Some(now + self.spec.timeouts.transfer);
        self.sign_of_life(now);
        let offer = SlotOffer {
            prompt_tokens,
            segment_ends,
            pages,
            windows,
            request,
        };
        let epoch = identity.epoch;
        self.outputs
            .push_back(PrefillOutput::MayPost { epoch, offer });
        Ok(())
    }

    /// The Offer that is held, or was given up, came once more.
    fn offer_again(&mut self) -> Result<(), MachineError> {
        if self.state == PrefillState::Closed {
            self.counters.late += 1;
            self.answer_again();
        } else {
            self.counters.duplicate += 1;
        }
        Ok(())
    }

    /// Somebody offers other slots for the request: an error to the second.
    fn second_offer(&mut self, to: Incarnation, identity: Identity) -> Result<(), MachineError> {
        self.counters.second_offer += 1;
        let epoch = identity.epoch;
        let cause = "the room has a flight".to_owned();
        let writer = self.spec.rank;
        for message in [Message::Abort { cause }, Message::AbortAck { writer }] {
            let bytes = self.speaker.say(epoch, message);
            self.outputs.push_back(PrefillOutput::Send { to, bytes });
        }
        Err(MachineError::SecondOffer { epoch })
    }

    fn offer_refused(&mut self, now: Instant, reason: String) -> Result<(), MachineError> {
        match self.state {
            PrefillState::Idle => {
                self.give_up(now, Cause::Refused { reason }, Ending::Lost);
                Ok(())
            }
            PrefillState::Aborting => {
                self.awaits_offer = false;
                self.try_close();
                Ok(())
            }
            state => Err(self.counters.out_of_table(state.name(), "offer-refused")),
        }
    }

    fn posted(&mut self, now: Instant) -> Result<(), MachineError> {
        let is_allowed = self.may_post
            && matches!(
                self.state,
                PrefillState::Held | PrefillState::Sending | PrefillState::Aborting
            );
        // Allowed or not, it is under way, and is waited for.
        self.outstanding_count += 1;
        if !is_allowed {
            return Err(self.counters.out_of_table(self.state.name(), "posted"));
        }
        if self.state == PrefillState::Held {
            self.state = PrefillState::Sending;
        }
        self.sign_of_life(now);
        Ok(())
    }

    fn completed(&mut self, now: Instant, result: Result<(), Cause>) -> Result<(), MachineError> {
        let Some(left) = self.outstanding_count.checked_sub(1) else {
            return Err(self.counters.out_of_table(self.state.name(), "completed"));
        };
        self.outstanding_count = left;
        self.sign_of_life(now);
        match (self.state, result) {
            (PrefillState::Aborting, _) => self.try_close(),
            (PrefillState::Closed, _) => {}
            (_, Err(cause)) => self.give_up(now, cause, Ending::Ours),
            (_, Ok(())) => self.try_sent(now),
        }
        Ok(())
    }

    fn all_posted(&mut self, now: Instant, first_token: Option<u32>) -> Result<(), MachineError> {
        if first_token.is_some() != self.spec.is_designated {
            self.counters.writer += 1;
            return Err(MachineError::Writer {
                message: "first token",
                writer: self.spec.rank,
            });
        }
        self.state = PrefillState::Sending;
        self.may_post = false;
        self.first_token = first_token;
        self.sign_of_life(now);
        self.tell_first_token();
        self.try_sent(now);
        Ok(())
    }

    fn tell_first_token(&mut self) {
        if let (Some(epoch), Some(first_token)) = (self.epoch, self.first_token) {
            let prompt_tokens = self.spec.prompt_tokens;
            let aux = Message::Aux {
                prompt_tokens,
                first_token,
            };
            self.tell(epoch, aux);
        }
    }

    /// Sent once everything was posted and is terminal; closed if the receiver has it, too.
    fn try_sent(&mut self, now: Instant) {
        let is_sent = !self.may_post && self.outstanding_count == 0;
        match self.state {
            PrefillState::Sending if is_sent => {
                self.state = PrefillState::Sent;
                self.retry_at = self.retry_after(now);
            }
            PrefillState::Sent if is_sent => {}
            _ => return,
        }
        if self.is_done {
            self.close();
        }
    }

    fn done(&mut self, now: Instant) -> Result<(), MachineError> {
        match self.state {
            PrefillState::Sending | PrefillState::Sent => {
                if self.is_done {
                    self.counters.duplicate += 1;
                }
                self.is_done = true;
                self.sign_of_life(now);
                self.try_sent(now);
                Ok(())
            }
            // It crossed our abort: what was asked for is there all the same.
            PrefillState::Aborting | PrefillState::Closed => {
                self.counters.late += 1;
                Ok(())
            }
            state => Err(self.counters.out_of_table(state.name(), "done")),
        }
    }

    fn abort_of_receiver(&mut self, now: Instant, epoch: Epoch, reason: String) {
        self.epoch = Some(epoch);
        match self.state {
            PrefillState::Closed => {
                self.counters.duplicate += 1;
                self.answer_again();
            }
            PrefillState::Aborting => {
                self.counters.duplicate += 1;
                (self.owes_answer, self.awaits_offer) = (true, false);
                self.try_close();
            }
            _ => {
                let by = Side::Remote;
                self.give_up(now, Cause::Aborted { by, reason }, Ending::Theirs);
            }
        }
    }

    /// A word that was lost is said again: nothing is under way.
    fn answer_again(&mut self) {
        if let (Some(epoch), 0) = (self.epoch, self.outstanding_count) {
            self.answer_abort(epoch);
        }
    }

    fn peer_down(
        &mut self,
        now: Instant,
        incarnation: Incarnation,
        cause: Cause,
    ) -> Result<(), MachineError> {
        if incarnation != self.spec.receiver {
            return Err(self.counters.foreign(Foreign::Incarnation, "peer-down"));
        }
        match self.state {
            PrefillState::Closed => {}
            PrefillState::Aborting => {
                (self.owes_answer, self.awaits_offer) = (false, false);
                self.try_close();
            }
            _ => self.give_up(now, cause, Ending::Lost),
        }
        Ok(())
    }

    fn exceeded(&mut self, now: Instant, limit: Duration) {
        self.counters.deadline_exceeded += 1;
        let what = match self.state {
            PrefillState::Idle => "offer",
            PrefillState::Sent => "done",
            _ => "sending",
        };
        let cause = Cause::DeadlineExceeded {
            what: format!("{what} of room {}", self.spec.room),
            deadline_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        };
        self.give_up(now, cause, Ending::Ours);
    }

    /// From any state in which the flight is not over.
    fn give_up(&mut self, now: Instant, cause: Cause, ending: Ending) {
        self.state = PrefillState::Aborting;
        self.drain_until = Some(now + self.spec.timeouts.drain);
        self.owes_answer = ending != Ending::Lost;
        self.awaits_offer = ending == Ending::Ours && self.epoch.is_none();
        if ending == Ending::Ours {
            let abort = Message::Abort {
                cause: cause.to_string(),
            };
            self.tell(self.epoch.unwrap_or(Epoch(0)), abort);
        }
        if self.may_post {
            self.outputs.push_back(PrefillOutput::StopPosting);
        }
        self.outputs.push_back(PrefillOutput::Failed(cause));
        self.try_close();
    }

    /// Closed once nothing is under way; the receiver is told then, and not before.
    fn try_close(&mut self) {
        let is_quiet = !self.may_post && self.outstanding_count == 0;
        if self.state == PrefillState::Aborting && is_quiet && !self.awaits_offer {
            if let (Some(epoch), true) = (self.epoch, self.owes_answer) {
                self.answer_abort(epoch);
            }
            self.close();
        }
    }

    /// An Offer that came after the end: nothing was or will be posted against it.
    fn answer_late_offer(&mut self) {
        self.awaits_offer = false;
        match self.state {
            PrefillState::Closed => self.answer_again(),
            _ => self.try_close(),
        }
    }

    fn close(&mut self) {
        self.state = PrefillState::Closed;
        if self.was_offered {
            self.outputs.push_back(PrefillOutput::Release);
        }
    }

    /// The wait after an abort is over: what is under way stays under way, and is reported.
    fn overdue(&mut self) {
        // No Offer came. One that comes late is answered.
        self.awaits_offer = false;
        self.try_close();
        if self.state == PrefillState::Closed {
            return;
        }
        self.counters.unheard += 1;
        let operation_count = self.outstanding_count;
        self.outputs
            .push_back(PrefillOutput::Overdue { operation_count });
    }
}

/// The answer of a writer that has no machine for a flight: nothing of it is under way in this process.
///
/// Right only where machines are forgotten after they have closed, and never before.
pub fn answer_unknown(
    incarnation: Incarnation,
    rank: WriterRank,
    envelope: &Envelope,
) -> Option<Vec<u8>> {
    let is_asked = matches!(
        envelope.message,
        Message::Offer { .. } | Message::Abort { .. }
    );
    let Identity {
        room,
        attempt,
        epoch,
        ..
    } = envelope.identity;
    let speaker = Speaker {
        incarnation,
        room,
        attempt,
    };
    let answer = Message::AbortAck { writer: rank };
    (is_asked && epoch != Epoch(0)).then(|| speaker.say(epoch, answer))
}
