//! `cargo xtask bench tiers`: the speed table of the tiers, the curves and the comparison with other stores, measured in
//! one go and written as they came; less than eight minutes on two cores.

mod table;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::markdown::{Line, Machine, head, line_of};
use super::transfer::{await_quiet, load, machine, replace};
use crate::exec::{Failure, Workspace};
use table::{Judge, lines};

const PAGE: &str = "docs/performance.md";
const BEGIN: &str = "<!-- cargo xtask bench tiers: begin -->\n";
const END: &str = "<!-- cargo xtask bench tiers: end -->\n";
const PICTURES: &str = "docs/performance";
const PROGRAM: &str = "tier-bench";

/// One run of `tier-bench`, and what its rows are held against.
struct Step {
    case: &'static str,
    judge: Judge,
    args: &'static str,
    picture: Option<&'static str>,
}

const fn step(case: &'static str, judge: Judge, args: &'static str) -> Step {
    Step {
        case,
        judge,
        args,
        picture: None,
    }
}

const fn drawn(step: Step, picture: &'static str) -> Step {
    Step {
        picture: Some(picture),
        ..step
    }
}

/// In the order in which they run.
const STEPS: [Step; 20] = [
    step(
        "put into memory, 1 GiB, 64 KiB",
        Judge::Memory,
        "--op put --tier memory --working-set 1073741824 --block-bytes 65536 --duration 4",
    ),
    step(
        "put into memory, 1 GiB, 256 KiB",
        Judge::Memory,
        "--op put --tier memory --working-set 1073741824 --block-bytes 262144 --duration 4",
    ),
    step(
        "put into memory, 1 GiB, 1 MiB",
        Judge::Memory,
        "--op put --tier memory --working-set 1073741824 --block-bytes 1048576 --duration 4",
    ),
    step(
        "get from memory, 1 GiB, 64 KiB",
        Judge::Memory,
        "--op get --tier memory --working-set 1073741824 --block-bytes 65536 --duration 4",
    ),
    step(
        "get from memory, 1 GiB, 256 KiB",
        Judge::Memory,
        "--op get --tier memory --working-set 1073741824 --block-bytes 262144 --duration 4",
    ),
    step(
        "get from memory, 1 GiB, 1 MiB",
        Judge::Memory,
        "--op get --tier memory --working-set 1073741824 --block-bytes 1048576 --duration 4",
    ),
    step(
        "load-back of Flash pages from the host tier",
        Judge::Loadback,
        "--op loadback --working-set 268435456 --duration 5",
    ),
    step(
        "durable put, 16 writers, 64 KiB",
        Judge::Durable(Some(5.0)),
        "--op put --tier file --durable --writers 16 --block-bytes 65536 --duration 5",
    ),
    step(
        "durable put, 16 writers, 256 KiB",
        Judge::Durable(Some(5.0)),
        "--op put --tier file --durable --writers 16 --block-bytes 262144 --duration 5",
    ),
    step(
        "durable put, 16 writers, 1 MiB",
        Judge::Durable(None),
        "--op put --tier file --durable --writers 16 --block-bytes 1048576 --duration 5",
    ),
    step(
        "get from the log, 64 KiB",
        Judge::FileGet,
        "--op get --tier file --block-bytes 65536 --duration 3",
    ),
    step(
        "get from the log, 256 KiB",
        Judge::FileGet,
        "--op get --tier file --block-bytes 262144 --duration 3",
    ),
    step(
        "get from the log, 1 MiB",
        Judge::FileGet,
        "--op get --tier file --block-bytes 1048576 --duration 3",
    ),
    step(
        "get from the log, 16 at once, 64 KiB",
        Judge::FileGet,
        "--op get --tier file --writers 16 --block-bytes 65536 --duration 3",
    ),
    step(
        "prefetch into memory, 1 MiB",
        Judge::Ratio,
        "--op prefetch --block-bytes 1048576 --duration 3",
    ),
    drawn(
        step("lookup", Judge::LookupMs(10.0), "--op lookup"),
        "tiers-lookup.svg",
    ),
    step(
        "open of a log of 1 GiB, 1 MiB records",
        Judge::Open,
        "--op recover --working-set 1073741824 --block-bytes 1048576",
    ),
    drawn(
        step(
            "time to the first token behind a prefix, tiny-v4",
            Judge::Resume,
            "--op resume --tokens 8192",
        ),
        "tiers-first-token.svg",
    ),
    step(
        "trace with scans",
        Judge::Trace,
        "--trace TRACE --block-bytes 1048576 --working-set 67108864",
    ),
    drawn(
        step(
            "other stores",
            Judge::Compare,
            "--compare --working-set 33554432",
        ),
        "tiers-compare.svg",
    ),
];

/// What a run of this task does.
pub(super) struct Plan<'a> {
    /// Write the page and the pictures; otherwise the tables go to stdout.
    pub(super) write: bool,
    /// Only steps whose case contains this.
    pub(super) only: Option<&'a str>,
    /// Leave the other stores out.
    pub(super) no_grid: bool,
    /// Shorter slices.
    pub(super) quick: bool,
}

/// Measures everything, and writes or prints the tables.
pub(super) fn run(workspace: &Workspace, plan: &Plan<'_>) -> Result<(), Failure> {
    let build = [
        "build",
        "--release",
        "-p",
        "kvgate-examples",
        "--bin",
        PROGRAM,
    ];
    let built = workspace.cargo("bench-build", build).run()?;
    if !built.succeeded() {
        built.show_tail(40);
        return Err(Failure::new(format!("{PROGRAM} cannot be built")));
    }
    if !plan.quick {
        await_quiet();
    }
    let load_before = load();
    let pictures = match plan.write {
        true => workspace.root.join(PICTURES),
        false => workspace.target.join("bench-tiers"),
    };
    fs::create_dir_all(&pictures).map_err(|error| Failure::io(&pictures, &error))?;
    let trace = workspace.target.join("bench-tiers.trace");
    fs::write(&trace, scans()).map_err(|error| Failure::io(&trace, &error))?;
    let is_asked = |step: &&Step| {
        let is_named = plan.only.is_none_or(|only| step.case.contains(only));
        is_named && !(plan.no_grid && step.judge == Judge::Compare)
    };
    let mut measured = Vec::new();
    for step in STEPS.iter().filter(is_asked) {
        eprintln!("bench tiers: {}", step.case);
        let result = measure(workspace, plan, step, (&pictures, &trace))?;
        measured.push((step, result));
    }
    let machine = Machine {
        load_before,
        is_quick: plan.quick,
        ..machine()
    };
    let text = page(&machine, &measured);
    let raw: Vec<_> = measured
        .iter()
        .map(|(step, result)| json!({"case": step.case, "result": result}))
        .collect();
    let kept = workspace.target.join("bench-tiers.json");
    fs::write(&kept, json!(raw).to_string()).map_err(|error| Failure::io(&kept, &error))?;
    if !plan.write {
        println!("{text}");
        return Ok(());
    }
    let page = workspace.root.join(PAGE);
    let page_text = replace(&workspace.read(PAGE)?, (BEGIN, END), &text)?;
    fs::write(&page, page_text).map_err(|error| Failure::io(&page, &error))
}

/// The object that a run prints. One that fails has its error in it: the others are still worth having.
fn measure(
    workspace: &Workspace,
    plan: &Plan<'_>,
    step: &Step,
    (pictures, trace): (&Path, &Path),
) -> Result<Value, Failure> {
    // What the disk tiers write lies beside the build: a temporary folder may be memory.
    let folder: PathBuf = workspace.target.join("bench-tiers-data");
    fs::create_dir_all(&folder).map_err(|error| Failure::io(&folder, &error))?;
    let program = workspace.target.join("release").join(PROGRAM);
    let args = plan.args(step.args);
    let args = args.split(' ').map(|word| match word {
        "TRACE" => trace.as_os_str().to_owned(),
        word => word.into(),
    });
    let mut job = workspace.program(PROGRAM, program).args(args).args([
        Path::new("--json"),
        Path::new("--dir"),
        &folder,
    ]);
    if let Some(file) = step.picture {
        job = job.args([Path::new("--plot"), &pictures.join(file)]);
    }
    let (code, text) = job.stdout()?;
    Ok(serde_json::from_str(text.trim()).unwrap_or_else(|error| {
        let message = format!("exit code {code:?}, no JSON object: {error}");
        eprintln!("bench tiers: {}: {message}", step.case);
        json!({"error": {"message": message}})
    }))
}

impl Plan<'_> {
    fn args(&self, usual: &str) -> String {
        if !self.quick {
            return usual.to_owned();
        }
        let words = usual.split(' ').map(|word| match word {
            "2" | "3" | "4" | "5" => "0.3",
            "8192" => "1024",
            "1073741824" => "134217728",
            word => word,
        });
        words.collect::<Vec<_>>().join(" ")
    }
}

/// Prefixes that several conversations share and come back to, between prompts that are asked for once.
fn scans() -> String {
    let mut text = String::new();
    for round in 0..400_u64 {
        // The system prompt, and one of eight conversations behind it.
        let talk = 100 + round * 5 % 8 * 100;
        let _ = writeln!(text, "0-7 {talk}-{}", talk + 2);
        if round % 2 == 0 {
            let once = 10_000 + round * 100;
            let _ = writeln!(text, "{once}-{}", once + 39);
        }
    }
    text
}

fn page(machine: &Machine, measured: &[(&Step, Value)]) -> String {
    let mut text = String::new();
    head(&mut text, machine);
    text += "\n### Cases and limits\n\n| case | limit | measured | command |\n|---|---|---|---|\n";
    for (step, result) in measured {
        let mut command = format!("`{PROGRAM} {}`", step.args);
        for line in lines(step.judge, step.case, result) {
            text += &line_of(&line, &command);
            command = "″".to_owned();
        }
    }
    text += "\nBold figures miss their limit.\n";
    for (step, result) in measured {
        if step.judge == Judge::Compare {
            text += &table::others(result);
        }
        if let Some(file) = step.picture {
            let _ = writeln!(text, "\n![{}](performance/{file})", step.case);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quick_run_is_shorter_and_of_the_same_form() {
        let plan = Plan {
            write: false,
            only: None,
            no_grid: false,
            quick: true,
        };
        for step in &STEPS {
            let args = plan.args(step.args);
            assert_eq!(args.split(' ').count(), step.args.split(' ').count());
        }
        assert!(plan.args("--duration 4").ends_with("0.3"));
    }

    #[test]
    fn most_blocks_of_the_trace_are_asked_for_once() {
        let lines = scans().lines().count();
        assert_eq!(lines, 400 + 200);
    }
}
