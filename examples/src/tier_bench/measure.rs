//! What the measurements share: buffers, folders, the loop of reads, the count of wrong blocks.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvgate_hicache::log::{Durability, LogConfig, SegmentLog};
use kvgate_hicache::tier::Tier;
use kvgate_transfer::Deadline;

use super::Args;
use super::blocks::Blocks;
use crate::handoff::failure::{Failure, FailureKind};

/// Bytes of a slice: long enough for the clock, short enough to meet the same moment of the machine.
pub(super) const SLICE_BYTES: u64 = 64 << 20;

/// The bare loop of everything that is verified.
pub(super) const COPY_CRC: &str = "copy 16 KiB, CRC 16 KiB";

pub(super) fn soon() -> Deadline {
    Deadline::after_ms(60_000)
}

pub(super) fn failed(what: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::new(FailureKind::Internal, format!("{what}: {error}"))
}

pub(super) fn slice_count(args: &Args) -> u64 {
    let most = args.working_set / args.block_bytes / 4;
    (SLICE_BYTES / args.block_bytes).clamp(1, most.max(1))
}

/// Buffers of one length that are used in turn: the memory that a bare loop copies from or to.
pub(super) struct Ring {
    buffers: Vec<Vec<u8>>,
    at: usize,
}

impl Ring {
    pub(super) fn new(total_bytes: u64, buffer_bytes: u64) -> Ring {
        let count = (total_bytes / buffer_bytes).max(2);
        Ring {
            buffers: (0..count).map(|_| vec![1; buffer_bytes as usize]).collect(),
            at: 0,
        }
    }

    pub(super) fn next(&mut self) -> &mut [u8] {
        self.at = (self.at + 1) % self.buffers.len();
        &mut self.buffers[self.at]
    }

    /// The buffer of block `k`.
    pub(super) fn at(&self, k: u64) -> &[u8] {
        &self.buffers[(k % self.buffers.len() as u64) as usize]
    }
}

/// Stores every block.
pub(super) fn fill(tier: &dyn Tier, blocks: &Blocks) -> Result<(), Failure> {
    for k in 0..blocks.count() {
        tier.write(&blocks.record(k), soon())
            .map_err(|error| failed("put", &error))?;
    }
    Ok(())
}

/// The loop of reads, in no order that a cache could guess.
pub(super) fn reads<'a>(
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
pub(super) fn count_bad(tier: &dyn Tier, blocks: &Blocks, ks: impl Iterator<Item = u64>) -> u64 {
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
    pub(super) fn bare_file(&self) -> Result<File, Failure> {
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

/// A log that is large enough for twice the working set.
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

/// As many records as there are blocks, one behind the other in the file of a bare loop.
pub(super) fn write_records(file: &File, blocks: &Blocks) -> Result<(), Failure> {
    use std::os::unix::fs::FileExt;
    let record = blocks.record(0).to_bytes(0);
    for k in 0..blocks.count() {
        file.write_all_at(&record, k * record.len() as u64)
            .map_err(|error| failed("bare file", &error))?;
    }
    file.sync_data()
        .map_err(|error| failed("bare file", &error))
}
