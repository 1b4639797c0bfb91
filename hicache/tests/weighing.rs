//! What is loaded and what is computed by measured rates, and what limits of bandwidth and wear do.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used)]

mod common;

use std::time::{Duration, Instant};

use common::*;
use kvgate_hicache::cache::{Backup, Origin};
use kvgate_hicache::identity::Namespace;
use kvgate_hicache::storage::{
    CostConfig, Limit, Place, PrefetchPolicy, StorageConfig, StorageTier, TierLimits,
};
use kvgate_hicache::tier::{MemoryTier, Tier};
use kvgate_transfer::sync::Arc;

fn world(tier: &Arc<MemoryTier>, change: impl FnOnce(&mut StorageConfig)) -> World {
    let tiers = vec![StorageTier {
        tier: tier.clone(),
        place: Place::Local,
    }];
    let mut config = StorageConfig {
        prefetch: PrefetchPolicy::Wait,
        ..StorageConfig::new(tiers)
    };
    change(&mut config);
    let namespace = Namespace::new(&schema(), 256, b"").unwrap();
    let world = World::local(&ROOMY);
    World {
        cache: world.cache.with_storage(namespace, config).unwrap(),
        net: None,
    }
}

fn roomy_tier() -> Arc<MemoryTier> {
    Arc::new(MemoryTier::new(64 << 20))
}

/// Puts prefixes of so many conversations into the tier.
fn fill(tier: &Arc<MemoryTier>, conversations: std::ops::Range<u32>) {
    for number in conversations {
        let world = world(tier, |_| ());
        world.compute(number, 512);
        world.cache.backup(&tokens(number, 512)).unwrap();
        assert!(world.cache.wait(patience()));
    }
}

fn lookup(world: &World, number: u32) -> Option<(u32, Origin)> {
    let found = world
        .cache
        .lookup_within(&tokens(number, 600), patience())?;
    Some((found.tokens, found.origin))
}

/// Three records come from the tier for a prefix; two prefixes tell how fast it is.
#[test]
fn what_a_slow_tier_has_is_computed_and_now_and_then_tried_again() {
    let tier = roomy_tier();
    fill(&tier, 1..6);
    let world = world(&tier, |config| {
        config.cost = Some(CostConfig {
            least_observations: 6,
            retry_after: 1,
            ..CostConfig::default()
        });
    });
    // A model that takes next to no time.
    for _ in 0..6 {
        world.cache.note_prefill(1_000_000, Duration::from_nanos(1));
    }
    for number in [1, 2] {
        assert_eq!(lookup(&world, number), Some((512, Origin::Storage)));
    }
    let rates = world.cache.cost_rates().unwrap();
    assert!(rates.prefill_tokens_per_s.unwrap() > 1e14, "{rates:?}");
    assert!(rates.read_bytes_per_s[0].is_some(), "{rates:?}");
    let reads = tier.stats().hit_count;
    assert_eq!(lookup(&world, 3), None, "computing is faster");
    assert_eq!(tier.stats().hit_count, reads, "no byte was read for it");
    assert_eq!(lookup(&world, 4), Some((512, Origin::Storage)), "once more");
    assert_eq!(lookup(&world, 5), None);
    let counts = world.cache.storage_counts().unwrap().fetches;
    assert_eq!(
        (counts.unweighed, counts.computed, counts.retried),
        (2, 2, 1)
    );
    assert_eq!((counts.published, counts.failed), (3, 0));
    world.check_conserved();
}

/// A model that takes an hour for a token loads whatever there is.
#[test]
fn what_a_slow_model_would_compute_is_loaded() {
    let tier = roomy_tier();
    fill(&tier, 1..5);
    let world = world(&tier, |config| {
        let least_observations = 1;
        config.cost = Some(CostConfig {
            least_observations,
            ..CostConfig::default()
        });
    });
    world.cache.note_prefill(1, Duration::from_secs(3_600));
    for number in 1..5 {
        assert_eq!(lookup(&world, number), Some((512, Origin::Storage)));
    }
    let counts = world.cache.storage_counts().unwrap().fetches;
    assert_eq!((counts.unweighed, counts.published), (1, 4));
    world.check_conserved();
}

#[test]
fn a_read_behind_its_deadline_is_a_miss_at_once() {
    let tier = roomy_tier();
    fill(&tier, 1..3);
    let world = world(&tier, |config| {
        config.limits = vec![TierLimits {
            // The first record passes and keeps the next one waiting for hours.
            read: Some(Limit {
                bytes_per_s: 1,
                burst_bytes: 0,
            }),
            ..TierLimits::default()
        }];
    });
    let begun = Instant::now();
    assert_eq!(lookup(&world, 1), None);
    assert_eq!(lookup(&world, 2), None);
    assert!(
        begun.elapsed() < Duration::from_secs(15),
        "it does not wait"
    );
    let counts = world.cache.storage_counts().unwrap();
    // A block that is missing ends the fetch: no end is asked for behind it.
    assert_eq!(counts.tiers[0].misses, [("limited", 2)].into());
    assert_eq!((counts.fetches.failed, counts.fetches.published), (2, 0));
    assert_eq!(counts.tiers[0].read_records, 1);
    world.check_conserved();
}

/// The worker of a slow tier waits, the queue of stores fills, and a backup is begun all the same.
#[test]
fn a_limit_of_writes_keeps_no_request_waiting() {
    let tier = roomy_tier();
    let world = world(&tier, |config| {
        config.store_threads = 1;
        config.store_queue = 1;
        config.store_deadline_ms = 3_600_000;
        config.limits = vec![TierLimits {
            // Some hours for a record.
            write: Some(Limit {
                bytes_per_s: 30,
                burst_bytes: 0,
            }),
            ..TierLimits::default()
        }];
    });
    for number in 1..5 {
        world.compute(number, 256);
        assert_eq!(
            world.cache.backup(&tokens(number, 256)).unwrap(),
            Backup::Started
        );
        assert!(world.cache.wait_moves(patience()));
    }
    let counts = world.cache.storage_counts().unwrap().stores;
    assert!(counts.dropped >= 2, "{counts:?}");
    // The end wakes the worker, and waits for it.
    drop(world);
    assert_eq!(tier.stats().stored_count, 1, "the first record passes");
}

#[test]
fn what_comes_too_late_by_the_limit_is_not_stored() {
    let tier = roomy_tier();
    let world = world(&tier, |config| {
        config.store_deadline_ms = 1;
        config.limits = vec![TierLimits {
            write: Some(Limit {
                bytes_per_s: 1,
                burst_bytes: 0,
            }),
            ..TierLimits::default()
        }];
    });
    world.compute(1, 512);
    world.cache.backup(&tokens(1, 512)).unwrap();
    assert!(world.cache.wait(patience()));
    let counts = world.cache.storage_counts().unwrap();
    assert_eq!((counts.stores.complete, counts.stores.failed), (0, 1));
    assert_eq!((counts.tiers[0].stored, counts.tiers[0].limited), (1, 1));
    world.check_conserved();
}

#[test]
fn a_day_has_so_many_bytes() {
    let free = roomy_tier();
    fill(&free, 1..2);
    let prefix_bytes = free.stats().written_bytes;
    let tier = roomy_tier();
    let world = world(&tier, |config| {
        config.limits = vec![TierLimits {
            wear_bytes_per_day: Some(prefix_bytes + prefix_bytes / 2),
            ..TierLimits::default()
        }];
    });
    for number in 1..3 {
        world.compute(number, 512);
        world.cache.backup(&tokens(number, 512)).unwrap();
        assert!(world.cache.wait(patience()));
    }
    let counts = world.cache.storage_counts().unwrap();
    assert_eq!((counts.stores.complete, counts.stores.failed), (1, 1));
    let tier = &counts.tiers[0];
    assert!(tier.stored >= 3 && tier.limited == 1, "{tier:?}");
    assert_eq!(tier.today_bytes, tier.stored_bytes);
    assert_eq!(tier.bytes_per_day, None, "the first day");
    world.check_conserved();
}
