//! `cargo xtask test`: all suites, one closing line.

use crate::exec::{Failure, Workspace};
use crate::suites::{SUITES, Service, Suite, Tally};
use crate::{Outcome, rows};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Runs these suites only; a name that is none lists them.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,
    /// Fails instead of skipping when one of these is absent.
    ///
    /// A name that no suite of the run uses is refused: requiring it would prove nothing.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    require: Vec<Service>,
    /// Prints which test covers which report from the field, and runs nothing.
    #[arg(long, conflicts_with_all = ["only", "require"])]
    list_rows: bool,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<Outcome, Failure> {
    if args.list_rows {
        return rows::list(workspace);
    }
    let chosen = choose(&args.only)?;
    refuse_unused(&args.require, &chosen)?;
    run_suites(workspace, &chosen, &args.require)
}

/// All suites, without demands on the machine.
pub(crate) fn run_all(workspace: &Workspace) -> Result<Outcome, Failure> {
    run_suites(workspace, &choose(&[])?, &[])
}

fn run_suites(
    workspace: &Workspace,
    chosen: &[&'static Suite],
    required: &[Service],
) -> Result<Outcome, Failure> {
    let mut closing = Closing::default();
    for suite in chosen {
        eprintln!("suite {}: {}", suite.name, suite.what);
        let started = std::time::Instant::now();
        let tally = (suite.run)(workspace)?;
        closing.add(suite, &tally, required);
        let seconds = started.elapsed().as_secs_f64();
        eprintln!(
            "suite {}: {} ({seconds:.0} s)",
            suite.name,
            describe(&tally)
        );
    }
    println!("{}", closing.line());
    Ok(Outcome::found_if(closing.failed > 0))
}

/// The suites with these names, in the order in which they run; no name: all.
fn choose(only: &[String]) -> Result<Vec<&'static Suite>, Failure> {
    let names: Vec<_> = SUITES.iter().map(|suite| suite.name).collect();
    if let Some(asked) = only.iter().find(|name| !names.contains(&name.as_str())) {
        return Err(Failure::new(format!(
            "no suite {asked:?}; there are {}",
            names.join(", ")
        )));
    }
    let is_chosen = |suite: &&Suite| only.is_empty() || only.iter().any(|name| name == suite.name);
    Ok(SUITES.iter().filter(is_chosen).collect())
}

/// A service that no suite touches cannot be absent, so demanding it would be an empty promise.
fn refuse_unused(required: &[Service], chosen: &[&'static Suite]) -> Result<(), Failure> {
    let unused: Vec<_> = required
        .iter()
        .filter(|service| !chosen.iter().any(|suite| suite.needs == Some(**service)))
        .map(|service| service.name())
        .collect();
    if unused.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!(
        "--require {}: no suite of this run uses it, so it counts as absent",
        unused.join(",")
    )))
}

fn describe(tally: &Tally) -> String {
    match tally {
        Tally::Ran { passed, failed } => format!("{passed} passed, {failed} failed"),
        Tally::Absent(service) => format!("{} is absent", service.name()),
    }
}

/// The sums of a run.
#[derive(Default)]
struct Closing {
    passed: u64,
    failed: u64,
    skipped: Vec<&'static str>,
}

impl Closing {
    fn add(&mut self, suite: &Suite, tally: &Tally, required: &[Service]) {
        match tally {
            Tally::Ran { passed, failed } => {
                self.passed += passed;
                self.failed += failed;
            }
            Tally::Absent(service) if required.contains(service) => {
                println!(
                    "FAIL {}: required, but {}",
                    suite.name,
                    service.install_hint()
                );
                self.failed += 1;
            }
            Tally::Absent(service) => {
                println!("SKIP {}: {}", suite.name, service.install_hint());
                self.skipped.push(suite.name);
            }
        }
    }

    fn line(&self) -> String {
        let Self {
            passed,
            failed,
            skipped,
        } = self;
        let mut line = format!(
            "passed {passed}, failed {failed}, skipped {}",
            skipped.len()
        );
        if !skipped.is_empty() {
            line.push_str(&format!(" ({})", skipped.join(", ")));
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn browser_suite() -> &'static Suite {
        SUITES
            .iter()
            .find(|suite| suite.needs == Some(Service::Chromium))
            .unwrap()
    }

    #[test]
    fn an_absent_service_is_a_skip_unless_it_is_required() {
        let absent = Tally::Absent(Service::Chromium);
        let mut closing = Closing::default();
        closing.add(
            &SUITES[0],
            &Tally::Ran {
                passed: 3,
                failed: 0,
            },
            &[],
        );
        closing.add(browser_suite(), &absent, &[]);
        assert_eq!(closing.line(), "passed 3, failed 0, skipped 1 (report)");
        closing.add(browser_suite(), &absent, &[Service::Chromium]);
        assert_eq!(closing.line(), "passed 3, failed 1, skipped 1 (report)");
    }

    #[test]
    fn a_run_without_skips_names_none() {
        assert_eq!(Closing::default().line(), "passed 0, failed 0, skipped 0");
    }

    #[test]
    fn what_no_suite_uses_cannot_be_required() {
        let all = choose(&[]).unwrap();
        let few = choose(&["report".to_owned()]).unwrap();
        assert!(refuse_unused(&[Service::Chromium], &all).is_ok());
        let text = refuse_unused(&[Service::Ucx, Service::Chromium], &few)
            .unwrap_err()
            .to_string();
        assert_eq!(
            text,
            "--require ucx: no suite of this run uses it, so it counts as absent"
        );
        assert!(refuse_unused(&[Service::Ucx], &few).is_err());
    }

    #[test]
    fn an_unknown_suite_is_refused() {
        assert!(choose(&["nope".to_owned()]).is_err());
        let two = choose(&["ucx".to_owned(), "loom".to_owned()]).unwrap();
        assert_eq!(two[0].name, "loom");
        assert_eq!(two.len(), 2);
    }
}
