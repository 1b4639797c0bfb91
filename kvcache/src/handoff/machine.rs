//! What the machines of both sides share: time limits, counters, refusals, the slots of an Offer.

use std::fmt;
use std::ops::AddAssign;
use std::time::Duration;

use kvgate_transfer::{Epoch, Incarnation, WriterRank};

use super::wire::{Envelope, Identity, Message};
use crate::block_table::BlockTable;
use crate::ids::{Attempt, PageId, Room};
use crate::schema::CacheSchema;

/// How long a machine waits. A limit ends a wait, never the life of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// From the Offer until everything has landed.
    pub transfer: Duration,
    /// Without a sign of life of what is waited for.
    pub idle: Duration,
    /// From an abort until what has not been heard of is reported.
    pub drain: Duration,
    /// After so long a message that was not answered is sent again. `None` where messages are reliable.
    pub retry: Option<Duration>,
}

impl Default for Timeouts {
    /// Ten seconds for everything, over reliable connections.
    fn default() -> Timeouts {
        let limit = Duration::from_secs(10);
        Timeouts {
            transfer: limit,
            idle: limit,
            drain: limit,
            retry: None,
        }
    }
}

/// Things that had no effect, by reason, and ends that were no success.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages of another life of a process, or of a process that has nothing to do with the flight.
    pub incarnation: u64,
    /// Messages of another request.
    pub room: u64,
    /// Messages of another try.
    pub attempt: u64,
    /// Messages of another flight.
    pub epoch: u64,
    /// Messages that only another writer may send.
    pub writer: u64,
    /// Messages whose content contradicts the flight.
    pub contradiction: u64,
    /// Messages that said again what is known.
    pub duplicate: u64,
    /// Messages about something that was over already.
    pub late: u64,
    /// Offers for a request that has a flight.
    pub second_offer: u64,
    /// Events that the state has no place for.
    pub out_of_table: u64,
    /// Flights that ended because a wait was over.
    pub deadline_exceeded: u64,
    /// Flights that ended without a word of a writer about its operations.
    pub unheard: u64,
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Counters) {
        let pairs = [
            (&mut self.incarnation, other.incarnation),
            (&mut self.room, other.room),
            (&mut self.attempt, other.attempt),
            (&mut self.epoch, other.epoch),
            (&mut self.writer, other.writer),
            (&mut self.contradiction, other.contradiction),
            (&mut self.duplicate, other.duplicate),
            (&mut self.late, other.late),
            (&mut self.second_offer, other.second_offer),
            (&mut self.out_of_table, other.out_of_table),
            (&mut self.deadline_exceeded, other.deadline_exceeded),
            (&mut self.unheard, other.unheard),
        ];
        for (sum, more) in pairs {
            *sum += more;
        }
    }
}

/// Which part of a message's identity is not the flight's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// Another life of a process, or a process that is not part of the flight.
    Incarnation,
    /// Another request.
    Room,
    /// Another try.
    Attempt,
    /// Another flight.
    Epoch,
}

/// An event that had no effect beyond what the variant says. It has been counted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MachineError {
    /// A message of another flight (I-14).
    Foreign {
        /// What differs.
        what: Foreign,
        /// The message.
        message: &'static str,
    },
    /// The state has no place for the event.
    OutOfTable {
        /// The state.
        state: &'static str,
        /// The event.
        event: &'static str,
    },
    /// Only another writer may say this.
    Writer {
        /// The message.
        message: &'static str,
        /// Who it says it is about.
        writer: WriterRank,
    },
    /// The request has a flight. Whoever offered another one has been told.
    SecondOffer {
        /// The flight that was refused.
        epoch: Epoch,
    },
    /// A message contradicts what the flight is; a flight that was not complete has been given up.
    Contradiction {
        /// The field.
        field: &'static str,
        /// The value here.
        ours: u64,
        /// The value in the message.
        theirs: u64,
    },
    /// The description of a flight makes no sense.
    Spec {
        /// What is wrong with it.
        reason: &'static str,
    },
}

impl fmt::Display for MachineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MachineError::Foreign { what, message } => {
                let what = match what {
                    Foreign::Incarnation => "life of a process",
                    Foreign::Room => "room",
                    Foreign::Attempt => "attempt",
                    Foreign::Epoch => "epoch",
                };
                write!(f, "{message} of another {what}")
            }
            MachineError::OutOfTable { state, event } => {
                write!(f, "{event} has no place in state {state}")
            }
            MachineError::Writer { message, writer } => {
                write!(f, "{message} for writer {} from somebody else", writer.0)
            }
            MachineError::SecondOffer { epoch } => {
                write!(f, "offer of epoch {} for a room that has a flight", epoch.0)
            }
            MachineError::Contradiction {
                field,
                ours,
                theirs,
            } => write!(f, "{field} is {ours} here and {theirs} in the message"),
            MachineError::Spec { reason } => write!(f, "impossible flight: {reason}"),
        }
    }
}

impl std::error::Error for MachineError {}

/// What an Offer says: where the rows of a prompt go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotOffer {
    /// The prompt length.
    pub prompt_tokens: u32,
    /// Ends of the segments in tokens.
    pub segment_ends: Vec<u32>,
    /// Logical pages with their generations.
    pub pages: Vec<PageId>,
    /// The ring of window slots.
    pub windows: Vec<PageId>,
    /// The request slot.
    pub request: PageId,
}

impl SlotOffer {
    /// Offers the slots of `table`.
    pub fn of(prompt_tokens: u32, segment_ends: &[u32], table: &BlockTable) -> SlotOffer {
        SlotOffer {
            prompt_tokens,
            segment_ends: segment_ends.to_vec(),
            pages: table.pages().to_vec(),
            windows: table.windows().to_vec(),
            request: table.request(),
        }
    }

    /// The offered slots as a table of a cache with room for `total_tokens` tokens. What does not fit
    /// the schema is found when the plan is posted against it.
    pub fn table(&self, schema: &CacheSchema, total_tokens: u32) -> BlockTable {
        BlockTable::new(
            schema,
            total_tokens,
            self.pages.clone(),
            self.windows.clone(),
            self.request,
        )
    }

    pub(super) fn message(&self) -> Message {
        let SlotOffer {
            prompt_tokens,
            segment_ends,
            pages,
            windows,
            request,
        } = self.clone();
        Message::Offer {
            prompt_tokens,
            segment_ends,
            pages,
            windows,
            request,
        }
    }
}

/// Speaks for one try of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Speaker {
    pub(super) incarnation: Incarnation,
    pub(super) room: Room,
    pub(super) attempt: Attempt,
}

impl Speaker {
    pub(super) fn say(&self, epoch: Epoch, message: Message) -> Vec<u8> {
        let identity = Identity {
            incarnation: self.incarnation,
            room: self.room,
            attempt: self.attempt,
            epoch,
        };
        Envelope { identity, message }.encode()
    }

    /// What of the message's request is not ours.
    pub(super) fn foreign_request(&self, identity: &Identity) -> Option<Foreign> {
        if identity.room != self.room {
            Some(Foreign::Room)
        } else if identity.attempt != self.attempt {
            Some(Foreign::Attempt)
        } else {
            None
        }
    }
}

impl Counters {
    pub(super) fn foreign(&mut self, what: Foreign, message: &'static str) -> MachineError {
        let counter = match what {
            Foreign::Incarnation => &mut self.incarnation,
            Foreign::Room => &mut self.room,
            Foreign::Attempt => &mut self.attempt,
            Foreign::Epoch => &mut self.epoch,
        };
        *counter += 1;
        MachineError::Foreign { what, message }
    }

    pub(super) fn out_of_table(
        &mut self,
        state: &'static str,
        event: &'static str,
    ) -> MachineError {
        self.out_of_table += 1;
        MachineError::OutOfTable { state, event }
    }

    pub(super) fn contradiction(
        &mut self,
        field: &'static str,
        ours: u32,
        theirs: u32,
    ) -> MachineError {
        self.contradiction += 1;
        MachineError::Contradiction {
            field,
            ours: u64::from(ours),
            theirs: u64::from(theirs),
        }
    }
}
