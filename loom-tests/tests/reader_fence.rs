//! I-20: memory is not reused before every step that may read it has passed.
#![cfg(kv_loom)]

use kvgate_loom_tests::{Cell, model};
use kvgate_transfer::sync::{Arc, thread};
use kvgate_transfer::{Epoch, FlightLedger, StepClock};

/// A step reads a page; the next owner writes it as soon as there is a proof.
#[test]
fn a_step_keeps_what_it_reads() {
    model("a_step_keeps_what_it_reads", || {
        let (clock, ledger) = (StepClock::new(), FlightLedger::new(Epoch(1)));
        let page = Arc::new(Cell::new());
        let step = clock.begin_step();
        FlightLedger::fence(&ledger, &clock, step.id()).unwrap();
        let reader = {
            let (clock, page) = (clock.clone(), page.clone());
            thread::spawn(move || {
                page.read();
                clock.finish(step);
            })
        };
        ledger.close();
        if FlightLedger::poll(&ledger).is_some() {
            page.write(9);
        }
        reader.join().unwrap();
        if FlightLedger::poll(&ledger).is_some() {
            page.write(9);
        }
        assert_eq!(page.read(), 9);
    });
}

/// A fence that is put up while its step ends is neither lost nor counted twice.
#[test]
fn a_fence_races_with_the_end_of_its_step() {
    model("a_fence_races_with_the_end_of_its_step", || {
        let (clock, ledger) = (StepClock::new(), FlightLedger::new(Epoch(1)));
        let step = clock.begin_step();
        let id = step.id();
        let reader = {
            let clock = clock.clone();
            thread::spawn(move || clock.finish(step))
        };
        FlightLedger::fence(&ledger, &clock, id).unwrap();
        ledger.close();
        reader.join().unwrap();
        assert_eq!(ledger.unquiet().fences, 0);
        assert!(FlightLedger::poll(&ledger).is_some());
    });
}
