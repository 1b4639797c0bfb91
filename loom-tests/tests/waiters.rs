//! I-6: nobody sleeps through the last completion or a failure.
#![cfg(kv_loom)]

use std::future::poll_fn;

use kvgate_loom_tests::{Cell, armed, deadline, land, model};
use kvgate_transfer::sync::{Arc, thread};
use kvgate_transfer::{BarrierError, Cause, StageId, StageSel};

/// A thread that waits and a task that waits, both woken by the last chunk.
#[test]
fn the_last_chunk_wakes_threads_and_tasks() {
    model("the_last_chunk_wakes_threads_and_tasks", || {
        let barrier = armed(&[1], 1);
        let page = Arc::new(Cell::new());
        let reader = {
            let (barrier, page) = (barrier.clone(), page.clone());
            thread::spawn(move || {
                barrier.wait(StageId(0), deadline()).unwrap();
                assert_eq!(page.read(), 7);
            })
        };
        let task = {
            let barrier = barrier.clone();
            thread::spawn(move || {
                loom::future::block_on(poll_fn(|cx| barrier.poll(StageId(0), cx)))
            })
        };
        page.write(7);
        land(&barrier, 1, 0, 0);
        reader.join().unwrap();
        task.join().unwrap().unwrap();
    });
}

/// A failure wakes as well, with its cause.
#[test]
fn a_failure_wakes_with_its_cause() {
    model("a_failure_wakes_with_its_cause", || {
        let barrier = armed(&[1, 1], 1);
        let waiter = {
            let barrier = barrier.clone();
            thread::spawn(move || barrier.wait(StageId(1), deadline()))
        };
        barrier.fail(StageSel::One(StageId(1)), Cause::PeerRestarted);
        assert_eq!(
            waiter.join().unwrap(),
            Err(BarrierError::Failed(Cause::PeerRestarted))
        );
    });
}

/// Arming wakes too: whoever waits on a closed barrier is told at once, never left.
#[test]
fn arming_races_with_a_waiter() {
    model("arming_races_with_a_waiter", || {
        let barrier = kvgate_loom_tests::barrier(&[1], 1);
        let waiter = {
            let barrier = barrier.clone();
            thread::spawn(move || barrier.wait(StageId(0), deadline()))
        };
        barrier.arm().unwrap();
        land(&barrier, 1, 0, 0);
        assert!(matches!(
            waiter.join().unwrap(),
            Ok(()) | Err(BarrierError::NotArmed)
        ));
    });
}
