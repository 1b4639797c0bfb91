//! `cargo xtask soak`: a cache that several threads use for a long time, and everything counted afterwards.

use std::time::Duration;

use crate::Outcome;
use crate::exec::{Failure, Workspace};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many operations, all threads together.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    operations: u64,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<Outcome, Failure> {
    let words = [
        "test",
        "--release",
        "-p",
        "kvgate-hicache",
        "--test",
        "soak",
        "--",
        "--nocapture",
    ];
    let done = workspace
        .cargo("soak", words)
        .env("KVGATE_SOAK_OPERATIONS", args.operations.to_string())
        // A tenth of what the slowest machine does, and the time to compile.
        .limit(Duration::from_secs(1_200 + args.operations / 200))
        .run()?;
    let is_closing = |line: &&str| line.contains(" operations in ");
    match done.output.lines().find(is_closing) {
        Some(line) if done.succeeded() => {
            println!("soak: {}", line.trim());
            Ok(Outcome::Clean)
        }
        _ if done.output.contains("panicked at") => {
            done.show_tail(40);
            Ok(Outcome::Found)
        }
        _ => {
            done.show_tail(40);
            Err(Failure::new("the soak did not come to its end"))
        }
    }
}
