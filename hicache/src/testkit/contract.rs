//! What every tier must do. [`tier_contract`](crate::tier_contract) makes a test of each point.

use kvgate_kvcache::{Formats, IndexKFormat, LatentFormat, V4Geometry};
use kvgate_transfer::Deadline;

use super::Sample;
use crate::miss::Miss;
use crate::record::{RecordId, RecordKind};
use crate::tier::{Presence, Stored, Tier, check_tier};
use RecordKind::{Block, Checkpoint};

/// Something that happens to the stored bytes of a record behind the tier's back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// One bit, at this share of its length in thousandths.
    Flip(u32),
    /// The bytes of another record of the same length.
    Replaced(RecordId),
    /// The second half is missing.
    Half,
    /// There is more behind it.
    Longer,
    /// It is gone.
    Gone,
}

/// A store under test.
pub trait Subject {
    /// Opens a tier over the store; what it held before is still there unless
    /// [`Subject::outlives_its_tier`] says otherwise.
    fn open(&self) -> Box<dyn Tier>;

    /// Opens a tier that evicts when it holds more than some 10 small blocks; `None` for a store that
    /// leaves eviction to others.
    fn open_tight(&self) -> Option<Box<dyn Tier>>;

    /// Whether what is stored is there after the tier was dropped and opened again.
    fn outlives_its_tier(&self) -> bool;

    /// Does that to a record of an open tier. `false` when it cannot happen to this store.
    fn damage(&self, tier: &dyn Tier, id: &RecordId, damage: Damage) -> bool;
}

/// A deadline that no healthy store needs.
pub fn soon() -> Deadline {
    Deadline::after_ms(20_000)
}

fn put(tier: &dyn Tier, sample: &Sample, kind: RecordKind, k: u32) -> Stored {
    let stored = sample.with_record(kind, k, |record| tier.write(record, soon()));
    stored.unwrap_or_else(|error| panic!("{kind} {k} is not stored: {error}"))
}

fn read(tier: &dyn Tier, sample: &Sample, kind: RecordKind, k: u32) -> Result<(), Miss> {
    sample.check_read(kind, k, |wanted, into| tier.read(wanted, into, soon()))
}

fn probe(tier: &dyn Tier, sample: &Sample, kind: RecordKind, k: u32) -> Presence {
    tier.probe(&[sample.id(kind, k)], soon())[0]
}

/// What is written is read; twice is once; what is removed is gone.
pub fn round_trip(subject: &dyn Subject) {
    let (sample, tier) = (Sample::small(4), subject.open());
    check_tier(&*tier, sample.schema(), 256).expect("room for every component");
    for kind in [Block, Checkpoint] {
        for k in 0..4 {
            assert_eq!(read(&*tier, &sample, kind, k), Err(Miss::Absent));
            assert_eq!(put(&*tier, &sample, kind, k), Stored::Written);
            assert_eq!(put(&*tier, &sample, kind, k), Stored::Present);
            assert_eq!(read(&*tier, &sample, kind, k), Ok(()));
        }
    }
    let namespace = sample.namespace().digest();
    let removed = |id| tier.remove(namespace, id, soon()).expect("removing");
    assert!(removed(sample.id(Block, 2)));
    assert!(!removed(sample.id(Block, 2)));
    assert_eq!(probe(&*tier, &sample, Block, 2), Presence::Absent);
    assert_eq!(read(&*tier, &sample, Block, 2), Err(Miss::Absent));
    assert_eq!(read(&*tier, &sample, Block, 3), Ok(()));
    let stats = tier.stats();
    assert_eq!((stats.stored_count, stats.duplicate_count), (8, 8));
    assert_eq!((stats.hit_count, stats.removed_count), (9, 1));
    assert_eq!(stats.misses["absent"], 9);
}

/// Anything that happens to the stored bytes is a miss with a cause, counted; the neighbours are hits.
pub fn damage(subject: &dyn Subject) {
    let mut cases = vec![Damage::Half, Damage::Longer, Damage::Gone];
    cases.extend((0..8).map(|eighth| Damage::Flip(eighth * 125 + 60)));
    cases.extend([Damage::Flip(0), Damage::Flip(999)]);
    let sample = Sample::small(40);
    cases.push(Damage::Replaced(sample.id(Block, 39)));
    let tier = subject.open();
    put(&*tier, &sample, Block, 39);
    let (mut applied, mut again) = (0, 0);
    for (k, case) in cases.iter().enumerate() {
        let k = k as u32;
        put(&*tier, &sample, Block, k);
        // The last one written is the damaged one, so that what is cut off is its own.
        if !subject.damage(&*tier, &sample.id(Block, k), *case) {
            continue;
        }
        applied += 1;
        let before = tier.stats().miss_count();
        let miss = read(&*tier, &sample, Block, k).expect_err("damaged and a hit");
        let is_gone = *case == Damage::Gone || *case == Damage::Half;
        assert!(miss.is_damage() || is_gone, "{case:?}: {miss}");
        assert_eq!(tier.stats().miss_count(), before + 1, "{case:?}");
        if miss.is_damage() {
            // What was found damaged is not there any more, so that it can be stored again.
            assert_eq!(put(&*tier, &sample, Block, k), Stored::Written, "{case:?}");
            assert_eq!(read(&*tier, &sample, Block, k), Ok(()), "{case:?}");
            again += 1;
        }
    }
    assert!(again >= 8, "only {again} records were stored again");
    assert!(applied >= 10, "only {applied} kinds of damage happened");
    assert_eq!(read(&*tier, &sample, Block, 39), Ok(()));
}

/// A record that goes between the look and the read is a miss, and what is behind it is still there.
pub fn gone_between_look_and_read(subject: &dyn Subject) {
    let (sample, tier) = (Sample::small(5), subject.open());
    for k in 0..5 {
        put(&*tier, &sample, Block, k);
    }
    let ids: Vec<RecordId> = (0..5).map(|k| sample.id(Block, k)).collect();
    assert_eq!(tier.probe(&ids, soon()), [Presence::Present; 5]);
    let removed = tier.remove(sample.namespace().digest(), ids[2], soon());
    assert!(removed.expect("removing"));
    let whole = (0..5).take_while(|k| read(&*tier, &sample, Block, *k).is_ok());
    assert_eq!(whole.count(), 2);
}

/// Other weights, other formats, another tenant: no record of one is a hit of the other.
pub fn namespaces(subject: &dyn Subject) {
    let tier = subject.open();
    let (geometry, formats) = (Sample::geometry(), Sample::formats());
    let mut weights = geometry.clone();
    weights.weights_digest[0] = 1;
    let wide = V4Geometry {
        head_dim: 512,
        rope_dim: 64,
        index_head_dim: 128,
        ..geometry.clone()
    };
    let packed = |index_k| Formats {
        latent: LatentFormat::PackedFp8,
        index_k,
        ..formats
    };
    let samples = [
        Sample::of(&geometry, &formats, b"", 2),
        Sample::of(&weights, &formats, b"", 2),
        Sample::of(&geometry, &formats, b"tenant", 2),
        Sample::of(&wide, &packed(IndexKFormat::Bf16), b"", 2),
        Sample::of(&wide, &packed(IndexKFormat::Fp8), b"", 2),
    ];
    for (index, sample) in samples.iter().enumerate() {
        put(&*tier, sample, Block, 0);
        for (other_index, other) in samples.iter().enumerate() {
            let found = read(&*tier, other, Block, 0);
            let expected = if other_index <= index {
                Ok(())
            } else {
                Err(Miss::Absent)
            };
            assert_eq!(found, expected, "{other_index} after {index}");
        }
    }
    // Somebody who asks under the right name and means something else.
    let [one, other, ..] = &samples;
    let mut wanted = one.wanted(Block, 0);
    wanted.namespace = other.namespace().digest();
    let mut into = vec![0; wanted.shape.payload_bytes() as usize];
    let miss = tier
        .read(wanted, &mut into, soon())
        .expect_err("another namespace");
    assert!(
        matches!(miss, Miss::Identity { .. } | Miss::Absent),
        "{miss}"
    );
}

/// The same records and the same bytes after the tier was opened again.
pub fn restart(subject: &dyn Subject) {
    let sample = Sample::small(6);
    let tier = subject.open();
    for k in 0..6 {
        put(&*tier, &sample, Block, k);
    }
    put(&*tier, &sample, Checkpoint, 5);
    let removed = tier.remove(sample.namespace().digest(), sample.id(Block, 3), soon());
    assert!(removed.expect("removing"));
    let before = tier.stats();
    drop(tier);
    let tier = subject.open();
    let count = (0..6)
        .filter(|k| read(&*tier, &sample, Block, *k).is_ok())
        .count();
    if !subject.outlives_its_tier() {
        assert_eq!(count, 0);
        return;
    }
    assert_eq!(count, 5);
    assert_eq!(read(&*tier, &sample, Block, 3), Err(Miss::Absent));
    assert_eq!(read(&*tier, &sample, Checkpoint, 5), Ok(()));
    assert_eq!(tier.stats().record_count, before.record_count);
}

/// A full tier makes room; asking again and again keeps nothing there; who has left is told once.
pub fn eviction(subject: &dyn Subject) {
    let Some(tier) = subject.open_tight() else {
        return;
    };
    let sample = Sample::small(60);
    let mut gone = Vec::new();
    for k in 0..60 {
        put(&*tier, &sample, Block, k);
        for _ in 0..20 {
            probe(&*tier, &sample, Block, 0);
        }
        assert_eq!(
            read(&*tier, &sample, Block, k),
            Ok(()),
            "the newest is there"
        );
        gone.extend(tier.drain_evicted());
        let stats = tier.stats();
        assert!(stats.used_bytes <= stats.capacity_bytes, "{stats:?}");
    }
    assert!(
        gone.contains(&sample.id(Block, 0)),
        "asking has kept the first"
    );
    let stats = tier.stats();
    assert_eq!(stats.evicted_count, gone.len() as u64);
    assert_eq!(stats.record_count.expect("known") + stats.evicted_count, 60);
    gone.sort();
    gone.dedup();
    assert_eq!(gone.len() as u64, stats.evicted_count, "told twice");
    for id in gone {
        assert_eq!(tier.probe(&[id], soon()), [Presence::Absent]);
    }
}

/// Readers and writers at once: whatever a reader gets is right.
pub fn readers_beside_writers(subject: &dyn Subject) {
    let (sample, tier) = (Sample::small(16), subject.open());
    let tier: &dyn Tier = &*tier;
    std::thread::scope(|scope| {
        let sample = &sample;
        for writer in 0..2 {
            scope.spawn(move || {
                for k in (writer..16).step_by(2) {
                    put(tier, sample, Block, k);
                }
            });
        }
        scope.spawn(move || {
            for k in 0..16 {
                let found = read(tier, sample, Block, k);
                assert!(matches!(found, Ok(()) | Err(Miss::Absent)), "{found:?}");
            }
        });
    });
    assert!((0..16).all(|k| read(tier, &sample, Block, k).is_ok()));
}

/// The records of the real model, in both encodings of the indexer keys.
pub fn real_records(subject: &dyn Subject) {
    for index_k in [IndexKFormat::Fp8, IndexKFormat::Bf16] {
        let geometry = V4Geometry {
            layer_ratios: vec![0, 4, 128, 4],
            drafting: true,
            ..V4Geometry::flash()
        };
        let formats = Formats {
            index_k,
            ..Formats::default()
        };
        let sample = Sample::of(&geometry, &formats, b"", 2);
        let tier = subject.open();
        check_tier(&*tier, sample.schema(), 256).expect("room for every component");
        for kind in [Block, Checkpoint] {
            put(&*tier, &sample, kind, 1);
            assert_eq!(read(&*tier, &sample, kind, 1), Ok(()));
        }
    }
}

/// A test for each point of the contract: `tier_contract!(name, subject)`, where `subject` is an
/// expression of a type that implements [`Subject`]. Evaluated anew for each test.
#[macro_export]
macro_rules! tier_contract {
    ($name:ident, $subject:expr) => {
        mod $name {
            use super::*;
            $crate::tier_contract!(@test $subject, round_trip damage gone_between_look_and_read
                namespaces restart eviction readers_beside_writers real_records);
        }
    };
    (@test $subject:expr, $($point:ident)*) => {
        $(#[test]
        fn $point() {
            $crate::testkit::contract::$point(&$subject);
        })*
    };
}
