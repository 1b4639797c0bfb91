//! I-9: memory is reused only against the proof that nothing touches it.
#![cfg(kv_loom)]

use kvgate_loom_tests::{Cell, deadline, model};
use kvgate_transfer::sync::{Arc, thread};
use kvgate_transfer::{Epoch, FlightLedger};

/// Two operations read a page; the proof comes after both.
#[test]
fn the_proof_comes_after_every_operation() {
    model("the_proof_comes_after_every_operation", || {
        let ledger = FlightLedger::new(Epoch(1));
        let page = Arc::new(Cell::new());
        let operations: Vec<_> = (0..2)
            .map(|_| {
                let outstanding = FlightLedger::begin(&ledger).unwrap();
                let page = page.clone();
                thread::spawn(move || {
                    page.read();
                    drop(outstanding);
                })
            })
            .collect();
        ledger.close();
        let proof = FlightLedger::wait(&ledger, deadline()).unwrap();
        assert!(proof.is_for(&ledger));
        page.write(9);
        for operation in operations {
            operation.join().unwrap();
        }
    });
}

/// An operation that begins while the ledger closes is either counted or refused.
#[test]
fn closing_races_with_a_beginning() {
    model("closing_races_with_a_beginning", || {
        let ledger = FlightLedger::new(Epoch(1));
        let page = Arc::new(Cell::new());
        let operation = {
            let (ledger, page) = (ledger.clone(), page.clone());
            thread::spawn(move || {
                if let Ok(outstanding) = FlightLedger::begin(&ledger) {
                    page.read();
                    drop(outstanding);
                }
            })
        };
        ledger.close();
        if FlightLedger::poll(&ledger).is_some() {
            page.write(9);
        }
        operation.join().unwrap();
    });
}

/// Two threads ask for the proof; one gets it.
#[test]
fn there_is_one_proof() {
    model("there_is_one_proof", || {
        let ledger = FlightLedger::new(Epoch(1));
        ledger.close();
        let other = {
            let ledger = ledger.clone();
            thread::spawn(move || FlightLedger::poll(&ledger).is_some())
        };
        let here = FlightLedger::poll(&ledger).is_some();
        assert!(
            here != other.join().unwrap(),
            "one witness, no more, no less"
        );
    });
}
