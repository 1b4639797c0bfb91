//! [`DecodeMachine`]: the table of the module above as code.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kvgate_transfer::{Cause, Epoch, Incarnation, Side, WriterRank};

use super::{DecodeInput, DecodeOutput, DecodeSpec, DecodeState, Writer};
use crate::handoff::machine::{Counters, Foreign, MachineError, Speaker};
use crate::handoff::wire::{Envelope, Message};

/// What is known of a writer.
#[derive(Clone, Copy, Debug)]
struct Known {
    writer: Writer,
    /// It has shown that it got the Offer.
    was_heard: bool,
    /// Its operations are terminal.
    is_quiet: bool,
    /// Its connection has ended without a proof: it will not answer.
    is_gone: bool,
}

/// One flight on the receiving side. See the module.
#[derive(Debug)]
pub struct DecodeMachine {
    spec: DecodeSpec,
    speaker: Speaker,
    state: DecodeState,
    writers: Vec<Known>,
    first_token: Option<u32>,
    has_landed: bool,
    was_quarantined: bool,
    transfer_until: Option<Instant>,
    idle_until: Option<Instant>,
    drain_until: Option<Instant>,
    retry_at: Option<Instant>,
    outputs: VecDeque<DecodeOutput>,
    counters: Counters,
}

impl DecodeMachine {
    /// A machine for reserved slots. It does nothing before [`DecodeInput::Start`].
    ///
    /// # Errors
    /// `Spec`: no writer, a rank twice, or a designated writer that is none of them.
    pub fn new(spec: DecodeSpec) -> Result<DecodeMachine, MachineError> {
        let refuse = |reason| Err(MachineError::Spec { reason });
        if spec.writers.is_empty() {
            return refuse("a flight needs a writer");
        }
        let mut ranks: Vec<WriterRank> = spec.writers.iter().map(|writer| writer.rank).collect();
        ranks.sort_unstable();
        if ranks.windows(2).any(|pair| pair[0] == pair[1]) {
            return refuse("two writers of one rank");
        }
        if !ranks.contains(&spec.designated) {
            return refuse("the designated writer is none of the writers");
        }
        let known = |writer: &Writer| Known {
            writer: *writer,
            was_heard: false,
            is_quiet: false,
            is_gone: false,
        };
        Ok(DecodeMachine {
            speaker: Speaker {
                incarnation: spec.incarnation,
                room: spec.room,
                attempt: spec.attempt,
            },
            state: DecodeState::Reserved,
            writers: spec.writers.iter().map(known).collect(),
            first_token: None,
            has_landed: false,
            was_quarantined: false,
            transfer_until: None,
            idle_until: None,
            drain_until: None,
            retry_at: None,
            outputs: VecDeque::new(),
            counters: Counters::default(),
            spec,
        })
    }

    /// Where the flight stands.
    pub fn state(&self) -> DecodeState {
        self.state
    }

    /// What had no effect so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Whether nothing more is to be expected: closed, or quarantined for want of a proof.
    pub fn is_settled(&self) -> bool {
        self.state == DecodeState::Closed || self.was_quarantined
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<DecodeOutput> {
        self.outputs.pop_front()
    }

    /// When [`DecodeMachine::handle_timeout`] is to be called, if nothing happens before.
    pub fn poll_deadline(&self) -> Option<Instant> {
        let ends = match self.state {
            DecodeState::Reserved | DecodeState::Offered | DecodeState::Receiving => {
                [self.transfer_until, self.idle_until, self.retry_at]
            }
            DecodeState::Aborting if !self.was_quarantined => {
                [self.drain_until, self.retry_at, None]
            }
            _ => [None; 3],
        };
        ends.into_iter().flatten().min()
    }

    /// Takes an event.
    ///
    /// # Errors
    /// [`MachineError`], counted; the event has no effect beyond what the error says.
    pub fn handle(&mut self, now: Instant, input: DecodeInput) -> Result<(), MachineError> {
        use DecodeState as S;
        let event = input.name();
        match (self.state, input) {
            (S::Reserved, DecodeInput::Start) if self.idle_until.is_none() => {
                self.idle_until = Some(now + self.spec.timeouts.idle);
                self.outputs.push_back(DecodeOutput::Arm);
                Ok(())
            }
            (S::Reserved, DecodeInput::Armed) if self.idle_until.is_some() => {
                self.offer(now);
                Ok(())
            }
            (_, DecodeInput::Message { from, envelope }) => self.message(now, from, envelope),
            (S::Offered | S::Receiving, DecodeInput::Arrived(rank)) => self.arrived(now, rank),
            (S::Offered | S::Receiving, DecodeInput::Landed) if !self.has_landed => {
                self.has_landed = true;
                self.state = S::Receiving;
                self.writers
                    .iter_mut()
                    .for_each(|known| known.was_heard = true);
                self.sign_of_life(now);
                self.try_land();
                Ok(())
            }
            (S::Landed, DecodeInput::Activated) => {
                self.state = S::Active;
                Ok(())
            }
            (S::Landed | S::Active, DecodeInput::Finished) => {
                self.state = S::Closed;
                self.outputs.push_back(DecodeOutput::Close);
                Ok(())
            }
            (S::Aborting | S::Draining | S::Closed, DecodeInput::LocalAbort(_)) => {
                self.counters.late += 1;
                Ok(())
            }
            (_, DecodeInput::LocalAbort(cause)) => {
                self.give_up(now, cause);
                Ok(())
            }
            (
                _,
                DecodeInput::PeerDown {
                    incarnation,
                    cause,
                    is_proven,
                },
            ) => self.peer_down(now, incarnation, cause, is_proven),
            // The engine may have its proof before every writer has answered.
            (S::Aborting | S::Draining | S::Closed, DecodeInput::Quiesced) => {
                self.state = S::Closed;
                Ok(())
            }
            // Reports that were under way when the state changed.
            (S::Landed | S::Active, DecodeInput::Arrived(_)) => {
                self.counters.late += 1;
                Ok(())
            }
            (
                S::Aborting | S::Draining | S::Closed,
                DecodeInput::Arrived(_) | DecodeInput::Landed,
            ) => {
                self.counters.late += 1;
                Ok(())
            }
            _ => Err(self.counters.out_of_table(self.state.name(), event)),
        }
    }

    /// Ends a wait that is over, or says again what was not answered.
    pub fn handle_timeout(&mut self, now: Instant) {
        let is_over = |until: Option<Instant>| until.is_some_and(|until| until <= now);
        match self.state {
            DecodeState::Reserved | DecodeState::Offered | DecodeState::Receiving => {
                if is_over(self.transfer_until) {
                    self.exceeded(now, self.spec.timeouts.transfer);
                } else if is_over(self.idle_until) {
                    self.exceeded(now, self.spec.timeouts.idle);
                } else if is_over(self.retry_at) {
                    self.retry_at = self.retry_after(now);
                    let offer = self.spec.offer.message();
                    self.tell(|known| !known.was_heard && !known.is_gone, &offer);
                }
            }
            DecodeState::Aborting if !self.was_quarantined => {
                if is_over(self.drain_until) {
                    self.quarantine();
                } else if is_over(self.retry_at) {
                    self.retry_at = self.retry_after(now);
                    let abort = abort_message("the former abort was not answered");
                    self.tell(|known| !known.is_quiet && !known.is_gone, &abort);
                }
            }
            _ => {}
        }
    }

    fn offer(&mut self, now: Instant) {
        self.state = DecodeState::Offered;
        self.transfer_until = Some(now + self.spec.timeouts.transfer);
        self.idle_until = Some(now + self.spec.timeouts.idle);
        self.retry_at = self.retry_after(now);
        let offer = self.spec.offer.message();
        self.tell(|_| true, &offer);
    }

    fn retry_after(&self, now: Instant) -> Option<Instant> {
        self.spec.timeouts.retry.map(|retry| now + retry)
    }

    fn sign_of_life(&mut self, now: Instant) {
        self.idle_until = Some(now + self.spec.timeouts.idle);
    }

    /// Sends a message to the writers that `picks`.
    fn tell(&mut self, picks: impl Fn(&Known) -> bool, message: &Message) {
        let epoch = match message {
            Message::OfferRefused { .. } => Epoch(0),
            _ => self.spec.epoch,
        };
        let bytes = self.speaker.say(epoch, message.clone());
        let picked = self.writers.iter().filter(|known| picks(known));
        let sends = picked.map(|known| DecodeOutput::Send {
            to: known.writer.incarnation,
            bytes: bytes.clone(),
        });
        self.outputs.extend(sends);
    }

    fn arrived(&mut self, now: Instant, rank: WriterRank) -> Result<(), MachineError> {
        let Some(known) = self
            .writers
            .iter_mut()
            .find(|known| known.writer.rank == rank)
        else {
            self.counters.writer += 1;
            return Err(MachineError::Writer {
                message: "arrival",
                writer: rank,
            });
        };
        known.was_heard = true;
        self.state = DecodeState::Receiving;
        self.sign_of_life(now);
        Ok(())
    }

    /// Landed once both the layers and the first token are there.
    fn try_land(&mut self) {
        if let (true, Some(first_token)) = (self.has_landed, self.first_token) {
            self.state = DecodeState::Landed;
            self.outputs.push_back(DecodeOutput::Ready { first_token });
            self.tell(|known| !known.is_gone, &Message::Done);
        }
    }

    fn message(
        &mut self,
        now: Instant,
        from: Incarnation,
        envelope: Envelope,
    ) -> Result<(), MachineError> {
        let Envelope { identity, message } = envelope;
        let name = message.name();
        let is_writer = |known: &Known| known.writer.incarnation == from;
        if identity.incarnation != from || !self.writers.iter().any(is_writer) {
            return Err(self.counters.foreign(Foreign::Incarnation, name));
        }
        if let Some(what) = self.speaker.foreign_request(&identity) {
            return Err(self.counters.foreign(what, name));
        }
        // A writer that gives up before it has seen the Offer knows no epoch.
        let names_none = identity.epoch == Epoch(0) && matches!(message, Message::Abort { .. });
        if identity.epoch != self.spec.epoch && !names_none {
            return Err(self.counters.foreign(Foreign::Epoch, name));
        }
        match message {
            Message::Aux {
                prompt_tokens,
                first_token,
            } => self.aux(now, from, prompt_tokens, first_token),
            Message::Abort { cause } => {
                self.abort_of_writer(now, from, cause);
                Ok(())
            }
            Message::AbortAck { writer } => self.abort_ack(now, from, writer),
            _ => Err(self.counters.out_of_table(self.state.name(), name)),
        }
    }

    fn aux(
        &mut self,
        now: Instant,
        from: Incarnation,
        prompt_tokens: u32,
        first_token: u32,
    ) -> Result<(), MachineError> {
        use DecodeState as S;
        let designated = self.spec.designated;
        let may = |known: &&mut Known| {
            known.writer.incarnation == from && known.writer.rank == designated
        };
        let Some(known) = self.writers.iter_mut().find(may) else {
            self.counters.writer += 1;
            let message = "aux";
            return Err(MachineError::Writer {
                message,
                writer: designated,
            });
        };
        known.was_heard = true;
        let ours = self.spec.offer.prompt_tokens;
        let contradiction = match self.first_token {
            _ if prompt_tokens != ours => Some(("prompt_tokens", ours, prompt_tokens)),
            Some(known) if known != first_token => Some(("first_token", known, first_token)),
            _ => None,
        };
        match (self.state, contradiction) {
            (S::Reserved, _) => Err(self.counters.out_of_table(self.state.name(), "aux")),
            (state, Some((field, ours, theirs))) => {
                if matches!(state, S::Offered | S::Receiving) {
                    let reason = format!("{field} is {ours} here and {theirs} in aux");
                    self.give_up(now, Cause::Refused { reason });
                }
                Err(self.counters.contradiction(field, ours, theirs))
            }
            (S::Offered | S::Receiving, None) => {
                match self.first_token.replace(first_token) {
                    Some(_) => self.counters.duplicate += 1,
                    None => self.state = S::Receiving,
                }
                self.sign_of_life(now);
                self.try_land();
                Ok(())
            }
            // It asks because it has not heard Done.
            (S::Landed | S::Active, None) => {
                self.counters.duplicate += 1;
                self.tell(|known| known.writer.incarnation == from, &Message::Done);
                Ok(())
            }
            (S::Aborting | S::Draining | S::Closed, None) => {
                self.counters.late += 1;
                Ok(())
            }
        }
    }

    fn abort_of_writer(&mut self, now: Instant, from: Incarnation, reason: String) {
        use DecodeState as S;
        match self.state {
            S::Reserved | S::Offered | S::Receiving => {
                let by = Side::Remote;
                self.give_up(now, Cause::Aborted { by, reason });
            }
            // Nothing is missing: the writer has not heard Done.
            S::Landed | S::Active => {
                self.counters.late += 1;
                self.tell(|known| known.writer.incarnation == from, &Message::Done);
            }
            S::Aborting => self.counters.duplicate += 1,
            S::Draining | S::Closed => self.counters.late += 1,
        }
    }

    fn abort_ack(
        &mut self,
        now: Instant,
        from: Incarnation,
        rank: WriterRank,
    ) -> Result<(), MachineError> {
        use DecodeState as S;
        let is_meant =
            |known: &Known| known.writer.incarnation == from && known.writer.rank == rank;
        if !self.writers.iter().any(is_meant) {
            self.counters.writer += 1;
            let message = "abort-ack";
            return Err(MachineError::Writer {
                message,
                writer: rank,
            });
        }
        match self.state {
            S::Reserved => Err(self.counters.out_of_table(self.state.name(), "abort-ack")),
            // The answer to our abort, or the word of a writer that has given up by itself and whose
            // Abort is still under way.
            S::Offered | S::Receiving => {
                let cause = Cause::Aborted {
                    by: Side::Remote,
                    reason: "a writer has given up".to_owned(),
                };
                self.give_up(now, cause);
                self.quiet(rank);
                Ok(())
            }
            S::Aborting => {
                self.quiet(rank);
                Ok(())
            }
            S::Landed | S::Active | S::Draining | S::Closed => {
                self.counters.late += 1;
                Ok(())
            }
        }
    }

    fn peer_down(
        &mut self,
        now: Instant,
        incarnation: Incarnation,
        cause: Cause,
        is_proven: bool,
    ) -> Result<(), MachineError> {
        use DecodeState as S;
        let is_lost = |known: &Known| known.writer.incarnation == incarnation;
        let lost: Vec<WriterRank> = self
            .writers
            .iter()
            .filter(|known| is_lost(known))
            .map(|known| known.writer.rank)
            .collect();
        if lost.is_empty() {
            return Err(self.counters.foreign(Foreign::Incarnation, "peer-down"));
        }
        for known in self.writers.iter_mut().filter(|known| is_lost(known)) {
            known.is_gone = true;
        }
        if matches!(self.state, S::Reserved | S::Offered | S::Receiving) {
            self.give_up(now, cause);
        }
        if self.state == S::Aborting {
            if is_proven {
                lost.into_iter().for_each(|rank| self.quiet(rank));
            }
            let may_answer = |known: &Known| !known.is_quiet && !known.is_gone;
            if self.state == S::Aborting && !self.writers.iter().any(may_answer) {
                self.quarantine();
            }
        }
        Ok(())
    }

    /// One writer's operations are terminal.
    fn quiet(&mut self, rank: WriterRank) {
        let Some(known) = self
            .writers
            .iter_mut()
            .find(|known| known.writer.rank == rank)
        else {
            return;
        };
        if known.is_quiet {
            self.counters.duplicate += 1;
            return;
        }
        known.is_quiet = true;
        self.outputs
            .push_back(DecodeOutput::WriterQuiet(known.writer));
        if self.writers.iter().all(|known| known.is_quiet) {
            self.state = DecodeState::Draining;
            self.was_quarantined = false;
        }
    }

    /// Reports once that a proof is missing. A late answer still counts.
    fn quarantine(&mut self) {
        if self.was_quarantined {
            return;
        }
        self.was_quarantined = true;
        self.counters.unheard += 1;
        let unheard = self.writers.iter().filter(|known| !known.is_quiet);
        let ranks = unheard.map(|known| known.writer.rank).collect();
        self.outputs.push_back(DecodeOutput::Quarantine(ranks));
    }

    fn exceeded(&mut self, now: Instant, limit: Duration) {
        self.counters.deadline_exceeded += 1;
        let what = match (self.state, self.has_landed) {
            (DecodeState::Reserved, _) => "arming",
            (DecodeState::Offered, _) => "first arrival",
            (_, false) => "layers",
            (_, true) => "first token",
        };
        let cause = Cause::DeadlineExceeded {
            what: format!("{what} of room {}", self.spec.room),
            deadline_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        };
        self.give_up(now, cause);
    }

    /// From any state in which the flight is not over. Who may still write must answer.
    fn give_up(&mut self, now: Instant, cause: Cause) {
        let before = self.state;
        self.state = DecodeState::Aborting;
        self.drain_until = Some(now + self.spec.timeouts.drain);
        self.retry_at = self.retry_after(now);
        let reason = cause.to_string();
        self.outputs
            .push_back(DecodeOutput::AbortFlight(cause.clone()));
        match before {
            DecodeState::Reserved => {
                let refusal = Message::OfferRefused { reason };
                self.tell(|known| !known.is_gone, &refusal);
                self.state = DecodeState::Draining;
            }
            // Every operation has delivered; the writers were told Done.
            DecodeState::Landed | DecodeState::Active => self.state = DecodeState::Draining,
            _ => self.tell(|known| !known.is_gone, &abort_message(&reason)),
        }
        self.outputs.push_back(DecodeOutput::Failed(cause));
    }
}

fn abort_message(reason: &str) -> Message {
    Message::Abort {
        cause: reason.to_owned(),
    }
}
