//! A crash after every step of a life of the log, with whatever may be left of what was not synced:
//! no wrong byte, no record lost that was acknowledged, space accounted to the byte.

#![allow(clippy::unwrap_used)]

use std::ops::Range;
use std::sync::Arc;

use kvgate_hicache::log::{Durability, LogConfig, Mode, Oldest, SecondChance, SegmentLog, verify};
use kvgate_hicache::record::Record;
use kvgate_hicache::record::RecordKind::{self, Block, Checkpoint};
use kvgate_hicache::testkit::{Kept, Sample, SimDisk};
use kvgate_hicache::{ErrorKind, Miss};
use kvgate_transfer::Deadline;

const WAIT_MS: u64 = 10_000;

fn soon() -> Deadline {
    Deadline::after_ms(WAIT_MS)
}

fn config() -> LogConfig {
    LogConfig {
        capacity_bytes: 256 << 10,
        segment_bytes: 64 << 10,
        ..LogConfig::default()
    }
}

fn open_with(disk: &SimDisk, config: LogConfig) -> SegmentLog {
    let medium = Arc::new(disk.clone());
    SegmentLog::open(
        medium,
        config,
        Box::new(SecondChance::default()),
        Mode::ReadWrite,
    )
    .unwrap()
}

fn open(disk: &SimDisk) -> SegmentLog {
    open_with(disk, config())
}

/// The records of a test, each with the state of the disk from which on it must be there, and the one
/// from which on it may be gone.
struct Life {
    sample: Sample,
    disk: SimDisk,
    acknowledged: Vec<(RecordKind, u32, usize)>,
    removed: Vec<(RecordKind, u32, usize, usize)>,
    evicted_from: usize,
}

impl Life {
    fn new() -> Life {
        Life {
            sample: Sample::small(40),
            disk: SimDisk::new(),
            acknowledged: Vec::new(),
            removed: Vec::new(),
            evicted_from: usize::MAX,
        }
    }

    fn put(&mut self, log: &SegmentLog, kind: RecordKind, k: u32) {
        let stored = self
            .sample
            .with_record(kind, k, |record| log.append(record, soon()));
        stored.unwrap();
        self.acknowledged.push((kind, k, self.disk.step_count()));
    }

    /// Blocks that share a sync.
    fn put_group(&mut self, log: &SegmentLog, ks: Range<u32>) {
        let payloads: Vec<Vec<u8>> = ks.clone().map(|k| self.sample.payload(Block, k)).collect();
        let records: Vec<Record<'_>> = std::iter::zip(ks.clone(), &payloads)
            .map(|(k, payload)| self.sample.record(Block, k, payload))
            .collect();
        for stored in log.append_all(&records, soon()) {
            stored.unwrap();
        }
        let step_count = self.disk.step_count();
        self.acknowledged.extend(ks.map(|k| (Block, k, step_count)));
    }

    fn remove(&mut self, log: &SegmentLog, kind: RecordKind, k: u32) {
        let before = self.disk.step_count();
        let namespace = self.sample.namespace().digest();
        assert!(
            log.remove(namespace, self.sample.id(kind, k), soon())
                .unwrap()
        );
        self.removed.push((kind, k, before, self.disk.step_count()));
    }

    /// What must hold after a crash behind `step_count` steps.
    fn check(&self, step_count: usize, kept: Kept) {
        let disk = self.disk.crash(step_count, kept);
        let before = verify(&disk).unwrap();
        let around = format!("crash behind step {step_count}, {kept:?}");
        assert!(
            before.findings.is_empty(),
            "{around}: {:?}",
            before.findings
        );
        let log = open(&disk);
        assert!(log.recovery().damaged.is_empty(), "{around}");
        for k in 0..self.sample.block_count() {
            for kind in [Block, Checkpoint] {
                self.check_record(&log, kind, k, step_count, &around);
            }
        }
        let stats = log.stats();
        assert_eq!(stats.file_bytes, disk.file_bytes(), "{around}");
        let listing = log.list();
        assert_eq!(listing.records.len() as u64, stats.record_count, "{around}");
        assert!(listing.unreadable.is_empty(), "{around}");
        log.close(soon()).unwrap();
        let after = verify(&disk).unwrap();
        assert!(after.findings.is_empty(), "{around}: {:?}", after.findings);
        assert!(after.was_closed && after.tail_bytes == 0, "{around}");
        let again = open(&disk);
        assert!(again.recovery().was_closed, "{around}");
        assert_eq!(again.stats().record_count, stats.record_count, "{around}");
    }

    fn check_record(
        &self,
        log: &SegmentLog,
        kind: RecordKind,
        k: u32,
        step_count: usize,
        around: &str,
    ) {
        // A hit with a wrong byte panics here.
        let found = self.sample.check_read(kind, k, |w, into| log.read(w, into));
        let is_it = |(a, b, _): &&(RecordKind, u32, usize)| (*a, *b) == (kind, k);
        let acknowledged = self.acknowledged.iter().find(is_it);
        let is_stored = acknowledged.is_some_and(|(_, _, at)| *at <= step_count);
        let removal = self.removed.iter().find(|(a, b, ..)| (*a, *b) == (kind, k));
        let may_be_gone = removal.is_some_and(|(_, _, from, _)| *from < step_count);
        let must_be_gone = removal.is_some_and(|(_, _, _, to)| *to <= step_count);
        let is_evictable = self.evicted_from < step_count;
        match found {
            Ok(()) => assert!(!must_be_gone, "{around}: {kind} {k} is back"),
            Err(Miss::Absent) => assert!(
                !is_stored || may_be_gone || is_evictable,
                "{around}: {kind} {k} is lost"
            ),
            Err(miss) => panic!("{around}: {kind} {k}: {miss}"),
        }
    }

    fn check_everywhere(&self, seeds: u64) {
        for step_count in 0..=self.disk.step_count() {
            self.check(step_count, Kept::Nothing);
            self.check(step_count, Kept::Everything);
            for seed in 0..seeds {
                self.check(step_count, Kept::Some(seed));
            }
        }
    }
}

#[test]
fn a_crash_after_any_step_loses_nothing_that_was_acknowledged() {
    let mut life = Life::new();
    let log = open(&life.disk);
    for k in 0..3 {
        life.put(&log, Block, k);
    }
    life.put(&log, Checkpoint, 2);
    life.remove(&log, Block, 1);
    log.close(soon()).unwrap();
    let log = open(&life.disk);
    for k in 3..8 {
        life.put(&log, Block, k);
    }
    // Left open: the process dies with its last segment unfinished.
    drop(log);
    let log = open(&life.disk);
    life.put(&log, Block, 8);
    log.close(soon()).unwrap();
    life.check_everywhere(4);
}

/// Groups of several records: of one that was not synced a later record may be whole and an earlier one torn.
#[test]
fn a_crash_within_a_group_leaves_a_tail_and_no_damage() {
    let mut life = Life::new();
    let log = open(&life.disk);
    for group in [0..3, 3..5, 5..9] {
        life.put_group(&log, group);
    }
    life.remove(&log, Block, 4);
    life.put_group(&log, 9..12);
    assert_eq!(log.stats().group_count, 5, "not every group is one");
    drop(log);
    life.check_everywhere(40);
}

/// What was synced before a whole record behind it was written is no tail, whatever it looks like now.
#[test]
fn a_torn_place_below_what_was_synced_is_damage() {
    for blank in 0..5_u32 {
        let mut life = Life::new();
        let log = open(&life.disk);
        for group in [0..3, 3..5] {
            life.put_group(&log, group);
        }
        drop(log);
        let disk = life.disk.crash(life.disk.step_count(), Kept::Nothing);
        let name = disk.names().remove(0);
        // A sector in the payload of that record, as if it had never been written.
        let at = 4096 + blank as usize * 8192 + 4096;
        disk.damage(&name, |bytes| bytes[at..at + 512].fill(0));
        let is_synced = blank < 3;
        let findings = verify(&disk).unwrap().findings;
        assert_eq!(
            !findings.is_empty(),
            is_synced,
            "block {blank}: {findings:?}"
        );
        let log = open(&disk);
        assert_eq!(
            !log.recovery().damaged.is_empty(),
            is_synced,
            "block {blank}"
        );
        for k in 0..5 {
            let found = life
                .sample
                .check_read(Block, k, |w, into| log.read(w, into));
            let is_kept = if is_synced { k != blank } else { k < blank };
            assert_eq!(found.is_ok(), is_kept, "block {k}, {blank} is blank");
        }
    }
}

/// The same while segments leave to make room.
#[test]
fn a_crash_during_an_eviction_gives_no_wrong_byte() {
    let mut life = Life::new();
    let tight = LogConfig {
        capacity_bytes: 96 << 10,
        segment_bytes: 40 << 10,
        ..LogConfig::default()
    };
    let log = open_with(&life.disk, tight);
    for k in 0..20 {
        if log.stats().evicted_count == 0 {
            life.evicted_from = life.disk.step_count();
        }
        life.put(&log, Block, k);
        assert!(life.disk.file_bytes() <= 96 << 10);
    }
    assert!(log.stats().evicted_count > 0);
    drop(log);
    life.check_everywhere(2);
}

/// Without syncs a crash may lose records, but nothing else.
#[test]
fn without_syncs_a_crash_loses_records_and_nothing_else() {
    let mut life = Life::new();
    let loose = LogConfig {
        durability: Durability::None,
        ..config()
    };
    let log = open_with(&life.disk, loose);
    let sample = life.sample.clone();
    for k in 0..6 {
        let stored = sample.with_record(Block, k, |record| log.append(record, soon()));
        stored.unwrap();
    }
    drop(log);
    for step_count in 0..=life.disk.step_count() {
        for seed in 0..8 {
            let disk = life.disk.crash(step_count, Kept::Some(seed));
            let log = open(&disk);
            for k in 0..6 {
                let found = sample.check_read(Block, k, |wanted, into| log.read(wanted, into));
                assert!(matches!(found, Ok(()) | Err(Miss::Absent)), "{found:?}");
            }
            assert_eq!(log.stats().file_bytes, disk.file_bytes());
        }
        life.evicted_from = 0;
    }
}

#[test]
fn a_record_of_a_failed_group_is_not_there_and_the_next_one_is() {
    let sample = Sample::small(8);
    for (writes, syncs) in [(1, 0), (0, 1)] {
        let disk = SimDisk::new();
        let log = open(&disk);
        let put = |k| sample.with_record(Block, k, |record| log.append(record, soon()));
        put(0).unwrap();
        disk.fail(writes, syncs, 0);
        let error = put(1).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Io { .. }), "{error}");
        disk.fail(0, 0, 0);
        put(2).unwrap();
        let found = |log: &SegmentLog, k| sample.check_read(Block, k, |w, into| log.read(w, into));
        assert_eq!(found(&log, 1), Err(Miss::Absent));
        assert_eq!(log.stats().failed_count, 1);
        drop(log);
        let disk = disk.crash(disk.step_count(), Kept::Nothing);
        let log = open(&disk);
        assert_eq!((found(&log, 0), found(&log, 2)), (Ok(()), Ok(())));
    }
}

#[test]
fn first_in_first_out_keeps_nothing() {
    let sample = Sample::small(20);
    let disk = SimDisk::new();
    let tight = LogConfig {
        capacity_bytes: 96 << 10,
        segment_bytes: 40 << 10,
        ..LogConfig::default()
    };
    let medium = Arc::new(disk.clone());
    let log = SegmentLog::open(medium, tight, Box::new(Oldest), Mode::ReadWrite).unwrap();
    for k in 0..20 {
        sample
            .with_record(Block, k, |record| log.append(record, soon()))
            .unwrap();
        let _hot = sample.check_read(Block, 0, |wanted, into| log.read(wanted, into));
    }
    let evicted = log.drain_evicted();
    assert_eq!(evicted[0], sample.id(Block, 0));
    let stats = log.stats();
    assert_eq!(stats.record_count + evicted.len() as u64, 20);
    assert_eq!(stats.kept_count, 0);
}
