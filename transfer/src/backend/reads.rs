//! The reads that this side has asked its peer for, over a stream.
//!
//! An operation is asked for in parts, at most [`READ_WINDOW`] at a time over the whole connection, so
//! that the peer keeps few requests and its own operations get their turn; parts of the foreground go first,
//! by the rule of the engine's queue. The answers may come in any
//! order. An operation has ended when every part that was asked for is answered: until then its bytes may
//! come, whatever has become of the others, and the engine keeps its memory (I-21). When the connection ends
//! instead, the engine takes the memory back once the receive thread is past it.
//!
//! **What is protected by what.** One mutex guards all of it. **Lock order.** It is a leaf, and free while a
//! payload is received.

use std::collections::BTreeMap;
use std::ops::Range;

use super::RemoteRun;
use super::parts::Parts;
use super::{PostedOp, READ_WINDOW};
use crate::agent::wire::{self, Refusal};
use crate::ids::OpId;
use crate::landed::Landing;
use crate::mem::iovec::Held;
use crate::mem::span::SlotRun;
use crate::priority::Classes;
use crate::sync::{Arc, Mutex};

/// The reads of one connection.
pub(super) struct Reads {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next_request: u64,
    /// Operations of which something was not asked for yet.
    waiting: Classes<OpId>,
    operations: BTreeMap<OpId, Operation>,
    asked: BTreeMap<u64, Asked>,
    /// Parts whose answer the receive thread has begun to take: each has its place in the window, since it is asked
    /// for again if the connection breaks before its end.
    in_hand: usize,
}

struct Operation {
    parts: Parts,
    /// Everything was asked for, or nothing more will be.
    is_asked: bool,
    unanswered: usize,
    refusal: Option<Refusal>,
    landing: Arc<Landing>,
}

/// A part that was asked for, and where it goes.
pub(super) struct Asked {
    pub(super) op: OpId,
    /// The connection by which it was asked for last.
    connection: u64,
    remote: Vec<RemoteRun>,
    pub(super) payload_bytes: u64,
    pub(super) local: Vec<SlotRun>,
    /// Which slots of the operation.
    pub(super) slots: Range<u64>,
    pub(super) landing: Arc<Landing>,
}

/// The engine has the operation's regions held until it hears of its end, which comes after this part.
impl Held for Asked {}

impl Reads {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(State::default()),
        }
    }

    /// Takes an operation in; [`Reads::ask`] asks for it.
    pub(super) fn add(&self, op: &PostedOp) {
        let mut state = self.state.lock();
        let operation = Operation {
            parts: Parts::new(op.runs.clone()),
            is_asked: false,
            unanswered: 0,
            refusal: None,
            landing: op.landing.clone(),
        };
        state.operations.insert(op.id, operation);
        state.waiting.push(op.id, op.priority);
    }

    /// Appends the next request to `words`, which go over this connection; `false` when there is none to be sent
    /// now.
    pub(super) fn ask(&self, connection: u64, words: &mut Vec<u8>) -> bool {
        let mut state = self.state.lock();
        let State {
            next_request,
            waiting,
            operations,
            asked,
            in_hand,
        } = &mut *state;
        if asked.len() + *in_hand >= READ_WINDOW {
            return false;
        }
        let Some((op, operation)) = waiting
            .front()
            .and_then(|op| Some((*op, operations.get_mut(op)?)))
        else {
            return false;
        };
        let Some(part) = operation.parts.next() else {
            return false; // a prepared transfer has a slot, and its last part leaves `waiting`
        };
        let request = *next_request;
        *next_request += 1;
        wire::append_read(words, request, part.payload_bytes, part.remote);
        let part_asked = Asked {
            op,
            connection,
            remote: part.remote.to_vec(),
            payload_bytes: part.payload_bytes,
            local: part.local.to_vec(),
            slots: part.slots.clone(),
            landing: operation.landing.clone(),
        };
        operation.landing.begun_to(part.slots.end);
        operation.is_asked = part.is_last;
        operation.unanswered += 1;
        let turn = waiting.take_turn();
        if operation.is_asked {
            waiting.pop_of(turn);
        }
        asked.insert(request, part_asked);
        true
    }

    /// Appends every request that was asked for over a former connection, whose answer can not come any more. Its
    /// bytes go to the same slots, under the same number.
    pub(super) fn ask_again(&self, connection: u64, words: &mut Vec<u8>) -> Vec<OpId> {
        let mut again = Vec::new();
        for (request, asked) in &mut self.state.lock().asked {
            if asked.connection < connection {
                asked.connection = connection;
                wire::append_read(words, *request, asked.payload_bytes, &asked.remote);
                again.push(asked.op);
            }
        }
        again
    }

    /// The receive thread puts nothing anywhere any more: what has not landed will not.
    pub(super) fn settle(&self) {
        let state = self.state.lock();
        state.operations.values().for_each(|op| op.landing.settle());
    }

    /// The part that this answer belongs to, once. It ends with [`Reads::put_back`] or [`Reads::answered`].
    pub(super) fn take(&self, request: u64) -> Option<Asked> {
        let mut state = self.state.lock();
        let asked = state.asked.remove(&request)?;
        state.in_hand += 1;
        Some(asked)
    }

    /// The connection broke within the answer: the part is asked for again.
    pub(super) fn put_back(&self, request: u64, asked: Asked) {
        let mut state = self.state.lock();
        state.in_hand -= 1;
        state.asked.insert(request, asked);
    }

    /// A part of `op` was answered. Gives back the end of the operation, if this was its last answer.
    pub(super) fn answered(
        &self,
        op: OpId,
        answer: Result<(), Refusal>,
    ) -> Option<Result<(), Refusal>> {
        let mut state = self.state.lock();
        state.in_hand -= 1;
        let operation = state.operations.get_mut(&op)?;
        operation.unanswered -= 1;
        if let Err(refusal) = answer {
            operation.refusal.get_or_insert(refusal);
            operation.is_asked = true;
            state.waiting.retain(|waiting| *waiting != op);
        }
        let operation = state.operations.get(&op)?;
        if !operation.is_asked || operation.unanswered > 0 {
            return None;
        }
        let ended = state.operations.remove(&op)?;
        Some(match ended.refusal {
            Some(refusal) => Err(refusal),
            None => Ok(()),
        })
    }
}
