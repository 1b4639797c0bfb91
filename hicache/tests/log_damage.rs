//! One wrong bit at every byte of a small directory, and cruder damage: `verify` names it, and a log
//! over it gives no wrong byte.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kvgate_hicache::log::{
    LogConfig, MANIFEST_NAME, Mode, SecondChance, SegmentLog, VerifyReport, export, import, verify,
};
use kvgate_hicache::record::RecordKind::{Block, Checkpoint};
use kvgate_hicache::testkit::{Sample, SimDisk};
use kvgate_hicache::{Error, ErrorKind, Miss};
use kvgate_kvcache::schema::Component;
use kvgate_transfer::Deadline;

const BLOCKS: u32 = 4;

fn soon() -> Deadline {
    Deadline::after_ms(10_000)
}

fn open(disk: &SimDisk) -> SegmentLog {
    let config = LogConfig {
        capacity_bytes: 256 << 10,
        segment_bytes: 32 << 10,
        ..LogConfig::default()
    };
    let medium = Arc::new(disk.clone());
    SegmentLog::open(
        medium,
        config,
        Box::new(SecondChance::default()),
        Mode::ReadWrite,
    )
    .unwrap()
}

/// A closed log of two segments: three records in the first, one in the second.
fn closed(sample: &Sample) -> SimDisk {
    let disk = SimDisk::new();
    let log = open(&disk);
    for k in 0..BLOCKS {
        sample
            .with_record(Block, k, |record| log.append(record, soon()))
            .unwrap();
    }
    log.close(soon()).unwrap();
    disk
}

fn look(disk: &SimDisk) -> VerifyReport {
    verify(disk).unwrap()
}

/// Reads everything; a wrong byte panics. Answers how many hits there were.
fn run_over(sample: &Sample, disk: &SimDisk) -> u32 {
    let log = open(&disk.copy());
    let hit = |k: &u32| {
        let read = sample.check_read(Block, *k, |wanted, into| log.read(wanted, into));
        read.is_ok()
    };
    (0..BLOCKS).filter(hit).count() as u32
}

#[test]
fn a_wrong_bit_at_any_byte_is_named() {
    let sample = Sample::small(BLOCKS);
    let disk = closed(&sample);
    let clean = look(&disk);
    assert!(clean.findings.is_empty() && clean.was_closed, "{clean:?}");
    assert_eq!((clean.record_count, clean.segment_count), (4, 2));
    for name in disk.names() {
        let len_bytes = disk.bytes(&name).len();
        for at in 0..len_bytes {
            let bit = 1 << (at % 8);
            disk.damage(&name, |bytes| bytes[at] ^= bit);
            let report = look(&disk);
            let found = report.findings.iter().any(|finding| finding.file == name);
            assert!(found, "bit of byte {at} of {name}: {:?}", report.findings);
            if at % 13 == 0 {
                let hits = run_over(&sample, &disk);
                assert!(
                    hits >= BLOCKS - 1,
                    "byte {at} of {name} cost more than its record"
                );
            }
            disk.damage(&name, |bytes| bytes[at] ^= bit);
        }
    }
    assert!(look(&disk).findings.is_empty());
}

#[test]
fn a_finding_says_which_record_and_which_component() {
    let sample = Sample::small(BLOCKS);
    let disk = closed(&sample);
    let first = disk
        .names()
        .into_iter()
        .find(|name| name != MANIFEST_NAME)
        .unwrap();
    let part = sample.shape(Block).parts()[1];
    assert_eq!(part.component, Component::IndexK);
    let at = 4096 + 4096 + part.offset_bytes as usize + 5;
    disk.damage(&first, |bytes| bytes[at] ^= 1);
    let report = look(&disk);
    let [finding] = &report.findings[..] else {
        panic!("{:?}", report.findings);
    };
    assert_eq!(finding.file, first);
    assert_eq!(finding.record, Some(sample.id(Block, 0)));
    assert_eq!(finding.component, Some((Component::IndexK, part.layer)));
    assert_eq!(finding.offset_bytes, 8192 + part.offset_bytes);
    assert!(finding.to_string().contains("index_k of layer"));
}

#[test]
fn cut_lengthened_swapped_missing_and_foreign_files_are_named() {
    let sample = Sample::small(BLOCKS);
    let good = closed(&sample);
    let segment = good
        .names()
        .into_iter()
        .find(|name| name != MANIFEST_NAME)
        .unwrap();
    let swap = |bytes: &mut Vec<u8>| {
        let (one, two) = bytes[4096..].split_at_mut(8192);
        one.swap_with_slice(&mut two[..8192]);
    };
    type Change<'a> = (&'a str, Box<dyn Fn(&SimDisk) + 'a>);
    let changes: [Change<'_>; 7] = [
        (
            "half",
            Box::new(|d| d.damage(&segment, |b| b.truncate(b.len() / 2))),
        ),
        (
            "one byte less",
            Box::new(|d| d.damage(&segment, |b| b.truncate(b.len() - 1))),
        ),
        (
            "one page more",
            Box::new(|d| d.damage(&segment, |b| b.resize(b.len() + 4096, 0))),
        ),
        (
            "two records swapped",
            Box::new(|d| d.damage(&segment, swap)),
        ),
        ("empty", Box::new(|d| d.damage(&segment, Vec::clear))),
        ("a foreign file", Box::new(|d| d.put("notes.txt", b"mine"))),
        (
            "a second manifest",
            Box::new(|d| d.put("MANIFEST.new", b"half")),
        ),
    ];
    for (what, change) in changes {
        let disk = good.copy();
        change(&disk);
        assert!(!look(&disk).findings.is_empty(), "{what}");
        run_over(&sample, &disk);
    }
    let disk = good.copy();
    let log = open(&disk);
    assert!(log.recovery().foreign.is_empty());
    drop(log);
    disk.put("notes.txt", b"mine");
    let log = open(&disk);
    assert_eq!(log.recovery().foreign, ["notes.txt"]);
    drop(log);
    assert_eq!(disk.bytes("notes.txt"), b"mine");
}

/// Of another format version nothing is believed, nothing removed.
#[test]
fn an_unknown_version_is_empty_and_left_alone() {
    let sample = Sample::small(BLOCKS);
    let disk = closed(&sample);
    let segments: Vec<String> = disk
        .names()
        .into_iter()
        .filter(|n| n != MANIFEST_NAME)
        .collect();
    for name in &segments {
        disk.damage(name, |bytes| bytes[8] = 9);
    }
    let log = open(&disk);
    assert_eq!(log.recovery().foreign, segments);
    let found = sample.check_read(Block, 0, |wanted, into| log.read(wanted, into));
    assert_eq!(found, Err(Miss::Absent));
    sample
        .with_record(Block, 0, |record| log.append(record, soon()))
        .unwrap();
    log.close(soon()).unwrap();
    assert!(segments.iter().all(|name| disk.bytes(name)[8] == 9));
}

#[test]
fn a_damaged_record_leaves_the_index_and_can_be_stored_again() {
    let sample = Sample::small(BLOCKS);
    let disk = closed(&sample);
    let log = open(&disk);
    let segment = disk.names()[0].clone();
    disk.damage(&segment, |bytes| bytes[8192] ^= 1);
    let read = |k| sample.check_read(Block, k, |wanted, into| log.read(wanted, into));
    assert!(matches!(read(0), Err(Miss::Checksum { .. })));
    assert_eq!(read(0), Err(Miss::Absent));
    assert_eq!(log.drain_evicted(), [sample.id(Block, 0)]);
    assert_eq!(log.stats().misses_of("checksum"), 1);
    sample
        .with_record(Block, 0, |record| log.append(record, soon()))
        .unwrap();
    assert_eq!(read(0), Ok(()));
}

#[test]
fn a_repaired_log_has_every_good_record_and_nothing_wrong() {
    let sample = Sample::small(BLOCKS);
    let disk = closed(&sample);
    let segment = disk
        .names()
        .into_iter()
        .find(|name| name != MANIFEST_NAME)
        .unwrap();
    disk.damage(&segment, |bytes| bytes[8192] ^= 1);
    let log = open(&disk);
    assert_eq!(log.repair(soon()).unwrap(), 1);
    log.close(soon()).unwrap();
    let report = look(&disk);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(run_over(&sample, &disk), BLOCKS - 1);
}

#[test]
fn an_export_brings_every_record_and_a_damaged_one_none() {
    let sample = Sample::small(BLOCKS);
    let (disk, outside) = (closed(&sample), SimDisk::new());
    let log = open(&disk);
    let exported = export(&log, &outside, "all.kvexport").unwrap();
    assert_eq!((exported.record_count, exported.left_out.len()), (4, 0));
    let other = SimDisk::new();
    let log = open(&other);
    sample
        .with_record(Checkpoint, 1, |record| log.append(record, soon()))
        .unwrap();
    assert_eq!(import(&log, &outside, "all.kvexport", soon()).unwrap(), 4);
    assert_eq!(import(&log, &outside, "all.kvexport", soon()).unwrap(), 0);
    log.close(soon()).unwrap();
    assert_eq!(run_over(&sample, &other), BLOCKS);
    let len_bytes = outside.bytes("all.kvexport").len();
    for at in (0..len_bytes).step_by(509).filter(|at| *at >= 4096) {
        outside.damage("all.kvexport", |bytes| bytes[at] ^= 1);
        let log = open(&SimDisk::new());
        let error = import(&log, &outside, "all.kvexport", soon()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Damaged { .. }), "{error}");
        assert_eq!(log.stats().record_count, 0);
        outside.damage("all.kvexport", |bytes| bytes[at] ^= 1);
    }
}

#[test]
fn an_export_says_what_it_could_not_read_and_leaves_no_half_file() {
    let sample = Sample::small(BLOCKS);
    let (disk, outside) = (closed(&sample), SimDisk::new());
    let log = open(&disk);
    let is_io = |error: &Error| matches!(error.kind(), ErrorKind::Io { .. });
    // No segment can be read: nothing may look like a whole list or a whole export.
    disk.fail(0, 0, u32::MAX);
    let listing = log.list();
    assert_eq!(listing.records, []);
    assert!(!listing.unreadable.is_empty() && listing.unreadable.iter().all(is_io));
    let exported = export(&log, &outside, "none.kvexport").unwrap();
    assert_eq!(exported.record_count, 0);
    assert!(!exported.left_out.is_empty() && exported.left_out.iter().all(is_io));
    // One record cannot be read: the others are saved.
    disk.fail(0, 0, 0);
    let wanted = log.list().records.swap_remove(1);
    let place = wanted.entry.offset_bytes as usize + 4096;
    disk.set_unreadable(Some((&wanted.segment.file_name(), place)));
    let exported = export(&log, &outside, "most.kvexport").unwrap();
    assert_eq!((exported.record_count, exported.left_out.len()), (3, 1));
    assert!(exported.left_out.iter().all(is_io));
    disk.set_unreadable(None);
    // The export cannot be written.
    let before = outside.names();
    outside.set_capacity(Some(0));
    let error = export(&log, &outside, "all.kvexport").unwrap_err();
    assert!(is_io(&error), "{error}");
    assert_eq!(outside.names(), before);
    outside.set_capacity(None);
    let exported = export(&log, &outside, "all.kvexport").unwrap();
    assert_eq!((exported.record_count, exported.left_out.len()), (4, 0));
}

#[test]
fn pruning_lets_the_oldest_go() {
    let sample = Sample::small(BLOCKS);
    let disk = closed(&sample);
    let log = open(&disk);
    log.prune(20 << 10, soon()).unwrap();
    let stats = log.stats();
    assert_eq!((stats.record_count, stats.evicted_segments), (1, 1));
    assert_eq!(stats.file_bytes, disk.file_bytes());
    assert!(
        sample
            .check_read(Block, 3, |w, into| log.read(w, into))
            .is_ok()
    );
    log.close(soon()).unwrap();
    assert!(look(&disk).findings.is_empty());
}
