//! [`Limiter`]: so many bytes a second into a tier or out of it, and [`Wear`]: what was written to it in a day.
//!
//! A limit decides at once: what could not pass before its deadline is told so and does not wait, and takes nothing from
//! what the others may use.
//!
//! **What is protected by what.** One mutex guards a limiter. **Lock order.** It is a leaf.

use std::time::{Duration, Instant};

use kvgate_transfer::Deadline;
use kvgate_transfer::sync::{Condvar, Mutex};

/// Length of a day of [`Wear`].
const DAY: Duration = Duration::from_secs(24 * 3_600);

/// A limit of bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// On average, at least 1.
    pub bytes_per_s: u64,
    /// So many may pass at once after a rest. One record always may, whatever its length.
    pub burst_bytes: u64,
}

/// What a tier may take and give. The default is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierLimits {
    /// Out of the tier: a read that could not begin before the deadline of its fetch is a miss.
    pub read: Option<Limit>,
    /// Into it: a worker that stores waits, the queue of stores fills, and what finds it full is dropped.
    pub write: Option<Limit>,
    /// Bytes that may be written to it in 24 hours, for the life of an SSD. What is more is not stored.
    pub wear_bytes_per_day: Option<u64>,
}

/// Why something did not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Its turn comes behind its deadline.
    Late,
    /// The end has come.
    Closed,
}

/// Lets bytes pass at a rate.
#[derive(Debug)]
pub struct Limiter {
    limit: Limit,
    state: Mutex<State>,
    /// Told at the end.
    closed: Condvar,
}

#[derive(Debug)]
struct State {
    /// When all that has passed is paid for.
    paid_at: Option<Instant>,
    is_closed: bool,
}

impl Limiter {
    /// Nothing has passed yet.
    pub fn new(limit: Limit) -> Limiter {
        Limiter {
            limit,
            state: Mutex::new(State {
                paid_at: None,
                is_closed: false,
            }),
            closed: Condvar::default(),
        }
    }

    /// Waits for the turn of so many bytes. Answers whether it had to wait.
    ///
    /// # Errors
    /// `Late` at once when the turn comes behind the deadline, and `Closed` at the end.
    pub fn pass(&self, bytes: u64, deadline: Deadline) -> Result<bool, Refused> {
        let now = Instant::now();
        let begin = self.reserve(bytes, now, deadline.instant())?;
        if begin <= now {
            return Ok(false);
        }
        let mut state = self.state.lock();
        while !state.is_closed {
            if Instant::now() >= begin {
                return Ok(true);
            }
            self.closed.wait_until(&mut state, begin);
        }
        Err(Refused::Closed)
    }

    /// The turn of so many bytes that come at `now`; nothing is taken when it is refused.
    ///
    /// # Errors
    /// `Late` when the turn is behind `until`, `Closed` at the end.
    pub fn reserve(&self, bytes: u64, now: Instant, until: Instant) -> Result<Instant, Refused> {
        let mut state = self.state.lock();
        if state.is_closed {
            return Err(Refused::Closed);
        }
        let begin = self.turn(&state, now);
        if begin > until {
            return Err(Refused::Late);
        }
        let paid_at = state.paid_at.map_or(now, |at| at.max(now));
        state.paid_at = Some(paid_at + self.time_of(bytes));
        Ok(begin)
    }

    /// How long something that comes now would wait.
    pub fn wait_now(&self) -> Duration {
        let now = Instant::now();
        self.turn(&self.state.lock(), now).duration_since(now)
    }

    /// How long so many bytes take at this rate, without the burst.
    pub fn time_of(&self, bytes: u64) -> Duration {
        // A century is long enough, and an `Instant` can be that far away.
        let rate = self.limit.bytes_per_s.max(1) as f64;
        Duration::from_secs_f64((bytes as f64 / rate).min(3e9))
    }

    /// Wakes whoever waits, and lets nothing more pass.
    pub fn close(&self) {
        self.state.lock().is_closed = true;
        self.closed.notify_all();
    }

    fn turn(&self, state: &State, now: Instant) -> Instant {
        let burst = self.time_of(self.limit.burst_bytes);
        let begin = state.paid_at.and_then(|at| at.checked_sub(burst));
        begin.map_or(now, |at| at.max(now))
    }
}

/// Bytes written in days of 24 hours, the first one from the first write on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wear {
    since: Option<Instant>,
    today_bytes: u64,
    full_days: u64,
    before_bytes: u64,
}

impl Wear {
    /// So many bytes were written at `now`.
    pub fn note(&mut self, bytes: u64, now: Instant) {
        self.turn_to(now);
        self.today_bytes += bytes;
    }

    /// Bytes of the day that `now` is in.
    pub fn today_bytes(&mut self, now: Instant) -> u64 {
        self.turn_to(now);
        self.today_bytes
    }

    /// Bytes of a day on average of the full days so far; `None` in the first one.
    pub fn mean_bytes_per_day(&mut self, now: Instant) -> Option<u64> {
        self.turn_to(now);
        self.before_bytes.checked_div(self.full_days)
    }

    fn turn_to(&mut self, now: Instant) {
        let since = *self.since.get_or_insert(now);
        let days = now.saturating_duration_since(since).as_secs() / DAY.as_secs();
        if days > 0 {
            self.since = Some(since + Duration::from_secs(days * DAY.as_secs()));
            self.full_days += days;
            self.before_bytes += std::mem::take(&mut self.today_bytes);
        }
    }
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMIT: Limit = Limit {
        bytes_per_s: 1_000,
        burst_bytes: 2_000,
    };

    #[test]
    fn a_burst_passes_and_then_the_rate_holds() {
        let limiter = Limiter::new(LIMIT);
        let now = Instant::now();
        let far = now + Duration::from_secs(100);
        let turn = |bytes| limiter.reserve(bytes, now, far).unwrap() - now;
        assert_eq!(turn(1_000), Duration::ZERO);
        assert_eq!(turn(1_000), Duration::ZERO);
        assert_eq!(turn(500), Duration::ZERO, "one is let into the debt");
        assert_eq!(turn(500), Duration::from_millis(500));
        assert_eq!(turn(1_000), Duration::from_secs(1));
        // After a rest everything is paid for.
        let rested = now + Duration::from_secs(50);
        assert_eq!(limiter.reserve(1, rested, far), Ok(rested));
    }

    #[test]
    fn what_comes_too_late_does_not_wait_and_takes_nothing() {
        let limiter = Limiter::new(LIMIT);
        let now = Instant::now();
        let soon = now + Duration::from_millis(1);
        assert_eq!(limiter.reserve(10_000, now, soon), Ok(now));
        for _ in 0..100 {
            assert_eq!(limiter.reserve(10_000, now, soon), Err(Refused::Late));
        }
        let far = now + Duration::from_secs(9);
        let begin = limiter.reserve(1, now, far).unwrap();
        assert_eq!(begin - now, Duration::from_secs(8), "10,000 less the burst");
    }

    #[test]
    fn the_end_wakes_whoever_waits() {
        let limiter = Limiter::new(LIMIT);
        let patience = Deadline::after_ms(60_000);
        assert_eq!(limiter.pass(20_000, patience), Ok(false));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| limiter.pass(1, patience));
            limiter.close();
            assert_eq!(waiting.join().unwrap(), Err(Refused::Closed));
        });
        assert_eq!(limiter.pass(1, patience), Err(Refused::Closed));
    }

    #[test]
    fn wear_is_counted_by_the_day() {
        let mut wear = Wear::default();
        let begin = Instant::now();
        wear.note(100, begin);
        wear.note(50, begin + DAY / 2);
        assert_eq!(wear.today_bytes(begin + DAY / 2), 150);
        assert_eq!(wear.mean_bytes_per_day(begin + DAY / 2), None);
        wear.note(7, begin + DAY);
        assert_eq!(wear.today_bytes(begin + DAY), 7);
        assert_eq!(wear.mean_bytes_per_day(begin + DAY), Some(150));
        assert_eq!(wear.today_bytes(begin + 3 * DAY), 0);
        assert_eq!(wear.mean_bytes_per_day(begin + 3 * DAY), Some(157 / 3));
    }

    proptest! {
        /// Whatever comes: in no span of time more passes than the burst, the rate and one record more.
        #[test]
        fn no_span_of_time_has_more_than_its_share(
            asked in prop::collection::vec((0_u64..500, 1_u64..5_000), 1..60),
        ) {
            let limiter = Limiter::new(LIMIT);
            let begin = Instant::now();
            let (mut now, mut passed) = (begin, Vec::new());
            for (pause_ms, bytes) in asked {
                now += Duration::from_millis(pause_ms);
                let until = now + Duration::from_secs(3);
                if let Ok(at) = limiter.reserve(bytes, now, until) {
                    prop_assert!(at >= now && at <= until);
                    passed.push((at, bytes));
                }
            }
            for (index, (from, _)) in passed.iter().enumerate() {
                let mut sum = 0;
                for (to, bytes) in &passed[index..] {
                    // Its own bytes are let into the debt.
                    let span = to.saturating_duration_since(*from).as_secs_f64();
                    let share = LIMIT.burst_bytes as f64 + span * LIMIT.bytes_per_s as f64;
                    prop_assert!(sum as f64 <= share + 1.0, "{sum} in {span} s");
                    sum += bytes;
                }
            }
        }
    }
}
