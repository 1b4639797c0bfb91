//! The receiving side of one flight: [`DecodeMachine`].
//!
//! ```text
//! Reserved → Offered → Receiving → Landed → Active → Closed
//!     └─────────┴──────────┴─────────┴────────┴──→ Aborting → Draining → Closed
//! ```
//! | state | what is true |
//! |---|---|
//! | Reserved | nobody outside was told of the slots |
//! | Offered | every writer was sent the Offer; the barrier was armed before |
//! | Receiving | a writer has delivered something |
//! | Landed | every layer has landed and the first token is there; the writers were told Done |
//! | Active | the sequence is decoded |
//! | Aborting | given up; at least one writer may still write |
//! | Draining | given up, every writer is quiet; readers of this process may be left |
//! | Closed | over |
//!
//! The machine has no clock, no socket and no memory. Whoever drives it does what its outputs say, in
//! their order, and reports back. It can let nothing be reused: slots are free against
//! [`kvgate_transfer::Quiesced`] only, and [`DecodeOutput::WriterQuiet`] is one part of that proof.

use kvgate_transfer::{Cause, Epoch, Incarnation, WriterRank};

use super::machine::{SlotOffer, Timeouts};
use super::wire::Envelope;
use crate::ids::{Attempt, Room};

mod receiver;

pub use receiver::DecodeMachine;

/// One writer of a flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writer {
    /// Its place among the writers.
    pub rank: WriterRank,
    /// The life of its process.
    pub incarnation: Incarnation,
}

/// A flight to be received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeSpec {
    /// The life of this process.
    pub incarnation: Incarnation,
    /// The request.
    pub room: Room,
    /// The try.
    pub attempt: Attempt,
    /// The flight.
    pub epoch: Epoch,
    /// The reserved slots.
    pub offer: SlotOffer,
    /// Everybody who delivers layers.
    pub writers: Vec<Writer>,
    /// The one writer that has the first token.
    pub designated: WriterRank,
    /// Limits of the waits.
    pub timeouts: Timeouts,
}

/// Where a flight stands on the receiving side. See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)] // The table of the module says it.
pub enum DecodeState {
    Reserved,
    Offered,
    Receiving,
    Landed,
    Active,
    Aborting,
    Draining,
    Closed,
}

impl DecodeState {
    /// Every state.
    pub const ALL: [DecodeState; 8] = [
        DecodeState::Reserved,
        DecodeState::Offered,
        DecodeState::Receiving,
        DecodeState::Landed,
        DecodeState::Active,
        DecodeState::Aborting,
        DecodeState::Draining,
        DecodeState::Closed,
    ];

    /// Its name, for errors and logs.
    pub fn name(self) -> &'static str {
        match self {
            DecodeState::Reserved => "reserved",
            DecodeState::Offered => "offered",
            DecodeState::Receiving => "receiving",
            DecodeState::Landed => "landed",
            DecodeState::Active => "active",
            DecodeState::Aborting => "aborting",
            DecodeState::Draining => "draining",
            DecodeState::Closed => "closed",
        }
    }
}

/// What happens to a flight on the receiving side.
#[derive(Clone, Debug)]
pub enum DecodeInput {
    /// Begin.
    Start,
    /// The barrier counts ([`DecodeOutput::Arm`] was done).
    Armed,
    /// A message came over the connection to `from`.
    Message {
        /// The life of the process at the other end of that connection.
        from: Incarnation,
        /// The message.
        envelope: Envelope,
    },
    /// Something of a writer has landed.
    Arrived(WriterRank),
    /// Every layer has landed.
    Landed,
    /// The sequence is decoded from now on.
    Activated,
    /// The sequence is over.
    Finished,
    /// This side gives the flight up.
    LocalAbort(Cause),
    /// The connection to a process has ended.
    PeerDown {
        /// The life of that process.
        incarnation: Incarnation,
        /// Why.
        cause: Cause,
        /// Whether it is proven that it writes no more.
        is_proven: bool,
    },
    /// The slots are free: the proof came.
    Quiesced,
}

impl DecodeInput {
    pub(super) fn name(&self) -> &'static str {
        match self {
            DecodeInput::Start => "start",
            DecodeInput::Armed => "armed",
            DecodeInput::Message { envelope, .. } => envelope.message.name(),
            DecodeInput::Arrived(_) => "arrived",
            DecodeInput::Landed => "landed",
            DecodeInput::Activated => "activated",
            DecodeInput::Finished => "finished",
            DecodeInput::LocalAbort(_) => "local-abort",
            DecodeInput::PeerDown { .. } => "peer-down",
            DecodeInput::Quiesced => "quiesced",
        }
    }
}

/// What is to be done for a flight on the receiving side, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum DecodeOutput {
    /// Let the barrier count, then say [`DecodeInput::Armed`].
    Arm,
    /// Send a message.
    Send {
        /// To this process.
        to: Incarnation,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// Everything is here; the sequence can be decoded.
    Ready {
        /// Drawn from the last logits of the prompt.
        first_token: u32,
    },
    /// The sequence is over: [`crate::InFlight::close`].
    Close,
    /// [`crate::InFlight::abort`]: whoever waits at a gate gets the cause at once.
    AbortFlight(Cause),
    /// This writer's operations are terminal: [`crate::DrainingFlight::writer_answered`].
    WriterQuiet(Writer),
    /// Nothing was heard of these writers: [`crate::DrainingFlight::quarantine`]. The flight goes on
    /// waiting for them.
    Quarantine(Vec<WriterRank>),
    /// The request has failed.
    Failed(Cause),
}
