//! `cargo xtask kill`: ends a process of a running hand-off at a drawn moment and checks what the
//! others do.
//!
//! The moments are drawn phase by phase: each trial aims at the phase that was hit least so far,
//! at a random point of its measured length. What counts is the phase that the run was really in
//! when the signal went out.

mod draw;
mod report;
mod setting;
mod trial;
mod watch;

use std::path::PathBuf;
use std::time::Duration;

use crate::Outcome;
use crate::exec::{Failure, Workspace};
use crate::suites::release_binary;

use draw::Draw;
pub(crate) use report::Report;
use setting::{Conversations, Remote, Setting};
use trial::{Aim, Ended};

/// Trials that miss the run (it had ended before the signal) are repeated, but not for ever.
const MISSES_ALLOWED: u32 = 40;

/// Divisible by the number of processes, with and without a server.
const VICTIMS: u64 = 20;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(long, value_enum)]
    transport: Transport,
    /// How many processes to kill.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Draws moments and victims.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// What the victim gets: SIGKILL, SIGSTOP (the others must time out) or SIGINT.
    #[arg(long, value_enum, default_value_t = Blow::Kill)]
    signal: Blow,
    /// Conversations instead of one hand-off, in every trial.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    sessions: Option<u32>,
    /// Turns of each conversation.
    #[arg(long, requires = "sessions", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    turns: u32,
    /// Where the prefixes of the conversations stay from trial to trial; the run after the last blow goes on from there.
    #[arg(long, requires = "sessions", value_name = "DIR")]
    hicache: Option<PathBuf>,
    /// A Redis server on this host; it is started here, and struck like the other processes: redis://127.0.0.1:PORT
    #[arg(long, requires = "sessions", value_name = "URL")]
    remote: Option<String>,
    /// Prints one JSON object on stdout.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Transport {
    Shm,
    Tcp,
}

impl Transport {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

/// What happens to the victim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Blow {
    Kill,
    Stop,
    Int,
}

/// The parts of a hand-off, in the order in which they begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Handshake,
    Prefill,
    Transfer,
    Decode,
    Comparison,
}

impl Phase {
    pub(crate) const ALL: [Self; 5] = [
        Self::Handshake,
        Self::Prefill,
        Self::Transfer,
        Self::Decode,
        Self::Comparison,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Handshake => "handshake",
            Self::Prefill => "prefill",
            Self::Transfer => "transfer",
            Self::Decode => "decode",
            Self::Comparison => "comparison",
        }
    }

    /// Reads a line of the form `phase NAME`.
    fn from_line(line: &str) -> Option<Self> {
        let name = line.trim().strip_prefix("phase ")?;
        Self::ALL
            .into_iter()
            .find(|phase| phase.name() == name.trim())
    }
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<Outcome, Failure> {
    let mut setting = Setting::of(args.transport);
    if let Some(sessions) = args.sessions {
        setting.conversations = Some(Conversations {
            sessions,
            turns: args.turns,
            hicache: args.hicache.clone(),
            remote: args.remote.as_deref().map(Remote::new).transpose()?,
        });
    }
    let report = campaign_of(workspace, setting, args.signal, args.runs, args.seed)?;
    if args.json {
        println!("{}", report.json());
    } else {
        report.print();
    }
    Ok(Outcome::found_if(report.is_surprising()))
}

/// A campaign with SIGKILL, for the test suite.
pub(crate) fn campaign(
    workspace: &Workspace,
    transport: Transport,
    runs: u32,
    seed: u64,
) -> Result<Report, Failure> {
    let setting = Setting::of(transport);
    campaign_of(workspace, setting, Blow::Kill, runs, seed)
}

fn campaign_of(
    workspace: &Workspace,
    mut setting: Setting,
    blow: Blow,
    runs: u32,
    seed: u64,
) -> Result<Report, Failure> {
    let program = build(workspace)?;
    watch::adopt_orphans()?;
    let mut draw = Draw::new(seed);
    setting.prepare()?;
    let lengths = trial::measure(&program, &setting)?;
    let mut report = Report::new(setting.transport, blow, runs, seed);
    // Shares of the measured lengths: a run that goes on from what others have left is through a phase sooner.
    let mut reach = [1.0; Phase::ALL.len()];
    while report.trials() < runs {
        let phase = report.rarest_phase();
        let aim = Aim {
            phase,
            delay: lengths
                .of(phase)
                .mul_f64(draw.share() * reach[phase as usize]),
            victim: draw.below(VICTIMS),
            blow,
        };
        setting.prepare()?;
        match trial::run(&program, &setting, aim)? {
            Ended::Missed if report.misses() < MISSES_ALLOWED.max(runs) => report.note_miss(),
            Ended::Missed => {
                report.surprise(format!("phase {} cannot be hit", phase.name()));
                break;
            }
            Ended::Hit(hit) => {
                if hit.phase > phase {
                    reach[phase as usize] *= 0.5;
                }
                report.add(hit);
            }
        }
    }
    report.check_coverage();
    if setting.conversations.is_some() {
        // What the struck runs left does not disturb the next one.
        setting.prepare()?;
        if let Err(failure) = trial::measure(&program, &setting) {
            report.surprise(format!("behind the last blow, {failure}"));
        }
    }
    Ok(report)
}

fn build(workspace: &Workspace) -> Result<PathBuf, Failure> {
    let args = [
        "build",
        "--release",
        "-p",
        "kvgate-examples",
        "--bin",
        "pd-handoff",
    ];
    let built = workspace
        .cargo("kill-build", args)
        .limit(Duration::from_secs(1200))
        .run()?;
    if !built.succeeded() {
        built.show_tail(40);
        return Err(Failure::new("pd-handoff does not build"));
    }
    Ok(release_binary(workspace, "pd-handoff"))
}
