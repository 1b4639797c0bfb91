//! [`Life`]: a cache over a directory, what must be in it, and what must be true after every step.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvgate_hicache::cache::{Backup, Found, Origin};
use kvgate_hicache::identity::Namespace;
use kvgate_hicache::log::{LogConfig, Mode, SecondChance, SegmentLog};
use kvgate_hicache::storage::{Place, PrefetchPolicy, StorageConfig, StorageTier};
use kvgate_hicache::testkit::Faulty;
use kvgate_kvcache::canary::page_digests;
use kvgate_kvcache::{Room, WriteLease};
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::Arc;

use crate::common::{Sizes, World, patience, schema};
use crate::disk::{self, Faults, RoughDisk};
use crate::rows::{PAGE, expected, tokens_of, write_rows};

const SIZES: Sizes = Sizes {
    device: (8, 8),
    host: (6, 4),
};

/// Something that happens to the directory, or to the calls of the tier.
#[derive(Clone, Debug)]
pub enum Fault {
    ShortReads(u32),
    BrokenReads(u32),
    BrokenWrites(u32),
    FullWrites(u32),
    FailEvery(u64),
    /// No answer comes in time.
    Slow,
    ClockJump(bool),
    /// A segment, and a place in it.
    Flip(u8, u32),
    Torn(u8, u32),
    Cut(u8, u32),
    Vanished(u8),
}

#[derive(Clone, Debug)]
pub enum Operation {
    /// A request of a conversation: goes on from what is there, computes up to so many blocks, and is backed up.
    Turn(u32, u32),
    Ask(u32, u32),
    /// The same with a deadline that has passed.
    AskLate(u32, u32),
    /// Three at once, of this conversation and the next ones.
    Crowd(u32, u32),
    EvictDevice(u32),
    EvictHost(u32),
    EvictEnds(u32),
    Prune(u64),
    Fault(Fault),
    /// The device and the tier answer again.
    Well,
    Repair,
    /// An orderly end, and a new start.
    Restart,
    /// An end between two requests, without a word.
    Kill,
    /// An end while a turn is being stored.
    KillWithin(u32, u32),
    /// An end that loses the last bytes of the newest segment.
    KillAndCut(u32),
}

/// How often something happened, so that a property that was never put to the test is noticed.
#[derive(Debug, Default)]
pub struct Seen {
    device: AtomicU64,
    host: AtomicU64,
    storage: AtomicU64,
    stored: AtomicU64,
    failed_stores: AtomicU64,
    read_misses: AtomicU64,
    evicted: AtomicU64,
    kept_over_a_kill: AtomicU64,
}

impl Seen {
    fn all(&self) -> [&AtomicU64; 8] {
        [
            &self.device,
            &self.host,
            &self.storage,
            &self.stored,
            &self.failed_stores,
            &self.read_misses,
            &self.evicted,
            &self.kept_over_a_kill,
        ]
    }

    pub fn add(&self, other: &Seen) {
        for (sum, more) in self.all().into_iter().zip(other.all()) {
            sum.fetch_add(more.load(Relaxed), Relaxed);
        }
    }

    /// Everything has happened.
    pub fn check(&self) {
        assert!(
            self.all().iter().all(|count| count.load(Relaxed) > 0),
            "{self:?}"
        );
    }
}

/// A cache over a directory.
pub struct Life {
    folder: tempfile::TempDir,
    faults: Arc<Faults>,
    log_config: LogConfig,
    tier: Option<Arc<Faulty<SegmentLog>>>,
    world: Option<World>,
    /// Prefixes that are in the log, all of them, as far as nobody has touched it: conversation and blocks.
    stored: BTreeSet<(u32, u32)>,
    /// Bytes of the files were changed, and no repair has looked at them since.
    has_bad_bytes: bool,
    /// A file has no name any more, and the log has not been opened since.
    has_lost_name: bool,
    tier_is_well: bool,
    /// Lookups of this process, and the tokens that they found.
    lookups: u64,
    hit_tokens: u64,
    /// Records that a repair of this process has copied.
    copied: u64,
    seen: Seen,
}

impl Life {
    pub fn new(is_tight: bool, is_durable: bool) -> Life {
        let log_config = LogConfig {
            capacity_bytes: if is_tight { 512 << 10 } else { 16 << 20 },
            segment_bytes: 128 << 10,
            durability: match is_durable {
                true => kvgate_hicache::log::Durability::Batch,
                false => kvgate_hicache::log::Durability::None,
            },
            ..LogConfig::default()
        };
        let mut life = Life {
            folder: tempfile::tempdir().unwrap(),
            faults: Arc::default(),
            log_config,
            tier: None,
            world: None,
            stored: BTreeSet::new(),
            has_bad_bytes: false,
            has_lost_name: false,
            tier_is_well: true,
            lookups: 0,
            hit_tokens: 0,
            copied: 0,
            seen: Seen::default(),
        };
        life.start();
        life
    }

    fn world(&self) -> &World {
        self.world.as_ref().unwrap()
    }

    fn log(&self) -> &SegmentLog {
        self.tier.as_ref().unwrap().inner()
    }

    fn start(&mut self) {
        self.make_well();
        let medium = Arc::new(RoughDisk::new(self.folder.path(), &self.faults));
        let policy = Box::<SecondChance>::default();
        let config = self.log_config.clone();
        let log = SegmentLog::open(medium, config, policy, Mode::ReadWrite).unwrap();
        let listed = disk::segments(self.folder.path());
        let of_log = |path: &&std::path::PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            !log.recovery().foreign.contains(&name)
        };
        let bytes: u64 = listed
            .iter()
            .filter(of_log)
            .map(|path| std::fs::metadata(path).unwrap().len())
            .sum();
        let stats = log.stats();
        assert_eq!(stats.file_bytes, bytes, "bytes of the files");
        assert_eq!((stats.held_bytes, stats.stuck_bytes), (0, 0));
        let tier = Arc::new(Faulty::new(log, 0, 0));
        let config = StorageConfig {
            prefetch: PrefetchPolicy::Wait,
            ..StorageConfig::new(vec![StorageTier {
                tier: tier.clone(),
                place: Place::Local,
            }])
        };
        let namespace = Namespace::new(&schema(), PAGE, b"").unwrap();
        let cache = World::local(&SIZES).cache;
        self.world = Some(World {
            cache: cache.with_storage(namespace, config).unwrap(),
            net: None,
        });
        self.tier = Some(tier);
        self.has_lost_name = false;
        (self.lookups, self.hit_tokens, self.copied) = (0, 0, 0);
    }

    fn make_well(&mut self) {
        self.faults.clear();
        if let Some(tier) = &self.tier {
            tier.set(0, 0);
        }
        self.tier_is_well = true;
    }

    fn is_well(&self) -> bool {
        self.tier_is_well && self.faults.are_over()
    }

    pub fn step(&mut self, operation: &Operation) {
        match *operation {
            Operation::Turn(number, blocks) => {
                self.turn(number, blocks);
            }
            Operation::Ask(number, count) => self.ask_and_check(number, count, patience()),
            Operation::AskLate(number, count) => self.ask_and_check(number, count, Deadline::now()),
            Operation::Crowd(number, count) => self.crowd(number, count),
            Operation::EvictDevice(pages) => {
                self.world().cache.device().tree().evict(pages);
            }
            Operation::EvictHost(pages) => {
                self.world().cache.host().tree().evict(pages);
            }
            Operation::EvictEnds(count) => {
                self.world().cache.host().tree().evict_checkpoints(count);
            }
            Operation::Prune(bytes) => self.log().prune(bytes, patience()).unwrap(),
            Operation::Fault(ref fault) => self.strike(fault),
            Operation::Well => self.make_well(),
            Operation::Repair => self.repair(),
            Operation::Restart => self.restart(),
            Operation::Kill => self.kill(),
            Operation::KillWithin(number, blocks) => {
                let is_begun = self.begin_turn(number, blocks);
                drop(is_begun);
                self.kill();
            }
            Operation::KillAndCut(bytes) => {
                self.seen_figures();
                self.world = None;
                self.tier = None;
                if let Some(last) = disk::segments(self.folder.path()).last() {
                    disk::cut(last, u64::from(bytes));
                }
                self.lose(true);
                self.start();
            }
        }
        self.world().run();
        self.check_figures(operation);
    }

    /// What was in the log need not be there any more.
    fn lose(&mut self, has_bad_bytes: bool) {
        self.stored.clear();
        self.has_bad_bytes |= has_bad_bytes;
    }

    fn strike(&mut self, fault: &Fault) {
        let tier = self.tier.as_ref().unwrap();
        let paths = disk::segments(self.folder.path());
        let pick = |at: u8| paths.get(usize::from(at) % paths.len().max(1));
        match *fault {
            Fault::ShortReads(count) => self.faults.short_reads.store(count, Relaxed),
            Fault::BrokenReads(count) => self.faults.broken_reads.store(count, Relaxed),
            Fault::BrokenWrites(count) => self.faults.broken_writes.store(count, Relaxed),
            Fault::FullWrites(count) => self.faults.full_writes.store(count, Relaxed),
            Fault::FailEvery(calls) => {
                tier.set(calls, 0);
                self.tier_is_well = false;
            }
            Fault::Slow => {
                tier.set(0, u64::MAX);
                self.tier_is_well = false;
            }
            Fault::ClockJump(is_forward) => disk::jump(self.folder.path(), is_forward),
            Fault::Flip(segment, at) => {
                pick(segment)
                    .into_iter()
                    .for_each(|path| disk::flip(path, at.into()));
                self.lose(true);
            }
            Fault::Torn(segment, at) => {
                pick(segment)
                    .into_iter()
                    .for_each(|path| disk::tear(path, at.into()));
                self.lose(true);
            }
            Fault::Cut(segment, bytes) => {
                pick(segment)
                    .into_iter()
                    .for_each(|path| disk::cut(path, bytes.into()));
                self.lose(true);
            }
            Fault::Vanished(segment) => {
                pick(segment)
                    .into_iter()
                    .for_each(|path| std::fs::remove_file(path).unwrap());
                self.lose(false);
                self.has_lost_name = true;
            }
        }
    }

    fn repair(&mut self) {
        let before = self.log().stats().stored_count;
        let repaired = self.log().repair(patience());
        self.copied += self.log().stats().stored_count - before;
        if repaired.is_ok() && self.is_well() {
            self.has_bad_bytes = false;
        }
    }

    fn restart(&mut self) {
        self.make_well();
        self.world().run();
        self.seen_figures();
        self.world.take().unwrap().check_conserved();
        let tier = Arc::into_inner(self.tier.take().unwrap()).expect("nobody uses the tier");
        let closed = tier.into_inner().close(patience());
        assert!(
            closed.is_ok() || self.has_bad_bytes || self.has_lost_name,
            "{closed:?}"
        );
        self.start();
    }

    fn kill(&mut self) {
        self.seen_figures();
        let kept = self.stored.len() as u64;
        self.seen.kept_over_a_kill.fetch_add(kept, Relaxed);
        self.world = None;
        self.tier = None;
        self.start();
    }

    /// A lookup, with the length that it must and may have.
    fn ask(&mut self, number: u32, count: u32, deadline: Deadline) -> Option<Found> {
        let prompt = tokens_of(number, count);
        let (is_well, is_late) = (self.is_well(), deadline.has_passed());
        let before = self.world().cache.storage_counts().unwrap();
        let found = self.world().cache.lookup_within(&prompt, deadline);
        let tokens = found.as_ref().map_or(0, |found| found.tokens);
        assert!(
            tokens < count && tokens.is_multiple_of(PAGE),
            "{tokens} of {count}"
        );
        self.lookups += 1;
        self.hit_tokens += u64::from(tokens);
        let must = self.stored.iter().filter(|(number, blocks)| {
            blocks * PAGE < count && prompt.starts_with(&tokens_of(*number, blocks * PAGE))
        });
        let must = must.map(|(_, blocks)| blocks * PAGE).max().unwrap_or(0);
        if is_well && !is_late {
            assert!(
                tokens >= must,
                "{must} tokens of {number} are stored, {tokens} found"
            );
        }
        self.world().run();
        let after = self.world().cache.storage_counts().unwrap();
        let misses = |counts: &kvgate_hicache::storage::StorageCounts| -> u64 {
            counts.tiers[0].misses.values().sum()
        };
        let is_less = |counts: &kvgate_hicache::storage::StorageCounts| {
            counts.fetches.shortened + counts.fetches.failed
        };
        assert!(
            is_less(&after) == is_less(&before) || misses(&after) > misses(&before),
            "less came than was promised, and no figure says why: {after:?}"
        );
        if let Some(found) = &found {
            let count = match found.origin {
                Origin::Device => &self.seen.device,
                Origin::Host => &self.seen.host,
                Origin::Storage | Origin::Remote => &self.seen.storage,
            };
            count.fetch_add(1, Relaxed);
        }
        found
    }

    /// Goes on from what was found; its rows are those of a run without a cache.
    fn resume(&self, number: u32, found: Found, total: u32) -> Option<WriteLease> {
        let tokens = found.tokens;
        let device = self.world().cache.device();
        device.make_room(total.div_ceil(PAGE) - tokens / PAGE, 4);
        let resumed = device
            .pools()
            .resume(found.lease, total, Room(number.into()));
        let mut lease = match resumed {
            Ok(lease) => lease,
            Err(refused) => {
                assert!(refused.1.is_retryable(), "{}", refused.1);
                return None;
            }
        };
        for layer in device.pools().schema().layers() {
            lease.attach_layer(layer, patience()).unwrap();
        }
        let restored = page_digests(device.pools(), lease.block_table(), tokens);
        let wrong = restored
            .iter()
            .zip(&expected(number, tokens / PAGE))
            .find(|(a, b)| a != b)
            .map(|(restored, _)| *restored);
        assert_eq!(wrong, None, "{tokens} tokens of {number} came back wrong");
        assert_eq!(restored.len(), expected(number, tokens / PAGE).len());
        Some(lease)
    }

    fn ask_and_check(&mut self, number: u32, count: u32, deadline: Deadline) {
        if let Some(found) = self.ask(number, count, deadline) {
            let total = found.tokens + 8;
            drop(self.resume(number, found, total));
        }
    }

    fn crowd(&mut self, number: u32, count: u32) {
        let cache = &self.world().cache;
        let ask = |number: u32| move || cache.lookup_within(&tokens_of(number, count), patience());
        let numbers = [number, number % 6 + 1, number];
        let found: Vec<_> = std::thread::scope(|scope| {
            let threads = numbers.map(|number| scope.spawn(ask(number)));
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        self.world().run();
        self.lookups += 3;
        for (number, found) in numbers.into_iter().zip(found) {
            let Some(found) = found else { continue };
            self.hit_tokens += u64::from(found.tokens);
            let total = found.tokens + 8;
            drop(self.resume(number, found, total));
        }
    }

    /// Answers the lease of the request when its backup has begun.
    fn begin_turn(&mut self, number: u32, blocks: u32) -> Option<WriteLease> {
        let end = blocks * PAGE;
        let prompt = tokens_of(number, end);
        let found = self.ask(number, end, patience());
        let from = found.as_ref().map_or(0, |found| found.tokens);
        let device = self.world().cache.device();
        device.make_room(blocks + 1 - from / PAGE, 5);
        let lease = match found {
            Some(found) => self.resume(number, found, end + 8),
            None => device.pools().reserve(end + 8, Room(number.into())).ok(),
        };
        // Without room the request waits, in a real host.
        let mut lease = lease?;
        let pools = device.pools();
        let mut checkpoint = pools.reserve_checkpoint(end, Room(number.into())).ok()?;
        let written = write_rows(pools, &mut lease, number, from, end);
        for layer in pools.schema().layers() {
            checkpoint.save_layer(layer, &lease).unwrap();
        }
        let checkpoint = checkpoint.finish().unwrap();
        let published = device
            .tree()
            .publish(&prompt, &mut lease, &written, Some(checkpoint));
        published.unwrap();
        let begun = self.world().cache.backup(&prompt).unwrap();
        assert_ne!(begun, Backup::NotThere);
        (begun == Backup::Started).then_some(lease)
    }

    fn turn(&mut self, number: u32, blocks: u32) {
        let before = self.world().cache.storage_counts().unwrap().stores;
        let lease = self.begin_turn(number, blocks);
        self.world().run();
        let after = self.world().cache.storage_counts().unwrap().stores;
        let is_stored = lease.is_some() && after.complete == before.complete + 1;
        if is_stored && !self.has_bad_bytes && !self.has_lost_name {
            self.stored.insert((number, blocks));
        }
    }

    /// What must be true between two steps, whatever happened.
    fn check_figures(&mut self, operation: &Operation) {
        let cache = &self.world.as_ref().unwrap().cache;
        let (counts, storage) = (cache.counts(), cache.storage_counts().unwrap());
        assert_eq!(cache.open_moves(), (0, 0));
        assert_eq!(cache.open_storage(), (0, 0));
        let hits = counts.device_hits + counts.host_hits + counts.storage_hits;
        assert_eq!(hits + counts.misses, self.lookups, "after {operation:?}");
        assert_eq!(counts.hit_tokens, self.hit_tokens, "after {operation:?}");
        for moves in [counts.backups, counts.loads] {
            assert_eq!((moves.started, moves.failed), (moves.landed, 0));
        }
        let (stores, fetches) = (storage.stores, storage.fetches);
        assert_eq!(
            stores.queued,
            stores.complete + stores.failed,
            "after {operation:?}"
        );
        let ended = fetches.published + fetches.empty + fetches.no_room;
        assert_eq!(fetches.started, ended + fetches.shared + fetches.failed);
        let (tier, log) = (&storage.tiers[0], self.log().stats());
        assert!(stores.failed == 0 || tier.failed > 0, "{storage:?}");
        assert_eq!(
            tier.stored + self.copied,
            log.stored_count,
            "after {operation:?}"
        );
        assert_eq!(tier.read_records, log.hit_count);
        for (label, count) in &tier.misses {
            let is_of_the_log = !matches!(*label, "late" | "unavailable");
            assert!(!is_of_the_log || log.misses_of(label) == *count, "{label}");
        }
        for side in [cache.device(), cache.host()] {
            let stats = side.pools().stats();
            assert!(stats.is_conserved(), "{stats:?} after {operation:?}");
            for space in [stats.pages, stats.windows, stats.requests] {
                assert_eq!(space.draining, 0, "after {operation:?}");
            }
        }
        let gone = self.log().drain_evicted();
        self.seen.evicted.fetch_add(log.evicted_segments, Relaxed);
        if !gone.is_empty() {
            self.stored.clear();
        }
    }

    fn seen_figures(&self) {
        let storage = self.world().cache.storage_counts().unwrap();
        let add = |sum: &AtomicU64, more| sum.fetch_add(more, Relaxed);
        add(&self.seen.stored, storage.stores.complete);
        add(&self.seen.failed_stores, storage.stores.failed);
        add(
            &self.seen.read_misses,
            storage.tiers[0].misses.values().sum(),
        );
    }

    /// Every length that is published anywhere can be restored from there; then everything comes back.
    pub fn end(mut self) -> Seen {
        self.make_well();
        for number in 1..=6 {
            let prompt = tokens_of(number, 4 * PAGE + 1);
            if let Some(fetch) = self.world().cache.prefetch(&prompt) {
                let published = fetch.wait(patience()).expect("a fetch ends");
                let (_, resumable) = self.world().cache.host().tree().probe(&prompt);
                assert!(
                    resumable >= published,
                    "{published} published, {resumable} there"
                );
            }
            self.world().run();
            let (_, resumable) = self.world().cache.host().tree().probe(&prompt);
            self.world().cache.device().tree().evict(u32::MAX);
            let found = self.ask(number, 4 * PAGE + 1, patience());
            assert!(found.as_ref().map_or(0, |found| found.tokens) >= resumable);
            if let Some(found) = found {
                let total = found.tokens + 8;
                assert!(self.resume(number, found, total).is_some(), "there is room");
            }
            self.world().run();
        }
        self.restart();
        self.seen
    }
}
