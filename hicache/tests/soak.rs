//! A long life of a cache that several threads use at once: nothing is lost, nothing is kept, and no byte is wrong.
//!
//! `cargo xtask soak` runs it with a million operations; the tests with a few thousand.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

mod common;
#[path = "lives/rows.rs"]
mod rows;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use common::{Sizes, World, patience, schema};
use kvgate_hicache::cache::Found;
use kvgate_hicache::identity::Namespace;
use kvgate_hicache::log::{Directory, Durability, LogConfig, Medium, SegmentLog};
use kvgate_hicache::storage::{Place, PrefetchPolicy, StorageConfig, StorageTier};
use kvgate_kvcache::canary::page_digests;
use kvgate_kvcache::{Room, WriteLease};
use kvgate_transfer::sync::Arc;
use rows::{PAGE, expected, tokens_of, write_rows};

const SIZES: Sizes = Sizes {
    device: (24, 24),
    host: (12, 8),
};
const THREADS: u64 = 3;
/// Operations of one thread between two looks at everything.
const ROUND: u64 = 2_000;
/// Prefixes that a thread keeps at most.
const KEPT: usize = 2;

struct Random(u64);

impl Random {
    /// A number below `limit`.
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

/// What the threads did.
#[derive(Debug, Default)]
struct Done {
    lookups: AtomicU64,
    /// Prefixes whose every row was compared.
    compared: AtomicU64,
    computed: AtomicU64,
    /// Requests that would have waited for room.
    without_room: AtomicU64,
}

struct Worker<'w> {
    world: &'w World,
    done: &'w Done,
    random: Random,
    kept: Vec<Found>,
}

impl Worker<'_> {
    fn run(mut self) {
        for _ in 0..ROUND {
            self.step();
        }
    }

    fn step(&mut self) {
        let (number, blocks) = (
            self.random.below(6) as u32 + 1,
            self.random.below(4) as u32 + 1,
        );
        let count = blocks * PAGE + 1 + self.random.below(u64::from(PAGE)) as u32;
        let (device, host) = (self.world.cache.device(), self.world.cache.host());
        match self.random.below(100) {
            0..40 => self.ask(number, count, false),
            40..60 => self.ask(number, count, true),
            60..65 => drop(self.world.cache.prefetch(&tokens_of(number, count))),
            65..72 => drop(self.turn(number, blocks)),
            72..88 => drop(self.kept.pop()),
            88..91 => drop(device.tree().evict(self.random.below(8) as u32)),
            91..97 => drop(host.tree().evict(self.random.below(6) as u32)),
            97..99 => drop(host.tree().evict_checkpoints(1)),
            _ => self.world.cache.settle(),
        }
    }

    fn ask(&mut self, number: u32, count: u32, has_storage: bool) {
        let prompt = tokens_of(number, count);
        self.done.lookups.fetch_add(1, Relaxed);
        let found = match has_storage {
            true => self.world.cache.lookup_within(&prompt, patience()),
            false => self.world.cache.lookup(&prompt),
        };
        let Some(found) = found else { return };
        assert!(found.tokens < count && found.tokens.is_multiple_of(PAGE));
        match self.random.below(16) {
            0 => {
                let total = found.tokens + 8;
                drop(self.resume(number, found, total));
            }
            1..6 if self.kept.len() < KEPT => self.kept.push(found),
            _ => drop(found),
        }
    }

    /// Goes on from a prefix, every row of which is as it was computed.
    fn resume(&self, number: u32, found: Found, total: u32) -> Option<WriteLease> {
        let (device, tokens) = (self.world.cache.device(), found.tokens);
        device.make_room(total.div_ceil(PAGE) - tokens / PAGE, 4);
        let Ok(mut lease) = device
            .pools()
            .resume(found.lease, total, Room(number.into()))
        else {
            self.done.without_room.fetch_add(1, Relaxed);
            return None;
        };
        for layer in device.pools().schema().layers() {
            lease.attach_layer(layer, patience()).unwrap();
        }
        let restored = page_digests(device.pools(), lease.block_table(), tokens);
        let wrong = restored != expected(number, tokens / PAGE);
        assert!(!wrong, "{tokens} tokens of {number} are wrong");
        self.done.compared.fetch_add(1, Relaxed);
        Some(lease)
    }

    fn turn(&self, number: u32, blocks: u32) -> Option<()> {
        let (device, end) = (self.world.cache.device(), blocks * PAGE);
        let prompt = tokens_of(number, end);
        self.done.lookups.fetch_add(1, Relaxed);
        let found = self.world.cache.lookup_within(&prompt, patience());
        let from = found.as_ref().map_or(0, |found| found.tokens);
        device.make_room(blocks + 1 - from / PAGE, 5);
        let lease = match found {
            Some(found) => self.resume(number, found, end + 8),
            None => device.pools().reserve(end + 8, Room(number.into())).ok(),
        };
        let checkpoint = device
            .pools()
            .reserve_checkpoint(end, Room(number.into()))
            .ok();
        let (Some(mut lease), Some(mut checkpoint)) = (lease, checkpoint) else {
            self.done.without_room.fetch_add(1, Relaxed);
            return None;
        };
        let written = write_rows(device.pools(), &mut lease, number, from, end);
        for layer in device.pools().schema().layers() {
            checkpoint.save_layer(layer, &lease).unwrap();
        }
        let checkpoint = checkpoint.finish().unwrap();
        let published = device
            .tree()
            .publish(&prompt, &mut lease, &written, Some(checkpoint));
        published.unwrap();
        self.done.computed.fetch_add(1, Relaxed);
        let _begun_or_not = self.world.cache.backup(&prompt).unwrap();
        Some(())
    }
}

/// The figures of everything that ran, summed over the lives of the process.
#[derive(Debug, Default)]
struct Sums {
    device_hits: u64,
    host_hits: u64,
    storage_hits: u64,
    loads: u64,
    stores: u64,
    records_read: u64,
    written_bytes: u64,
    evicted_records: u64,
    restarts: u64,
}

fn open(folder: &std::path::Path) -> (Arc<SegmentLog>, World) {
    let config = LogConfig {
        capacity_bytes: 512 << 10,
        segment_bytes: 128 << 10,
        durability: Durability::None,
        ..LogConfig::default()
    };
    let log = Arc::new(SegmentLog::open_directory(folder, config).unwrap());
    let listed = Directory::open(folder).unwrap().list().unwrap();
    let segments = listed
        .iter()
        .filter(|(name, _)| name.starts_with("segment-"));
    let stats = log.stats();
    assert_eq!(
        stats.file_bytes,
        segments.map(|(_, bytes)| bytes).sum::<u64>()
    );
    assert_eq!((stats.held_bytes, stats.stuck_bytes), (0, 0));
    let tiers = vec![StorageTier {
        tier: log.clone(),
        place: Place::Local,
    }];
    let config = StorageConfig {
        prefetch: PrefetchPolicy::Wait,
        ..StorageConfig::new(tiers)
    };
    let namespace = Namespace::new(&schema(), PAGE, b"").unwrap();
    let cache = World::local(&SIZES).cache.with_storage(namespace, config);
    let world = World {
        cache: cache.unwrap(),
        net: None,
    };
    (log, world)
}

/// Pins, pages and bytes of files are conserved, and the figures agree with each other.
fn check(log: &SegmentLog, world: &World, lookups: u64, sums: &mut Sums) {
    let cache = &world.cache;
    assert!(cache.wait(patience()), "something never ends");
    let (counts, storage, stats) = (cache.counts(), cache.storage_counts().unwrap(), log.stats());
    assert_eq!((cache.open_moves(), cache.open_storage()), ((0, 0), (0, 0)));
    let hits = counts.device_hits + counts.host_hits + counts.storage_hits;
    assert_eq!(hits + counts.misses, lookups);
    for moves in [counts.backups, counts.loads] {
        assert_eq!((moves.started, moves.failed), (moves.landed, 0));
    }
    let (stores, fetches) = (storage.stores, storage.fetches);
    assert_eq!((stores.queued, stores.failed), (stores.complete, 0));
    let ended = fetches.published + fetches.empty + fetches.no_room + fetches.shared;
    assert_eq!(fetches.started, ended + fetches.failed);
    let tier = &storage.tiers[0];
    assert_eq!(
        (tier.stored, tier.read_records),
        (stats.stored_count, stats.hit_count)
    );
    for side in [cache.device(), cache.host()] {
        side.tree().evict(u32::MAX);
        side.tree().evict_checkpoints(u32::MAX);
        let stats = side.pools().stats();
        for space in [stats.pages, stats.windows, stats.requests] {
            assert_eq!(
                space.free, space.capacity,
                "a pin that nobody holds: {stats:?}"
            );
        }
    }
    sums.device_hits += counts.device_hits;
    sums.host_hits += counts.host_hits;
    sums.storage_hits += counts.storage_hits;
    sums.loads += counts.loads.landed;
    sums.stores += stores.complete;
    sums.records_read += tier.read_records;
    sums.written_bytes += stats.written_bytes;
    sums.evicted_records += stats.evicted_count;
}

#[test]
fn a_long_life_of_many_threads_conserves_pins_pages_and_bytes() {
    let wished = std::env::var("KVGATE_SOAK_OPERATIONS").ok();
    let operations: u64 = wished.map_or(12_000, |count| {
        count.parse().expect("a number of operations")
    });
    let folder = tempfile::tempdir().unwrap();
    let (began, mut sums) = (Instant::now(), Sums::default());
    let (done, mut before, mut spent) = (Done::default(), 0, 0);
    let (mut log, mut world) = open(folder.path());
    while spent < operations {
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let worker = Worker {
                    world: &world,
                    done: &done,
                    random: Random(spent + thread),
                    kept: Vec::new(),
                };
                scope.spawn(move || worker.run());
            }
        });
        spent += THREADS * ROUND;
        let lookups = done.lookups.load(Relaxed);
        check(&log, &world, lookups - before, &mut sums);
        before = lookups;
        drop(world);
        // Every second life ends without a word.
        let log_alone = Arc::into_inner(log).expect("nobody uses the log");
        match sums.restarts.is_multiple_of(2) {
            true => log_alone.close(patience()).unwrap(),
            false => drop(log_alone),
        }
        sums.restarts += 1;
        (log, world) = open(folder.path());
    }
    let seconds = began.elapsed().as_secs_f64();
    println!("{spent} operations in {seconds:.1} s: {done:?} {sums:?}");
    let all = [
        sums.device_hits,
        sums.host_hits,
        sums.storage_hits,
        sums.loads,
        sums.stores,
        sums.records_read,
        sums.evicted_records,
        done.compared.load(Relaxed),
        done.computed.load(Relaxed),
    ];
    assert!(all.iter().all(|count| *count > 0), "{sums:?} {done:?}");
}
