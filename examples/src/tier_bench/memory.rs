//! Storing into and reading from the memory of the process.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use kvgate_hicache::record::crc::copy_crc32c;
use kvgate_hicache::tier::{MemoryTier, Tier};

use super::Args;
use super::bare::{Side, alternate};
use super::blocks::Blocks;
use super::measure::{
    COPY_CRC, Ring, SLICE_BYTES, count_bad, failed, fill, reads, slice_count, soon,
};
use super::row::Row;
use crate::handoff::failure::Failure;

/// Puts into a full tier beside a bare copy with a checksum, and beside a bare copy.
pub(super) fn put(args: &Args) -> Result<Row, Failure> {
    let held = args.working_set / args.block_bytes;
    let blocks = Blocks::new(args.block_bytes, 2 * held)?;
    let tier = MemoryTier::new(held * blocks.shape.record_bytes());
    let next = std::cell::Cell::new(0);
    let put = |count: u64, times: &mut Vec<Duration>| {
        for _ in 0..count {
            let begun = Instant::now();
            tier.write(&blocks.record(next.get() % blocks.count()), soon())
                .map_err(|error| failed("put", &error))?;
            times.push(begun.elapsed());
            next.set(next.get() + 1);
        }
        Ok(())
    };
    put(held, &mut Vec::new())?;
    let bytes = blocks.shape.payload_bytes();
    let count = slice_count(args);
    // The bare loops write as much memory as the tier holds.
    let ring = RefCell::new(Ring::new(args.working_set, bytes));
    let mut step = 0;
    let with_crc = |count: u64, _: &mut Vec<Duration>| {
        for _ in 0..count {
            step += 1;
            let from = blocks.payload(blocks.shuffled(step));
            std::hint::black_box(copy_crc32c(ring.borrow_mut().next(), from));
        }
        Ok(())
    };
    let mut step = 0;
    let plain = |count: u64, _: &mut Vec<Duration>| {
        for _ in 0..count {
            step += 1;
            let mut ring = ring.borrow_mut();
            let into = ring.next();
            into.copy_from_slice(blocks.payload(blocks.shuffled(step)));
            std::hint::black_box(into);
        }
        Ok(())
    };
    let bares = vec![
        Side::new(COPY_CRC, count, with_crc),
        Side::new("memcpy", count, plain),
    ];
    let tier_side = Side::new("", count, put);
    let figures = alternate(bytes, args.time(), tier_side, bares)?;
    let mut row = Row::new(args, "memory", "put", &figures);
    let stored = next.get().saturating_sub(held)..next.get();
    row.bad_blocks = count_bad(&tier, &blocks, stored.map(|k| k % blocks.count()));
    Ok(row)
}

/// Gets beside a bare copy with a checksum, and beside a bare copy.
pub(super) fn get(args: &Args) -> Result<Row, Failure> {
    let blocks = Blocks::new(args.block_bytes, args.working_set / args.block_bytes)?;
    let tier = MemoryTier::new(u64::MAX);
    fill(&tier, &blocks)?;
    let bytes = blocks.shape.payload_bytes();
    let count = slice_count(args);
    let mut targets = Ring::new(SLICE_BYTES, bytes);
    let get = reads(&tier, &blocks, &mut targets);
    // The bare loops read as much memory as the tier holds, in the same order.
    let from = Ring::new(args.working_set, bytes);
    let into = RefCell::new(Ring::new(SLICE_BYTES, bytes));
    let mut step = 0;
    let with_crc = |count: u64, _: &mut Vec<Duration>| {
        for _ in 0..count {
            step += 1;
            let from = from.at(blocks.shuffled(step));
            std::hint::black_box(copy_crc32c(into.borrow_mut().next(), from));
        }
        Ok(())
    };
    let mut step = 0;
    let plain = |count: u64, _: &mut Vec<Duration>| {
        for _ in 0..count {
            step += 1;
            let mut into = into.borrow_mut();
            let into = into.next();
            into.copy_from_slice(from.at(blocks.shuffled(step)));
            std::hint::black_box(into);
        }
        Ok(())
    };
    let bares = vec![
        Side::new(COPY_CRC, count, with_crc),
        Side::new("memcpy", count, plain),
    ];
    let figures = alternate(bytes, args.time(), Side::new("", count, get), bares)?;
    let mut row = Row::new(args, "memory", "get", &figures);
    row.bad_blocks = count_bad(&tier, &blocks, 0..blocks.count());
    Ok(row)
}
