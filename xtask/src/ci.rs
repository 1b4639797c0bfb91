//! `cargo xtask ci`: every check that needs no run of the product, then the tests.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::exec::{Failure, Job, Workspace};
use crate::metadata::Metadata;
use crate::{Outcome, arch, header, invariants, licences, test};

/// The second architecture that has to compile.
const OTHER_TARGET: &str = "aarch64-unknown-linux-gnu";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leaves out the tests.
    #[arg(long)]
    no_test: bool,
    /// Runs one step only, without the tests.
    #[arg(long, value_name = "STEP")]
    only: Option<String>,
}

enum Verdict {
    Passed,
    Failed,
    Skipped(&'static str),
}

struct Step {
    name: &'static str,
    run: fn(&Workspace) -> Result<Verdict, Failure>,
}

const STEPS: [Step; 12] = [
    Step {
        name: "fmt",
        run: |w| cargo(w, "fmt", &["fmt", "--all", "--check"]),
    },
    Step {
        name: "arch",
        run: |w| complaints(arch::check(w)?),
    },
    Step {
        name: "invariants",
        run: |w| complaints(invariants::check(w)?),
    },
    Step {
        name: "licences",
        run: |w| complaints(licences::check(w)?),
    },
    Step {
        name: "header",
        run: c_header,
    },
    Step {
        name: "clippy",
        run: |w| clippy(w, "clippy", &[]),
    },
    Step {
        name: "clippy-all-features",
        run: |w| clippy(w, "clippy-all", &["--all-features"]),
    },
    Step {
        name: "features",
        run: each_feature,
    },
    Step {
        name: "loom-build",
        run: loom_build,
    },
    Step {
        name: "doc",
        run: doc,
    },
    Step {
        name: "package",
        run: package,
    },
    Step {
        name: OTHER_TARGET,
        run: other_target,
    },
];

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<Outcome, Failure> {
    let chosen: Vec<_> = STEPS
        .iter()
        .filter(|step| args.only.as_ref().is_none_or(|name| name == step.name))
        .collect();
    if chosen.is_empty() {
        let names: Vec<_> = STEPS.iter().map(|step| step.name).collect();
        return Err(Failure::new(format!(
            "no such step; there are {}",
            names.join(", ")
        )));
    }
    let (mut passed, mut failed, mut skipped) = (0, Vec::new(), Vec::new());
    for step in chosen {
        let started = Instant::now();
        let verdict = (step.run)(workspace)?;
        let seconds = started.elapsed().as_secs_f64();
        match verdict {
            Verdict::Passed => {
                eprintln!("ci {}: ok ({seconds:.0} s)", step.name);
                passed += 1;
            }
            Verdict::Failed => {
                eprintln!("ci {}: FAILED ({seconds:.0} s)", step.name);
                failed.push(step.name);
            }
            Verdict::Skipped(why) => {
                println!("SKIP {}: {why}", step.name);
                skipped.push(step.name);
            }
        }
    }
    if !failed.is_empty() {
        println!("ci: failed: {}", failed.join(", "));
    }
    println!(
        "ci: {passed} steps passed, {} failed, {} skipped",
        failed.len(),
        skipped.len()
    );
    if !failed.is_empty() {
        return Ok(Outcome::Found);
    }
    if args.no_test || args.only.is_some() {
        return Ok(Outcome::Clean);
    }
    test::run_all(workspace)
}

fn complaints(found: Vec<String>) -> Result<Verdict, Failure> {
    for complaint in &found {
        println!("{complaint}");
    }
    Ok(if found.is_empty() {
        Verdict::Passed
    } else {
        Verdict::Failed
    })
}

/// The committed C header is the one that its sources give.
fn c_header(workspace: &Workspace) -> Result<Verdict, Failure> {
    match header::check(workspace)? {
        Some(found) => complaints(found),
        None => Ok(Verdict::Skipped(header::HINT)),
    }
}

fn finish(job: Job) -> Result<Verdict, Failure> {
    let done = job.limit(Duration::from_secs(1800)).run()?;
    if done.succeeded() {
        return Ok(Verdict::Passed);
    }
    done.show_tail(80);
    Ok(Verdict::Failed)
}

fn cargo(workspace: &Workspace, name: &str, args: &[&str]) -> Result<Verdict, Failure> {
    finish(workspace.cargo(name, args))
}

fn clippy(workspace: &Workspace, name: &str, more: &[&str]) -> Result<Verdict, Failure> {
    let job = workspace
        .cargo(name, ["clippy", "--workspace", "--all-targets"])
        .args(more)
        .args(["--", "-D", "warnings"])
        .env("CLIPPY_CONF_DIR", workspace.root.join(".ci"));
    finish(job)
}

/// Each feature alone, and each crate without any that others may build alone: features must not lean on each
/// other.
fn each_feature(workspace: &Workspace) -> Result<Verdict, Failure> {
    let metadata = Metadata::load(workspace, false)?;
    for package in metadata.members() {
        let features = package.features.keys().filter(|name| *name != "default");
        let none = package.is_published().then_some("");
        for feature in features.map(String::as_str).chain(none) {
            let name = format!("check-{}-{feature}", package.name);
            let args = [
                "check",
                "-p",
                &package.name,
                "--no-default-features",
                "--features",
            ];
            if let Verdict::Failed = finish(workspace.cargo(&name, args).args([feature]))? {
                return Ok(Verdict::Failed);
            }
        }
    }
    Ok(Verdict::Passed)
}

/// Everything that is model-checked compiles without warnings under the flag.
fn loom_build(workspace: &Workspace) -> Result<Verdict, Failure> {
    let args = [
        "clippy",
        "--profile",
        "loom",
        "-p",
        "kvgate-loom-tests",
        "--tests",
        "--lib",
    ];
    let job = workspace
        .cargo("clippy-loom", args)
        .args(["--", "-D", "warnings"])
        .env("RUSTFLAGS", "--cfg kv_loom")
        .env("CLIPPY_CONF_DIR", workspace.root.join(".ci"))
        .target(&workspace.target.join("loom"));
    finish(job)
}

fn doc(workspace: &Workspace) -> Result<Verdict, Failure> {
    let job = workspace
        .cargo("doc", ["doc", "--workspace", "--no-deps", "--all-features"])
        .env("RUSTDOCFLAGS", "-D warnings -D missing_docs");
    finish(job)
}

/// What a registry would get: the list must exist and hold the sources and the readme.
fn package(workspace: &Workspace) -> Result<Verdict, Failure> {
    let metadata = Metadata::load(workspace, false)?;
    for package in metadata.members().filter(|package| package.is_published()) {
        let args = ["package", "--list", "--allow-dirty", "-p", &package.name];
        let (code, list) = workspace.cargo("package", args).stdout()?;
        let has = |name: &str| list.lines().any(|line| line == name);
        if code != Some(0) || !has("src/lib.rs") || !has("Cargo.toml") {
            println!(
                "{}: cargo package --list does not hold the crate",
                package.name
            );
            return Ok(Verdict::Failed);
        }
    }
    Ok(Verdict::Passed)
}

fn other_target(workspace: &Workspace) -> Result<Verdict, Failure> {
    let args = ["--print", "target-libdir", "--target", OTHER_TARGET];
    let (code, folder) = workspace.program("rustc", "rustc").args(args).stdout()?;
    if code != Some(0) || !Path::new(folder.trim()).is_dir() {
        return Ok(Verdict::Skipped(
            "rustup target add aarch64-unknown-linux-gnu",
        ));
    }
    cargo(
        workspace,
        "check-aarch64",
        &["check", "--workspace", "--target", OTHER_TARGET],
    )
}
