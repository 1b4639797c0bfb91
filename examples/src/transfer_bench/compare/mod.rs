//! This product beside other engines, on one grid: every engine is a process of its own that speaks the line
//! protocol of `xb`, measures its slices against plain copies of the same pages, and checks them. What is not
//! installed is named; what fails is named; neither ends the run.

mod engines;
pub(crate) mod process;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use self::engines::{Engine, Kind};
pub use self::engines::{Kind as EngineKind, default_folder};
use self::process::{Answered, Process};
use super::options::{Backend, Direction, Load, Order};
use super::row::{machine_load, median};
use crate::handoff::console;
use crate::handoff::failure::{Failure, FailureKind};

/// What a comparison does.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Paths of this product.
    pub backends: Vec<Backend>,
    /// Where the peers were built.
    pub folder: PathBuf,
    /// Rounds; the order of the engines is reversed in every second one.
    pub rounds: u32,
    /// Time of the engine for a cell in each round; as much goes to plain copies.
    pub engine_time: Duration,
}

/// What a comparison showed.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Rounds.
    pub rounds: u32,
    /// Time of the engine for a cell in each round.
    pub engine_ms: u64,
    /// One for each engine and load.
    pub cells: Vec<Cell>,
    /// Engines that are not installed.
    pub absent: Vec<Absent>,
    /// What engines could not do.
    pub failed: Vec<Failed>,
    /// One-minute load of the machine when it ended.
    pub load: f64,
}

/// One engine on one load: medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// The engine.
    pub engine: String,
    /// `kvgate`, `limit` or `peer`.
    pub kind: Kind,
    /// `read` or `write`.
    pub op: &'static str,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Pages of a request.
    pub pages: u32,
    /// The figures of the line protocol, by its names.
    #[serde(flatten)]
    pub figures: BTreeMap<&'static str, f64>,
    /// Pages that differed, in all rounds.
    pub bad_pages: u64,
}

/// An engine that is not installed.
#[derive(Clone, Debug, Serialize)]
pub struct Absent {
    /// The engine.
    pub engine: String,
    /// What was not found.
    pub missing: String,
    /// What brings it.
    pub install: &'static str,
}

/// An engine that did not do what it was asked.
#[derive(Clone, Debug, Serialize)]
pub struct Failed {
    /// The engine.
    pub engine: String,
    /// What it was asked.
    pub asked: String,
    /// What came of it.
    pub message: String,
}

/// The figures of a cell.
pub const FIGURES: [&str; 13] = [
    "gbps_med",
    "gbps_p90",
    "memcpy_med",
    "ratio_med",
    "ratio_p90",
    "descs_s",
    "p50_us",
    "p99_us",
    "min_us",
    "cpu_init",
    "cpu_target",
    "cpu_ns_kib",
    "memcpy_cpu_ns_kib",
];

/// Requests of more bytes are left out.
const REQUEST_BYTES: u64 = 256 << 20;

type Key = (usize, usize);

/// Runs the grid.
///
/// # Errors
/// A load that the engines do not know. What an engine does wrong is in the result.
pub fn run(loads: &[Load], plan: &Plan) -> Result<Comparison, Failure> {
    loads.iter().try_for_each(check)?;
    let all = engines::all(&plan.backends);
    let (present, absent) = split(all, plan);
    let mut answers: BTreeMap<Key, Vec<Answered>> = BTreeMap::new();
    let mut failed = Vec::new();
    for round in 0..plan.rounds {
        let mut turn: Vec<usize> = (0..present.len()).collect();
        if round % 2 == 1 {
            turn.reverse();
        }
        for index in turn {
            let engine = &present[index];
            console::note(&format!("compare: round {}, {}", round + 1, engine.name));
            let mut one = OneEngine {
                engine,
                plan,
                seed: round + 1,
                failed: &mut failed,
            };
            for (load, answer) in one.run(loads) {
                answers.entry((load, index)).or_default().push(answer);
            }
        }
    }
    let cell = |((load, index), answers): (Key, Vec<Answered>)| {
        cell(&present[index], &loads[load], &answers)
    };
    Ok(Comparison {
        rounds: plan.rounds,
        engine_ms: plan.engine_time.as_millis() as u64,
        cells: answers.into_iter().map(cell).collect(),
        absent,
        failed,
        load: machine_load(),
    })
}

/// Whether the engines can be asked for it. What is left out is told.
#[must_use]
pub fn is_compared(load: &Load) -> bool {
    let bytes = load.page_bytes * u64::from(load.pages);
    if bytes > REQUEST_BYTES {
        console::note(&format!(
            "compare: {} B x {} is left out: more than {REQUEST_BYTES} bytes a request",
            load.page_bytes, load.pages
        ));
    }
    bytes <= REQUEST_BYTES
}

fn check(load: &Load) -> Result<(), Failure> {
    let is_known = load.order == Order::Random && load.concurrency == 1 && load.model.is_none();
    match is_known {
        true => Ok(()),
        false => Err(Failure::new(
            FailureKind::Usage,
            "--compare goes with equal pages in random order and one request in flight",
        )
        .with_field("compare", "--order, --concurrency or --model")),
    }
}

fn split(all: Vec<Engine>, plan: &Plan) -> (Vec<Engine>, Vec<Absent>) {
    let (mut present, mut absent) = (Vec::new(), Vec::new());
    for engine in all {
        match engine.missing(&plan.folder) {
            None => present.push(engine),
            Some(missing) => absent.push(Absent {
                missing,
                install: engine.install,
                engine: engine.name,
            }),
        }
    }
    (present, absent)
}

/// An engine while its round runs.
struct OneEngine<'a> {
    engine: &'a Engine,
    plan: &'a Plan,
    seed: u32,
    failed: &'a mut Vec<Failed>,
}

impl OneEngine<'_> {
    /// The answers, by the number of the load.
    fn run(&mut self, loads: &[Load]) -> Vec<(usize, Answered)> {
        let started = self
            .engine
            .command(&self.plan.folder)
            .and_then(Process::start);
        let mut process = match started {
            Ok(process) => process,
            Err(failure) => {
                self.fail("READY", &failure);
                return Vec::new();
            }
        };
        let mut answers = Vec::new();
        for (number, load) in loads.iter().enumerate() {
            if load.pages > self.engine.most_pages {
                continue;
            }
            let op = match load.op {
                Direction::Read => "READ",
                Direction::Write => "WRITE",
            };
            let (ms, seed) = (self.plan.engine_time.as_millis(), self.seed);
            let asked = format!("{op} {} {} {ms} {seed}", load.page_bytes, load.pages);
            match process.ask(&asked) {
                Ok(Some(answer)) => answers.push((number, answer)),
                Ok(None) => {}
                Err(failure) => {
                    self.fail(&asked, &failure);
                    if process.is_over() {
                        break;
                    }
                }
            }
        }
        process.end();
        answers
    }

    fn fail(&mut self, asked: &str, failure: &Failure) {
        console::note(&format!(
            "compare: {}: {asked}: {failure}",
            self.engine.name
        ));
        self.failed.push(Failed {
            engine: self.engine.name.clone(),
            asked: asked.to_owned(),
            message: failure.to_string(),
        });
    }
}

fn cell(engine: &Engine, load: &Load, answers: &[Answered]) -> Cell {
    let of = |name: &'static str| {
        let values = answers.iter().map(|answer| answer.figure(name)).collect();
        (name, median(values))
    };
    Cell {
        engine: engine.name.clone(),
        kind: engine.kind,
        op: load.op.id(),
        page_bytes: load.page_bytes,
        pages: load.pages,
        figures: FIGURES.into_iter().map(of).collect(),
        bad_pages: answers.iter().map(Answered::bad_pages).sum(),
    }
}

impl Cell {
    /// A figure by its name; 0 of one that there is not.
    #[must_use]
    pub fn figure(&self, name: &str) -> f64 {
        self.figures.get(name).copied().unwrap_or_default()
    }
}

impl Comparison {
    /// Pages that this product got wrong.
    #[must_use]
    pub fn own_bad_pages(&self) -> u64 {
        let own = self.cells.iter().filter(|cell| cell.kind == Kind::Kvgate);
        own.map(|cell| cell.bad_pages).sum()
    }

    /// Whether an engine of this product did not do what it was asked.
    #[must_use]
    pub fn own_failure(&self) -> Option<&Failed> {
        let is_own = |failed: &&Failed| failed.engine.starts_with("kvgate_");
        self.failed.iter().find(is_own)
    }

    /// Lines for people.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let cell = |cell: &Cell| {
            format!(
                "{:<16} {:<5} {:>8} B x {:<6} | {:7.3} GB/s (p90 {:.3}) | {:.3} of memcpy {:.2} | p50 {:.1} us, \
                 p99 {:.1} us | {:.0} ns/KiB, cores {:.2} + {:.2} | bad pages {}",
                cell.engine,
                cell.op,
                cell.page_bytes,
                cell.pages,
                cell.figure("gbps_med"),
                cell.figure("gbps_p90"),
                cell.figure("ratio_med"),
                cell.figure("memcpy_med"),
                cell.figure("p50_us"),
                cell.figure("p99_us"),
                cell.figure("cpu_ns_kib"),
                cell.figure("cpu_init"),
                cell.figure("cpu_target"),
                cell.bad_pages,
            )
        };
        let absent = |one: &Absent| {
            format!(
                "{:<16} not installed: no {}; get it with {}",
                one.engine, one.missing, one.install
            )
        };
        let failed = |one: &Failed| format!("{:<16} {}: {}", one.engine, one.asked, one.message);
        let cells = self.cells.iter().map(cell);
        cells
            .chain(self.absent.iter().map(absent))
            .chain(self.failed.iter().map(failed))
            .collect()
    }
}
