//! DEV-05: several writers on one metadata row.
//!
//! **Given** four pipeline stages that each finish a last chunk, and a request slot that goes from request
//! A to request B. **When** what the stages say of A comes after the slot went to B, and stages that have no
//! first token name one for B. **Expected** one writer is designated; a word carries its request, try and
//! flight; what is foreign or late is refused and counted; B never sees A's first token. **In the field** all
//! stages wrote the same row, and decode went on with the context of another request.
//!
//! Guard: I-14. The identity of a message and the rank of its writer are compared before it counts
//! (`kvcache/src/handoff/decode/receiver.rs`).

use std::time::Instant;

use kvgate_kvcache::handoff::*;
use kvgate_kvcache::{Attempt, InFlight, PageId};
use kvgate_transfer::sim::{SimFaults, SimNet};
use kvgate_transfer::{Epoch, Incarnation, WriterRank};

use crate::host::{Host, Net, Request, Shape, cancelled, seeds};

const A_TOKEN: u32 = 1111;
const B_TOKEN: u32 = 2222;
const DESIGNATED: WriterRank = WriterRank(0);

fn host(seed: u64) -> Host {
    println!("DEV-05: seed {seed}");
    let net = Net::Sim(SimNet::new(seed, SimFaults::none()));
    let shape = Shape {
        requests: 1,
        windows: 2,
        ..Shape::of(&[0, 4, 128, 4], 4)
    };
    Host::new(net, shape, 4)
}

fn life(host: &Host, stage: usize) -> Incarnation {
    host.writers[stage].node.agent.incarnation()
}

fn machine(host: &Host, request: Request, flight: &InFlight) -> DecodeMachine {
    let tokens = request.tokens;
    let writer = |stage: usize| Writer {
        rank: WriterRank(stage as u16),
        incarnation: life(host, stage),
    };
    let plan = host.plan(tokens);
    let spec = DecodeSpec {
        incarnation: host.receiver.agent.incarnation(),
        room: request.room,
        attempt: Attempt(1),
        epoch: flight.barrier().epoch(),
        offer: SlotOffer::of(tokens, plan.segment_ends(), flight.block_table()),
        writers: (0..4).map(writer).collect(),
        designated: DESIGNATED,
        timeouts: Timeouts::default(),
    };
    let mut machine = DecodeMachine::new(spec).unwrap();
    for input in [DecodeInput::Start, DecodeInput::Armed] {
        machine.handle(Instant::now(), input).unwrap();
    }
    machine
}

/// What a stage says of a request when its last chunk is done.
fn row(host: &Host, stage: usize, request: Request, epoch: Epoch, first_token: u32) -> DecodeInput {
    let from = life(host, stage);
    let identity = Identity {
        incarnation: from,
        room: request.room,
        attempt: Attempt(1),
        epoch,
    };
    let message = Message::Aux {
        prompt_tokens: request.tokens,
        first_token,
    };
    // Over the wire, as it would be.
    let bytes = Envelope { identity, message }.encode();
    let envelope = Envelope::decode(&bytes).unwrap();
    DecodeInput::Message { from, envelope }
}

/// A was served and cancelled; its request slot is free again. Answers its flight and its slot.
fn serve_a(host: &Host, a: Request) -> (Epoch, PageId) {
    let flight = host.flight(a);
    let epoch = flight.barrier().epoch();
    let slot = flight.block_table().request();
    host.hand_over(a, &flight);
    assert!(flight.abort(cancelled()).poll());
    (epoch, slot)
}

/// Gives a machine its inputs in an order of the seed; answers the first tokens that it went on with.
fn feed(host: &Host, machine: &mut DecodeMachine, mut inputs: Vec<DecodeInput>) -> Vec<u32> {
    let mut tokens = Vec::new();
    while !inputs.is_empty() {
        let index = host.net.sim().random(inputs.len() as u64) as usize;
        // What had no effect is in the counters.
        let _refused = machine.handle(Instant::now(), inputs.swap_remove(index));
        while let Some(output) = machine.poll_output() {
            if let DecodeOutput::Ready { first_token } = output {
                tokens.push(first_token);
            }
        }
    }
    tokens
}

#[test]
fn dev_05_a_request_never_sees_the_first_token_of_another() {
    let mut outcomes = Vec::new();
    for seed in seeds(40) {
        let host = host(seed);
        let (a, b) = (Request::new(1, 300), Request::new(2, 300));
        let (a_epoch, a_slot) = serve_a(&host, a);
        let flight = host.flight(b);
        let b_slot = flight.block_table().request();
        assert_eq!(b_slot.index, a_slot.index, "B has the slot of A");
        assert_ne!(b_slot.generation, a_slot.generation);
        host.hand_over(b, &flight);

        let mut machine = machine(&host, b, &flight);
        let b_epoch = flight.barrier().epoch();
        let late = (0..4).map(|stage| row(&host, stage, a, a_epoch, A_TOKEN));
        // A stage that never had B's token repeats the row that it has.
        let foreign = (1..4).map(|stage| row(&host, stage, b, b_epoch, A_TOKEN));
        let mut inputs: Vec<DecodeInput> = late.chain(foreign).collect();
        inputs.push(row(&host, 0, b, b_epoch, B_TOKEN));
        inputs.push(DecodeInput::Landed);
        let tokens = feed(&host, &mut machine, inputs);
        outcomes.push((seed, tokens, machine.counters()));
    }
    for (seed, tokens, _) in &outcomes {
        let is_foreign = tokens.contains(&A_TOKEN);
        assert!(!is_foreign, "seed {seed}: B goes on with the token of A");
    }
    for (seed, tokens, counters) in outcomes {
        assert_eq!(tokens, [B_TOKEN], "seed {seed}: its token, and once");
        let refused = (counters.room, counters.writer);
        assert_eq!(refused, (4, 3), "seed {seed}: {counters:?}");
    }
}

/// The same request once more: only the try and the flight tell the late rows from the new ones.
#[test]
fn dev_05_a_late_row_of_a_former_try_is_refused() {
    for seed in seeds(8) {
        let host = host(seed);
        let request = Request::new(1, 300);
        let (first_epoch, _) = serve_a(&host, request);
        let flight = host.flight(request);
        host.hand_over(request, &flight);
        let mut machine = machine(&host, request, &flight);
        let mut inputs: Vec<DecodeInput> = (0..4)
            .map(|stage| row(&host, stage, request, first_epoch, A_TOKEN))
            .collect();
        inputs.push(DecodeInput::Landed);
        let tokens = feed(&host, &mut machine, inputs);
        assert_eq!(tokens, [0; 0], "the token of the former try");
        assert_eq!(machine.counters().epoch, 4);
        let own = row(&host, 0, request, flight.barrier().epoch(), B_TOKEN);
        assert_eq!(feed(&host, &mut machine, vec![own]), [B_TOKEN]);
    }
}
