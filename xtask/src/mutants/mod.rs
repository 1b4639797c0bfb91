//! `cargo xtask mutants`: breaks the code on purpose and demands that the named tests notice.
//!
//! A mutant is a patch with a header; see [`patch`]. Each is applied to a copy of the working
//! tree. A patch that does not apply, does not compile or runs into the time limit is a failure
//! of the run, never a kill; and a test counts as a killer only when it passes on the code as it
//! is.

mod killer;
mod outside;
mod patch;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;

use crate::Outcome;
use crate::exec::{Failure, Workspace};
use crate::tree::{self, Copy};

use killer::{Killer, Verdict};
use patch::Mutant;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Prints one JSON object on stdout.
    #[arg(long)]
    json: bool,
    /// Runs the mutants with this number only.
    #[arg(long, value_name = "NN")]
    only: Option<String>,
    /// Judges a patch from outside: killed (exit 0) or survived (exit 1).
    #[arg(long, value_name = "FILE", conflicts_with = "only")]
    patch: Option<PathBuf>,
}

/// What became of one mutant.
#[derive(Serialize)]
struct Row {
    id: String,
    name: String,
    killed: bool,
    /// The tests that noticed it, or what went wrong.
    by: String,
    seconds: f64,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    mutants: Vec<Row>,
    killed: usize,
    total: usize,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<Outcome, Failure> {
    if let Some(file) = &args.patch {
        return outside::judge(workspace, file, args.json);
    }
    let mutants = load(workspace, args.only.as_deref())?;
    let (copy, inside) = copy_of(workspace)?;
    let broken = baseline(&inside, &mutants)?;
    let mut rows = Vec::new();
    for mutant in &mutants {
        let row = judge(&copy, &inside, mutant, &broken)?;
        let word = if row.killed {
            "killed by"
        } else {
            "NOT KILLED:"
        };
        eprintln!(
            "mutant {}-{}: {word} {} ({:.0} s)",
            row.id, row.name, row.by, row.seconds
        );
        rows.push(row);
    }
    copy.reset()?;
    let killed = rows.iter().filter(|row| row.killed).count();
    let total = rows.len();
    if args.json {
        let report = Report {
            schema: "kvgate.mutants/1",
            mutants: rows,
            killed,
            total,
        };
        let text = serde_json::to_string(&report)
            .map_err(|error| Failure::new(format!("mutants: {error}")))?;
        println!("{text}");
    } else {
        println!("mutants: {killed} of {total} killed");
    }
    Ok(Outcome::found_if(killed < total))
}

/// Runs `action` on a copy of the tree that mutant `id` has broken.
pub(crate) fn with_mutant<T>(
    workspace: &Workspace,
    id: &str,
    action: impl FnOnce(&Workspace) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let mutants = load(workspace, Some(id))?;
    let (copy, inside) = copy_of(workspace)?;
    for mutant in &mutants {
        if let Some(complaint) = copy.apply(&inside, &mutant.file)? {
            let file = mutant.file.display();
            return Err(Failure::new(format!("{file}: does not apply: {complaint}")));
        }
    }
    let answer = action(&inside);
    copy.reset()?;
    answer
}

/// The copy that is broken, and a workspace that builds inside it with its own target folder.
fn copy_of(workspace: &Workspace) -> Result<(Copy, Workspace), Failure> {
    let home = workspace.target.join("mutants");
    let copy = Copy::new(workspace, home.join("tree"))?;
    let inside = Workspace {
        root: copy.folder.clone(),
        target: home.join("target"),
    };
    Ok((copy, inside))
}

fn load(workspace: &Workspace, only: Option<&str>) -> Result<Vec<Mutant>, Failure> {
    let mut mutants = Vec::new();
    for path in tree::files(workspace)? {
        if !path.starts_with(patch::FOLDER) || !path.ends_with(".patch") {
            continue;
        }
        let mutant = Mutant::parse(&workspace.root.join(&path), &workspace.read(&path)?)?;
        let wanted =
            only.is_none_or(|id| mutant.id.trim_start_matches('0') == id.trim_start_matches('0'));
        if wanted {
            mutants.push(mutant);
        }
    }
    if mutants.is_empty() {
        let which = only.map_or(String::new(), |id| format!(" with number {id}"));
        return Err(Failure::new(format!(
            "no mutants{which} in {}",
            patch::FOLDER
        )));
    }
    Ok(mutants)
}

/// Runs every named killer on the code as it is; answers those that do not pass.
fn baseline(inside: &Workspace, mutants: &[Mutant]) -> Result<BTreeSet<Killer>, Failure> {
    let killers: BTreeSet<&Killer> = mutants.iter().flat_map(|mutant| &mutant.killers).collect();
    let mut broken = BTreeSet::new();
    for killer in killers {
        let verdict = killer.run(inside, patch::LIMIT)?;
        eprintln!("unmutated: {killer}: {verdict}");
        if verdict != Verdict::Passed {
            broken.insert(killer.clone());
        }
    }
    Ok(broken)
}

fn judge(
    copy: &Copy,
    inside: &Workspace,
    mutant: &Mutant,
    broken: &BTreeSet<Killer>,
) -> Result<Row, Failure> {
    let started = Instant::now();
    copy.reset()?;
    let (killed, by) = match copy.apply(inside, &mutant.file)? {
        Some(complaint) => (false, format!("does not apply: {complaint}")),
        None => run_killers(inside, mutant, broken)?,
    };
    let seconds = (started.elapsed().as_secs_f64() * 10.0).round() / 10.0;
    Ok(Row {
        id: mutant.id.clone(),
        name: mutant.name.clone(),
        killed,
        by,
        seconds,
    })
}

/// Every killer that the header names has to notice.
fn run_killers(
    inside: &Workspace,
    mutant: &Mutant,
    broken: &BTreeSet<Killer>,
) -> Result<(bool, String), Failure> {
    let mut by = Vec::new();
    for killer in &mutant.killers {
        if broken.contains(killer) {
            return Ok((
                false,
                format!("{killer} does not pass on the code as it is"),
            ));
        }
        match killer.run(inside, mutant.limit)? {
            Verdict::Failed => by.push(killer.to_string()),
            other => return Ok((false, format!("{killer}: {other}"))),
        }
    }
    Ok((true, by.join("; ")))
}
