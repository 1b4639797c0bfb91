//! I-5: a ticket counts once, and only in its epoch.
#![cfg(kv_loom)]

use kvgate_loom_tests::{Cell, armed, deadline, land, model, ticket};
use kvgate_transfer::sync::{Arc, thread};
use kvgate_transfer::{BarrierError, Redeemed, StageId, StageState, Visibility};

/// A late peer redeems chunk 1 for a former epoch. Nothing else completes chunk 1 before the end.
#[test]
fn a_former_epoch_has_no_effect() {
    model("a_former_epoch_has_no_effect", || {
        let barrier = armed(&[2], 2);
        let page = Arc::new(Cell::new());
        let late = {
            let barrier = barrier.clone();
            thread::spawn(move || {
                let stale = barrier.redeem(ticket(1, 0, 1), Visibility::RemoteVisible);
                assert!(matches!(stale, Err(BarrierError::Stale { .. })));
            })
        };
        land(&barrier, 2, 0, 0);
        assert_eq!(
            barrier.check(StageId(0)),
            StageState::Pending { missing: 1 }
        );
        page.write(7);
        late.join().unwrap();
        assert_eq!(
            barrier.check(StageId(0)),
            StageState::Pending { missing: 1 }
        );
        assert_eq!(barrier.late_counts().stale, 1);
        land(&barrier, 2, 0, 1);
        barrier.wait(StageId(0), deadline()).unwrap();
        assert_eq!(page.read(), 7);
    });
}

/// Chunk 0 is reported by two threads. Chunk 1 is completed by nobody until both are done.
#[test]
fn a_repeat_counts_once() {
    model("a_repeat_counts_once", || {
        let barrier = armed(&[2], 1);
        let twin = {
            let barrier = barrier.clone();
            thread::spawn(move || {
                barrier
                    .redeem(ticket(1, 0, 0), Visibility::RemoteVisible)
                    .unwrap()
            })
        };
        let here = barrier
            .redeem(ticket(1, 0, 0), Visibility::RemoteVisible)
            .unwrap();
        let there = twin.join().unwrap();
        let mut both = [here, there];
        both.sort_by_key(|redeemed| *redeemed == Redeemed::Duplicate);
        assert_eq!(both, [Redeemed::First, Redeemed::Duplicate]);
        assert_eq!(
            barrier.check(StageId(0)),
            StageState::Pending { missing: 1 }
        );
        assert_eq!(barrier.late_counts().duplicate, 1);
    });
}

/// A chunk outside the plan is refused and counted.
#[test]
fn an_unknown_chunk_is_refused() {
    model("an_unknown_chunk_is_refused", || {
        let barrier = armed(&[1], 1);
        for (stage, chunk) in [(0, 1), (1, 0)] {
            let unknown = barrier.redeem(ticket(1, stage, chunk), Visibility::RemoteVisible);
            assert!(matches!(unknown, Err(BarrierError::UnknownChunk(_))));
        }
        assert_eq!(barrier.late_counts().unknown, 2);
        assert_eq!(
            barrier.check(StageId(0)),
            StageState::Pending { missing: 1 }
        );
    });
}
