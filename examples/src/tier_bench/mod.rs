//! `tier-bench`: what storing, reading, loading back, looking up and opening cost, each beside the bare loop that moves
//! the same bytes and does nothing else; the replay of a trace; other stores.

mod bare;
mod blocks;
mod compare;
mod file;
mod loadback;
mod measure;
mod memory;
mod own;
mod plot;
mod prefetch;
mod recover;
mod resume;
mod row;
mod single;
mod trace;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use serde_json::json;

use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::version;
use crate::tool::Finished;
use row::Row;

/// Name of the JSON object.
pub const SCHEMA: &str = "kvgate.tier-bench/1";

/// Measures the tiers beside the bare loop of each path
#[derive(Parser, Debug)]
#[command(name = "tier-bench", version = version::LINE)]
pub struct Args {
    /// What to measure; without it everything but the last three
    #[arg(long, value_enum)]
    op: Option<Op>,
    /// Where the records go; every tier without it
    #[arg(long, value_enum)]
    tier: Option<TierName>,
    /// Bytes of a block's rows, a multiple of 256
    #[arg(long, value_name = "B", default_value_t = 1 << 20)]
    block_bytes: u64,
    /// Bytes that the tier holds
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20)]
    working_set: u64,
    /// Threads that store at once, or read past the page cache
    #[arg(long, value_name = "W", default_value_t = 1)]
    writers: u32,
    /// A put of the file tier counts when it is on the disk
    #[arg(long)]
    durable: bool,
    /// Whether a load-back compares every page with its checksum; both without it. What comes out of a record is
    /// always verified
    #[arg(long, value_enum)]
    verify: Option<Verify>,
    /// Replays a file of prefixes through a cache of `working-set` bytes, with every policy: a line is a request, its
    /// blocks numbers or ranges (`0-9 17`), `#` begins a remark
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Sets the tiers beside other stores, as far as they are installed
    #[arg(long)]
    compare: bool,
    /// Lengths of block of a comparison
    #[arg(
        long,
        value_name = "B,..",
        value_delimiter = ',',
        default_value = "65536,262144,1048576"
    )]
    compare_bytes: Vec<u64>,
    /// Where examples/peers/tiers/setup.sh has put the other stores
    #[arg(long, value_name = "DIR")]
    peers: Option<PathBuf>,
    /// Draws the rows into an SVG file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Folder of the file tier; a temporary one without it
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Longest prefix that is resumed
    #[arg(long, value_name = "N", default_value_t = 4096)]
    tokens: u32,
    /// Seconds for each row
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    duration: f64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

impl Args {
    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.duration)
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Op {
    /// Storing new records.
    Put,
    /// Reading records, verified.
    Get,
    /// Loading a prefix from the host tier into the device pool.
    Loadback,
    /// Bringing the records of a prefix from the disk into memory.
    Prefetch,
    /// The keys of up to 1,048,576 tokens, and whether the tier has them.
    Lookup,
    /// Opening a log, closed and not closed.
    Recover,
    /// Time to the first token behind a prefix of tiny-v4, from the host tier and computed.
    Resume,
    /// Fills a log in `--dir`, says so, and keeps it open until it is killed or its input ends.
    Fill,
    /// Opens the log in `--dir` once, says what it took, and closes it.
    Open,
}

/// Where the records go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TierName {
    /// The memory of the process.
    Memory,
    /// The host tier: pages as the device pool has them.
    Host,
    /// A segment log on the disk.
    File,
}

/// Whether pages are compared with their checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Verify {
    /// Every page, before its layer counts as readable.
    On,
    /// Not while the clock runs.
    Off,
}

impl Verify {
    fn id(self) -> &'static str {
        match self {
            Verify::On => "on",
            Verify::Off => "off",
        }
    }
}

/// Measures.
///
/// # Errors
/// A number that cannot be used; a folder that cannot be written.
pub fn run(args: &Args) -> Result<Finished, Failure> {
    check(args)?;
    if let Some(path) = &args.trace {
        return replay(args, path);
    }
    match args.op {
        Some(Op::Fill) => return recover::fill_process(args),
        Some(Op::Open) => return recover::open_process(args),
        _ => {}
    }
    let (rows, absent) = match args.compare {
        true => compare::run(args)?,
        false => (measure_all(args)?, Vec::new()),
    };
    if rows.is_empty() {
        let text = "there is nothing of that op in that tier";
        return Err(Failure::new(FailureKind::Usage, text));
    }
    if let Some(path) = &args.plot {
        plot::draw(path, &rows)?;
    }
    let bad_blocks: u64 = rows.iter().map(|row| row.bad_blocks).sum();
    let verdict = if bad_blocks == 0 { "ok" } else { "mismatch" };
    let lines = rows.iter().map(Row::line);
    Ok(Finished {
        lines: lines
            .chain(absent.iter().map(compare::Absent::line))
            .collect(),
        json: json!({ "schema": SCHEMA, "verdict": verdict, "rows": rows, "absent": absent }),
        exit_code: u8::from(bad_blocks > 0),
    })
}

fn measure_all(args: &Args) -> Result<Vec<Row>, Failure> {
    let wants = |op| args.op.is_none_or(|asked| asked == op);
    let on = |tier| args.tier.is_none_or(|asked| asked == tier);
    let (memory, file) = (on(TierName::Memory), on(TierName::File));
    let mut rows = Vec::new();
    if wants(Op::Put) && memory {
        rows.push(memory::put(args)?);
    }
    if wants(Op::Get) && memory {
        rows.push(memory::get(args)?);
    }
    if wants(Op::Put) && file {
        rows.push(file::put(args)?);
    }
    if wants(Op::Get) && file {
        rows.push(file::get(args)?);
        rows.push(file::get_cold(args)?);
    }
    if wants(Op::Loadback) && on(TierName::Host) {
        for verify in [Verify::On, Verify::Off] {
            if args.verify.is_none_or(|asked| asked == verify) {
                rows.push(loadback::run(args, verify)?);
            }
        }
    }
    if wants(Op::Prefetch) && file {
        rows.push(prefetch::run(args)?);
    }
    if wants(Op::Lookup) && memory {
        rows.extend(single::lookup(args)?);
    }
    if wants(Op::Recover) && file {
        rows.extend(recover::run(args)?);
    }
    if args.op == Some(Op::Resume) && on(TierName::Host) {
        rows.extend(resume::run(args)?);
    }
    Ok(rows)
}

fn replay(args: &Args, path: &std::path::Path) -> Result<Finished, Failure> {
    let replays = trace::replay(path, args.working_set / args.block_bytes)?;
    Ok(Finished {
        lines: replays.iter().map(trace::Replay::line).collect(),
        json: json!({ "schema": SCHEMA, "verdict": "ok", "rows": [], "trace": replays }),
        exit_code: 0,
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
    let fits = |bytes: u64| bytes.is_multiple_of(256) && (1024..=16 << 20).contains(&bytes);
    let expected = "a multiple of 256 from 1024 to 16777216";
    if !fits(args.block_bytes) {
        return refuse("block-bytes", args.block_bytes, expected);
    }
    if let Some(&bytes) = args.compare_bytes.iter().find(|bytes| !fits(**bytes)) {
        return refuse("compare-bytes", bytes, expected);
    }
    if args.working_set < 8 * args.block_bytes {
        return refuse("working-set", args.working_set, "at least 8 blocks");
    }
    if args.writers == 0 || args.writers > 256 {
        return refuse("writers", u64::from(args.writers), "1 to 256");
    }
    if !(512..=32_768).contains(&args.tokens) {
        return refuse("tokens", u64::from(args.tokens), "512 to 32768");
    }
    if !(0.01..=3600.0).contains(&args.duration) {
        return refuse("duration", args.duration as u64, "0.01 to 3600");
    }
    Ok(())
}
