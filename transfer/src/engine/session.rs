//! A session: what two incarnations have under way, beyond the life of a single connection.
//!
//! Each direction numbers its *items* (writes, control messages) from 1. The receiver handles them in order, each
//! once, and says how far it has come; the sender keeps an item until then. When a connection breaks both sides keep
//! the session. The next connection begins with the number that the other side has handled, and everything behind it
//! is sent again, in the old order, under the old numbers (I-26, I-27).
//!
//! Nothing here knows a socket or a clock: a backend brings connections (`C`), items (`T`) and reasons of a
//! refusal (`R`), and deadlines.
//!
//! **Who calls what.** [`Session::push`] and [`Session::pump`] belong to whoever has the turn of the peer's queue, so
//! one thread at a time; [`Session::answered`], [`Session::suspend`] and [`Session::resume`] to the receive thread;
//! [`Session::close`] to anybody.
//! **What is protected by what.** One mutex guards a session, another one its [`Handover`]; both are leaves, and
//! neither is held while an item is sent or a callback runs.

use std::collections::VecDeque;

use crate::{barrier::waiters::Waiters, deadline::Deadline, sync::Mutex};

/// A number that the other side cannot have meant: nothing so far was sent, or this was let go long ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfRange(pub u64);

/// What one direction has sent and will send.
#[derive(Debug)]
pub struct Session<C, T, R> {
    state: Mutex<State<C, T, R>>,
}

#[derive(Debug)]
struct State<C, T, R> {
    /// In order; the first one has the number `first`.
    items: VecDeque<T>,
    first: u64,
    /// The next one to be sent over this connection.
    cursor: u64,
    /// The last one that was begun to be sent, over any connection.
    begun: u64,
    connection: Option<C>,
    /// Connections so far: the number of the current one.
    connection_count: u64,
    /// The connection over which the item at the cursor is being sent at this moment.
    sending: Option<u64>,
    /// The answer to that very item, which came while its sender had not come back.
    early: Option<Option<R>>,
    is_closed: bool,
}

impl<C: Clone, T: Clone, R> Session<C, T, R> {
    /// A session over its first connection, which has the number 1.
    pub fn new(connection: C) -> Self {
        Self {
            state: Mutex::new(State {
                items: VecDeque::new(),
                first: 1,
                cursor: 1,
                begun: 0,
                connection: Some(connection),
                connection_count: 1,
                sending: None,
                early: None,
                is_closed: false,
            }),
        }
    }

    /// Takes an item in, behind all others. It is kept until it was answered. `None`: the session is over.
    pub fn push(&self, item: T) -> Option<u64> {
        let mut state = self.state.lock();
        if state.is_closed {
            return None;
        }
        state.items.push_back(item);
        Some(state.first + state.items.len() as u64 - 1)
    }

    /// Sends what was not sent over the current connection. `send` gets the connection with its number, the number
    /// of the item, the item, and whether it may have been sent before; it answers whether the connection took it.
    /// `tell` hears of items that were answered meanwhile.
    pub fn pump(
        &self,
        mut send: impl FnMut((u64, &C), u64, &T, bool) -> bool,
        mut tell: impl FnMut(T, Option<R>),
    ) {
        loop {
            let Some((connection, number, item, is_again)) = self.state.lock().begin() else {
                return;
            };
            let is_sent = send((connection.0, &connection.1), number, &item, is_again);
            let (is_over, early) = self.state.lock().end(connection.0, number, is_sent);
            if let Some(refusal) = early {
                self.settle(number, refusal, &mut tell);
            }
            if is_over {
                return;
            }
        }
    }

    /// The other side has handled every item up to `through`, and refused the last of them if there is a
    /// `refusal`. `tell` gets each item that is let go, once.
    ///
    /// # Errors
    /// Not all of these items have been sent over this connection.
    pub fn answered(
        &self,
        connection: u64,
        through: u64,
        refusal: Option<R>,
        mut tell: impl FnMut(T, Option<R>),
    ) -> Result<(), OutOfRange> {
        {
            let mut state = self.state.lock();
            if state.connection.is_none() || state.connection_count != connection {
                return Ok(()); // it will be told again over the next one
            }
            let is_under_way = through == state.cursor && state.sending == Some(connection);
            if through >= state.cursor && !is_under_way {
                return Err(OutOfRange(through));
            }
            if is_under_way {
                // Whoever sends it may still read its memory (I-21): the end of it comes with their return.
                state.early.get_or_insert(refusal);
                drop(state);
                self.settle(through - 1, None, &mut tell);
                return Ok(());
            }
        }
        self.settle(through, refusal, &mut tell);
        Ok(())
    }

    /// Lets go of everything up to `through`, in order.
    fn settle(&self, through: u64, refusal: Option<R>, tell: &mut impl FnMut(T, Option<R>)) {
        let mut refusal = refusal;
        loop {
            let next = self.state.lock().pop(through);
            let Some((number, item)) = next else { return };
            let refusal = (number == through).then(|| refusal.take()).flatten();
            tell(item, refusal);
        }
    }

    /// The item with this number, while it is kept.
    pub fn item(&self, number: u64) -> Option<T> {
        let state = self.state.lock();
        let index = number.checked_sub(state.first)?;
        state.items.get(usize::try_from(index).ok()?).cloned()
    }

    /// The connection that stands, with its number.
    pub fn connection(&self) -> Option<(u64, C)> {
        let state = self.state.lock();
        Some((state.connection_count, state.connection.clone()?))
    }

    /// Items that were not answered.
    #[cfg(any(test, kv_loom))]
    pub fn unanswered_count(&self) -> usize {
        self.state.lock().items.len()
    }

    /// How many items of which `is` holds have not been sent over the connection that stands; without one, how many
    /// were not answered.
    pub fn unsent_count(&self, is: impl Fn(&T) -> bool) -> usize {
        let state = self.state.lock();
        let sent = match state.connection {
            Some(_) => state.cursor.saturating_sub(state.first),
            None => 0,
        };
        let sent = usize::try_from(sent).unwrap_or(usize::MAX);
        state
            .items
            .iter()
            .skip(sent)
            .filter(|item| is(item))
            .count()
    }

    /// The last item that was answered.
    pub fn answered_through(&self) -> u64 {
        self.state.lock().first - 1
    }

    /// The connection has broken. The caller has seen to it that nothing more is sent over it.
    pub fn suspend(&self) {
        let mut state = self.state.lock();
        state.connection = None;
        state.early = None;
    }

    /// Whether the other side can have handled so much of what this one has sent.
    ///
    /// # Errors
    /// It says more than was ever begun, or less than it has acknowledged.
    pub fn check_received(&self, received: u64) -> Result<(), OutOfRange> {
        let state = self.state.lock();
        match received > state.begun || received + 1 < state.first {
            true => Err(OutOfRange(received)),
            false => Ok(()),
        }
    }

    /// Goes on over another connection, behind what the other side has handled. Gives back its number; `None`: the
    /// session is over.
    ///
    /// # Errors
    /// As [`Session::check_received`].
    pub fn resume(&self, connection: C, received: u64) -> Result<Option<u64>, OutOfRange> {
        self.check_received(received)?;
        let mut state = self.state.lock();
        if state.is_closed {
            return Ok(None);
        }
        state.connection_count += 1;
        state.connection = Some(connection);
        state.cursor = received + 1;
        state.early = None;
        Ok(Some(state.connection_count))
    }

    /// The session is over: nothing is sent again, nobody is told of what was kept.
    pub fn close(&self) -> Option<C> {
        let (connection, items) = {
            let mut state = self.state.lock();
            state.is_closed = true;
            state.early = None;
            let items = std::mem::take(&mut state.items);
            (state.connection.take(), items)
        };
        drop(items); // with the mutex free
        connection
    }

    /// Whether [`Session::close`] was called.
    pub fn is_closed(&self) -> bool {
        self.state.lock().is_closed
    }
}

/// A connection with its number, the number of an item, the item, and whether it may have been sent before.
type Begun<C, T> = ((u64, C), u64, T, bool);

impl<C: Clone, T: Clone, R> State<C, T, R> {
    fn begin(&mut self) -> Option<Begun<C, T>> {
        let connection = self.connection.clone()?;
        let index = usize::try_from(self.cursor.checked_sub(self.first)?).ok()?;
        let item = self.items.get(index)?.clone();
        let is_again = self.cursor <= self.begun;
        self.begun = self.begun.max(self.cursor);
        self.sending = Some(self.connection_count);
        Some((
            (self.connection_count, connection),
            self.cursor,
            item,
            is_again,
        ))
    }

    /// Whether there is nothing more to be sent now, and the answer to the item if it is there.
    fn end(&mut self, connection: u64, number: u64, is_sent: bool) -> (bool, Option<Option<R>>) {
        self.sending = None;
        let is_current = self.connection.is_some() && self.connection_count == connection;
        if !is_current {
            return (self.connection.is_none(), None);
        }
        if !is_sent {
            return (true, None);
        }
        self.cursor = number + 1;
        (false, self.early.take())
    }

    fn pop(&mut self, through: u64) -> Option<(u64, T)> {
        if self.first > through {
            return None;
        }
        let item = self.items.pop_front()?;
        self.first += 1;
        Some((self.first - 1, item))
    }
}

/// What the receiver does with an item of this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Take {
    /// It is the next one.
    Fresh,
    /// It was handled.
    Duplicate,
    /// One before it has not come: no honest sender does that.
    Gap,
}

/// How far one direction has come at its receiver. Belongs to the receive thread.
#[derive(Clone, Copy, Debug)]
pub struct Received {
    through: u64,
    told: u64,
    untold_bytes: u64,
    every_items: u64,
    every_bytes: u64,
}

impl Received {
    /// Nothing has come. The sender wants to hear once for each `every_items` items and each `every_bytes` bytes.
    pub fn new(every_items: u64, every_bytes: u64) -> Self {
        Self {
            through: 0,
            told: 0,
            untold_bytes: 0,
            every_items: every_items.max(1),
            every_bytes,
        }
    }

    /// What to do with this item.
    pub fn take(&self, number: u64) -> Take {
        match number {
            n if n <= self.through => Take::Duplicate,
            n if n == self.through + 1 => Take::Fresh,
            _ => Take::Gap,
        }
    }

    /// The next item was handled; it had so many bytes. Whether the sender is to be told now.
    #[must_use]
    pub fn handled(&mut self, bytes: u64) -> bool {
        self.through += 1;
        self.untold_bytes = self.untold_bytes.saturating_add(bytes);
        self.through - self.told >= self.every_items || self.untold_bytes > self.every_bytes
    }

    /// The sender is being told.
    pub fn tell(&mut self) -> u64 {
        self.told = self.through;
        self.untold_bytes = 0;
        self.through
    }

    /// The last item that was handled.
    pub fn through(&self) -> u64 {
        self.through
    }
}

/// Where a receive thread whose connection has broken waits for the next one, which another thread brings.
///
/// First the new one is *claimed*: that names how far the session has come, and is granted only once the receive
/// thread is past the old one. Then it is given, or the claim is dropped. One claim at a time.
#[derive(Debug)]
pub struct Handover<H> {
    state: Waiters<Hand<H>>,
}

#[derive(Debug)]
struct Hand<H> {
    /// The receive thread waits here, and has handled so much.
    parked: Option<u64>,
    is_claimed: bool,
    given: Option<H>,
    is_closed: bool,
}

/// Why there is no claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unclaimed {
    /// The session is over.
    Over,
    /// Somebody else has a claim, or the receive thread did not come in time.
    Busy,
}

/// How a wait for the next connection ended.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum Parked<H> {
    /// With the next one.
    Given(H),
    /// The time is over, and so is the session: no claim is granted from now on.
    TimedOut,
    /// It was closed.
    Closed,
}

impl<H> Default for Handover<H> {
    fn default() -> Self {
        Self::new()
    }
}

impl<H> Handover<H> {
    /// Nobody waits.
    pub fn new() -> Self {
        Self {
            state: Waiters::new(Hand {
                parked: None,
                is_claimed: false,
                given: None,
                is_closed: false,
            }),
        }
    }

    /// Claims the place of the next connection: `end_old` ends the one that may still stand. Gives back how much
    /// was handled.
    ///
    /// # Errors
    /// See [`Unclaimed`].
    pub fn claim(&self, end_old: impl FnOnce(), deadline: Deadline) -> Result<u64, Unclaimed> {
        let older = self.state.with(|hand| match hand {
            Hand {
                is_closed: true, ..
            } => Err(Unclaimed::Over),
            Hand {
                is_claimed: true, ..
            } => Err(Unclaimed::Busy),
            _ => {
                hand.is_claimed = true;
                Ok(hand.given.take()) // the newest wins
            }
        })?;
        drop(older);
        end_old();
        let parked = self
            .state
            .wait(deadline, |hand| match (hand.is_closed, hand.parked) {
                (true, _) => Some(Err(Unclaimed::Over)),
                (false, Some(received)) => Some(Ok(received)),
                (false, None) => None,
            });
        match parked {
            Some(Ok(received)) => Ok(received),
            other => {
                self.release();
                Err(match other {
                    Some(Err(why)) => why,
                    _ => Unclaimed::Busy,
                })
            }
        }
    }

    /// Whoever has the claim brings the connection. Gives it back when the session is over.
    pub fn give(&self, next: H) -> Option<H> {
        self.state.update(|hand| {
            hand.is_claimed = false;
            if hand.is_closed {
                return Some(next);
            }
            hand.given = Some(next);
            None
        })
    }

    /// Whether somebody has a claim: the receive thread that goes on over another connection is to leave it.
    pub fn is_claimed(&self) -> bool {
        self.state.with(|hand| hand.is_claimed)
    }

    /// Whoever has the claim has no connection after all.
    pub fn release(&self) {
        self.state.update(|hand| hand.is_claimed = false);
    }

    /// The receive thread is past its connection, and waits until `deadline` for the next one; longer while somebody
    /// has a claim, who has a deadline of their own.
    pub fn park(&self, received: u64, deadline: Deadline) -> Parked<H> {
        self.state.update(|hand| hand.parked = Some(received));
        let given = |hand: &mut Hand<H>| {
            if hand.is_closed {
                return Some(Parked::Closed);
            }
            let next = hand.given.take()?;
            hand.parked = None;
            Some(Parked::Given(next))
        };
        let mut until = deadline;
        loop {
            if let Some(end) = self.state.wait(until, given) {
                return end;
            }
            let is_over = self.state.update(|hand| {
                let is_over = !hand.is_claimed && hand.given.is_none();
                hand.is_closed |= is_over;
                is_over
            });
            if is_over {
                return Parked::TimedOut;
            }
            until = Deadline::after_ms(CLAIM_LOOK_MS);
        }
    }

    /// The session is over.
    pub fn close(&self) {
        let given = self.state.update(|hand| {
            hand.is_closed = true;
            hand.given.take()
        });
        drop(given); // with the mutex free
    }
}

/// How often a receive thread whose time is over looks whether the claim that it waits for is still there.
const CLAIM_LOOK_MS: u64 = 50;

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests;
