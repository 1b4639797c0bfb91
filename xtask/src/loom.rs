//! `cargo xtask loom`: model-checks the production code under `--cfg kv_loom`.

use std::path::PathBuf;
use std::time::Duration;

use crate::Outcome;
use crate::exec::{Failure, Job, Workspace};
use crate::libtest;
use crate::tree;

/// Preemption bound of every push.
pub(crate) const BOUND: u32 = 3;

const FOLDER: &str = "loom-tests/tests/";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Preemption bound of each model; 0 explores without a bound.
    #[arg(long, default_value_t = BOUND)]
    bound: u32,
    /// Runs the models of one file of loom-tests/tests only.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<Outcome, Failure> {
    let all = targets(workspace)?;
    if let Some(name) = &args.only
        && !all.contains(name)
    {
        return Err(Failure::new(format!(
            "no models {name:?}; there are {}",
            all.join(", ")
        )));
    }
    let mut sum = libtest::Counts::default();
    let mut broken = Vec::new();
    for target in all
        .iter()
        .filter(|name| args.only.as_ref().is_none_or(|only| only == *name))
    {
        let done = job(workspace, args.bound, &[target, ""]).run()?;
        let counts = libtest::counts(&done.output);
        let good = done.succeeded() && counts.passed > 0;
        let word = if good { "ok" } else { "FAILED" };
        eprintln!(
            "loom {target}: {word}, {} models, {:.1} s",
            counts.passed + counts.failed,
            done.elapsed.as_secs_f64()
        );
        sum.passed += counts.passed;
        sum.failed += counts.failed;
        if !good {
            done.show_tail(60);
            broken.push(target.as_str());
        }
    }
    println!(
        "loom: {} passed, {} failed (bound {})",
        sum.passed, sum.failed, args.bound
    );
    if !broken.is_empty() {
        println!("loom: failed in {}", broken.join(", "));
    }
    Ok(Outcome::found_if(!broken.is_empty()))
}

/// The files of models.
pub(crate) fn targets(workspace: &Workspace) -> Result<Vec<String>, Failure> {
    let files = tree::files(workspace)?;
    let names: Vec<_> = files
        .iter()
        .filter_map(|path| path.strip_prefix(FOLDER)?.strip_suffix(".rs"))
        .filter(|name| !name.contains('/'))
        .map(str::to_owned)
        .collect();
    if names.is_empty() {
        return Err(Failure::new(format!("no models in {FOLDER}")));
    }
    Ok(names)
}

/// A run of models: `selection` holds the file, or `""` for all, and a filter, or `""`.
pub(crate) fn job(workspace: &Workspace, bound: u32, selection: &[&str; 2]) -> Job {
    let [target, filter] = selection;
    let mut args = vec!["test", "--profile", "loom", "-p", "kvgate-loom-tests"];
    if target.is_empty() {
        args.push("--tests");
    } else {
        args.extend(["--test", target]);
    }
    args.extend(["--", "--test-threads=1"]);
    args.extend(Some(*filter).filter(|filter| !filter.is_empty()));
    prepared(workspace, "loom", bound, &args)
}

/// The same build without a run, to tell a compile error from a failed model.
pub(crate) fn build_job(workspace: &Workspace, target: &str) -> Job {
    let args = [
        "test",
        "--no-run",
        "--profile",
        "loom",
        "-p",
        "kvgate-loom-tests",
        "--test",
        target,
    ];
    prepared(workspace, "loom-build", BOUND, &args)
}

fn prepared(workspace: &Workspace, name: &str, bound: u32, args: &[&str]) -> Job {
    let mut job = workspace
        .cargo(name, args)
        .target(&target_folder(workspace))
        .env("RUSTFLAGS", "--cfg kv_loom")
        .env("LOOM_MAX_BRANCHES", "10000")
        .limit(Duration::from_secs(1200));
    if bound > 0 {
        job = job.env("LOOM_MAX_PREEMPTIONS", bound.to_string());
    }
    job
}

/// An own target folder keeps the flag from rebuilding everything else.
fn target_folder(workspace: &Workspace) -> PathBuf {
    workspace.target.join("loom")
}
