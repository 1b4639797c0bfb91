//! Measures the transfer engine beside the bare loop of each path.
use std::process::ExitCode;

use kvgate_examples::tool;
use kvgate_examples::transfer_bench::{self, cli::Cli, other};

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    // This program starts itself as the peer of a run.
    if words.next().is_some_and(|word| word == other::SUBCOMMAND) {
        return transfer_bench::run_target(words.next().and_then(|pid| pid.parse().ok()));
    }
    transfer_bench::watch_signals();
    tool::main(
        "transfer-bench",
        transfer_bench::SCHEMA,
        Cli::is_json,
        transfer_bench::run,
    )
}
