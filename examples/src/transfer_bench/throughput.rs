//! Slices of the engine, of a plain copy and of the bare loop of the path, in alternating order over the same
//! pages: A B C C B A. Ratios are taken inside each round, so what disturbs the machine disturbs both sides.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kvgate_transfer::TransferHandle;
use kvgate_transfer::bare::Slots;

use super::bare_stream::BareStream;
use super::control::{Answer, Order, out_of_turn};
use super::layout::{self, PageList};
use super::options::{Backend, Check, Direction, Load};
use super::pair::Pair;
use super::row::{Limit, ModelRow, Row, machine_load, median, quantile, sorted};
use crate::handoff::failure::Failure;

/// Length of a slice, unless one request is longer.
const SLICE: Duration = Duration::from_millis(2);
/// Rounds at least, however long they take.
const LEAST_ROUNDS: usize = 3;
/// Most latencies that are kept.
const LATENCIES: usize = 1 << 20;
/// A verified pass over more bytes than this looks at one list only.
const VERIFY_ALL_BYTES: u64 = 64 << 20;
/// Chunks that a flight must still have before a slice: more requests than a slice can make.
const TICKETS_PER_SLICE: u32 = 16_384;

/// Measures one load over `backend`, which is not `Auto`.
pub fn measure(load: &Load, backend: Backend, deadline: Duration) -> Result<Row, Failure> {
    let mut bench = Bench::start(load, backend, deadline)?;
    bench.verified_pass()?;
    let until = Instant::now() + Duration::from_secs_f64(load.duration);
    while bench.rounds.len() < LEAST_ROUNDS || Instant::now() < until {
        bench.round()?;
        bench.check_sample()?;
    }
    bench.verified_pass()?;
    Ok(bench.row(load, backend))
}

/// A list with both of its sides as this process sees them.
struct Listed {
    list: PageList,
    here: Slots,
    there: Slots,
}

struct Bench {
    pair: Pair,
    lists: Vec<Listed>,
    direction: Direction,
    check: Check,
    concurrency: usize,
    stream: Option<BareStream>,
    /// Fills of the source so far; each one has other bytes.
    seed: u64,
    bad_pages: u64,
    checked_pages: u64,
    rounds: Vec<Round>,
    latencies_us: Vec<f64>,
    requests: u64,
    cpu: Cpu,
}

/// GB/s of the slices of one round.
struct Round {
    engine: f64,
    memcpy: f64,
    limit: Option<f64>,
}

#[derive(Default)]
struct Cpu {
    here_ns: u64,
    there_ns: u64,
    wall_ns: u64,
    bytes: u64,
}

impl Bench {
    fn start(load: &Load, backend: Backend, deadline: Duration) -> Result<Self, Failure> {
        let layout = layout::pools(load)?;
        let mut pair = Pair::start(backend, layout.clone(), deadline)?;
        let lists = layout::lists(load, &layout, 1)?;
        let stream = match backend {
            Backend::Tcp => match pair.control().ask(&Order::BareStream)? {
                Answer::BareStream { port } => Some(BareStream::connect(port)?),
                other => return Err(out_of_turn(&other)),
            },
            _ => None,
        };
        let with_views = |list: PageList| {
            let (here, there) = pair.views(&list)?;
            Ok(Listed { list, here, there })
        };
        let lists = lists
            .into_iter()
            .map(with_views)
            .collect::<Result<_, _>>()?;
        Ok(Self {
            pair,
            lists,
            direction: load.op,
            check: load.check,
            concurrency: load.concurrency as usize,
            stream,
            seed: 0,
            bad_pages: 0,
            checked_pages: 0,
            rounds: Vec::new(),
            latencies_us: Vec::new(),
            requests: 0,
            cpu: Cpu::default(),
        })
    }

    fn request_bytes(&self) -> u64 {
        self.lists.first().map_or(0, |listed| listed.here.bytes())
    }

    /// Every list, or one if that is much.
    fn verified_pass(&mut self) -> Result<(), Failure> {
        if self.check == Check::Off {
            return Ok(());
        }
        let count = match self.request_bytes() > VERIFY_ALL_BYTES {
            true => 1,
            false => self.lists.len(),
        };
        (0..count).try_for_each(|index| self.verified_request(index).map(drop))
    }

    /// One list per round.
    fn check_sample(&mut self) -> Result<(), Failure> {
        match self.check {
            Check::Sample => self
                .verified_request(self.rounds.len() % self.lists.len())
                .map(drop),
            Check::Full | Check::Off => Ok(()),
        }
    }

    /// New bytes in the source, one request, and at once a look at every page of the target.
    fn verified_request(&mut self, index: usize) -> Result<Duration, Failure> {
        self.pair.refill(1)?;
        self.seed += 1;
        let seed = self.seed;
        let listed = &self.lists[index];
        let (source, target) = sides(self.direction, listed);
        source.fill(seed);
        let began = Instant::now();
        let handle = self.pair.post(self.direction, &listed.list)?;
        self.pair.wait(&handle)?;
        let took = began.elapsed();
        self.bad_pages += target.differing(seed);
        self.checked_pages += target.count();
        Ok(took)
    }

    fn round(&mut self) -> Result<(), Failure> {
        let is_forward = self.rounds.len().is_multiple_of(2);
        let mut round = Round {
            engine: 0.0,
            memcpy: 0.0,
            limit: None,
        };
        let order = match is_forward {
            true => [Kind::Engine, Kind::Memcpy, Kind::Limit],
            false => [Kind::Limit, Kind::Memcpy, Kind::Engine],
        };
        for kind in order {
            match kind {
                Kind::Engine => round.engine = self.engine_slice()?,
                Kind::Memcpy => round.memcpy = self.memcpy_slice(),
                Kind::Limit => round.limit = self.limit_slice()?,
            }
        }
        self.rounds.push(round);
        Ok(())
    }

    fn engine_slice(&mut self) -> Result<f64, Failure> {
        self.pair.refill(TICKETS_PER_SLICE)?;
        let (here, there) = self.pair.cpu_ns()?;
        let (requests, wall) = match self.check {
            Check::Full => self.verified_requests()?,
            Check::Sample | Check::Off => self.timed_requests()?,
        };
        let (here_after, there_after) = self.pair.cpu_ns()?;
        let (wall_ns, bytes) = (wall.as_nanos() as u64, requests * self.request_bytes());
        self.requests += requests;
        self.cpu.here_ns += here_after - here;
        self.cpu.there_ns += there_after - there;
        self.cpu.wall_ns += wall_ns;
        self.cpu.bytes += bytes;
        Ok(bytes as f64 / wall_ns.max(1) as f64)
    }

    /// Requests back to back, `concurrency` of them in flight.
    fn timed_requests(&mut self) -> Result<(u64, Duration), Failure> {
        let began = Instant::now();
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
        Ok((posted as u64, next_start - began))
    }

    /// One request at a time, each of them compared; only the requests count.
    fn verified_requests(&mut self) -> Result<(u64, Duration), Failure> {
        let began = Instant::now();
        let (mut count, mut wall) = (0, Duration::ZERO);
        while began.elapsed() < SLICE || count == 0 {
            let took = self.verified_request(count as usize % self.lists.len())?;
            self.note_latency(took);
            wall += took;
            count += 1;
        }
        Ok((count, wall))
    }

    fn note_latency(&mut self, latency: Duration) {
        if self.latencies_us.len() < LATENCIES {
            self.latencies_us.push(latency.as_nanos() as f64 / 1e3);
        }
    }

    fn memcpy_slice(&self) -> f64 {
        let began = Instant::now();
        let (mut count, mut wall) = (0_usize, Duration::ZERO);
        while wall < SLICE {
            let listed = &self.lists[count % self.lists.len()];
            let (source, target) = sides(self.direction, listed);
            source.copy_to(target);
            count += 1;
            wall = began.elapsed();
        }
        (count as u64 * self.request_bytes()) as f64 / wall.as_nanos() as f64
    }

    fn limit_slice(&mut self) -> Result<Option<f64>, Failure> {
        let bytes = self.request_bytes();
        let Some(stream) = &mut self.stream else {
            return Ok(None);
        };
        let began = Instant::now();
        let (mut count, mut wall) = (0_usize, Duration::ZERO);
        while wall < SLICE {
            let listed = &self.lists[count % self.lists.len()];
            stream.transfer(self.direction, &listed.list, &listed.here)?;
            count += 1;
            wall = began.elapsed();
        }
        Ok(Some((count as u64 * bytes) as f64 / wall.as_nanos() as f64))
    }

    fn row(self, load: &Load, backend: Backend) -> Row {
        let of = |value: fn(&Round) -> f64| self.rounds.iter().map(value).collect::<Vec<_>>();
        let engine = sorted(of(|round| round.engine));
        let ratios = sorted(of(|round| round.engine / round.memcpy));
        let memcpy_gbps_med = median(of(|round| round.memcpy));
        let ratio_med = quantile(&ratios, 0.5);
        let limits: Vec<_> = self.rounds.iter().filter_map(|r| r.limit).collect();
        let limit_ratio = |round: &Round| round.limit.map(|limit| round.engine / limit);
        let limit_ratios: Vec<_> = self.rounds.iter().filter_map(limit_ratio).collect();
        let limit = match limits.is_empty() {
            true => Limit {
                name: "memcpy",
                gbps_med: memcpy_gbps_med,
                ratio_med,
            },
            false => Limit {
                name: "writev/readv with acks",
                gbps_med: median(limits),
                ratio_med: median(limit_ratios),
            },
        };
        let latencies = sorted(self.latencies_us);
        let pages = self.lists.first().map_or(0, |listed| listed.here.count());
        let request_bytes = self.lists.first().map_or(0, |listed| listed.here.bytes());
        let page_bytes = request_bytes / pages.max(1);
        let (cpu, gbps_p90) = (&self.cpu, quantile(&engine, 0.9));
        Row {
            backend: backend.id().to_owned(),
            op: load.op.id(),
            page_bytes,
            pages,
            order: load.order.id(),
            concurrency: load.concurrency,
            check: load.check.id(),
            gbps_med: quantile(&engine, 0.5),
            gbps_p90,
            descs_s: gbps_p90 * 1e9 * pages as f64 / request_bytes.max(1) as f64,
            p50_us: quantile(&latencies, 0.5),
            p99_us: quantile(&latencies, 0.99),
            cpu_ns_kib: (cpu.here_ns + cpu.there_ns) as f64 * 1024.0 / cpu.bytes.max(1) as f64,
            cpu_init: cpu.here_ns as f64 / cpu.wall_ns.max(1) as f64,
            cpu_target: cpu.there_ns as f64 / cpu.wall_ns.max(1) as f64,
            memcpy_gbps_med,
            ratio_med,
            limit,
            requests: self.requests,
            slices: self.rounds.len(),
            bad_pages: self.bad_pages,
            load: machine_load(),
            ratio_p10: quantile(&ratios, 0.1),
            checked_pages: self.checked_pages,
            model: load.model.zip(load.tokens).map(|(model, tokens)| ModelRow {
                name: model.id(),
                tokens,
                index_k: load.index_k.id(),
            }),
        }
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Engine,
    Memcpy,
    Limit,
}

fn sides(direction: Direction, listed: &Listed) -> (&Slots, &Slots) {
    match direction {
        Direction::Write => (&listed.here, &listed.there),
        Direction::Read => (&listed.there, &listed.here),
    }
}
