//! Directories and tiers that are not as they should be: one clear error or a counted miss, never a wrong byte, and
//! nothing that stays behind.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use common::*;
use kvgate_hicache::ErrorKind;
use kvgate_hicache::cache::{Backup, Origin};
use kvgate_hicache::identity::Namespace;
use kvgate_hicache::log::{LogConfig, Mode, SecondChance, SegmentLog};
use kvgate_hicache::storage::{Place, PrefetchPolicy, StorageConfig, StorageTier};
use kvgate_hicache::testkit::{Hooked, SimDisk};
use kvgate_hicache::tier::{MemoryTier, Tier};
use kvgate_kvcache::canary::PageDigest;
use kvgate_transfer::sync::Arc;

fn world(tier: Arc<dyn Tier>) -> World {
    let place = Place::Local;
    let config = StorageConfig {
        prefetch: PrefetchPolicy::Wait,
        // One each: what ends a worker ends them all.
        store_threads: 1,
        fetch_threads: 1,
        ..StorageConfig::new(vec![StorageTier { tier, place }])
    };
    let namespace = Namespace::new(&schema(), 256, b"").unwrap();
    let cache = World::local(&ROOMY).cache;
    World {
        cache: cache.with_storage(namespace, config).unwrap(),
        net: None,
    }
}

fn log(disk: &SimDisk) -> Arc<SegmentLog> {
    let config = LogConfig {
        capacity_bytes: 4 << 20,
        // Two prefixes fill one, so new ones are needed soon.
        segment_bytes: 128 << 10,
        ..LogConfig::default()
    };
    let policy = Box::<SecondChance>::default();
    Arc::new(SegmentLog::open(Arc::new(disk.clone()), config, policy, Mode::ReadWrite).unwrap())
}

/// A prefix of two pages that is computed and backed up; answers its rows, and whether all of it was stored.
fn store(world: &World, number: u32) -> (Vec<PageDigest>, bool) {
    let before = world.cache.storage_counts().unwrap().stores;
    let rows = world.compute(number, 512);
    let begun = world.cache.backup(&tokens(number, 512)).unwrap();
    assert_eq!(begun, Backup::Started);
    assert!(world.cache.wait(patience()));
    let after = world.cache.storage_counts().unwrap().stores;
    let ended = after.complete + after.failed - before.complete - before.failed;
    assert_eq!(ended, 1, "a store that is neither done nor failed");
    (rows, after.complete > before.complete)
}

/// Looks a prefix up that is in no memory; answers whether it came, and if so that it came right.
fn is_found(world: &World, number: u32, rows: &[PageDigest]) -> bool {
    for side in [world.cache.device(), world.cache.host()] {
        side.tree().evict(u32::MAX);
    }
    let found = world.cache.lookup_within(&tokens(number, 600), patience());
    world.run();
    let Some(found) = found else { return false };
    assert_eq!((found.tokens, found.origin), (512, Origin::Storage));
    let (lease, restored) = world.resume(found, number).unwrap();
    assert_eq!(restored, rows);
    drop(lease);
    true
}

/// A directory that is full, read-only or gone from some moment on: stores fail and are counted, what was stored before
/// is found, and it goes on where it can when the directory is there again.
#[test]
fn a_directory_that_takes_nothing_more_costs_stores_only() {
    type Set = fn(&SimDisk, bool);
    let cases: [(&str, Set); 3] = [
        ("full", |disk, is_on| {
            let now = disk.file_bytes();
            disk.set_capacity(is_on.then_some(now));
        }),
        ("read-only", |disk, is_on| disk.set_read_only(is_on)),
        ("gone", |disk, is_on| disk.set_gone(is_on)),
    ];
    for (what, set) in cases {
        let disk = SimDisk::new();
        disk.put("notes.txt", b"of somebody else");
        let tier = log(&disk);
        assert_eq!(tier.recovery().foreign, ["notes.txt"]);
        let cache = world(tier.clone());
        let (first, is_stored) = store(&cache, 1);
        assert!(is_stored, "{what}");
        set(&disk, true);
        let failed = (2..8).filter(|number| {
            let (_, is_stored) = store(&cache, *number);
            cache.evict_device();
            cache.cache.host().tree().evict(u32::MAX);
            !is_stored
        });
        let failed = failed.count() as u64;
        assert!(failed > 0, "{what}: nothing was refused");
        let counts = cache.cache.storage_counts().unwrap();
        assert_eq!(counts.stores.failed, failed, "{what}");
        assert!(counts.tiers[0].failed > 0, "{what}");
        assert!(is_found(&cache, 1, &first), "{what}");
        set(&disk, false);
        let (last, is_stored) = store(&cache, 9);
        assert!(is_stored, "{what}: the directory is there again");
        assert!(is_found(&cache, 9, &last), "{what}");
        cache.check_conserved();
        drop(tier);
        let again = world(log(&disk));
        assert!(
            is_found(&again, 1, &first) && is_found(&again, 9, &last),
            "{what}"
        );
        again.check_conserved();
        assert_eq!(disk.bytes("notes.txt"), b"of somebody else");
    }
}

/// A real directory that somebody removes while it is used, and a new start in its place.
#[test]
fn a_directory_that_is_removed_is_empty_the_next_time() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("cache");
    let open = || Arc::new(SegmentLog::open_directory(&dir, LogConfig::default()).unwrap());
    let first = world(open());
    let (rows, is_stored) = store(&first, 1);
    assert!(is_stored);
    std::fs::remove_dir_all(&dir).unwrap();
    // The file is open, so its bytes are there as long as it is.
    assert!(is_found(&first, 1, &rows));
    first.check_conserved();
    let second = world(open());
    assert!(!is_found(&second, 1, &rows));
    assert_eq!(second.cache.counts().misses, 1);
    let (rows, is_stored) = store(&second, 2);
    assert!(is_stored && is_found(&second, 2, &rows));
    second.check_conserved();
}

/// A place where no directory can be made is one error, with the place.
#[test]
fn a_place_that_is_no_directory_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "no directory").unwrap();
    for path in [file.clone(), file.join("cache")] {
        let error = SegmentLog::open_directory(&path, LogConfig::default()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Io { path: named, .. } if *named == path));
    }
}

/// A tier is code of others. When it panics the request is computed, the next one is served, and nothing is kept.
#[test]
fn a_tier_that_panics_is_a_miss_and_its_worker_goes_on() {
    let memory = Arc::new(MemoryTier::new(64 << 20));
    let left = Arc::new(AtomicU32::new(3));
    let strike = {
        let left = left.clone();
        move || {
            let spent = left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
            assert!(spent.is_err(), "a fault of the tier");
        }
    };
    let on_write = strike.clone();
    let writes = Hooked::writes(memory.clone(), move |_| on_write());
    let first = world(Arc::new(writes));
    for number in 1..=3 {
        let (_, is_stored) = store(&first, number);
        assert!(!is_stored);
        first.evict_device();
        first.cache.host().tree().evict(u32::MAX);
    }
    let (rows, is_stored) = store(&first, 4);
    assert!(is_stored, "the worker is gone");
    first.check_conserved();

    left.store(3, Relaxed);
    let reads = Hooked::reads(memory, move |_, _| {
        strike();
        Ok(())
    });
    let second = world(Arc::new(reads));
    for _ in 0..3 {
        assert!(!is_found(&second, 4, &rows));
        let pages = second.cache.host().pools().stats().pages;
        assert_eq!(pages.free, pages.capacity, "pages of a fetch that is over");
    }
    let fetches = second.cache.storage_counts().unwrap().fetches;
    assert_eq!((fetches.started, fetches.failed, fetches.joined), (3, 3, 0));
    assert!(
        is_found(&second, 4, &rows),
        "it still joins a fetch that is over"
    );
    second.check_conserved();
}

/// A salt that is too long is refused with its length; the longest one is a namespace of its own.
#[test]
fn a_salt_that_is_too_long_is_refused_by_its_length() {
    let longest =
        (0..100_000).take_while(|len| Namespace::new(&schema(), 256, &vec![7; *len]).is_ok());
    let longest = longest.last().expect("no salt is short enough");
    assert!((16..100_000 - 1).contains(&longest), "{longest}");
    let error = Namespace::new(&schema(), 256, &vec![7; longest + 1]).unwrap_err();
    assert!(
        error.to_string().contains(&(longest + 1).to_string()),
        "{error}"
    );
    let one = Namespace::new(&schema(), 256, &vec![7; longest]).unwrap();
    let other = Namespace::new(&schema(), 256, &vec![7; longest - 1]).unwrap();
    assert_ne!(one.digest(), other.digest());
}
