//! `cargo xtask bench`: the figures of docs/performance.md.

mod markdown;
mod profile;
mod steps;
mod tiers;
mod transfer;

use serde_json::{Map, Value};

use crate::Outcome;
use crate::exec::{Failure, Workspace};

/// What the merged object must hold.
const KEYS: [&str; 6] = [
    "handoff_ratio_9800",
    "handoff_ratio_32768",
    "gate_check_ns_p50",
    "chunk_complete_ns_p50",
    "extra_bytes",
    "pool_bytes",
];

#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(value_enum)]
    which: Which,
    /// Prints one JSON object on stdout.
    #[arg(long)]
    json: bool,
    /// Transfer and tiers: writes the tables and pictures of docs/performance.md; otherwise the tables go to stdout.
    #[arg(long)]
    write: bool,
    /// Transfer and tiers: only the cases whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Transfer and tiers: without other engines and stores.
    #[arg(long)]
    no_grid: bool,
    /// Transfer and tiers: shorter slices and a smaller grid, for a look.
    #[arg(long)]
    quick: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Which {
    /// Flash-shaped pools over shared memory, beside a single-thread memcpy of the same pages.
    Handoff,
    /// Every path of the transfer engine beside its bare loop and beside other engines; less than ten minutes.
    Transfer,
    /// Every path of the tiers beside its bare loop and beside other stores; less than eight minutes.
    Tiers,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<Outcome, Failure> {
    if args.which == Which::Transfer {
        let plan = transfer::Plan {
            write: args.write,
            only: args.only.as_deref(),
            no_grid: args.no_grid,
            quick: args.quick,
        };
        return transfer::run(workspace, &plan).map(|()| Outcome::Clean);
    }
    if args.which == Which::Tiers {
        let plan = tiers::Plan {
            write: args.write,
            only: args.only.as_deref(),
            no_grid: args.no_grid,
            quick: args.quick,
        };
        return tiers::run(workspace, &plan).map(|()| Outcome::Clean);
    }
    let mut merged = Map::new();
    for run in [
        &[
            "bench",
            "-p",
            "kvgate-transfer",
            "--bench",
            "barrier",
            "--",
            "--json",
        ][..],
        &[
            "run",
            "--release",
            "-p",
            "kvgate-examples",
            "--bin",
            "handoff-bench",
            "--",
            "--json",
        ],
    ] {
        let (code, text) = workspace.cargo("bench", run).stdout()?;
        if code != Some(0) {
            return Err(Failure::new(format!(
                "cargo {}: exit code {code:?}",
                run.join(" ")
            )));
        }
        merged.extend(last_object(&text)?);
    }
    let missing: Vec<_> = KEYS
        .into_iter()
        .filter(|key| !merged.contains_key(*key))
        .collect();
    if !missing.is_empty() {
        return Err(Failure::new(format!(
            "the benchmarks print no {}",
            missing.join(", ")
        )));
    }
    merged.insert("schema".to_owned(), Value::from("kvgate.bench-handoff/1"));
    if args.json {
        println!("{}", Value::Object(merged));
    } else {
        for (key, value) in &merged {
            println!("{key}: {value}");
        }
    }
    Ok(Outcome::Clean)
}

/// The object on the last line that is not empty.
fn last_object(text: &str) -> Result<Map<String, Value>, Failure> {
    let line = text
        .lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .unwrap_or_default();
    serde_json::from_str(line)
        .map_err(|error| Failure::new(format!("not a JSON object: {line:?}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_the_object() {
        let object = last_object("running\n{\"a\": 1}\n\n").unwrap();
        assert_eq!(object["a"], 1);
        assert!(last_object("running 0 tests").is_err());
        assert!(last_object("").is_err());
    }
}
