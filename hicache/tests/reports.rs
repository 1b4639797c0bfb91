//! Reports of tiers from the field that have no better place. `cargo xtask test --list-rows` lists all of them.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use common::*;
use kvgate_hicache::Side;
use kvgate_hicache::identity::Namespace;
use kvgate_hicache::storage::{Place, PrefetchPolicy, StorageConfig, StorageCounts, StorageTier};
use kvgate_hicache::testkit::Hooked;
use kvgate_hicache::tier::{MemoryTier, Tier};
use kvgate_hicache::{Hicache, cache::Counts};
use kvgate_kvcache::{MemoryKind, PoolConfig, PoolSet, PrefixTree};
use kvgate_transfer::Agent;
use kvgate_transfer::sync::Arc;

const SIZES: Sizes = Sizes {
    device: (20, 10),
    host: (8, 8),
};

/// A cache of one tenant over a tier that others use too.
fn tenant(salt: &[u8], tier: Arc<dyn Tier>) -> World {
    let namespace = || Namespace::new(&schema(), 256, salt).unwrap();
    let side = |name: &str, pages, windows| {
        let agent = Agent::builder(name).build().unwrap();
        let config = PoolConfig {
            pages,
            windows,
            requests: 2,
            memory: MemoryKind::Host,
        };
        let pools = PoolSet::new(schema(), config).unwrap();
        pools.register(&agent).unwrap();
        let policy = Box::<kvgate_hicache::policy::Lru>::default();
        let tree = PrefixTree::in_namespace(&pools, namespace(), policy).unwrap();
        Side::new(&agent, &pools, tree).unwrap()
    };
    let device = side("device", SIZES.device.0, SIZES.device.1);
    let host = side("host", SIZES.host.0, SIZES.host.1);
    let (to_host, to_device) = Agent::connect_local(device.agent(), host.agent()).unwrap();
    let place = Place::Local;
    let config = StorageConfig {
        prefetch: PrefetchPolicy::Wait,
        ..StorageConfig::new(vec![StorageTier { tier, place }])
    };
    let cache = Hicache::over(device, host, to_host, to_device).unwrap();
    World {
        cache: cache.with_storage(namespace(), config).unwrap(),
        net: None,
    }
}

fn store(world: &World, number: u32, end: u32) {
    world.compute(number, end);
    world.cache.backup(&tokens(number, end)).unwrap();
    assert!(world.cache.wait(patience()));
}

/// What a tenant's figures say after it has asked for a prompt, and the reads that it caused.
fn figures_of(tier: &Arc<MemoryTier>, salt: &[u8], number: u32) -> (Counts, StorageCounts, u64) {
    let reads = Arc::new(AtomicU64::new(0));
    let count = reads.clone();
    let counted = Hooked::reads(tier.clone(), move |_, _| {
        count.fetch_add(1, Relaxed);
        Ok(())
    });
    let world = tenant(salt, Arc::new(counted));
    let found = world.cache.lookup_within(&tokens(number, 600), patience());
    assert!(found.is_none(), "a prefix of another tenant");
    assert!(world.cache.wait(patience()));
    let figures = (world.cache.counts(), world.cache.storage_counts().unwrap());
    world.check_conserved();
    (figures.0, figures.1, reads.load(Relaxed))
}

/// Nothing that a tenant can see tells a prompt that another one has stored from one that nobody has.
#[test]
fn no_figure_tells_one_tenant_what_another_one_has() {
    let tier = Arc::new(MemoryTier::new(64 << 20));
    let first = tenant(b"first", tier.clone());
    store(&first, 1, 512);
    first.check_conserved();
    let stored = figures_of(&tier, b"second", 1);
    let unknown = figures_of(&tier, b"second", 7);
    assert_eq!(stored, unknown);
    assert_eq!((stored.0.misses, stored.2), (1, 0));
    // The tenant itself has it, so there was something to tell.
    let again = tenant(b"first", tier);
    let found = again.cache.lookup_within(&tokens(1, 600), patience());
    assert_eq!(found.unwrap().tokens, 512);
    again.check_conserved();
}

/// Hits are as fine as a block, from the first block on, whatever the groups of the layers are.
#[test]
fn a_hit_ends_at_the_last_whole_block() {
    let tier = Arc::new(MemoryTier::new(64 << 20));
    let world = tenant(b"", tier.clone());
    for blocks in 1..=6 {
        store(&world, 1, blocks * 256);
        world.cache.device().tree().evict(u32::MAX);
    }
    for count in (1..1_700)
        .step_by(37)
        .chain((1..=6).flat_map(|b| [b * 256, b * 256 + 1]))
    {
        for side in [world.cache.device(), world.cache.host()] {
            side.tree().evict(u32::MAX);
        }
        let found = world.cache.lookup_within(&tokens(1, count), patience());
        let expected = ((count - 1) / 256).min(6) * 256;
        assert_eq!(
            found.map_or(0, |found| found.tokens),
            expected,
            "of {count}"
        );
        world.run();
    }
    world.check_conserved();
}

/// Rows that are the same for all who read them are there once in every tier, however many read them.
#[test]
fn readers_share_one_copy_in_every_tier() {
    let tier = Arc::new(MemoryTier::new(64 << 20));
    let world = tenant(b"", tier.clone());
    let rows = world.compute(1, 512);
    world.cache.backup(&tokens(1, 512)).unwrap();
    assert!(world.cache.wait(patience()));
    world.cache.device().tree().evict(u32::MAX);
    let found: Vec<_> = (0..8)
        .map(|number| {
            let prompt = [tokens(1, 512), tokens(10 + number, 100)].concat();
            world.cache.lookup(&prompt).expect("there")
        })
        .collect();
    world.run();
    let owned = |side: &Side| {
        let pages = side.pools().stats().pages;
        pages.capacity - pages.free
    };
    assert_eq!(
        (owned(world.cache.device()), owned(world.cache.host())),
        (2, 2)
    );
    assert_eq!(tier.stats().record_count, Some(3));
    let counts = world.cache.counts();
    assert_eq!((counts.loads.started, counts.backups.started), (1, 1));
    assert_eq!(
        world.cache.device().tree().evict(u32::MAX),
        0,
        "somebody reads them"
    );
    let mut readers = found.into_iter();
    let one = readers.next().unwrap();
    drop(readers);
    assert_eq!(
        world.cache.device().tree().evict(u32::MAX),
        0,
        "one still reads them"
    );
    let (lease, restored) = world.resume(one, 1).unwrap();
    assert_eq!(restored, rows);
    drop(lease);
    assert_eq!(world.cache.device().tree().evict(u32::MAX), 2);
    world.check_conserved();
}
