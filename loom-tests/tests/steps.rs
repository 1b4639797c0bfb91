//! I-20 with several steps under way: a page waits for its own step and for those before it.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_loom_tests::{Cell, model};
use kvgate_transfer::sync::{Arc, thread};
use kvgate_transfer::{Epoch, FlightLedger, StepClock};

/// Two steps read; the page was seen by the second. The first one ends, then the second, on two threads.
#[test]
fn the_end_of_an_older_step_frees_nothing() {
    model("the_end_of_an_older_step_frees_nothing", || {
        let (clock, ledger) = (StepClock::new(), FlightLedger::new(Epoch(1)));
        let page = Arc::new(Cell::new());
        let (first, second) = (clock.begin_step(), clock.begin_step());
        FlightLedger::fence(&ledger, &clock, second.id()).unwrap();
        ledger.close();
        clock.finish(first);
        assert_eq!(ledger.unquiet().fences, 1);
        let reader = {
            let (clock, page) = (clock.clone(), page.clone());
            thread::spawn(move || {
                page.read();
                clock.finish(second);
            })
        };
        if FlightLedger::poll(&ledger).is_some() {
            page.write(9);
        }
        reader.join().unwrap();
        assert_eq!(ledger.unquiet().fences, 0);
    });
}

/// The second step ends first; what it has seen waits for the first one too, which may read the same.
#[test]
fn steps_end_in_any_order() {
    model("steps_end_in_any_order", || {
        let (clock, ledger) = (StepClock::new(), FlightLedger::new(Epoch(1)));
        let page = Arc::new(Cell::new());
        let (first, second) = (clock.begin_step(), clock.begin_step());
        FlightLedger::fence(&ledger, &clock, second.id()).unwrap();
        ledger.close();
        let readers: Vec<_> = [first, second]
            .into_iter()
            .map(|step| {
                let (clock, page) = (clock.clone(), page.clone());
                thread::spawn(move || {
                    page.read();
                    clock.finish(step);
                })
            })
            .collect();
        if FlightLedger::poll(&ledger).is_some() {
            page.write(9);
        }
        for reader in readers {
            reader.join().unwrap();
        }
        assert_eq!(ledger.unquiet().fences, 0);
    });
}
