//! I-24: of two that ask a limit of bandwidth at one time, each has a turn of its own.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use kvgate_hicache::storage::{Limit, Limiter, Refused};
use kvgate_loom_tests::model;
use kvgate_transfer::sync::{Arc, thread};

const LIMIT: Limit = Limit {
    bytes_per_s: 1_000,
    burst_bytes: 0,
};

/// Three records at once: their turns are a record apart, and nobody has that of another one.
#[test]
fn two_records_at_one_time() {
    model("two_records_at_one_time", || {
        let limiter = Arc::new(Limiter::new(LIMIT));
        let now = Instant::now();
        let far = now + Duration::from_secs(60);
        let turns = |limiter: Arc<Limiter>, count| {
            move || -> Vec<Instant> {
                let turn = |_| limiter.reserve(1_000, now, far).unwrap();
                (0..count).map(turn).collect()
            }
        };
        let other = thread::spawn(turns(limiter.clone(), 1));
        let mut found = turns(limiter.clone(), 2)();
        found.extend(other.join().unwrap());
        found.sort();
        let seconds = [0, 1, 2].map(Duration::from_secs);
        assert_eq!(found, seconds.map(|after| now + after));
    });
}

/// The end comes before a turn or behind it; what is refused has taken nothing.
#[test]
fn the_end_and_a_turn() {
    model("the_end_and_a_turn", || {
        let limiter = Arc::new(Limiter::new(LIMIT));
        let now = Instant::now();
        let closing = {
            let limiter = limiter.clone();
            thread::spawn(move || limiter.close())
        };
        let first = limiter.reserve(1_000, now, now);
        let late = limiter.reserve(1_000, now, now);
        match (first, late) {
            (Ok(begin), Err(Refused::Late | Refused::Closed)) => assert_eq!(begin, now),
            (Err(Refused::Closed), Err(Refused::Closed)) => {}
            other => panic!("{other:?}"),
        }
        closing.join().unwrap();
        assert_eq!(limiter.reserve(1, now, now), Err(Refused::Closed));
    });
}
