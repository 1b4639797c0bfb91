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
//! The bytes are in [`wire`]; nothing here has a socket or a clock.

pub mod wire;

pub use wire::{Envelope, Identity, Message, WIRE_VERSION, WireError};
