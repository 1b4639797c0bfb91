//! Storing and reading.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvgate_hicache::log::{Durability, LogConfig, SegmentLog};
use kvgate_hicache::record::crc::copy_crc32c;
use kvgate_hicache::tier::{MemoryTier, Tier};
use kvgate_transfer::Deadline;

use super::bare::{Figures, alternate};
use super::blocks::Blocks;
use super::{Args, Baseline, Row};
use crate::handoff::failure::{Failure, FailureKind};

/// Bytes of a slice: long enough for the clock, short enough to meet the same moment of the machine.
const SLICE_BYTES: u64 = 64 << 20;

pub(super) fn soon() -> Deadline {
    Deadline::after_ms(60_000)
}

pub(super) fn failed(what: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::new(FailureKind::Internal, format!("{what}: {error}"))
}

fn slice_count(args: &Args) -> u64 {
    let most = args.working_set / args.block_bytes / 4;
    (SLICE_BYTES / args.block_bytes).clamp(1, most.max(1))
}

fn row(args: &Args, tier: &'static str, op: &'static str, name: &'static str, f: &Figures) -> Row {
    Row {
        engine: "kvgate",
        tier,
        op,
        block_bytes: args.block_bytes,
        count: f.count,
        writers: 1,
        durable: false,
        verify: "on",
        gbps_med: f.gbps_med,
        ops_s: f.ops_s,
        p50_us: f.p50_us,
        p99_us: f.p99_us,
        baseline: Baseline {
            name,
            gbps_med: f.bare_gbps_med,
        },
        ratio_med: f.ratio_med,
        bad_blocks: 0,
    }
}

/// Buffers of one length that are used in turn: the memory that a bare loop copies to.
struct Ring {
    buffers: Vec<Vec<u8>>,
    at: usize,
}

impl Ring {
    fn new(total_bytes: u64, buffer_bytes: u64) -> Ring {
        let count = (total_bytes / buffer_bytes).max(2);
        Ring {
            buffers: (0..count).map(|_| vec![1; buffer_bytes as usize]).collect(),
            at: 0,
        }
    }

    fn next(&mut self) -> &mut [u8] {
        self.at = (self.at + 1) % self.buffers.len();
        &mut self.buffers[self.at]
    }
}

/// Copy and checksum in pieces of 16 KiB, and nothing else.
fn bare_copy<'a>(
    blocks: &'a Blocks,
    ring: &'a mut Ring,
) -> impl FnMut(u64, &mut Vec<Duration>) -> Result<(), Failure> + 'a {
    let mut step = 0;
    move |count, _| {
        for _ in 0..count {
            step += 1;
            let from = blocks.payload(blocks.shuffled(step));
            std::hint::black_box(copy_crc32c(ring.next(), from));
        }
        Ok(())
    }
}

/// Puts into a full tier in memory beside a bare copy with a checksum.
pub(super) fn memory_put(args: &Args) -> Result<Row, Failure> {
    let held = args.working_set / args.block_bytes;
    let blocks = Blocks::new(args.block_bytes, 2 * held)?;
    let tier = MemoryTier::new(held * blocks.shape.record_bytes());
    let mut next = 0;
    let mut put = |count: u64, times: &mut Vec<Duration>| {
        for _ in 0..count {
            let begun = Instant::now();
            tier.write(&blocks.record(next % blocks.count()), soon())
                .map_err(|error| failed("put", &error))?;
            times.push(begun.elapsed());
            next += 1;
        }
        Ok(())
    };
    put(held, &mut Vec::new())?;
    let mut ring = Ring::new(args.working_set, blocks.shape.payload_bytes());
    let duration = Duration::from_secs_f64(args.duration);
    let bytes = blocks.shape.payload_bytes();
    let bare = &mut bare_copy(&blocks, &mut ring);
    let figures = alternate(bytes, slice_count(args), duration, &mut put, bare)?;
    let mut row = row(args, "memory", "put", "copy 16 KiB, CRC 16 KiB", &figures);
    row.bad_blocks = count_bad(
        &tier,
        &blocks,
        (next.saturating_sub(held)..next).map(|k| k % blocks.count()),
    );
    Ok(row)
}

/// Gets out of a tier in memory beside a bare copy with a checksum.
pub(super) fn memory_get(args: &Args) -> Result<Row, Failure> {
    let blocks = Blocks::new(args.block_bytes, args.working_set / args.block_bytes)?;
    let tier = MemoryTier::new(u64::MAX);
    fill(&tier, &blocks)?;
    let bytes = blocks.shape.payload_bytes();
    let mut targets = Ring::new(SLICE_BYTES, bytes);
    let mut get = reads(&tier, &blocks, &mut targets);
    // The bare loop reads as much memory as the tier holds.
    let mut from = Ring::new(args.working_set, bytes);
    let mut into = Ring::new(SLICE_BYTES, bytes);
    let mut bare = |count: u64, _: &mut Vec<Duration>| {
        for _ in 0..count {
            std::hint::black_box(copy_crc32c(into.next(), from.next()));
        }
        Ok(())
    };
    let duration = Duration::from_secs_f64(args.duration);
    let figures = alternate(bytes, slice_count(args), duration, &mut get, &mut bare)?;
    let mut row = row(args, "memory", "get", "copy 16 KiB, CRC 16 KiB", &figures);
    row.bad_blocks = count_bad(&tier, &blocks, 0..blocks.count());
    Ok(row)
}

fn fill(tier: &dyn Tier, blocks: &Blocks) -> Result<(), Failure> {
    for k in 0..blocks.count() {
        tier.write(&blocks.record(k), soon())
            .map_err(|error| failed("put", &error))?;
    }
    Ok(())
}

fn reads<'a>(
    tier: &'a dyn Tier,
    blocks: &'a Blocks,
    targets: &'a mut Ring,
) -> impl FnMut(u64, &mut Vec<Duration>) -> Result<(), Failure> + 'a {
    let mut step = 0;
    move |count, times| {
        for _ in 0..count {
            step += 1;
            let begun = Instant::now();
            let wanted = blocks.wanted(blocks.shuffled(step));
            let read = tier.read(wanted, targets.next(), soon());
            let bytes = read.map(|verified| verified.payload_bytes());
            std::hint::black_box(bytes.map_err(|miss| failed("get", &miss))?);
            times.push(begun.elapsed());
        }
        Ok(())
    }
}

/// Records that do not give what was stored. Every one is read again after the clock has stopped.
fn count_bad(tier: &dyn Tier, blocks: &Blocks, ks: impl Iterator<Item = u64>) -> u64 {
    let mut into = vec![0; blocks.shape.payload_bytes() as usize];
    let is_bad = |k: &u64| {
        let read = tier.read(blocks.wanted(*k), &mut into, soon());
        read.map_or(true, |it| it.payload() != blocks.payload(*k))
    };
    ks.filter(is_bad).count() as u64
}

/// A folder for the run, and the guard that removes it.
pub(super) struct Folder {
    pub(super) path: PathBuf,
}

impl Folder {
    pub(super) fn new(args: &Args, name: &str) -> Result<Folder, Failure> {
        let base = args.dir.clone().unwrap_or_else(std::env::temp_dir);
        let path = base.join(format!("tier-bench-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|error| {
            let text = format!("{}: {error}", path.display());
            Failure::new(FailureKind::BadInput, text)
        })?;
        Ok(Folder { path })
    }

    /// The file of a bare loop, which is not there yet.
    fn bare_file(&self) -> Result<File, Failure> {
        File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(self.path.join("bare"))
            .map_err(|error| failed("bare file", &error))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed is left to the owner of the folder.
        let _is_removed = std::fs::remove_dir_all(&self.path);
    }
}

pub(super) fn open(
    path: &Path,
    args: &Args,
    durability: Durability,
) -> Result<SegmentLog, Failure> {
    let config = LogConfig {
        capacity_bytes: (args.working_set * 2).max(512 << 20),
        durability,
        ..LogConfig::default()
    };
    SegmentLog::open_directory(path, config).map_err(|error| failed("open", &error))
}

/// Puts of several writers into the log beside one loop that appends the same bytes and syncs as often.
pub(super) fn file_put(args: &Args) -> Result<Row, Failure> {
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
    let mut next = 0;
    // Records of a group in the last slice: the bare loop syncs as often.
    let group = Cell::new(1);
    let mut put = |count: u64, times: &mut Vec<Duration>| {
        let before = log.stats().group_count;
        let taken = write_all(&log, &blocks, next, count, writers)?;
        times.extend(taken);
        next += count;
        group.set((count / (log.stats().group_count - before).max(1)).max(1));
        Ok(())
    };
    put(count, &mut Vec::new())?;
    let file = folder.bare_file()?;
    let record = blocks.record(0).to_bytes(0);
    let mut at = 0;
    let mut bare = |count: u64, _: &mut Vec<Duration>| -> Result<(), Failure> {
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
    let duration = Duration::from_secs_f64(args.duration);
    let figures = alternate(
        blocks.shape.payload_bytes(),
        count,
        duration,
        &mut put,
        &mut bare,
    )?;
    let name = if args.durable {
        "append, one fdatasync a group"
    } else {
        "append"
    };
    let mut row = row(args, "file", "put", name, &figures);
    (row.writers, row.durable) = (args.writers, args.durable);
    // The oldest ones have made room for the youngest.
    let held: Vec<_> = (0..blocks.count().min(next))
        .filter(|k| log.contains(&[blocks.id(*k)])[0])
        .collect();
    if held.is_empty() {
        return Err(failed("put", &"the log holds nothing of what was stored"));
    }
    row.bad_blocks = count_bad(&log, &blocks, held.into_iter());
    Ok(row)
}

/// Stores blocks `from..from + count` with so many threads. Answers how long each took.
fn write_all(
    log: &SegmentLog,
    blocks: &Blocks,
    from: u64,
    count: u64,
    writers: u64,
) -> Result<Vec<Duration>, Failure> {
    let write = |writer: u64| -> Result<Vec<Duration>, Failure> {
        let mut times = Vec::new();
        for k in (from + writer..from + count).step_by(writers as usize) {
            let begun = Instant::now();
            log.append(&blocks.record(k % blocks.count()), soon())
                .map_err(|error| failed("put", &error))?;
            times.push(begun.elapsed());
        }
        Ok(times)
    };
    std::thread::scope(|scope| {
        let write = &write;
        let threads: Vec<_> = (0..writers)
            .map(|w| scope.spawn(move || write(w)))
            .collect();
        let mut all = Vec::new();
        for thread in threads {
            let times = thread
                .join()
                .map_err(|_| failed("put", &"a writer ended"))?;
            all.extend(times?);
        }
        Ok(all)
    })
}

/// Gets out of a log in the page cache beside plain reads of the same length.
pub(super) fn file_get(args: &Args) -> Result<Row, Failure> {
    let folder = Folder::new(args, "get")?;
    let log = open(&folder.path, args, Durability::None)?;
    let blocks = Blocks::new(args.block_bytes, args.working_set / args.block_bytes)?;
    fill(&log, &blocks)?;
    let bytes = blocks.shape.payload_bytes();
    let record_bytes = blocks.shape.record_bytes();
    let file = folder.bare_file()?;
    let record = blocks.record(0).to_bytes(0);
    for k in 0..blocks.count() {
        file.write_all_at(&record, k * record_bytes)
            .map_err(|error| failed("bare file", &error))?;
    }
    let mut targets = Ring::new(SLICE_BYTES, bytes);
    let mut get = reads(&log, &blocks, &mut targets);
    let mut into = Ring::new(SLICE_BYTES, record_bytes);
    let mut step = 0;
    let mut bare = |count: u64, _: &mut Vec<Duration>| -> Result<(), Failure> {
        for _ in 0..count {
            step += 1;
            let at = blocks.shuffled(step) * record_bytes;
            file.read_exact_at(into.next(), at)
                .map_err(|error| failed("bare get", &error))?;
        }
        Ok(())
    };
    let duration = Duration::from_secs_f64(args.duration);
    let figures = alternate(bytes, slice_count(args), duration, &mut get, &mut bare)?;
    let mut row = row(args, "file", "get", "pread, page cache", &figures);
    row.bad_blocks = count_bad(&log, &blocks, 0..blocks.count());
    Ok(row)
}
