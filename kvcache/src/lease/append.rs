//! [`AppendLease`]: the right to write rows behind those that landed.

use kvgate_transfer::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::lease::inflight::FlightCore;
use crate::lease::read::{PageLease, ReadyLayer};
use crate::lease::view::LayerMut;

/// The right to append to a flight, one per flight. A layer may be written once it has landed, so a
/// transfer and a decode step never write the same bytes at the same time (I-19).
#[derive(Debug)]
#[must_use = "dropping it gives the append right back"]
pub struct AppendLease {
    lease: PageLease,
}

impl AppendLease {
    pub(super) fn of_flight(core: &Arc<FlightCore>) -> Result<AppendLease, Error> {
        if !core.take_append_right() {
            return Err(ErrorKind::AppendTaken {
                room: core.tenancy.room,
            }
            .into());
        }
        match PageLease::of_flight(core) {
            Ok(lease) => Ok(AppendLease { lease }),
            Err(error) => {
                core.give_append_right_back();
                Err(error)
            }
        }
    }

    /// The right to write a layer that has landed, and to read it.
    ///
    /// It asks for the witness of that very flight:
    /// ```
    /// # use kvgate_kvcache::{AppendLease, Error, LayerMut, ReadyLayer};
    /// fn open<'a>(append: &'a mut AppendLease, ready: &ReadyLayer<'_>) -> Result<LayerMut<'a>, Error> {
    ///     append.layer(ready)
    /// }
    /// ```
    /// ```compile_fail,E0308
    /// # use kvgate_kvcache::{AppendLease, Error, LayerId, LayerMut};
    /// fn open<'a>(append: &'a mut AppendLease, ready: &LayerId) -> Result<LayerMut<'a>, Error> {
    ///     append.layer(ready)
    /// }
    /// ```
    ///
    /// # Errors
    /// `OtherFlight` when the witness is not of this flight.
    pub fn layer(&mut self, ready: &ReadyLayer<'_>) -> Result<LayerMut<'_>, Error> {
        let core = self.lease.core();
        if !Arc::ptr_eq(core, ready.core()) {
            return Err(ErrorKind::OtherFlight {
                room: core.tenancy.room,
            }
            .into());
        }
        let floor_tokens = core.landing_tokens;
        Ok(LayerMut::new(&core.tenancy, ready.layer(), floor_tokens))
    }

    /// The right to read what this one appends to.
    pub fn lease(&self) -> &PageLease {
        &self.lease
    }
}

impl Drop for AppendLease {
    fn drop(&mut self) {
        self.lease.core().give_append_right_back();
    }
}
