//! Measures what a plan and its posts cost, apart from the bytes. Counting the heap slows every allocation down, so that
//! this is not a part of `transfer-bench`.
use std::process::ExitCode;

use kvgate_examples::bench::Heap;
use kvgate_examples::tool;
use kvgate_examples::transfer_bench::plan;
use peak_alloc::PeakAlloc;

#[global_allocator]
static COUNTED: PeakAlloc = PeakAlloc;

fn main() -> ExitCode {
    tool::main(
        "plan-bench",
        plan::SCHEMA,
        |args: &plan::Args| args.json,
        |args| plan::run(&args, Heap(&COUNTED)),
    )
}
