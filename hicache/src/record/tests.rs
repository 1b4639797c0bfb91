use super::*;
use crate::miss::Miss;
use kvgate_kvcache::identity::{KeyChain, Namespace};
use kvgate_kvcache::schema::CacheSchema;
use kvgate_kvcache::{Formats, IndexKFormat, LatentFormat, V4Geometry};

/// A cache of three layers with small rows.
fn schema() -> CacheSchema {
    let geometry = V4Geometry {
        layer_ratios: vec![0, 4, 128],
        head_dim: 4,
        rope_dim: 2,
        index_head_dim: 2,
        ..V4Geometry::flash()
    };
    let formats = Formats {
        latent: LatentFormat::F32,
        index_k: IndexKFormat::F32,
        ..Formats::default()
    };
    CacheSchema::deepseek_v4(&geometry, &formats).unwrap()
}

struct Sample {
    namespace: Namespace,
    chain: KeyChain,
    shape: RecordShape,
    payload: Vec<u8>,
}

impl Sample {
    fn new(kind: RecordKind) -> Sample {
        let schema = schema();
        let namespace = Namespace::new(&schema, 256, b"").unwrap();
        let tokens: Vec<u32> = (0..512).collect();
        let shape = match kind {
            RecordKind::Block => RecordShape::block(&schema, 256),
            RecordKind::Checkpoint => RecordShape::checkpoint(&schema, 256, 512),
        };
        let shape = shape.unwrap();
        let payload = (0..shape.payload_bytes()).map(|i| (i * 7 + 1) as u8);
        Sample {
            chain: KeyChain::of(&namespace, &tokens),
            payload: payload.collect(),
            namespace,
            shape,
        }
    }

    fn record(&self) -> Record<'_> {
        Record {
            namespace: self.namespace.digest(),
            id: RecordId {
                kind: self.shape.kind(),
                key: self.chain.keys()[1],
            },
            parent: self.chain.keys()[0],
            position: 256,
            shape: &self.shape,
            payload: &self.payload,
        }
    }

    fn read(&self, wanted: Wanted<'_>, bytes: &[u8]) -> Result<Vec<u8>, Miss> {
        let mut into = vec![0; wanted.shape.payload_bytes() as usize];
        let shape = wanted.shape;
        let verified = Intake::of_bytes(Wanted { shape, ..wanted }, bytes, &mut into)?;
        assert_eq!(verified.id(), wanted.id);
        Ok(verified.payload().to_vec())
    }
}

#[test]
fn what_is_written_is_read_and_padding_is_zero() {
    for kind in [RecordKind::Block, RecordKind::Checkpoint] {
        let sample = Sample::new(kind);
        let record = sample.record();
        let bytes = record.to_bytes(9);
        assert_eq!(bytes.len() as u64 % PAGE_BYTES, 0);
        let payload = sample.read(record.wanted(), &bytes).unwrap();
        let mut end = 0;
        for part in sample.shape.parts() {
            let range = part.range();
            assert!(payload[end..range.start].iter().all(|byte| *byte == 0));
            assert_eq!(payload[range.clone()], sample.payload[range.clone()]);
            end = range.end;
        }
        let head = Head::parse(&bytes[..4096]).unwrap();
        assert_eq!((head.sequence, head.position), (9, 256));
    }
}

/// Any single wrong bit anywhere, and any wrong length, is a miss.
#[test]
fn every_bit_counts() {
    let sample = Sample::new(RecordKind::Block);
    let record = sample.record();
    let mut bytes = record.to_bytes(1);
    for at in 0..bytes.len() {
        let bit = 1 << (at % 8);
        bytes[at] ^= bit;
        let found = sample.read(record.wanted(), &bytes);
        assert!(found.is_err_and(|miss| miss.is_damage()), "byte {at}");
        bytes[at] ^= bit;
    }
    let half = &bytes[..bytes.len() / 2];
    let longer = [&bytes[..], &[0; 4096]].concat();
    for wrong in [half, &longer, &[]] {
        let found = sample.read(record.wanted(), wrong);
        assert!(matches!(found, Err(Miss::Length { .. })), "{found:?}");
    }
    assert!(sample.read(record.wanted(), &bytes).is_ok());
}

#[test]
fn another_record_in_its_place_is_a_miss_that_names_the_field() {
    let sample = Sample::new(RecordKind::Block);
    let record = sample.record();
    let bytes = record.to_bytes(1);
    let wanted = record.wanted();
    let other = BlockKey([9; 32]);
    let cases: [(&str, Wanted<'_>); 5] = [
        (
            "namespace",
            Wanted {
                namespace: NamespaceDigest([1; 32]),
                ..wanted
            },
        ),
        (
            "kind",
            Wanted {
                id: RecordId {
                    kind: RecordKind::Checkpoint,
                    ..wanted.id
                },
                ..wanted
            },
        ),
        (
            "key",
            Wanted {
                id: RecordId {
                    key: other,
                    ..wanted.id
                },
                ..wanted
            },
        ),
        (
            "parent",
            Wanted {
                parent: other,
                ..wanted
            },
        ),
        (
            "position",
            Wanted {
                position: 0,
                ..wanted
            },
        ),
    ];
    for (field, wanted) in cases {
        let found = sample.read(wanted, &bytes);
        assert_eq!(found, Err(Miss::Identity { field }));
    }
}

/// A table with one component less, or with another format, is not the schema's.
#[test]
fn another_component_table_is_a_miss() {
    let sample = Sample::new(RecordKind::Block);
    let record = sample.record();
    let mut head = Head::parse(&record.to_bytes(1)[..4096]).unwrap();
    head.parts[0].part.format = 3;
    assert!(matches!(
        head.matches(&record.wanted()),
        Err(Miss::Layout { .. })
    ));
    let mut head = Head::parse(&record.to_bytes(1)[..4096]).unwrap();
    head.parts.pop();
    let found = head.matches(&record.wanted());
    let reason = "2 parts, expected 3".to_owned();
    assert_eq!(found, Err(Miss::Layout { reason }));
}

#[test]
fn a_record_without_its_commit_mark_is_none() {
    let sample = Sample::new(RecordKind::Block);
    let record = sample.record();
    let mut bytes = record.to_bytes(1);
    let end = bytes.len();
    bytes[end - 64..].fill(0);
    assert_eq!(sample.read(record.wanted(), &bytes), Err(Miss::Commit));
    // The mark of another record of the same length does not count.
    let foreign = record.to_bytes(2);
    bytes[end - 64..].copy_from_slice(&foreign[end - 64..]);
    assert_eq!(sample.read(record.wanted(), &bytes), Err(Miss::Commit));
}

#[test]
fn what_has_gone_wrong_stays_wrong() {
    let sample = Sample::new(RecordKind::Block);
    let record = sample.record();
    let mut bytes = record.to_bytes(1);
    bytes[4096] ^= 1;
    let mut into = vec![0; sample.payload.len()];
    let mut intake = Intake::new(record.wanted(), &mut into);
    let mut at = 0;
    let mut first = None;
    loop {
        let space = intake.space(1000);
        let count = space.len();
        if count == 0 {
            break;
        }
        space.copy_from_slice(&bytes[at..at + count]);
        at += count;
        let outcome = intake.filled(count);
        first = first.or(outcome.err());
    }
    let miss = intake.finish().unwrap_err();
    assert_eq!(Some(&miss), first.as_ref());
    assert_eq!(miss.label(), "checksum");
}

/// What the log writes into a record when it knows the place: a record as before, in one thing another.
#[test]
fn a_record_says_how_far_its_segment_was_synced() {
    let sample = Sample::new(RecordKind::Checkpoint);
    let record = sample.record();
    let mut bytes = record.to_bytes(9);
    let header_bytes = sample.shape.header_bytes() as usize;
    let before = Head::parse(&bytes[..header_bytes]).unwrap();
    let header_crc32c = set_synced(&record.id, 1 << 33, &mut bytes);
    let head = Head::parse(&bytes[..header_bytes]).unwrap();
    let expected = Head {
        synced_bytes: 1 << 33,
        header_crc32c,
        ..before
    };
    assert_eq!(head, expected);
    assert_eq!(
        sample.read(record.wanted(), &bytes).unwrap(),
        sample.read(record.wanted(), &record.to_bytes(9)).unwrap()
    );
}

#[test]
fn an_unfinished_record_is_none() {
    let sample = Sample::new(RecordKind::Block);
    let record = sample.record();
    let bytes = record.to_bytes(1);
    let mut into = vec![0; sample.payload.len()];
    let mut intake = Intake::new(record.wanted(), &mut into);
    intake.space(4096).copy_from_slice(&bytes[..4096]);
    intake.filled(4096).unwrap();
    assert!(matches!(intake.finish(), Err(Miss::Length { .. })));
}

#[test]
fn headers_of_impossible_numbers_are_refused() {
    let sample = Sample::new(RecordKind::Block);
    let good = sample.record().to_bytes(1)[..4096].to_vec();
    let reseal = |mut bytes: Vec<u8>, at: usize, with: &[u8]| {
        bytes[at..at + with.len()].copy_from_slice(with);
        let end = bytes.len() - 4;
        let crc = crc::crc32c(&bytes[..end]);
        bytes[end..].copy_from_slice(&crc.to_le_bytes());
        Head::parse(&bytes)
    };
    assert!(Head::parse(&good).is_ok());
    let big = u64::MAX.to_le_bytes();
    let fields: [(usize, &[u8]); 12] = [
        (8, &1_u32.to_le_bytes()),
        (12, &8192_u32.to_le_bytes()),
        (16, &[7]),
        (17, &[2]),
        (17, &[1]),
        (20, &u32::MAX.to_le_bytes()),
        (128, &big),
        (136, &big),
        (160, &[200]),
        (164, &u32::MAX.to_le_bytes()),
        (176, &big),
        (184, &big),
    ];
    for (at, with) in fields {
        assert!(reseal(good.clone(), at, with).is_err(), "field at {at}");
    }
    let found = reseal(good, 8, &1_u32.to_le_bytes());
    assert_eq!(found, Err(Miss::Version { found: 1 }));
}
