//! Random flights over the simulation with every fault at once; the checks know nothing of the engine:
//! bytes at the gate, no write after the proof, every flight ends, pages are conserved.

#![cfg(feature = "sim")]
#![allow(clippy::unwrap_used)]

mod sim_flights;
mod sim_node;

use kvgate_transfer::{Counters, sim::SimCounts};
use sim_flights::{Wires, World};
use sim_node::{Violation, attempt, run_asked_seeds};

/// What a row of seeds has gone through.
#[derive(Debug, Default)]
struct Sum {
    net: SimCounts,
    counters: Counters,
    finished: u64,
    aborted: u64,
    quarantined: u32,
    killed: u64,
    violations: Vec<Violation>,
}

fn run_seeds(seeds: std::ops::Range<u64>) -> Sum {
    let mut sum = Sum::default();
    for seed in seeds {
        let mut world = World::new(seed, Wires::Faulty);
        match attempt(seed, || world.run()) {
            Ok(counts) => {
                sum.net.duplicated += counts.duplicated;
                sum.net.dropped += counts.dropped;
                sum.net.failed += counts.failed;
                sum.net.split += counts.split;
                sum.net.late_writes += counts.late_writes;
            }
            Err(violation) => {
                sum.violations.push(violation);
                continue;
            }
        }
        let seen = world.receiver.agent.counters();
        sum.counters.duplicate += seen.duplicate;
        sum.counters.unknown += seen.unknown;
        sum.counters.stale += seen.stale;
        sum.counters.late_after_close += seen.late_after_close;
        sum.finished += world.finished;
        sum.aborted += world.aborted;
        sum.quarantined += world.quarantined;
        sum.killed += world.killed;
    }
    sum
}

#[test]
fn no_byte_is_wrong_and_no_page_is_lost_under_every_fault() {
    let sum = run_seeds(0..300);
    assert!(sum.violations.is_empty(), "seeds {:?}", sum.violations);
    // Every window was entered.
    let (net, counters) = (&sum.net, &sum.counters);
    let windows = [
        net.duplicated,
        net.dropped,
        net.failed,
        net.split,
        net.late_writes,
    ];
    assert!(windows.iter().all(|count| *count > 0), "{net:?}");
    let refused = [
        counters.duplicate,
        counters.unknown,
        counters.stale,
        counters.late_after_close,
    ];
    assert!(refused.iter().all(|count| *count > 0), "{counters:?}");
    let ends = [
        sum.finished,
        sum.aborted,
        sum.killed,
        sum.quarantined.into(),
    ];
    assert!(ends.iter().all(|count| *count > 0), "{ends:?}");
}

#[test]
fn seeds() {
    run_asked_seeds(|seeds| run_seeds(seeds).violations);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = |seed| {
        let mut world = World::new(seed, Wires::Faulty);
        let counts = world.run();
        (
            counts,
            world.net.now_ns(),
            world.finished,
            world.aborted,
            world.quarantined,
        )
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}
