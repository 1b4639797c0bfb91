//! [`MemoryRegion`]: a registration and its end in two phases (I-21).

use std::fmt;

use crate::{
    deadline::Deadline,
    engine::Engine,
    error::{Error, ErrorKind},
    ids::{PoolId, RegionId},
    mem::region::RegionCore,
    obs::Event,
    sync::Arc,
};

/// Memory that transfers may touch.
///
/// Closing has two phases: no new operation and every peer told, then waiting until no operation and no
/// peer can touch the memory. Dropping it starts the first phase and never blocks; the engine then keeps
/// the memory mapped until it is quiet, or for good, and counts it
/// ([`crate::Counters::draining_regions`]).
#[must_use = "dropping a region starts to close it"]
pub struct MemoryRegion {
    engine: Arc<Engine>,
    core: Arc<RegionCore>,
    pools: Vec<PoolId>,
}

impl MemoryRegion {
    pub(crate) fn new(engine: Arc<Engine>, core: Arc<RegionCore>) -> Self {
        let pools = core.pools.iter().map(|(id, _)| *id).collect();
        Self {
            engine,
            core,
            pools,
        }
    }

    /// Its name.
    pub fn id(&self) -> RegionId {
        self.core.id
    }

    /// The pools, in the order of the geometries they were registered with.
    pub fn pools(&self) -> &[PoolId] {
        &self.pools
    }

    /// Ends the registration. Blocks until no operation uses the memory and every peer that writes by
    /// itself has let go of it or is proven dead.
    ///
    /// # Errors
    /// [`ErrorKind::RegionBusy`] at the deadline, or when the library of a connection keeps the memory,
    /// with the region: it is revoked, still mapped, and can be closed later.
    pub fn close(self, deadline: Deadline) -> Result<(), (Self, Error)> {
        self.engine.revoke_region(&self.core);
        self.engine.ask_for_late_proofs(&self.core);
        let released = match self.core.wait_quiet(deadline) {
            true => self.core.release(),
            false => Err(self.core.unheard_peers()),
        };
        if let Err(unheard_peers) = released {
            let error = ErrorKind::RegionBusy {
                region: self.core.id,
                outstanding: self.core.outstanding(),
                unheard_peers,
            };
            return Err((self, error.into()));
        }
        self.engine.regions.remove(self.core.id);
        self.engine.record(|| Event::RegionClosed {
            region: self.core.id,
        });
        Ok(())
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        self.core.orphan();
        self.engine.revoke_region(&self.core);
        self.engine.sweep_regions();
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegion")
            .field("id", &self.core.id)
            .field("pools", &self.pools)
            .finish()
    }
}
