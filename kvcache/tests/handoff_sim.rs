//! Random requests with production machines, pools, plans and engine over a simulated network, under
//! every fault at once. The checks know nothing of the machines: bytes at every gate and at the end of
//! decoding, slots that stay as they were left, conservation, an end by the limits for everything.
//!
//! `KVGATE_SIM_SEEDS=N KVGATE_SIM_SEED=S` runs N seeds from S on; a violation names its seed.
#![allow(clippy::needless_update, reason = "a feature adds a field")]
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;
mod handoff_world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use handoff_world::World;
use handoff_world::desk::Tally;

fn number(name: &str, default: u64) -> u64 {
    let given = std::env::var(name).ok();
    given.and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn add(sum: &mut Tally, more: &Tally) {
    let pairs = [
        (&mut sum.finished, more.finished),
        (&mut sum.failed, more.failed),
        (&mut sum.deadlines, more.deadlines),
        (&mut sum.quarantined, more.quarantined),
        (&mut sum.cancelled, more.cancelled),
        (&mut sum.writers_killed, more.writers_killed),
        (&mut sum.decoders_killed, more.decoders_killed),
        (&mut sum.gates_read, more.gates_read),
        (&mut sum.slots_reused, more.slots_reused),
        (&mut sum.letters_lost, more.letters_lost),
        (&mut sum.letters_doubled, more.letters_doubled),
        (&mut sum.letters_replayed, more.letters_replayed),
        (&mut sum.letters_damaged, more.letters_damaged),
        (&mut sum.answers, more.answers),
    ];
    for (sum, more) in pairs {
        *sum += more;
    }
    sum.machines += more.machines;
}

/// The tally of one seed and what was wrong.
fn run(seed: u64) -> (Tally, Vec<String>) {
    let ran = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(seed);
        world.run();
        let mut violations = std::mem::take(&mut world.desk.violations);
        violations.dedup();
        (world.desk.tally, violations)
    }));
    ran.unwrap_or_else(|_| (Tally::default(), vec!["a panic".to_owned()]))
}

#[test]
fn seeds() {
    let (first, count) = (number("KVGATE_SIM_SEED", 1), number("KVGATE_SIM_SEEDS", 60));
    let (mut total, mut violation_count) = (Tally::default(), 0_u64);
    for seed in first..first + count {
        let (tally, violations) = run(seed);
        add(&mut total, &tally);
        if let Some(what) = violations.first() {
            violation_count += 1;
            println!(
                "sim: violation seed={seed} {what} ({} in all)",
                violations.len()
            );
        }
    }
    println!("{total:?}");
    println!("sim: {count} seeds, {violation_count} violations");
    assert_eq!(violation_count, 0);
    // Every window was entered.
    if count >= 60 {
        let machines = total.machines;
        for entered in [
            total.finished,
            total.failed,
            total.deadlines,
            total.quarantined,
            total.writers_killed,
            total.decoders_killed,
            total.slots_reused,
            total.letters_replayed,
            total.answers,
            machines.duplicate,
            machines.late,
            machines.incarnation,
            machines.deadline_exceeded,
        ] {
            assert!(entered > 0, "{total:?}");
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    assert_eq!(run(7), run(7));
    assert_ne!(run(7).0, run(8).0);
}
