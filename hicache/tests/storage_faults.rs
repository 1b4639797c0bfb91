//! Tiers that break the rules: they panic, answer another question, or let every read run into its deadline. They cost
//! hits and stores, and never a wrong byte, a worker, or a wait without an end.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use common::*;
use kvgate_hicache::cache::{Backup, Origin};
use kvgate_hicache::identity::{KeyChain, Namespace, NamespaceDigest};
use kvgate_hicache::record::{Record, RecordId, RecordKind, Verified, Wanted};
use kvgate_hicache::storage::{Place, PrefetchPolicy, StorageConfig, StorageTier};
use kvgate_hicache::tier::{MemoryTier, Presence, Stored, Tier, TierStats};
use kvgate_hicache::{Error, Miss};
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::Arc;

const ROOM: u64 = 64 << 20;

/// What is wrong with a tier.
enum Fault {
    /// Nothing.
    None,
    /// The first read panics.
    PanickingRead,
    /// The first write panics.
    PanickingWrite,
    /// A probe answers one item less than it was asked for.
    ShortProbe,
    /// Every block is answered with the first one of its conversation.
    FirstBlock,
    /// Ends come too late, each by the whole time that its read had.
    LateEnds,
}

struct Odd {
    tier: Arc<MemoryTier>,
    fault: Fault,
    /// Reads of ends, and calls that panicked.
    end_reads: AtomicU32,
    panics: AtomicU32,
}

impl Odd {
    fn new(tier: &Arc<MemoryTier>, fault: Fault) -> Arc<Odd> {
        Arc::new(Odd {
            tier: tier.clone(),
            fault,
            end_reads: AtomicU32::new(0),
            panics: AtomicU32::new(0),
        })
    }

    fn panic_once(&self) {
        assert!(self.panics.fetch_add(1, Relaxed) > 0, "a planted panic");
    }
}

impl Tier for Odd {
    fn name(&self) -> &str {
        "odd"
    }
    fn probe(&self, ids: &[RecordId], deadline: Deadline) -> Vec<Presence> {
        let mut found = self.tier.probe(ids, deadline);
        if matches!(self.fault, Fault::ShortProbe) {
            found.pop();
        }
        found
    }
    fn read<'b>(
        &self,
        wanted: Wanted<'_>,
        into: &'b mut [u8],
        deadline: Deadline,
    ) -> Result<Verified<'b>, Miss> {
        match (&self.fault, wanted.id.kind) {
            (Fault::PanickingRead, _) => self.panic_once(),
            (Fault::FirstBlock, RecordKind::Block) => {
                let first = Wanted {
                    id: ids(1, 256)[0],
                    parent: namespace().root(),
                    position: 0,
                    ..wanted
                };
                return self.tier.read(first, into, deadline);
            }
            (Fault::LateEnds, RecordKind::Checkpoint) => {
                self.end_reads.fetch_add(1, Relaxed);
                while !deadline.has_passed() {
                    std::thread::park_timeout(deadline.remaining());
                }
                let deadline_ms = deadline.allowed_ms();
                return Err(Miss::Late { deadline_ms });
            }
            _ => {}
        }
        self.tier.read(wanted, into, deadline)
    }
    fn write(&self, record: &Record<'_>, deadline: Deadline) -> Result<Stored, Error> {
        if matches!(self.fault, Fault::PanickingWrite) {
            self.panic_once();
        }
        self.tier.write(record, deadline)
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

fn namespace() -> Namespace {
    Namespace::new(&schema(), 256, b"").unwrap()
}

fn ids(number: u32, end: u32) -> Vec<RecordId> {
    let chain = KeyChain::of(&namespace(), &tokens(number, end));
    let kind = RecordKind::Block;
    let block = |key: &_| RecordId { kind, key: *key };
    chain.keys().iter().map(block).collect()
}

/// One worker each way, so that what a worker does after a fault is seen.
fn world(tier: Arc<Odd>, prefetch: PrefetchPolicy) -> World {
    let place = Place::Remote;
    let config = StorageConfig {
        prefetch,
        store_threads: 1,
        fetch_threads: 1,
        ..StorageConfig::new(vec![StorageTier { tier, place }])
    };
    let world = World::local(&ROOMY);
    World {
        cache: world.cache.with_storage(namespace(), config).unwrap(),
        net: None,
    }
}

/// Computes a prefix, backs it up and waits until its store is over.
fn store(world: &World, number: u32, end: u32) -> Vec<kvgate_kvcache::canary::PageDigest> {
    let digests = world.compute(number, end);
    let begun = world.cache.backup(&tokens(number, end)).unwrap();
    assert_eq!(begun, Backup::Started);
    assert!(world.cache.wait(patience()), "the store does not end");
    digests
}

/// A tier with the prefixes of 256 to `end` tokens of conversation 1, each with its end.
fn filled(end: u32) -> Arc<MemoryTier> {
    let memory = Arc::new(MemoryTier::new(ROOM));
    let world = world(Odd::new(&memory, Fault::None), PrefetchPolicy::Wait);
    for end in (256..=end).step_by(256) {
        store(&world, 1, end);
    }
    memory
}

/// The lookup hears of the end of its fetch, and the worker lives on.
#[test]
fn a_tier_that_panics_in_a_read_costs_one_fetch() {
    let odd = Odd::new(&filled(512), Fault::PanickingRead);
    let world = world(odd.clone(), PrefetchPolicy::Wait);
    let fetch = world.cache.prefetch(&tokens(1, 600)).unwrap();
    assert_eq!(fetch.wait(patience()), Some(0), "the fetch does not end");
    assert_eq!(odd.panics.load(Relaxed), 1);
    let found = world.cache.lookup_within(&tokens(1, 600), patience());
    let found = found.map(|found| (found.tokens, found.origin));
    assert_eq!(found, Some((512, Origin::Remote)));
    let counts = world.cache.storage_counts().unwrap().fetches;
    assert_eq!((counts.failed, counts.published), (1, 1));
    assert!(world.cache.shutdown(patience()).is_drained);
    world.check_conserved();
}

#[test]
fn a_tier_that_panics_in_a_write_costs_one_store() {
    let memory = Arc::new(MemoryTier::new(ROOM));
    let odd = Odd::new(&memory, Fault::PanickingWrite);
    let world = world(odd, PrefetchPolicy::Wait);
    store(&world, 1, 256);
    store(&world, 2, 256);
    let counts = world.cache.storage_counts().unwrap().stores;
    assert_eq!((counts.failed, counts.complete), (1, 1));
    assert_eq!(memory.stats().record_count, Some(2));
    world.check_conserved();
}

/// It is as if it could not be asked.
#[test]
fn a_probe_of_another_length_says_nothing() {
    let memory = filled(256);
    let odd = Odd::new(&memory, Fault::ShortProbe);
    let world = world(odd, PrefetchPolicy::Wait);
    assert!(
        world
            .cache
            .lookup_within(&tokens(1, 300), patience())
            .is_none()
    );
    let counts = world.cache.storage_counts().unwrap();
    assert!(counts.tiers[0].misses["unavailable"] > 0);
    assert_eq!((counts.fetches.empty, counts.fetches.failed), (1, 0));
    store(&world, 2, 256);
    let counts = world.cache.storage_counts().unwrap();
    assert_eq!((counts.stores.failed, counts.stores.complete), (1, 0));
    assert_eq!((counts.tiers[0].failed, counts.tiers[0].present), (1, 0));
    world.check_conserved();
}

/// Verified bytes of another record are none of the one that was asked for.
#[test]
fn the_proof_of_another_record_is_a_miss() {
    let odd = Odd::new(&filled(512), Fault::FirstBlock);
    let world = world(odd, PrefetchPolicy::Wait);
    let digests = world.compute(1, 256);
    world.evict_device();
    let found = world.cache.lookup_within(&tokens(1, 600), patience());
    let found = found.unwrap();
    world.run();
    assert_eq!((found.tokens, found.origin), (256, Origin::Remote));
    let (lease, restored) = world.resume(found, 1).unwrap();
    assert_eq!(restored, digests);
    drop(lease);
    let counts = world.cache.storage_counts().unwrap();
    assert_eq!(counts.tiers[0].misses.get("identity"), Some(&1));
    world.check_conserved();
}

/// Four ends, none of which comes: all of them together have the time of one.
#[test]
fn ends_that_are_late_share_one_deadline() {
    let odd = Odd::new(&filled(1_024), Fault::LateEnds);
    let prefetch = PrefetchPolicy::Timeout {
        base_ms: 1_500,
        per_1024_tokens_ms: 0,
    };
    let world = world(odd.clone(), prefetch);
    let fetch = world.cache.prefetch(&tokens(1, 1_100)).unwrap();
    assert_eq!(fetch.wait(patience()), Some(0));
    assert_eq!(odd.end_reads.load(Relaxed), 1);
    world.check_conserved();
}
