//! One writer of one flight: [`PrefillMachine`].
//!
//! ```text
//! Idle → Held → Sending → Sent → Closed
//!   └─────┴────────┴────────┴──→ Aborting → Closed
//! ```
//! | state | what is true |
//! |---|---|
//! | Idle | no Offer; nothing may be posted |
//! | Held | the Offer is here; nothing was posted yet |
//! | Sending | operations are posted, or under way |
//! | Sent | everything was posted and is terminal |
//! | Aborting | given up; operations may be under way, or an Offer |
//! | Closed | nothing is under way, and nothing will be |
//!
//! The word of this side that a receiver's slots are quiet is `AbortAck`. It is said when no post can
//! begin ([`PrefillInput::PostingStopped`]) and every post that began is terminal; then, and again
//! whenever it is asked for.

use kvgate_transfer::{Cause, Epoch, Incarnation, WriterRank};

use super::machine::{SlotOffer, Timeouts};
use super::wire::Envelope;
use crate::ids::{Attempt, Room};

mod sender;

pub use sender::{PrefillMachine, answer_unknown};

/// A request to be delivered by one writer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefillSpec {
    /// The life of this process.
    pub incarnation: Incarnation,
    /// Its place among the writers.
    pub rank: WriterRank,
    /// Whether it is the one writer that sends the first token.
    pub is_designated: bool,
    /// The request.
    pub room: Room,
    /// The try.
    pub attempt: Attempt,
    /// The life of the receiving process.
    pub receiver: Incarnation,
    /// The prompt length.
    pub prompt_tokens: u32,
    /// Limits of the waits.
    pub timeouts: Timeouts,
}

/// Where a flight stands at one writer. See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)] // The table of the module says it.
pub enum PrefillState {
    Idle,
    Held,
    Sending,
    Sent,
    Aborting,
    Closed,
}

impl PrefillState {
    /// Every state.
    pub const ALL: [PrefillState; 6] = [
        PrefillState::Idle,
        PrefillState::Held,
        PrefillState::Sending,
        PrefillState::Sent,
        PrefillState::Aborting,
        PrefillState::Closed,
    ];

    /// Its name, for errors and logs.
    pub fn name(self) -> &'static str {
        match self {
            PrefillState::Idle => "idle",
            PrefillState::Held => "held",
            PrefillState::Sending => "sending",
            PrefillState::Sent => "sent",
            PrefillState::Aborting => "aborting",
            PrefillState::Closed => "closed",
        }
    }
}

/// What happens to a flight at one writer.
#[derive(Clone, Debug)]
pub enum PrefillInput {
    /// The request goes to the receiver; one writer does this.
    Submit {
        /// Tokens that the receiver's cache must hold.
        total_tokens: u32,
        /// Tokens to be decoded.
        steps: u32,
        /// The prompt.
        prompt: Vec<u32>,
    },
    /// A message came over the connection to `from`.
    Message {
        /// The life of the process at the other end of that connection.
        from: Incarnation,
        /// The message.
        envelope: Envelope,
    },
    /// An operation of the flight goes to the engine. Said before it does.
    Posted,
    /// An operation is terminal.
    Completed(Result<(), Cause>),
    /// Everything this writer delivers was posted.
    AllPosted {
        /// The first token; from the designated writer and from nobody else.
        first_token: Option<u32>,
    },
    /// No post can begin any more ([`PrefillOutput::StopPosting`] was done).
    PostingStopped,
    /// The receiver, or the computation here, shows that it is alive.
    Progress,
    /// This side gives the flight up.
    LocalAbort(Cause),
    /// The connection to the receiver has ended.
    PeerDown {
        /// The life of the process.
        incarnation: Incarnation,
        /// Why.
        cause: Cause,
    },
}

impl PrefillInput {
    pub(super) fn name(&self) -> &'static str {
        match self {
            PrefillInput::Submit { .. } => "submit",
            PrefillInput::Message { envelope, .. } => envelope.message.name(),
            PrefillInput::Posted => "posted",
            PrefillInput::Completed(_) => "completed",
            PrefillInput::AllPosted { .. } => "all-posted",
            PrefillInput::PostingStopped => "posting-stopped",
            PrefillInput::Progress => "progress",
            PrefillInput::LocalAbort(_) => "local-abort",
            PrefillInput::PeerDown { .. } => "peer-down",
        }
    }
}

/// What is to be done for a flight at one writer, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillOutput {
    /// Send a message.
    Send {
        /// To this process.
        to: Incarnation,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// Layers may be posted to these slots as they are written, in this flight.
    MayPost {
        /// The flight.
        epoch: Epoch,
        /// The slots.
        offer: SlotOffer,
    },
    /// Let no post begin any more (close the ledger), then say [`PrefillInput::PostingStopped`].
    StopPosting,
    /// Operations have not become terminal in time. The flight goes on waiting for them.
    Overdue {
        /// How many.
        operation_count: u64,
    },
    /// The request's own slots may drain.
    Release,
    /// The request has failed.
    Failed(Cause),
}
