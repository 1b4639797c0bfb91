//! Load-backs: flights from the host tier to the device pool.
//!
//! They are read as a hand-off is, through the barrier of their [`kvgate_kvcache::InFlight`], layer by layer: the
//! destination pages are free of older kernels, because the allocator gave them out against the proof that
//! nobody touches them.

use kvgate_transfer::{Epoch, Priority};

use super::{Begun, Ends, begin};
use crate::host::HostLease;

/// Begins to load the prefix that `pin` keeps, whose tokens are `tokens`.
pub(crate) fn start(
    ends: Ends<'_>,
    tokens: &[u32],
    pin: &HostLease,
    epoch: Epoch,
) -> Result<Begun, kvgate_kvcache::Error> {
    begin(ends, tokens, pin.prefix(), epoch, Priority::Foreground)
}
