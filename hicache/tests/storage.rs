//! Storage tiers behind the host tier: prefixes come back from them whole, byte for byte, or not at all.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use kvgate_hicache::Hicache;
use kvgate_hicache::cache::{Backup, Origin};
use kvgate_hicache::identity::{KeyChain, Namespace};
use kvgate_hicache::record::{RecordId, RecordKind};
use kvgate_hicache::storage::{Place, PrefetchPolicy, StorageConfig, StorageTier, WritePolicy};
use kvgate_hicache::testkit::Faulty;
use kvgate_hicache::tier::{MemoryTier, Presence, Tier};
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::Arc;

const ROOM: u64 = 64 << 20;

fn namespace() -> Namespace {
    Namespace::new(&schema(), 256, b"").unwrap()
}

fn local(tier: &Arc<MemoryTier>) -> StorageTier {
    StorageTier {
        tier: tier.clone(),
        place: Place::Local,
    }
}

fn remote(tier: Arc<dyn Tier>) -> StorageTier {
    StorageTier {
        tier,
        place: Place::Remote,
    }
}

/// A config whose lookups wait, so that a slow machine changes no result.
fn config(tiers: Vec<StorageTier>) -> StorageConfig {
    StorageConfig {
        prefetch: PrefetchPolicy::Wait,
        ..StorageConfig::new(tiers)
    }
}

fn world(sizes: &Sizes, config: StorageConfig) -> World {
    let world = World::local(sizes);
    World {
        cache: world.cache.with_storage(namespace(), config).unwrap(),
        net: None,
    }
}

fn ids(number: u32, end: u32) -> Vec<RecordId> {
    let chain = KeyChain::of(&namespace(), &tokens(number, end));
    let block = |key: &_| RecordId {
        kind: RecordKind::Block,
        key: *key,
    };
    let end = RecordId {
        kind: RecordKind::Checkpoint,
        key: chain.parent(),
    };
    chain.keys().iter().map(block).chain([end]).collect()
}

fn stored(tier: &dyn Tier, ids: &[RecordId]) -> Vec<bool> {
    let found = tier.probe(ids, patience());
    found.iter().map(|p| *p == Presence::Present).collect()
}

/// Computes a prefix and backs it up; waits until it is in every tier.
fn store(world: &World, number: u32, end: u32) -> Vec<kvgate_kvcache::canary::PageDigest> {
    let digests = world.compute(number, end);
    let begun = world.cache.backup(&tokens(number, end)).unwrap();
    assert_eq!(begun, Backup::Started);
    assert!(world.cache.wait(patience()));
    digests
}

fn lookup(cache: &Hicache, number: u32, count: u32) -> Option<(u32, Origin)> {
    let found = cache.lookup_within(&tokens(number, count), patience())?;
    Some((found.tokens, found.origin))
}

#[test]
fn a_prefix_comes_back_from_storage_byte_for_byte() {
    let log = Arc::new(MemoryTier::new(ROOM));
    let world_of = || world(&ROOMY, config(vec![local(&log)]));
    let first = world_of();
    let digests = store(&first, 1, 768);
    let counts = first.cache.storage_counts().unwrap();
    assert_eq!((counts.stores.queued, counts.stores.complete), (1, 1));
    assert_eq!(counts.tiers[0].stored, 4, "three blocks and an end");
    assert_eq!(stored(&*log, &ids(1, 768)), [true; 4]);
    first.check_conserved();
    // Another life of the process.
    let second = world_of();
    let found = second
        .cache
        .lookup_within(&tokens(1, 800), patience())
        .unwrap();
    assert_eq!((found.tokens, found.origin), (768, Origin::Storage));
    second.run();
    let (lease, restored) = second.resume(found, 1).unwrap();
    assert_eq!(restored, digests);
    drop(lease);
    // From now on it is nearer.
    assert_eq!(lookup(&second.cache, 1, 800), Some((768, Origin::Device)));
    second.evict_device();
    assert_eq!(lookup(&second.cache, 1, 800), Some((768, Origin::Host)));
    let counts = second.cache.storage_counts().unwrap();
    assert_eq!((counts.tiers[0].hits, counts.tiers[0].hit_tokens), (1, 768));
    assert_eq!(counts.tiers[0].read_records, 4);
    assert_eq!(counts.fetches.published, 1);
    assert!(counts.tiers[0].misses.is_empty());
    second.check_conserved();
}

/// What is there is not stored twice, and a longer prefix adds what is new.
#[test]
fn a_record_is_stored_once() {
    let log = Arc::new(MemoryTier::new(ROOM));
    let world = world(&ROOMY, config(vec![local(&log)]));
    store(&world, 1, 256);
    store(&world, 1, 768);
    let counts = world.cache.storage_counts().unwrap();
    assert_eq!(counts.tiers[0].stored, 2 + 3);
    assert_eq!(counts.tiers[0].present, 1);
    assert_eq!(log.stats().stored_count, 5);
    world.check_conserved();
}

/// A record that is missing, or another one's, or damaged, shortens the prefix to an end before it.
#[test]
fn a_hole_shortens_the_prefix_to_an_end_before_it() {
    for damaged in 0..5_usize {
        let log = Arc::new(MemoryTier::new(ROOM));
        let world_of = || world(&ROOMY, config(vec![local(&log)]));
        let first = world_of();
        let digests = store(&first, 1, 512);
        store(&first, 1, 1_024);
        drop(first);
        let ids = ids(1, 1_024);
        // Behind the tier's back: the probe still says that it is there.
        assert!(log.damage(&ids[damaged], |bytes| bytes[5_000] ^= 4));
        let second = world_of();
        let found = second.cache.lookup_within(&tokens(1, 1_100), patience());
        second.run();
        let counts = second.cache.storage_counts().unwrap();
        let misses: u64 = counts.tiers[0].misses.values().sum();
        assert_eq!(misses, 1, "{counts:?}");
        match found {
            Some(found) if damaged >= 2 => {
                assert_eq!((found.tokens, found.origin), (512, Origin::Storage));
                assert_eq!(counts.fetches.shortened, 1);
                let (lease, restored) = second.resume(found, 1).unwrap();
                assert_eq!(restored, digests);
                drop(lease);
            }
            None if damaged < 2 => assert_eq!(counts.fetches.failed, 1),
            other => panic!("{damaged}: {other:?}"),
        }
        // What was read behind the end is free again.
        second.check_conserved();
    }
}

/// A tier behind a network has what the near one has lost; it is put into that one again.
#[test]
fn what_comes_from_afar_is_kept_nearby() {
    for has_promotion in [true, false] {
        let (near, far) = (MemoryTier::new(ROOM), MemoryTier::new(ROOM));
        let (near, far) = (Arc::new(near), Arc::new(far));
        let first = world(&ROOMY, config(vec![local(&near), remote(far.clone())]));
        let digests = store(&first, 1, 512);
        drop(first);
        assert_eq!(stored(&*far, &ids(1, 512)), [true; 3]);
        let emptied = Arc::new(MemoryTier::new(ROOM));
        let tiers = vec![local(&emptied), remote(far.clone())];
        let second = world(
            &ROOMY,
            StorageConfig {
                has_promotion,
                ..config(tiers)
            },
        );
        let found = second.cache.lookup_within(&tokens(1, 600), patience());
        let found = found.unwrap();
        assert_eq!((found.tokens, found.origin), (512, Origin::Remote));
        second.run();
        let (lease, restored) = second.resume(found, 1).unwrap();
        assert_eq!(restored, digests);
        drop(lease);
        assert_eq!(stored(&*emptied, &ids(1, 512)), [has_promotion; 3]);
        second.check_conserved();
    }
}

/// A damaged record of the near tier is read from the one behind it.
#[test]
fn a_damaged_record_is_read_from_the_tier_behind() {
    let (near, far) = (MemoryTier::new(ROOM), MemoryTier::new(ROOM));
    let (near, far) = (Arc::new(near), Arc::new(far));
    let world_of = || world(&ROOMY, config(vec![local(&near), remote(far.clone())]));
    let first = world_of();
    let digests = store(&first, 1, 512);
    drop(first);
    assert!(near.damage(&ids(1, 512)[1], |bytes| bytes.truncate(4_096)));
    let second = world_of();
    let found = second.cache.lookup_within(&tokens(1, 600), patience());
    let found = found.unwrap();
    assert_eq!((found.tokens, found.origin), (512, Origin::Remote));
    second.run();
    let (lease, restored) = second.resume(found, 1).unwrap();
    assert_eq!(restored, digests);
    drop(lease);
    let counts = second.cache.storage_counts().unwrap();
    assert_eq!(counts.tiers[0].misses.get("length"), Some(&1));
    assert_eq!(counts.tiers[1].read_records, 1);
    second.check_conserved();
}

/// A tier that fails now and then costs stores and hits, and never gives an error or a wrong byte.
#[test]
fn a_failing_tier_is_a_miss() {
    let (mut hit_count, mut miss_count) = (0, 0);
    for fail_every in 1..8 {
        let memory = Arc::new(MemoryTier::new(ROOM));
        let faulty =
            || -> Arc<dyn Tier> { Arc::new(Faulty::new(Shared(memory.clone()), fail_every, 0)) };
        let first = world(&ROOMY, config(vec![remote(faulty())]));
        let digests = store(&first, 1, 512);
        let counts = first.cache.storage_counts().unwrap();
        let all = stored(&*memory, &ids(1, 512)) == [true; 3];
        let expected = (u64::from(all), u64::from(!all));
        assert_eq!((counts.stores.complete, counts.stores.failed), expected);
        assert_eq!(counts.tiers[0].failed > 0, !all);
        drop(first);
        let second = world(&ROOMY, config(vec![remote(faulty())]));
        let found = second.cache.lookup_within(&tokens(1, 600), patience());
        second.run();
        if let Some(found) = found {
            assert!(all);
            let (lease, restored) = second.resume(found, 1).unwrap();
            assert_eq!(restored, digests);
            drop(lease);
            hit_count += 1;
        } else {
            miss_count += 1;
        }
        second.check_conserved();
    }
    assert!(hit_count > 0 && miss_count > 0, "{hit_count} hits");
}

/// A wait ends at its deadline; the request is computed, and nothing is free before the read is over.
#[test]
fn a_slow_tier_is_a_miss_and_keeps_its_slots() {
    let memory = Arc::new(MemoryTier::new(ROOM));
    let first = world(&ROOMY, config(vec![local(&memory)]));
    store(&first, 1, 512);
    drop(first);
    let gate = Arc::new(Gate::new(memory.clone()));
    let second = world(&ROOMY, config(vec![remote(gate.clone())]));
    let late = second
        .cache
        .lookup_within(&tokens(1, 600), Deadline::after_ms(20));
    assert!(late.is_none());
    gate.wait_for_a_reader();
    let free = second.cache.host().pools().stats().pages.free;
    assert_eq!(free, 8 - 2, "both pages are kept");
    let counts = second.cache.storage_counts().unwrap();
    assert_eq!((counts.fetches.late, counts.fetches.published), (1, 0));
    gate.open();
    second.run();
    // Whoever comes next has it.
    assert_eq!(lookup(&second.cache, 1, 600), Some((512, Origin::Remote)));
    second.check_conserved();
}

/// Of two requests for one prefix the second waits for the first; every record is read once.
#[test]
fn two_fetches_of_one_prefix_are_one() {
    let memory = Arc::new(MemoryTier::new(ROOM));
    let first = world(&ROOMY, config(vec![local(&memory)]));
    let digests = store(&first, 1, 512);
    drop(first);
    let gate = Arc::new(Gate::new(memory.clone()));
    let second = world(&ROOMY, config(vec![remote(gate.clone())]));
    // Of different length, so they are two fetches.
    let fetches = [600, 1_100].map(|count| second.cache.prefetch(&tokens(1, count)).unwrap());
    let joined = second.cache.prefetch(&tokens(1, 601)).unwrap();
    gate.wait_for_a_reader();
    gate.open();
    for fetch in fetches.iter().chain([&joined]) {
        assert!(fetch.wait(patience()).is_some());
    }
    assert!(second.cache.wait(patience()));
    let counts = second.cache.storage_counts().unwrap();
    assert_eq!(counts.fetches.published, 1, "{counts:?}");
    assert_eq!(counts.fetches.joined, 1);
    assert_eq!(counts.tiers[0].read_records, 3);
    let found = second.cache.lookup(&tokens(1, 600)).unwrap();
    second.run();
    let (lease, restored) = second.resume(found, 1).unwrap();
    assert_eq!(restored, digests);
    drop(lease);
    second.check_conserved();
}

#[test]
fn a_prefix_is_stored_at_its_second_sight() {
    let log = Arc::new(MemoryTier::new(ROOM));
    let write = WritePolicy::Selective { sightings: 2 };
    let selective = StorageConfig {
        write,
        ..config(vec![local(&log)])
    };
    let world = world(&ROOMY, selective);
    store(&world, 1, 256);
    store(&world, 2, 256);
    assert_eq!(world.cache.storage_counts().unwrap().stores.queued, 0);
    assert_eq!(lookup(&world.cache, 1, 300), Some((256, Origin::Device)));
    assert!(world.cache.wait(patience()));
    assert_eq!(stored(&*log, &ids(1, 256)), [true; 2]);
    assert_eq!(stored(&*log, &ids(2, 256)), [false; 2]);
    world.check_conserved();
}

/// With write-back a prefix is stored when the host tier runs short, and the rest at the end.
#[test]
fn what_is_written_back_is_stored_before_it_is_needed_elsewhere() {
    let log = Arc::new(MemoryTier::new(ROOM));
    let lazy = StorageConfig {
        write: WritePolicy::WriteBack,
        ..config(vec![local(&log)])
    };
    let sizes = Sizes {
        device: (8, 8),
        host: (4, 4),
    };
    let world = world(&sizes, lazy);
    for number in 1..=4 {
        store(&world, number, 256);
    }
    assert_eq!(world.cache.storage_counts().unwrap().stores.queued, 0);
    store(&world, 5, 256);
    assert!(world.cache.wait(patience()));
    assert_eq!(stored(&*log, &ids(1, 256)), [true; 2]);
    let end = world.cache.shutdown(patience());
    assert!(end.is_drained);
    for number in [2, 3, 4, 5] {
        let is_kept = world.cache.host().tree().probe(&tokens(number, 300)).1 == 256;
        assert_eq!(stored(&*log, &ids(number, 256)), [is_kept; 2], "{number}");
    }
    world.check_conserved();
}

/// The worker that was left in the tier lets go of it, and of its pages, when it is through.
fn gone_from(gate: &Arc<Gate>) {
    let deadline = patience();
    while Arc::strong_count(gate) > 1 {
        assert!(!deadline.has_passed());
        std::thread::yield_now();
    }
}

/// A full queue drops stores and blocks nobody; the end says what it dropped.
#[test]
fn a_full_queue_drops_stores() {
    let memory = Arc::new(MemoryTier::new(ROOM));
    let gate = Arc::new(Gate::new(memory.clone()));
    let narrow = StorageConfig {
        store_queue: 1,
        store_threads: 1,
        ..config(vec![remote(gate.clone())])
    };
    let world = world(&ROOMY, narrow);
    for number in 1..=4 {
        world.compute(number, 256);
        world.cache.backup(&tokens(number, 256)).unwrap();
        assert!(world.cache.wait_moves(patience()));
        if number == 1 {
            gate.wait_for_a_writer();
        }
    }
    let counts = world.cache.storage_counts().unwrap().stores;
    assert_eq!((counts.queued, counts.dropped), (2, 2));
    let end = world.cache.shutdown(Deadline::after_ms(1));
    assert!(!end.is_drained);
    assert_eq!(end.dropped, 1);
    gate.open();
    gone_from(&gate);
    world.check_conserved();
    // The one that had begun was cut off between two records, at most.
    assert!(!stored(&*memory, &ids(2, 256)).contains(&true));
}

/// The worker is inside a tier that does not return, and so is a lookup that waits for it: after the shutdown neither
/// the one who shuts down nor the lookup, which is the last to let go of the storage, waits for the tier.
#[test]
fn a_lookup_beside_a_shutdown_ends_at_its_deadline() {
    let memory = Arc::new(MemoryTier::new(ROOM));
    let first = world(&ROOMY, config(vec![local(&memory)]));
    store(&first, 1, 512);
    drop(first);
    let gate = Arc::new(Gate::new(memory));
    let world = world(&ROOMY, config(vec![remote(gate.clone())]));
    let (told, ended) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let cache = &world.cache;
        scope.spawn(move || {
            let found = cache.lookup_within(&tokens(1, 600), Deadline::after_ms(500));
            told.send(found.is_some()).unwrap();
        });
        gate.wait_for_a_reader();
        let end = cache.shutdown(Deadline::after_ms(1));
        let outcome = ended.recv_timeout(std::time::Duration::from_secs(10));
        // Whatever became of the lookup, its thread ends.
        gate.open();
        assert!(!end.is_drained, "a worker is inside the tier");
        assert_eq!(outcome, Ok(false), "the lookup waits for the tier");
    });
    gone_from(&gate);
    world.check_conserved();
}

/// Another model, another format, another tenant: nothing is found.
#[test]
fn another_namespace_is_refused() {
    let log = Arc::new(MemoryTier::new(ROOM));
    let salted = Namespace::new(&schema(), 256, b"tenant").unwrap();
    let refused = World::local(&ROOMY)
        .cache
        .with_storage(salted, config(vec![local(&log)]));
    assert!(refused.unwrap_err().to_string().contains("namespace"));
    let none = World::local(&ROOMY)
        .cache
        .with_storage(namespace(), config(Vec::new()));
    assert!(none.unwrap_err().to_string().contains("tiers is 0"));
    let narrow = Arc::new(MemoryTier::new(100));
    let refused = World::local(&ROOMY)
        .cache
        .with_storage(namespace(), config(vec![local(&narrow)]));
    assert!(refused.unwrap_err().to_string().contains("cannot hold"));
}

/// A tier that is also used by others.
struct Shared(Arc<MemoryTier>);

/// A tier whose reads and writes wait until it is opened.
struct Gate {
    tier: Arc<MemoryTier>,
    state: std::sync::Mutex<GateState>,
    changed: std::sync::Condvar,
}

#[derive(Default)]
struct GateState {
    is_open: bool,
    readers: u32,
    writers: u32,
}

impl Gate {
    fn new(tier: Arc<MemoryTier>) -> Gate {
        Gate {
            tier,
            state: std::sync::Mutex::default(),
            changed: std::sync::Condvar::new(),
        }
    }

    fn pass(&self, count: fn(&mut GateState) -> &mut u32) {
        let mut state = self.state.lock().unwrap();
        *count(&mut state) += 1;
        self.changed.notify_all();
        let _open = self
            .changed
            .wait_while(state, |state| !state.is_open)
            .unwrap();
    }

    fn open(&self) {
        self.state.lock().unwrap().is_open = true;
        self.changed.notify_all();
    }

    fn wait_for_a_reader(&self) {
        let state = self.state.lock().unwrap();
        let _come = self.changed.wait_while(state, |state| state.readers == 0);
    }

    fn wait_for_a_writer(&self) {
        let state = self.state.lock().unwrap();
        let _come = self.changed.wait_while(state, |state| state.writers == 0);
    }
}

macro_rules! over {
    ($wrapper:ty, $inner:tt, $before_read:expr, $before_write:expr) => {
        impl Tier for $wrapper {
            fn name(&self) -> &str {
                "test"
            }
            fn probe(&self, ids: &[RecordId], deadline: Deadline) -> Vec<Presence> {
                self.$inner.probe(ids, deadline)
            }
            fn read<'b>(
                &self,
                wanted: kvgate_hicache::record::Wanted<'_>,
                into: &'b mut [u8],
                deadline: Deadline,
            ) -> Result<kvgate_hicache::record::Verified<'b>, kvgate_hicache::Miss> {
                $before_read(self);
                self.$inner.read(wanted, into, deadline)
            }
            fn write(
                &self,
                record: &kvgate_hicache::record::Record<'_>,
                deadline: Deadline,
            ) -> Result<kvgate_hicache::tier::Stored, kvgate_hicache::Error> {
                $before_write(self);
                self.$inner.write(record, deadline)
            }
            fn remove(
                &self,
                namespace: kvgate_hicache::identity::NamespaceDigest,
                id: RecordId,
                deadline: Deadline,
            ) -> Result<bool, kvgate_hicache::Error> {
                self.$inner.remove(namespace, id, deadline)
            }
            fn record_limit_bytes(&self) -> u64 {
                self.$inner.record_limit_bytes()
            }
            fn drain_evicted(&self) -> Vec<RecordId> {
                self.$inner.drain_evicted()
            }
            fn stats(&self) -> kvgate_hicache::tier::TierStats {
                self.$inner.stats()
            }
        }
    };
}

over!(Shared, 0, |_: &Shared| {}, |_: &Shared| {});
over!(
    Gate,
    tier,
    |gate: &Gate| gate.pass(|state| &mut state.readers),
    |gate: &Gate| gate.pass(|state| &mut state.writers)
);
