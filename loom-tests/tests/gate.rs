//! I-1, I-2, I-3: what a reader sees behind a gate.
#![cfg(kv_loom)]

use kvgate_loom_tests::{Cell, armed, barrier, deadline, land, model, ticket};
use kvgate_transfer::sync::{Arc, thread};
use kvgate_transfer::{BarrierError, Cause, StageId, StageSel, StageState, Visibility};

/// Two writers deliver the two components of a layer; the reader sees both.
#[test]
fn reader_sees_every_component() {
    model("reader_sees_every_component", || {
        let barrier = armed(&[2], 1);
        let pages = Arc::new([Cell::new(), Cell::new()]);
        let writers: Vec<_> = (0..2)
            .map(|chunk: u16| {
                let (barrier, pages) = (barrier.clone(), pages.clone());
                thread::spawn(move || {
                    pages[usize::from(chunk)].write(7);
                    land(&barrier, 1, 0, chunk);
                })
            })
            .collect();
        barrier.wait(StageId(0), deadline()).unwrap();
        assert_eq!((pages[0].read(), pages[1].read()), (7, 7));
        for writer in writers {
            writer.join().unwrap();
        }
    });
}

/// The ready path alone, without the lock of the waiters, orders the reader after the writers.
#[test]
fn a_ready_gate_orders_the_reader() {
    model("a_ready_gate_orders_the_reader", || {
        let barrier = armed(&[2], 1);
        let pages = Arc::new([Cell::new(), Cell::new()]);
        let writer = {
            let (barrier, pages) = (barrier.clone(), pages.clone());
            thread::spawn(move || {
                for chunk in 0..2 {
                    pages[usize::from(chunk)].write(7);
                    land(&barrier, 1, 0, chunk);
                }
            })
        };
        if barrier.check(StageId(0)) == StageState::Ready {
            assert_eq!((pages[0].read(), pages[1].read()), (7, 7));
        }
        writer.join().unwrap();
    });
}

/// A barrier that was never armed is closed, and a redemption does not open it.
#[test]
fn unarmed_is_closed() {
    model("unarmed_is_closed", || {
        let barrier = barrier(&[1], 1);
        assert_eq!(barrier.check(StageId(0)), StageState::NotArmed);
        assert_eq!(
            barrier.wait(StageId(0), deadline()),
            Err(BarrierError::NotArmed)
        );
        let early = barrier.redeem(ticket(1, 0, 0), Visibility::RemoteVisible);
        assert_eq!(early, Err(BarrierError::NotArmed));
        barrier.arm().unwrap();
        assert_eq!(
            barrier.check(StageId(0)),
            StageState::Pending { missing: 1 }
        );
    });
}

/// A completion below "visible here" counts for nothing, whoever reports it.
#[test]
fn a_weak_completion_opens_nothing() {
    model("a_weak_completion_opens_nothing", || {
        let barrier = armed(&[1], 1);
        let page = Arc::new(Cell::new());
        let nic = {
            let (barrier, page) = (barrier.clone(), page.clone());
            thread::spawn(move || {
                let weak = barrier.redeem(ticket(1, 0, 0), Visibility::LocalDone);
                assert!(weak.is_err());
                let weak = barrier.redeem(ticket(1, 0, 0), Visibility::RemoteDelivered);
                assert!(weak.is_err());
                page.write(7);
                land(&barrier, 1, 0, 0);
            })
        };
        barrier.wait(StageId(0), deadline()).unwrap();
        assert_eq!(page.read(), 7);
        nic.join().unwrap();
        assert_eq!(barrier.late_counts().unknown, 2);
    });
}

/// A failure that comes before or after the last chunk: the gate never opens after it.
#[test]
fn a_failed_gate_never_opens() {
    model("a_failed_gate_never_opens", || {
        let barrier = armed(&[1], 1);
        let writer = {
            let barrier = barrier.clone();
            thread::spawn(move || barrier.redeem(ticket(1, 0, 0), Visibility::RemoteVisible))
        };
        barrier.fail(StageSel::All, Cause::Shutdown);
        assert!(matches!(
            barrier.check(StageId(0)),
            StageState::Failed(Cause::Shutdown)
        ));
        let _counted = writer.join().unwrap().unwrap();
        assert!(matches!(
            barrier.wait(StageId(0), deadline()),
            Err(BarrierError::Failed(_))
        ));
    });
}
