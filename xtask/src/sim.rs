//! `cargo xtask sim`: transfers, and whole hand-offs, on a virtual clock with every fault at once, one
//! seed after the other.

use std::thread;
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
    /// Runs on the code as mutant NN breaks it: found (exit 0), or noticed by no seed (exit 1).
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
    Ok(outcome(args.mutant.is_some(), &summary.violations))
}

/// Violations are a fault of the code as it is, and what is hoped for of code that is broken on purpose.
fn outcome(is_mutant: bool, violations: &[String]) -> Outcome {
    Outcome::found_if(violations.is_empty() == is_mutant)
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
        None if violations.is_empty() => format!("mutant {id}: noticed by no seed"),
        None => format!("mutant {id}: found, by a run that names no seed"),
    }
}

/// A simulated world: a test binary that runs seeds and says what it found.
struct World {
    name: &'static str,
    /// Selects the test binary.
    args: &'static [&'static str],
}

const WORLDS: [World; 4] = [
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
        name: "reads",
        args: &[
            "-p",
            "kvgate-transfer",
            "--features",
            "sim",
            "--test",
            "sim_reads",
        ],
    },
    World {
        name: "breaks",
        args: &[
            "-p",
            "kvgate-transfer",
            "--features",
            "sim",
            "--test",
            "sim_breaks",
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
        let built = self.job(workspace, "build", seeds, &["--no-run"]).run()?;
        if !built.succeeded() {
            built.show_tail(40);
            let name = self.name;
            return Err(Failure::new(format!(
                "the simulation of {name} does not compile"
            )));
        }
        let parts = parts(
            seeds,
            first,
            thread::available_parallelism().map_or(1, usize::from),
        );
        let part = |&(first, seeds): &(u64, u64)| self.part(workspace, seeds, first);
        thread::scope(|scope| {
            let running: Vec<_> = parts
                .iter()
                .map(|range| scope.spawn(|| part(range)))
                .collect();
            let mut violations = Vec::new();
            for thread in running {
                let ended = thread.join();
                violations
                    .extend(ended.map_err(|_| Failure::new("a part of the simulation panicked"))??);
            }
            Ok(violations)
        })
    }

    /// Some of the seeds, in a process of their own.
    fn part(&self, workspace: &Workspace, seeds: u64, first: u64) -> Result<Vec<String>, Failure> {
        let name = self.name;
        let harness = ["--", "--nocapture", "--test-threads=1", "--exact", "seeds"];
        let done = self
            .job(workspace, &first.to_string(), seeds, &harness)
            .env("KVGATE_SIM_SEEDS", seeds.to_string())
            .env("KVGATE_SIM_SEED", first.to_string())
            .run()?;
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

    fn job(&self, workspace: &Workspace, log: &str, seeds: u64, more: &[&str]) -> Job {
        // Many seeds are worth a build that is optimised, with live assertions.
        let profile: &[&str] = match seeds > SEEDS {
            true => &["--profile", "loom"],
            false => &[],
        };
        workspace
            .cargo(&format!("sim-{}-{log}", self.name), ["test"])
            .args(profile)
            .args(self.args)
            .args(more)
            .limit(Duration::from_secs(1800 + seeds))
    }
}

/// Splits the seeds into as many ranges as there are cores: the first seed of each, and how many.
fn parts(seeds: u64, first: u64, cores: usize) -> Vec<(u64, u64)> {
    let count = (cores as u64).min(seeds).max(1);
    (0..count)
        .map(|part| (part * seeds / count, (part + 1) * seeds / count))
        .map(|(from, end)| (first + from, end - from))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mutant_is_found_or_not_and_a_violation_of_the_code_is_a_fault() {
        let violations = ["sim: violation seed=7 a slot was written".to_owned()];
        assert_eq!(outcome(false, &[]), Outcome::Clean);
        assert_eq!(outcome(false, &violations), Outcome::Found);
        assert_eq!(outcome(true, &violations), Outcome::Clean);
        assert_eq!(outcome(true, &[]), Outcome::Found);
    }

    #[test]
    fn every_seed_is_in_one_part() {
        assert_eq!(parts(7, 10, 3), [(10, 2), (12, 2), (14, 3)]);
        assert_eq!(parts(1, 5, 4), [(5, 1)]);
        assert_eq!(parts(500, 1, 2), [(1, 250), (251, 250)]);
    }

    #[test]
    fn the_finding_names_the_first_seed_if_there_is_one() {
        let args = Args {
            seeds: 10,
            seed: 5,
            mutant: Some("03".to_owned()),
        };
        let of = |lines: &[&str]| {
            let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
            finding("03", &args, &lines)
        };
        assert_eq!(
            of(&["sim: violation seed=9 x", "sim: violation seed=7 y"]),
            "mutant 03: found by seed 7, after 3 seeds"
        );
        assert_eq!(
            of(&["sim: violation the run ended with exit code 101 [reads]"]),
            "mutant 03: found, by a run that names no seed"
        );
        assert_eq!(of(&[]), "mutant 03: noticed by no seed");
    }
}
