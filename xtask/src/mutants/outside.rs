//! Judging a patch that somebody else wrote: does any test notice it?

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::Outcome;
use crate::exec::{Failure, Job, Workspace};
use crate::{libtest, loom};

use super::copy_of;

/// Time limit of one group of tests.
const LIMIT: Duration = Duration::from_secs(900);

/// A group of tests, cheap ones first.
struct Group {
    name: &'static str,
    job: fn(&Workspace) -> Job,
}

const GROUPS: [Group; 5] = [
    Group {
        name: "tests of transfer and kvcache",
        job: |tree| {
            let packages = ["test", "-p", "kvgate-transfer", "-p", "kvgate-kvcache"];
            let features = ["--features", "kvgate-transfer/sim"];
            tree.cargo("outside-libs", packages.iter().chain(&features))
        },
    },
    Group {
        name: "loom models",
        job: |tree| loom::job(tree, loom::BOUND, &["", ""]),
    },
    Group {
        name: "tests of the model",
        job: |tree| tree.cargo("outside-model", ["test", "-p", "kvgate-model"]),
    },
    Group {
        name: "end-to-end hand-offs",
        job: |tree| tree.cargo("outside-examples", ["test", "-p", "kvgate-examples"]),
    },
    Group {
        name: "fault matrix",
        job: |tree| {
            let args = [
                "test",
                "-p",
                "kvgate-examples",
                "--features",
                "fault-injection",
            ];
            tree.cargo("outside-faults", args)
                .target(&tree.target.join("faults"))
        },
    },
];

/// Runs the groups until one notices.
pub(super) fn judge(workspace: &Workspace, patch: &Path, json: bool) -> Result<Outcome, Failure> {
    let patch = std::path::absolute(patch).map_err(|error| Failure::io(patch, &error))?;
    if !patch.is_file() {
        return Err(Failure::new(format!("{}: no such file", patch.display())));
    }
    let started = Instant::now();
    let (copy, tree) = copy_of(workspace)?;
    if let Some(complaint) = copy.apply(&tree, &patch)? {
        return Err(Failure::new(format!(
            "{}: does not apply: {complaint}",
            patch.display()
        )));
    }
    let args = ["check", "--workspace", "--all-targets"];
    let built = tree.cargo("outside-check", args).run()?;
    if !built.succeeded() {
        built.show_tail(40);
        return Err(Failure::new(format!(
            "{}: does not compile",
            patch.display()
        )));
    }
    for group in &GROUPS {
        let done = (group.job)(&tree).limit(LIMIT).run()?;
        eprintln!("{}: {}", group.name, done.ending());
        if done.succeeded() {
            continue;
        }
        if done.timed_out {
            return Err(Failure::new(format!(
                "{}: time limit, so no verdict",
                group.name
            )));
        }
        let noticed = libtest::failed_names(&done.output).join(", ");
        copy.reset()?;
        if !(group.job)(&tree).limit(LIMIT).run()?.succeeded() {
            let text = format!("{} do not pass without the patch either", group.name);
            return Err(Failure::new(text));
        }
        let what = if noticed.is_empty() {
            first_error(&done.output)
        } else {
            &noticed
        };
        let by = format!("{} ({what})", group.name);
        report(json, Some(&by), started);
        return Ok(Outcome::Clean);
    }
    copy.reset()?;
    report(json, None, started);
    Ok(Outcome::Found)
}

fn report(json: bool, by: Option<&str>, started: Instant) {
    if json {
        let seconds = started.elapsed().as_secs_f64();
        println!(
            "{}",
            json!({
                "schema": "kvgate.mutants/1",
                "mutants": [{
                    "id": "", "name": "patch", "killed": by.is_some(), "by": by.unwrap_or(""),
                    "seconds": seconds,
                }],
                "killed": usize::from(by.is_some()),
                "total": 1,
            })
        );
    } else {
        println!(
            "{}",
            by.map_or("survived".to_owned(), |by| format!("killed by {by}"))
        );
    }
}

/// The first line that looks like the reason.
fn first_error(log: &str) -> &str {
    log.lines()
        .find(|line| line.starts_with("error") || line.contains("panicked at"))
        .unwrap_or("the process ended without a word")
        .trim()
}
