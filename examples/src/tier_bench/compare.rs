//! kvgate beside other stores: every one keeps the same number of blocks of the same lengths, in turn, in rounds whose
//! order is reversed, and is asked whether they are right. What is not installed is named with what brings it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;

use super::own::Own;
use super::row::{Baseline, Beside, Row};
use super::{Args, bare::median, measure::Folder};
use crate::handoff::console;
use crate::handoff::failure::{Failure, FailureKind};
use crate::transfer_bench::compare::default_folder;
use crate::transfer_bench::compare::process::Process;

/// Rounds; the order of the engines is reversed in every second one.
const ROUNDS: u32 = 4;

/// A store that is not installed, or did not do what it was asked.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Absent {
    pub(super) engine: &'static str,
    pub(super) message: String,
}

impl Absent {
    pub(super) fn line(&self) -> String {
        format!("{:<16} {}", self.engine, self.message)
    }
}

/// A store of another project.
struct Peer {
    name: &'static str,
    tier: &'static str,
    /// Whether a put is over when it is on the disk.
    durable: bool,
    /// Whether it looks at the bytes that it gives.
    verify: &'static str,
    program: Program,
    install: &'static str,
}

enum Program {
    /// A program that the set-up has built, and its engine.
    Built(&'static str),
    /// A script, its first argument, and the Python package that it needs.
    Script(&'static str, &'static str, &'static str),
}

const SETUP: &str = "examples/peers/tiers/setup.sh";
const SETUP_LMCACHE: &str = "KVGATE_LMCACHE=1 examples/peers/tiers/setup.sh (fetches torch)";
const SETUP_REDIS: &str = "apt-get install redis-server, then examples/peers/tiers/setup.sh";

const fn peer(name: &'static str, tier: &'static str, program: Program) -> Peer {
    Peer {
        name,
        tier,
        durable: false,
        verify: "off",
        program,
        install: SETUP,
    }
}

fn peers() -> Vec<Peer> {
    let lmcache = |name, tier, kind| Peer {
        install: SETUP_LMCACHE,
        ..peer(
            name,
            tier,
            Program::Script("lmcache_tier.py", kind, "lmcache"),
        )
    };
    let redis = |name, durable| Peer {
        durable,
        install: SETUP_REDIS,
        ..peer(name, "remote", Program::Built(name))
    };
    vec![
        lmcache("lmcache_cpu", "memory", "cpu"),
        lmcache("lmcache_disk", "file", "disk"),
        peer(
            "mooncake_store",
            "memory",
            Program::Script("mooncake_store.py", "", "mooncake"),
        ),
        Peer {
            verify: "on",
            ..peer("foyer", "file", Program::Built("foyer"))
        },
        redis("redis", false),
        redis("redis_aof", true),
    ]
}

/// An engine, its tier, whether it is durable and whether it verifies; and how it is asked.
struct Engine {
    name: &'static str,
    tier: &'static str,
    durable: bool,
    verify: &'static str,
    ask: Ask,
}

enum Ask {
    Own(Own),
    Process(Box<Process>),
}

/// What one store did in one round.
struct Cell {
    gbps: f64,
    p50_us: f64,
    p99_us: f64,
    count: u64,
    bad: u64,
    miss: u64,
}

/// Engine, `true` for a get, bytes of a block.
type Key = (usize, bool, u64);

/// Runs the comparison: for each length of block, working set bytes in each store. Answers the rows, and what could not
/// be asked.
pub(super) fn run(args: &Args) -> Result<(Vec<Row>, Vec<Absent>), Failure> {
    let folder = args.peers.clone().unwrap_or_else(default_folder);
    let data = Folder::new(args, "compare")?;
    let (mut engines, mut absent) = (own_engines(&data.path), Vec::new());
    for peer in peers() {
        match start(&peer, &folder, &data.path) {
            Ok(process) => engines.push(Engine {
                name: peer.name,
                tier: peer.tier,
                durable: peer.durable,
                verify: peer.verify,
                ask: Ask::Process(Box::new(process)),
            }),
            Err(message) => absent.push(Absent {
                engine: peer.name,
                message,
            }),
        }
    }
    let mut cells: BTreeMap<Key, Vec<Cell>> = BTreeMap::new();
    for &bytes in &args.compare_bytes {
        for round in 0..ROUNDS {
            let mut turn: Vec<usize> = (0..engines.len()).collect();
            if round % 2 == 1 {
                turn.reverse();
            }
            for at in turn {
                let engine = &mut engines[at];
                console::note(&format!(
                    "compare: {bytes} B, round {}, {}",
                    round + 1,
                    engine.name
                ));
                for is_get in [false, true] {
                    let count = (args.working_set / bytes).max(16);
                    match engine.ask(is_get, bytes, count) {
                        Ok(cell) => cells.entry((at, is_get, bytes)).or_default().push(cell),
                        Err(failure) if matches!(engine.ask, Ask::Own(_)) => return Err(failure),
                        Err(failure) => note_failure(&mut absent, engine.name, &failure),
                    }
                }
            }
        }
    }
    let rows = rows(&engines, &cells);
    for engine in engines {
        if let Ask::Process(process) = engine.ask {
            process.end();
        }
    }
    Ok((rows, absent))
}

fn note_failure(absent: &mut Vec<Absent>, engine: &'static str, failure: &Failure) {
    if !absent.iter().any(|one| one.engine == engine) {
        let message = format!("failed: {failure}");
        absent.push(Absent { engine, message });
    }
}

fn own_engines(data: &Path) -> Vec<Engine> {
    let own = |name, tier, durable, own: Own| Engine {
        name,
        tier,
        durable,
        verify: if own.is_bare() { "off" } else { "on" },
        ask: Ask::Own(own),
    };
    vec![
        own("kvgate", "memory", false, Own::memory()),
        own("kvgate", "file", false, Own::log(data.join("log"), false)),
        own("kvgate", "file", true, Own::log(data.join("durable"), true)),
        own(
            "files",
            "file",
            false,
            Own::files(data.join("files"), false),
        ),
        own("files", "file", true, Own::files(data.join("synced"), true)),
    ]
}

/// Starts a peer, or says what is missing.
fn start(peer: &Peer, folder: &Path, data: &Path) -> Result<Process, String> {
    let build = folder.join("build");
    let missing = |what: String| format!("not installed: no {what}; get it with {}", peer.install);
    let need = |path: PathBuf| match path.exists() {
        true => Ok(path),
        false => Err(missing(path.display().to_string())),
    };
    let place = data.join(peer.name);
    let mut command = match peer.program {
        Program::Built(engine) => {
            let mut command = Command::new(need(build.join("tier-engines"))?);
            command.arg(engine);
            command
        }
        Program::Script(script, kind, package) => {
            let python = need(folder.join("venv/bin/python"))?;
            let script = need(build.join(script))?;
            let versions = std::fs::read_dir(folder.join("venv/lib"));
            let mut versions = versions.into_iter().flatten().flatten();
            let has_package =
                versions.any(|at| at.path().join("site-packages").join(package).exists());
            if !has_package {
                return Err(missing(format!("Python package {package}")));
            }
            let mut command = Command::new(python);
            command
                .arg(script)
                .args(Some(kind).filter(|kind| !kind.is_empty()));
            command.env("PYTHONDONTWRITEBYTECODE", "1");
            command
        }
    };
    command.arg(place);
    Process::start(command).map_err(|failure| format!("failed: {failure}"))
}

impl Engine {
    fn ask(&mut self, is_get: bool, bytes: u64, count: u64) -> Result<Cell, Failure> {
        match &mut self.ask {
            Ask::Own(own) => {
                let done = match is_get {
                    false => own.put(bytes, count)?,
                    true => own.get(bytes, count)?,
                };
                Ok(Cell {
                    gbps: done.gbps,
                    p50_us: done.p50_us,
                    p99_us: done.p99_us,
                    count,
                    bad: done.bad,
                    miss: 0,
                })
            }
            Ask::Process(process) => {
                let op = if is_get { "GET" } else { "PUT" };
                let answer = process.ask(&format!("{op} {bytes} {count}"))?;
                let answer =
                    answer.ok_or_else(|| Failure::new(FailureKind::Internal, "left out"))?;
                Ok(Cell {
                    gbps: answer.figure("gbps"),
                    p50_us: answer.figure("p50_us"),
                    p99_us: answer.figure("p99_us"),
                    count,
                    bad: answer.figure("bad") as u64,
                    miss: answer.figure("miss") as u64,
                })
            }
        }
    }
}

/// One row for each engine, direction and length: medians over the rounds. Those of kvgate have the others of the same
/// direction beside them.
fn rows(engines: &[Engine], cells: &BTreeMap<Key, Vec<Cell>>) -> Vec<Row> {
    let med = |cells: &[Cell], of: fn(&Cell) -> f64| {
        let mut values: Vec<f64> = cells.iter().map(of).collect();
        median(&mut values)
    };
    let ratio = |a: &[Cell], b: &[Cell]| {
        let mut ratios: Vec<f64> = a.iter().zip(b).map(|(a, b)| a.gbps / b.gbps).collect();
        median(&mut ratios)
    };
    let beside = |key: &Key, own: &[Cell]| {
        let others = cells.iter().filter(|((at, is_get, bytes), _)| {
            engines[*at].name != "kvgate" && (*is_get, *bytes) == (key.1, key.2)
        });
        let other = |((at, ..), cells): (&Key, &Vec<Cell>)| Beside {
            name: engines[*at].label(),
            gbps_med: med(cells, |cell| cell.gbps),
            ratio_med: ratio(own, cells),
        };
        others.map(other).collect::<Vec<_>>()
    };
    let row = |(key, cells): (&Key, &Vec<Cell>)| {
        let engine = &engines[key.0];
        let gbps_med = med(cells, |cell| cell.gbps);
        let is_own = engine.name == "kvgate";
        Row {
            engine: engine.label(),
            tier: engine.tier,
            op: if key.1 { "get" } else { "put" },
            case: "compare",
            block_bytes: key.2,
            count: cells.iter().map(|cell| cell.count).sum(),
            writers: 1,
            durable: engine.durable,
            verify: engine.verify,
            gbps_med,
            ops_s: gbps_med * 1e9 / key.2 as f64,
            p50_us: med(cells, |cell| cell.p50_us),
            p99_us: med(cells, |cell| cell.p99_us),
            baseline: Baseline::default(),
            beside: if is_own {
                beside(key, cells)
            } else {
                Vec::new()
            },
            missed: Some(cells.iter().map(|cell| cell.miss).sum()).filter(|missed| *missed > 0),
            bad_blocks: cells.iter().map(|cell| cell.bad).sum(),
            ..Row::default()
        }
    };
    cells.iter().map(row).collect()
}

impl Engine {
    fn label(&self) -> String {
        match (self.name, self.durable) {
            ("kvgate", false) => format!("kvgate_{}", self.tier),
            ("kvgate", true) => format!("kvgate_{}_durable", self.tier),
            ("files", true) => "files_fsync".to_owned(),
            (name, _) => name.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_named_with_what_brings_it() {
        let nowhere = Path::new("/no/such/folder");
        for peer in peers() {
            let Err(message) = start(&peer, nowhere, nowhere) else {
                panic!("{} started", peer.name);
            };
            assert!(message.contains("/no/such/folder"), "{message}");
            assert!(message.contains("setup.sh"), "{message}");
        }
    }
}
