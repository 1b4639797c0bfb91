//! `cargo xtask header`: the C header of kvgate-capi, made by cbindgen from its sources.
//!
//! cbindgen is a program that somebody installs and not a dependency; `docs/decisions/0004-c-header.md`
//! says why.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::Outcome;
use crate::exec::{Failure, Workspace};

/// The crate that the header is made from.
pub(crate) const CAPI: &str = "kvcache/capi";
/// The header, below the root.
pub(crate) const HEADER: &str = "kvcache/capi/include/kvgate.h";
/// Another version would word the same header in another way.
const VERSION: &str = "0.29.4";
/// What a machine without it is told.
pub(crate) const HINT: &str =
    "cargo install --locked cbindgen --version 0.29.4 --root target/tools";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Writes nothing: says whether the committed header is the one that would be written.
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<Outcome, Failure> {
    let Some(cbindgen) = find(workspace)? else {
        if args.check {
            println!("SKIP header: {HINT}");
            return Ok(Outcome::Clean);
        }
        return Err(Failure::new(format!(
            "cbindgen {VERSION} is absent: {HINT}"
        )));
    };
    if !args.check {
        generate(workspace, &cbindgen, &workspace.root.join(HEADER))?;
        println!("header: {HEADER} written");
        return Ok(Outcome::Clean);
    }
    let complaints = differences(workspace, &cbindgen)?;
    for complaint in &complaints {
        println!("{complaint}");
    }
    println!("header: {} differences", complaints.len());
    Ok(Outcome::found_if(!complaints.is_empty()))
}

/// What is wrong with the committed header; `None` without a cbindgen to tell.
pub(crate) fn check(workspace: &Workspace) -> Result<Option<Vec<String>>, Failure> {
    match find(workspace)? {
        Some(cbindgen) => differences(workspace, &cbindgen).map(Some),
        None => Ok(None),
    }
}

/// A cbindgen of the right version: where the hint puts it, or on the path.
fn find(workspace: &Workspace) -> Result<Option<OsString>, Failure> {
    let own = workspace.root.join("target/tools/bin/cbindgen");
    let candidates = [own.into_os_string(), "cbindgen".into()];
    for candidate in candidates {
        let asked = workspace
            .program("cbindgen", &candidate)
            .args(["--version"]);
        // Not there, or not to be started, which is the same to us.
        let Ok((Some(0), answer)) = asked.stdout() else {
            continue;
        };
        if answer.split_whitespace().nth(1) == Some(VERSION) {
            return Ok(Some(candidate));
        }
    }
    Ok(None)
}

fn generate(workspace: &Workspace, cbindgen: &OsString, header: &Path) -> Result<(), Failure> {
    let output = header.as_os_str().to_owned();
    let words = [
        "--quiet",
        "--config",
        "cbindgen.toml",
        "--crate",
        "kvgate-capi",
    ];
    let job = workspace
        .program("cbindgen", cbindgen)
        .args(words)
        .args([OsString::from("--output"), output, ".".into()])
        .folder(&workspace.root.join(CAPI));
    let done = job.run()?;
    if done.succeeded() {
        return Ok(());
    }
    done.show_tail(40);
    Err(Failure::new(format!("cbindgen: {}", done.ending())))
}

fn differences(workspace: &Workspace, cbindgen: &OsString) -> Result<Vec<String>, Failure> {
    let folder = tempfile::tempdir()
        .map_err(|error| Failure::new(format!("no temporary folder: {error}")))?;
    let fresh: PathBuf = folder.path().join("kvgate.h");
    generate(workspace, cbindgen, &fresh)?;
    let wanted = fs::read_to_string(&fresh).map_err(|error| Failure::io(&fresh, &error))?;
    Ok(compare(&workspace.read(HEADER)?, &wanted))
}

/// The first line in which two headers differ.
fn compare(found: &str, wanted: &str) -> Vec<String> {
    if found == wanted {
        return Vec::new();
    }
    let line = found
        .lines()
        .zip(wanted.lines())
        .position(|(found, wanted)| found != wanted)
        .unwrap_or_else(|| found.lines().count().min(wanted.lines().count()));
    let shown = |text: &str| text.lines().nth(line).unwrap_or("(end)").to_owned();
    vec![format!(
        "{HEADER}:{}: {:?}, its sources give {:?}: cargo xtask header",
        line + 1,
        shown(found),
        shown(wanted)
    )]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        assert!(compare("a\nb\n", "a\nb\n").is_empty());
        let found = compare("a\nb\nc\n", "a\nx\nc\n");
        assert!(
            found[0].starts_with("kvcache/capi/include/kvgate.h:2: \"b\""),
            "{found:?}"
        );
        assert!(compare("a\n", "a\nb\n")[0].contains(":2: \"(end)\""));
        assert_eq!(
            compare("a\n", "a").len(),
            1,
            "also a difference that no line shows"
        );
    }
}
