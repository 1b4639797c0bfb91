//! One flight of two writers: ways into every state, one event of each kind, outputs as text.
#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

use std::time::{Duration, Instant};

use kvgate_kvcache::handoff::*;
use kvgate_kvcache::{Attempt, PageId, Room};
use kvgate_transfer::{Cause, Epoch, Incarnation, Side, WriterRank};

pub const DECODE: Incarnation = Incarnation(0xd);
pub const WRITERS: [Incarnation; 2] = [Incarnation(0xa0), Incarnation(0xa1)];
pub const STRANGER: Incarnation = Incarnation(0xbad);
pub const ROOM: Room = Room(5);
pub const ATTEMPT: Attempt = Attempt(1);
pub const EPOCH: Epoch = Epoch(9);
pub const PROMPT_TOKENS: u32 = 300;
pub const TOKEN: u32 = 42;

pub fn offer() -> SlotOffer {
    let page = |index| PageId {
        index,
        generation: 0,
    };
    SlotOffer {
        prompt_tokens: PROMPT_TOKENS,
        segment_ends: vec![256, 300],
        pages: vec![page(1), page(2)],
        windows: vec![page(1)],
        request: page(1),
    }
}

pub fn offer_message() -> Message {
    let SlotOffer {
        prompt_tokens,
        segment_ends,
        pages,
        windows,
        request,
    } = offer();
    Message::Offer {
        prompt_tokens,
        segment_ends,
        pages,
        windows,
        request,
    }
}

pub fn timeouts() -> Timeouts {
    Timeouts {
        transfer: Duration::from_millis(1000),
        idle: Duration::from_millis(400),
        drain: Duration::from_millis(300),
        retry: Some(Duration::from_millis(50)),
    }
}

pub fn local() -> Cause {
    Cause::Aborted {
        by: Side::Local,
        reason: "cancelled".to_owned(),
    }
}

pub fn lost() -> Cause {
    Cause::PeerLost {
        reason: "killed".to_owned(),
    }
}

pub fn envelope(incarnation: Incarnation, epoch: Epoch, message: Message) -> Envelope {
    let identity = Identity {
        incarnation,
        room: ROOM,
        attempt: ATTEMPT,
        epoch,
    };
    Envelope { identity, message }
}

pub fn abort_message() -> Message {
    Message::Abort {
        cause: "enough".to_owned(),
    }
}

pub fn aux() -> Message {
    Message::Aux {
        prompt_tokens: PROMPT_TOKENS,
        first_token: TOKEN,
    }
}

pub fn ack(rank: u16) -> Message {
    Message::AbortAck {
        writer: WriterRank(rank),
    }
}

// ---- decode

pub fn decode_machine() -> DecodeMachine {
    let writer = |rank: usize| Writer {
        rank: WriterRank(rank as u16),
        incarnation: WRITERS[rank],
    };
    let spec = DecodeSpec {
        incarnation: DECODE,
        room: ROOM,
        attempt: ATTEMPT,
        epoch: EPOCH,
        offer: offer(),
        writers: vec![writer(0), writer(1)],
        designated: WriterRank(0),
        timeouts: timeouts(),
    };
    DecodeMachine::new(spec).unwrap()
}

pub fn from_writer(rank: usize, message: Message) -> DecodeInput {
    DecodeInput::Message {
        from: WRITERS[rank],
        envelope: envelope(WRITERS[rank], EPOCH, message),
    }
}

pub fn down(rank: usize, is_proven: bool) -> DecodeInput {
    DecodeInput::PeerDown {
        incarnation: WRITERS[rank],
        cause: lost(),
        is_proven,
    }
}

/// The shortest way into each state.
pub fn way_to(state: DecodeState) -> Vec<DecodeInput> {
    use DecodeInput as I;
    let landed = vec![
        I::Start,
        I::Armed,
        from_writer(0, aux()),
        I::Arrived(WriterRank(1)),
        I::Landed,
    ];
    let with = |mut way: Vec<I>, more: Vec<I>| {
        way.extend(more);
        way
    };
    match state {
        DecodeState::Reserved => vec![I::Start],
        DecodeState::Offered => vec![I::Start, I::Armed],
        DecodeState::Receiving => vec![I::Start, I::Armed, I::Arrived(WriterRank(1))],
        DecodeState::Landed => landed,
        DecodeState::Active => with(landed, vec![I::Activated]),
        DecodeState::Aborting => vec![I::Start, I::Armed, I::LocalAbort(local())],
        DecodeState::Draining => with(
            way_to(DecodeState::Aborting),
            vec![from_writer(0, ack(0)), from_writer(1, ack(1))],
        ),
        DecodeState::Closed => with(landed, vec![I::Activated, I::Finished]),
    }
}

pub fn decode_inputs() -> Vec<(&'static str, DecodeInput)> {
    use DecodeInput as I;
    let other = |edit: fn(&mut Identity)| {
        let mut envelope = envelope(WRITERS[0], EPOCH, aux());
        edit(&mut envelope.identity);
        I::Message {
            from: WRITERS[0],
            envelope,
        }
    };
    let aux_of = |prompt_tokens, first_token| Message::Aux {
        prompt_tokens,
        first_token,
    };
    vec![
        ("start", I::Start),
        ("armed", I::Armed),
        ("arrived 0", I::Arrived(WriterRank(0))),
        ("arrived of no writer", I::Arrived(WriterRank(7))),
        ("landed", I::Landed),
        ("activated", I::Activated),
        ("finished", I::Finished),
        ("local abort", I::LocalAbort(local())),
        ("peer 0 down, proven", down(0, true)),
        ("peer 0 down, unproven", down(0, false)),
        (
            "stranger down",
            I::PeerDown {
                incarnation: STRANGER,
                cause: lost(),
                is_proven: true,
            },
        ),
        ("quiesced", I::Quiesced),
        ("aux of 0", from_writer(0, aux())),
        ("aux of 1", from_writer(1, aux())),
        ("aux, other token", from_writer(0, aux_of(PROMPT_TOKENS, 7))),
        ("aux, other length", from_writer(0, aux_of(299, TOKEN))),
        ("abort of 0", from_writer(0, abort_message())),
        (
            "abort of 0 without epoch",
            I::Message {
                from: WRITERS[0],
                envelope: envelope(WRITERS[0], Epoch(0), abort_message()),
            },
        ),
        ("abort-ack of 0", from_writer(0, ack(0))),
        ("abort-ack of 1 by 0", from_writer(0, ack(1))),
        ("done", from_writer(0, Message::Done)),
        ("offer", from_writer(0, offer_message())),
        (
            "aux, other incarnation",
            other(|identity| identity.incarnation = STRANGER),
        ),
        ("aux, other room", other(|identity| identity.room = Room(6))),
        (
            "aux, other attempt",
            other(|identity| identity.attempt = Attempt(0)),
        ),
        (
            "aux, other epoch",
            other(|identity| identity.epoch = Epoch(8)),
        ),
    ]
}

pub fn decode_outputs(machine: &mut DecodeMachine) -> Vec<String> {
    let text = |output| match output {
        DecodeOutput::Send { to, bytes } => sent(to, &bytes),
        other => format!("{other:?}"),
    };
    std::iter::from_fn(|| machine.poll_output())
        .map(text)
        .collect()
}

// ---- prefill

pub fn prefill_machine(now: Instant, rank: usize) -> PrefillMachine {
    let spec = PrefillSpec {
        incarnation: WRITERS[rank],
        rank: WriterRank(rank as u16),
        is_designated: rank == 0,
        room: ROOM,
        attempt: ATTEMPT,
        receiver: DECODE,
        prompt_tokens: PROMPT_TOKENS,
        timeouts: timeouts(),
    };
    PrefillMachine::new(now, spec)
}

pub fn from_decode(message: Message) -> PrefillInput {
    PrefillInput::Message {
        from: DECODE,
        envelope: envelope(DECODE, EPOCH, message),
    }
}

pub fn refused() -> PrefillInput {
    let reason = "no room".to_owned();
    PrefillInput::Message {
        from: DECODE,
        envelope: envelope(DECODE, Epoch(0), Message::OfferRefused { reason }),
    }
}

pub fn submit() -> PrefillInput {
    PrefillInput::Submit {
        total_tokens: 310,
        steps: 10,
        prompt: vec![1; PROMPT_TOKENS as usize],
    }
}

pub fn all_posted() -> PrefillInput {
    PrefillInput::AllPosted {
        first_token: Some(TOKEN),
    }
}

pub fn path_to(state: PrefillState) -> Vec<PrefillInput> {
    use PrefillInput as I;
    let held = vec![submit(), from_decode(offer_message())];
    let with = |mut way: Vec<I>, more: Vec<I>| {
        way.extend(more);
        way
    };
    match state {
        PrefillState::Idle => vec![submit()],
        PrefillState::Held => held,
        PrefillState::Sending => with(held, vec![I::Posted]),
        PrefillState::Sent => with(held, vec![I::Posted, all_posted(), I::Completed(Ok(()))]),
        PrefillState::Aborting => with(held, vec![I::Posted, from_decode(abort_message())]),
        PrefillState::Closed => with(
            path_to(PrefillState::Sent),
            vec![from_decode(Message::Done)],
        ),
    }
}

pub fn prefill_inputs() -> Vec<(&'static str, PrefillInput)> {
    use PrefillInput as I;
    let by = |from, epoch, message| I::Message {
        from,
        envelope: envelope(from, epoch, message),
    };
    let other = |edit: fn(&mut Identity)| {
        let mut envelope = envelope(DECODE, EPOCH, abort_message());
        edit(&mut envelope.identity);
        I::Message {
            from: DECODE,
            envelope,
        }
    };
    let peer_down = |incarnation| I::PeerDown {
        incarnation,
        cause: lost(),
    };
    vec![
        ("submit", submit()),
        ("offer", from_decode(offer_message())),
        (
            "offer of another epoch",
            by(DECODE, Epoch(10), offer_message()),
        ),
        (
            "offer of another process",
            by(STRANGER, EPOCH, offer_message()),
        ),
        ("offer-refused", refused()),
        ("posted", I::Posted),
        ("completed", I::Completed(Ok(()))),
        ("failed", I::Completed(Err(Cause::Transfer("cable".into())))),
        ("all posted", all_posted()),
        ("all posted, no token", I::AllPosted { first_token: None }),
        ("posting stopped", I::PostingStopped),
        ("progress", I::Progress),
        ("local abort", I::LocalAbort(local())),
        ("receiver down", peer_down(DECODE)),
        ("stranger down", peer_down(STRANGER)),
        ("done", from_decode(Message::Done)),
        ("abort", from_decode(abort_message())),
        ("aux", from_decode(aux())),
        (
            "abort, other incarnation",
            other(|identity| identity.incarnation = STRANGER),
        ),
        (
            "abort, other room",
            other(|identity| identity.room = Room(6)),
        ),
        (
            "abort, other attempt",
            other(|identity| identity.attempt = Attempt(0)),
        ),
        (
            "abort, other epoch",
            other(|identity| identity.epoch = Epoch(8)),
        ),
    ]
}

pub fn prefill_outputs(machine: &mut PrefillMachine) -> Vec<String> {
    let text = |output| match output {
        PrefillOutput::Send { to, bytes } => sent(to, &bytes),
        PrefillOutput::MayPost { epoch, .. } => format!("MayPost({})", epoch.0),
        other => format!("{other:?}"),
    };
    std::iter::from_fn(|| machine.poll_output())
        .map(text)
        .collect()
}

pub fn sent(to: Incarnation, bytes: &[u8]) -> String {
    let Envelope { identity, message } = Envelope::decode(bytes).unwrap();
    format!("{}@{} to {:x}", message.name(), identity.epoch.0, to.0)
}
