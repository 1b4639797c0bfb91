//! Where the processor time of a path goes: `perf` over slices of the engine alone.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use crate::exec::{Failure, Workspace};

/// What is profiled: its name and its command.
const CASES: [(&str, &str); 5] = [
    (
        "shm, write, 8,448 B × 1",
        "--backend shm --op write --page-bytes 8448 --pages 1",
    ),
    (
        "shm, read, 8,448 B × 1",
        "--backend shm --op read --page-bytes 8448 --pages 1",
    ),
    (
        "tcp, write, 8,448 B × 64",
        "--backend tcp --op write --page-bytes 8448 --pages 64",
    ),
    (
        "tcp, read, 8,448 B × 64",
        "--backend tcp --op read --page-bytes 8448 --pages 64",
    ),
    (
        "ucx over tcp, write, 8,448 B × 64",
        "--backend ucx --op write --page-bytes 8448 --pages 64",
    ),
];
const REST: &str = "--check off --engine-only --pool-mib 16 --duration 3 --json";
/// A symbol with less of the time is left out, in percent.
const LEAST_PERCENT: f64 = 3.0;
const LIMIT: Duration = Duration::from_secs(60);

/// The tables; a sentence where there is no `perf`.
pub(super) fn tables(workspace: &Workspace, program: &Path) -> Result<String, Failure> {
    let mut text = String::from("\n### Where the time goes\n\n");
    let version = workspace
        .program("perf-version", "perf")
        .args(["--version"]);
    if !version
        .limit(LIMIT)
        .run()
        .is_ok_and(|done| done.succeeded())
    {
        text += "Not measured: there is no `perf`.\n";
        return Ok(text);
    }
    let _ = writeln!(
        text,
        "Samples of the processor's clock in both processes and in the kernel, slices of the engine alone (`perf record \
         -F 4999 -e cpu-clock transfer-bench … {REST}`); symbols with {LEAST_PERCENT} % and more.\n"
    );
    for (case, args) in CASES {
        eprintln!("bench transfer: profile of {case}");
        let _ = writeln!(text, "**{case}**: `{args}`\n\n| share | where |\n|---|---|");
        let data = workspace.target.join("bench-transfer.perf");
        let record = ["record", "-q", "-F", "4999", "-e", "cpu-clock", "-o"];
        let done = workspace
            .program("perf-record", "perf")
            .args(record)
            .args([&data, Path::new("--"), program])
            .args(args.split(' ').chain(REST.split(' ')))
            .limit(LIMIT)
            .run()?;
        if !done.succeeded() {
            let _ = writeln!(
                text,
                "| – | not measured: perf record ended with {} |\n",
                done.ending()
            );
            continue;
        }
        let report = [
            "report",
            "--stdio",
            "-q",
            "--no-children",
            "--sort",
            "dso,symbol",
            "-i",
        ];
        let (_, report) = workspace
            .program("perf-report", "perf")
            .args(report)
            .args([&data])
            .stdout()?;
        for (share, place) in symbols(&report) {
            let _ = writeln!(text, "| {share:.1} % | `{place}` |");
        }
        text.push('\n');
    }
    Ok(text)
}

/// Share and place of each line of a report.
fn symbols(report: &str) -> Vec<(f64, String)> {
    let line = |line: &str| {
        let (share, rest) = line.trim().split_once('%')?;
        let share: f64 = share.trim().parse().ok()?;
        // Empty columns are a minus.
        let words: Vec<_> = rest
            .split_whitespace()
            .filter(|word| *word != "-")
            .collect();
        let place = words.join(" ").replace('|', "/");
        (share >= LEAST_PERCENT).then_some((share, place))
    };
    report.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_shares_are_left_out() {
        let report =
            "\n    41.20%  [kernel.kallsyms]  [k] copy   -   -\n     2.90%  x  [.] y\nno line\n";
        assert_eq!(
            symbols(report),
            [(41.2, "[kernel.kallsyms] [k] copy".to_owned())]
        );
    }
}
