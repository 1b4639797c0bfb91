//! The command line of `transfer-bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use super::backends;
use super::latency::{Kind, Run, Waiter};
use super::options::{Backend, Loads, ModelName, seconds};
use super::route::Route;
use crate::handoff::failure::Failure;
use crate::handoff::options::IndexK;
use crate::handoff::version;

/// Measures the transfer engine beside the bare loop of each path.
#[derive(Clone, Debug, Parser)]
#[command(name = "transfer-bench", version = version::LINE, args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    pub(super) command: Option<Command>,
    /// Say which paths can be taken here, and why not
    #[arg(long)]
    pub(super) list_backends: bool,
    #[command(flatten)]
    pub(super) throughput: ThroughputArgs,
}

/// What to measure.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Bytes per second (the default)
    Throughput(ThroughputArgs),
    /// From the post of a page to a reader in the other process that has passed its gate
    Latency(LatencyArgs),
    /// From the post of a page to its note in the other process
    Notify(NotifyArgs),
    /// What a plan and its posts cost, apart from the bytes
    Plan(PlanArgs),
    /// What an agent uses when nothing is asked of it
    Idle(IdleArgs),
    /// Speaks the line protocol of the peers' harness
    Xb(XbArgs),
}

/// Options of `throughput`.
#[derive(Clone, Debug, Args)]
pub struct ThroughputArgs {
    #[command(flatten)]
    pub(super) loads: Loads,
    /// Draw the rows
    #[arg(long, value_name = "FILE.svg")]
    pub(super) plot: Option<PathBuf>,
    #[command(flatten)]
    pub(super) common: Common,
}

/// Options of `latency`.
#[derive(Clone, Debug, Args)]
pub struct LatencyArgs {
    /// What the reader does while nothing comes
    #[arg(long, value_enum, default_value_t)]
    waiter: Waiter,
    #[command(flatten)]
    events: Events,
}

/// Options of `notify`.
#[derive(Clone, Debug, Args)]
pub struct NotifyArgs {
    #[command(flatten)]
    events: Events,
}

#[derive(Clone, Debug, Args)]
struct Events {
    /// The path that the bytes take
    #[arg(long, value_enum, default_value_t)]
    backend: Backend,
    /// Pause before each event, so that who sleeps, sleeps
    #[arg(long, value_name = "U", default_value_t = 200, value_parser = clap::value_parser!(u64).range(0..=100_000))]
    park_us: u64,
    /// Bytes of the page
    #[arg(long, value_name = "B", default_value_t = 8448, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    page_bytes: u64,
    /// Events of each kind [default: 2000, or 400 with pauses above 1000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(4..=4096))]
    events: Option<u32>,
    #[command(flatten)]
    common: Common,
}

/// Options of `plan`.
#[derive(Clone, Debug, Args)]
pub struct PlanArgs {
    /// Whose cache
    #[arg(long, value_enum, default_value = "flash")]
    pub(super) model: ModelName,
    /// Tokens of the prompt
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub(super) tokens: u32,
    /// Storage of the indexer keys
    #[arg(long, value_enum, value_name = "F", default_value_t)]
    pub(super) index_k: IndexK,
    #[command(flatten)]
    common: Common,
}

/// Options of `idle`.
#[derive(Clone, Debug, Args)]
pub struct IdleArgs {
    /// The path to the peer
    #[arg(long, value_enum, default_value_t)]
    pub(super) backend: Backend,
    /// How long to look: once with a peer, once without
    #[arg(long, value_name = "S", default_value_t = 60.0, value_parser = seconds)]
    pub(super) seconds: f64,
    #[command(flatten)]
    pub(super) common: Common,
}

/// Options of `xb`.
#[derive(Clone, Debug, Args)]
pub struct XbArgs {
    /// The path that the bytes take
    #[arg(value_enum)]
    pub(super) backend: Backend,
    #[command(flatten)]
    pub(super) common: Common,
}

/// Options of every subcommand.
#[derive(Clone, Debug, Args)]
pub struct Common {
    /// Bound of every wait for the peer
    #[arg(long, value_name = "MS", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    deadline_ms: u64,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
}

impl Common {
    pub(super) fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms)
    }

    /// To a peer of this host, over a path that can be taken.
    pub(super) fn route(&self, backend: Backend) -> Result<Route, Failure> {
        backends::check(backend)?;
        Ok(Route::here(backend, self.deadline()))
    }
}

impl Cli {
    /// Whether the result is one JSON object.
    #[must_use]
    pub fn is_json(&self) -> bool {
        match &self.command {
            None => self.throughput.common.json,
            Some(Command::Throughput(args)) => args.common.json,
            Some(Command::Latency(args)) => args.events.common.json,
            Some(Command::Notify(args)) => args.events.common.json,
            Some(Command::Plan(args)) => args.common.json,
            Some(Command::Idle(args)) => args.common.json,
            // Its output is the protocol.
            Some(Command::Xb(_)) => false,
        }
    }
}

impl LatencyArgs {
    pub(super) fn run(&self) -> Result<Run, Failure> {
        self.events.run(Kind::Gate(self.waiter))
    }
}

impl NotifyArgs {
    pub(super) fn run(&self) -> Result<Run, Failure> {
        self.events.run(Kind::Note)
    }
}

impl Events {
    fn run(&self, kind: Kind) -> Result<Run, Failure> {
        let usual = if self.park_us > 1000 { 400 } else { 2000 };
        Ok(Run {
            route: self.common.route(self.backend)?,
            kind,
            park: Duration::from_micros(self.park_us),
            page_bytes: self.page_bytes,
            count: self.events.unwrap_or(usual),
        })
    }
}
