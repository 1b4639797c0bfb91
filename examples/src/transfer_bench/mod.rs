//! `transfer-bench`: what the engine costs on each path, beside the bare loop of that path in the same run.

pub mod bare_stream;
pub mod control;
pub mod layout;
pub mod options;
pub mod pair;
pub mod row;
pub mod target;
pub mod throughput;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use serde_json::json;

use self::options::{Backend, Direction, Load};
use crate::handoff::console;
use crate::handoff::failure::Failure;
use crate::handoff::{signals, version};
use crate::tool::{self, Finished};

/// Names the JSON object.
pub const SCHEMA: &str = "kvgate.transfer-bench/1";

/// Measures the transfer engine beside the bare loop of each path.
#[derive(Clone, Debug, Parser)]
#[command(name = "transfer-bench", version = version::LINE, args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    throughput: ThroughputArgs,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Bytes per second of one load (the default)
    Throughput(ThroughputArgs),
}

/// Options of `throughput`.
#[derive(Clone, Debug, Parser)]
pub struct ThroughputArgs {
    #[command(flatten)]
    load: Load,
    #[command(flatten)]
    common: Common,
}

/// Options of every subcommand.
#[derive(Clone, Debug, clap::Args)]
pub struct Common {
    /// Bound of every wait for the peer
    #[arg(long, value_name = "MS", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    deadline_ms: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Cli {
    /// Whether the result is one JSON object.
    #[must_use]
    pub fn is_json(&self) -> bool {
        match &self.command {
            Some(Command::Throughput(args)) => args.common.json,
            None => self.throughput.common.json,
        }
    }
}

/// Runs the tool.
///
/// # Errors
/// The options do not fit, the path is not usable here, or the peer was lost.
pub fn run(cli: Cli) -> Result<Finished, Failure> {
    match cli.command {
        Some(Command::Throughput(args)) => throughput(&args),
        None => throughput(&cli.throughput),
    }
}

/// SIGINT and SIGTERM end the run with 130 and 143; the peer process ends with its control socket.
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

/// Runs the peer of a run on the control socket that is its standard input.
#[must_use]
pub fn run_target() -> ExitCode {
    let control = io::stdin().as_fd().try_clone_to_owned();
    let result = control
        .map_err(|error| Failure::internal(format!("control socket: {error}")))
        .and_then(|control| target::run(UnixStream::from(control), None, TARGET_DEADLINE));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            console::note(&format!("transfer-bench: peer process: {failure}"));
            ExitCode::from(failure.exit_code())
        }
    }
}

/// The measuring side bounds its own waits, and ends the peer with itself.
const TARGET_DEADLINE: Duration = Duration::from_secs(60);

fn throughput(args: &ThroughputArgs) -> Result<Finished, Failure> {
    let backend = usable(args.load.backend)?;
    if args.load.op == Direction::Read {
        return Err(pair::no_read());
    }
    let deadline = Duration::from_millis(args.common.deadline_ms);
    let row = throughput::measure(&args.load, backend, deadline)?;
    let (verdict, exit_code) = match row.bad_pages {
        0 => ("good", 0),
        _ => ("bad-pages", 1),
    };
    Ok(Finished {
        lines: vec![row.line()],
        json: json!({ "schema": SCHEMA, "verdict": verdict, "rows": [row] }),
        exit_code,
    })
}

/// The path that is taken.
fn usable(backend: Backend) -> Result<Backend, Failure> {
    match backend {
        Backend::Auto => Ok(Backend::Shm),
        Backend::Local | Backend::Shm | Backend::Tcp => Ok(backend),
        Backend::Cma | Backend::Ucx | Backend::Libfabric => Err(Failure::input(
            "backend",
            backend.id(),
            "local, shm or tcp: the engine of this build has no other path",
        )),
    }
}
