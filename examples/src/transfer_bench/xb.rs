//! The grid of the peers' harness: one line per configuration on standard input, one JSON object as answer. The
//! product as users get it: lists, checks, arrivals and their gates belong to every request.

use std::io::{self, BufRead};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::layout::{self, Layout};
use super::options::{Backend, Check, Direction, Load, Order};
use super::pair::Pair;
use super::route::Route;
use super::row::{median, quantile, sorted};
use super::throughput::{Bench, Figures, LEAST_ROUNDS, Round};
use crate::handoff::console;
use crate::handoff::failure::Failure;
use crate::handoff::options::IndexK;

/// Most bytes of a pool.
const POOL_BYTES: u64 = 1 << 30;
/// A configuration uses at least so much of it, or [`SLOTS`] slots.
const POOL_LEAST_BYTES: u64 = 256 << 20;
const SLOTS: u64 = 65_536;

/// One line of the harness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    direction: Direction,
    page_bytes: u64,
    pages: u32,
    engine_time: Duration,
    seed: u64,
}

/// Speaks the protocol until `Q` or the end of the input.
pub fn run(backend: Backend, deadline: Duration) -> Result<(), Failure> {
    let name = format!("kvgate_{}", backend.id());
    let mut grid = Grid {
        backend,
        deadline,
        name: name.clone(),
        open: None,
    };
    // A path that does not work here must not say that it is ready.
    grid.pair(4096, 16)?;
    console::print(&format!("READY {name}"));
    for line in io::stdin().lock().lines() {
        let line = line.map_err(|error| Failure::internal(format!("standard input: {error}")))?;
        if line.starts_with('Q') {
            break;
        }
        let answer = match parse(&line) {
            Some(asked) => grid.answer(asked).unwrap_or_else(|failure| {
                grid.open = None;
                json!({ "err": failure.to_string() })
            }),
            None => json!({ "err": format!("{line:?} is no OP BYTES N MS SEED") }),
        };
        console::print(&answer.to_string());
    }
    Ok(())
}

fn parse(line: &str) -> Option<Asked> {
    let mut words = line.split_whitespace();
    let direction = match words.next()? {
        "READ" => Direction::Read,
        "WRITE" => Direction::Write,
        _ => return None,
    };
    let mut number = || words.next()?.parse::<u64>().ok();
    let (page_bytes, pages) = (number()?, u32::try_from(number()?).ok()?);
    let (ms, seed) = (number()?, number()?);
    (page_bytes > 0 && pages > 0).then_some(Asked {
        direction,
        page_bytes,
        pages,
        engine_time: Duration::from_millis(ms),
        seed,
    })
}

struct Grid {
    backend: Backend,
    deadline: Duration,
    name: String,
    /// The pair of the last configuration: it serves every one with pages of this size.
    open: Option<Open>,
}

struct Open {
    pair: Pair,
    layout: Layout,
    setup: Duration,
}

impl Grid {
    fn answer(&mut self, asked: Asked) -> Result<Value, Failure> {
        let usual = (POOL_LEAST_BYTES / asked.page_bytes).min(SLOTS);
        let slots = usual.max(u64::from(asked.pages));
        if slots * asked.page_bytes > POOL_BYTES {
            return Ok(json!({ "skip": 1 }));
        }
        let Open {
            pair,
            layout,
            setup,
        } = self.pair(asked.page_bytes, slots as u32)?;
        let load = load_of(&asked);
        let mut bench = Bench::new(pair, &load, asked.seed)?;
        bench.verified_pass()?;
        let bad_first = bench.bad_pages();
        let until = Instant::now() + asked.engine_time * 2;
        while bench.rounds() < LEAST_ROUNDS || Instant::now() < until {
            bench.round()?;
        }
        bench.verified_pass()?;
        let (figures, pair) = bench.finish();
        self.open = Some(Open {
            pair,
            layout,
            setup,
        });
        Ok(self.object(&asked, &figures, bad_first, setup))
    }

    fn pair(&mut self, page_bytes: u64, slot_count: u32) -> Result<Open, Failure> {
        let fits = |open: &Open| {
            let pool = open.layout.pools.first();
            pool.is_some_and(|pool| pool.slot_bytes == page_bytes && pool.slot_count >= slot_count)
        };
        if let Some(open) = self.open.take().filter(fits) {
            return Ok(open);
        }
        let layout = Layout {
            pools: vec![layout::PoolShape {
                offset_bytes: 0,
                slot_bytes: page_bytes,
                slot_count,
            }],
        };
        let began = Instant::now();
        let route = Route::here(self.backend, self.deadline);
        let pair = Pair::start(&route, layout.clone())?;
        Ok(Open {
            pair,
            layout,
            setup: began.elapsed(),
        })
    }

    fn object(&self, asked: &Asked, figures: &Figures, bad_first: u64, setup: Duration) -> Value {
        let of = |value: fn(&Round) -> f64| figures.rounds.iter().map(value).collect::<Vec<_>>();
        let engine = sorted(of(|round| round.engine));
        let memcpy = sorted(of(|round| round.memcpy));
        let latencies = sorted(figures.latencies_us.clone());
        let (gbps_p90, memcpy_p90) = (quantile(&engine, 0.9), quantile(&memcpy, 0.9));
        let (cpu, wall_ns) = (figures.cpu, figures.cpu.wall_ns.max(1) as f64);
        json!({
            "engine": self.name,
            "op": match asked.direction { Direction::Read => "READ", Direction::Write => "WRITE" },
            "size": asked.page_bytes,
            "n": asked.pages,
            "gbps_med": quantile(&engine, 0.5),
            "gbps_p90": gbps_p90,
            "memcpy_med": quantile(&memcpy, 0.5),
            "memcpy_p90": memcpy_p90,
            "ratio_med": median(of(|round| round.engine / round.memcpy)),
            "ratio_p90": gbps_p90 / memcpy_p90,
            "descs_s": gbps_p90 * 1e9 / asked.page_bytes as f64,
            "p50_us": quantile(&latencies, 0.5),
            "p99_us": quantile(&latencies, 0.99),
            "min_us": quantile(&latencies, 0.0),
            "reqs": figures.requests,
            "rounds": figures.rounds.len(),
            "cpu_init": cpu.here_ns as f64 / wall_ns,
            "cpu_target": cpu.there_ns as f64 / wall_ns,
            "cpu_ns_kib": cpu.ns_kib(),
            "memcpy_cpu_ns_kib": figures.memcpy_cpu.ns_kib(),
            "bad_first": bad_first,
            "bad_last": figures.bad_pages - bad_first,
            "setup_us": setup.as_micros() as u64,
        })
    }
}

fn load_of(asked: &Asked) -> Load {
    Load {
        op: asked.direction,
        page_bytes: asked.page_bytes,
        pages: asked.pages,
        order: Order::Random,
        concurrency: 1,
        check: Check::Sample,
        duration: 0.0,
        model: None,
        tokens: None,
        index_k: IndexK::default(),
        pool_mib: POOL_LEAST_BYTES >> 20,
        engine_only: false,
        #[cfg(feature = "fault-injection")]
        damage_page: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_harness_are_understood() {
        let asked = parse("READ 8448 1024 30 1").unwrap();
        assert_eq!((asked.page_bytes, asked.pages, asked.seed), (8448, 1024, 1));
        assert_eq!(asked.direction, Direction::Read);
        for line in [
            "",
            "GET 1 1 1 1",
            "READ 0 1 1 1",
            "WRITE 8448 0 30 1",
            "READ 8448",
        ] {
            assert_eq!(parse(line), None, "{line}");
        }
    }
}
