//! [`Queue`]: what waits for a worker. Bounded, never in the way of whoever puts something in.
//!
//! **What is protected by what.** One mutex guards it. **Lock order.** It is a leaf.

use std::collections::VecDeque;

use kvgate_transfer::Deadline;
use kvgate_transfer::sync::{Condvar, Mutex};

/// Work for a few threads, in order.
#[derive(Debug)]
pub struct Queue<T> {
    state: Mutex<State<T>>,
    /// Told when something comes, ends, or nothing comes any more.
    changed: Condvar,
    limit: usize,
}

#[derive(Debug)]
struct State<T> {
    items: VecDeque<T>,
    /// Taken out and not over.
    running: usize,
    is_closed: bool,
}

/// An item that a worker has taken out is over when this is dropped.
#[derive(Debug)]
#[must_use = "the item counts as over when this is dropped"]
pub struct Running<'q, T> {
    queue: &'q Queue<T>,
}

impl<T> Queue<T> {
    /// For at most `limit` waiting items.
    pub fn new(limit: usize) -> Queue<T> {
        Queue {
            state: Mutex::new(State {
                items: VecDeque::new(),
                running: 0,
                is_closed: false,
            }),
            changed: Condvar::default(),
            limit,
        }
    }

    /// Puts an item at the end. Never waits.
    ///
    /// # Errors
    /// The item, when the queue is full or closed.
    pub fn push(&self, item: T) -> Result<(), T> {
        let mut state = self.state.lock();
        if state.is_closed || state.items.len() >= self.limit {
            return Err(item);
        }
        state.items.push_back(item);
        self.changed.notify_all();
        Ok(())
    }

    /// The next item, for a worker that has nothing else to do. Blocks until there is one; `None` once the queue is
    /// closed and empty.
    pub fn pop(&self) -> Option<(T, Running<'_, T>)> {
        let mut state = self.state.lock();
        loop {
            if let Some(item) = state.items.pop_front() {
                state.running += 1;
                self.changed.notify_all();
                return Some((item, Running { queue: self }));
            }
            if state.is_closed {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }

    /// Blocks until nothing waits and nothing runs. `false` at the deadline, which changes nothing.
    pub fn wait_idle(&self, deadline: Deadline) -> bool {
        let mut state = self.state.lock();
        while !state.items.is_empty() || state.running > 0 {
            if deadline.has_passed() {
                return false;
            }
            self.changed.wait_until(&mut state, deadline.instant());
        }
        true
    }

    /// Blocks until something can be put in, or the queue is closed. `false` at the deadline, which changes nothing.
    pub fn wait_room(&self, deadline: Deadline) -> bool {
        let mut state = self.state.lock();
        while state.items.len() >= self.limit && !state.is_closed {
            if deadline.has_passed() {
                return false;
            }
            self.changed.wait_until(&mut state, deadline.instant());
        }
        true
    }

    /// Takes nothing more, and gives back what nobody has begun. What runs goes on.
    pub fn close(&self) -> Vec<T> {
        let mut state = self.state.lock();
        state.is_closed = true;
        self.changed.notify_all();
        state.items.drain(..).collect()
    }

    /// Items that wait, and items that run.
    pub fn counts(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.items.len(), state.running)
    }
}

impl<T> Drop for Running<'_, T> {
    fn drop(&mut self) {
        let mut state = self.queue.state.lock();
        state.running -= 1;
        self.queue.changed.notify_all();
    }
}
