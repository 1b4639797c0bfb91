//! Computes logits with a checkpoint and writes them as safetensors.
use std::process::ExitCode;

use kvgate_examples::handoff::{main as pd_handoff, role};
use kvgate_examples::{logits, tool};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // In mode handoff this program starts itself again, once per role.
    if args.first().is_some_and(|word| word == role::SUBCOMMAND) {
        return ExitCode::from(pd_handoff::run(&args));
    }
    tool::main(
        "v4-logits",
        logits::SCHEMA,
        |args: &logits::Args| args.json,
        |args| logits::run(&args),
    )
}
