//! The only ways to the bytes of a slot: leases and the views they hand out.

pub(crate) mod append;
pub(crate) mod inflight;
pub(crate) mod read;
pub(crate) mod tenancy;
#[allow(unsafe_code)]
pub(crate) mod view;
pub(crate) mod write;

pub use append::AppendLease;
pub use inflight::InFlight;
pub use read::{AllReady, PageLease, ReadyLayer};
pub use view::{ComponentView, LayerMut, LayerRef};
pub use write::{SourceLease, WriteLease, WrittenLayer};

use kvgate_transfer::StageId;

use crate::ids::LayerId;

/// The stage of the barrier that stands for a layer.
pub(crate) fn stage_of(layer: LayerId) -> StageId {
    StageId(layer.0)
}
