//! The contract of a tier over every tier that needs nothing outside this process.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kvgate_hicache::log::{LogConfig, Mode, Oldest, SegmentLog};
use kvgate_hicache::record::RecordKind::Block;
use kvgate_hicache::record::{Record, RecordId, Verified, Wanted};
use kvgate_hicache::testkit::contract::{Damage, Subject, soon};
use kvgate_hicache::testkit::{Faulty, Sample, SimDisk};
use kvgate_hicache::tier::{MemoryTier, Presence, Stored, Tier, TierStats, check_tier};
use kvgate_hicache::{Error, ErrorKind, Miss, tier_contract};
use kvgate_kvcache::identity::NamespaceDigest;
use kvgate_transfer::Deadline;

/// Another owner of the same tier, so that the test can reach behind it.
struct Shared<T>(Arc<T>);

impl<T: Tier> Tier for Shared<T> {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn probe(&self, ids: &[RecordId], deadline: Deadline) -> Vec<Presence> {
        self.0.probe(ids, deadline)
    }
    fn read<'b>(
        &self,
        wanted: Wanted<'_>,
        into: &'b mut [u8],
        d: Deadline,
    ) -> Result<Verified<'b>, Miss> {
        self.0.read(wanted, into, d)
    }
    fn write(&self, record: &Record<'_>, deadline: Deadline) -> Result<Stored, Error> {
        self.0.write(record, deadline)
    }
    fn remove(&self, ns: NamespaceDigest, id: RecordId, d: Deadline) -> Result<bool, Error> {
        self.0.remove(ns, id, d)
    }
    fn record_limit_bytes(&self) -> u64 {
        self.0.record_limit_bytes()
    }
    fn drain_evicted(&self) -> Vec<RecordId> {
        self.0.drain_evicted()
    }
    fn stats(&self) -> TierStats {
        self.0.stats()
    }
}

#[derive(Default)]
struct Memory(std::cell::RefCell<Option<Arc<MemoryTier>>>);

impl Memory {
    fn with(&self, capacity_bytes: u64) -> Box<dyn Tier> {
        let tier = Arc::new(MemoryTier::new(capacity_bytes));
        *self.0.borrow_mut() = Some(tier.clone());
        Box::new(Shared(tier))
    }
}

impl Subject for Memory {
    fn open(&self) -> Box<dyn Tier> {
        self.with(64 << 20)
    }

    fn open_tight(&self) -> Option<Box<dyn Tier>> {
        Some(self.with(80 << 10))
    }

    fn outlives_its_tier(&self) -> bool {
        false
    }

    fn damage(&self, _tier: &dyn Tier, id: &RecordId, damage: Damage) -> bool {
        let tier = self.0.borrow().clone().unwrap();
        tier.damage(id, |bytes| match damage {
            Damage::Flip(share) => {
                let at = bytes.len() * share as usize / 1000;
                bytes[at] ^= 1;
            }
            Damage::Replaced(other) => {
                let sample = Sample::small(40);
                let k = (0..40).find(|k| sample.id(Block, *k) == other).unwrap();
                *bytes = sample.with_record(Block, k, |record| record.to_bytes(0));
            }
            Damage::Half => bytes.truncate(bytes.len() / 2),
            Damage::Longer => bytes.extend([0; 4096]),
            Damage::Gone => bytes.clear(),
        })
    }
}

#[derive(Default)]
struct File(SimDisk);

impl File {
    fn with(&self, capacity_bytes: u64, segment_bytes: u64) -> Box<dyn Tier> {
        let config = LogConfig {
            capacity_bytes,
            segment_bytes,
            ..LogConfig::default()
        };
        let medium = Arc::new(self.0.clone());
        Box::new(SegmentLog::open(medium, config, Box::new(Oldest), Mode::ReadWrite).unwrap())
    }

    /// The segment and the place where the newest record of that name begins.
    fn place(&self, id: &RecordId) -> (String, usize) {
        let names = self.0.names();
        let places = names.iter().flat_map(|name| {
            let bytes = self.0.bytes(name);
            let is_it = |page: &[u8]| page.len() == 4096 && page[64..96] == id.key.0;
            let at = bytes.chunks(4096).rposition(is_it);
            at.map(|page| (name.clone(), page * 4096))
        });
        places.last().unwrap()
    }
}

impl Subject for File {
    fn open(&self) -> Box<dyn Tier> {
        self.with(64 << 20, 8 << 20)
    }

    fn open_tight(&self) -> Option<Box<dyn Tier>> {
        Some(self.with(96 << 10, 40 << 10))
    }

    fn outlives_its_tier(&self) -> bool {
        true
    }

    fn damage(&self, _tier: &dyn Tier, id: &RecordId, damage: Damage) -> bool {
        let (name, at) = self.place(id);
        match damage {
            Damage::Flip(share) => self.0.damage(&name, |bytes| {
                bytes[at + 8192 * share as usize / 1000] ^= 1;
            }),
            Damage::Replaced(other) => {
                let (from, other_at) = self.place(&other);
                let record = self.0.bytes(&from)[other_at..other_at + 8192].to_vec();
                self.0
                    .damage(&name, |bytes| bytes[at..at + 8192].copy_from_slice(&record));
            }
            Damage::Half => self.0.damage(&name, |bytes| bytes.truncate(at + 4096)),
            Damage::Gone => self.0.damage(&name, |bytes| bytes[at..at + 8192].fill(0)),
            // The log knows how long a record is; what lies behind it belongs to the next one.
            Damage::Longer => return false,
        }
        true
    }
}

tier_contract!(memory, Memory::default());
tier_contract!(file, File::default());

/// A tier that cannot hold one kind of record of the model is refused, not filled with the others.
#[test]
fn a_tier_that_is_too_small_for_a_component_is_refused() {
    let sample = Sample::small(1);
    let error = check_tier(&MemoryTier::new(12_000), sample.schema(), 256).unwrap_err();
    let ErrorKind::ComponentRefused { component, .. } = error.kind() else {
        panic!("{error}");
    };
    assert_eq!(*component, "swa_latent");
}

/// Calls that fail or come too late are misses with a cause; everything else is right.
#[test]
fn a_tier_that_fails_now_and_then_gives_no_wrong_byte() {
    let sample = Sample::small(32);
    let tier = Faulty::new(MemoryTier::new(64 << 20), 3, 50);
    let (mut stored, mut failed) = (0, 0);
    for k in 0..32 {
        match sample.with_record(Block, k, |record| tier.write(record, soon())) {
            Ok(_) => stored += 1,
            Err(error) => {
                assert!(error.is_retryable(), "{error}");
                failed += 1;
            }
        }
    }
    assert!(stored > 0 && failed > 0);
    let mut hits = 0;
    for k in (0..32).chain(0..32) {
        match sample.check_read(Block, k, |wanted, into| tier.read(wanted, into, soon())) {
            Ok(()) => hits += 1,
            Err(Miss::Absent | Miss::Unavailable { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
    assert!(hits > 0 && hits < 2 * stored, "{hits} of {stored}");
    // Too slow for this reader, and nothing has changed for the next.
    let k = (0..32)
        .find(|k| tier.inner().probe(&[sample.id(Block, *k)], soon())[0] == Presence::Present);
    let k = k.unwrap();
    let hurried = Deadline::after_ms(10);
    let miss = sample.check_read(Block, k, |wanted, into| tier.read(wanted, into, hurried));
    assert_eq!(miss, Err(Miss::Late { deadline_ms: 10 }));
    let found = tier.probe(&[sample.id(Block, k)], hurried);
    assert_eq!(found, [Presence::Unknown]);
}
