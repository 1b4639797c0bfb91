//! Groups of several records on disks that fail in their midst, removals that fail, repairs on disks that
//! fail: what was acknowledged stays, what was removed stays away.

#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::sync::Arc;

use kvgate_hicache::log::{LogConfig, Mode, SecondChance, SegmentLog, Stored};
use kvgate_hicache::record::Record;
use kvgate_hicache::record::RecordKind::Block;
use kvgate_hicache::testkit::{Kept, Sample, SimDisk};
use kvgate_hicache::{Error, ErrorKind, Miss};
use kvgate_transfer::Deadline;

fn soon() -> Deadline {
    Deadline::after_ms(10_000)
}

/// Segments with room for four blocks.
fn config(segments: u64) -> LogConfig {
    LogConfig {
        capacity_bytes: segments * (40 << 10),
        segment_bytes: 40 << 10,
        ..LogConfig::default()
    }
}

fn open_with(disk: &SimDisk, config: LogConfig) -> SegmentLog {
    let (medium, policy) = (Arc::new(disk.clone()), Box::new(SecondChance::default()));
    SegmentLog::open(medium, config, policy, Mode::ReadWrite).unwrap()
}

fn open(disk: &SimDisk) -> SegmentLog {
    open_with(disk, config(3))
}

fn put(log: &SegmentLog, sample: &Sample, k: u32) -> Result<Stored, Error> {
    sample.with_record(Block, k, |record| log.append(record, soon()))
}

fn put_group(log: &SegmentLog, sample: &Sample, ks: &[u32]) -> Vec<Result<Stored, Error>> {
    let payloads: Vec<Vec<u8>> = ks.iter().map(|k| sample.payload(Block, *k)).collect();
    let records: Vec<Record<'_>> = std::iter::zip(ks, &payloads)
        .map(|(k, payload)| sample.record(Block, *k, payload))
        .collect();
    log.append_all(&records, soon())
}

fn remove(log: &SegmentLog, sample: &Sample, k: u32) -> Result<bool, Error> {
    log.remove(sample.namespace().digest(), sample.id(Block, k), soon())
}

fn read(log: &SegmentLog, sample: &Sample, k: u32) -> Result<(), Miss> {
    sample.check_read(Block, k, |wanted, into| log.read(wanted, into))
}

fn segments(disk: &SimDisk) -> Vec<String> {
    let is_segment = |name: &String| name.starts_with("segment");
    disk.names().into_iter().filter(is_segment).collect()
}

#[test]
fn a_group_shares_a_sync_and_answers_for_each() {
    let (sample, disk) = (Sample::small(4), SimDisk::new());
    let log = open(&disk);
    put(&log, &sample, 1).unwrap();
    let answers: Vec<Stored> = put_group(&log, &sample, &[0, 1, 2])
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert_eq!(answers, [Stored::Written, Stored::Present, Stored::Written]);
    assert_eq!((log.stats().group_count, log.stats().sync_count), (2, 2));
    assert_eq!(
        (read(&log, &sample, 0), read(&log, &sample, 2)),
        (Ok(()), Ok(()))
    );
}

/// Nobody writes, so that there is nobody to wait for: the deadline holds all the same.
#[test]
fn behind_its_deadline_no_group_is_begun() {
    let (sample, disk) = (Sample::small(2), SimDisk::new());
    let log = open(&disk);
    put(&log, &sample, 0).unwrap();
    let step_count = disk.step_count();
    let passed = Deadline::after_ms(0);
    let late = |error: Error| matches!(error.kind(), ErrorKind::Late { deadline_ms: 0 });
    let stored = sample.with_record(Block, 1, |record| log.append(record, passed));
    assert!(late(stored.unwrap_err()));
    let (namespace, id) = (sample.namespace().digest(), sample.id(Block, 0));
    assert!(late(log.remove(namespace, id, passed).unwrap_err()));
    assert_eq!(disk.step_count(), step_count, "something was written");
    // The removal is owed, the record is not.
    assert!(log.remove(namespace, id, soon()).unwrap());
    put(&log, &sample, 1).unwrap();
    drop(log);
    let log = open(&disk);
    assert_eq!(read(&log, &sample, 0), Err(Miss::Absent));
    assert_eq!(read(&log, &sample, 1), Ok(()));
}

/// Groups of five on a disk with room for twelve, some kept over evictions, and one fault: whatever was
/// acknowledged and has not left is there after a crash that keeps nothing but what was synced.
fn live_through(fault: impl Fn(&SimDisk)) {
    let (sample, disk) = (Sample::small(30), SimDisk::new());
    let log = open(&disk);
    fault(&disk);
    let mut present = HashSet::new();
    for first in (0..30).step_by(5) {
        let ks: Vec<u32> = (first..first + 5).collect();
        for (k, answer) in std::iter::zip(&ks, put_group(&log, &sample, &ks)) {
            if answer.is_ok() {
                present.insert(sample.id(Block, *k));
            }
        }
        for id in log.drain_evicted() {
            present.remove(&id);
        }
        for k in (first..first + 5).step_by(2) {
            let is_hit = read(&log, &sample, k).is_ok();
            assert!(is_hit || !present.contains(&sample.id(Block, k)));
        }
        assert_eq!(log.stats().file_bytes, disk.file_bytes());
    }
    assert!(log.stats().stored_count > 20, "{:?}", log.stats());
    drop(log);
    let disk = disk.crash(disk.step_count(), Kept::Nothing);
    let log = open(&disk);
    for k in 0..30 {
        if present.contains(&sample.id(Block, k)) {
            assert_eq!(read(&log, &sample, k), Ok(()), "block {k} is lost");
        }
    }
}

#[test]
fn a_write_that_fails_in_a_group_loses_nothing_that_was_acknowledged() {
    for writes in 0..60 {
        live_through(|disk| disk.fail_behind(Some(writes), None, None));
        live_through(|disk| {
            disk.fail_behind(Some(writes), None, None);
            disk.fail_cuts(1);
        });
    }
}

#[test]
fn a_sync_that_fails_in_a_group_loses_nothing_that_was_acknowledged() {
    for syncs in 0..60 {
        live_through(|disk| disk.fail_behind(None, Some(syncs), None));
    }
}

/// A group that is longer than the log: what it evicts of its own is not found, and not acknowledged.
#[test]
fn a_group_that_evicts_its_own_records_says_so() {
    let (sample, disk) = (Sample::small(24), SimDisk::new());
    let log = open_with(&disk, config(2));
    let ks: Vec<u32> = (0..24).collect();
    let answers = put_group(&log, &sample, &ks);
    let evicted: HashSet<_> = log.drain_evicted().into_iter().collect();
    for (k, answer) in std::iter::zip(ks, answers) {
        let id = sample.id(Block, k);
        let is_there = log.contains(&[id]) == [true];
        assert_eq!(read(&log, &sample, k).is_ok(), is_there, "block {k}");
        let is_stored = answer.is_ok() && !evicted.contains(&id);
        assert_eq!(is_there, is_stored, "block {k}");
    }
    for k in 0..24 {
        assert!(put(&log, &sample, k).is_ok() && read(&log, &sample, k).is_ok());
    }
    assert_eq!(log.stats().file_bytes, disk.file_bytes());
}

#[test]
fn a_removal_that_failed_is_owed_until_it_is_written() {
    for (writes, syncs) in [(1, 0), (0, 1)] {
        let (sample, disk) = (Sample::small(2), SimDisk::new());
        let log = open(&disk);
        put(&log, &sample, 0).unwrap();
        disk.fail(writes, syncs, 0);
        assert!(remove(&log, &sample, 0).is_err());
        assert_eq!(read(&log, &sample, 0), Err(Miss::Absent));
        assert!(remove(&log, &sample, 0).unwrap(), "it was there");
        assert!(!remove(&log, &sample, 0).unwrap(), "it is gone");
        drop(log);
        let log = open(&disk.crash(disk.step_count(), Kept::Nothing));
        assert_eq!(read(&log, &sample, 0), Err(Miss::Absent));
    }
}

/// The removal leaves with its segment; the file with the record cannot be removed.
#[test]
fn a_removed_record_of_an_undeletable_file_does_not_come_back() {
    let (sample, disk) = (Sample::small(40), SimDisk::new());
    let log = open(&disk);
    for k in 0..6 {
        put(&log, &sample, k).unwrap();
    }
    assert!(remove(&log, &sample, 0).unwrap());
    disk.set_undeletable(Some(&segments(&disk)[0]));
    for k in 6..30 {
        put(&log, &sample, k).unwrap();
    }
    assert_eq!(log.stats().file_bytes, disk.file_bytes());
    drop(log);
    let disk = disk.crash(disk.step_count(), Kept::Nothing);
    let log = open(&disk);
    assert_eq!(read(&log, &sample, 0), Err(Miss::Absent));
    assert_eq!(read(&log, &sample, 29), Ok(()));
}

/// Whatever the order in which they come: memory and disk agree.
#[test]
fn storing_and_removing_at_once_leaves_what_the_next_open_finds() {
    let sample = Sample::small(1);
    for _ in 0..200 {
        let disk = SimDisk::new();
        let log = open(&disk);
        put(&log, &sample, 0).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| remove(&log, &sample, 0).unwrap());
            scope.spawn(|| {
                while put(&log, &sample, 0).unwrap() == Stored::Present {
                    if log.stats().removed_count > 0 {
                        break;
                    }
                }
            });
        });
        let is_there = read(&log, &sample, 0);
        drop(log);
        assert_eq!(read(&open(&disk), &sample, 0), is_there);
    }
}

#[test]
fn a_repair_of_a_growing_log_loses_nothing() {
    let (sample, disk) = (Sample::small(8), SimDisk::new());
    let log = open(&disk);
    for k in 0..6 {
        put(&log, &sample, k).unwrap();
    }
    assert_eq!(log.repair(soon()).unwrap(), 0);
    for k in 6..8 {
        put(&log, &sample, k).unwrap();
    }
    assert_eq!(log.stats().file_bytes, disk.file_bytes());
    drop(log);
    let log = open(&disk.crash(disk.step_count(), Kept::Nothing));
    for k in 0..8 {
        assert_eq!(read(&log, &sample, k), Ok(()));
    }
}

/// Blocks 0 to 2 in a good segment; 3 to 5, of which 3 is damaged, and the removals of 0 and 4 behind.
fn damaged(sample: &Sample) -> SimDisk {
    let disk = SimDisk::new();
    let log = open(&disk);
    for k in 0..3 {
        put(&log, sample, k).unwrap();
    }
    log.close(soon()).unwrap();
    let log = open(&disk);
    for k in 3..6 {
        put(&log, sample, k).unwrap();
    }
    assert!(remove(&log, sample, 0).unwrap() && remove(&log, sample, 4).unwrap());
    log.close(soon()).unwrap();
    disk.damage(&segments(&disk)[1], |bytes| bytes[8192] ^= 1);
    disk
}

#[test]
fn a_repair_brings_back_nothing_that_was_removed() {
    let sample = Sample::small(6);
    let disk = damaged(&sample);
    let log = open(&disk);
    assert_eq!(log.repair(soon()).unwrap(), 1);
    drop(log);
    for disk in [disk.copy(), disk] {
        let log = open(&disk);
        for k in 0..6 {
            let expected = match k {
                0 | 3 | 4 => Err(Miss::Absent),
                _ => Ok(()),
            };
            assert_eq!(read(&log, &sample, k), expected, "block {k}");
        }
    }
}

#[test]
fn a_repair_that_fails_loses_nothing_and_can_be_done_again() {
    let sample = Sample::small(6);
    let good = damaged(&sample);
    let mut failed_count = 0;
    for count in 0..40 {
        for fault in 0..3 {
            let disk = good.copy();
            let log = open(&disk);
            let behind = |this| (fault == this).then_some(count);
            disk.fail_behind(behind(0), behind(1), behind(2));
            failed_count += u32::from(log.repair(soon()).is_err());
            disk.fail_behind(None, None, None);
            log.repair(soon()).unwrap();
            drop(log);
            let log = open(&disk.crash(disk.step_count(), Kept::Nothing));
            for k in [1, 2, 5] {
                assert_eq!(read(&log, &sample, k), Ok(()), "block {k}");
            }
            for k in [0, 4] {
                assert_eq!(read(&log, &sample, k), Err(Miss::Absent), "block {k}");
            }
            // The crash may bring the damaged segment back, and its record is a miss then.
            assert!(read(&log, &sample, 3).is_err());
        }
    }
    assert!(failed_count > 10, "{failed_count} faults did anything");
}
