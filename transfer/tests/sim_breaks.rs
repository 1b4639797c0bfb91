//! Random flights, reads and messages over sessions whose connections break at any moment: what the other worlds
//! check, and that no message is lost or repeated, and no write handled twice.

#![cfg(feature = "sim")]
#![allow(clippy::unwrap_used)]

mod sim_flights;
mod sim_node;

use sim_flights::{Wires, World};
use sim_node::{Violation, attempt, run_asked_seeds};

/// What a row of seeds has gone through.
#[derive(Debug, Default)]
struct Sum {
    breaks: u64,
    reconnects: u64,
    replayed: u64,
    dropped: u64,
    retries: u64,
    finished: u64,
    aborted: u64,
    killed: u64,
    parted: u64,
    messages: u64,
    reads: u64,
    violations: Vec<Violation>,
}

fn run_seeds(seeds: std::ops::Range<u64>) -> Sum {
    let mut sum = Sum::default();
    for seed in seeds {
        let mut world = World::new(seed, Wires::Breaking);
        match attempt(seed, || world.run()) {
            Ok(counts) => sum.breaks += counts.breaks,
            Err(violation) => {
                sum.violations.push(violation);
                continue;
            }
        }
        let seen = world.receiver.agent.counters();
        sum.reconnects += seen.reconnects;
        sum.replayed += seen.notes_replayed;
        sum.dropped += seen.notes_duplicate;
        sum.retries += seen.retries;
        sum.finished += world.finished;
        sum.aborted += world.aborted;
        sum.killed += world.killed;
        sum.parted += world.parted;
        sum.messages += world.messages;
        sum.reads += world.reads_done;
        if world.quarantined > 0 || seen.duplicate > 0 {
            let what = format!(
                "{} slots lost, {} doubled",
                world.quarantined, seen.duplicate
            );
            sum.violations.push((seed, what));
        }
    }
    sum
}

#[test]
fn nothing_is_lost_or_repeated_over_breaks() {
    let sum = run_seeds(0..300);
    assert!(sum.violations.is_empty(), "seeds {:?}", sum.violations);
    // Every window was entered.
    let windows = [
        sum.breaks,
        sum.dropped,
        sum.reconnects,
        sum.replayed,
        sum.retries,
        sum.finished,
        sum.aborted,
        sum.killed,
        sum.parted,
        sum.messages,
        sum.reads,
    ];
    assert!(windows.iter().all(|count| *count > 0), "{sum:?}");
}

#[test]
fn seeds() {
    run_asked_seeds(|seeds| run_seeds(seeds).violations);
}
