//! [`Waiters`]: a state, and everybody who sleeps until it changes (I-6).
//!
//! Threads and tasks sleep on the same thing: one mutex guards the state, the list of wakers and the
//! condition variable. A waiter looks at the state with the mutex held and either leaves, or is in the
//! list before the mutex is free; whoever changes the state takes the mutex before it notifies. So
//! nobody sleeps through a change.
//!
//! The state may also lie outside (atomics of a barrier, `Waiters<()>`): then the change is made first,
//! and [`Waiters::notify`] takes the mutex after it.
//!
//! **Lock order.** This mutex is a leaf. The checks run with it held and take no other lock. Wakers are
//! called after it is free.

use std::task::{Context, Poll, Waker};

use crate::{
    deadline::Deadline,
    sync::{Condvar, Mutex, MutexGuard},
};

/// A state of type `T` and those who wait for it.
#[derive(Debug)]
pub(crate) struct Waiters<T> {
    inner: Mutex<Inner<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Inner<T> {
    state: T,
    wakers: Vec<Waker>,
}

impl<T> Waiters<T> {
    pub(crate) fn new(state: T) -> Self {
        Self {
            inner: Mutex::new(Inner {
                state,
                wakers: Vec::new(),
            }),
            changed: Condvar::new(),
        }
    }

    /// Looks at the state, or changes something nobody waits for.
    pub(crate) fn with<R>(&self, look: impl FnOnce(&mut T) -> R) -> R {
        look(&mut self.inner.lock().state)
    }

    /// Changes the state and wakes everybody.
    pub(crate) fn update<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let mut inner = self.inner.lock();
        let result = change(&mut inner.state);
        self.wake(inner);
        result
    }

    /// Changes the state, and wakes everybody if the change says so: a waiter has told the state what it
    /// waits for, and this is not it.
    pub(crate) fn update_if<R>(&self, change: impl FnOnce(&mut T) -> (R, bool)) -> R {
        let mut inner = self.inner.lock();
        let (result, concerns_waiters) = change(&mut inner.state);
        if concerns_waiters {
            self.wake(inner);
        }
        result
    }

    /// Wakes everybody after a change of state outside.
    pub(crate) fn notify(&self) {
        self.wake(self.inner.lock());
    }

    fn wake(&self, mut inner: MutexGuard<'_, Inner<T>>) {
        self.changed.notify_all();
        let wakers = std::mem::take(&mut inner.wakers);
        drop(inner);
        for waker in wakers {
            waker.wake();
        }
    }

    /// Sleeps until `check` has an answer; `None` when the deadline passes first, which changes nothing.
    pub(crate) fn wait<R>(
        &self,
        deadline: Deadline,
        mut check: impl FnMut(&mut T) -> Option<R>,
    ) -> Option<R> {
        let mut inner = self.inner.lock();
        loop {
            if let Some(answer) = check(&mut inner.state) {
                return Some(answer);
            }
            if deadline.has_passed() {
                return None;
            }
            // The state is looked at once more after the time is over: a change beats the clock.
            self.changed.wait_until(&mut inner, deadline.instant());
        }
    }

    /// Sleeps until `check` has an answer. For the threads of the engine, which its shutdown wakes.
    pub(crate) fn wait_owned<R>(&self, mut check: impl FnMut(&mut T) -> Option<R>) -> R {
        let mut inner = self.inner.lock();
        loop {
            if let Some(answer) = check(&mut inner.state) {
                return answer;
            }
            self.changed.wait(&mut inner);
        }
    }

    /// Answers, or keeps the waker of `cx` until the next change.
    pub(crate) fn poll<R>(
        &self,
        cx: &mut Context<'_>,
        mut check: impl FnMut(&mut T) -> Option<R>,
    ) -> Poll<R> {
        let mut inner = self.inner.lock();
        if let Some(answer) = check(&mut inner.state) {
            return Poll::Ready(answer);
        }
        if !inner.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
            inner.wakers.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// [`Waiters::wait`] by a thread that attends to rings meanwhile.
    #[cfg(not(kv_loom))]
    pub(crate) fn wait_attending<R>(
        &self,
        attendant: crate::attend::Attendant,
        deadline: Deadline,
        mut check: impl FnMut(&mut T) -> Option<R>,
    ) -> Option<R> {
        let poll = |cx: &mut Context<'_>| self.poll(cx, &mut check);
        attendant.wait(deadline, poll, |waker| self.forget(waker))
    }

    /// Takes out a waker that was kept and that nobody will wait with again.
    #[cfg(not(kv_loom))]
    fn forget(&self, waker: &Waker) {
        let mut inner = self.inner.lock();
        inner.wakers.retain(|kept| !kept.will_wake(waker));
    }

    /// How many wakers are kept.
    #[cfg(all(test, not(kv_loom)))]
    pub(crate) fn kept(&self) -> usize {
        self.inner.lock().wakers.len()
    }
}
