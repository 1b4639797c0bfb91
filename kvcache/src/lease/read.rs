//! [`PageLease`]: the right to wait for layers, and [`ReadyLayer`], the proof that one has landed whole.

use std::fmt;

use kvgate_transfer::sync::Arc;
use kvgate_transfer::{Barrier, BarrierError, Deadline};

use crate::block_table::BlockTable;
use crate::error::{Error, ErrorKind};
use crate::ids::{LayerId, Room};
use crate::lease::inflight::FlightCore;
use crate::lease::stage_of;
use crate::lease::tenancy::Pin;
use crate::lease::view::LayerRef;
use crate::schema::CacheSchema;

/// The right to read a sequence, layer by layer, as far as its gates are open.
///
/// It keeps the slots: while it exists they are not free, whatever became of their owner.
#[must_use = "the slots are kept only while this lives"]
pub struct PageLease {
    core: Arc<FlightCore>,
    _pin: Pin,
}

/// Proof that every chunk of every component of one layer is visible here (I-1, I-2).
///
/// ```compile_fail,E0451
/// # use kvgate_kvcache::{LayerId, PageLease, ReadyLayer};
/// fn forge(lease: &PageLease, layer: LayerId) -> ReadyLayer<'_> {
///     ReadyLayer { lease, layer }
/// }
/// ```
/// The way to one is the gate:
/// ```
/// # use kvgate_kvcache::{Error, LayerId, PageLease, ReadyLayer};
/// # use kvgate_transfer::Deadline;
/// fn wait(lease: &PageLease, layer: LayerId) -> Result<ReadyLayer<'_>, Error> {
///     lease.layer(layer, Deadline::after_ms(100))
/// }
/// ```
#[derive(Debug)]
#[must_use = "the witness is what views are made from"]
pub struct ReadyLayer<'l> {
    lease: &'l PageLease,
    layer: LayerId,
}

/// Proof that every layer is ready.
#[derive(Debug)]
#[must_use = "the witness is what views are made from"]
pub struct AllReady<'l> {
    lease: &'l PageLease,
}

impl PageLease {
    pub(super) fn of_flight(core: &Arc<FlightCore>) -> Result<PageLease, Error> {
        let pin = Pin::new(&core.tenancy)?;
        Ok(PageLease {
            core: core.clone(),
            _pin: pin,
        })
    }

    /// Blocks until the layer has landed whole.
    ///
    /// # Errors
    /// `Gate` with the barrier's answer: not armed, failed with its cause, or the deadline has passed,
    /// which changes nothing. `UnknownLayer`.
    pub fn layer(&self, layer: LayerId, deadline: Deadline) -> Result<ReadyLayer<'_>, Error> {
        self.schema().check_layer(layer)?;
        self.core.tenancy.wait_shared(layer, deadline)?;
        self.barrier()
            .wait(stage_of(layer), deadline)
            .map_err(|error| gate_error(layer, error))?;
        Ok(ReadyLayer { lease: self, layer })
    }

    /// Waits for every layer. For replays that run no host code between layers.
    ///
    /// # Errors
    /// That of the first layer that does not open.
    pub fn all_layers(&self, deadline: Deadline) -> Result<AllReady<'_>, Error> {
        for layer in self.schema().layers() {
            drop(self.layer(layer, deadline)?);
        }
        Ok(AllReady { lease: self })
    }

    /// The gates.
    pub fn barrier(&self) -> &Arc<Barrier> {
        &self.core.barrier
    }

    /// The slots.
    pub fn block_table(&self) -> &BlockTable {
        &self.core.tenancy.table
    }

    pub(crate) fn core(&self) -> &Arc<FlightCore> {
        &self.core
    }

    fn schema(&self) -> &CacheSchema {
        &self.core.tenancy.pools.schema
    }

    /// The request.
    pub fn room(&self) -> Room {
        self.core.tenancy.room
    }
}

impl fmt::Debug for PageLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PageLease").field(&self.core).finish()
    }
}

impl<'l> ReadyLayer<'l> {
    /// The layer.
    pub fn layer(&self) -> LayerId {
        self.layer
    }

    /// Its rows, for reading.
    pub fn view(&self) -> LayerRef<'_> {
        LayerRef::new(
            &self.lease.core.tenancy.pools,
            &self.lease.core.tenancy.table,
            self.layer,
        )
    }

    pub(super) fn core(&self) -> &Arc<FlightCore> {
        &self.lease.core
    }
}

impl<'l> AllReady<'l> {
    /// The witness of one layer.
    ///
    /// # Errors
    /// `UnknownLayer`.
    pub fn layer(&self, layer: LayerId) -> Result<ReadyLayer<'l>, Error> {
        self.lease.schema().check_layer(layer)?;
        Ok(ReadyLayer {
            lease: self.lease,
            layer,
        })
    }
}

fn gate_error(layer: LayerId, error: BarrierError) -> Error {
    Error::new(ErrorKind::Gate { layer, error })
}
