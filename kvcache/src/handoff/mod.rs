//! What the two sides of a hand-off say to each other.
//!
//! ```text
//! prefill                                   decode
//!   Hello  ------------------------------->   compares the schemas field by field
//!          <-------------------------------  Hello, or HelloRefused naming the field
//!   Submit ------------------------------->   reserves slots, arms the barrier
//!          <-------------------------------  Offer (slots, segments, epoch), or OfferRefused
//!   pages and their arrivals ------------->   gates open, layer by layer
//!   Aux    ------------------------------->   the first token
//!          <-------------------------------  Done
//!   Abort  <------------------------------>   AbortAck, once nothing of the flight is under way
//! ```
//! The bytes are in [`wire`]. What each side does when is in [`decode`] and [`prefill`], one machine per
//! request and try; [`greeting`] is about a connection. Nothing here has a socket, a clock or a thread: a
//! machine is told what happens and says what is to be done.

pub mod decode;
pub mod greeting;
pub mod machine;
pub mod prefill;
pub mod wire;

pub use decode::{DecodeInput, DecodeMachine, DecodeOutput, DecodeSpec, DecodeState, Writer};
pub use greeting::{Greeting, GreetingState, PeerHello, cover};
pub use machine::{Counters, Foreign, MachineError, SlotOffer, Timeouts};
pub use prefill::{
    PrefillInput, PrefillMachine, PrefillOutput, PrefillSpec, PrefillState, answer_unknown,
};
pub use wire::{Envelope, Identity, Message, WIRE_VERSION, WireError};
