//! Prints what an agent of another process has in flight.
use std::process::ExitCode;

use kvgate_examples::{status, tool};

fn main() -> ExitCode {
    tool::main(
        "kvgate-status",
        status::SCHEMA,
        |args: &status::Args| args.json,
        |args| status::run(&args),
    )
}
