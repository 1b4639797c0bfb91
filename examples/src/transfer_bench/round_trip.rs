//! Latency between two hosts, whose clocks differ: from the post of one page until the answer of the reader who
//! has seen it, beside the same page over a bare socket and the byte that acknowledges it: A B B A.

use std::thread;
use std::time::{Duration, Instant};

use super::bare_loop::BareLoop;
use super::control::{Answer, Order, out_of_turn};
use super::latency::{Blocks, Kind, Latency, Run, SLOTS, alternate, start};
use super::layout::{Group, PageList, shuffled};
use super::options::Direction;
use super::pair::Pair;
use crate::handoff::failure::Failure;

/// Measures one kind of event.
pub fn measure(run: &Run) -> Result<Latency, Failure> {
    let mut pair = start(run)?;
    let bare_loop = BareLoop::stream(&mut pair)?;
    let mut bench = Bench {
        pair,
        bare_loop,
        kind: run.kind,
        park: run.park,
        seed: 0,
        bad_pages: 0,
    };
    let took = alternate(run, &mut bench)?;
    bench.pair.end()?;
    let backend = bench.pair.backend().id();
    let bare_name = "page over a bare socket and back a byte";
    Ok(Latency::of(
        run,
        backend,
        took,
        (bare_name, bench.bad_pages),
    ))
}

struct Bench {
    pair: Pair,
    bare_loop: BareLoop,
    kind: Kind,
    park: Duration,
    seed: u64,
    bad_pages: u64,
}

impl Blocks for Bench {
    fn engine_block(&mut self, count: u32) -> Result<Vec<f64>, Failure> {
        let is_noted = self.kind == Kind::Note;
        self.pair
            .next_flight(Direction::Write, (count as u16, 1), is_noted)?;
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
            watch: self.kind.watch(),
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
