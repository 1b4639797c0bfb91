//! `transfer-bench`: what the engine costs on each path, beside the bare loop of that path in the same run.

pub mod activity;
pub mod backends;
#[cfg(any(feature = "ucx", feature = "libfabric"))]
pub mod bare_library;
pub mod bare_loop;
pub mod bare_stream;
pub mod cli;
pub mod compare;
pub mod control;
pub mod far;
pub mod flights;
pub mod idle;
pub mod latency;
pub mod layout;
pub mod options;
pub mod other;
pub mod pair;
pub mod plan;
pub mod plot;
pub mod round_trip;
pub mod route;
pub mod row;
pub mod serve;
pub mod target;
pub mod throughput;
pub mod watch;
pub mod xb;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value, json};

use self::cli::{Cli, Command, ThroughputArgs};
use self::control::Control;
use crate::handoff::child;
use crate::handoff::console;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::signals;
use crate::tool::{self, Finished};

/// Names the JSON object.
pub const SCHEMA: &str = "kvgate.transfer-bench/1";

/// Bound of one wait of the peer. The measuring side bounds its own waits, and ends the peer with itself.
const TARGET_DEADLINE: Duration = Duration::from_secs(60);

/// Runs the tool.
///
/// # Errors
/// The options do not fit, the path is not usable here, or the peer was lost.
pub fn run(cli: Cli) -> Result<Finished, Failure> {
    if cli.list_backends {
        return Ok(list_backends());
    }
    match cli.command {
        None => throughput(&cli.throughput),
        Some(Command::Throughput(args)) => throughput(&args),
        Some(Command::Latency(args)) => latency(&args.run()?),
        Some(Command::Notify(args)) => latency(&args.run()?),
        Some(Command::Idle(args)) => {
            backends::check(args.backend)?;
            let seconds = Duration::from_secs_f64(args.seconds);
            let report = idle::measure(args.backend, seconds, args.common.deadline())?;
            Ok(finished(report.lines(), "idle", &report, 0))
        }
        Some(Command::Serve(args)) => {
            let served = serve::run(&args.serve()?)?;
            let line = format!("served {} runs", served.runs);
            Ok(finished(vec![line], "serve", &served, 0))
        }
        Some(Command::Xb(args)) => {
            backends::check(args.backend)?;
            xb::run(args.backend, args.common.deadline())?;
            Ok(Finished {
                json: Value::Null,
                lines: Vec::new(),
                exit_code: 0,
            })
        }
    }
}

/// SIGINT and SIGTERM end the run with 130 and 143; the peer process ends with this one.
pub fn watch_signals() {
    let deliver = |failure: Failure| {
        if std::env::args().any(|word| word == "--json") {
            console::print(&tool::failure_json(SCHEMA, &failure).to_string());
        }
        console::note(&format!("transfer-bench: {failure}"));
        std::process::exit(failure.exit_code().into());
    };
    // Without a thread for it, a signal ends the process in the usual way.
    if let Err(error) = signals::watch(deliver) {
        console::note(&format!("transfer-bench: signals: {error}"));
    }
}

/// Runs the peer of a run on the control socket that is its standard input. `parent` is the number of the
/// process that has started it, and with which it ends however that one ends.
#[must_use]
pub fn run_target(parent: Option<u32>) -> ExitCode {
    if !parent.is_some_and(|pid| child::die_with_parent(pid).unwrap_or(false)) {
        console::note("transfer-bench: peer process: not started by a run, or its run has ended");
        return ExitCode::from(2);
    }
    let control = io::stdin().as_fd().try_clone_to_owned();
    let result = control
        .map_err(|error| Failure::internal(format!("control socket: {error}")))
        .and_then(|control| Control::new(UnixStream::from(control), None))
        .and_then(|control| target::run(control, &target::Home::here(None), TARGET_DEADLINE));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            console::note(&format!("transfer-bench: peer process: {failure}"));
            ExitCode::from(failure.exit_code())
        }
    }
}

fn throughput(args: &ThroughputArgs) -> Result<Finished, Failure> {
    let route = args.common.route(args.loads.backend, &args.far)?;
    let plan = args.compare.plan(route.backend)?;
    let mut loads: Vec<_> = args.loads.each().collect();
    if plan.is_some() {
        loads.retain(compare::is_compared);
        if loads.is_empty() {
            let message = "every load is more than the engines are asked for";
            return Err(Failure::new(FailureKind::ProvesNothing, message).with_field("compare", ""));
        }
    }
    let mut rows = Vec::new();
    for load in &loads {
        let row = throughput::measure(load, &route)?;
        if args.common.json {
            console::note(&row.line());
        }
        rows.push(row);
    }
    let comparison = plan.map(|plan| compare::run(&loads, &plan)).transpose()?;
    if let Some(path) = &args.plot {
        plot::draw(path, &rows, comparison.as_ref())?;
    }
    let mut bad_pages = rows.iter().map(|row| row.bad_pages).sum();
    let mut lines: Vec<_> = rows.iter().map(row::Row::line).collect();
    let Some(comparison) = comparison else {
        return Ok(finished(lines, "rows", &rows, bad_pages));
    };
    if let Some(failed) = comparison.own_failure() {
        let message = format!("{}: {}: {}", failed.engine, failed.asked, failed.message);
        return Err(Failure::new(FailureKind::PeerLost, message));
    }
    bad_pages += comparison.own_bad_pages();
    lines.extend(comparison.lines());
    let mut finished = finished(lines, "rows", &rows, bad_pages);
    if let Value::Object(object) = &mut finished.json {
        object.insert("compare".to_owned(), json!(comparison));
    }
    Ok(finished)
}

fn latency(run: &latency::Run) -> Result<Finished, Failure> {
    let latency = latency::measure(run)?;
    let name = match run.kind {
        latency::Kind::Gate(_) => "latency",
        latency::Kind::Note => "notify",
    };
    Ok(finished(
        vec![latency.line()],
        name,
        &latency,
        latency.bad_pages,
    ))
}

fn list_backends() -> Finished {
    let found = backends::list();
    let line = |one: &backends::Usable| {
        let word = if one.usable { "usable" } else { "not usable" };
        format!("{:<10} {word:<11} {}", one.name, one.why)
    };
    finished(found.iter().map(line).collect(), "backends", &found, 0)
}

/// Bad pages make exit code 1.
fn finished(lines: Vec<String>, name: &str, value: &impl Serialize, bad_pages: u64) -> Finished {
    let verdict = if bad_pages == 0 { "good" } else { "bad-pages" };
    let mut object = Map::new();
    object.insert("schema".to_owned(), Value::from(SCHEMA));
    object.insert("verdict".to_owned(), Value::from(verdict));
    object.insert(name.to_owned(), json!(value));
    Finished {
        lines,
        json: Value::Object(object),
        exit_code: u8::from(bad_pages > 0),
    }
}
