//! Checks and chores of the workspace: `cargo xtask help` lists them.
//!
//! Exit codes are those of every kvgate tool: 0 good, 1 something was found, 2 wrong usage or a
//! run that proves nothing. Progress goes to stderr, results to stdout.
#![forbid(unsafe_code)]

mod arch;
mod bench;
mod browser;
mod ci;
mod exec;
mod fuzz;
mod header;
mod install;
mod invariants;
mod kill;
mod lexer;
mod libtest;
mod licences;
mod loom;
mod metadata;
mod mutants;
mod rows;
mod sim;
mod soak;
mod suites;
mod test;
mod tree;
mod tsan;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use exec::{Failure, Workspace};

/// Checks and chores of the kvgate workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Runs every test suite; the last line is `passed P, failed F, skipped S (names)`.
    Test(test::Args),
    /// Model-checks the production code of the barrier, the slots and the engine.
    Loom(loom::Args),
    /// Breaks the code on purpose, once per patch, and demands that the named tests notice.
    Mutants(mutants::Args),
    /// Runs the seeded hand-off simulation.
    Sim(sim::Args),
    /// Uses a cache with storage from several threads for a long time and counts everything afterwards.
    Soak(soak::Args),
    /// Runs the fuzz targets from the committed inputs.
    Fuzz(fuzz::Args),
    /// Runs the threaded tests under the thread sanitizer.
    Tsan(tsan::Args),
    /// Checks dependency directions, words, unsafe code and file sizes.
    Arch,
    /// Checks that each row of docs/invariants.md names code, a test and a mutant that exist.
    Invariants,
    /// Measures what docs/performance.md tabulates.
    Bench(bench::Args),
    /// Kills processes of a running hand-off and checks what the others do.
    Kill(kill::Args),
    /// Writes the C header from the sources of kvgate-capi, or checks it.
    Header(header::Args),
    /// Builds the C interface and puts header, libraries and pkg-config file into a folder.
    Install(install::Args),
    /// Runs all static checks and then the tests.
    Ci(ci::Args),
}

/// What a task that ran to its end has to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the exit code is made from it"]
enum Outcome {
    /// Nothing to complain about: exit code 0.
    Clean,
    /// Something was found: exit code 1.
    Found,
}

impl Outcome {
    fn found_if(found: bool) -> Self {
        if found { Self::Found } else { Self::Clean }
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli.task) {
        Ok(Outcome::Clean) => ExitCode::SUCCESS,
        Ok(Outcome::Found) => ExitCode::from(1),
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::from(2)
        }
    }
}

fn run(task: Task) -> Result<Outcome, Failure> {
    let workspace = Workspace::find()?;
    match task {
        Task::Test(args) => test::run(&workspace, &args),
        Task::Loom(args) => loom::run(&workspace, &args),
        Task::Mutants(args) => mutants::run(&workspace, &args),
        Task::Sim(args) => sim::run(&workspace, &args),
        Task::Soak(args) => soak::run(&workspace, &args),
        Task::Fuzz(args) => fuzz::run(&workspace, &args),
        Task::Tsan(args) => tsan::run(&workspace, &args),
        Task::Arch => arch::run(&workspace),
        Task::Invariants => invariants::run(&workspace),
        Task::Bench(args) => bench::run(&workspace, &args),
        Task::Kill(args) => kill::run(&workspace, &args),
        Task::Header(args) => header::run(&workspace, &args),
        Task::Install(args) => install::run(&workspace, &args),
        Task::Ci(args) => ci::run(&workspace, &args),
    }
}
