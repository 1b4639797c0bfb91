//! `cargo xtask sim`: transfers, and whole hand-offs, on a virtual clock with every fault at once, one
//! seed after the other.

use std::time::Duration;

use crate::Outcome;
use crate::exec::{Failure, Job, Workspace};
use crate::mutants;

/// Seeds of one run of the test suite.
pub(crate) const SEEDS: u64 = 500;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many seeds to run, one after the other.
    #[arg(long, default_value_t = SEEDS, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// The first seed; a violation names the one that replays it.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Runs on the code as mutant NN breaks it; then violations are what is hoped for.
    #[arg(long, value_name = "NN")]
    mutant: Option<String>,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<Outcome, Failure> {
    let summary = match &args.mutant {
        None => simulate(workspace, args.seeds, args.seed)?,
        Some(id) => {
            mutants::with_mutant(workspace, id, |tree| simulate(tree, args.seeds, args.seed))?
        }
    };
    for line in &summary.violations {
        println!("{line}");
    }
    if let Some(id) = &args.mutant {
        println!("{}", finding(id, args, &summary.violations));
    }
    println!(
        "sim: {} seeds, {} violations",
        args.seeds,
        summary.violations.len()
    );
    Ok(Outcome::found_if(!summary.violations.is_empty()))
}

/// Which seed noticed the mutant first.
fn finding(id: &str, args: &Args, violations: &[String]) -> String {
    let seed_of = |line: &String| {
        let rest = line.split_once("seed=")?.1;
        rest.split_whitespace().next()?.parse::<u64>().ok()
    };
    match violations.iter().filter_map(seed_of).min() {
        Some(seed) => {
            let count = seed - args.seed + 1;
            format!("mutant {id}: found by seed {seed}, after {count} seeds")
        }
        None => format!("mutant {id}: not found"),
    }
}

/// A simulated world: a test binary that runs seeds and says what it found.
struct World {
    name: &'static str,
    /// Selects the test binary.
    args: &'static [&'static str],
}

const WORLDS: [World; 2] = [
    World {
        name: "transfer",
        args: &[
            "-p",
            "kvgate-transfer",
            "--features",
            "sim",
            "--test",
            "sim_faults",
        ],
    },
    World {
        name: "handoff",
        args: &["-p", "kvgate-kvcache", "--test", "handoff_sim"],
    },
];

/// What the simulations printed.
pub(crate) struct Summary {
    pub(crate) violations: Vec<String>,
}

/// Runs the seeds in every world.
pub(crate) fn simulate(workspace: &Workspace, seeds: u64, first: u64) -> Result<Summary, Failure> {
    let mut violations = Vec::new();
    for world in &WORLDS {
        violations.extend(world.simulate(workspace, seeds, first)?);
    }
    Ok(Summary { violations })
}

impl World {
    /// An output without its closing line proves nothing and is a failure.
    fn simulate(
        &self,
        workspace: &Workspace,
        seeds: u64,
        first: u64,
    ) -> Result<Vec<String>, Failure> {
        let name = self.name;
        let done = self.job(workspace, seeds, first).run()?;
        // The harness may begin a line with the name of the test.
        let found = |line: &str| {
            let what = line.split_once("sim: violation ")?.1;
            Some(format!("sim: violation {what} [{name}]"))
        };
        let mut violations: Vec<String> = done.output.lines().filter_map(found).collect();
        let closing = format!("sim: {seeds} seeds, {} violations", violations.len());
        let is_closed = |line: &str| line.trim().ends_with(&closing);
        if !done.output.lines().any(is_closed) && violations.is_empty() {
            done.show_tail(60);
            return Err(Failure::new(format!(
                "the simulation of {name} did not close with {closing:?}"
            )));
        }
        if violations.is_empty() && !done.succeeded() {
            done.show_tail(60);
            let ending = done.ending();
            violations.push(format!(
                "sim: violation the run ended with {ending} [{name}]"
            ));
        }
        Ok(violations)
    }

    fn job(&self, workspace: &Workspace, seeds: u64, first: u64) -> Job {
        workspace
            .cargo("sim", ["test"])
            .args(self.args)
            .args(["--", "--nocapture", "--test-threads=1", "--exact", "seeds"])
            .env("KVGATE_SIM_SEEDS", seeds.to_string())
            .env("KVGATE_SIM_SEED", first.to_string())
            .limit(Duration::from_secs(1800))
    }
}
