//! The main job: a prompt is computed in one process and decoded in another, and every bit is compared.

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    ExitCode::from(kvgate_examples::handoff::main::run(&args))
}
