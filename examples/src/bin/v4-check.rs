//! Compares this implementation with the reference tensors of a folder.
use std::process::ExitCode;

use kvgate_examples::{check, tool};

fn main() -> ExitCode {
    tool::main(
        "v4-check",
        check::SCHEMA,
        |args: &check::Args| args.json,
        |args| check::run(&args),
    )
}
