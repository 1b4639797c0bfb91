//! What is done once: looking up a long prefix, opening a log.

use std::time::Instant;

use kvgate_hicache::identity::{KeyChain, Namespace};
use kvgate_hicache::log::Durability;
use kvgate_hicache::record::{RecordId, RecordKind};
use kvgate_hicache::tier::{MemoryTier, Presence, Tier};
use kvgate_kvcache::schema::CacheSchema;
use kvgate_kvcache::{Formats, V4Geometry};
use sha2::{Digest, Sha256};

use super::bare::median;
use super::blocks::Blocks;
use super::measure::{Folder, failed, open, soon};
use super::{Args, Baseline, Row};
use crate::handoff::failure::Failure;

/// The longest context of the model.
const TOKENS: u32 = 1 << 20;
const ROUNDS: usize = 9;

/// Time of `work`, in microseconds, and its answer.
fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let begun = Instant::now();
    let answer = std::hint::black_box(work());
    (begun.elapsed().as_secs_f64() * 1e6, answer)
}

fn row(args: &Args, tier: &'static str, op: &'static str, bytes: u64, times: &mut [f64]) -> Row {
    let p50_us = median(times);
    Row {
        engine: "kvgate",
        tier,
        op,
        block_bytes: args.block_bytes,
        count: times.len() as u64,
        writers: 1,
        durable: false,
        verify: "on",
        gbps_med: bytes as f64 / p50_us / 1e3,
        ops_s: 1e6 / p50_us,
        p50_us,
        p99_us: times.last().copied().unwrap_or(p50_us),
        baseline: Baseline {
            name: "",
            gbps_med: 0.0,
        },
        ratio_med: 0.0,
        bad_blocks: 0,
    }
}

/// Names of 1,048,576 tokens and whether a tier has them, beside SHA-256 of the same bytes in one piece.
pub(super) fn lookup(args: &Args) -> Result<Row, Failure> {
    let schema = CacheSchema::deepseek_v4(&V4Geometry::flash(), &Formats::default())
        .map_err(|error| failed("schema", &error))?;
    let namespace = Namespace::new(&schema, 256, b"").map_err(|e| failed("namespace", &e))?;
    let tokens: Vec<u32> = (0..TOKENS)
        .map(|i| i.wrapping_mul(2_654_435_761) >> 15)
        .collect();
    let bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    let tier = MemoryTier::new(1 << 20);
    let (mut times, mut bare) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (time, found) = timed(|| {
            let chain = KeyChain::of(&namespace, &tokens);
            let id = |&key| RecordId {
                kind: RecordKind::Block,
                key,
            };
            let ids: Vec<RecordId> = chain.keys().iter().map(id).collect();
            tier.probe(&ids, soon())
        });
        if found != [Presence::Absent; TOKENS as usize / 256] {
            return Err(failed("lookup", &"an empty tier has a record"));
        }
        times.push(time);
        bare.push(timed(|| Sha256::digest(&bytes)).0);
    }
    let mut row = row(args, "memory", "lookup", u64::from(TOKENS) * 4, &mut times);
    let bare_us = median(&mut bare);
    row.block_bytes = 1024;
    row.ratio_med = bare_us / row.p50_us;
    row.baseline = Baseline {
        name: "SHA-256 of the tokens",
        gbps_med: f64::from(TOKENS) * 4.0 / bare_us / 1e3,
    };
    Ok(row)
}

/// Opening a log that was closed and one that was not, beside reading its files.
pub(super) fn recover(args: &Args) -> Result<Vec<Row>, Failure> {
    let folder = Folder::new(args, "recover")?;
    let blocks = Blocks::new(args.block_bytes, args.working_set / args.block_bytes)?;
    let log = open(&folder.path, args, Durability::None)?;
    for k in 0..blocks.count() {
        log.append(&blocks.record(k), soon())
            .map_err(|error| failed("put", &error))?;
    }
    let file_bytes = log.stats().file_bytes;
    // As a killed process leaves it: the last segment has no index.
    drop(log);
    let (read_us, read_bytes) = timed(|| read_files(&folder.path));
    let read_bytes = read_bytes.map_err(|error| failed("read", &error))?;
    let mut rows = Vec::new();
    for (op, rounds) in [("recover, not closed", 1), ("recover, closed", 3)] {
        let (mut times, mut bad_blocks) = (Vec::new(), 0);
        for _ in 0..rounds {
            let (time, log) = timed(|| open(&folder.path, args, Durability::None));
            let log = log?;
            times.push(time);
            bad_blocks += blocks.count() - log.stats().record_count;
            if log.recovery().was_closed != (op == "recover, closed") {
                return Err(failed(op, &"the log was in another state"));
            }
            log.close(soon()).map_err(|error| failed("close", &error))?;
        }
        let mut row = row(args, "file", op, file_bytes, &mut times);
        row.bad_blocks = bad_blocks;
        row.ratio_med = read_us / row.p50_us;
        row.baseline = Baseline {
            name: "reading the files",
            gbps_med: read_bytes as f64 / read_us / 1e3,
        };
        rows.push(row);
    }
    Ok(rows)
}

fn read_files(folder: &std::path::Path) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder)? {
        bytes += std::fs::read(entry?.path())?.len() as u64;
    }
    Ok(bytes)
}
