//! The bug, on purpose: faults that a build with the feature `fault-injection` plants, and nothing else.
//!
//! The option and its values are types of every build, so that both sides of a run speak of the same
//! thing; the hooks that act exist only with the feature.

#[cfg(feature = "fault-injection")]
pub mod decode;
#[cfg(not(feature = "fault-injection"))]
#[path = "no_decode.rs"]
pub mod decode;
pub mod place;
mod spec;

pub use spec::{FaultKind, FaultSpec};
