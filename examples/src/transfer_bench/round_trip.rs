//! Latency between two hosts, whose clocks differ: from the post of one page until the answer of the reader who
//! has seen it, beside the same page over a bare socket and the byte that acknowledges it: A B B A.

use std::thread;
use std::time::{Duration, Instant};

use super::bare_loop::BareLoop;
use super::control::{Answer, Order, Watch, out_of_turn};
use super::latency::{BLOCKS, Kind, Latency, Run, SLOTS, Waiter, times};
use super::layout::{Group, Layout, PageList, PoolShape, shuffled};
use super::options::Direction;
use super::pair::Pair;
use super::row::{machine_load, sorted};
use crate::handoff::failure::Failure;

/// Measures one kind of event.
pub fn measure(run: &Run) -> Result<Latency, Failure> {
    let per_block = (run.count / BLOCKS).clamp(1, SLOTS);
    let pool = PoolShape {
        offset_bytes: 0,
        slot_bytes: run.page_bytes,
        slot_count: SLOTS,
    };
    let mut pair = Pair::start(&run.route, Layout { pools: vec![pool] })?;
    let bare_loop = BareLoop::stream(&mut pair)?;
    let mut bench = Bench {
        pair,
        bare_loop,
        kind: run.kind,
        park: run.park,
        seed: 0,
        bad_pages: 0,
    };
    // The first block warms everything up.
    bench.engine_block(per_block)?;
    let (mut engine, mut bare) = (Vec::new(), Vec::new());
    for block in 0..2 * BLOCKS {
        match matches!(block % 4, 0 | 3) {
            true => engine.extend(bench.engine_block(per_block)?),
            false => bare.extend(bench.bare_block(per_block)?),
        }
    }
    bench.pair.end()?;
    let (engine, bare) = (sorted(engine), sorted(bare));
    let (seen, wake) = (times(&engine), times(&bare));
    let waiter = match run.kind {
        Kind::Gate(Waiter::Spin) => "spin",
        Kind::Gate(Waiter::Park) => "park",
        Kind::Note => "note",
    };
    Ok(Latency {
        backend: bench.pair.backend().id(),
        waiter,
        park_us: run.park.as_micros() as u64,
        page_bytes: run.page_bytes,
        events: engine.len(),
        is_round_trip: true,
        post_to_seen: seen,
        bare: wake,
        bare_name: "page over a bare socket and back a byte",
        over_bare_p50_us: seen.p50_us - wake.p50_us,
        over_bare_p99_us: seen.p99_us - wake.p99_us,
        bad_pages: bench.bad_pages,
        load: machine_load(),
    })
}

struct Bench {
    pair: Pair,
    bare_loop: BareLoop,
    kind: Kind,
    park: Duration,
    seed: u64,
    bad_pages: u64,
}

impl Bench {
    fn engine_block(&mut self, count: u32) -> Result<Vec<f64>, Failure> {
        let watch = match self.kind {
            Kind::Gate(Waiter::Spin) => Watch::GateSpinning,
            Kind::Gate(Waiter::Park) => Watch::GateParked,
            Kind::Note => Watch::Note,
        };
        self.pair.next_flight(Direction::Write, (count as u16, 1))?;
        let first_seed = self.seed;
        self.seed += u64::from(count);
        let (here, there) = slots(count, first_seed);
        let mut pages = Vec::with_capacity(count as usize);
        for ((here, there), seed) in here.iter().zip(&there).zip(first_seed..) {
            let list = page(*here, *there);
            let sides = self.pair.sides(&list)?;
            self.pair.fill_source(Direction::Write, (0, &sides), seed)?;
            pages.push(self.pair.prepare(Direction::Write, &list)?);
        }
        self.pair.control().tell(&Order::Watch {
            watch,
            slots: there,
            first_seed,
            is_answered: true,
        })?;
        let mut took_us = Vec::with_capacity(pages.len());
        for transfer in &pages {
            thread::sleep(self.park);
            let began = Instant::now();
            let handle = self.pair.post_prepared(transfer)?;
            match self.pair.control().hear()? {
                Answer::SeenOne => took_us.push(began.elapsed().as_nanos() as f64 / 1e3),
                other => return Err(out_of_turn(&other)),
            }
            self.pair.wait(&handle)?;
        }
        match self.pair.control().hear()? {
            Answer::Seen { bad_pages, .. } => {
                self.bad_pages += bad_pages;
                Ok(took_us)
            }
            other => Err(out_of_turn(&other)),
        }
    }

    fn bare_block(&mut self, count: u32) -> Result<Vec<f64>, Failure> {
        let (here, there) = slots(count, self.seed);
        let mut took_us = Vec::with_capacity(count as usize);
        for (here, there) in here.iter().zip(&there) {
            let list = page(*here, *there);
            let sides = self.pair.sides(&list)?;
            thread::sleep(self.park);
            let began = Instant::now();
            let moved = (&list, &sides);
            self.bare_loop
                .transfer(&mut self.pair, Direction::Write, moved)?;
            took_us.push(began.elapsed().as_nanos() as f64 / 1e3);
        }
        Ok(took_us)
    }
}

/// Different slots on the two sides.
fn slots(count: u32, seed: u64) -> (Vec<u32>, Vec<u32>) {
    let here = shuffled(count, SLOTS, seed + 2);
    (here, shuffled(count, SLOTS, seed + 1))
}

fn page(here: u32, there: u32) -> PageList {
    vec![Group {
        pools: 0..1,
        here: vec![here],
        there: vec![there],
    }]
}
