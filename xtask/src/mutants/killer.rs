//! A named test that has to notice a mutant.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::exec::{Failure, Finished, Job, Workspace};
use crate::{libtest, loom};

/// A test command, as the header of a mutant names it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Killer {
    /// Models of one file, optionally one of them.
    Loom { target: String, filter: String },
    /// `cargo test` with these arguments; a last one without a dash is the filter.
    Test { args: Vec<String> },
}

/// What a killer had to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "only Failed is a kill"]
pub(super) enum Verdict {
    Passed,
    Failed,
    DoesNotCompile,
    TimeLimit,
    /// The command ran no test, so its exit code says nothing.
    NoTest,
}

impl FromStr for Killer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        match words.split_first() {
            Some((kind, rest)) if kind == "loom" && (1..=2).contains(&rest.len()) => {
                let filter = rest.get(1).cloned().unwrap_or_default();
                Ok(Self::Loom {
                    target: rest[0].clone(),
                    filter,
                })
            }
            Some((kind, rest)) if kind == "test" && rest.iter().any(|word| word == "-p") => {
                Ok(Self::Test {
                    args: rest.to_vec(),
                })
            }
            _ => Err(format!(
                "killed-by: expected `loom TARGET [FILTER]` or `test -p CRATE …`, got {text:?}"
            )),
        }
    }
}

impl fmt::Display for Killer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loom { target, filter } if filter.is_empty() => write!(out, "loom {target}"),
            Self::Loom { target, filter } => write!(out, "loom {target} {filter}"),
            Self::Test { args } => write!(out, "test {}", args.join(" ")),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::DoesNotCompile => "does not compile",
            Self::TimeLimit => "ran into the time limit",
            Self::NoTest => "ran no test",
        })
    }
}

impl Killer {
    /// Builds, then runs. `limit` is for the run alone.
    pub(super) fn run(&self, tree: &Workspace, limit: Duration) -> Result<Verdict, Failure> {
        if let Some(build) = self.build_job(tree) {
            let built = build.run()?;
            if !built.succeeded() {
                built.show_tail(30);
                let late = built.timed_out;
                return Ok(if late {
                    Verdict::TimeLimit
                } else {
                    Verdict::DoesNotCompile
                });
            }
        }
        Ok(judge(&self.run_job(tree).limit(limit).run()?))
    }

    fn build_job(&self, tree: &Workspace) -> Option<Job> {
        match self {
            Self::Loom { target, .. } => Some(again(loom::build_job(tree, target))),
            // Doc tests are compiled as they run; the library itself is checked first.
            Self::Test { args } if args.iter().any(|arg| arg == "--doc") => {
                let package = args.iter().skip_while(|arg| *arg != "-p").nth(1)?;
                Some(tree.cargo("mutant-build", ["build", "-p", package]))
            }
            Self::Test { args } => {
                let words = ["test", "--no-run"]
                    .into_iter()
                    .chain(args.iter().map(String::as_str));
                Some(tree.cargo("mutant-build", words))
            }
        }
    }

    fn run_job(&self, tree: &Workspace) -> Job {
        match self {
            Self::Loom { target, filter } => again(loom::job(tree, loom::BOUND, &[target, filter])),
            Self::Test { args } => {
                let words = ["test"].into_iter().chain(args.iter().map(String::as_str));
                tree.cargo("mutant-test", words)
            }
        }
    }
}

/// A job of models that is built again after each mutant, which changes a few lines: most of the time of
/// a run without this is optimising what did not change.
fn again(job: Job) -> Job {
    job.env("CARGO_PROFILE_LOOM_INCREMENTAL", "true")
}

/// The exit status decides. A model that aborts its process prints no counts and is a kill too,
/// but a command that succeeds must have run something.
fn judge(done: &Finished) -> Verdict {
    if done.timed_out {
        Verdict::TimeLimit
    } else if !done.succeeded() {
        Verdict::Failed
    } else if libtest::counts(&done.output).passed == 0 {
        Verdict::NoTest
    } else {
        Verdict::Passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Workspace;

    fn verdict_of(script: &str, limit: Duration) -> Verdict {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_path_buf();
        let workspace = Workspace {
            target: root.clone(),
            root,
        };
        let job = workspace
            .program("script", "sh")
            .args(["-c", script])
            .limit(limit);
        judge(&job.run().unwrap())
    }

    #[test]
    fn only_a_failing_test_is_a_kill() {
        let long = Duration::from_secs(20);
        let ok = "echo 'test result: ok. 1 passed; 0 failed; 0 ignored'";
        assert_eq!(verdict_of(ok, long), Verdict::Passed);
        assert_eq!(verdict_of("exit 101", long), Verdict::Failed);
        assert_eq!(verdict_of("kill -ABRT $$", long), Verdict::Failed);
        assert_eq!(verdict_of("true", long), Verdict::NoTest);
        assert_eq!(
            verdict_of("sleep 61", Duration::from_millis(200)),
            Verdict::TimeLimit
        );
    }
}
