//! Bringing the blocks of a prefix from the disk into memory, in their order.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use kvgate_hicache::log::Durability;
use kvgate_hicache::record::Record;
use kvgate_hicache::record::crc::copy_crc32c;
use kvgate_hicache::tier::{MemoryTier, Tier};

use super::Args;
use super::bare::{Side, alternate};
use super::blocks::Blocks;
use super::file::drop_page_cache;
use super::measure::{
    Folder, Ring, count_bad, failed, fill, open, slice_count, soon, write_records,
};
use super::row::Row;
use crate::handoff::failure::Failure;

/// Verified reads out of a log whose pages were dropped from the page cache, each stored into a tier in memory, beside
/// plain reads of the same length in the same order and a copy with a checksum.
pub(super) fn run(args: &Args) -> Result<Row, Failure> {
    let folder = Folder::new(args, "prefetch")?;
    let log = open(&folder.path, args, Durability::None)?;
    let blocks = Blocks::new(args.block_bytes, args.working_set / args.block_bytes)?;
    fill(&log, &blocks)?;
    let (bytes, record_bytes) = (blocks.shape.payload_bytes(), blocks.shape.record_bytes());
    let bare = Folder::new(args, "prefetch-bare")?;
    let file = bare.bare_file()?;
    write_records(&file, &blocks)?;
    let count = slice_count(args);
    // Half of the blocks: what was brought in one slice has left before it is brought again.
    let memory = MemoryTier::new(blocks.count() / 2 * record_bytes);
    let mut into = vec![0; bytes as usize];
    let mut next = 0;
    let bring = |count: u64, times: &mut Vec<Duration>| {
        for _ in 0..count {
            let begun = Instant::now();
            let wanted = blocks.wanted(next % blocks.count());
            let verified = log
                .read(wanted, &mut into)
                .map_err(|miss| failed("get", &miss))?;
            let record = Record {
                namespace: wanted.namespace,
                id: wanted.id,
                parent: wanted.parent,
                position: wanted.position,
                shape: wanted.shape,
                payload: verified.payload(),
            };
            memory
                .write(&record, soon())
                .map_err(|error| failed("put", &error))?;
            times.push(begun.elapsed());
            next += 1;
        }
        Ok(())
    };
    let mut ring = Ring::new(args.working_set / 2, record_bytes);
    let mut buffer = vec![0; record_bytes as usize];
    let mut at = 0;
    let plain = |count: u64, _: &mut Vec<Duration>| {
        for _ in 0..count {
            file.read_exact_at(&mut buffer, at % blocks.count() * record_bytes)
                .map_err(|error| failed("bare get", &error))?;
            std::hint::black_box(copy_crc32c(ring.next(), &buffer));
            at += 1;
        }
        Ok(())
    };
    let tier = Side::new("", count, bring).before(|| drop_page_cache(&folder.path));
    let bares =
        vec![Side::new("pread, copy and CRC", count, plain).before(|| drop_page_cache(&bare.path))];
    let figures = alternate(bytes, args.time(), tier, bares)?;
    let mut row = Row::new(args, "file", "prefetch", &figures);
    row.case = "page cache dropped";
    let held: Vec<u64> = (0..blocks.count())
        .filter(|k| {
            memory.probe(&[blocks.id(*k)], soon())[0] == kvgate_hicache::tier::Presence::Present
        })
        .collect();
    if held.is_empty() {
        return Err(failed(
            "prefetch",
            &"the memory holds nothing of what was brought",
        ));
    }
    row.bad_blocks = count_bad(&memory, &blocks, held.into_iter());
    Ok(row)
}
