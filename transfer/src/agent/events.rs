//! What an agent tells its owner.

use std::collections::VecDeque;

use bytes::Bytes;

#[cfg(not(kv_loom))]
use crate::attend::{Attendance, Whose};
use crate::{deadline::Deadline, engine::Engine, error::Cause, ids::PeerId, source::SourceReady};

/// Something the owner of an agent has to hear.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AgentEvent {
    /// A control message, in the order in which the peer sent it.
    Message {
        /// The connection it came by.
        peer: PeerId,
        /// The bytes.
        bytes: Bytes,
    },
    /// A connection was made. Comes before any other event of that peer.
    PeerUp {
        /// Its number.
        peer: PeerId,
    },
    /// The connection has broken, and another one may take its place within
    /// [`crate::TransferConfig::reconnect_ms`]. Operations stay in flight, flights stay as they are, and what is
    /// posted and sent meanwhile waits. `PeerResumed` follows, or `PeerDown`.
    PeerSuspended {
        /// Its number.
        peer: PeerId,
        /// Why.
        cause: Cause,
    },
    /// There is a connection to the same life of the peer again. What it has not handled is sent again, in order;
    /// it takes each message and each arrival once.
    PeerResumed {
        /// Its number.
        peer: PeerId,
    },
    /// A connection has ended. Comes after every other event of that peer, once.
    PeerDown {
        /// Its number.
        peer: PeerId,
        /// Why.
        cause: Cause,
        /// Whether the peer is proven not to write here any more. If not, the memory it was told about
        /// stays quarantined.
        is_proven: bool,
    },
    /// Somebody connected and was refused.
    Refused {
        /// Where it came from.
        address: String,
        /// What was wrong.
        reason: String,
    },
}

impl SourceReady {
    /// The peer has said, in this message, that the slots to be read are complete and stay as they are: the
    /// witness for reads from that peer, and for nothing else. `None` for an event that is no message.
    ///
    /// The event can be told any number of times and made up as well, as across a C interface: what this type
    /// keeps is that a call site names the message it relies on, and that it is one of the peer it reads from.
    /// What the message says is between the two applications. Its way through both agents orders what the
    /// peer had written before it before every byte that is read after it.
    /// ```
    /// # use kvgate_transfer::{Agent, AgentEvent, PostOptions, PreparedTransfer, SourceReady};
    /// fn fetch(agent: &Agent, read: &PreparedTransfer, told: &AgentEvent) {
    ///     if let Some(source) = SourceReady::announced(told) {
    ///         let _ = agent.post(read, source, PostOptions::default());
    ///     }
    /// }
    /// ```
    pub fn announced(by: &AgentEvent) -> Option<Self> {
        match by {
            AgentEvent::Message { peer, .. } => Some(Self::word_of(*peer)),
            _ => None,
        }
    }
}

impl Engine {
    pub(crate) fn wait_for_event(&self, deadline: Deadline) -> Option<AgentEvent> {
        #[cfg(not(kv_loom))]
        if let Some(event) = self.events.with(EventQueue::pop) {
            return event;
        }
        #[cfg(not(kv_loom))]
        if let Some(attendant) = Attendance::begin(&self.attendance, Whose::All) {
            let event = self
                .events
                .wait_attending(attendant, deadline, EventQueue::pop);
            return event.flatten();
        }
        self.events.wait(deadline, EventQueue::pop).flatten()
    }
}

#[derive(Debug)]
pub(crate) struct EventQueue {
    events: VecDeque<AgentEvent>,
    capacity: usize,
    is_closed: bool,
}

impl EventQueue {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            events: VecDeque::new(),
            capacity,
            is_closed: false,
        }
    }

    /// `false` when there is no room.
    pub(crate) fn push(&mut self, event: AgentEvent) -> bool {
        let has_room = self.events.len() < self.capacity;
        if has_room {
            self.events.push_back(event);
        }
        has_room
    }

    /// For the two events that every connection has, and the one that follows `PeerSuspended`: bounded by others.
    pub(crate) fn push_always(&mut self, event: AgentEvent) {
        self.events.push_back(event);
    }

    pub(crate) fn close(&mut self) {
        self.is_closed = true;
    }

    /// The next event; `Some(None)` when there will be none.
    pub(crate) fn pop(&mut self) -> Option<Option<AgentEvent>> {
        match self.events.pop_front() {
            Some(event) => Some(Some(event)),
            None => self.is_closed.then_some(None),
        }
    }
}
