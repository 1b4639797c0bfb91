//! A build without the feature `fault-injection` reads behind its gates only.

use kvgate_kvcache::{BlockTable, CacheSchema, LayerId, TransferPlan};

use crate::handoff::failure::Failure;
use crate::handoff::plan::RunPlan;
use crate::handoff::report::{Counters, PlantedFault};

/// The fault of a run: there is none.
#[derive(Clone, Copy, Debug)]
pub enum Watched {}

/// The reading side's part for one request: none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reader;

/// There is nothing to watch; a plan with a fault was refused before.
pub fn watch(_plan: &RunPlan, _schema: &CacheSchema) -> Result<Option<Watched>, Failure> {
    Ok(None)
}

impl Watched {
    /// Nowhere.
    #[must_use]
    pub fn place_in(
        &self,
        _request: u32,
        _schema: &CacheSchema,
        _table: &BlockTable,
    ) -> Option<PlantedFault> {
        match *self {}
    }

    /// None.
    #[must_use]
    pub fn reader(&self, _request: u32, _transfer: &TransferPlan) -> Reader {
        match *self {}
    }

    /// No.
    #[must_use]
    pub fn proves_nothing(&self, _is_clean: bool, _counters: &Counters) -> Option<String> {
        match *self {}
    }

    /// No.
    #[must_use]
    pub fn serialises(&self) -> bool {
        match *self {}
    }
}

impl Reader {
    /// Nobody waits.
    #[must_use]
    pub fn is_awaited(&self, _layer: LayerId) -> bool {
        false
    }
}
