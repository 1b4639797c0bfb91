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
    /// The link goes on over another connection.
    GoOn,
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
    frames: FrameLimits,
    state: Waiters<State>,
}

/// How many control frames a queue takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrameLimits {
    pub(crate) capacity: usize,
    /// The frame that reaches it is taken still.
    pub(crate) bytes: u64,
    /// A frame has its place until the peer has acknowledged it, not only until it was sent.
    pub(crate) are_kept: bool,
}

#[derive(Debug, Default)]
struct State {
    items: Classes<Item>,
    /// Operations queued or under way.
    op_count: usize,
    /// Those of the background among them.
    background_count: usize,
    /// Frames queued, and those that are kept.
    frame_count: usize,
    frame_bytes: u64,
    /// Reads of the peer queued.
    request_count: usize,
    progress: Option<u64>,
    /// Operations that have their place, whoever has them now.
    known: BTreeMap<OpId, Arc<Operation>>,
    broken: Option<Cause>,
    /// The link goes on over another connection.
    goes_on: bool,
    /// There is no connection at the moment: frames that are kept may not have come.
    is_away: bool,
    /// Somebody has the turn.
    is_taken: bool,
    /// What they send is a frame.
    is_sending_frame: bool,
    /// Frames that were not sent, or may not have come, when it was closed.
    lost_frame_count: usize,
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
    #[cfg(test)]
    pub(crate) fn new(peer: PeerId, op_capacity: usize, frame_capacity: usize) -> Arc<Self> {
        let frames = FrameLimits {
            capacity: frame_capacity,
            bytes: u64::MAX,
            are_kept: false,
        };
        Self::with_frames(peer, op_capacity, frames)
    }

    pub(crate) fn with_frames(peer: PeerId, op_capacity: usize, frames: FrameLimits) -> Arc<Self> {
        Arc::new(Self {
            peer,
            op_capacity,
            frames,
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
    /// executes itself. It is among [`Queue::operations`] then, until its place is given back.
    pub(crate) fn try_turn_for(&self, operation: &Arc<Operation>) -> Option<Turn<'_>> {
        self.state.with(|state| {
            let turn = self.turn_of_idle(state)?;
            state.known.insert(operation.posted.id, operation.clone());
            Some(turn)
        })
    }

    /// The turn alone.
    #[cfg(any(kv_loom, test))]
    pub(crate) fn try_turn(&self) -> Option<Turn<'_>> {
        self.state.with(|state| self.turn_of_idle(state))
    }

    fn turn_of_idle(&self, state: &mut State) -> Option<Turn<'_>> {
        let is_idle = !state.is_taken && state.closed.is_none() && !state.has_work();
        is_idle.then(|| self.take(state))
    }

    /// The turn and the operation that is next, if the worker is not at it: for a thread that would only wait.
    /// `may` is asked about the operation.
    pub(crate) fn next_operation(
        &self,
        may: impl FnOnce(&Operation) -> bool,
    ) -> Option<(Arc<Operation>, Turn<'_>)> {
        self.state.with(|state| {
            let is_busy = state.is_taken || state.closed.is_some();
            let is_urgent = state.is_urgent();
            match state.items.front() {
                Some(Item::Operation(operation)) if !is_busy && !is_urgent && may(operation) => {}
                _ => return None,
            }
            let Some(Item::Operation(operation)) = state.pop(self.frames.are_kept) else {
                return None;
            };
            Some((operation, self.take(state)))
        })
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
            let limits = &self.frames;
            if state.frame_count >= limits.capacity || state.frame_bytes >= limits.bytes {
                return Err(self.full(limits.capacity));
            }
            state.push_frame(frame);
            Ok(())
        })
    }

    /// The peer has so many more of the frames that are kept.
    pub(crate) fn frames_acknowledged(&self, count: usize, bytes: u64) {
        // Where they are not kept their places were given back when they were sent.
        if self.frames.are_kept {
            self.state.with(|state| state.release_frames(count, bytes));
        }
    }

    /// Asks to go on over another connection, before anything else.
    pub(crate) fn push_go_on(&self) {
        // A closed queue has nothing to go on with.
        let _ = self.push(|state| {
            state.goes_on = true;
            state.is_away = false;
            Ok(())
        });
    }

    /// There is no connection for now. Drops the reads of the peer that wait: they are asked for again over another
    /// one.
    pub(crate) fn suspend(&self) {
        self.state.with(|state| {
            state.is_away = true;
            state.request_count = 0;
            state.items.retain(|item| !matches!(item, Item::Request(_)));
        });
    }

    /// Appends a control frame of the engine itself; there are at most a few per region, so no bound.
    pub(crate) fn push_engine_frame(&self, frame: Vec<u8>) -> Result<(), Error> {
        self.push(|state| {
            state.push_frame(frame);
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
            let item = state.pop(self.frames.are_kept)?;
            state.is_taken = true;
            state.is_sending_frame = matches!(item, Item::Frame(_));
            Some(Some(item))
        });
        Some((item?, Turn(self)))
    }

    /// The next item, if there is one, for whoever runs the queue alone.
    #[cfg(any(kv_loom, test, feature = "sim"))]
    pub(crate) fn try_next(&self) -> Option<Item> {
        self.state.with(|state| match state.closed {
            Some(_) => None,
            None => state.pop(self.frames.are_kept),
        })
    }

    /// Refuses everything from now on, wakes everybody, and gives back what was queued.
    pub(crate) fn close(&self, cause: Cause) -> Vec<Item> {
        self.state.update(|state| {
            if state.closed.is_none() {
                state.lost_frame_count = match state.is_away {
                    true => state.frame_count,
                    false => state.unsent_frames(0),
                };
                state.closed = Some(cause);
            }
            state.progress = None;
            state.goes_on = false;
            state.frame_count = 0;
            state.frame_bytes = 0;
            state.request_count = 0;
            state.items.take_all()
        })
    }

    /// Blocks until nothing is queued, executed, under way or kept for another connection, or the queue is closed;
    /// `false` at the deadline.
    pub(crate) fn wait_drained(&self, deadline: Deadline) -> bool {
        let drained = |state: &mut State| {
            let is_idle = !state.is_taken && !state.has_work() && state.op_count == 0;
            let is_idle = is_idle && !(state.is_away && state.frame_count > 0);
            (state.closed.is_some() || is_idle).then_some(())
        };
        self.wait_for_room(deadline, drained).is_some()
    }

    /// Frames that were not sent, or may not have come; `in_link` of them the link has. Once the queue is closed,
    /// those that there were at that time.
    pub(crate) fn unsent_frames(&self, in_link: usize) -> usize {
        self.state.with(|state| match state.closed {
            Some(_) => state.lost_frame_count,
            None => state.unsent_frames(in_link),
        })
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
        self.is_urgent() || !self.items.is_empty()
    }

    /// The one that is being sent may be one of those in the link.
    fn unsent_frames(&self, in_link: usize) -> usize {
        let is_frame = |item: &&Item| matches!(item, Item::Frame(_));
        let queued = self.items.iter().filter(is_frame).count();
        queued + in_link.max(usize::from(self.is_sending_frame))
    }

    fn is_urgent(&self) -> bool {
        self.progress.is_some() || self.broken.is_some() || self.goes_on
    }

    fn push_frame(&mut self, frame: Vec<u8>) {
        self.frame_count += 1;
        self.frame_bytes += frame.len() as u64;
        self.items.push(Item::Frame(frame), Priority::Foreground);
    }

    fn release_frames(&mut self, count: usize, bytes: u64) {
        // A queue that was closed meanwhile has none.
        self.frame_count = self.frame_count.saturating_sub(count);
        self.frame_bytes = self.frame_bytes.saturating_sub(bytes);
    }

    /// Progress goes first: it must not wait behind a long queue.
    fn pop(&mut self, keeps_frames: bool) -> Option<Item> {
        if let Some(cause) = self.broken.take() {
            return Some(Item::Broken(cause));
        }
        // What was sent before goes before what was not.
        if std::mem::take(&mut self.goes_on) {
            return Some(Item::GoOn);
        }
        if let Some(counter) = self.progress.take() {
            return Some(Item::Progress(counter));
        }
        let item = self.items.pop()?;
        match &item {
            Item::Frame(frame) if !keeps_frames => self.release_frames(1, frame.len() as u64),
            Item::Request(_) => self.request_count = self.request_count.saturating_sub(1),
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
            state.is_sending_frame = false;
            ((), state.has_work() || state.room_waiters > 0)
        });
    }
}

/// A queue of frames for the models.
#[cfg(kv_loom)]
pub mod model {
    use super::{FrameLimits, Item, Queue, Turn};
    use crate::{error::Cause, ids::PeerId, sync::Arc};

    /// The queue of one peer.
    pub struct TurnQueue(Arc<Queue>);

    /// The right to use the link.
    pub struct HeldTurn<'a>(#[allow(dead_code)] Turn<'a>);

    impl TurnQueue {
        /// An empty one.
        #[allow(clippy::new_without_default)]
        pub fn new() -> Self {
            let frames = FrameLimits {
                capacity: 4,
                bytes: u64::MAX,
                are_kept: false,
            };
            Self(Queue::with_frames(PeerId(0), 4, frames))
        }

        /// As the owner of an agent does.
        pub fn push(&self, frame: u8) {
            self.0.push_frame(vec![frame]).expect("there is room");
        }

        /// For a thread that executes something itself.
        pub fn try_turn(&self) -> Option<HeldTurn<'_>> {
            self.0.try_turn().map(HeldTurn)
        }

        /// For the worker: the next frame, and the turn; `None` once the queue is closed.
        pub fn next(&self) -> Option<(u8, HeldTurn<'_>)> {
            let (item, turn) = self.0.next()?;
            match item {
                Item::Frame(frame) => Some((frame[0], HeldTurn(turn))),
                other => panic!("nobody has queued {other:?}"),
            }
        }

        /// Ends it.
        pub fn close(&self) {
            self.0.close(Cause::Shutdown);
        }
    }
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests;
