//! The link of a peer is used by one thread at a time, and what is queued while somebody has the turn is executed
//! when it comes back (I-6).
#![cfg(kv_loom)]

use kvgate_loom_tests::{Cell, model};
use kvgate_transfer::sync::{Arc, Condvar, Mutex, thread};
use kvgate_transfer::turn_model::TurnQueue;

struct Shared {
    queue: TurnQueue,
    /// Touched by whoever has the turn, with no other lock.
    link: Cell,
    sent: (Mutex<Vec<u8>>, Condvar),
}

/// The worker sends frames, while a thread that posts uses the link itself.
#[test]
fn one_has_the_turn_and_nothing_queued_is_forgotten() {
    model("one_has_the_turn_and_nothing_queued_is_forgotten", || {
        let shared = Arc::new(Shared {
            queue: TurnQueue::new(),
            link: Cell::new(),
            sent: (Mutex::new(Vec::new()), Condvar::new()),
        });
        let worker = {
            let shared = shared.clone();
            thread::spawn(move || {
                while let Some((frame, turn)) = shared.queue.next() {
                    shared.link.write(shared.link.read() + 1);
                    drop(turn);
                    let mut sent = shared.sent.0.lock();
                    sent.push(frame);
                    shared.sent.1.notify_all();
                }
            })
        };
        let poster = {
            let shared = shared.clone();
            thread::spawn(move || {
                if let Some(_turn) = shared.queue.try_turn() {
                    shared.link.write(shared.link.read() + 1);
                }
            })
        };
        shared.queue.push(1);
        let mut sent = shared.sent.0.lock();
        while sent.is_empty() {
            shared.sent.1.wait(&mut sent);
        }
        assert_eq!(*sent, [1]);
        drop(sent);
        poster.join().unwrap();
        shared.queue.close();
        worker.join().unwrap();
    });
}
