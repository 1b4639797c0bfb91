//! `cargo xtask tsan`: the threaded tests under the thread sanitizer of the stable compiler.
//!
//! The standard library comes without the sanitizer, and there is none with it for a stable compiler. So two of
//! its ways to order things are not seen, and each report is judged by its two stacks:
//! - the fence behind the last count of an `Arc`: what is freed there looks like a race with whatever another
//!   thread did to it before. Left out: a stack that frees it, with no line of the workspace inside of `drop_slow`;
//! - the slow paths of the mutex, and the joining of threads, of the standard library itself. The product locks by
//!   `parking_lot`, which is built with the sanitizer; tests and the test harness do not always. Left out: an
//!   access that no line of a `src/` folder of the workspace makes.
//!
//! What is left has both of its accesses in the product, and is a finding. How often each was left out is printed.

use std::time::Duration;

use crate::Outcome;
use crate::exec::{Failure, Workspace};
use crate::fuzz;
use crate::libtest;

/// Mappings are made through libc, where the sanitizer sees that an address has another use than before.
const FLAGS: &str =
    "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer --cfg rustix_use_libc";
/// Of one test program, with its build.
const LIMIT: Duration = Duration::from_secs(900);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Runs this test program only.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// A test program: its package and the arguments that choose it.
struct Suite {
    name: &'static str,
    package: &'static str,
    args: &'static [&'static str],
}

const fn test(package: &'static str, args: &'static [&'static str]) -> Suite {
    Suite {
        name: args[1],
        package,
        args,
    }
}

/// Tests in which threads share something, on every transport that needs no library.
const SUITES: [Suite; 9] = [
    test("kvgate-transfer", &["--test", "agent"]),
    test("kvgate-transfer", &["--test", "attend"]),
    test("kvgate-transfer", &["--test", "backend_contract"]),
    test("kvgate-transfer", &["--test", "heartbeat"]),
    test("kvgate-transfer", &["--test", "stalls"]),
    test("kvgate-transfer", &["--test", "tcp_sessions"]),
    test("kvgate-kvcache", &["--test", "flight_local"]),
    test("kvgate-kvcache", &["--test", "guards"]),
    test("kvgate-kvcache", &["--test", "two_writers"]),
];

/// How the reports of a run were judged.
#[derive(Debug, Default, PartialEq, Eq)]
struct Judged {
    /// The two lines of the product, once each.
    findings: Vec<String>,
    freed: usize,
    elsewhere: usize,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<Outcome, Failure> {
    let is_chosen = |suite: &&Suite| args.only.as_ref().is_none_or(|name| name == suite.name);
    let chosen: Vec<_> = SUITES.iter().filter(is_chosen).collect();
    if chosen.is_empty() {
        let names: Vec<_> = SUITES.iter().map(|suite| suite.name).collect();
        return Err(Failure::new(format!(
            "no such program; there are {}",
            names.join(", ")
        )));
    }
    let host = fuzz::host(workspace)?;
    let root = workspace.root.display().to_string();
    let (mut findings, mut failed) = (0, 0);
    for suite in chosen {
        let done = workspace
            .cargo(&format!("tsan-{}", suite.name), ["test", "--target", &host])
            .args(["-p", suite.package])
            .args(suite.args)
            .target(&workspace.target.join("tsan"))
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", FLAGS)
            .env("TSAN_OPTIONS", "exitcode=0")
            .limit(LIMIT)
            .run()?;
        let counts = libtest::counts(&done.output);
        let judged = judge(&done.output, &root);
        let is_good = done.succeeded() && counts.passed > 0;
        if !is_good {
            done.show_tail(60);
            failed += 1;
        }
        for finding in &judged.findings {
            println!("tsan: race in {}: {finding}", suite.name);
        }
        findings += judged.findings.len();
        println!(
            "tsan {}: {}, {} tests, {} races; left out: {} of a freed Arc, {} outside of the product ({:.0} s)",
            suite.name,
            if is_good { "ok" } else { "FAILED" },
            counts.passed + counts.failed,
            judged.findings.len(),
            judged.freed,
            judged.elsewhere,
            done.elapsed.as_secs_f64()
        );
    }
    println!("tsan: {findings} races, {failed} programs failed");
    Ok(Outcome::found_if(findings + failed > 0))
}

/// Sorts the reports in the output of a test program.
fn judge(output: &str, root: &str) -> Judged {
    let mut judged = Judged::default();
    for report in output.split("WARNING: ThreadSanitizer: ").skip(1) {
        let report = report.split("SUMMARY: ").next().unwrap_or_default();
        let accesses: Vec<&str> = report
            .split("\n\n")
            .filter(|block| block.contains(" of size ") && block.contains("#0 "))
            .take(2)
            .collect();
        if accesses.iter().any(|access| is_freed(access, root)) {
            judged.freed += 1;
            continue;
        }
        let lines: Vec<_> = accesses
            .iter()
            .map(|access| product_line(access, root))
            .collect();
        match lines[..] {
            [Some(first), Some(second)] => {
                let finding = format!("{first} and {second}");
                if !judged.findings.contains(&finding) {
                    judged.findings.push(finding);
                }
            }
            _ => judged.elsewhere += 1,
        }
    }
    judged
}

/// Whether the last count of an `Arc` was given up, and no line of the workspace was called from there.
fn is_freed(access: &str, root: &str) -> bool {
    let inner = access.split("drop_slow").next().unwrap_or(access);
    inner.len() < access.len() && !inner.contains(&format!(" {root}/"))
}

/// The innermost line of the workspace in a stack, if it is the product's.
fn product_line<'a>(access: &'a str, root: &str) -> Option<&'a str> {
    let of_workspace = access.lines().find_map(|line| {
        let (_, path) = line.split_once(&format!(" {root}/"))?;
        path.split_whitespace().next()
    })?;
    let is_product = of_workspace.contains("/src/") && !of_workspace.contains("tests");
    is_product.then_some(of_workspace)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(first: &[&str], second: &[&str]) -> String {
        let stack = |frames: &[&str]| {
            let frame = |(at, frame): (usize, &&str)| format!("    #{at} {frame} (prog+0x1)\n");
            frames.iter().enumerate().map(frame).collect::<String>()
        };
        format!(
            "WARNING: ThreadSanitizer: data race (pid=1)\n  Write of size 8 at 0x1 by thread T1:\n{}\n  \
             Previous read of size 8 at 0x1 by thread T2:\n{}\n  Thread T1 created by main\n    #0 x /w/a/src/x.rs:1\n\
             SUMMARY: ThreadSanitizer: data race\n",
            stack(first),
            stack(second)
        )
    }

    #[test]
    fn a_report_with_both_accesses_in_the_product_is_a_finding() {
        let ours = [
            "copy /rustc/1/core/ptr.rs:1:1",
            "put /w/transfer/src/mem/ring.rs:10:5",
        ];
        let theirs = ["take /w/transfer/src/attend/mod.rs:20:5"];
        let found = judge(&report(&ours, &theirs).repeat(2), "/w");
        assert_eq!(
            found.findings,
            ["transfer/src/mem/ring.rs:10:5 and transfer/src/attend/mod.rs:20:5"]
        );
        assert_eq!((found.freed, found.elsewhere), (0, 0));
    }

    #[test]
    fn what_the_standard_library_hides_is_left_out_and_counted() {
        let ours = ["put /w/transfer/src/mem/ring.rs:10:5"];
        let frees = [
            "free",
            "<alloc::sync::Arc<X>>::drop_slow /rustc/1/alloc/sync.rs:1:1",
            "end /w/transfer/src/engine/mod.rs:1:1",
        ];
        let test = [
            "fill /w/transfer/tests/proxy/mod.rs:1:1",
            "x /w/transfer/src/lib.rs:1:1",
        ];
        let harness = ["memcpy", "run /rustc/1/test/lib.rs:1:1"];
        let output = [
            report(&frees, &ours),
            report(&ours, &test),
            report(&harness, &ours),
        ];
        let found = judge(&output.concat(), "/w");
        assert_eq!(
            (found.findings.len(), found.freed, found.elsewhere),
            (0, 1, 2)
        );
    }

    #[test]
    fn every_program_is_there() {
        let workspace = Workspace::find().expect("the workspace");
        for suite in &SUITES {
            let folder = suite.package.trim_start_matches("kvgate-");
            let file = format!("{folder}/tests/{}.rs", suite.name);
            assert!(workspace.has(&file), "{file}");
        }
    }
}
