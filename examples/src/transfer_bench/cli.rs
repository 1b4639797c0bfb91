//! The command line of `transfer-bench`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use super::backends;
use super::compare;
use super::latency::{Kind, Run, Waiter};
use super::options::{Backend, Loads, seconds};
use super::route::{Far, Route};
use super::serve::Serve;
use crate::handoff::endpoint;
use crate::handoff::failure::Failure;
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
    /// What an agent uses when nothing is asked of it
    Idle(IdleArgs),
    /// Waits for runs of other hosts (`--peer` there)
    Serve(ServeArgs),
    /// Speaks the line protocol of `--compare`
    Xb(XbArgs),
}

/// Options of `throughput`.
#[derive(Clone, Debug, Args)]
pub struct ThroughputArgs {
    #[command(flatten)]
    pub(super) loads: Loads,
    /// Draw the rows: GB/s over the lengths of a page, ns per page over the numbers of pages, or bars
    #[arg(long, value_name = "FILE.svg")]
    pub(super) plot: Option<PathBuf>,
    #[command(flatten)]
    pub(super) compare: CompareArgs,
    #[command(flatten)]
    pub(super) far: FarArgs,
    #[command(flatten)]
    pub(super) common: Common,
}

/// Options of `--compare`.
#[derive(Clone, Debug, Args)]
pub struct CompareArgs {
    /// Run the peers and the limits that are installed on the same loads, too
    #[arg(long, conflicts_with = "peer")]
    pub(super) compare: bool,
    /// Other paths of kvgate that take part
    #[arg(
        long,
        value_enum,
        value_name = "LIST",
        value_delimiter = ',',
        requires = "compare"
    )]
    compare_with: Vec<Backend>,
    /// Where examples/peers/setup.sh has put them [default: $KVGATE_PEERS, or kvgate-peers in the user's cache folder]
    #[arg(long, value_name = "DIR", requires = "compare")]
    peers: Option<PathBuf>,
    /// Rounds; every second one goes through the engines in reverse
    #[arg(long, value_name = "N", requires = "compare", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    compare_rounds: u32,
    /// Milliseconds of each engine for each load and round
    #[arg(long, value_name = "MS", requires = "compare", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    compare_ms: u64,
}

/// The peer of a run on another host.
#[derive(Clone, Debug, Args)]
pub struct FarArgs {
    /// Where `transfer-bench serve` listens; otherwise the run starts its own peer
    #[arg(long, value_name = "HOST:PORT")]
    pub(super) peer: Option<String>,
    /// The secret of both sides, for any address beyond loopback
    #[arg(long, value_name = "FILE", requires = "peer")]
    auth_token_file: Option<PathBuf>,
}

/// Options of `serve`.
#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// Where to listen; port 0 lets the system choose, and the first line on stdout says which
    #[arg(long, value_name = "HOST:PORT")]
    listen: String,
    /// Port of the connection that moves the bytes; 0 lets the system choose
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    data_port: u16,
    /// End after so many runs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// The secret of both sides, for any address beyond loopback
    #[arg(long, value_name = "FILE")]
    auth_token_file: Option<PathBuf>,
    #[command(flatten)]
    common: Common,
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
    far: FarArgs,
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

    /// To a peer of this host over a path that can be taken, or to the one that was named.
    pub(super) fn route(&self, backend: Backend, far: &FarArgs) -> Result<Route, Failure> {
        let Some(address) = far.peer.clone() else {
            backends::check(backend)?;
            return Ok(Route::here(backend, self.deadline()));
        };
        if !matches!(backend, Backend::Auto | Backend::Tcp) {
            let expected = "auto or tcp with --peer";
            return Err(Failure::input("backend", backend.id(), expected));
        }
        let token = token(far.auth_token_file.as_deref())?;
        Ok(Route {
            backend,
            far: Some(Far { address, token }),
            deadline: self.deadline(),
        })
    }
}

fn token(file: Option<&Path>) -> Result<Option<Vec<u8>>, Failure> {
    file.map(endpoint::read_token).transpose()
}

impl CompareArgs {
    /// What is compared with a run over `backend`, if anything.
    pub(super) fn plan(&self, backend: Backend) -> Result<Option<compare::Plan>, Failure> {
        if !self.compare {
            return Ok(None);
        }
        let mut backends = vec![backend];
        for other in &self.compare_with {
            if !backends.contains(other) {
                backends::check(*other)?;
                backends.push(*other);
            }
        }
        let folder = self.peers.clone();
        Ok(Some(compare::Plan {
            backends,
            folder: folder.unwrap_or_else(compare::default_folder),
            rounds: self.compare_rounds,
            engine_time: Duration::from_millis(self.compare_ms),
        }))
    }
}

impl ServeArgs {
    pub(super) fn serve(&self) -> Result<Serve, Failure> {
        Ok(Serve {
            listen: self.listen.clone(),
            data_port: self.data_port,
            runs: self.runs,
            token: token(self.auth_token_file.as_deref())?,
            deadline: self.common.deadline(),
        })
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
            Some(Command::Idle(args)) => args.common.json,
            Some(Command::Serve(args)) => args.common.json,
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
            route: self.common.route(self.backend, &self.far)?,
            kind,
            park: Duration::from_micros(self.park_us),
            page_bytes: self.page_bytes,
            count: self.events.unwrap_or(usual),
        })
    }
}
