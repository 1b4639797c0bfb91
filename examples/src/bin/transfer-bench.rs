//! Measures the transfer engine beside the bare loop of each path.
use std::process::ExitCode;

use kvgate_examples::tool;
use kvgate_examples::transfer_bench::{self, pair};

fn main() -> ExitCode {
    // This program starts itself as the peer of a run.
    if std::env::args()
        .nth(1)
        .is_some_and(|word| word == pair::SUBCOMMAND)
    {
        return transfer_bench::run_target();
    }
    transfer_bench::watch_signals();
    tool::main(
        "transfer-bench",
        transfer_bench::SCHEMA,
        transfer_bench::Cli::is_json,
        transfer_bench::run,
    )
}
