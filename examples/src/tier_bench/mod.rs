//! `tier-bench`: what storing, reading, looking up and opening cost, each beside the bare loop that moves
//! the same bytes and does nothing else.

mod bare;
mod blocks;
mod measure;
mod single;

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use serde::Serialize;
use serde_json::json;

use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::version;
use crate::tool::Finished;

/// Name of the JSON object.
pub const SCHEMA: &str = "kvgate.tier-bench/1";

/// Measures the tiers beside the bare loop of each path
#[derive(Parser, Debug)]
#[command(name = "tier-bench", version = version::LINE)]
pub struct Args {
    /// What to measure; everything without it
    #[arg(long, value_enum)]
    op: Option<Op>,
    /// Where the records go; both without it
    #[arg(long, value_enum)]
    tier: Option<TierName>,
    /// Bytes of a block's rows, a multiple of 256
    #[arg(long, value_name = "B", default_value_t = 1 << 20)]
    block_bytes: u64,
    /// Bytes that the tier holds
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20)]
    working_set: u64,
    /// Threads that store at once
    #[arg(long, value_name = "W", default_value_t = 1)]
    writers: u32,
    /// A put of the file tier counts when it is on the disk
    #[arg(long)]
    durable: bool,
    /// Folder of the file tier; a temporary one without it
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Seconds for each row
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    duration: f64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Op {
    /// Storing new records.
    Put,
    /// Reading records, verified.
    Get,
    /// The keys of 1,048,576 tokens, and whether the tier has them.
    Lookup,
    /// Opening a log, closed and not closed.
    Recover,
}

/// Where the records go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TierName {
    /// The memory of the process.
    Memory,
    /// A segment log on the disk, in the page cache.
    File,
}

/// The bare loop beside a row.
#[derive(Clone, Debug, Serialize)]
struct Baseline {
    name: &'static str,
    gbps_med: f64,
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
struct Row {
    engine: &'static str,
    tier: &'static str,
    op: &'static str,
    block_bytes: u64,
    count: u64,
    writers: u32,
    durable: bool,
    verify: &'static str,
    gbps_med: f64,
    ops_s: f64,
    p50_us: f64,
    p99_us: f64,
    baseline: Baseline,
    ratio_med: f64,
    bad_blocks: u64,
}

impl Row {
    fn line(&self) -> String {
        format!(
            "{:<7} {:<8} {:>8} B x {:<6} {:>2} writers{} {:>7.3} GB/s {:>9.1} us p50 {:>9.1} us p99   {} {:.3} GB/s, ratio {:.3}{}",
            self.tier,
            self.op,
            self.block_bytes,
            self.count,
            self.writers,
            if self.durable { " durable" } else { "" },
            self.gbps_med,
            self.p50_us,
            self.p99_us,
            self.baseline.name,
            self.baseline.gbps_med,
            self.ratio_med,
            match self.bad_blocks {
                0 => String::new(),
                bad => format!("  {bad} BAD BLOCKS"),
            },
        )
    }
}

/// Measures.
///
/// # Errors
/// A number that cannot be used; a folder that cannot be written.
pub fn run(args: &Args) -> Result<Finished, Failure> {
    check(args)?;
    let wants = |op| args.op.is_none_or(|asked| asked == op);
    let on = |tier| args.tier.is_none_or(|asked| asked == tier);
    let mut rows = Vec::new();
    if wants(Op::Put) && on(TierName::Memory) {
        rows.push(measure::memory_put(args)?);
    }
    if wants(Op::Get) && on(TierName::Memory) {
        rows.push(measure::memory_get(args)?);
    }
    if wants(Op::Put) && on(TierName::File) {
        rows.push(measure::file_put(args)?);
    }
    if wants(Op::Get) && on(TierName::File) {
        rows.push(measure::file_get(args)?);
    }
    if wants(Op::Lookup) {
        rows.push(single::lookup(args)?);
    }
    if wants(Op::Recover) && on(TierName::File) {
        rows.extend(single::recover(args)?);
    }
    if rows.is_empty() {
        let text = "there is nothing of that op in that tier";
        return Err(Failure::new(FailureKind::Usage, text));
    }
    let bad_blocks: u64 = rows.iter().map(|row| row.bad_blocks).sum();
    let verdict = if bad_blocks == 0 { "ok" } else { "mismatch" };
    Ok(Finished {
        json: json!({ "schema": SCHEMA, "verdict": verdict, "rows": rows }),
        lines: rows.iter().map(Row::line).collect(),
        exit_code: u8::from(bad_blocks > 0),
    })
}

fn check(args: &Args) -> Result<(), Failure> {
    let refuse = |field: &str, value: u64, expected: &str| {
        let text = format!("--{field} is {value}, expected {expected}");
        let mut failure = Failure::new(FailureKind::Usage, text);
        failure.field = Some(field.to_owned());
        failure.value = Some(value.to_string());
        Err(failure)
    };
    let bytes = args.block_bytes;
    if !bytes.is_multiple_of(256) || !(1024..=16 << 20).contains(&bytes) {
        return refuse(
            "block-bytes",
            bytes,
            "a multiple of 256 from 1024 to 16777216",
        );
    }
    if args.working_set < 8 * bytes {
        return refuse("working-set", args.working_set, "at least 8 blocks");
    }
    if args.writers == 0 || args.writers > 256 {
        return refuse("writers", u64::from(args.writers), "1 to 256");
    }
    if !(0.01..=3600.0).contains(&args.duration) {
        return refuse("duration", args.duration as u64, "0.01 to 3600");
    }
    Ok(())
}
