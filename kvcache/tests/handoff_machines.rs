//! Rules of both machines that hang on an order of events.
#![allow(clippy::unwrap_used, missing_docs)]

mod handoff_parts;

use std::time::{Duration, Instant};

use handoff_parts::*;
use kvgate_kvcache::handoff::*;
use kvgate_transfer::{Cause, Epoch, WriterRank};
use proptest::prelude::*;

#[test]
fn an_answer_to_an_abort_waits_for_the_last_operation_and_for_the_end_of_posting() {
    let now = Instant::now();
    let mut machine = prefill_machine(now, 0);
    let mut go = |input| {
        machine
            .handle(now, input)
            .map(|()| prefill_outputs(&mut machine))
    };
    go(from_decode(offer_message())).unwrap();
    for _ in 0..3 {
        go(PrefillInput::Posted).unwrap();
    }
    let outputs = go(from_decode(abort_message())).unwrap();
    assert_eq!(outputs[0], "StopPosting");
    assert!(!outputs.iter().any(|output| output.starts_with("abort-ack")));
    // One was on its way into the queue.
    go(PrefillInput::Posted).unwrap();
    for result in [Ok(()), Err(Cause::Shutdown), Ok(())] {
        assert!(go(PrefillInput::Completed(result)).unwrap().is_empty());
    }
    assert!(go(PrefillInput::PostingStopped).unwrap().is_empty());
    let outputs = go(PrefillInput::Completed(Ok(()))).unwrap();
    assert_eq!(outputs, ["abort-ack@9 to d", "Release"]);
    // The answer was lost.
    let outputs = go(from_decode(abort_message())).unwrap();
    assert_eq!(outputs, ["abort-ack@9 to d"]);
}

#[test]
fn a_post_against_the_table_is_an_error_and_is_still_waited_for() {
    let now = Instant::now();
    let mut machine = prefill_machine(now, 0);
    machine.handle(now, submit()).unwrap();
    machine.handle(now, PrefillInput::Posted).unwrap_err();
    machine.handle(now, from_decode(abort_message())).unwrap();
    assert_eq!(machine.state(), PrefillState::Aborting);
    machine
        .handle(now, PrefillInput::Completed(Ok(())))
        .unwrap();
    assert_eq!(machine.state(), PrefillState::Closed);
    machine
        .handle(now, PrefillInput::Completed(Ok(())))
        .unwrap_err();
}

#[test]
fn a_second_offer_is_an_error_to_the_second_and_the_first_goes_on() {
    let now = Instant::now();
    let mut machine = prefill_machine(now, 0);
    machine.handle(now, from_decode(offer_message())).unwrap();
    prefill_outputs(&mut machine);
    let second = PrefillInput::Message {
        from: STRANGER,
        envelope: envelope(STRANGER, Epoch(77), offer_message()),
    };
    let error = machine.handle(now, second).unwrap_err();
    assert_eq!(error, MachineError::SecondOffer { epoch: Epoch(77) });
    assert_eq!(
        prefill_outputs(&mut machine),
        ["abort@77 to bad", "abort-ack@77 to bad"]
    );
    assert_eq!(
        (machine.state(), machine.epoch()),
        (PrefillState::Held, Some(EPOCH))
    );
    assert_eq!(machine.counters().second_offer, 1);
}

#[test]
fn a_writer_that_gave_up_before_its_offer_answers_the_offer() {
    let now = Instant::now();
    let mut machine = prefill_machine(now, 0);
    machine.handle(now, submit()).unwrap();
    machine
        .handle(now, PrefillInput::LocalAbort(local()))
        .unwrap();
    assert_eq!(machine.state(), PrefillState::Aborting);
    prefill_outputs(&mut machine);
    machine.handle(now, from_decode(offer_message())).unwrap();
    assert_eq!(prefill_outputs(&mut machine), ["abort-ack@9 to d"]);
    assert_eq!(machine.state(), PrefillState::Closed);
}

#[test]
fn an_expired_wait_aborts_with_its_cause_and_frees_nothing() {
    let start = Instant::now();
    let mut machine = decode_machine();
    for step in way_to(DecodeState::Receiving) {
        machine.handle(start, step).unwrap();
    }
    decode_outputs(&mut machine);
    machine.handle_timeout(start + Duration::from_millis(399));
    let offers = decode_outputs(&mut machine);
    assert_eq!(offers, ["offer@9 to a0"], "writer 1 was heard");
    let end = machine
        .poll_deadline()
        .unwrap()
        .max(start + timeouts().idle);
    machine.handle_timeout(end);
    let outputs = decode_outputs(&mut machine);
    assert!(
        outputs[0].contains("DeadlineExceeded") && outputs[0].contains("layers of room 5"),
        "{outputs:?}"
    );
    assert_eq!(machine.state(), DecodeState::Aborting);
    machine.handle_timeout(end + timeouts().drain);
    let outputs = decode_outputs(&mut machine);
    assert_eq!(outputs, ["Quarantine([writer 0, writer 1])"]);
    assert_eq!(machine.state(), DecodeState::Aborting);
    assert!(machine.is_settled() && machine.poll_deadline().is_none());
    // A late answer still counts.
    machine.handle(end, from_writer(0, ack(0))).unwrap();
    machine.handle(end, from_writer(1, ack(1))).unwrap();
    assert_eq!(machine.state(), DecodeState::Draining);
}

#[test]
fn every_writer_must_answer_and_a_dead_one_is_quiet_only_when_proven() {
    let now = Instant::now();
    let mut machine = decode_machine();
    for step in way_to(DecodeState::Aborting) {
        machine.handle(now, step).unwrap();
    }
    machine.handle(now, from_writer(1, ack(1))).unwrap();
    machine.handle(now, from_writer(1, ack(1))).unwrap();
    assert_eq!(machine.state(), DecodeState::Aborting);
    machine.handle(now, down(0, false)).unwrap();
    assert_eq!(machine.state(), DecodeState::Aborting);
    assert!(machine.is_settled());
    machine.handle(now, down(0, true)).unwrap();
    assert_eq!(machine.state(), DecodeState::Draining);
}

#[test]
fn a_lost_done_is_said_again_to_whoever_asks() {
    let now = Instant::now();
    let mut machine = decode_machine();
    for step in way_to(DecodeState::Active) {
        machine.handle(now, step).unwrap();
    }
    decode_outputs(&mut machine);
    machine.handle(now, from_writer(0, aux())).unwrap();
    machine
        .handle(now, from_writer(1, abort_message()))
        .unwrap();
    assert_eq!(
        decode_outputs(&mut machine),
        ["done@9 to a0", "done@9 to a1"]
    );
    assert_eq!(machine.state(), DecodeState::Active);
}

#[test]
fn impossible_flights_are_refused() {
    let spec = |ranks: &[u16], designated| DecodeSpec {
        incarnation: DECODE,
        room: ROOM,
        attempt: ATTEMPT,
        epoch: EPOCH,
        offer: offer(),
        writers: ranks
            .iter()
            .map(|rank| Writer {
                rank: WriterRank(*rank),
                incarnation: WRITERS[0],
            })
            .collect(),
        designated: WriterRank(designated),
        timeouts: timeouts(),
    };
    assert!(DecodeMachine::new(spec(&[], 0)).is_err());
    assert!(DecodeMachine::new(spec(&[0, 0], 0)).is_err());
    assert!(DecodeMachine::new(spec(&[0, 1], 2)).is_err());
    assert!(DecodeMachine::new(spec(&[0, 1], 1)).is_ok());
}

/// A writer under any events, and what is known of its operations.
struct Sender {
    machine: PrefillMachine,
    under_way: u64,
    may_begin: bool,
}

impl Sender {
    fn take(&mut self, now: Instant, input: PrefillInput) {
        match input {
            PrefillInput::Posted => self.under_way += 1,
            PrefillInput::Completed(_) => self.under_way = self.under_way.saturating_sub(1),
            _ => {}
        }
        let stops = matches!(
            input,
            PrefillInput::PostingStopped | PrefillInput::AllPosted { .. }
        );
        let counted = self.machine.counters();
        let result = self.machine.handle(now, input);
        assert!(result.is_ok() || self.machine.counters() != counted);
        assert_eq!(self.machine.outstanding_count(), self.under_way);
        self.may_begin &= !(stops && result.is_ok());
    }

    fn check_outputs(&mut self) {
        while let Some(output) = self.machine.poll_output() {
            match output {
                PrefillOutput::MayPost { .. } => self.may_begin = true,
                PrefillOutput::Send { to: DECODE, bytes } => {
                    let said = Envelope::decode(&bytes).unwrap();
                    let is_of_flight = self.machine.epoch() == Some(said.identity.epoch);
                    if is_of_flight && matches!(said.message, Message::AbortAck { .. }) {
                        assert_eq!((self.under_way, self.may_begin), (0, false));
                    }
                }
                _ => {}
            }
        }
    }
}

/// A receiver under any events, and what is known of its flight.
struct Receiver {
    machine: DecodeMachine,
    has_landed: bool,
    has_token: bool,
    is_armed: bool,
    zero_is_quiet: bool,
    end_count: u32,
}

impl Receiver {
    fn take(&mut self, now: Instant, name: &str, input: DecodeInput) {
        match name {
            "landed" => self.has_landed = true,
            "armed" => self.is_armed = true,
            "aux of 0" | "aux, other token" => self.has_token = true,
            "abort-ack of 0" | "peer 0 down, proven" => self.zero_is_quiet = true,
            _ => {}
        }
        let counted = self.machine.counters();
        let result = self.machine.handle(now, input);
        assert!(result.is_ok() || self.machine.counters() != counted);
    }

    fn check_outputs(&mut self) {
        while let Some(output) = self.machine.poll_output() {
            let is_complete = self.has_landed && self.has_token;
            match output {
                DecodeOutput::Ready { .. } => assert!(is_complete),
                DecodeOutput::WriterQuiet(writer) => {
                    assert!(writer.rank == WriterRank(0) && self.zero_is_quiet);
                }
                DecodeOutput::Close | DecodeOutput::AbortFlight(_) => self.end_count += 1,
                DecodeOutput::Send { bytes, .. } => match Envelope::decode(&bytes).unwrap().message
                {
                    Message::Offer { .. } => assert!(self.is_armed),
                    Message::Done => assert!(is_complete),
                    _ => {}
                },
                _ => {}
            }
            assert!(self.end_count <= 1, "one end per flight");
        }
    }
}

type Picks = Vec<(prop::sample::Index, u64)>;

fn picks() -> impl Strategy<Value = Picks> {
    proptest::collection::vec((any::<prop::sample::Index>(), 0_u64..200), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_events_makes_a_writer_answer_too_early(picks in picks()) {
        let mut now = Instant::now();
        let machine = prefill_machine(now, 0);
        let mut sender = Sender { machine, under_way: 0, may_begin: false };
        for (pick, millis) in picks {
            now += Duration::from_millis(millis);
            sender.machine.handle_timeout(now);
            sender.check_outputs();
            let mut inputs = prefill_inputs();
            let (_, input) = inputs.swap_remove(pick.index(inputs.len()));
            sender.take(now, input);
            sender.check_outputs();
        }
    }

    #[test]
    fn no_order_of_events_makes_a_receiver_ready_or_done_too_early(picks in picks()) {
        let mut now = Instant::now();
        let mut receiver = Receiver {
            machine: decode_machine(),
            has_landed: false,
            has_token: false,
            is_armed: false,
            zero_is_quiet: false,
            end_count: 0,
        };
        for (pick, millis) in picks {
            now += Duration::from_millis(millis);
            receiver.machine.handle_timeout(now);
            receiver.check_outputs();
            let mut inputs = decode_inputs();
            let (name, input) = inputs.swap_remove(pick.index(inputs.len()));
            receiver.take(now, name, input);
            receiver.check_outputs();
        }
    }
}
