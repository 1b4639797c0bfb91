//! Steps of a reader: a page may be reused only when every step that may read it has passed (I-20).
//!
//! A fence is per (stream, step), not per view: a view only remembers the number of its step.
//!
//! **Shared state.** `open` (steps that have begun and not finished), the next number and the subscribers
//! are under one mutex. `passed_count` repeats, outside of it, how many of the first steps are all over.
//! **Lock order.** The clock's mutex is released before a subscriber is called; subscribers may take
//! their own locks.
//! **Memory order.** `finish` stores `passed_count` with Release after the last read of the step, and
//! `passed` loads it with Acquire: who sees a step passed sees everything the step did as done.

use std::collections::BTreeSet;

use crate::{
    engine::FlightLedger,
    sync::{Arc, AtomicU64, Mutex, Ordering},
};

/// Number of a step of one [`StepClock`]. Plain data, to be remembered by a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepId(u64);

/// A step that has begun. It ends with [`StepClock::finish`]; dropped instead, it never passes, and what
/// it may read is never reused.
#[derive(Debug)]
#[must_use = "a step that is not finished keeps its pages from being reused for good"]
pub struct Step(StepId);

impl Step {
    /// The number that views of this step remember.
    pub fn id(&self) -> StepId {
        self.0
    }
}

/// The steps of one reading stream (host side).
#[derive(Debug)]
pub struct StepClock {
    /// All steps with a number below this one are over.
    passed_count: AtomicU64,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    next: u64,
    open: BTreeSet<u64>,
    subscribers: Vec<(StepId, Arc<FlightLedger>)>,
}

impl Inner {
    fn passed_count(&self) -> u64 {
        self.open.first().copied().unwrap_or(self.next)
    }
}

impl StepClock {
    /// A clock that has not begun a step.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            passed_count: AtomicU64::new(0),
            inner: Mutex::new(Inner::default()),
        })
    }

    /// Begins a step. Several may be open at once.
    pub fn begin_step(&self) -> Step {
        let mut inner = self.inner.lock();
        let number = inner.next;
        inner.next += 1;
        inner.open.insert(number);
        Step(StepId(number))
    }

    /// Ends a step: the caller reads nothing for it any more.
    ///
    /// # Panics
    /// In debug builds, when the step belongs to another clock.
    pub fn finish(&self, step: Step) {
        let released = {
            let mut inner = self.inner.lock();
            let was_open = inner.open.remove(&step.0.0);
            debug_assert!(was_open, "the step belongs to another clock");
            let passed = inner.passed_count();
            self.passed_count.store(passed, Ordering::Release);
            let (over, open): (Vec<_>, Vec<_>) = std::mem::take(&mut inner.subscribers)
                .into_iter()
                .partition(|(id, _)| id.0 < passed);
            inner.subscribers = open;
            over
        };
        for (_, ledger) in released {
            ledger.fence_passed();
        }
    }

    /// Whether this step and all before it are over. A step that has not begun is not over.
    pub fn passed(&self, step: StepId) -> bool {
        step.0 < self.passed_count.load(Ordering::Acquire)
    }

    /// The last step that has begun: once it has passed, nothing that was read up to now is read any more.
    pub fn latest(&self) -> Option<StepId> {
        self.inner.lock().next.checked_sub(1).map(StepId)
    }

    /// Calls [`FlightLedger::fence_passed`] once, when `step` is over; `false` when it is over already.
    pub(crate) fn subscribe(&self, step: StepId, ledger: &Arc<FlightLedger>) -> bool {
        let mut inner = self.inner.lock();
        if step.0 < inner.passed_count() {
            return false;
        }
        inner.subscribers.push((step, ledger.clone()));
        true
    }
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_step_passes_only_when_it_and_all_before_it_are_over() {
        let clock = StepClock::new();
        let first = clock.begin_step();
        let second = clock.begin_step();
        let (first_id, second_id) = (first.id(), second.id());
        clock.finish(second);
        assert!(!clock.passed(second_id), "the first step may still read");
        clock.finish(first);
        assert!(clock.passed(first_id) && clock.passed(second_id));
        assert!(
            !clock.passed(StepId(2)),
            "a step that has not begun is not over"
        );
    }

    #[test]
    fn a_dropped_step_never_passes() {
        let clock = StepClock::new();
        let lost = clock.begin_step();
        let id = lost.id();
        drop(lost);
        let next = clock.begin_step();
        clock.finish(next);
        assert!(!clock.passed(id));
    }
}
