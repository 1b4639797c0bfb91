//! [`PrefixLease`]: the right to read pages of the tree, each through the barrier of whoever fills it.

use std::fmt;

use kvgate_transfer::sync::Arc;
use kvgate_transfer::{Barrier, Deadline, FlightLedger, StepClock};

use crate::block_table::BlockTable;
use crate::error::{Error, ErrorKind};
use crate::ids::{LayerId, PageId};
use crate::lease::stage_of;
use crate::lease::tenancy::wait_gates;
use crate::lease::view::LayerRef;
use crate::lease::write::WriteLease;
use crate::pool::PoolSet;
use crate::prefix::hold::Hold;
use crate::schema::{PAGE_TOKENS, Space};

/// One leased slot with the gate it is read through.
pub(crate) struct Run {
    pools: PoolSet,
    barrier: Arc<Barrier>,
    ledger: Arc<FlightLedger>,
    /// `None` once it went to a request.
    hold: Option<Hold>,
}

impl Run {
    pub(crate) fn new(
        pools: &PoolSet,
        space: Space,
        id: PageId,
        barrier: Arc<Barrier>,
        ledger: &Arc<FlightLedger>,
    ) -> Result<Run, Error> {
        let hold = Hold::new(&pools.inner.allocator, space, id, ledger)?;
        Ok(Run {
            pools: pools.clone(),
            barrier,
            ledger: ledger.clone(),
            hold: Some(hold),
        })
    }

    fn id(&self) -> PageId {
        let hold = self.hold.as_ref();
        hold.expect("I-10: a run gives its hold up once").id()
    }

    fn into_hold(mut self) -> Hold {
        let hold = self.hold.take();
        hold.expect("I-10: a run gives its hold up once")
    }

    /// Whether it is read without a gate.
    pub(crate) fn is_ready(&self) -> bool {
        self.barrier.stage_count() == 0
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            hold.release(&self.pools.inner.allocator);
        }
    }
}

/// The right to read the pages of a prefix. It keeps them, also when the tree gives them up.
///
/// With a checkpoint ([`PrefixLease::has_checkpoint`]) it also keeps the window and the states of the end
/// of the prefix, from which a request can go on ([`PoolSet::resume`]).
#[must_use = "the pages are kept only while this lives"]
pub struct PrefixLease {
    pools: PoolSet,
    table: BlockTable,
    runs: Vec<Run>,
    /// Window slots of the end.
    tail: Vec<Run>,
}

/// A prefix lease taken apart for a request that goes on behind it.
pub(crate) struct PrefixParts {
    pub(crate) table: BlockTable,
    pub(crate) holds: Vec<Hold>,
    pub(crate) gates: Vec<Arc<Barrier>>,
    pub(crate) tail: Vec<Run>,
}

/// Proof that one layer of every page of a prefix is visible here (I-1, I-2).
///
/// A pending hit is read like a ready one, through its gate:
/// ```
/// use kvgate_kvcache::prefix::{PrefixLayer, PrefixLease};
/// use kvgate_kvcache::{Error, LayerId};
/// fn read(lease: &PrefixLease, layer: LayerId) -> Result<PrefixLayer<'_>, Error> {
///     lease.layer(layer, kvgate_transfer::Deadline::after_ms(10))
/// }
/// ```
/// ```compile_fail,E0451
/// use kvgate_kvcache::prefix::{PrefixLayer, PrefixLease};
/// use kvgate_kvcache::{Error, LayerId};
/// fn read(lease: &PrefixLease, layer: LayerId) -> Result<PrefixLayer<'_>, Error> {
///     Ok(PrefixLayer { lease, layer })
/// }
/// ```
#[derive(Debug)]
#[must_use = "the witness is what views are made from"]
pub struct PrefixLayer<'l> {
    lease: &'l PrefixLease,
    layer: LayerId,
}

impl PrefixLease {
    pub(crate) fn new(pools: &PoolSet, runs: Vec<Run>, tail: Vec<Run>, tokens: u32) -> PrefixLease {
        let ids = |runs: &Vec<Run>| runs.iter().map(Run::id).collect();
        let table = BlockTable::of_prefix(pools.schema(), tokens, ids(&runs), ids(&tail));
        PrefixLease {
            pools: pools.clone(),
            table,
            runs,
            tail,
        }
    }

    /// Whether the window and the states of its end are kept with it.
    pub fn has_checkpoint(&self) -> bool {
        !self.tail.is_empty()
    }

    /// Tokens of the prefix.
    pub fn tokens(&self) -> u32 {
        self.table.tokens()
    }

    pub(crate) fn is_of(&self, pools: &PoolSet) -> bool {
        Arc::ptr_eq(&self.pools.inner, &pools.inner)
    }

    /// What a request needs of it that goes on behind it.
    pub(crate) fn into_parts(self) -> PrefixParts {
        let gates = gates_of(&self.runs);
        PrefixParts {
            table: self.table,
            holds: self.runs.into_iter().map(Run::into_hold).collect(),
            gates,
            tail: self.tail,
        }
    }

    /// The slots: pages, and the window slots of its end if it has a checkpoint. A prefix has no request slot.
    pub fn block_table(&self) -> &BlockTable {
        &self.table
    }

    /// Blocks until the layer has landed in every page.
    ///
    /// # Errors
    /// `Gate` when a flight that fills one of the pages failed, or at the deadline, which changes
    /// nothing; `UnknownLayer`.
    pub fn layer(&self, layer: LayerId, deadline: Deadline) -> Result<PrefixLayer<'_>, Error> {
        self.pools.schema().check_layer(layer)?;
        wait_gates(&gates_of(&self.runs), layer, deadline)?;
        wait_gates(&gates_of(&self.tail), layer, deadline)?;
        Ok(PrefixLayer { lease: self, layer })
    }

    /// Keeps the pages until the newest step of `clock` has passed, whatever else is over (I-20).
    ///
    /// # Errors
    /// `Transfer` when a page was proven quiet already.
    pub fn fence(&self, clock: &StepClock) -> Result<(), Error> {
        let Some(step) = clock.latest() else {
            return Ok(());
        };
        for run in self.runs.iter().chain(&self.tail) {
            FlightLedger::fence(&run.ledger, clock, step)?;
        }
        Ok(())
    }

    /// Copies one page, all compressed components of all layers, into page `to_ordinal` of a write
    /// lease, which may then write rows behind the copied ones.
    ///
    /// This is the only way to go on in a page that others read: a write lease never holds a shared
    /// page (I-19).
    ///
    /// # Errors
    /// As [`PrefixLease::layer`] for every layer; `InvalidRequest` for a page that one of the two does
    /// not have or that `into` shares with the tree, or a lease of other pools.
    pub fn copy_page(
        &self,
        ordinal: u32,
        into: &mut WriteLease,
        to_ordinal: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let missing = |field: &'static str, value: u32| {
            let expected = "a page of the lease's own, in the same pools".to_owned();
            Error::from(ErrorKind::InvalidRequest {
                field,
                value: value.into(),
                expected,
            })
        };
        if !into.is_of(&self.pools.inner) {
            return Err(missing("pools", 0));
        }
        let page = |table: &BlockTable, ordinal: u32| table.pages().get(ordinal as usize).copied();
        let from = page(&self.table, ordinal).ok_or_else(|| missing("ordinal", ordinal))?;
        // Pages below the floor are the tree's: others read them.
        let to = page(into.block_table(), to_ordinal)
            .filter(|_| to_ordinal * PAGE_TOKENS >= into.floor_tokens())
            .ok_or_else(|| missing("to_ordinal", to_ordinal))?;
        let schema = self.pools.schema();
        for layer in schema.layers() {
            // The witness is what allows the copy, layer by layer.
            let ready = self.layer(layer, deadline)?;
            for row in schema
                .rows_of(ready.layer())
                .iter()
                .filter(|row| row.space == Space::Page)
            {
                let inner = &self.pools.inner;
                inner
                    .bytes
                    .copy_page(inner.span(row.pool), from.index, to.index);
            }
        }
        Ok(())
    }

    /// Why the lease will never be whole, if a flight that fills it has failed.
    pub fn failure(&self) -> Option<kvgate_transfer::Cause> {
        let layers = self.pools.schema().layers();
        let stages: Vec<_> = layers.map(stage_of).collect();
        self.runs.iter().chain(&self.tail).find_map(|run| {
            stages
                .iter()
                .find_map(|stage| match run.barrier.check(*stage) {
                    kvgate_transfer::StageState::Failed(cause) => Some(cause),
                    _ => None,
                })
        })
    }
}

/// The gates of slots that are not open for good, each once.
pub(crate) fn gates_of(runs: &[Run]) -> Vec<Arc<Barrier>> {
    let mut gates: Vec<Arc<Barrier>> = Vec::new();
    for run in runs.iter().filter(|run| !run.is_ready()) {
        if !gates.iter().any(|gate| Arc::ptr_eq(gate, &run.barrier)) {
            gates.push(run.barrier.clone());
        }
    }
    gates
}

impl<'l> PrefixLayer<'l> {
    /// The layer.
    pub fn layer(&self) -> LayerId {
        self.layer
    }

    /// Its rows, for reading: the compressed components, and those of the window if the prefix has a checkpoint.
    pub fn view(&self) -> LayerRef<'_> {
        LayerRef::new(&self.lease.pools.inner, &self.lease.table, self.layer)
    }
}

impl fmt::Debug for PrefixLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixLease")
            .field("pages", &self.table.pages())
            .finish_non_exhaustive()
    }
}
