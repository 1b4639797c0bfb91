//! The bytes of every hand-off message, and what is refused.
//!
//! `KVGATE_BLESS=1` writes the golden files anew; a change of theirs is a change of the wire version.
#![allow(clippy::unwrap_used, missing_docs)]

mod handoff_fuzz;

use std::path::PathBuf;

use kvgate_kvcache::handoff::{Envelope, Identity, Message, WIRE_VERSION, WireError};
use kvgate_kvcache::{Attempt, PageId, Room};
use kvgate_transfer::{Epoch, Incarnation, WriterRank};
use proptest::prelude::*;

fn examples() -> Vec<Envelope> {
    let page = |index, generation| PageId { index, generation };
    let messages = vec![
        Message::Hello {
            fingerprint: std::array::from_fn(|index| index as u8),
            fields: vec![
                ("page_tokens".to_owned(), "256".to_owned()),
                ("index_k.encoding".to_owned(), "bf16".to_owned()),
            ],
            writer: WriterRank(1),
            writer_count: 2,
            first_layer: 3,
            end_layer: 6,
        },
        Message::HelloRefused {
            field: "index_k.encoding".to_owned(),
            ours: "bf16".to_owned(),
            theirs: "fp8".to_owned(),
        },
        Message::Submit {
            total_tokens: 364,
            steps: 64,
            prompt: vec![0, 259, 76, 104, 319],
        },
        Message::Offer {
            prompt_tokens: 300,
            segment_ends: vec![256, 300],
            pages: vec![page(1, 0), page(7, 3)],
            windows: vec![page(2, 1), page(1, u32::MAX - 1)],
            request: page(4, 9),
        },
        Message::OfferRefused {
            reason: "no room: 2 page slots asked, 1 of 40 free".to_owned(),
        },
        Message::Aux {
            prompt_tokens: 300,
            first_token: 105,
        },
        Message::Done,
        Message::Abort {
            cause: "cancelled by the user".to_owned(),
        },
        Message::AbortAck {
            writer: WriterRank(1),
        },
        Message::Finish {
            code: 1,
            text: "verdict: MISMATCH".to_owned(),
        },
        Message::OfferBehind {
            start_tokens: 256,
            prompt_tokens: 300,
            segment_ends: vec![300],
            pages: vec![page(1, 0), page(7, 3)],
            windows: vec![page(2, 1), page(1, u32::MAX - 1)],
            request: page(4, 9),
        },
    ];
    let identity = |number: u64| Identity {
        incarnation: Incarnation(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff),
        room: Room(40 + number),
        attempt: Attempt(2),
        epoch: Epoch(1_000 + number),
    };
    let envelope = |(number, message)| Envelope {
        identity: identity(number),
        message,
    };
    (0..).zip(messages).map(envelope).collect()
}

fn golden(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    folder.join(format!("handoff_{}.bin", name.replace('-', "_")))
}

#[test]
fn every_message_has_the_bytes_that_were_agreed() {
    for envelope in examples() {
        let bytes = envelope.encode();
        let path = golden(envelope.message.name());
        if std::env::var_os("KVGATE_BLESS").is_some() {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, &bytes).unwrap();
        }
        let agreed = std::fs::read(&path).unwrap();
        assert_eq!(bytes, agreed, "{}", envelope.message.name());
        assert_eq!(Envelope::decode(&agreed), Ok(envelope));
    }
}

#[test]
fn another_version_is_refused_by_name() {
    let mut bytes = examples()[0].encode();
    bytes[4] = 7;
    let error = Envelope::decode(&bytes).unwrap_err();
    assert_eq!(error, WireError::Version { found: 7 });
    assert_eq!(
        error.to_string(),
        format!("hand-off wire version 7, this build speaks {WIRE_VERSION}")
    );
}

#[test]
fn an_unknown_kind_is_refused_by_name() {
    let mut bytes = examples()[6].encode();
    bytes[6] = 99;
    let end = bytes.len() - 4;
    let crc = crc32c::crc32c(&bytes[..end]).to_le_bytes();
    bytes[end..].copy_from_slice(&crc);
    assert_eq!(Envelope::decode(&bytes), Err(WireError::Kind { found: 99 }));
}

#[test]
fn every_cut_and_every_flipped_bit_is_refused() {
    for envelope in examples() {
        let bytes = envelope.encode();
        for end in 0..bytes.len() {
            assert!(
                Envelope::decode(&bytes[..end]).is_err(),
                "{} cut at {end}",
                envelope.message.name()
            );
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(
                Envelope::decode(&flipped).is_err(),
                "{} bit {bit}",
                envelope.message.name()
            );
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert_eq!(
            Envelope::decode(&longer),
            Err(WireError::Trailing { extra_bytes: 1 })
        );
    }
}

/// A message with a right frame around any body.
fn framed(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = examples()[0].encode()[..48].to_vec();
    bytes[6..8].copy_from_slice(&kind.to_le_bytes());
    bytes[8..12].copy_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(body);
    let crc = crc32c::crc32c(&bytes).to_le_bytes();
    bytes.extend_from_slice(&crc);
    bytes
}

/// The inputs in `tests/seeds/handoff`: at least so many, and at least so many that are valid.
#[test]
fn the_seeds_of_the_fuzzer_are_read_and_written_again() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/seeds/handoff");
    let (mut count, mut valid) = (0, 0);
    for file in std::fs::read_dir(folder).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        count += 1;
        valid += usize::from(handoff_fuzz::message(&bytes));
    }
    assert!(count >= 30 && valid >= 10, "{valid} of {count}");
}

proptest! {
    #[test]
    fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Envelope::decode(&bytes).is_err());
    }

    #[test]
    fn any_body_is_read_as_it_is_written(kind in 0_u16..13, body in proptest::collection::vec(any::<u8>(), 0..80)) {
        let bytes = framed(kind, &body);
        if let Ok(envelope) = Envelope::decode(&bytes) {
            prop_assert_eq!(envelope.encode(), bytes);
        }
    }
}
