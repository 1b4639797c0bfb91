//! [`Posts`]: the operations of a move, of which a thread may still be posting the last ones.
//!
//! **What is protected by what.** One mutex guards the list. **Lock order.** It is a leaf.

use kvgate_transfer::sync::{Arc, Condvar, Mutex};
use kvgate_transfer::{Cause, Deadline};

/// What was posted so far, and whether that is all.
///
/// Whoever posts says of each operation that it was posted, and of the last one that it was the last. Whoever gives the
/// move up learns of every operation: of those before from [`Posts::stop`], and of one that is posted at that moment
/// the thread that posts it, from [`Posts::push`].
#[derive(Debug)]
pub struct Posts<H> {
    state: Mutex<State<H>>,
    /// Told when the last one was posted.
    over: Condvar,
}

#[derive(Debug)]
struct State<H> {
    handles: Vec<Arc<H>>,
    is_stopped: bool,
    /// Why the rest was not posted, or that all were. `None` while somebody posts.
    end: Option<Result<(), Cause>>,
}

impl<H> Posts<H> {
    /// Nothing was posted yet.
    pub fn new() -> Posts<H> {
        Posts {
            state: Mutex::new(State {
                handles: Vec::new(),
                is_stopped: false,
                end: None,
            }),
            over: Condvar::default(),
        }
    }

    /// Whether another operation is still of use.
    pub fn is_wanted(&self) -> bool {
        !self.state.lock().is_stopped
    }

    /// Enters an operation that was posted. `false` when the move was given up meanwhile: nobody else cancels it.
    pub fn push(&self, handle: &Arc<H>) -> bool {
        let mut state = self.state.lock();
        state.handles.push(Arc::clone(handle));
        !state.is_stopped
    }

    /// No other operation will be posted: all of them were, or why not.
    pub fn finish(&self, end: Result<(), Cause>) {
        let mut state = self.state.lock();
        state.end = Some(end);
        self.over.notify_all();
    }

    /// Asks for no further operation. Answers those that were posted.
    pub fn stop(&self) -> Vec<Arc<H>> {
        let mut state = self.state.lock();
        state.is_stopped = true;
        state.handles.clone()
    }

    /// What was posted so far.
    pub fn so_far(&self) -> Vec<Arc<H>> {
        self.state.lock().handles.clone()
    }

    /// Whether no other operation will be posted. What [`Posts::so_far`] answers behind that is all.
    pub fn is_over(&self) -> bool {
        self.state.lock().end.is_some()
    }

    /// Why not every operation was posted, if that is known.
    pub fn failure(&self) -> Option<Cause> {
        self.state.lock().end.clone()?.err()
    }

    /// Blocks until no other operation will be posted. `false` at the deadline, which changes nothing.
    pub fn wait_over(&self, deadline: Deadline) -> bool {
        let mut state = self.state.lock();
        while state.end.is_none() {
            if deadline.has_passed() {
                return false;
            }
            self.over.wait_until(&mut state, deadline.instant());
        }
        true
    }
}

impl<H> Default for Posts<H> {
    fn default() -> Posts<H> {
        Posts::new()
    }
}
