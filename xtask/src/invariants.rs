//! `cargo xtask invariants`: the table of docs/invariants.md against the tree.
//!
//! A row is `| I-n | what | code | checked by | mutants |`. Names stand in backticks: files in
//! the code column, `file::test_function` (or `file::compile_fail`) in the next one, names of
//! patches without their ending in the last. Every column needs at least one.

use std::collections::BTreeSet;

use crate::Outcome;
use crate::exec::{Failure, Workspace};
use crate::lexer::tokens;
use crate::tree;

const TABLE: &str = "docs/invariants.md";
const MUTANTS: &str = "loom-tests/mutants/";

/// Every number that has to be accounted for: in the table, or in the list of what is to come.
const NUMBERS: std::ops::RangeInclusive<u32> = 1..=25;

pub(crate) fn run(workspace: &Workspace) -> Result<Outcome, Failure> {
    let complaints = check(workspace)?;
    for complaint in &complaints {
        println!("{complaint}");
    }
    println!("invariants: {} violations", complaints.len());
    Ok(Outcome::found_if(!complaints.is_empty()))
}

/// All complaints about the table.
pub(crate) fn check(workspace: &Workspace) -> Result<Vec<String>, Failure> {
    let text = workspace.read(TABLE)?;
    let patches: BTreeSet<String> = tree::files(workspace)?
        .iter()
        .filter_map(|path| path.strip_prefix(MUTANTS)?.strip_suffix(".patch"))
        .map(str::to_owned)
        .collect();
    let read = |path: &str| workspace.read(path).ok();
    Ok(complaints(&text, &patches, &read))
}

struct Row<'a> {
    id: &'a str,
    code: Vec<&'a str>,
    tests: Vec<&'a str>,
    mutants: Vec<&'a str>,
}

fn complaints(
    text: &str,
    patches: &BTreeSet<String>,
    read: &dyn Fn(&str) -> Option<String>,
) -> Vec<String> {
    let rows = rows_of(text);
    let mut found = Vec::new();
    for row in &rows {
        for (column, names) in [
            ("code", &row.code),
            ("checked by", &row.tests),
            ("mutants", &row.mutants),
        ] {
            if names.is_empty() {
                found.push(format!("{}: the column {column:?} names nothing", row.id));
            }
        }
        for file in row.code.iter().filter(|file| read(file).is_none()) {
            found.push(format!("{}: no file {file}", row.id));
        }
        found.extend(
            row.tests
                .iter()
                .filter_map(|test| test_complaint(row.id, test, read)),
        );
        for mutant in row.mutants.iter().filter(|name| !patches.contains(**name)) {
            found.push(format!("{}: no mutant {mutant}", row.id));
        }
    }
    found.extend(accounting(text, &rows));
    let named: BTreeSet<&str> = rows
        .iter()
        .flat_map(|row| row.mutants.iter().copied())
        .collect();
    for patch in patches
        .iter()
        .filter(|patch| !named.contains(patch.as_str()))
    {
        found.push(format!("{TABLE}: mutant {patch} belongs to no invariant"));
    }
    found
}

/// Every number stands exactly once: in a row, or in a bullet of what does not exist yet.
fn accounting(text: &str, rows: &[Row<'_>]) -> Vec<String> {
    let bullets = text
        .lines()
        .filter_map(|line| line.strip_prefix("- **")?.split("**").next());
    let all: Vec<&str> = rows.iter().map(|row| row.id).chain(bullets).collect();
    NUMBERS
        .map(|number| format!("I-{number}"))
        .filter_map(|id| match all.iter().filter(|seen| **seen == id).count() {
            1 => None,
            0 => Some(format!("{TABLE}: {id} is missing")),
            count => Some(format!("{TABLE}: {id} stands {count} times")),
        })
        .collect()
}

fn rows_of(text: &str) -> Vec<Row<'_>> {
    text.lines()
        .filter(|line| line.starts_with("| I-"))
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let cell = |at: usize| cells.get(at).copied().unwrap_or_default();
            Row {
                id: cell(0),
                code: quoted(cell(2)),
                tests: quoted(cell(3)),
                mutants: quoted(cell(4)),
            }
        })
        .collect()
}

/// What stands in backticks.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

fn test_complaint(id: &str, test: &str, read: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let Some((file, function)) = test.split_once("::") else {
        return Some(format!("{id}: {test}: expected file::function"));
    };
    let Some(text) = read(file) else {
        return Some(format!("{id}: no file {file}"));
    };
    let exists = if function == "compile_fail" {
        text.contains("```compile_fail")
    } else {
        defines(&text, function)
    };
    (!exists).then(|| format!("{id}: no {function} in {file}"))
}

/// Whether a source defines this function, as code and not in a comment.
pub(crate) fn defines(text: &str, function: &str) -> bool {
    tokens(text)
        .windows(2)
        .any(|pair| pair[0].is("fn") && pair[1].is(function))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(row: &str) -> String {
        let rest: String = NUMBERS
            .filter(|n| *n != 2)
            .map(|n| format!("- **I-{n}** later\n"))
            .collect();
        format!("| # | what |\n|---|---|\n{row}\n\n{rest}")
    }

    fn read(path: &str) -> Option<String> {
        match path {
            "a.rs" => Some("fn code() {}".into()),
            "t.rs" => Some("/// ```compile_fail\n// fn old()\n#[test]\nfn opens_last() {}".into()),
            _ => None,
        }
    }

    fn of(row: &str, patches: &[&str]) -> Vec<String> {
        let patches = patches.iter().map(|name| (*name).to_owned()).collect();
        complaints(&table(row), &patches, &read)
    }

    const GOOD: &str =
        "| I-2 | opens last | `a.rs` | `t.rs::opens_last`, `t.rs::compile_fail` | `02-relaxed` |";

    #[test]
    fn a_row_whose_names_exist_passes() {
        assert_eq!(of(GOOD, &["02-relaxed"]), [""; 0]);
    }

    #[test]
    fn every_name_that_does_not_exist_is_a_complaint() {
        for (from, to) in [
            ("a.rs", "gone.rs"),
            ("opens_last`", "old`"),
            ("t.rs::opens", "gone.rs::opens"),
            ("t.rs::compile_fail", "a.rs::compile_fail"),
            ("`t.rs::opens_last`, `t.rs::compile_fail`", "nothing"),
            ("`a.rs`", ""),
        ] {
            let row = GOOD.replace(from, to);
            assert_eq!(of(&row, &["02-relaxed"]).len(), 1, "{row}");
        }
        assert_eq!(of(GOOD, &[]), ["I-2: no mutant 02-relaxed"]);
    }

    #[test]
    fn forgotten_numbers_and_patches_are_complaints() {
        assert_eq!(of("", &[]), ["docs/invariants.md: I-2 is missing"]);
        let twice = format!("{GOOD}\n{GOOD}");
        assert_eq!(
            of(&twice, &["02-relaxed"]),
            ["docs/invariants.md: I-2 stands 2 times"]
        );
        assert_eq!(
            of(GOOD, &["02-relaxed", "03-other"]),
            ["docs/invariants.md: mutant 03-other belongs to no invariant"]
        );
    }
}
