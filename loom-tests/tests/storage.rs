//! I-24: who brings a record is decided before it is read, and a queue is empty only when its work is over.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_hicache::identity::BlockKey;
use kvgate_hicache::record::{RecordId, RecordKind};
use kvgate_hicache::storage::{Claims, Queue};
use kvgate_loom_tests::{Cell, deadline, model};
use kvgate_transfer::sync::{Arc, AtomicU32, Ordering, thread};

fn record(number: u8) -> RecordId {
    RecordId {
        kind: RecordKind::Block,
        key: BlockKey([number; 32]),
    }
}

/// Two fetches have one record in common: one of them reads it, and the other finds it there.
#[test]
fn two_fetches_of_one_record() {
    model("two_fetches_of_one_record", || {
        let claims = Arc::new(Claims::new());
        let page = Arc::new(Cell::new());
        let is_there = Arc::new(AtomicU32::new(0));
        let fetch = |ids: [RecordId; 2]| {
            let (claims, page) = (claims.clone(), page.clone());
            let is_there = is_there.clone();
            move || {
                match Claims::try_claim(&claims, &ids) {
                    Some(claim) => {
                        if is_there.load(Ordering::Relaxed) == 0 {
                            page.write(7);
                            is_there.store(1, Ordering::Relaxed);
                        }
                        drop(claim);
                    }
                    None => assert!(claims.wait(&ids[1..], deadline())),
                }
                page.read()
            }
        };
        let other = thread::spawn(fetch([record(3), record(2)]));
        let found = fetch([record(1), record(2)])();
        assert_eq!((found, other.join().unwrap()), (7, 7));
        assert_eq!(claims.count(), 0);
    });
}

/// Whoever waits for the queue sees what the worker has done, and the worker ends when the queue does.
#[test]
fn a_queue_is_empty_when_its_work_is_over() {
    model("a_queue_is_empty_when_its_work_is_over", || {
        let queue = Arc::new(Queue::new(2));
        let page = Arc::new(Cell::new());
        let worker = {
            let (queue, page) = (queue.clone(), page.clone());
            thread::spawn(move || {
                while let Some((item, running)) = queue.pop() {
                    page.write(item);
                    drop(running);
                }
            })
        };
        queue.push(1).unwrap();
        assert!(queue.wait_idle(deadline()));
        assert_eq!(page.read(), 1);
        assert!(queue.close().is_empty());
        assert_eq!(queue.push(2), Err(2));
        worker.join().unwrap();
        assert_eq!(queue.counts(), (0, 0));
    });
}
