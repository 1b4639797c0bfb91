//! The hidden switches: each broken guard lets the bug through, and the same run with the guard is clean.
//! One process, one test: the switches are process-wide.

#![cfg(feature = "fault-injection")]
#![allow(clippy::unwrap_used)]

#[allow(dead_code, unused_macros)] // Only the nodes are used here.
mod contract;

use contract::{Backend, Node, STAGE, WRITER, arrival, done, expect, fence, patience};
use kvgate_transfer::{
    fault::{HoldGate, Switch, set},
    *,
};

struct Local;

impl Backend for Local {
    fn new() -> Self {
        Self
    }

    fn agent(&self, name: &str, config: TransferConfig) -> Agent {
        Agent::builder(name).config(config).build().unwrap()
    }

    fn memory(&self, len_bytes: u64) -> Memory {
        Memory::host(len_bytes).unwrap()
    }

    fn connect(&self, a: &Agent, b: &Agent) -> (PeerId, PeerId) {
        Agent::connect_local(a, b).unwrap()
    }
}

fn pair() -> (Node, Node, PeerId, PeerId) {
    let (a, b) = (Node::new(&Local, "a"), Node::new(&Local, "b"));
    let (to_b, from_a) = Local.connect(&a.agent, &b.agent);
    (a, b, to_b, from_a)
}

#[test]
fn every_switch_breaks_its_guard_and_nothing_else() {
    stale_epoch(false);
    early_done(false);
    late_write(false);
    duplicates(false);
    let runs: [(Switch, fn(bool)); 4] = [
        (Switch::NoEpochCheck, stale_epoch),
        (Switch::NoLevelCheck, early_done),
        (Switch::NoQuiesceCheck, late_write),
        (Switch::DuplicateArrivals, duplicates),
    ];
    for (switch, run) in runs {
        set(switch, true);
        run(true);
        set(switch, false);
    }
}

/// A completion of a former attempt.
fn stale_epoch(is_broken: bool) {
    let (a, b, to_b, from_a) = pair();
    let (barrier, flight) = expect(&b, from_a, 9, 1);
    a.agent
        .forge_arrival(to_b, arrival(8, 0, 0), Visibility::RemoteVisible)
        .unwrap();
    fence(&Local, &a, to_b, &b);
    assert_eq!(barrier.check(STAGE) == StageState::Ready, is_broken);
    assert_eq!(b.agent.counters().stale, u64::from(!is_broken));
    drop(flight);
}

/// A completion before the bytes.
fn early_done(is_broken: bool) {
    let (a, b, to_b, from_a) = pair();
    let (barrier, flight) = expect(&b, from_a, 1, 1);
    a.agent
        .forge_arrival(to_b, arrival(1, 0, 0), Visibility::LocalDone)
        .unwrap();
    fence(&Local, &a, to_b, &b);
    assert_eq!(barrier.check(STAGE) == StageState::Ready, is_broken);
    assert_eq!(b.agent.counters().unknown, u64::from(!is_broken));
    drop(flight);
}

/// A write that is held back until its page has another owner.
fn late_write(is_broken: bool) {
    let (a, b, to_b, from_a) = pair();
    let (_, flight) = expect(&b, from_a, 1, 1);
    a.fill(0, 3);
    let gate = HoldGate::new();
    let ledger = FlightLedger::new(Epoch(1));
    let options = PostOptions {
        arrival: Some(arrival(1, 0, 0)),
        ledger: Some(ledger.clone()),
        hold: Some(gate.clone()),
        ..PostOptions::default()
    };
    let transfer = a.prepare(to_b, &[0], &[5]).unwrap();
    let handle = a
        .agent
        .post(&transfer, SourceReady::host_written(), options)
        .unwrap();
    // What is behind it goes ahead.
    fence(&Local, &a, to_b, &b);
    assert_eq!(gate.held_count(), 1);
    handle.cancel();
    assert!(
        matches!(handle.status(), Status::InFlight),
        "it counts as handed to hardware"
    );
    let cause = Cause::Aborted {
        by: Side::Local,
        reason: "test".into(),
    };
    let mut draining = flight.abort(cause);
    ledger.close();
    // With the guard: the writer is not quiet, so it does not answer, and the page is not reused.
    assert_eq!(draining.poll().is_some(), is_broken);
    assert_eq!(FlightLedger::poll(&ledger).is_some(), is_broken);
    assert!(b.holds(5, 0));
    b.fill(5, 44);
    gate.open();
    done(&Local, &handle);
    assert!(b.holds(5, 3), "the late write hit the page");
    if !is_broken {
        assert!(draining.writer_answered(from_a, WRITER));
        assert!(draining.wait(patience()).is_ok());
        assert!(FlightLedger::wait(&ledger, patience()).is_some());
    }
}

/// Every completion twice.
fn duplicates(is_on: bool) {
    let (a, b, to_b, from_a) = pair();
    let (barrier, flight) = expect(&b, from_a, 1, 2);
    done(&Local, &a.send(to_b, 0, 0, arrival(1, 0, 0)));
    fence(&Local, &a, to_b, &b);
    assert_eq!(barrier.check(STAGE), StageState::Pending { missing: 1 });
    assert_eq!(b.agent.counters().duplicate, u64::from(is_on));
    drop(flight);
}
