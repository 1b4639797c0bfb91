//! Disks that are full, broken, slow, read-only or gone, and a model that any life of a log is compared
//! with.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use kvgate_hicache::log::{
    Directory, Durability, LogConfig, Medium, Mode, Oldest, SecondChance, SegmentLog, Stored,
    verify,
};
use kvgate_hicache::record::RecordKind::{self, Block, Checkpoint};
use kvgate_hicache::testkit::{Kept, Sample, SimDisk};
use kvgate_hicache::{Error, ErrorKind, Miss};
use kvgate_transfer::Deadline;
use proptest::prelude::*;

fn soon() -> Deadline {
    Deadline::after_ms(10_000)
}

fn small() -> LogConfig {
    LogConfig {
        capacity_bytes: 128 << 10,
        segment_bytes: 40 << 10,
        ..LogConfig::default()
    }
}

fn open(disk: &SimDisk) -> SegmentLog {
    let medium = Arc::new(disk.clone());
    SegmentLog::open(
        medium,
        small(),
        Box::new(SecondChance::default()),
        Mode::ReadWrite,
    )
    .unwrap()
}

fn put(log: &SegmentLog, sample: &Sample, k: u32) -> Result<Stored, Error> {
    sample.with_record(Block, k, |record| log.append(record, soon()))
}

fn read(log: &SegmentLog, sample: &Sample, k: u32) -> Result<(), Miss> {
    sample.check_read(Block, k, |wanted, into| log.read(wanted, into))
}

#[test]
fn a_second_owner_is_refused_until_the_first_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let log = SegmentLog::open_directory(folder.path(), LogConfig::default()).unwrap();
    let second = SegmentLog::open_directory(folder.path(), LogConfig::default()).unwrap_err();
    assert!(
        matches!(second.kind(), ErrorKind::Locked { .. }),
        "{second}"
    );
    let look = verify(&Directory::open(folder.path()).unwrap()).unwrap_err();
    assert!(matches!(look.kind(), ErrorKind::Locked { .. }), "{look}");
    drop(log);
    assert!(SegmentLog::open_directory(folder.path(), LogConfig::default()).is_ok());
}

#[test]
fn a_full_disk_evicts_and_goes_on() {
    let (sample, disk) = (Sample::small(30), SimDisk::new());
    let log = open(&disk);
    for k in 0..8 {
        put(&log, &sample, k).unwrap();
    }
    // Less than the log may use, as if somebody else had filled the disk.
    disk.set_capacity(Some(disk.file_bytes() + 100));
    for k in 8..16 {
        put(&log, &sample, k).unwrap();
        assert_eq!(read(&log, &sample, k), Ok(()));
    }
    let stats = log.stats();
    assert!(stats.evicted_count > 0);
    assert_eq!(stats.file_bytes, disk.file_bytes());
    // Not even one segment fits.
    disk.set_capacity(Some(0));
    let error = put(&log, &sample, 20).unwrap_err();
    assert!(error.is_retryable(), "{error}");
    disk.set_capacity(None);
    put(&log, &sample, 20).unwrap();
    assert_eq!(read(&log, &sample, 20), Ok(()));
    log.close(soon()).unwrap();
    assert!(verify(&disk).unwrap().findings.is_empty());
}

/// A file that cannot be removed is counted, and the next segment goes.
#[test]
fn an_undeletable_file_does_not_stop_eviction() {
    let (sample, disk) = (Sample::small(40), SimDisk::new());
    let log = open(&disk);
    for k in 0..10 {
        put(&log, &sample, k).unwrap();
    }
    let oldest = disk
        .names()
        .into_iter()
        .find(|name| name.starts_with("segment"))
        .unwrap();
    disk.set_undeletable(Some(&oldest));
    // It cannot be emptied either.
    disk.fail_cuts(1);
    for k in 10..20 {
        put(&log, &sample, k).unwrap();
    }
    assert!(log.stats().stuck_bytes > 0);
    assert_eq!(log.stats().file_bytes, disk.file_bytes());
    disk.set_undeletable(None);
    for k in 20..30 {
        put(&log, &sample, k).unwrap();
        assert_eq!(read(&log, &sample, k), Ok(()));
    }
    assert_eq!(log.stats().stuck_bytes, 0);
    assert_eq!(log.stats().file_bytes, disk.file_bytes());
}

#[test]
fn errors_and_short_transfers_are_misses_or_nothing() {
    let (sample, disk) = (Sample::small(8), SimDisk::new());
    let log = open(&disk);
    disk.set_short_io(true);
    for k in 0..4 {
        put(&log, &sample, k).unwrap();
        assert_eq!(read(&log, &sample, k), Ok(()));
    }
    disk.fail(0, 0, 1);
    assert!(matches!(read(&log, &sample, 1), Err(Miss::Io { .. })));
    // The record was not at fault.
    assert_eq!(read(&log, &sample, 1), Ok(()));
    assert_eq!((log.stats().misses_of("io"), log.stats().hit_count), (1, 5));
}

/// Segments that were left without an index have gone since: nothing is kept free for their indexes.
#[test]
fn syncs_that_fail_again_and_again_cost_no_capacity() {
    let (sample, disk) = (Sample::small(4), SimDisk::new());
    let log = open(&disk);
    for _ in 0..60 {
        put(&log, &sample, 0).unwrap();
        disk.fail(0, 1, 0);
        put(&log, &sample, 1).unwrap_err();
        log.prune(0, soon()).unwrap();
    }
    let found = (0..4).map(|k| put(&log, &sample, k).map(drop));
    let found: Result<Vec<()>, Error> = found.collect();
    assert!(found.is_ok(), "{found:?}");
    assert!((0..4).all(|k| read(&log, &sample, k) == Ok(())));
}

#[test]
fn a_directory_that_is_gone_fails_puts_and_keeps_what_is_open() {
    let (sample, disk) = (Sample::small(20), SimDisk::new());
    let log = open(&disk);
    put(&log, &sample, 0).unwrap();
    disk.set_gone(true);
    let failed = (1..12).filter(|k| put(&log, &sample, *k).is_err()).count();
    assert!(failed > 0, "no new segment can be made");
    assert_eq!(read(&log, &sample, 0), Ok(()));
    disk.set_gone(false);
    put(&log, &sample, 12).unwrap();
    assert_eq!(read(&log, &sample, 12), Ok(()));
}

#[test]
fn a_read_only_log_reads_and_says_why_it_does_not_write() {
    let (sample, disk) = (Sample::small(4), SimDisk::new());
    let log = open(&disk);
    put(&log, &sample, 0).unwrap();
    log.close(soon()).unwrap();
    let before = disk.names();
    let medium: Arc<dyn Medium> = Arc::new(disk.clone());
    let log = SegmentLog::open(medium, small(), Box::new(Oldest), Mode::ReadOnly).unwrap();
    assert_eq!(read(&log, &sample, 0), Ok(()));
    let error = put(&log, &sample, 1).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::ReadOnly { .. }),
        "{error}"
    );
    assert!(log.stats().is_read_only);
    log.close(soon()).unwrap();
    assert_eq!(disk.names(), before);
}

#[test]
fn impossible_configurations_and_records_are_refused() {
    let open = |config| {
        let medium = Arc::new(SimDisk::new());
        SegmentLog::open(medium, config, Box::new(Oldest), Mode::ReadWrite)
    };
    let error = open(LogConfig {
        segment_bytes: 100,
        ..small()
    });
    let text = error.unwrap_err().to_string();
    assert!(text.starts_with("segment_bytes is 100"), "{text}");
    assert!(
        open(LogConfig {
            capacity_bytes: 4096,
            ..small()
        })
        .is_err()
    );
    assert!(
        open(LogConfig {
            group_bytes: 0,
            ..small()
        })
        .is_err()
    );
    let sample = Sample::small(2);
    let tiny = LogConfig {
        capacity_bytes: 64 << 10,
        segment_bytes: 16 << 10,
        ..small()
    };
    let log = open(tiny).unwrap();
    let error = sample
        .with_record(Checkpoint, 0, |record| log.append(record, soon()))
        .unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Full { .. }), "{error}");
}

/// Many writers share syncs, and each finds its record.
#[test]
fn writers_share_groups() {
    let folder = tempfile::tempdir().unwrap();
    let sample = Sample::small(64);
    let log = SegmentLog::open_directory(folder.path(), LogConfig::default()).unwrap();
    std::thread::scope(|scope| {
        for writer in 0..8_u32 {
            let (log, sample) = (&log, &sample);
            scope.spawn(move || {
                for k in 0..8 {
                    put(log, sample, writer * 8 + k).unwrap();
                    assert_eq!(read(log, sample, writer * 8 + k), Ok(()));
                }
            });
        }
    });
    let stats = log.stats();
    assert_eq!((stats.record_count, stats.stored_count), (64, 64));
    assert!(stats.group_count <= 64 && stats.sync_count <= stats.group_count + 2);
    log.close(soon()).unwrap();
    let directory = Directory::open(folder.path()).unwrap();
    let report = verify(&directory).unwrap();
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(report.record_count, 64);
    // The directory forbids writing: the log opens all the same.
    let names: u64 = directory
        .list()
        .unwrap()
        .iter()
        .map(|(_, bytes)| bytes)
        .sum();
    assert_eq!(
        stats.file_bytes + report.file_bytes - stats.file_bytes,
        report.file_bytes
    );
    assert!(names > report.file_bytes, "the manifest has bytes too");
}

/// The bytes of a segment that left are held until its last reader is done.
#[test]
fn a_reader_finishes_over_an_eviction() {
    let (sample, disk) = (Sample::small(40), SimDisk::new());
    let log = open(&disk);
    put(&log, &sample, 0).unwrap();
    std::thread::scope(|scope| {
        let (log, sample) = (&log, &sample);
        let reader = scope.spawn(move || {
            let (mut hits, mut misses) = (0, 0);
            while misses == 0 {
                match read(log, sample, 0) {
                    Ok(()) => hits += 1,
                    Err(Miss::Absent) => misses += 1,
                    Err(other) => panic!("{other}"),
                }
            }
            hits
        });
        let mut k = 1;
        while !reader.is_finished() {
            put(log, sample, k % 39 + 1).unwrap();
            log.prune(0, soon()).unwrap();
            k += 1;
        }
        reader.join().unwrap();
    });
    assert_eq!(log.stats().held_bytes, 0);
    assert_eq!(log.stats().file_bytes, disk.file_bytes());
}

#[derive(Clone, Debug)]
enum Operation {
    Put(RecordKind, u32),
    Read(RecordKind, u32),
    Remove(RecordKind, u32),
    Prune(u64),
    Fail(u32, u32, u32),
    Capacity(u64),
    Close,
    Crash(u64),
}

fn operation() -> impl Strategy<Value = Operation> {
    let kind = || prop_oneof![4 => Just(Block), 1 => Just(Checkpoint)];
    prop_oneof![
        8 => (kind(), 0..24_u32).prop_map(|(kind, k)| Operation::Put(kind, k)),
        6 => (kind(), 0..24_u32).prop_map(|(kind, k)| Operation::Read(kind, k)),
        2 => (kind(), 0..24_u32).prop_map(|(kind, k)| Operation::Remove(kind, k)),
        1 => (0..100_000_u64).prop_map(Operation::Prune),
        1 => (0..2_u32, 0..2_u32, 0..2_u32).prop_map(|(w, s, r)| Operation::Fail(w, s, r)),
        1 => (20_000..300_000_u64).prop_map(Operation::Capacity),
        1 => Just(Operation::Close),
        1 => (0..1_000_u64).prop_map(Operation::Crash),
    ]
}

/// What must be there: acknowledged, and not evicted, removed or damaged since.
struct World {
    sample: Sample,
    disk: SimDisk,
    log: Option<SegmentLog>,
    present: HashSet<(RecordKind, u32)>,
    names: BTreeMap<kvgate_hicache::record::RecordId, (RecordKind, u32)>,
}

impl World {
    fn new() -> World {
        let sample = Sample::small(24);
        let disk = SimDisk::new();
        let all = (0..24).flat_map(|k| [(Block, k), (Checkpoint, k)]);
        World {
            log: Some(open(&disk)),
            present: HashSet::new(),
            names: all
                .map(|(kind, k)| (sample.id(kind, k), (kind, k)))
                .collect(),
            sample,
            disk,
        }
    }

    fn log(&self) -> &SegmentLog {
        self.log.as_ref().unwrap()
    }

    fn step(&mut self, operation: &Operation) {
        match *operation {
            Operation::Put(kind, k) => {
                let log = self.log();
                let stored = self
                    .sample
                    .with_record(kind, k, |record| log.append(record, soon()));
                if stored.is_ok() {
                    self.present.insert((kind, k));
                }
            }
            Operation::Read(kind, k) => self.look(kind, k),
            Operation::Remove(kind, k) => {
                let (namespace, id) = (self.sample.namespace().digest(), self.sample.id(kind, k));
                let removed = self.log().remove(namespace, id, soon());
                self.present.remove(&(kind, k));
                // A removal that failed may come back after a crash, and that is all right.
                let _was_there = removed;
            }
            Operation::Prune(bytes) => self.log().prune(bytes, soon()).unwrap(),
            Operation::Fail(writes, syncs, reads) => self.disk.fail(writes, syncs, reads),
            Operation::Capacity(bytes) => self.disk.set_capacity(Some(bytes)),
            Operation::Close => {
                self.disk.fail(0, 0, 0);
                self.disk.set_capacity(None);
                self.log.take().unwrap().close(soon()).unwrap();
                self.reopen();
            }
            Operation::Crash(seed) => {
                self.log = None;
                self.disk = self.disk.crash(self.disk.step_count(), Kept::Some(seed));
                self.reopen();
            }
        }
        for id in self.log().drain_evicted() {
            self.present.remove(&self.names[&id]);
        }
        let stats = self.log().stats();
        assert_eq!(
            stats.file_bytes,
            self.disk.file_bytes(),
            "after {operation:?}"
        );
        assert!(
            stats.file_bytes <= stats.capacity_bytes,
            "after {operation:?}"
        );
    }

    fn reopen(&mut self) {
        let report = verify(&self.disk).unwrap();
        assert!(report.findings.is_empty(), "{:?}", report.findings);
        self.log = Some(open(&self.disk));
        for (kind, k) in self.present.clone() {
            let id = self.sample.id(kind, k);
            assert_eq!(self.log().contains(&[id]), [true], "{kind} {k} is lost");
        }
    }

    fn look(&mut self, kind: RecordKind, k: u32) {
        let log = self.log();
        match self
            .sample
            .check_read(kind, k, |wanted, into| log.read(wanted, into))
        {
            Ok(()) | Err(Miss::Io { .. }) => {}
            Err(Miss::Absent) => assert!(!self.present.contains(&(kind, k)), "{kind} {k} is lost"),
            Err(other) => panic!("{kind} {k}: {other}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any sequence of puts, evictions, faults and restarts.
    #[test]
    fn any_life_of_a_log(operations in proptest::collection::vec(operation(), 1..80)) {
        let mut world = World::new();
        for operation in &operations {
            world.step(operation);
        }
        world.disk.fail(0, 0, 0);
        for k in 0..24 {
            world.look(Block, k);
            world.look(Checkpoint, k);
        }
    }
}

#[test]
fn strict_syncs_every_record_and_none_syncs_nothing() {
    for (durability, expected) in [(Durability::Strict, 4), (Durability::None, 0)] {
        let (sample, disk) = (Sample::small(4), SimDisk::new());
        let config = LogConfig {
            durability,
            ..small()
        };
        let medium = Arc::new(disk.clone());
        let log = SegmentLog::open(medium, config, Box::new(Oldest), Mode::ReadWrite).unwrap();
        for k in 0..4 {
            put(&log, &sample, k).unwrap();
        }
        assert_eq!(log.stats().sync_count, expected, "{durability:?}");
    }
}

/// A long life on a real disk: every byte that was put is held, evicted or removed, and the files are as
/// long as the figures say.
#[test]
fn a_long_life_conserves_records_and_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let sample = Sample::small(96);
    let config = LogConfig {
        capacity_bytes: 512 << 10,
        segment_bytes: 64 << 10,
        durability: Durability::None,
        ..LogConfig::default()
    };
    let mut log = SegmentLog::open_directory(folder.path(), config.clone()).unwrap();
    let (mut held, mut state) = (HashSet::new(), 1_u64);
    for step in 0..12_000_u32 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let k = (state >> 33) as u32 % 96;
        match state >> 60 {
            0..=8 => {
                let stored = put(&log, &sample, k).unwrap();
                assert_eq!(
                    stored == Stored::Present,
                    held.contains(&sample.id(Block, k))
                );
                held.insert(sample.id(Block, k));
            }
            9 => {
                let namespace = sample.namespace().digest();
                let removed = log.remove(namespace, sample.id(Block, k), soon()).unwrap();
                assert_eq!(removed, held.remove(&sample.id(Block, k)));
            }
            _ => {
                let found = read(&log, &sample, k);
                assert_eq!(
                    found.is_ok(),
                    held.contains(&sample.id(Block, k)),
                    "{found:?}"
                );
            }
        }
        for id in log.drain_evicted() {
            assert!(held.remove(&id), "{id} left twice");
        }
        if step % 3_500 == 3_499 {
            log.close(soon()).unwrap();
            let directory = Directory::open(folder.path()).unwrap();
            let report = verify(&directory).unwrap();
            assert!(report.findings.is_empty(), "{:?}", report.findings);
            log = SegmentLog::open_directory(folder.path(), config.clone()).unwrap();
            assert_eq!(log.stats().file_bytes, report.file_bytes);
        }
        assert_eq!(log.stats().record_count, held.len() as u64);
    }
    let stats = log.stats();
    let listed = Directory::open(folder.path()).unwrap().list().unwrap();
    let segments = listed
        .iter()
        .filter(|(name, _)| name.starts_with("segment"));
    assert_eq!(
        segments.map(|(_, bytes)| bytes).sum::<u64>(),
        stats.file_bytes
    );
    assert_eq!((stats.held_bytes, stats.stuck_bytes), (0, 0));
    assert!(stats.evicted_count > 0 && stats.kept_count > 0 && stats.removed_count > 0);
}
