//! What a stranger says, and what another protocol says: nothing of it reaches a flight (I-14).
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used, missing_docs)]

mod handoff_parts;

use std::time::Instant;

use handoff_parts::*;
use kvgate_kvcache::handoff::*;
use kvgate_transfer::{Cause, Epoch};

fn is_foreign<T>(result: Result<T, MachineError>) -> bool {
    matches!(
        result,
        Err(MachineError::Foreign {
            what: Foreign::Incarnation,
            ..
        })
    )
}

/// A process that is no writer of the flight speaks under its own name, with everything else right.
#[test]
fn a_receiver_does_not_listen_to_a_process_that_writes_nothing() {
    for state in DecodeState::ALL {
        for message in [abort_message(), aux(), ack(0), Message::Done] {
            let mut machine = decode_machine();
            for input in way_to(state) {
                machine.handle(Instant::now(), input).unwrap();
            }
            decode_outputs(&mut machine);
            let input = DecodeInput::Message {
                from: STRANGER,
                envelope: envelope(STRANGER, EPOCH, message.clone()),
            };
            let name = message.name();
            assert!(is_foreign(machine.handle(Instant::now(), input)), "{name}");
            assert_eq!(machine.state(), state, "{name}");
            assert_eq!(decode_outputs(&mut machine), [""; 0], "{name}");
        }
    }
}

#[test]
fn a_writer_does_not_listen_to_a_process_that_receives_nothing() {
    for state in PrefillState::ALL {
        for message in [abort_message(), Message::Done] {
            let now = Instant::now();
            let mut machine = prefill_machine(now, 0);
            for input in path_to(state) {
                machine.handle(now, input).unwrap();
            }
            while machine.poll_output().is_some() {}
            let input = PrefillInput::Message {
                from: STRANGER,
                envelope: envelope(STRANGER, EPOCH, message.clone()),
            };
            let name = message.name();
            assert!(is_foreign(machine.handle(now, input)), "{name}");
            assert_eq!(machine.state(), state, "{name}");
            assert!(machine.poll_output().is_none(), "{name}");
        }
    }
}

#[test]
fn an_offer_for_another_prompt_is_refused_and_nothing_is_posted() {
    let now = Instant::now();
    let mut machine = prefill_machine(now, 0);
    machine.handle(now, submit()).unwrap();
    while machine.poll_output().is_some() {}
    let Message::Offer {
        segment_ends,
        pages,
        windows,
        request,
        ..
    } = offer_message()
    else {
        panic!("not an offer")
    };
    let other = Message::Offer {
        prompt_tokens: PROMPT_TOKENS + 1,
        segment_ends,
        pages,
        windows,
        request,
    };
    let error = machine.handle(now, from_decode(other)).unwrap_err();
    let expected = MachineError::Contradiction {
        field: "prompt_tokens",
        ours: PROMPT_TOKENS.into(),
        theirs: (PROMPT_TOKENS + 1).into(),
    };
    assert_eq!(error, expected);
    let outputs: Vec<_> = std::iter::from_fn(|| machine.poll_output()).collect();
    let may_post = |output: &PrefillOutput| matches!(output, PrefillOutput::MayPost { .. });
    assert!(!outputs.iter().any(may_post), "{outputs:?}");
    let failed =
        |output: &PrefillOutput| matches!(output, PrefillOutput::Failed(Cause::Refused { .. }));
    assert!(outputs.iter().any(failed), "{outputs:?}");
}

/// A frame that is whole in every other way, its checksum included.
#[test]
fn another_protocol_is_refused_by_its_magic() {
    let whole = envelope(DECODE, Epoch(9), Message::Done).encode();
    assert!(Envelope::decode(&whole).is_ok());
    let mut other = whole[..whole.len() - 4].to_vec();
    other[0] ^= 0x20;
    let crc = crc32c::crc32c(&other);
    other.extend_from_slice(&crc.to_le_bytes());
    let refused = Envelope::decode(&other);
    assert!(
        matches!(refused, Err(WireError::Magic { .. })),
        "{refused:?}"
    );
}
