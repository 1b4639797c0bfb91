//! `cargo xtask fuzz`: builds the fuzz targets, with coverage and the address sanitizer, and runs each of
//! them for a while from the committed inputs.
//!
//! The compiler of the workspace does this itself (`RUSTC_BOOTSTRAP`); `libfuzzer-sys` needs a C++ compiler.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::Outcome;
use crate::exec::{Failure, Finished, Job, Workspace};
use crate::tree;

/// What a fuzzer's build differs in: edges are counted, comparisons are told, memory is watched.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Zsanitizer=address -Cdebug-assertions -Ccodegen-units=1";

/// One input that takes longer is a finding.
const INPUT_LIMIT_S: u32 = 20;

/// Building, reading the inputs and writing the result, beside the time that was asked for.
const SPARE: Duration = Duration::from_secs(900);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Runs this target only.
    #[arg(value_name = "TARGET")]
    target: Option<String>,
    /// Seconds for each target; 0 repeats the committed inputs only.
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Adds what reached new code to the committed inputs.
    #[arg(long)]
    keep: bool,
}

/// A file in a folder `fuzz_targets`.
struct Target {
    name: String,
    /// The crate of the target, beside the tests of the code that it calls.
    folder: PathBuf,
    /// The committed inputs.
    seeds: PathBuf,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<Outcome, Failure> {
    let all = targets(workspace)?;
    let names: Vec<_> = all.iter().map(|target| target.name.clone()).collect();
    let chosen: Vec<_> = all
        .into_iter()
        .filter(|target| args.target.as_ref().is_none_or(|name| *name == target.name))
        .collect();
    if chosen.is_empty() {
        let asked = args.target.as_deref().unwrap_or_default();
        return Err(Failure::new(format!(
            "no fuzz target {asked:?}; there are {}",
            names.join(", ")
        )));
    }
    let host = host(workspace)?;
    let (mut inputs, mut findings) = (0, 0);
    for target in &chosen {
        let program = build(workspace, target, &host)?;
        let done = target.run(workspace, &program, args)?;
        let Some(count) = executed(&done) else {
            done.show_tail(60);
            println!("fuzz {}: FOUND ({})", target.name, done.ending());
            findings += 1;
            continue;
        };
        inputs += count;
        println!("fuzz {}: ok, {count} inputs", target.name);
        if args.keep {
            target.keep(workspace, &program)?;
        }
    }
    println!(
        "fuzz: {} targets, {inputs} inputs, {findings} findings",
        chosen.len()
    );
    Ok(Outcome::found_if(findings > 0))
}

/// Inputs of a run that ended well; it has to have run some.
fn executed(done: &Finished) -> Option<u64> {
    let count = done.output.lines().find_map(|line| {
        let count = line.strip_prefix("stat::number_of_executed_units:")?;
        count.trim().parse().ok()
    })?;
    (done.succeeded() && count > 0).then_some(count)
}

fn targets(workspace: &Workspace) -> Result<Vec<Target>, Failure> {
    let mut found = Vec::new();
    for path in tree::files(workspace)? {
        let Some((folder, file)) = path.split_once("/fuzz/fuzz_targets/") else {
            continue;
        };
        let Some(name) = file.strip_suffix(".rs") else {
            continue;
        };
        let folder = workspace.root.join(folder);
        found.push(Target {
            name: name.to_owned(),
            seeds: folder.join("tests/seeds").join(name),
            folder: folder.join("fuzz"),
        });
    }
    Ok(found)
}

/// The triple of this machine. Naming it keeps the flags away from build scripts and macros.
pub(crate) fn host(workspace: &Workspace) -> Result<String, Failure> {
    let (_, text) = workspace.program("rustc", "rustc").args(["-vV"]).stdout()?;
    text.lines()
        .find_map(|line| line.strip_prefix("host: "))
        .map(str::to_owned)
        .ok_or_else(|| Failure::new("rustc -vV names no host"))
}

fn build(workspace: &Workspace, target: &Target, host: &str) -> Result<PathBuf, Failure> {
    let home = workspace.target.join("fuzz");
    let built = workspace
        .cargo("fuzz-build", ["build", "--release", "--target", host])
        .args(["--bin", &target.name])
        .folder(&target.folder)
        .target(&home)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", FLAGS)
        .run()?;
    if !built.succeeded() {
        built.show_tail(40);
        let name = &target.name;
        return Err(Failure::new(format!(
            "fuzz target {name} cannot be built (it needs a C++ compiler)"
        )));
    }
    Ok(home.join(host).join("release").join(&target.name))
}

impl Target {
    fn work(&self, workspace: &Workspace, what: &str) -> Result<PathBuf, Failure> {
        let folder = workspace.target.join("fuzz").join(what).join(&self.name);
        fs::create_dir_all(&folder).map_err(|error| Failure::io(&folder, &error))?;
        Ok(folder)
    }

    fn job(&self, workspace: &Workspace, program: &Path, args: &[String]) -> Job {
        workspace
            .program(&format!("fuzz-{}", self.name), program)
            .args(args)
            // What the library keeps for good on purpose is not lost memory.
            .env("ASAN_OPTIONS", "detect_leaks=0")
    }

    fn run(&self, workspace: &Workspace, program: &Path, args: &Args) -> Result<Finished, Failure> {
        let corpus = self.work(workspace, "corpus")?;
        let artifacts = self.work(workspace, "artifacts")?;
        let mut words = vec![
            corpus.display().to_string(),
            self.seeds.display().to_string(),
            "-print_final_stats=1".to_owned(),
            format!("-timeout={INPUT_LIMIT_S}"),
            format!("-artifact_prefix={}/", artifacts.display()),
        ];
        words.push(match args.seconds {
            0 => "-runs=0".to_owned(),
            seconds => format!("-max_total_time={seconds}"),
        });
        let limit = Duration::from_secs(args.seconds.into()) + SPARE;
        self.job(workspace, program, &words).limit(limit).run()
    }

    /// The fuzzer copies what adds coverage; equal inputs keep their names.
    fn keep(&self, workspace: &Workspace, program: &Path) -> Result<(), Failure> {
        let corpus = self.work(workspace, "corpus")?;
        let words = [
            "-merge=1".to_owned(),
            self.seeds.display().to_string(),
            corpus.display().to_string(),
        ];
        let done = self.job(workspace, program, &words).limit(SPARE).run()?;
        match done.succeeded() {
            true => Ok(()),
            false => Err(Failure::new(format!(
                "fuzz {}: merging {}",
                self.name,
                done.ending()
            ))),
        }
    }
}
