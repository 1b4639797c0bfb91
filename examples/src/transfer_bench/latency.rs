//! From the post of one page to a reader in the peer process that has seen it, beside the bare wake of the
//! same kind in the same run: blocks of both in alternating order, A B B A.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use kvgate_transfer::PreparedTransfer;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use rustix::thread::futex;
use serde::Serialize;

use super::activity::monotonic_ns;
use super::control::{Answer, Order, Watch, out_of_turn};
use super::layout::{Group, Layout, PageList, PoolShape, shuffled};
use super::options::Direction;
use super::pair::Pair;
use super::round_trip;
use super::route::Route;
use super::row::{machine_load, quantile, sorted};
use super::watch::{BELL, READY};
use crate::handoff::failure::{Failure, FailureKind};

/// What the reader does while nothing comes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "kebab-case")]
pub enum Waiter {
    /// Looks all the time.
    Spin,
    /// Sleeps.
    #[default]
    Park,
}

/// What is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The gate of a stage.
    Gate(Waiter),
    /// The note of an arrival.
    Note,
}

impl Kind {
    fn id(self) -> &'static str {
        match self {
            Kind::Gate(Waiter::Spin) => "spin",
            Kind::Gate(Waiter::Park) => "park",
            Kind::Note => "note",
        }
    }

    /// How the peer waits for what the engine brings.
    pub(super) fn watch(self) -> Watch {
        match self {
            Kind::Gate(Waiter::Spin) => Watch::GateSpinning,
            Kind::Gate(Waiter::Park) => Watch::GateParked,
            Kind::Note => Watch::Note,
        }
    }
}

/// One latency run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The way to the reader.
    pub route: Route,
    /// What is seen.
    pub kind: Kind,
    /// Pause before each event, so that a sleeping reader sleeps.
    pub park: Duration,
    /// Bytes of the page.
    pub page_bytes: u64,
    /// Events of each kind.
    pub count: u32,
}

/// What it showed.
#[derive(Clone, Debug, Serialize)]
pub struct Latency {
    /// The path.
    pub backend: &'static str,
    /// `spin`, `park` or `note`.
    pub waiter: &'static str,
    /// Pause before each event.
    pub park_us: u64,
    /// Bytes of the page.
    pub page_bytes: u64,
    /// Events of each kind.
    pub events: usize,
    /// Between two hosts: both times end with the answer of the reader.
    pub is_round_trip: bool,
    /// From the post to seen.
    pub post_to_seen: Times,
    /// From the bare wake to seen.
    pub bare: Times,
    /// Which bare wake.
    pub bare_name: &'static str,
    /// How much the engine adds to the middle one.
    pub over_bare_p50_us: f64,
    /// The same, at one event in a hundred.
    pub over_bare_p99_us: f64,
    /// Pages that were not there when they were seen.
    pub bad_pages: u64,
    /// One-minute load of the machine.
    pub load: f64,
}

/// Quantiles.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Times {
    /// The middle one.
    pub p50_us: f64,
    /// One in a hundred takes longer.
    pub p99_us: f64,
    /// The shortest.
    pub min_us: f64,
}

/// Blocks of one kind.
const BLOCKS: u32 = 4;
/// Slots of the pool: the pages of a block are different ones.
pub const SLOTS: u32 = 1024;

/// Measures one kind of event.
pub fn measure(run: &Run) -> Result<Latency, Failure> {
    if run.route.far.is_some() {
        return round_trip::measure(run);
    }
    let pair = start(run)?;
    let bell = remote_event(&pair)?;
    let mut bench = Bench {
        pair,
        run: run.clone(),
        bell,
        seed: 0,
        bad_pages: 0,
    };
    let took = alternate(run, &mut bench)?;
    let bare_name = match run.kind {
        Kind::Gate(Waiter::Spin) => "store to a shared word",
        Kind::Gate(Waiter::Park) => "futex wake",
        Kind::Note => "eventfd and epoll",
    };
    let backend = bench.pair.backend().id();
    Ok(Latency::of(
        run,
        backend,
        took,
        (bare_name, bench.bad_pages),
    ))
}

/// Two processes with one pool of pages of this run.
pub(super) fn start(run: &Run) -> Result<Pair, Failure> {
    let pool = PoolShape {
        offset_bytes: 0,
        slot_bytes: run.page_bytes,
        slot_count: SLOTS,
    };
    Pair::start(&run.route, Layout { pools: vec![pool] })
}

/// What is measured in turns: so many events of one kind, each in microseconds.
pub(super) trait Blocks {
    fn engine_block(&mut self, count: u32) -> Result<Vec<f64>, Failure>;
    fn bare_block(&mut self, count: u32) -> Result<Vec<f64>, Failure>;
}

/// Times of the engine and of the bare loop.
#[derive(Default)]
pub(super) struct Took {
    engine_us: Vec<f64>,
    bare_us: Vec<f64>,
}

/// A B B A A B B A, behind a block that warms everything up.
pub(super) fn alternate(run: &Run, blocks: &mut impl Blocks) -> Result<Took, Failure> {
    let per_block = (run.count / BLOCKS).clamp(1, SLOTS);
    blocks.engine_block(per_block)?;
    let mut took = Took::default();
    for block in 0..2 * BLOCKS {
        match matches!(block % 4, 0 | 3) {
            true => took.engine_us.extend(blocks.engine_block(per_block)?),
            false => took.bare_us.extend(blocks.bare_block(per_block)?),
        }
    }
    Ok(took)
}

struct Bench {
    pair: Pair,
    run: Run,
    bell: OwnedFd,
    seed: u64,
    bad_pages: u64,
}

impl Blocks for Bench {
    fn engine_block(&mut self, count: u32) -> Result<Vec<f64>, Failure> {
        let watch = self.run.kind.watch();
        let is_noted = self.run.kind == Kind::Note;
        self.pair
            .next_flight(Direction::Write, (count as u16, 1), is_noted)?;
        let first_seed = self.seed;
        self.seed += u64::from(count);
        let there = shuffled(count, SLOTS, first_seed + 1);
        let here = shuffled(count, SLOTS, first_seed + 2);
        let pages = here.iter().zip(&there).zip(first_seed..);
        let pages = pages.map(|((here, there), seed)| self.page(*here, *there, seed));
        let pages: Vec<PreparedTransfer> = pages.collect::<Result<_, _>>()?;
        self.block(watch, there, first_seed, |bench, number| {
            let transfer = pages
                .get(number)
                .ok_or_else(|| Failure::internal("no page"))?;
            let began_ns = monotonic_ns();
            let handle = bench.pair.post_prepared(transfer)?;
            let posted_ns = began_ns;
            bench.pair.wait(&handle)?;
            Ok(posted_ns)
        })
    }

    fn bare_block(&mut self, count: u32) -> Result<Vec<f64>, Failure> {
        let watch = match self.run.kind {
            Kind::Gate(Waiter::Spin) => Watch::WordSpinning,
            Kind::Gate(Waiter::Park) => Watch::WordParked,
            Kind::Note => Watch::Eventfd,
        };
        let words = self.pair.words();
        self.block(watch, vec![0; count as usize], 0, |bench, number| {
            let word = words.at(BELL)?;
            let began_ns = monotonic_ns();
            let failed = |errno| Failure::internal(format!("bare wake: {errno}"));
            match watch {
                Watch::Eventfd => {
                    rustix::io::write(&bench.bell, &1_u64.to_ne_bytes()).map_err(failed)?;
                }
                _ => {
                    word.store(number as u32 + 1, Ordering::Release);
                    if watch == Watch::WordParked {
                        futex::wake(word, futex::Flags::empty(), 1).map_err(failed)?;
                    }
                }
            }
            Ok(began_ns)
        })
    }
}

impl Bench {
    /// A page with bytes of its own, checked before the clock runs.
    fn page(&mut self, here: u32, there: u32, seed: u64) -> Result<PreparedTransfer, Failure> {
        let list: PageList = vec![Group {
            pools: 0..1,
            here: vec![here],
            there: vec![there],
        }];
        let sides = self.pair.sides(&list)?;
        self.pair.fill_source(Direction::Write, (0, &sides), seed)?;
        self.pair.prepare(Direction::Write, &list)
    }

    /// Has the peer wait for each event before `event` makes it; the times until they were seen.
    fn block(
        &mut self,
        watch: Watch,
        slots: Vec<u32>,
        first_seed: u64,
        mut event: impl FnMut(&mut Self, usize) -> Result<u64, Failure>,
    ) -> Result<Vec<f64>, Failure> {
        let words = self.pair.words();
        words.at(BELL)?.store(0, Ordering::Release);
        words.at(READY)?.store(0, Ordering::Release);
        let count = slots.len();
        self.pair.control().tell(&Order::Watch {
            watch,
            slots,
            first_seed,
            is_answered: false,
        })?;
        let mut began_ns = Vec::with_capacity(count);
        for number in 0..count {
            self.wait_ready(words.at(READY)?, number as u32 + 1)?;
            began_ns.push(event(self, number)?);
        }
        match self.pair.control().hear()? {
            Answer::Seen { at_ns, bad_pages } => {
                self.bad_pages += bad_pages;
                let us = |(began, seen): (&u64, &u64)| seen.saturating_sub(*began) as f64 / 1e3;
                Ok(began_ns.iter().zip(&at_ns).map(us).collect())
            }
            other => Err(out_of_turn(&other)),
        }
    }

    /// Until the reader is about to wait, and long enough for it to sleep.
    fn wait_ready(&self, ready: &std::sync::atomic::AtomicU32, number: u32) -> Result<(), Failure> {
        let began = Instant::now();
        while ready.load(Ordering::Acquire) < number {
            if began.elapsed() > self.pair.deadline() {
                return Err(Failure::new(
                    FailureKind::DeadlineExceeded,
                    "the reader of the peer process does not wait",
                ));
            }
            thread::yield_now();
        }
        match self.run.kind {
            Kind::Gate(Waiter::Spin) => {
                let pause = Instant::now();
                while pause.elapsed() < Duration::from_micros(20) {
                    std::hint::spin_loop();
                }
            }
            _ => thread::sleep(self.run.park),
        }
        Ok(())
    }
}

/// Quantiles of sorted values.
fn times(sorted_us: &[f64]) -> Times {
    Times {
        p50_us: quantile(sorted_us, 0.5),
        p99_us: quantile(sorted_us, 0.99),
        min_us: quantile(sorted_us, 0.0),
    }
}

/// The peer's eventfd, in this process.
fn remote_event(pair: &Pair) -> Result<OwnedFd, Failure> {
    let failed = |errno| Failure::internal(format!("eventfd of the peer process: {errno}"));
    let pid = i32::try_from(pair.started().pid)
        .ok()
        .and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| Failure::internal("the peer has no process id"))?;
    let process = pidfd_open(pid, PidfdFlags::empty()).map_err(failed)?;
    pidfd_getfd(process, pair.started().event_fd, PidfdGetfdFlags::empty()).map_err(failed)
}

impl Latency {
    /// From the times of a run, what its bare loop is called, and how many pages were wrong.
    pub(super) fn of(
        run: &Run,
        backend: &'static str,
        took: Took,
        (bare_name, bad_pages): (&'static str, u64),
    ) -> Latency {
        let (engine, bare) = (sorted(took.engine_us), sorted(took.bare_us));
        let (seen, wake) = (times(&engine), times(&bare));
        Latency {
            backend,
            waiter: run.kind.id(),
            park_us: run.park.as_micros() as u64,
            page_bytes: run.page_bytes,
            events: engine.len(),
            is_round_trip: run.route.far.is_some(),
            post_to_seen: seen,
            bare: wake,
            bare_name,
            over_bare_p50_us: seen.p50_us - wake.p50_us,
            over_bare_p99_us: seen.p99_us - wake.p99_us,
            bad_pages,
            load: machine_load(),
        }
    }

    /// One line for people.
    #[must_use]
    pub fn line(&self) -> String {
        format!(
            "{} {} {} us, {} B, {} events{}: p50 {:.2} us, p99 {:.2} us | {} p50 {:.2} us, p99 {:.2} us | \
             over it p50 {:.2} us, p99 {:.2} us | bad pages {}",
            self.backend,
            self.waiter,
            self.park_us,
            self.page_bytes,
            self.events,
            if self.is_round_trip {
                ", there and back"
            } else {
                ""
            },
            self.post_to_seen.p50_us,
            self.post_to_seen.p99_us,
            self.bare_name,
            self.bare.p50_us,
            self.bare.p99_us,
            self.over_bare_p50_us,
            self.over_bare_p99_us,
            self.bad_pages,
        )
    }
}
