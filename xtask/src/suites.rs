//! The test suites, each a way of looking at the whole workspace.

use std::path::PathBuf;
use std::time::Duration;

use crate::browser;
use crate::exec::{Failure, Finished, Job, Workspace};
use crate::kill::{self, Transport};
use crate::{libtest, loom, sim, tree};

/// Where `.ci/run` puts the S3 server of the tests.
const MOTO: &str = "target/tools/moto/bin";

/// Runs of the kill script in one test run, over both transports together.
const KILL_RUNS: u32 = 20;

/// Something outside the workspace that a suite may need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Service {
    Redis,
    S3,
    Etcd,
    Ucx,
    Libfabric,
    Chromium,
}

impl Service {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::S3 => "s3",
            Self::Etcd => "etcd",
            Self::Ucx => "ucx",
            Self::Libfabric => "libfabric",
            Self::Chromium => "chromium",
        }
    }

    /// What brings it, in the words of a Debian user.
    pub(crate) fn install_hint(self) -> &'static str {
        match self {
            Self::Redis => "apt-get install redis-server",
            Self::S3 => "pip install 'moto[s3]' flask flask-cors",
            Self::Etcd => "apt-get install etcd-server",
            Self::Ucx => "apt-get install libucx0",
            Self::Libfabric => "apt-get install libfabric1",
            Self::Chromium => "apt-get install chromium",
        }
    }
}

/// What came of a suite.
#[must_use = "its counts belong into the closing line"]
pub(crate) enum Tally {
    Ran { passed: u64, failed: u64 },
    Absent(Service),
}

pub(crate) struct Suite {
    pub(crate) name: &'static str,
    /// What it runs, for `--help` and the progress lines.
    pub(crate) what: &'static str,
    pub(crate) needs: Option<Service>,
    pub(crate) run: fn(&Workspace) -> Result<Tally, Failure>,
}

/// All suites, in the order in which they run.
pub(crate) const SUITES: [Suite; 14] = [
    Suite {
        name: "workspace",
        what: "unit and integration tests of every crate",
        needs: None,
        run: |workspace| cargo_test(workspace, "workspace", &["--workspace", "--tests"]),
    },
    Suite {
        name: "features",
        what: "what is behind a feature that needs nothing from outside",
        needs: None,
        run: behind_features,
    },
    Suite {
        name: "doc",
        what: "examples of the documentation, and code that must not compile",
        needs: None,
        run: |workspace| cargo_test(workspace, "doc", &["--workspace", "--doc"]),
    },
    Suite {
        name: "loom",
        what: "model checks of the production code",
        needs: None,
        run: models,
    },
    Suite {
        name: "sim",
        what: "simulated flights under every fault, seed by seed",
        needs: None,
        run: seeds,
    },
    Suite {
        name: "examples",
        what: "the numbered examples",
        needs: None,
        run: examples,
    },
    Suite {
        name: "faults",
        what: "every planted fault and the detectors that must see it",
        needs: None,
        run: faults,
    },
    Suite {
        name: "kill",
        what: "killed processes of a running hand-off",
        needs: None,
        run: kills,
    },
    Suite {
        name: "ucx",
        what: "the contract of the backends over UCX, in one process and in two",
        needs: Some(Service::Ucx),
        run: |workspace| library(workspace, Service::Ucx),
    },
    Suite {
        name: "libfabric",
        what: "the same over libfabric",
        needs: Some(Service::Libfabric),
        run: |workspace| library(workspace, Service::Libfabric),
    },
    Suite {
        name: "etcd",
        what: "agents that find each other in a real etcd",
        needs: Some(Service::Etcd),
        run: |workspace| server(workspace, "kvgate-transfer", Service::Etcd),
    },
    Suite {
        name: "redis",
        what: "the contract of a tier over a real Redis server",
        needs: Some(Service::Redis),
        run: |workspace| server(workspace, "kvgate-hicache", Service::Redis),
    },
    Suite {
        name: "s3",
        what: "a tier over object stores, and conversations over it: memory, a folder, a real S3 server",
        needs: Some(Service::S3),
        run: object_stores,
    },
    Suite {
        name: "report",
        what: "the HTML report in a browser",
        needs: Some(Service::Chromium),
        run: browser::report,
    },
];

fn cargo_test(workspace: &Workspace, name: &str, args: &[&str]) -> Result<Tally, Failure> {
    let words = ["test", "--no-fail-fast"].iter().chain(args);
    let words: Vec<_> = words.chain(&["--"]).collect();
    retried(name, |log, more| {
        let job = workspace.cargo(log, &words).args(more);
        job.limit(Duration::from_secs(2400)).run()
    })
}

/// The suite `workspace` builds no feature that a user has to ask for: the tests of these would be empty there.
fn behind_features(workspace: &Workspace) -> Result<Tally, Failure> {
    let packages = ["kvgate-transfer", "kvgate-kvcache", "kvgate-hicache"];
    let features = [
        "kvgate-transfer/metrics,kvgate-transfer/status,kvgate-transfer/fault-injection",
        "kvgate-kvcache/fault-injection,kvgate-hicache/events,kvgate-hicache/metrics",
    ];
    let tests = ["metrics", "status", "faults", "events"];
    let words = packages
        .iter()
        .flat_map(|name| ["-p", name])
        .chain(features.iter().flat_map(|names| ["--features", names]))
        .chain(tests.iter().flat_map(|name| ["--test", name]));
    cargo_test(workspace, "features", &words.collect::<Vec<_>>())
}

/// Counts of a run of the test harness; a run that fails without a count is one failure.
fn tally(done: &Finished) -> Tally {
    for line in libtest::contracts(&done.output) {
        println!("{line}");
    }
    let counts = libtest::counts(&done.output);
    let mut failed = counts.failed + counts.ignored;
    if failed == 0 && (!done.succeeded() || counts.passed == 0) {
        failed = 1;
    }
    if failed > 0 {
        for name in libtest::failed_names(&done.output) {
            eprintln!("failed: {name}");
        }
        for line in libtest::failure_reports(&done.output) {
            eprintln!("     {line}");
        }
        done.show_tail(40);
    }
    Tally::Ran {
        passed: counts.passed,
        failed,
    }
}

/// Failures of one run that may be tried once more.
const RETRIED: usize = 3;

/// A run of tests. `run` gets the name of its log and what the harness is told besides.
///
/// A few tests that failed run once more, alone, to tell a race from a plain fault: what passes then is told as
/// flaky. It has failed all the same. A program that was ended, or that ran into its limit, is not tried again.
fn retried(
    name: &str,
    mut run: impl FnMut(&str, &[&str]) -> Result<Finished, Failure>,
) -> Result<Tally, Failure> {
    let done = run(name, &[])?;
    let Tally::Ran { passed, failed } = tally(&done) else {
        unreachable!("a tally of counts is Ran")
    };
    let names = libtest::failed_names(&done.output);
    let is_told =
        failed == names.len() as u64 && !done.timed_out && !done.output.contains("(signal: ");
    if failed == 0 || !is_told || names.len() > RETRIED {
        return Ok(Tally::Ran { passed, failed });
    }
    let words = ["--exact", "--test-threads=1"].iter().chain(&names);
    let again = run(
        &format!("{name}-again"),
        &words.copied().collect::<Vec<_>>(),
    )?;
    if !again.succeeded() || libtest::counts(&again.output).passed < failed {
        again.show_tail(40);
        return Ok(Tally::Ran { passed, failed });
    }
    for name in names {
        println!("FLAKY {name}: failed beside others, passed alone");
    }
    Ok(Tally::Ran { passed, failed })
}

/// UCX may end a process whose peer is killed or stopped (docs/decisions/0005-one-sided-libraries.md): that
/// is told, and the run is repeated, twice at most.
fn past_known_fault(
    service: Service,
    run: impl Fn() -> Result<Finished, Failure>,
) -> Result<Finished, Failure> {
    for _ in 0..2 {
        let done = run()?;
        if service != Service::Ucx || done.succeeded() || !done.output.contains("SIGABRT") {
            return Ok(done);
        }
        println!("known fault: UCX ended a test process; once more");
    }
    run()
}

/// A backend over a library: the tests of its bindings, which say whether the library is there, and then
/// the contract.
fn library(workspace: &Workspace, service: Service) -> Result<Tally, Failure> {
    let name = service.name();
    let bindings = format!("kvgate-{name}-sys");
    let found = workspace
        .cargo(name, ["test", "-p", &bindings, "--tests"])
        .args(["--", "--nocapture"])
        .limit(Duration::from_secs(600))
        .run()?;
    if found.succeeded() && found.output.contains("SKIP:") {
        return Ok(Tally::Absent(service));
    }
    let test = [
        "test",
        "--no-fail-fast",
        "-p",
        "kvgate-transfer",
        "--features",
        name,
    ];
    let contract = retried(name, |log, more| {
        let job = workspace.cargo(log, test);
        let job = job.args(["--test", "backend_contract", "--", name]);
        job.args(more).limit(Duration::from_secs(1200)).run()
    })?;
    let processes = retried(name, |log, more| {
        past_known_fault(service, || {
            let job = workspace.cargo(log, test);
            let job = job.args([
                "--lib",
                "--test",
                "one_sided",
                "--test",
                "two_processes",
                "--",
            ]);
            job.args(more).limit(Duration::from_secs(1200)).run()
        })
    })?;
    let mut sum = (0, 0);
    for tally in [tally(&found), contract, processes] {
        if let Tally::Ran { passed, failed } = tally {
            sum = (sum.0 + passed, sum.1 + failed);
        }
    }
    let (passed, failed) = sum;
    Ok(Tally::Ran { passed, failed })
}

/// What talks to a server that its tests start themselves. Its feature and its tests have the name of the service.
fn server(workspace: &Workspace, package: &str, service: Service) -> Result<Tally, Failure> {
    let name = service.name();
    unless_absent(service, |log, more| {
        workspace
            .cargo(log, ["test", "--no-fail-fast", "-p", package])
            .args(["--features", name, "--test", name, "--", "--nocapture"])
            .args(more)
    })
}

/// One tier over stores of this machine and over a server that speaks S3.
fn object_stores(workspace: &Workspace) -> Result<Tally, Failure> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<_> = [workspace.root.join(MOTO)]
        .into_iter()
        .chain(std::env::split_paths(&folders))
        .collect();
    let path = std::env::join_paths(folders)
        .map_err(|error| Failure::new(format!("the search path: {error}")))?;
    unless_absent(Service::S3, |log, more| {
        workspace
            .cargo(log, ["test", "--no-fail-fast"])
            .args(["-p", "kvgate-hicache", "-p", "kvgate-examples"])
            .args(["--features", "kvgate-hicache/object,kvgate-examples/object"])
            .args(["--test", "object", "--test", "s3", "--test", "turns_s3"])
            .args(["--", "--nocapture"])
            .args(more)
            .env("PATH", &path)
    })
}

fn unless_absent(service: Service, job: impl Fn(&str, &[&str]) -> Job) -> Result<Tally, Failure> {
    let mut is_absent = false;
    let tally = retried(service.name(), |log, more| {
        let done = job(log, more).limit(Duration::from_secs(900)).run()?;
        is_absent |= done.succeeded() && done.output.contains("SKIP:");
        Ok(done)
    })?;
    match is_absent {
        true => Ok(Tally::Absent(service)),
        false => Ok(tally),
    }
}

fn models(workspace: &Workspace) -> Result<Tally, Failure> {
    Ok(tally(&loom::job(workspace, loom::BOUND, &["", ""]).run()?))
}

/// The programs lie in a folder of their own, so that none with faults is where the others are looked for;
/// what goes into them is built beside the rest, which has most of it.
fn faults(workspace: &Workspace) -> Result<Tally, Failure> {
    retried("faults", |log, more| {
        workspace
            .cargo(log, ["test", "--no-fail-fast", "--release"])
            .args(["-p", "kvgate-examples", "--features", "fault-injection"])
            .args(["--test", "faults", "--"])
            .args(more)
            .env("CARGO_BUILD_BUILD_DIR", &workspace.target)
            .target(&workspace.target.join("faults"))
            .run()
    })
}

fn seeds(workspace: &Workspace) -> Result<Tally, Failure> {
    let summary = sim::simulate(workspace, sim::SEEDS, 1)?;
    let failed = summary.violations.len() as u64;
    for line in &summary.violations {
        eprintln!("{line}");
    }
    Ok(Tally::Ran {
        passed: sim::SEEDS.saturating_sub(failed),
        failed,
    })
}

/// Runs each numbered example; it has to end well and to say something.
fn examples(workspace: &Workspace) -> Result<Tally, Failure> {
    let built = workspace
        .cargo(
            "examples-build",
            ["build", "--release", "-p", "kvgate-examples", "--bins"],
        )
        .run()?;
    if !built.succeeded() {
        built.show_tail(40);
        return Ok(Tally::Ran {
            passed: 0,
            failed: 1,
        });
    }
    let (mut passed, mut failed) = (0, 0);
    for name in numbered(workspace)? {
        let program = release_binary(workspace, &name);
        let done = workspace
            .program(&name, program)
            .limit(Duration::from_secs(60))
            .run()?;
        if done.succeeded() && !done.output.trim().is_empty() {
            passed += 1;
        } else {
            failed += 1;
            done.show_tail(40);
        }
    }
    // An empty list would be a suite that cannot fail.
    Ok(Tally::Ran {
        passed,
        failed: if passed + failed == 0 { 1 } else { failed },
    })
}

/// Names of the binaries that begin with two digits.
fn numbered(workspace: &Workspace) -> Result<Vec<String>, Failure> {
    let digits = |name: &str| {
        let mut bytes = name.bytes();
        (0..2).all(|_| bytes.next().is_some_and(|b| b.is_ascii_digit()))
            && bytes.next() == Some(b'-')
    };
    Ok(tree::files(workspace)?
        .iter()
        .filter_map(|path| path.strip_prefix("examples/src/bin/"))
        .map(|path| path.split('/').next().unwrap_or(path))
        .map(|name| name.strip_suffix(".rs").unwrap_or(name))
        .filter(|name| digits(name))
        .map(str::to_owned)
        .collect())
}

pub(crate) fn release_binary(workspace: &Workspace, name: &str) -> PathBuf {
    workspace.target.join("release").join(name)
}

fn kills(workspace: &Workspace) -> Result<Tally, Failure> {
    let (mut passed, mut failed) = (0, 0);
    for transport in [Transport::Shm, Transport::Tcp] {
        let report = kill::campaign(workspace, transport, KILL_RUNS / 2, 1)?;
        report.print();
        let surprises = report.surprising_runs();
        failed += surprises;
        passed += u64::from(KILL_RUNS / 2).saturating_sub(surprises);
    }
    Ok(Tally::Ran { passed, failed })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BAD: &str =
        "test a::b ... FAILED\ntest result: FAILED. 4 passed; 1 failed; 0 ignored; 0 measured\n";
    const GOOD: &str =
        "test a::b ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored; 0 measured\n";

    /// What comes of a run that prints the first text, and of its repetition, which prints the second.
    fn twice(first: &str, second: &str) -> (u64, u64, Vec<String>) {
        let folder = tempfile::tempdir().unwrap();
        let workspace = Workspace {
            root: folder.path().to_path_buf(),
            target: folder.path().to_path_buf(),
        };
        let mut told = Vec::new();
        let tally = retried("t", |log, more| {
            let text = if more.is_empty() { first } else { second };
            told.extend(more.iter().map(|word| (*word).to_owned()));
            let script = format!("printf '{text}'; case '{text}' in *FAILED*) exit 1;; esac");
            workspace.program(log, "sh").args(["-c", &script]).run()
        });
        let Tally::Ran { passed, failed } = tally.unwrap() else {
            panic!("it ran")
        };
        (passed, failed, told)
    }

    #[test]
    fn what_failed_is_asked_once_more_and_has_failed_all_the_same() {
        let asked = ["--exact", "--test-threads=1", "a::b"].map(str::to_owned);
        assert_eq!(twice(BAD, GOOD), (4, 1, asked.to_vec()));
        assert_eq!(twice(BAD, BAD), (4, 1, asked.to_vec()));
        let none = GOOD.replace("1 passed", "0 passed");
        assert_eq!(twice(BAD, &none), (4, 1, asked.to_vec()));
    }

    #[test]
    fn what_was_ended_is_not_tried_again() {
        let killed = format!("{BAD}process did not exit successfully (signal: 6, SIGABRT)\n");
        assert_eq!(twice(&killed, GOOD), (4, 1, Vec::new()));
        let untold = BAD.replace("1 failed", "2 failed");
        assert_eq!(twice(&untold, GOOD), (4, 2, Vec::new()));
        assert_eq!(twice(GOOD, GOOD), (1, 0, Vec::new()));
    }
}
