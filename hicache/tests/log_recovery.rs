//! Opening a log on a disk that is full, that cannot read a sector, or whose first pages are gone: what can
//! be read is used, every file is counted, and none is removed that holds a record.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kvgate_hicache::Miss;
use kvgate_hicache::log::{LogConfig, Mode, SecondChance, SegmentLog, verify};
use kvgate_hicache::record::RecordKind::Block;
use kvgate_hicache::record::RecordShape;
use kvgate_hicache::testkit::{Sample, SimDisk};
use kvgate_hicache::tier::check_tier;
use kvgate_kvcache::V4Geometry;
use kvgate_kvcache::schema::CacheSchema;
use kvgate_transfer::Deadline;

const PAGE: usize = 4096;

fn soon() -> Deadline {
    Deadline::after_ms(10_000)
}

fn open_with(disk: &SimDisk, config: LogConfig) -> SegmentLog {
    let (medium, policy) = (Arc::new(disk.clone()), Box::new(SecondChance::default()));
    SegmentLog::open(medium, config, policy, Mode::ReadWrite).unwrap()
}

/// Segments with room for four blocks.
fn config() -> LogConfig {
    LogConfig {
        capacity_bytes: 256 << 10,
        segment_bytes: 40 << 10,
        ..LogConfig::default()
    }
}

fn open(disk: &SimDisk) -> SegmentLog {
    open_with(disk, config())
}

/// A log of so many blocks whose process has died.
fn left_open(sample: &Sample, count: u32) -> SimDisk {
    let disk = SimDisk::new();
    let log = open(&disk);
    for k in 0..count {
        sample
            .with_record(Block, k, |record| log.append(record, soon()))
            .unwrap();
    }
    disk
}

fn read(log: &SegmentLog, sample: &Sample, k: u32) -> Result<(), Miss> {
    sample.check_read(Block, k, |wanted, into| log.read(wanted, into))
}

#[test]
fn a_crash_on_a_full_disk_loses_nothing() {
    let sample = Sample::small(4);
    let disk = left_open(&sample, 3);
    disk.set_capacity(Some(disk.file_bytes()));
    let log = open(&disk);
    for k in 0..3 {
        assert_eq!(read(&log, &sample, k), Ok(()));
    }
    assert!(log.recovery().damaged.is_empty());
    assert_eq!(log.stats().file_bytes, disk.file_bytes());
    disk.set_capacity(None);
    sample
        .with_record(Block, 3, |record| log.append(record, soon()))
        .unwrap();
    log.close(soon()).unwrap();
    let report = verify(&disk).unwrap();
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    let log = open(&disk);
    assert!((0..4).all(|k| read(&log, &sample, k) == Ok(())));
}

/// One sector of every kind: header, records, the end.
#[test]
fn a_sector_that_cannot_be_read_costs_what_lies_behind_it_in_its_segment() {
    let sample = Sample::small(8);
    let good = left_open(&sample, 7);
    let names = good.names();
    for (name, hits) in [(&names[1], [4, 4, 4, 5, 5]), (&names[0], [7, 7, 7, 7, 7])] {
        for (index, hits) in hits.into_iter().enumerate() {
            let disk = good.copy();
            let at = 2 * PAGE * index + PAGE / 2;
            disk.set_unreadable(Some((name.as_str(), at)));
            let log = open(&disk);
            let found = (0..7).filter(|k| log.contains(&[sample.id(Block, *k)]) == [true]);
            assert!(found.count() >= hits, "byte {at} of {name}");
            assert_eq!(log.stats().file_bytes, disk.file_bytes());
            assert!(disk.names().contains(name));
            log.close(soon()).unwrap();
            disk.set_unreadable(None);
            let log = open(&disk);
            for k in 0..7 {
                assert_eq!(
                    read(&log, &sample, k),
                    Ok(()),
                    "byte {at} of {name}, block {k}"
                );
            }
        }
    }
}

#[test]
fn a_segment_whose_first_page_is_gone_keeps_its_records() {
    let sample = Sample::small(8);
    let good = left_open(&sample, 7);
    for name in good.names() {
        let disk = good.copy();
        disk.damage(&name, |bytes| bytes[..PAGE].fill(0));
        let report = verify(&disk).unwrap();
        assert!(report.findings.iter().any(|finding| finding.file == name));
        let log = open(&disk);
        assert_eq!(log.recovery().damaged.first(), Some(&name));
        for k in 0..7 {
            assert_eq!(read(&log, &sample, k), Ok(()), "block {k}");
        }
    }
}

/// Each segment in turn, one of them with the removal of a record that another one has. The log is not opened without
/// it, and nothing of it is lost or comes back when it can be opened again.
#[test]
fn a_segment_that_cannot_be_opened_is_neither_done_without_nor_lost() {
    let sample = Sample::small(8);
    let good = left_open(&sample, 7);
    let log = open(&good);
    let (namespace, id) = (sample.namespace().digest(), sample.id(Block, 0));
    assert!(log.remove(namespace, id, soon()).unwrap());
    drop(log);
    let names = good.names();
    assert_eq!(names.len(), 3, "{names:?}");
    for name in names {
        let disk = good.copy();
        disk.set_unopenable(Some(&name));
        let medium = Arc::new(disk.clone());
        let policy = Box::new(SecondChance::default());
        let refused = SegmentLog::open(medium, config(), policy, Mode::ReadWrite);
        let text = refused.map(|log| log.stats()).unwrap_err().to_string();
        assert!(text.starts_with("open ") && text.contains(&name), "{text}");
        disk.set_unopenable(None);
        let log = open(&disk);
        assert_eq!(read(&log, &sample, 0), Err(Miss::Absent), "without {name}");
        for k in 1..7 {
            assert_eq!(read(&log, &sample, k), Ok(()), "block {k} without {name}");
        }
    }
}

#[test]
fn a_schema_without_compressed_layers_has_no_blocks() {
    let geometry = V4Geometry {
        layer_ratios: vec![0, 0],
        ..Sample::geometry()
    };
    let schema = CacheSchema::deepseek_v4(&geometry, &Sample::formats()).unwrap();
    let text = RecordShape::block(&schema, 256).unwrap_err().to_string();
    assert!(text.contains("compressed layers is 0"), "{text}");
}

/// A window that is longer than two blocks.
#[test]
fn a_tier_is_measured_with_the_longest_checkpoint() {
    let geometry = V4Geometry {
        window_tokens: 1024,
        ..Sample::geometry()
    };
    let schema = CacheSchema::deepseek_v4(&geometry, &Sample::formats()).unwrap();
    let record_bytes = |position| {
        let shape = RecordShape::checkpoint(&schema, 256, position).unwrap();
        shape.record_bytes()
    };
    assert!(record_bytes(512) < record_bytes(1280));
    let check = |longest_bytes: u64| {
        let segment_bytes = longest_bytes + 2 * PAGE as u64;
        let config = LogConfig {
            capacity_bytes: 4 * segment_bytes,
            segment_bytes,
            ..LogConfig::default()
        };
        check_tier(&open_with(&SimDisk::new(), config), &schema, 256)
    };
    assert!(check(record_bytes(512)).is_err());
    check(record_bytes(1280)).unwrap();
}
