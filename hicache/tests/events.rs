//! KV events, read by a decoder that knows nothing but the schema.
#![cfg(all(feature = "events", not(kv_loom)))]
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use common::*;
use kvgate_hicache::events::{
    Batch, BatchSink, Dialect, EventsConfig, KvEvents, Medium, ReportingTier,
};
use kvgate_hicache::identity::NamespaceDigest;
use kvgate_hicache::record::RecordKind::Block;
use kvgate_hicache::record::{Record, RecordId, Verified, Wanted};
use kvgate_hicache::testkit::Sample;
use kvgate_hicache::testkit::contract::{self, Damage, Subject, soon};
use kvgate_hicache::tier::{MemoryTier, Presence, Stored, Tier, TierStats};
use kvgate_hicache::{Error, Miss};
use kvgate_transfer::Deadline;
use rmpv::Value;

/// A router as the schema describes one: a batch is `[time, events, rank]`, an event a map with its name
/// under `type`, a block is where it was stored last and not removed.
#[derive(Default)]
struct Router {
    next_sequence: u64,
    /// Media by block, and what the block is made of.
    blocks: BTreeMap<Vec<u8>, BTreeSet<String>>,
    tokens: BTreeMap<Vec<u8>, Content>,
    names: Vec<String>,
}

/// The hash of the block before, and the tokens.
type Content = (Option<Vec<u8>>, Vec<u64>);

fn field<'a>(event: &'a Value, name: &str) -> &'a Value {
    let fields = event.as_map().unwrap();
    let found = fields.iter().find(|(key, _)| key.as_str() == Some(name));
    &found.unwrap_or_else(|| panic!("{name} in {event}")).1
}

fn hash(value: &Value) -> Vec<u8> {
    match value {
        Value::Binary(bytes) => bytes.clone(),
        Value::Integer(number) => number.as_i64().unwrap().to_be_bytes().to_vec(),
        other => panic!("{other}"),
    }
}

impl Router {
    fn take(&mut self, batch: &Batch, rank: Option<u64>) {
        let [topic, sequence, payload] = batch.frames("kv");
        assert_eq!(topic, b"kv");
        assert_eq!(sequence, self.next_sequence.to_be_bytes());
        self.next_sequence += 1;
        let mut rest = payload.as_slice();
        let batch = rmpv::decode::read_value(&mut rest).unwrap();
        assert!(rest.is_empty());
        let [time, events, found_rank] = batch.as_array().unwrap().as_slice() else {
            panic!("{batch}")
        };
        assert!(time.as_f64().unwrap() > 1.6e9, "{time}");
        assert_eq!(found_rank.as_u64(), rank);
        assert_eq!(found_rank.is_nil(), rank.is_none());
        events
            .as_array()
            .unwrap()
            .iter()
            .for_each(|e| self.event(e));
    }

    fn event(&mut self, event: &Value) {
        let name = field(event, "type").as_str().unwrap();
        self.names.push(name.to_owned());
        if name == "AllBlocksCleared" {
            assert_eq!(event.as_map().unwrap().len(), 1);
            self.blocks.clear();
            return;
        }
        let medium = field(event, "medium").as_str().unwrap().to_owned();
        let hashes: Vec<_> = field(event, "block_hashes")
            .as_array()
            .unwrap()
            .iter()
            .collect();
        let [only] = hashes.as_slice() else {
            panic!("{event}")
        };
        let key = hash(only);
        match name {
            "BlockStored" => {
                assert_eq!(field(event, "block_size").as_u64(), Some(256));
                assert!(field(event, "lora_id").is_nil() && field(event, "lora_name").is_nil());
                let parent = field(event, "parent_block_hash");
                let parent = (!parent.is_nil()).then(|| hash(parent));
                let tokens = field(event, "token_ids").as_array().unwrap();
                let tokens: Vec<u64> = tokens.iter().map(|t| t.as_u64().unwrap()).collect();
                if let Some(parent) = parent.as_ref().filter(|_| !tokens.is_empty()) {
                    assert!(self.blocks[parent].contains(&medium), "after its parent");
                }
                if !tokens.is_empty() {
                    self.tokens.insert(key.clone(), (parent, tokens));
                }
                assert!(
                    self.blocks.entry(key).or_default().insert(medium),
                    "{event}"
                );
            }
            "BlockRemoved" => {
                let media = self.blocks.get_mut(&key).unwrap();
                assert!(media.remove(&medium), "{event}");
                if media.is_empty() {
                    self.blocks.remove(&key);
                }
            }
            other => panic!("{other}"),
        }
    }

    fn flush(&mut self, events: &KvEvents) {
        if let Some(batch) = events.flush() {
            self.take(&batch, None);
        }
    }

    /// Blocks at a medium.
    fn count(&self, medium: &str) -> usize {
        self.blocks
            .values()
            .filter(|media| media.contains(medium))
            .count()
    }
}

/// A world that tells of its device pool and of its host tier.
fn told(world: &World) -> (KvEvents, Router) {
    let events = KvEvents::new(EventsConfig::default());
    let device = world.cache.device().tree();
    assert!(device.report_to(events.sink(Medium::Device)));
    assert!(
        world
            .cache
            .host()
            .tree()
            .report_to(events.sink(Medium::Host))
    );
    let mut router = Router::default();
    router.flush(&events);
    assert_eq!(router.names, ["AllBlocksCleared"]);
    assert_eq!(events.flush(), None, "nothing has happened");
    (events, router)
}

#[test]
fn blocks_are_told_of_where_they_are_and_never_before() {
    let world = World::sim(&ROOMY);
    let (events, mut router) = told(&world);
    world.compute(1, 512);
    router.flush(&events);
    assert_eq!((router.count("GPU"), router.count("CPU")), (2, 0));
    let words: Vec<u64> = router
        .tokens
        .values()
        .flat_map(|(_, t)| t.clone())
        .collect();
    let expected = tokens(1, 512).into_iter().map(u64::from);
    assert_eq!(BTreeSet::from_iter(words), BTreeSet::from_iter(expected));
    let roots = router
        .tokens
        .values()
        .filter(|(parent, _)| parent.is_none());
    assert_eq!(roots.count(), 1);

    world.cache.backup(&tokens(1, 512)).unwrap();
    world.cache.settle();
    router.flush(&events);
    assert_eq!(router.count("CPU"), 0, "it is on its way");
    world.run();
    router.flush(&events);
    assert_eq!((router.count("GPU"), router.count("CPU")), (2, 2));

    world.evict_device();
    router.flush(&events);
    assert_eq!((router.count("GPU"), router.count("CPU")), (0, 2));
    let found = world.cache.lookup(&tokens(1, 600)).unwrap();
    router.flush(&events);
    assert_eq!(router.count("GPU"), 0, "the load is on its way");
    world.run();
    drop(found);
    router.flush(&events);
    assert_eq!(router.count("GPU"), 2, "it is told of again");
    world.check_conserved();
    router.flush(&events);
    assert!(router.blocks.is_empty(), "the trees are gone");
}

#[test]
fn a_router_that_missed_batches_asks_for_them() {
    let events = KvEvents::new(EventsConfig {
        replay_batches: 3,
        waiting_events: 4,
        rank: Some(5),
        ..EventsConfig::default()
    });
    #[derive(Clone, Default)]
    struct Heard(Arc<Mutex<Vec<Batch>>>);
    impl BatchSink for Heard {
        fn batch(&mut self, batch: &Batch) {
            self.0.lock().unwrap().push(batch.clone());
        }
    }
    let heard = Heard::default();
    events.subscribe(Box::new(heard.clone()));
    let tier = Arc::new(MemoryTier::new(64 << 20));
    let tier = ReportingTier::new(tier, &events, Medium::Remote, 256);
    let sample = Sample::small(12);
    let put = |k| {
        let stored = sample.with_record(Block, k, |record| tier.write(record, soon()));
        stored.unwrap();
    };
    let mut router = Router::default();
    for k in 0..5 {
        put(k);
        router.take(&events.flush().unwrap(), Some(5));
    }
    assert_eq!(router.count("STORAGE"), 5);
    let heard = heard.0.lock().unwrap().clone();
    assert_eq!(heard.len(), 5);
    let replay = events.replay(3);
    assert_eq!(
        (replay.batches.as_slice(), replay.lost_batches),
        (&heard[3..], 0)
    );
    let replay = events.replay(0);
    assert_eq!(
        (replay.batches.as_slice(), replay.lost_batches),
        (&heard[2..], 2)
    );
    let replay = events.replay(5);
    assert_eq!((replay.batches.len(), replay.lost_batches), (0, 0));

    // More than may wait: fewer are known than there are, and what was forgotten is not taken back.
    (5..12).for_each(put);
    let namespace = sample.namespace().digest();
    assert!(tier.remove(namespace, sample.id(Block, 0), soon()).unwrap());
    assert!(
        tier.remove(namespace, sample.id(Block, 11), soon())
            .unwrap()
    );
    router.take(&events.flush().unwrap(), Some(5));
    assert_eq!(router.names.last().unwrap(), "BlockRemoved");
    assert_eq!(
        router.count("STORAGE"),
        1,
        "block 10 came after the overflow"
    );
    assert_eq!(events.counts().1, 1);
}

/// A tier in memory that is damaged behind its back.
#[derive(Default)]
struct Damaged {
    tier: Mutex<Option<Arc<MemoryTier>>>,
    events: Mutex<Option<KvEvents>>,
    dialect: Dialect,
}

impl Damaged {
    fn with(&self, capacity_bytes: u64) -> Box<dyn Tier> {
        let events = KvEvents::new(EventsConfig {
            dialect: self.dialect,
            ..EventsConfig::default()
        });
        let tier = Arc::new(MemoryTier::new(capacity_bytes));
        *self.tier.lock().unwrap() = Some(tier.clone());
        let reporting = ReportingTier::new(tier, &events, Medium::Disk, 256);
        *self.events.lock().unwrap() = Some(events);
        Box::new(reporting)
    }
}

impl Subject for Damaged {
    fn open(&self) -> Box<dyn Tier> {
        self.with(64 << 20)
    }

    fn open_tight(&self) -> Option<Box<dyn Tier>> {
        Some(self.with(80 << 10))
    }

    fn outlives_its_tier(&self) -> bool {
        false
    }

    fn damage(
        &self,
        _tier: &dyn Tier,
        id: &kvgate_hicache::record::RecordId,
        damage: Damage,
    ) -> bool {
        let tier = self.tier.lock().unwrap().clone().unwrap();
        tier.damage(id, |bytes| match damage {
            Damage::Flip(share) => {
                let at = bytes.len() * share as usize / 1000;
                bytes[at] ^= 1;
            }
            Damage::Replaced(_) | Damage::Gone => bytes.clear(),
            Damage::Half => bytes.truncate(bytes.len() / 2),
            Damage::Longer => bytes.extend([0; 4096]),
        })
    }
}

/// A tier that tells is a tier; and after each point of the contract the router knows what is there.
#[test]
fn a_tier_that_tells_keeps_the_contract() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let subject = Damaged {
            dialect,
            ..Damaged::default()
        };
        let medium = if dialect == Dialect::Vllm {
            "STORAGE"
        } else {
            "DISK"
        };
        let known = || {
            let events = subject.events.lock().unwrap().clone().unwrap();
            let mut router = Router::default();
            router.flush(&events);
            (router.count(medium), router.blocks)
        };
        contract::round_trip(&subject);
        assert_eq!(
            known().0,
            3,
            "four blocks, one was removed; ends are no blocks"
        );
        contract::eviction(&subject);
        let tier = subject.tier.lock().unwrap().clone().unwrap();
        assert_eq!(known().0 as u64, tier.stats().record_count.unwrap());
        contract::damage(&subject);
        let (count, blocks) = known();
        let tier = subject.tier.lock().unwrap().clone().unwrap();
        let expected = tier.stats().record_count.unwrap();
        assert_eq!(count as u64, expected, "damaged, then whole: {blocks:?}");
        contract::restart(&subject);
        contract::readers_beside_writers(&subject);
        assert_eq!(known().0, 16);
    }
}

/// A tier with something of the test's own behind its next write.
struct Behind {
    tier: MemoryTier,
    then: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Tier for Behind {
    fn name(&self) -> &str {
        self.tier.name()
    }
    fn probe(&self, ids: &[RecordId], deadline: Deadline) -> Vec<Presence> {
        self.tier.probe(ids, deadline)
    }
    fn read<'b>(
        &self,
        wanted: Wanted<'_>,
        into: &'b mut [u8],
        deadline: Deadline,
    ) -> Result<Verified<'b>, Miss> {
        self.tier.read(wanted, into, deadline)
    }
    fn write(&self, record: &Record<'_>, deadline: Deadline) -> Result<Stored, Error> {
        let outcome = self.tier.write(record, deadline);
        let then = self.then.lock().unwrap().take();
        if let Some(then) = then {
            then();
        }
        outcome
    }
    fn remove(&self, ns: NamespaceDigest, id: RecordId, d: Deadline) -> Result<bool, Error> {
        self.tier.remove(ns, id, d)
    }
    fn record_limit_bytes(&self) -> u64 {
        self.tier.record_limit_bytes()
    }
    fn drain_evicted(&self) -> Vec<RecordId> {
        self.tier.drain_evicted()
    }
    fn stats(&self) -> TierStats {
        self.tier.stats()
    }
}

/// A record that another write evicts before its own one has told of it: it is gone, and not told of as there.
#[test]
fn what_is_evicted_while_it_is_told_of_is_not_there() {
    let sample = Sample::small(2);
    let events = KvEvents::new(EventsConfig::default());
    let behind = Arc::new(Behind {
        tier: MemoryTier::new(sample.shape(Block).record_bytes()),
        then: Mutex::default(),
    });
    let tier = Arc::new(ReportingTier::new(
        behind.clone(),
        &events,
        Medium::Disk,
        256,
    ));
    let other = {
        let (tier, sample) = (tier.clone(), sample.clone());
        move || {
            let stored = sample.with_record(Block, 1, |record| tier.write(record, soon()));
            assert_eq!(stored.unwrap(), Stored::Written);
        }
    };
    *behind.then.lock().unwrap() = Some(Box::new(other));
    let stored = sample.with_record(Block, 0, |record| tier.write(record, soon()));
    assert_eq!(stored.unwrap(), Stored::Written);
    let mut router = Router::default();
    router.flush(&events);
    let known: Vec<_> = router.blocks.keys().cloned().collect();
    let there = sample.id(Block, 1);
    assert_eq!(tier.probe(&[there], soon()), [Presence::Present]);
    assert_eq!(known, [there.key.0.to_vec()]);
}
