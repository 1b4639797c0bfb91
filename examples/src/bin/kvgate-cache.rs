//! Looks after a directory of the storage tier.
use std::process::ExitCode;

use kvgate_examples::{cache_tool, tool};

fn main() -> ExitCode {
    tool::main(
        "kvgate-cache",
        cache_tool::SCHEMA,
        |args: &cache_tool::Args| args.json,
        |args| cache_tool::run(&args),
    )
}
