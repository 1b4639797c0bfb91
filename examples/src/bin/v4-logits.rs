//! Computes logits with a checkpoint and writes them as safetensors.
use std::process::ExitCode;

use kvgate_examples::{logits, tool};

fn main() -> ExitCode {
    tool::main(
        "v4-logits",
        logits::SCHEMA,
        |args: &logits::Args| args.json,
        |args| logits::run(&args),
    )
}
