//! The bounded queue in front of a peer's link.
//!
//! One thread at a time has the [`Turn`] to use the link: the peer's worker as a rule, the thread that posts or
//! waits for an operation when the worker is not at it. So the link has one caller, and what was queued first
//! leaves first, whoever executes it.
//!
//! Admission is all or nothing (I-24): an operation takes a slot first, then its regions and its ledger
//! entry; if one of them is refused, dropping the others gives everything back. The slot is held until
//! the operation is terminal, so the bound covers what is queued and what is under way.
//! **What is protected by what.** One mutex guards all of it. Closing wakes the worker and everybody who
//! waits for room. Whoever gives a place or the turn back wakes nobody unless somebody waits for just that.
//! **Order.** Everything of the foreground, operations and frames alike, leaves in the order in which it came.
//! A background operation waits until nothing of the foreground is queued, but not for more than
//! 16 items in a row, and background operations never take more than half of the places.
//! **Lock order.** The mutex is a leaf.

use std::collections::BTreeMap;

use crate::{
    backend::{READ_WINDOW, ReadRequest},
    barrier::waiters::Waiters,
    deadline::Deadline,
    engine::handle::Operation,
    error::{Cause, Error, ErrorKind},
    ids::{OpId, PeerId},
    priority::{Classes, Priority},
    sync::Arc,
};

/// What the worker does next.
#[derive(Debug)]
pub(crate) enum Item {
    Operation(Arc<Operation>),
    /// An encoded control frame.
    Frame(Vec<u8>),
    /// "I am alive", with a counter.
    Progress(u64),
    /// The link was found broken by a thread that must not wait for its end.
    Broken(Cause),
    /// A read of the peer.
    Request(ReadRequest),
    /// An arrival that no operation stands behind.
    #[cfg(all(feature = "fault-injection", not(kv_loom)))]
    Forged(crate::Arrival, crate::Visibility),
}

#[derive(Debug)]
pub(crate) struct Queue {
    peer: PeerId,
    op_capacity: usize,
    frame_capacity: usize,
    state: Waiters<State>,
}

#[derive(Debug, Default)]
struct State {
    items: Classes<Item>,
    /// Operations queued or under way.
    op_count: usize,
    /// Those of the background among them.
    background_count: usize,
    /// Frames queued.
    frame_count: usize,
    /// Reads of the peer queued.
    request_count: usize,
    progress: Option<u64>,
    /// Operations that have their place, whoever has them now.
    known: BTreeMap<OpId, Arc<Operation>>,
    broken: Option<Cause>,
    /// Somebody has the turn.
    is_taken: bool,
    /// Threads that wait for a place, or for the end of everything.
    room_waiters: usize,
    closed: Option<Cause>,
}

/// The right to use the link; given back on drop.
#[derive(Debug)]
#[must_use]
pub(crate) struct Turn<'a>(&'a Queue);

/// The place of one operation; given back on drop.
#[derive(Debug)]
#[must_use]
pub(crate) struct OpSlot {
    queue: Arc<Queue>,
    priority: Priority,
    /// Which one has it.
    op: Option<OpId>,
}

impl Queue {
    pub(crate) fn new(peer: PeerId, op_capacity: usize, frame_capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            peer,
            op_capacity,
            frame_capacity,
            state: Waiters::new(State::default()),
        })
    }

    /// A place, if there is one now.
    pub(crate) fn reserve(this: &Arc<Self>, priority: Priority) -> Result<OpSlot, Error> {
        let capacity = this.op_capacity;
        match this.state.with(|state| state.reserve(capacity, priority)) {
            Some(Ok(())) => Ok(OpSlot::new(this, priority)),
            Some(Err(cause)) => Err(this.down(cause)),
            None => Err(this.full(this.op_capacity)),
        }
    }

    /// A place; blocks until there is one, the queue closes, or the deadline passes.
    pub(crate) fn reserve_within(
        this: &Arc<Self>,
        priority: Priority,
        deadline: Deadline,
    ) -> Result<OpSlot, Error> {
        let reserved =
            this.wait_for_room(deadline, |state| state.reserve(this.op_capacity, priority));
        match reserved {
            Some(Ok(())) => Ok(OpSlot::new(this, priority)),
            Some(Err(cause)) => Err(this.down(cause)),
            None => Err(this.full(this.op_capacity)),
        }
    }

    /// Sleeps until `check` has an answer; what it looks at changes when places are given back.
    fn wait_for_room<R>(
        &self,
        deadline: Deadline,
        mut check: impl FnMut(&mut State) -> Option<R>,
    ) -> Option<R> {
        if let Some(answer) = self.state.with(&mut check) {
            return Some(answer);
        }
        self.state.with(|state| state.room_waiters += 1);
        let answer = self.state.wait(deadline, check);
        self.state.with(|state| state.room_waiters -= 1);
        answer
    }

    /// The turn, if the link is idle and nothing is queued: for an operation with a place that the caller
    /// executes itself.
    pub(crate) fn try_turn(&self) -> Option<Turn<'_>> {
        self.state.with(|state| {
            let is_idle = !state.is_taken && state.closed.is_none() && !state.has_work();
            is_idle.then(|| self.take(state))
        })
    }

    /// The turn and the operation that is next, if the worker is not at it: for a thread that would only wait.
    /// `may` is asked about the operation.
    pub(crate) fn next_operation(
        &self,
        may: impl FnOnce(&Operation) -> bool,
    ) -> Option<(Arc<Operation>, Turn<'_>)> {
        self.state.with(|state| {
            let is_busy = state.is_taken || state.closed.is_some();
            let is_urgent = state.progress.is_some() || state.broken.is_some();
            match state.items.front() {
                Some(Item::Operation(operation)) if !is_busy && !is_urgent && may(operation) => {}
                _ => return None,
            }
            let Some(Item::Operation(operation)) = state.pop() else {
                return None;
            };
            Some((operation, self.take(state)))
        })
    }

    /// Shows an operation that was never queued among [`Queue::operations`], until its place is given back.
    pub(crate) fn remember(&self, operation: &Arc<Operation>) {
        let (op, known) = (operation.posted.id, operation.clone());
        self.state.with(|state| state.known.insert(op, known));
    }

    fn take(&self, state: &mut State) -> Turn<'_> {
        state.is_taken = true;
        Turn(self)
    }

    /// Hands an operation with a place to the worker.
    pub(crate) fn push_operation(
        &self,
        operation: Arc<Operation>,
        priority: Priority,
    ) -> Result<(), Error> {
        let (op, known) = (operation.posted.id, operation.clone());
        let item = Item::Operation(operation);
        self.push(|state| {
            state.known.insert(op, known);
            state.items.push(item, priority);
            Ok(())
        })
    }

    /// Appends a control frame.
    pub(crate) fn push_frame(&self, frame: Vec<u8>) -> Result<(), Error> {
        self.push(|state| {
            if state.frame_count >= self.frame_capacity {
                return Err(self.full(self.frame_capacity));
            }
            state.frame_count += 1;
            state.items.push(Item::Frame(frame), Priority::Foreground);
            Ok(())
        })
    }

    /// Appends a control frame of the engine itself; there are at most a few per region, so no bound.
    pub(crate) fn push_engine_frame(&self, frame: Vec<u8>) -> Result<(), Error> {
        self.push(|state| {
            state.frame_count += 1;
            state.items.push(Item::Frame(frame), Priority::Foreground);
            Ok(())
        })
    }

    /// Appends a read of the peer; `false` when it has asked for more than is allowed. A closed queue takes
    /// and forgets it: the connection has ended.
    pub(crate) fn push_request(&self, request: ReadRequest) -> bool {
        self.state.update_if(|state| {
            if state.closed.is_some() {
                return (true, false);
            }
            let has_room = state.request_count < READ_WINDOW;
            if has_room {
                state.request_count += 1;
                state
                    .items
                    .push(Item::Request(request), Priority::Foreground);
            }
            (has_room, has_room && !state.is_taken)
        })
    }

    #[cfg(all(feature = "fault-injection", not(kv_loom)))]
    pub(crate) fn push_forged(
        &self,
        arrival: crate::Arrival,
        level: crate::Visibility,
    ) -> Result<(), Error> {
        self.push(|state| {
            state
                .items
                .push(Item::Forged(arrival, level), Priority::Foreground);
            Ok(())
        })
    }

    /// Asks for one progress report; several in a row become one.
    pub(crate) fn push_progress(&self, counter: u64) {
        // A closed queue has nobody to tell.
        let _ = self.push(|state| {
            state.progress = Some(counter);
            Ok(())
        });
    }

    /// Has the worker end the connection.
    pub(crate) fn push_broken(&self, cause: Cause) {
        // A closed queue is that of an ended connection.
        let _ = self.push(|state| {
            state.broken.get_or_insert(cause);
            Ok(())
        });
    }

    fn push(&self, change: impl FnOnce(&mut State) -> Result<(), Error>) -> Result<(), Error> {
        self.state.update_if(|state| match &state.closed {
            Some(cause) => (Err(self.down(cause.clone())), false),
            // Whoever has the turn looks at the queue when it gives it back.
            None => (change(state), !state.is_taken),
        })
    }

    /// The next item and the turn to execute it; sleeps until there is one. `None` once the queue is closed.
    pub(crate) fn next(&self) -> Option<(Item, Turn<'_>)> {
        let item = self.state.wait_owned(|state| {
            if state.closed.is_some() {
                return Some(None);
            }
            if state.is_taken {
                return None;
            }
            let item = state.pop()?;
            state.is_taken = true;
            Some(Some(item))
        });
        Some((item?, Turn(self)))
    }

    /// The next item, if there is one, for whoever runs the queue alone.
    #[cfg(any(kv_loom, test, feature = "sim"))]
    pub(crate) fn try_next(&self) -> Option<Item> {
        self.state.with(|state| match state.closed {
            Some(_) => None,
            None => state.pop(),
        })
    }

    /// Refuses everything from now on, wakes everybody, and gives back what was queued.
    pub(crate) fn close(&self, cause: Cause) -> Vec<Item> {
        self.state.update(|state| {
            state.closed.get_or_insert(cause);
            state.progress = None;
            state.frame_count = 0;
            state.request_count = 0;
            state.items.take_all()
        })
    }

    /// Blocks until nothing is queued, executed or under way, or the queue is closed; `false` at the deadline.
    pub(crate) fn wait_drained(&self, deadline: Deadline) -> bool {
        let drained = |state: &mut State| {
            let is_idle = !state.is_taken && !state.has_work() && state.op_count == 0;
            (state.closed.is_some() || is_idle).then_some(())
        };
        self.wait_for_room(deadline, drained).is_some()
    }

    /// The operations that are not terminal.
    pub(crate) fn operations(&self) -> Vec<Arc<Operation>> {
        self.state
            .with(|state| state.known.values().cloned().collect())
    }

    fn full(&self, capacity: usize) -> Error {
        ErrorKind::QueueFull {
            peer: self.peer,
            capacity,
        }
        .into()
    }

    fn down(&self, cause: Cause) -> Error {
        ErrorKind::PeerDown {
            peer: self.peer,
            cause,
        }
        .into()
    }
}

impl State {
    fn reserve(&mut self, capacity: usize, priority: Priority) -> Option<Result<(), Cause>> {
        if let Some(cause) = &self.closed {
            return Some(Err(cause.clone()));
        }
        let is_background = priority == Priority::Background;
        let is_over = is_background && self.background_count >= (capacity / 2).max(1);
        if self.op_count >= capacity || is_over {
            return None;
        }
        self.op_count += 1;
        self.background_count += usize::from(is_background);
        Some(Ok(()))
    }

    fn has_work(&self) -> bool {
        let is_urgent = self.progress.is_some() || self.broken.is_some();
        is_urgent || !self.items.is_empty()
    }

    /// Progress goes first: it must not wait behind a long queue.
    fn pop(&mut self) -> Option<Item> {
        if let Some(cause) = self.broken.take() {
            return Some(Item::Broken(cause));
        }
        if let Some(counter) = self.progress.take() {
            return Some(Item::Progress(counter));
        }
        let item = self.items.pop()?;
        match item {
            Item::Frame(_) => self.frame_count -= 1,
            Item::Request(_) => self.request_count -= 1,
            _ => {}
        }
        Some(item)
    }
}

impl OpSlot {
    fn new(queue: &Arc<Queue>, priority: Priority) -> Self {
        Self {
            queue: queue.clone(),
            priority,
            op: None,
        }
    }

    /// Says which operation has it.
    pub(crate) fn take_by(&mut self, op: OpId) {
        self.op = Some(op);
    }
}

impl Drop for OpSlot {
    fn drop(&mut self) {
        let is_background = self.priority == Priority::Background;
        let known = self.queue.state.update_if(|state| {
            state.op_count -= 1;
            state.background_count -= usize::from(is_background);
            let known = self.op.and_then(|op| state.known.remove(&op));
            (known, state.room_waiters > 0)
        });
        // With the mutex free. Whoever ends it has it still.
        drop(known);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.state.update_if(|state| {
            state.is_taken = false;
            ((), state.has_work() || state.room_waiters > 0)
        });
    }
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::priority::TURNS;

    #[test]
    fn a_full_queue_is_retryable_and_a_freed_place_is_taken() {
        let queue = Queue::new(PeerId(1), 1, 1);
        let slot = Queue::reserve(&queue, Priority::Foreground).unwrap();
        let error = Queue::reserve(&queue, Priority::Foreground).unwrap_err();
        assert!(error.is_retryable(), "{error}");
        assert!(
            Queue::reserve_within(&queue, Priority::Foreground, Deadline::after_ms(1)).is_err()
        );
        drop(slot);
        let _slot = Queue::reserve(&queue, Priority::Foreground).unwrap();
    }

    #[test]
    fn closing_wakes_whoever_waits_for_room_and_the_worker() {
        let queue = Queue::new(PeerId(1), 1, 1);
        let _slot = Queue::reserve(&queue, Priority::Foreground).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                Queue::reserve_within(&queue, Priority::Foreground, Deadline::after_ms(60_000))
                    .err()
            });
            let worker = scope.spawn(|| queue.next().is_none());
            queue.close(Cause::Shutdown);
            let error = waiter.join().unwrap().unwrap();
            assert_eq!(
                *error.kind(),
                ErrorKind::PeerDown {
                    peer: PeerId(1),
                    cause: Cause::Shutdown
                }
            );
            assert!(worker.join().unwrap());
        });
    }

    #[test]
    fn the_background_waits_for_the_foreground_but_not_for_ever() {
        let queue = Queue::new(PeerId(1), 4, 64);
        let background = Item::Frame(vec![0]);
        queue.state.with(|state| {
            state.frame_count += 1;
            state.items.push(background, Priority::Background);
        });
        for number in 1..=TURNS + 2 {
            queue.push_frame(vec![number as u8]).unwrap();
        }
        let order: Vec<u8> = std::iter::from_fn(|| queue.try_next())
            .map(|item| match item {
                Item::Frame(bytes) => bytes[0],
                other => panic!("{other:?}"),
            })
            .collect();
        let turns = TURNS as u8;
        let expected: Vec<u8> = (1..=turns).chain([0, turns + 1, turns + 2]).collect();
        assert_eq!(order, expected);
    }

    #[test]
    fn the_background_takes_half_of_the_places_at_most() {
        let queue = Queue::new(PeerId(1), 4, 1);
        let reserve = |priority| Queue::reserve(&queue, priority);
        let held: Vec<_> = (0..2)
            .map(|_| reserve(Priority::Background).unwrap())
            .collect();
        assert!(reserve(Priority::Background).unwrap_err().is_retryable());
        let _others: Vec<_> = (0..2)
            .map(|_| reserve(Priority::Foreground).unwrap())
            .collect();
        assert!(reserve(Priority::Foreground).is_err());
        drop(held);
        let _again = reserve(Priority::Background).unwrap();
    }

    #[test]
    fn frames_are_bounded_and_progress_overtakes_them() {
        let queue = Queue::new(PeerId(1), 1, 1);
        queue.push_frame(vec![1]).unwrap();
        assert!(queue.push_frame(vec![2]).unwrap_err().is_retryable());
        queue.push_progress(1);
        queue.push_progress(2);
        assert!(matches!(queue.try_next(), Some(Item::Progress(2))));
        assert!(matches!(queue.try_next(), Some(Item::Frame(f)) if f == [1]));
        assert!(queue.try_next().is_none());
    }

    #[test]
    fn the_turn_is_for_one_and_what_was_queued_first_goes_first() {
        let queue = Queue::new(PeerId(1), 4, 4);
        let turn = queue.try_turn().unwrap();
        assert!(queue.try_turn().is_none(), "somebody has it");
        queue.push_frame(vec![1]).unwrap();
        std::thread::scope(|scope| {
            // It sleeps while somebody has the turn, and is woken when it is given back.
            let worker = scope.spawn(|| {
                let (item, _turn) = queue.next().unwrap();
                matches!(item, Item::Frame(frame) if frame == [1])
            });
            assert!(queue.try_turn().is_none());
            drop(turn);
            assert!(worker.join().unwrap());
        });
        drop(queue.try_turn().unwrap());
        queue.push_frame(vec![2]).unwrap();
        assert!(queue.try_turn().is_none(), "a frame is queued");
        assert!(
            queue.next_operation(|_| true).is_none(),
            "a frame is for the worker"
        );
        queue.push_broken(Cause::Shutdown);
        assert!(matches!(queue.try_next(), Some(Item::Broken(_))));
        queue.close(Cause::Shutdown);
        assert!(queue.try_turn().is_none());
    }

    #[test]
    fn what_is_being_sent_has_not_been_sent() {
        let queue = Queue::new(PeerId(1), 1, 1);
        queue.push_frame(vec![1]).unwrap();
        let (_, turn) = queue.next().unwrap();
        assert!(!queue.wait_drained(Deadline::now()));
        drop(turn);
        assert!(queue.wait_drained(Deadline::now()));
    }

    #[test]
    fn whoever_waits_for_the_end_of_everything_hears_of_the_last_frame() {
        let queue = Queue::new(PeerId(1), 1, 1);
        queue.push_frame(vec![1]).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| queue.wait_drained(Deadline::after_ms(60_000)));
            let (_, turn) = queue.next().unwrap();
            drop(turn);
            assert!(waiter.join().unwrap());
        });
    }
}
