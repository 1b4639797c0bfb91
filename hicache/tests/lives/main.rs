//! Whole lives of a cache over a directory: any sequence of requests, evictions, faults of the tier, restarts and kills.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

#[path = "../common/mod.rs"]
mod common;
mod disk;
mod life;
mod rows;

use life::{Fault, Life, Operation, Seen};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        (1..6_u32).prop_map(Fault::ShortReads),
        (1..3_u32).prop_map(Fault::BrokenReads),
        (1..3_u32).prop_map(Fault::BrokenWrites),
        (1..4_u32).prop_map(Fault::FullWrites),
        (1..5_u64).prop_map(Fault::FailEvery),
        Just(Fault::Slow),
        any::<bool>().prop_map(Fault::ClockJump),
        (any::<u8>(), any::<u32>()).prop_map(|(segment, at)| Fault::Flip(segment, at)),
        (any::<u8>(), any::<u32>()).prop_map(|(segment, at)| Fault::Torn(segment, at)),
        (any::<u8>(), 1..60_000_u32).prop_map(|(segment, bytes)| Fault::Cut(segment, bytes)),
        any::<u8>().prop_map(Fault::Vanished),
    ]
}

fn operation() -> impl Strategy<Value = Operation> {
    let prefix = (1..=6_u32, 1..=4_u32);
    let ask = (1..=6_u32, 257..1_100_u32);
    prop_oneof![
        8 => prefix.clone().prop_map(|(number, blocks)| Operation::Turn(number, blocks)),
        6 => ask.clone().prop_map(|(number, count)| Operation::Ask(number, count)),
        1 => ask.clone().prop_map(|(number, count)| Operation::AskLate(number, count)),
        1 => ask.prop_map(|(number, count)| Operation::Crowd(number, count)),
        2 => (1..9_u32).prop_map(Operation::EvictDevice),
        3 => (1..9_u32).prop_map(Operation::EvictHost),
        1 => (1..3_u32).prop_map(Operation::EvictEnds),
        1 => (100..900_u64).prop_map(|kib| Operation::Prune(kib << 10)),
        4 => fault().prop_map(Operation::Fault),
        3 => Just(Operation::Well),
        1 => Just(Operation::Repair),
        2 => Just(Operation::Restart),
        1 => Just(Operation::Kill),
        1 => prefix.prop_map(|(number, blocks)| Operation::KillWithin(number, blocks)),
        1 => (1..50_000_u32).prop_map(Operation::KillAndCut),
    ]
}

/// What is published can be gone on from, byte for byte; what was stored is found, unless somebody took it away;
/// the figures say what happened; and everything comes back.
#[test]
fn any_life_publishes_what_can_be_restored() {
    let strategy = (
        proptest::collection::vec(operation(), 4..40),
        any::<bool>(),
        prop_oneof![3 => Just(false), 1 => Just(true)],
    );
    let wished = std::env::var("PROPTEST_CASES").ok();
    let config = Config {
        cases: wished
            .as_deref()
            .and_then(|count| count.parse().ok())
            .unwrap_or(64),
        failure_persistence: None,
        ..Config::default()
    };
    // The same lives in every run, and others with PROPTEST_CASES.
    let mut runner = match wished {
        None => TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha)),
        Some(_) => TestRunner::new(config),
    };
    let seen = Seen::default();
    let outcome = runner.run(&strategy, |(operations, is_tight, is_durable)| {
        let mut life = Life::new(is_tight, is_durable);
        for operation in &operations {
            life.step(operation);
        }
        seen.add(&life.end());
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    seen.check();
}
