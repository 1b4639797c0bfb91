//! Backups: flights from the device pool to the host tier.
//!
//! The source is a prefix of the device tree, which holds nothing but pages whose every layer came with
//! the witness that it is written ([`kvgate_kvcache::PrefixTree::publish`]), or landed. The device pages
//! stay leased until the copies are complete; only then the record is in the host tier, with all
//! components or not at all.

use kvgate_kvcache::Hit;
use kvgate_transfer::sync::Arc;
use kvgate_transfer::{Epoch, Priority};

use super::{Begun, Ends, begin};

/// Begins the backup of the prefix that is exactly `tokens`. `None`: the device does not have it whole and ready.
pub(crate) fn start(
    ends: Ends<'_>,
    tokens: &[u32],
    epoch: Epoch,
) -> Result<Option<Begun>, kvgate_kvcache::Error> {
    let Hit::Ready { lease, .. } = ends.from.tree().boundary(tokens) else {
        return Ok(None);
    };
    begin(ends, tokens, &Arc::new(lease), epoch, Priority::Background).map(Some)
}
