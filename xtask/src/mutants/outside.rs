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
    log: &'static str,
    /// What `cargo test` is told; nothing: the loom models.
    args: &'static [&'static str],
}

/// Every package of the workspace is asked, or a patch there would survive without having been judged.
const GROUPS: [Group; 6] = [
    Group {
        name: "tests of transfer, kvcache and hicache",
        log: "outside-libs",
        args: &[
            "-p",
            "kvgate-transfer",
            "-p",
            "kvgate-kvcache",
            "-p",
            "kvgate-hicache",
            "--features",
            "kvgate-transfer/sim,kvgate-transfer/metrics,kvgate-transfer/status",
            "--features",
            "kvgate-transfer/tracing,kvgate-transfer/bare,kvgate-transfer/one-sided",
            "--features",
            "kvgate-hicache/events,kvgate-hicache/metrics",
        ],
    },
    Group {
        name: "tests of the C interface, the kernels, the bindings and xtask",
        log: "outside-others",
        args: &[
            "-p",
            "kvgate-capi",
            "-p",
            "kvgate-kernels",
            "-p",
            "kvgate-ucx-sys",
            "-p",
            "kvgate-libfabric-sys",
            "-p",
            "xtask",
        ],
    },
    Group {
        name: "loom models",
        log: "",
        args: &[],
    },
    Group {
        name: "tests of the model",
        log: "outside-model",
        args: &["-p", "kvgate-model"],
    },
    Group {
        name: "end-to-end hand-offs",
        log: "outside-examples",
        args: &["-p", "kvgate-examples"],
    },
    Group {
        name: "fault matrix",
        log: "outside-faults",
        args: &["-p", "kvgate-examples", "--features", FAULTS],
    },
];

/// Its builds are kept apart.
const FAULTS: &str = "fault-injection";

impl Group {
    fn job(&self, tree: &Workspace) -> Job {
        if self.args.is_empty() {
            return loom::job(tree, loom::BOUND, &["", ""]);
        }
        let job = tree.cargo(self.log, ["test"].iter().chain(self.args));
        match self.args.contains(&FAULTS) {
            true => job.target(&tree.target.join("faults")),
            false => job,
        }
    }
}

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
        let done = group.job(&tree).limit(LIMIT).run()?;
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
        if !group.job(&tree).limit(LIMIT).run()?.succeeded() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::Metadata;

    #[test]
    fn every_package_is_asked() {
        let metadata = Metadata::load(&Workspace::find().unwrap(), false).unwrap();
        let asked: Vec<&str> = GROUPS
            .iter()
            .flat_map(|group| group.args)
            .copied()
            .collect();
        let unasked: Vec<_> = metadata
            .members()
            .map(|package| package.name.as_str())
            .filter(|name| !asked.contains(name))
            .collect();
        // The models are a group of their own.
        assert_eq!(unasked, ["kvgate-loom-tests"]);
    }
}
