//! Records that are not in the page cache: read past it, verified as every other one.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use kvgate_hicache::Miss;
use kvgate_hicache::log::{LogConfig, SegmentLog};
use kvgate_hicache::record::RecordKind::Block;
use kvgate_hicache::testkit::Sample;
use kvgate_transfer::Deadline;
use rustix::fs::{Advice, fadvise};
use rustix::io::{ReadWriteFlags, preadv2};

const BLOCKS: u32 = 3;

/// The one segment of a log.
fn segment(folder: &Path) -> File {
    let is_segment = |path: &std::path::PathBuf| path.extension().is_some_and(|it| it == "kvlog");
    let files = std::fs::read_dir(folder).unwrap();
    let found: Vec<_> = files
        .map(|entry| entry.unwrap().path())
        .filter(is_segment)
        .collect();
    assert_eq!(found.len(), 1);
    File::options()
        .read(true)
        .write(true)
        .open(&found[0])
        .unwrap()
}

/// Lets go of what the page cache has of the segment. `false` where the file system keeps files in memory only.
fn drop_page_cache(folder: &Path) -> bool {
    let file = segment(folder);
    file.sync_all().unwrap();
    fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    let mut first = [0];
    let into = &mut [std::io::IoSliceMut::new(&mut first)];
    preadv2(&file, into, 4_096, ReadWriteFlags::NOWAIT).is_err()
}

#[test]
fn what_left_the_page_cache_is_read_and_verified() {
    // A temporary folder may be memory; that of the build is not.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let sample = Sample::small(BLOCKS);
    let log = SegmentLog::open_directory(folder.path(), LogConfig::default()).unwrap();
    let soon = || Deadline::after_ms(10_000);
    for k in 0..BLOCKS {
        sample
            .with_record(Block, k, |record| log.append(record, soon()))
            .unwrap();
    }
    let read = |k: u32| sample.check_read(Block, k, |wanted, into| log.read(wanted, into));
    for _ in 0..2 {
        drop_page_cache(folder.path());
        for k in 0..BLOCKS {
            read(k).unwrap();
        }
    }
    // One wrong byte of the payload of the second one.
    let file = segment(folder.path());
    let record_bytes = (file.metadata().unwrap().len() - 4_096) / u64::from(BLOCKS);
    let at = 4_096 + record_bytes + 4_096 + 100;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    let _was_cold = drop_page_cache(folder.path());
    read(0).unwrap();
    assert!(
        matches!(read(1), Err(Miss::Checksum { .. })),
        "{:?}",
        read(1)
    );
    read(2).unwrap();
    // The end of the last one is not there.
    file.set_len(4_096 + 3 * record_bytes - 4_096).unwrap();
    let _was_cold = drop_page_cache(folder.path());
    assert!(matches!(read(2), Err(Miss::Length { .. })));
}
