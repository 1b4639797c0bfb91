//! The codec against itself, against recorded bytes, and against bytes nobody would send.

use proptest::prelude::*;

use super::fuzz::{self, decode, encode, resealed};
use super::wire::*;
use super::*;
use crate::Arrival;
use crate::backend::{ReadRequest, RemoteRun};
use crate::ids::{ChunkId, Epoch, PoolId, RegionId, StageId};
use crate::visibility::Visibility;

fn arrival() -> Arrival {
    Arrival {
        epoch: Epoch(0x1122_3344_5566_7788),
        tickets: vec![(StageId(3), ChunkId(4)), (StageId(0xfffe), ChunkId(0))],
        note: bytes::Bytes::from_static(b"note"),
    }
}

/// One of each kind, with every field distinct.
fn examples() -> Vec<(&'static str, Frame)> {
    let refusal = Refusal {
        code: 0x0203,
        reason: "another schema: index_k.encoding".into(),
    };
    let run = |pool| RemoteRun {
        pool: PoolId(pool),
        generation: 7,
        slot: 0x0a0b_0c0d,
        slot_count: 2,
    };
    let write = WriteHead {
        number: 9,
        is_last: true,
        payload_bytes: 0x0102_0304_0506,
        runs: vec![run(1), run(2)],
        arrival: Some(arrival()),
    };
    let mut nonce = [0; 32];
    nonce
        .iter_mut()
        .zip(0..)
        .for_each(|(byte, index)| *byte = index);
    vec![
        (
            "hello",
            Frame::Hello {
                nonce,
                has_auth_token: true,
            },
        ),
        ("proof", Frame::Proof { mac: nonce }),
        ("metadata", Frame::Metadata(metadata().encode().into())),
        (
            "memory",
            Frame::Memory {
                region: RegionId(5),
                generation: 6,
                mapped_bytes: 1 << 33,
            },
        ),
        ("ready", Frame::Ready(None)),
        (
            "ready_session",
            Frame::Ready(Some(SessionWords {
                is_resumed: true,
                session: 0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10,
                received: 0x1112_1314_1516_1718,
                window_ms: 0x191a_1b1c,
                every_items: 0x1d1e_1f20,
                every_bytes: 0x2122_2324,
                most_items: 0x2526_2728,
            })),
        ),
        ("refuse", Frame::Refuse(refusal.clone())),
        (
            "place",
            Frame::Place {
                region: RegionId(15),
                generation: 16,
                address: 0x7f01_0203_0405_0607,
            },
        ),
        (
            "probe",
            Frame::Probe {
                address: 0x7f11_1213_1415_1617,
                nonce,
            },
        ),
        (
            "ring",
            Frame::Ring {
                len_bytes: 0x0102_0304,
            },
        ),
        ("write", Frame::Write(write)),
        (
            "ack",
            Frame::Ack {
                through: 10,
                level: Visibility::RemoteVisible,
            },
        ),
        (
            "landed",
            Frame::Landed {
                number: 15,
                slot_count: 0x0405_0607_0809,
            },
        ),
        (
            "nack",
            Frame::Nack {
                number: 11,
                refusal: refusal.clone(),
            },
        ),
        (
            "arrival",
            Frame::Arrival {
                level: Visibility::LocalDone,
                arrival: arrival(),
            },
        ),
        (
            "message",
            Frame::Message(bytes::Bytes::from_static(b"hello")),
        ),
        (
            "numbered",
            Frame::Numbered {
                number: 17,
                message: bytes::Bytes::from_static(b"hello"),
            },
        ),
        ("progress", Frame::Progress { counter: 12 }),
        ("bye", Frame::Bye),
        (
            "read",
            Frame::Read(ReadRequest {
                connection: 0,
                id: 0x1112_1314_1516_1718,
                payload_bytes: 0x0203_0405_0607,
                runs: vec![run(3), run(4)],
            }),
        ),
        (
            "data",
            Frame::Data {
                request: 13,
                payload_bytes: 0x0304_0506_0708,
            },
        ),
        (
            "no_data",
            Frame::NoData {
                request: 14,
                refusal,
            },
        ),
    ]
}

fn metadata() -> metadata::AgentMetadata {
    use crate::ids::Incarnation;
    use crate::mem::{MemoryKind, PoolGeometry};
    let geometry = PoolGeometry {
        offset_bytes: 64,
        stride_bytes: 48,
        slot_bytes: 40,
        slot_count: 3,
    };
    metadata::AgentMetadata {
        incarnation: Incarnation(0x0123_4567_89ab_cdef_0011_2233_4455_6677),
        name: "decode-0".into(),
        regions: vec![
            metadata::RegionInfo {
                id: RegionId(1),
                generation: 2,
                len_bytes: 4096,
                kind: MemoryKind::Shared,
            },
            metadata::RegionInfo {
                id: RegionId(4),
                generation: 1,
                len_bytes: 200,
                kind: MemoryKind::Host,
            },
        ],
        pools: vec![metadata::PoolInfo {
            id: PoolId(8),
            region: RegionId(4),
            geometry,
        }],
        app: bytes::Bytes::from_static(b"application"),
    }
}

#[test]
fn every_kind_has_the_recorded_bytes() {
    for (name, frame) in examples() {
        let path = format!(
            "{}/tests/golden/link_{name}.bin",
            env!("CARGO_MANIFEST_DIR")
        );
        let recorded = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert_eq!(
            encode(&frame),
            recorded,
            "{name} changed: raise the version"
        );
        assert_eq!(decode(&recorded).unwrap(), frame, "{name}");
    }
}

#[test]
fn every_truncation_and_every_flipped_bit_is_refused() {
    for (name, frame) in examples() {
        let bytes = encode(&frame);
        for len in 0..bytes.len() {
            assert!(decode(&bytes[..len]).is_err(), "{name} cut to {len}");
        }
        for bit in 0..bytes.len() * 8 {
            let mut wrong = bytes.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&wrong).is_err(), "{name} with bit {bit} flipped");
        }
    }
}

#[test]
fn another_version_is_named_before_anything_else() {
    let mut bytes = encode(&Frame::Ready(None));
    bytes[4..6].copy_from_slice(&999u16.to_le_bytes());
    bytes[6..8].copy_from_slice(&0xffffu16.to_le_bytes());
    let error = decode(&bytes).unwrap_err();
    assert_eq!(
        error,
        WireError::Version {
            ours: VERSION,
            theirs: 999
        }
    );
    let text = error.to_string();
    assert!(
        text.contains("999") && text.contains(&VERSION.to_string()),
        "{text}"
    );
}

#[test]
fn lengths_beyond_the_kind_are_refused_with_the_header() {
    for (_, frame) in examples() {
        let bytes = encode(&frame);
        let mut header = *bytes.first_chunk::<HEADER_BYTES>().unwrap();
        let kind = Header::parse(&header).unwrap().kind;
        let too_long = kind.limit_bytes() as u32 + 1;
        for body_bytes in [too_long, u32::MAX] {
            header[8..].copy_from_slice(&body_bytes.to_le_bytes());
            let expected = WireError::TooLong {
                kind,
                body_bytes,
                limit_bytes: kind.limit_bytes(),
            };
            assert_eq!(Header::parse(&header), Err(expected));
        }
    }
}

#[test]
fn counts_are_not_believed() {
    // A write that claims 65,536 runs and brings none.
    let head = WriteHead {
        number: 1,
        is_last: true,
        payload_bytes: 0,
        runs: Vec::new(),
        arrival: None,
    };
    let mut bytes = encode(&Frame::Write(head));
    let count_at = HEADER_BYTES + 8 + 1 + 1 + 8;
    bytes[count_at..count_at + 4].copy_from_slice(&(RUN_LIMIT as u32).to_le_bytes());
    let error = decode(&resealed(bytes.clone())).unwrap_err();
    assert_eq!(error, WireError::Truncated { field: "run_count" });
    bytes[count_at..count_at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    let error = decode(&resealed(bytes)).unwrap_err();
    assert_eq!(
        error,
        WireError::BadValue {
            field: "run_count",
            value: u64::from(u32::MAX)
        }
    );
}

#[test]
fn counts_of_a_read_are_not_believed() {
    let request = ReadRequest {
        connection: 0,
        id: 1,
        payload_bytes: 0,
        runs: Vec::new(),
    };
    let mut bytes = encode(&Frame::Read(request));
    let count_at = HEADER_BYTES + 8 + 8;
    bytes[count_at..count_at + 4].copy_from_slice(&(RUN_LIMIT as u32).to_le_bytes());
    let error = decode(&resealed(bytes)).unwrap_err();
    assert_eq!(error, WireError::Truncated { field: "run_count" });
}

#[test]
fn empty_and_wrapping_runs_are_refused() {
    for (slot, slot_count) in [(0, 0), (u32::MAX, 1), (5, u32::MAX)] {
        let run = RemoteRun {
            pool: PoolId(1),
            generation: 1,
            slot,
            slot_count,
        };
        let head = WriteHead {
            number: 1,
            is_last: true,
            payload_bytes: 0,
            runs: vec![run],
            arrival: None,
        };
        let error = decode(&encode(&Frame::Write(head))).unwrap_err();
        assert_eq!(
            error,
            WireError::BadValue {
                field: "run.slot_count",
                value: u64::from(slot_count)
            }
        );
    }
}

#[test]
fn long_reasons_are_cut_at_a_character() {
    let reason = "é".repeat(REASON_LIMIT_BYTES);
    let bytes = encode(&Frame::Refuse(Refusal { code: 1, reason }));
    let Frame::Refuse(refusal) = decode(&bytes).unwrap() else {
        panic!("another kind");
    };
    assert_eq!(refusal.reason, "é".repeat(REASON_LIMIT_BYTES / 2));
}

#[test]
fn metadata_that_does_not_hold_together_is_refused() {
    type Edit = fn(&mut metadata::AgentMetadata);
    let edits: [(&str, Edit); 6] = [
        ("region.id", |m| m.regions[1].id = RegionId(1)),
        ("pool.region", |m| m.pools[0].region = RegionId(3)),
        ("pool.slot_count", |m| m.pools[0].geometry.slot_count = 4),
        ("pool.slot_count", |m| m.pools[0].geometry.slot_bytes = 0),
        ("pool.slot_count", |m| {
            m.pools[0].geometry.offset_bytes = u64::MAX
        }),
        ("name_bytes", |m| m.name = "x".repeat(256)),
    ];
    for (expected, edit) in edits {
        let mut wrong = metadata();
        edit(&mut wrong);
        match metadata::AgentMetadata::decode(wrong.encode().into()).unwrap_err() {
            WireError::BadValue { field, .. } => assert_eq!(field, expected),
            other => panic!("{expected}: {other:?}"),
        }
    }
    let whole = metadata().encode();
    for len in 0..whole.len() {
        assert!(metadata::AgentMetadata::decode(whole[..len].to_vec().into()).is_err());
    }
    let mut longer = whole.clone();
    longer.push(0);
    let error = metadata::AgentMetadata::decode(longer.into()).unwrap_err();
    assert_eq!(error, WireError::Trailing { extra_bytes: 1 });
}

#[test]
fn a_run_of_slots_costs_sixteen_bytes() {
    let run = |slot: u32| RemoteRun {
        pool: PoolId(1),
        generation: 1,
        slot: 2 * slot,
        slot_count: 1,
    };
    let frame_bytes = |run_count: u32| {
        let head = WriteHead {
            number: 1,
            is_last: true,
            payload_bytes: 0,
            runs: (0..run_count).map(run).collect(),
            arrival: None,
        };
        encode(&Frame::Write(head)).len()
    };
    assert_eq!(frame_bytes(15_000) - frame_bytes(0), 15_000 * 16);
    assert!(frame_bytes(0) <= 64, "{}", frame_bytes(0));
}

#[test]
fn ten_thousand_regions_fit() {
    use crate::mem::MemoryKind;
    let mut many = metadata();
    let region = many.regions[0];
    many.pools.clear();
    many.regions = (0..10_000)
        .map(|id| metadata::RegionInfo {
            id: RegionId(id),
            kind: MemoryKind::Host,
            ..region
        })
        .collect();
    let blob = many.encode();
    assert!(blob.len() <= 640_000, "{} bytes", blob.len());
    assert_eq!(metadata::AgentMetadata::decode(blob.into()).unwrap(), many);
}

fn any_arrival() -> impl Strategy<Value = Arrival> {
    let tickets = prop::collection::vec((any::<u16>(), any::<u16>()), 0..50);
    (
        any::<u64>(),
        tickets,
        prop::collection::vec(any::<u8>(), 0..100),
    )
        .prop_map(|(epoch, tickets, note)| Arrival {
            epoch: Epoch(epoch),
            tickets: tickets
                .into_iter()
                .map(|(stage, chunk)| (StageId(stage), ChunkId(chunk)))
                .collect(),
            note: note.into(),
        })
}

fn any_run() -> impl Strategy<Value = RemoteRun> {
    (any::<u32>(), any::<u32>(), 0u32..1 << 30, 1u32..1 << 30).prop_map(
        |(pool, generation, slot, slot_count)| RemoteRun {
            pool: PoolId(pool),
            generation,
            slot,
            slot_count,
        },
    )
}

proptest! {
    #[test]
    fn writes_round_trip(
        op in any::<u64>(), payload_bytes in any::<u64>(),
        runs in prop::collection::vec(any_run(), 0..100),
        arrival in prop::option::of(any_arrival()), is_last in any::<bool>(),
    ) {
        let is_last = is_last || arrival.is_some();
        let frame = Frame::Write(WriteHead { number: op, is_last, payload_bytes, runs, arrival });
        prop_assert_eq!(decode(&encode(&frame)).unwrap(), frame);
    }

    #[test]
    fn arrivals_and_messages_round_trip(arrival in any_arrival(), message in prop::collection::vec(any::<u8>(), 0..300)) {
        for frame in [
            Frame::Arrival { level: Visibility::RemoteDelivered, arrival },
            Frame::Message(message.into()),
        ] {
            prop_assert_eq!(decode(&encode(&frame)).unwrap(), frame);
        }
    }

    #[test]
    fn no_bytes_make_the_decoder_panic(which in 0usize..19, body in prop::collection::vec(any::<u8>(), 0..400)) {
        // Any body under a right header and check sum, and the same bytes raw.
        let (_, frame) = &examples()[which];
        let mut bytes = encode(frame)[..HEADER_BYTES].to_vec();
        bytes.extend_from_slice(&body);
        bytes.extend_from_slice(&[0; CRC_BYTES]);
        if let Ok(frame) = decode(&resealed(bytes)) {
            prop_assert_eq!(frame.kind(), examples()[which].1.kind());
        }
        prop_assert!(decode(&body).is_err());
        let _ = metadata::AgentMetadata::decode(body.into());
    }
}

/// The inputs in `tests/seeds`: of each kind at least so many, and at least so many that are valid.
#[test]
fn the_seeds_of_the_fuzzer_are_read_and_written_again() {
    type Target = fn(&[u8]) -> bool;
    let targets: [(&str, Target, usize, usize); 2] = [
        ("frame", fuzz::frame, 41, 17),
        ("metadata", fuzz::metadata, 20, 4),
    ];
    for (name, target, least, least_valid) in targets {
        let folder = format!("{}/tests/seeds/{name}", env!("CARGO_MANIFEST_DIR"));
        let (mut count, mut valid) = (0, 0);
        for file in std::fs::read_dir(&folder).unwrap() {
            count += 1;
            valid += usize::from(target(&std::fs::read(file.unwrap().path()).unwrap()));
        }
        assert!(
            count >= least && valid >= least_valid,
            "{name}: {valid} of {count}"
        );
    }
}
