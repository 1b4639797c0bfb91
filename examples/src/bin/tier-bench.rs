//! Measures the tiers beside the bare loop of each path.
use std::process::ExitCode;

use kvgate_examples::{tier_bench, tool};

fn main() -> ExitCode {
    tool::main(
        "tier-bench",
        tier_bench::SCHEMA,
        |args: &tier_bench::Args| args.json,
        |args| tier_bench::run(&args),
    )
}
