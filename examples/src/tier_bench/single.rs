//! Looking up prefixes up to the longest one.

use std::time::Instant;

use kvgate_hicache::identity::{KeyChain, Namespace};
use kvgate_hicache::record::{RecordId, RecordKind};
use kvgate_hicache::tier::{MemoryTier, Presence, Tier};
use kvgate_kvcache::schema::CacheSchema;
use kvgate_kvcache::{Formats, V4Geometry};
use sha2::{Digest, Sha256};

use super::Args;
use super::bare::median;
use super::measure::{failed, soon};
use super::row::{Baseline, Row};
use crate::handoff::failure::Failure;

/// The longest context of the model.
const TOKENS: u32 = 1 << 20;
/// The shortest prefix of the curve.
const LEAST_TOKENS: u32 = 1 << 12;
const ROUNDS: usize = 9;

/// Time of `work`, in microseconds, and its answer.
pub(super) fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let begun = Instant::now();
    let answer = std::hint::black_box(work());
    (begun.elapsed().as_secs_f64() * 1e6, answer)
}

/// A row out of the times of whole runs, in microseconds.
pub(super) fn row(
    args: &Args,
    tier: &'static str,
    op: &'static str,
    bytes: u64,
    times: &mut [f64],
) -> Row {
    let p50_us = median(times);
    Row {
        engine: "kvgate".to_owned(),
        tier,
        op,
        block_bytes: args.block_bytes,
        count: times.len() as u64,
        writers: 1,
        verify: "on",
        gbps_med: bytes as f64 / p50_us / 1e3,
        ops_s: 1e6 / p50_us,
        p50_us,
        p99_us: times.last().copied().unwrap_or(p50_us),
        ..Row::default()
    }
}

/// Names of prefixes up to 1,048,576 tokens and whether a tier has them, beside SHA-256 of the same bytes in one
/// piece. The tier has every second block.
pub(super) fn lookup(args: &Args) -> Result<Vec<Row>, Failure> {
    let schema = CacheSchema::deepseek_v4(&V4Geometry::flash(), &Formats::default())
        .map_err(|error| failed("schema", &error))?;
    let namespace = Namespace::new(&schema, 256, b"").map_err(|e| failed("namespace", &e))?;
    let tokens: Vec<u32> = (0..TOKENS)
        .map(|i| i.wrapping_mul(2_654_435_761) >> 15)
        .collect();
    let index = lookup_index(&namespace, &tokens)?;
    let lengths = std::iter::successors(Some(TOKENS), |tokens| Some(tokens / 4));
    let lengths = lengths.take_while(|tokens| *tokens >= LEAST_TOKENS);
    lengths
        .map(|count| lookup_row(args, &namespace, &tokens[..count as usize], &index))
        .collect()
}

/// A tier with a small record under the name of every second block.
fn lookup_index(namespace: &Namespace, tokens: &[u32]) -> Result<MemoryTier, Failure> {
    let geometry = V4Geometry {
        layer_ratios: vec![4],
        head_dim: 4,
        rope_dim: 2,
        index_head_dim: 2,
        ..V4Geometry::flash()
    };
    let formats = Formats {
        latent: kvgate_kvcache::LatentFormat::F32,
        index_k: kvgate_kvcache::IndexKFormat::F32,
        ..Formats::default()
    };
    let small =
        CacheSchema::deepseek_v4(&geometry, &formats).map_err(|error| failed("schema", &error))?;
    let shape = kvgate_hicache::record::RecordShape::block(&small, 256)
        .map_err(|error| failed("shape", &error))?;
    let payload = vec![0; shape.payload_bytes() as usize];
    let tier = MemoryTier::new(u64::MAX);
    let chain = KeyChain::of(namespace, tokens);
    for (k, &key) in chain.keys().iter().enumerate().step_by(2) {
        let record = kvgate_hicache::record::Record {
            namespace: namespace.digest(),
            id: block(key),
            parent: namespace.root(),
            position: k as u64 * 256,
            shape: &shape,
            payload: &payload,
        };
        tier.write(&record, soon())
            .map_err(|error| failed("put", &error))?;
    }
    Ok(tier)
}

fn block(key: kvgate_hicache::identity::BlockKey) -> RecordId {
    RecordId {
        kind: RecordKind::Block,
        key,
    }
}

fn lookup_row(
    args: &Args,
    namespace: &Namespace,
    tokens: &[u32],
    tier: &MemoryTier,
) -> Result<Row, Failure> {
    let bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    let (mut times, mut bare) = (Vec::new(), Vec::new());
    let mut ratios = Vec::new();
    let mut bad_blocks = 0;
    for _ in 0..ROUNDS {
        let (time, found) = timed(|| {
            let chain = KeyChain::of(namespace, tokens);
            let ids: Vec<RecordId> = chain.keys().iter().map(|&key| block(key)).collect();
            tier.probe(&ids, soon())
        });
        let expected = |k: usize| match k % 2 {
            0 => Presence::Present,
            _ => Presence::Absent,
        };
        let wrong = found
            .iter()
            .enumerate()
            .filter(|(k, at)| **at != expected(*k));
        bad_blocks += wrong.count() as u64;
        let bare_us = timed(|| Sha256::digest(&bytes)).0;
        times.push(time);
        bare.push(bare_us);
        ratios.push(bare_us / time);
    }
    let mut row = row(args, "memory", "lookup", bytes.len() as u64, &mut times);
    row.block_bytes = 1024;
    row.tokens = Some(tokens.len() as u32);
    row.ratio_med = median(&mut ratios);
    row.bad_blocks = bad_blocks;
    row.baseline = Baseline {
        name: "SHA-256 of the tokens".to_owned(),
        gbps_med: bytes.len() as f64 / median(&mut bare) / 1e3,
    };
    Ok(row)
}
