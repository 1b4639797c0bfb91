//! `cargo xtask bench transfer`: the speed table, the grid beside other engines and the curves, measured in one go
//! and written as they came.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::markdown::{self, Grid, Measured};
use super::profile;
use super::steps::{CURVES, GRID_ARGS, GRIDS, PROGRAMS, STEPS, TRANSFER_BENCH, quick};
use crate::exec::{Failure, Workspace};

/// Where the tables stand, between two marks.
const PAGE: &str = "docs/performance.md";
const BEGIN: &str = "<!-- cargo xtask bench transfer: begin -->\n";
const END: &str = "<!-- cargo xtask bench transfer: end -->\n";
/// The pictures.
const PICTURES: &str = "docs/performance";

/// The one-minute average of a build on every core is quiet again within this.
const QUIET_WITHIN: Duration = Duration::from_secs(180);

/// What a run of this task does.
pub(super) struct Plan<'a> {
    /// Write the page and the pictures; otherwise the tables go to stdout.
    pub(super) write: bool,
    /// Only steps whose case contains this.
    pub(super) only: Option<&'a str>,
    /// Leave the grid beside other engines out.
    pub(super) no_grid: bool,
    /// Shorter slices and a smaller grid.
    pub(super) quick: bool,
}

/// Measures everything, and writes or prints the tables.
pub(super) fn run(workspace: &Workspace, plan: &Plan<'_>) -> Result<(), Failure> {
    let build = [
        "build",
        "--release",
        "-p",
        "kvgate-examples",
        "--features",
        "ucx,libfabric",
    ];
    let bins = PROGRAMS.iter().flat_map(|program| ["--bin", program]);
    let built = workspace
        .cargo("bench-build", build.into_iter().chain(bins))
        .run()?;
    if !built.succeeded() {
        built.show_tail(40);
        let programs = PROGRAMS.join(" and ");
        return Err(Failure::new(format!("{programs} cannot be built")));
    }
    if !plan.quick {
        await_quiet();
    }
    let load_before = load();
    let bench = Bench {
        workspace,
        pictures: match plan.write {
            true => workspace.root.join(PICTURES),
            false => workspace.target.join("bench-transfer"),
        },
    };
    fs::create_dir_all(&bench.pictures).map_err(|error| Failure::io(&bench.pictures, &error))?;
    let is_asked = |case: &str| plan.only.is_none_or(|only| case.contains(only));
    let mut measured = Vec::new();
    for step in STEPS.iter().filter(|step| is_asked(step.case)) {
        let picture = CURVES.iter().find(|(case, _)| *case == step.case);
        let args = plan.args(step.args);
        let result = bench.measure(
            step.case,
            (step.program, &args),
            picture.map(|(_, file)| *file),
        )?;
        measured.push(Measured { step, args, result });
    }
    let mut grids = Vec::new();
    for (op, file) in GRIDS {
        let case = format!("grid, {op}");
        if plan.no_grid || !is_asked(&case) {
            continue;
        }
        let args = plan.args(&format!("--op {op} {GRID_ARGS}"));
        let result = bench.measure(&case, (TRANSFER_BENCH, &args), Some(file))?;
        grids.push(Grid { args, result });
    }
    let machine = markdown::Machine {
        load_before,
        is_quick: plan.quick,
        ..machine()
    };
    let mut text = markdown::page(&machine, &measured, &grids);
    if plan.only.is_none() {
        text += &profile::tables(workspace, &bench.path(TRANSFER_BENCH))?;
    }
    let raw = json!({
        "steps": measured.iter().map(|one| json!({"case": one.step.case, "result": one.result})).collect::<Vec<_>>(),
        "grids": grids.iter().map(|grid| &grid.result).collect::<Vec<_>>(),
    });
    let kept = workspace.target.join("bench-transfer.json");
    fs::write(&kept, raw.to_string()).map_err(|error| Failure::io(&kept, &error))?;
    if !plan.write {
        println!("{text}");
        return Ok(());
    }
    let page = workspace.root.join(PAGE);
    let page_text = replace(&workspace.read(PAGE)?, (BEGIN, END), &text)?;
    fs::write(&page, page_text).map_err(|error| Failure::io(&page, &error))
}

impl Plan<'_> {
    fn args(&self, usual: &str) -> String {
        match self.quick {
            true => quick(usual),
            false => usual.split_whitespace().collect::<Vec<_>>().join(" "),
        }
    }
}

struct Bench<'a> {
    workspace: &'a Workspace,
    pictures: PathBuf,
}

impl Bench<'_> {
    fn path(&self, program: &str) -> PathBuf {
        self.workspace.target.join("release").join(program)
    }

    /// The object that a run of the program with these arguments prints. One that fails has its error in it: the
    /// others are still worth having.
    fn measure(
        &self,
        case: &str,
        (program, args): (&'static str, &str),
        picture: Option<&str>,
    ) -> Result<Value, Failure> {
        eprintln!("bench transfer: {case}");
        let mut job = self
            .workspace
            .program(program, self.path(program))
            .args(args.split(' '))
            .args(["--json"]);
        if let Some(file) = picture {
            job = job.args([Path::new("--plot"), &self.pictures.join(file)]);
        }
        let (code, text) = job.stdout()?;
        Ok(serde_json::from_str(text.trim()).unwrap_or_else(|error| {
            let message = format!("exit code {code:?}, no JSON object: {error}");
            eprintln!("bench transfer: {case}: {message}");
            json!({"error": {"message": message}})
        }))
    }
}

/// Puts the tables between the marks.
pub(super) fn replace(
    page: &str,
    (begin, end): (&str, &str),
    text: &str,
) -> Result<String, Failure> {
    let parts = page.split_once(begin).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(end)?;
        Some((before, after))
    });
    let (before, after) = parts.ok_or_else(|| {
        Failure::new(format!(
            "{PAGE} has no lines {:?} and {:?}",
            begin.trim(),
            end.trim()
        ))
    })?;
    Ok(format!("{before}{begin}{text}{end}{after}"))
}

/// Waits until the load of the build has faded from the average. A machine that stays busy is measured all the same, and
/// the page says so.
pub(super) fn await_quiet() {
    let deadline = Instant::now() + QUIET_WITHIN;
    while !markdown::is_quiet(load()) && Instant::now() < deadline {
        thread::sleep(Duration::from_secs(1));
    }
}

/// One-minute load; NaN, which is not quiet, where it cannot be told.
pub(super) fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split_whitespace().next();
    first.and_then(|word| word.parse().ok()).unwrap_or(f64::NAN)
}

pub(super) fn machine() -> markdown::Machine {
    let line = |file: &str, begin: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let found = text.lines().find(|line| line.starts_with(begin));
        let value = found.and_then(|line| line.split_once(':'));
        value.map_or_else(
            || "unknown".to_owned(),
            |(_, value)| value.trim().to_owned(),
        )
    };
    let memory = line("/proc/meminfo", "MemTotal");
    let kib = memory
        .split(' ')
        .next()
        .and_then(|word| word.parse::<u64>().ok());
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    markdown::Machine {
        processor: line("/proc/cpuinfo", "model name"),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        memory_gib: kib.unwrap_or_default() >> 20,
        kernel: kernel.trim().to_owned(),
        load_before: 0.0,
        load_after: load(),
        is_quick: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_stand_between_the_marks() {
        let page = format!("above\n{BEGIN}old\n{END}below\n");
        let new = replace(&page, (BEGIN, END), "new\n").unwrap();
        assert_eq!(new, format!("above\n{BEGIN}new\n{END}below\n"));
        assert!(replace("no marks", (BEGIN, END), "new").is_err());
    }
}
