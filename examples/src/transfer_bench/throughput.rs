//! Slices of the engine, of a plain copy and of the bare loop of the path, in alternating order over the same
//! pages: A B C C B A. Ratios are taken inside each round, so what disturbs the machine disturbs both sides.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kvgate_transfer::TransferHandle;

use super::activity;
use super::bare_loop::BareLoop;
use super::layout::{self, PageList};
use super::options::{Check, Direction, Load};
use super::pair::{Pair, Sides};
use super::route::Route;
use super::row::Row;
use crate::handoff::failure::Failure;

/// Length of a slice, unless one request is longer.
const SLICE: Duration = Duration::from_millis(2);
/// Rounds at least, however long they take.
pub const LEAST_ROUNDS: usize = 3;
/// Most latencies that are kept.
const LATENCIES: usize = 1 << 20;
/// A verified pass over more bytes than this looks at one list only.
const VERIFY_ALL_BYTES: u64 = 64 << 20;
/// Chunks that a flight must still have before a slice: more requests than a slice can make.
const TICKETS_PER_SLICE: u32 = 16_384;

/// Measures one load.
pub fn measure(load: &Load, route: &Route) -> Result<Row, Failure> {
    let pair = Pair::start(route, layout::pools(load)?)?;
    let backend = pair.backend();
    let mut bench = Bench::new(pair, load, 1)?;
    bench.verified_pass()?;
    if !load.engine_only {
        bench.open_bare_loop()?;
    }
    let until = Instant::now() + Duration::from_secs_f64(load.duration);
    while bench.rounds() < LEAST_ROUNDS || Instant::now() < until {
        bench.round()?;
        bench.check_sample()?;
    }
    bench.verified_pass()?;
    let (figures, mut pair) = bench.finish();
    pair.end()?;
    Ok(Row::new(load, backend, figures))
}

/// A list with both of its sides as this process sees them.
struct Listed {
    list: PageList,
    sides: Sides,
}

/// A pair and its lists, while slices are made.
pub struct Bench {
    pair: Pair,
    lists: Vec<Listed>,
    direction: Direction,
    check: Check,
    concurrency: usize,
    /// Only slices of the engine.
    is_alone: bool,
    bare_loop: Option<BareLoop>,
    #[cfg(feature = "fault-injection")]
    damage_page: bool,
    /// Fills of the source so far; each one has other bytes.
    seed: u64,
    figures: Figures,
}

/// What the slices showed.
#[derive(Debug, Default)]
pub struct Figures {
    /// GB/s of the slices, round by round.
    pub rounds: Vec<Round>,
    /// Of each request.
    pub latencies_us: Vec<f64>,
    /// Timed requests.
    pub requests: u64,
    /// Pages of a request.
    pub pages: u64,
    /// Bytes of a request.
    pub request_bytes: u64,
    /// Processor time of the slices of the engine.
    pub cpu: Cpu,
    /// Processor time of the plain copies, and what they copied.
    pub memcpy_cpu: Cpu,
    /// The bare loop of the path, when it is not the plain copy.
    pub limit_name: Option<&'static str>,
    /// Pages that did not hold what was sent.
    pub bad_pages: u64,
    /// Pages that were compared.
    pub checked_pages: u64,
}

/// GB/s of the slices of one round.
#[derive(Clone, Copy, Debug, Default)]
pub struct Round {
    /// The engine.
    pub engine: f64,
    /// The plain copy.
    pub memcpy: f64,
    /// The bare loop of the path.
    pub limit: Option<f64>,
}

/// Processor time for bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu {
    /// This process.
    pub here_ns: u64,
    /// The peer process.
    pub there_ns: u64,
    /// Time that passed.
    pub wall_ns: u64,
    /// Bytes moved in it.
    pub bytes: u64,
}

/// What requests took, apart from filling and comparing their pages.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    requests: u64,
    wall: Duration,
    /// Processor time of this process.
    here_ns: u64,
    /// Processor time of a peer that also fills and compares, on another host.
    there_ns: u64,
}

impl Bench {
    /// Over a pair that is connected, with the lists of the load and the seed.
    pub fn new(mut pair: Pair, load: &Load, seed: u64) -> Result<Self, Failure> {
        let lists = pair.lists(load, seed)?;
        let with_sides = |list: PageList| {
            let sides = pair.sides(&list)?;
            Ok(Listed { list, sides })
        };
        let lists = lists
            .into_iter()
            .map(with_sides)
            .collect::<Result<Vec<_>, Failure>>()?;
        let first = lists.first().ok_or_else(|| Failure::internal("no list"))?;
        let figures = Figures {
            pages: first.sides.here.count(),
            request_bytes: first.sides.here.bytes(),
            ..Figures::default()
        };
        Ok(Self {
            pair,
            direction: load.op,
            check: load.check,
            concurrency: load.concurrency as usize,
            is_alone: load.engine_only,
            bare_loop: None,
            #[cfg(feature = "fault-injection")]
            damage_page: load.damage_page,
            seed: 0,
            lists,
            figures,
        })
    }

    /// Rounds so far.
    #[must_use]
    pub fn rounds(&self) -> usize {
        self.figures.rounds.len()
    }

    /// Pages that were bad so far.
    #[must_use]
    pub fn bad_pages(&self) -> u64 {
        self.figures.bad_pages
    }

    /// The figures, and the pair for the next load.
    #[must_use]
    pub fn finish(self) -> (Figures, Pair) {
        (self.figures, self.pair)
    }

    /// Every list, or one if that is much.
    pub fn verified_pass(&mut self) -> Result<(), Failure> {
        if self.check == Check::Off {
            return Ok(());
        }
        let count = match self.figures.request_bytes > VERIFY_ALL_BYTES {
            true => 1,
            false => self.lists.len(),
        };
        (0..count).try_for_each(|index| self.verified_request(index).map(drop))
    }

    /// One list per round.
    pub fn check_sample(&mut self) -> Result<(), Failure> {
        match self.check {
            Check::Sample => self
                .verified_request(self.figures.rounds.len() % self.lists.len())
                .map(drop),
            Check::Full | Check::Off => Ok(()),
        }
    }

    /// New bytes in the source, one request, and at once a look at every page of the target.
    fn verified_request(&mut self, index: usize) -> Result<Spent, Failure> {
        self.pair.refill(self.direction, 1)?;
        self.seed += 1;
        let seed = self.seed;
        let listed = &self.lists[index];
        let sides = (index, &listed.sides);
        self.pair.fill_source(self.direction, sides, seed)?;
        let is_far = self.check == Check::Full && self.pair.is_far();
        let there_ns = if is_far { self.pair.cpu_ns()?.1 } else { 0 };
        let (began, cpu_ns) = (Instant::now(), activity::cpu_ns());
        let handle = self.pair.post(self.direction, &listed.list)?;
        self.pair.wait(&handle)?;
        let mut took = Spent {
            requests: 1,
            wall: began.elapsed(),
            here_ns: activity::cpu_ns() - cpu_ns,
            there_ns: 0,
        };
        if is_far {
            took.there_ns = self.pair.cpu_ns()?.1 - there_ns;
        }
        #[cfg(feature = "fault-injection")]
        if self.damage_page {
            self.pair.damage(self.direction, &listed.list, seed)?;
        }
        self.figures.bad_pages += self.pair.bad_slots(self.direction, sides, seed)?;
        self.figures.checked_pages += listed.sides.here.count();
        Ok(took)
    }

    /// One slice of each kind.
    pub fn round(&mut self) -> Result<(), Failure> {
        let is_forward = self.figures.rounds.len().is_multiple_of(2);
        let mut round = Round::default();
        let order = match is_forward {
            true => [Kind::Engine, Kind::Memcpy, Kind::Limit],
            false => [Kind::Limit, Kind::Memcpy, Kind::Engine],
        };
        for kind in order {
            match kind {
                Kind::Engine => round.engine = self.engine_slice()?,
                Kind::Memcpy if self.is_alone => {}
                Kind::Memcpy => round.memcpy = self.memcpy_slice(),
                Kind::Limit => round.limit = self.limit_slice()?,
            }
        }
        self.figures.rounds.push(round);
        Ok(())
    }

    fn engine_slice(&mut self) -> Result<f64, Failure> {
        self.pair.refill(self.direction, TICKETS_PER_SLICE)?;
        let (_, there) = self.pair.cpu_ns()?;
        let spent = match self.check {
            Check::Full => self.verified_requests()?,
            Check::Sample | Check::Off => self.timed_requests()?,
        };
        let (_, there_after) = self.pair.cpu_ns()?;
        let (wall_ns, bytes) = (
            spent.wall.as_nanos() as u64,
            spent.requests * self.figures.request_bytes,
        );
        self.figures.requests += spent.requests;
        let cpu = &mut self.figures.cpu;
        cpu.here_ns += spent.here_ns;
        cpu.there_ns += match self.check == Check::Full && self.pair.is_far() {
            true => spent.there_ns,
            false => there_after - there,
        };
        cpu.wall_ns += wall_ns;
        cpu.bytes += bytes;
        Ok(bytes as f64 / wall_ns.max(1) as f64)
    }

    /// Requests back to back, `concurrency` of them in flight.
    fn timed_requests(&mut self) -> Result<Spent, Failure> {
        let (began, cpu_ns) = (Instant::now(), activity::cpu_ns());
        let mut open: VecDeque<(Instant, TransferHandle)> = VecDeque::new();
        let (mut posted, mut next_start) = (0_usize, began);
        loop {
            while open.len() < self.concurrency {
                let list = &self.lists[posted % self.lists.len()].list;
                let handle = self.pair.post(self.direction, list)?;
                open.push_back((next_start, handle));
                posted += 1;
                if self.concurrency > 1 {
                    next_start = Instant::now();
                }
            }
            let Some((start, handle)) = open.pop_front() else {
                break;
            };
            self.pair.wait(&handle)?;
            next_start = Instant::now();
            self.note_latency(next_start - start);
            let is_over = next_start - began >= SLICE;
            if is_over || self.pair.tickets() <= self.concurrency as u32 {
                break;
            }
        }
        for (start, handle) in open {
            self.pair.wait(&handle)?;
            next_start = Instant::now();
            self.note_latency(next_start - start);
        }
        Ok(Spent {
            requests: posted as u64,
            wall: next_start - began,
            here_ns: activity::cpu_ns() - cpu_ns,
            there_ns: 0,
        })
    }

    /// One request at a time, each of them compared; only the requests count.
    fn verified_requests(&mut self) -> Result<Spent, Failure> {
        let began = Instant::now();
        let mut sum = Spent::default();
        while began.elapsed() < SLICE || sum.requests == 0 {
            let one = self.verified_request(sum.requests as usize % self.lists.len())?;
            self.note_latency(one.wall);
            sum.requests += 1;
            sum.wall += one.wall;
            sum.here_ns += one.here_ns;
            sum.there_ns += one.there_ns;
        }
        Ok(sum)
    }

    fn note_latency(&mut self, latency: Duration) {
        if self.figures.latencies_us.len() < LATENCIES {
            self.figures
                .latencies_us
                .push(latency.as_nanos() as f64 / 1e3);
        }
    }

    fn memcpy_slice(&mut self) -> f64 {
        let (cpu_ns, began) = (activity::cpu_ns(), Instant::now());
        let (mut count, mut wall) = (0_usize, Duration::ZERO);
        while wall < SLICE {
            let listed = &self.lists[count % self.lists.len()];
            self.pair.copy(self.direction, &listed.sides);
            count += 1;
            wall = began.elapsed();
        }
        let bytes = count as u64 * self.figures.request_bytes;
        self.figures.memcpy_cpu.here_ns += activity::cpu_ns() - cpu_ns;
        self.figures.memcpy_cpu.bytes += bytes;
        bytes as f64 / wall.as_nanos() as f64
    }

    /// Opens the bare loop of the path. A limit that moves other bytes would be none.
    pub fn open_bare_loop(&mut self) -> Result<(), Failure> {
        self.bare_loop = BareLoop::open(&mut self.pair)?;
        let direction = self.direction;
        self.figures.limit_name = self.bare_loop.as_ref().map(|path| path.name(direction));
        if self.bare_loop.is_none() || self.check == Check::Off {
            return Ok(());
        }
        self.seed += 1;
        let seed = self.seed;
        let sides = (0, &self.lists[0].sides);
        self.pair.fill_source(direction, sides, seed)?;
        self.bare_transfer(0)?;
        let sides = (0, &self.lists[0].sides);
        match self.pair.bad_slots(direction, sides, seed)? {
            0 => Ok(()),
            bad => Err(Failure::internal(format!(
                "the bare loop moved {bad} pages wrongly"
            ))),
        }
    }

    fn limit_slice(&mut self) -> Result<Option<f64>, Failure> {
        let bytes = self.figures.request_bytes;
        if self.bare_loop.is_none() {
            return Ok(None);
        }
        let began = Instant::now();
        let (mut count, mut wall) = (0_usize, Duration::ZERO);
        while wall < SLICE {
            self.bare_transfer(count % self.lists.len())?;
            count += 1;
            wall = began.elapsed();
        }
        Ok(Some((count as u64 * bytes) as f64 / wall.as_nanos() as f64))
    }

    fn bare_transfer(&mut self, index: usize) -> Result<(), Failure> {
        let Listed { list, sides } = &self.lists[index];
        match &mut self.bare_loop {
            Some(path) => path.transfer(&mut self.pair, self.direction, (list, sides)),
            None => Ok(()),
        }
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Engine,
    Memcpy,
    Limit,
}
