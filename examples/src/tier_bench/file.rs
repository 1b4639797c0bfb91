//! Storing into and reading from a segment log on the disk.

use std::cell::Cell;
use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use kvgate_hicache::log::{Durability, SegmentLog};
use rustix::fs::{Advice, OFlags, fadvise};

use super::Args;
use super::bare::{Side, alternate};
use super::blocks::Blocks;
use super::measure::{
    Folder, Ring, SLICE_BYTES, count_bad, failed, fill, open, reads, slice_count, soon,
    write_records,
};
use super::row::Row;
use crate::handoff::failure::Failure;

/// What O_DIRECT wants buffers and places to be a multiple of.
const ALIGN_BYTES: usize = 4096;

/// Puts of several writers into the log beside one loop that appends the same bytes and syncs as often, and beside a
/// file a block.
pub(super) fn put(args: &Args) -> Result<Row, Failure> {
    let folder = Folder::new(args, "put")?;
    let durability = if args.durable {
        Durability::Batch
    } else {
        Durability::None
    };
    let log = open(&folder.path, args, durability)?;
    let writers = u64::from(args.writers);
    let count = slice_count(args).max(writers).next_multiple_of(writers);
    // Enough names that none is there when it comes again.
    let blocks = Blocks::new(args.block_bytes, args.working_set / args.block_bytes * 8)?;
    let next = Cell::new(0);
    // Records of a group in the last slice: the bare loop syncs as often.
    let group = Cell::new(1);
    let put = |count: u64, times: &mut Vec<Duration>| {
        let before = log.stats().group_count;
        let taken = write_all(&log, &blocks, next.get(), count, writers)?;
        times.extend(taken);
        next.set(next.get() + count);
        group.set((count / (log.stats().group_count - before).max(1)).max(1));
        Ok(())
    };
    put(count, &mut Vec::new())?;
    let file = folder.bare_file()?;
    let record = blocks.record(0).to_bytes(0);
    let mut at = 0;
    let append = |count: u64, _: &mut Vec<Duration>| -> Result<(), Failure> {
        if at > args.working_set {
            file.set_len(0)
                .map_err(|error| failed("bare file", &error))?;
            at = 0;
        }
        for index in 0..count {
            file.write_all_at(&record, at)
                .map_err(|error| failed("bare put", &error))?;
            at += record.len() as u64;
            if args.durable && (index + 1) % group.get() == 0 {
                file.sync_data()
                    .map_err(|error| failed("bare sync", &error))?;
            }
        }
        Ok(())
    };
    let files = Folder::new(args, "files")?;
    let mut names = 0;
    let a_file_each = |count: u64, _: &mut Vec<Duration>| -> Result<(), Failure> {
        names += count;
        write_files(&files.path, &record, names - count, count, args)
    };
    let (append_name, files_name, fewer) = match args.durable {
        true => ("append, one fdatasync a group", "a file a block, fsync", 8),
        false => ("append", "a file a block", 1),
    };
    // Files that are synced one by one take long: fewer in a slice.
    let files_count = (count / fewer).max(writers).next_multiple_of(writers);
    let bares = vec![
        Side::new(append_name, count, append),
        Side::new(files_name, files_count, a_file_each),
    ];
    let bytes = blocks.shape.payload_bytes();
    let figures = alternate(bytes, args.time(), Side::new("", count, put), bares)?;
    let mut row = Row::new(args, "file", "put", &figures);
    (row.writers, row.durable) = (args.writers, args.durable);
    // The oldest ones have made room for the youngest.
    let held: Vec<_> = (0..blocks.count().min(next.get()))
        .filter(|k| log.contains(&[blocks.id(*k)])[0])
        .collect();
    if held.is_empty() {
        return Err(failed("put", &"the log holds nothing of what was stored"));
    }
    row.bad_blocks = count_bad(&log, &blocks, held.into_iter());
    Ok(row)
}

/// Does `one` for numbers `from..from + count` with so many threads, each with a state of its own. Answers how long
/// each took.
fn with_threads<S>(
    (from, count): (u64, u64),
    threads: u64,
    begin: impl Fn(u64) -> S + Sync,
    one: impl Fn(&mut S, u64) -> Result<(), Failure> + Sync,
) -> Result<Vec<Duration>, Failure> {
    let work = |thread: u64| -> Result<Vec<Duration>, Failure> {
        let mut times = Vec::new();
        let mut state = begin(thread);
        for k in (from + thread..from + count).step_by(threads as usize) {
            let begun = Instant::now();
            one(&mut state, k)?;
            times.push(begun.elapsed());
        }
        Ok(times)
    };
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || work(thread)))
            .collect();
        let mut all = Vec::new();
        for thread in threads {
            let times = thread
                .join()
                .map_err(|_| failed("slice", &"a thread ended"))?;
            all.extend(times?);
        }
        Ok(all)
    })
}

/// Stores blocks `from..from + count` with so many threads.
fn write_all(
    log: &SegmentLog,
    blocks: &Blocks,
    from: u64,
    count: u64,
    writers: u64,
) -> Result<Vec<Duration>, Failure> {
    with_threads((from, count), writers, drop, |(), k| {
        log.append(&blocks.record(k % blocks.count()), soon())
            .map_err(|error| failed("put", &error))?;
        Ok(())
    })
}

/// Files that are there at most; a name that comes again replaces its file.
const FILE_NAMES: u64 = 512;

/// A temporary name, the bytes, another name; synced if asked: the file, and the folder.
fn write_files(
    folder: &Path,
    record: &[u8],
    from: u64,
    count: u64,
    args: &Args,
) -> Result<(), Failure> {
    let write = |thread: u64, k: u64| -> std::io::Result<()> {
        let draft = folder.join(format!("draft-{thread}"));
        let file = File::create(&draft)?;
        file.write_all_at(record, 0)?;
        if args.durable {
            file.sync_data()?;
        }
        std::fs::rename(&draft, folder.join(format!("block-{}", k % FILE_NAMES)))?;
        match args.durable {
            true => File::open(folder)?.sync_all(),
            false => Ok(()),
        }
    };
    with_threads(
        (from, count),
        u64::from(args.writers),
        |t| t,
        |thread, k| write(*thread, k).map_err(|error| failed("a file a block", &error)),
    )?;
    Ok(())
}

/// Gets out of a log in the page cache beside plain reads of the same length.
pub(super) fn get(args: &Args) -> Result<Row, Failure> {
    let folder = Folder::new(args, "get")?;
    let log = open(&folder.path, args, Durability::None)?;
    let blocks = Blocks::new(args.block_bytes, args.working_set / args.block_bytes)?;
    fill(&log, &blocks)?;
    let bytes = blocks.shape.payload_bytes();
    let record_bytes = blocks.shape.record_bytes();
    let file = folder.bare_file()?;
    write_records(&file, &blocks)?;
    let mut targets = Ring::new(SLICE_BYTES, bytes);
    let get = reads(&log, &blocks, &mut targets);
    let mut into = Ring::new(SLICE_BYTES, record_bytes);
    let mut step = 0;
    let bare = |count: u64, _: &mut Vec<Duration>| -> Result<(), Failure> {
        for _ in 0..count {
            step += 1;
            let at = blocks.shuffled(step) * record_bytes;
            file.read_exact_at(into.next(), at)
                .map_err(|error| failed("bare get", &error))?;
        }
        Ok(())
    };
    let count = slice_count(args);
    let bares = vec![Side::new("pread, page cache", count, bare)];
    let figures = alternate(bytes, args.time(), Side::new("", count, get), bares)?;
    let mut row = Row::new(args, "file", "get", &figures);
    row.case = "page cache";
    row.bad_blocks = count_bad(&log, &blocks, 0..blocks.count());
    Ok(row)
}

/// Gets out of a log whose pages were dropped from the page cache, beside reads past the page cache of the same
/// length, as many at once.
pub(super) fn get_cold(args: &Args) -> Result<Row, Failure> {
    let folder = Folder::new(args, "cold")?;
    let log = open(&folder.path, args, Durability::None)?;
    let blocks = Blocks::new(args.block_bytes, args.working_set / args.block_bytes)?;
    fill(&log, &blocks)?;
    let bytes = blocks.shape.payload_bytes();
    let record_bytes = blocks.shape.record_bytes();
    let bare = Folder::new(args, "bare")?;
    let file = bare.bare_file()?;
    write_records(&file, &blocks)?;
    drop(file);
    let direct = File::options()
        .read(true)
        .custom_flags(OFlags::DIRECT.bits() as i32)
        .open(bare.path.join("bare"))
        .map_err(|error| failed("O_DIRECT", &error))?;
    let readers = u64::from(args.writers);
    let buffer = |bytes: usize| move |_: u64| vec![1_u8; bytes];
    let next = Cell::new(0);
    let get = |count: u64, times: &mut Vec<Duration>| {
        let from = next.replace(next.get() + count);
        let read = |target: &mut Vec<u8>, step: u64| {
            let found = log.read(blocks.wanted(blocks.shuffled(step)), target);
            let bytes = found.map(|verified| verified.payload_bytes());
            std::hint::black_box(bytes.map_err(|miss| failed("get", &miss))?);
            Ok(())
        };
        let range = (from, count);
        times.extend(with_threads(range, readers, buffer(bytes as usize), read)?);
        Ok(())
    };
    let from = Cell::new(0);
    let raw = buffer(record_bytes as usize + ALIGN_BYTES);
    let bare_get = |count: u64, _: &mut Vec<Duration>| {
        let first = from.replace(from.get() + count);
        let read = |buffer: &mut Vec<u8>, step: u64| {
            let start = buffer.as_ptr().align_offset(ALIGN_BYTES);
            let into = &mut buffer[start..start + record_bytes as usize];
            direct
                .read_exact_at(into, blocks.shuffled(step) * record_bytes)
                .map_err(|error| failed("bare get", &error))
        };
        with_threads((first, count), readers, raw, read)?;
        Ok(())
    };
    let count = slice_count(args).max(readers).next_multiple_of(readers);
    let tier = Side::new("", count, get).before(|| drop_page_cache(&folder.path));
    let bares = vec![Side::new("O_DIRECT pread", count, bare_get)];
    let figures = alternate(bytes, args.time(), tier, bares)?;
    let mut row = Row::new(args, "file", "get", &figures);
    row.case = "page cache dropped";
    row.writers = args.writers;
    row.bad_blocks = count_bad(&log, &blocks, 0..blocks.count());
    Ok(row)
}

/// Writes what is dirty and lets the pages of every file go.
pub(super) fn drop_page_cache(folder: &Path) -> Result<(), Failure> {
    let drop_one = |path: &Path| -> std::io::Result<()> {
        let file = File::open(path)?;
        file.sync_all()?;
        fadvise(&file, 0, None::<NonZeroU64>, Advice::DontNeed)?;
        Ok(())
    };
    let entries = std::fs::read_dir(folder).map_err(|error| failed("page cache", &error))?;
    for entry in entries {
        let path = entry.map_err(|error| failed("page cache", &error))?.path();
        drop_one(&path).map_err(|error| failed("page cache", &error))?;
    }
    Ok(())
}
