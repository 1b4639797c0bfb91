//! A slot of a pool: its life cycle ([`slot`]) and its bytes (private).

#[allow(unsafe_code)]
pub(crate) mod raw;
pub mod slot;

pub use slot::{Phase, Slot, SlotFault, SlotState};
