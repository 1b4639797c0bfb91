//! The only ways to the bytes of a slot: leases and the views they hand out.

pub(crate) mod tenancy;
#[allow(unsafe_code)]
pub(crate) mod view;
pub(crate) mod write;

pub use view::{ComponentView, LayerMut, LayerRef};
pub use write::{SourceLease, WriteLease, WrittenLayer};
