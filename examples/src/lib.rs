//! The example programs of kvgate, as a library: `pd-handoff` and what its tests need.
//!
//! The programs themselves are thin; see `src/bin`.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod bench;
pub mod cache_tool;
pub mod check;
pub mod handoff;
pub mod logits;
pub mod status;
pub mod tier_bench;
pub mod tool;
pub mod transfer_bench;
