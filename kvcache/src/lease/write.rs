//! [`WriteLease`]: the right to fill slots from this process, and [`WrittenLayer`], the witness that
//! a layer has been filled.

use std::fmt;
use std::ops::Range;

use kvgate_transfer::sync::Arc;
use kvgate_transfer::{Deadline, Epoch, FlightLedger, PoolId};

use crate::block_table::BlockTable;
use crate::error::{Error, ErrorKind};
use crate::ids::{LayerId, Room};
use crate::lease::tenancy::{Pin, Tenancy};
use crate::lease::view::LayerMut;
use crate::pool::drain::DrainingFlight;
use crate::pool::{PoolInner, PoolSet};
use crate::prefix::PrefixLease;
use crate::prefix::resume::{Resumption, invalid};

/// Reserved slots of all components and the only right to write them.
///
/// Ends with [`WriteLease::close`], or by being dropped: then the slots are parked until the posted
/// operations that read them are terminal.
#[must_use = "dropping a write lease gives its slots up"]
pub struct WriteLease {
    /// `None` once it was ended or turned into a flight.
    tenancy: Option<Arc<Tenancy>>,
    /// Tokens committed per layer, from 0.
    committed: Vec<u32>,
    source: Option<Arc<Pin>>,
    /// The prefix that it goes on from, until every layer is attached.
    resumption: Option<Box<Resumption>>,
    /// Tokens at the start whose pages are the tree's (I-19).
    floor_tokens: u32,
}

/// Witness that the rows of one layer for `tokens` are written, ordered before whoever holds it.
///
/// It comes from [`WriteLease::commit_layer`] only.
#[must_use = "a layer can be sent only with its witness"]
pub struct WrittenLayer {
    layer: LayerId,
    tokens: Range<u32>,
    /// Keeps the written pages: whoever can send them can also read them.
    source: SourceLease,
}

/// Keeps the slots of a write lease until it is dropped: what a posted operation holds while it reads
/// its source. Cheap to clone.
#[derive(Clone)]
#[must_use = "the slots are kept only while this lives"]
pub struct SourceLease {
    keeper: Keeper,
}

#[derive(Clone)]
enum Keeper {
    Request(Arc<Pin>),
    Prefix(Arc<PrefixLease>),
}

impl WriteLease {
    pub(crate) fn new(tenancy: Arc<Tenancy>) -> WriteLease {
        let committed = vec![0; usize::from(tenancy.pools.schema.layer_count())];
        let floor_tokens = tenancy.shared_tokens();
        WriteLease {
            tenancy: Some(tenancy),
            committed,
            source: None,
            resumption: None,
            floor_tokens,
        }
    }

    /// With the end of a prefix to attach.
    pub(crate) fn resuming(mut self, resumption: Resumption) -> WriteLease {
        self.resumption = Some(Box::new(resumption));
        self
    }

    /// Takes over the end of the prefix in one layer: waits until the layer has landed in every page of
    /// the prefix, and copies the window and the states of its checkpoint into this lease's own slots.
    /// From then on the layer can be read and written behind the prefix, whose tokens count as
    /// committed. Nothing to do for a lease that does not resume, or a second time.
    ///
    /// # Errors
    /// `Gate` when a flight that brings a part of the prefix failed, or at the deadline: the prefix is
    /// then a miss. `NoCheckpoint`, `UnknownLayer`.
    pub fn attach_layer(&mut self, layer: LayerId, deadline: Deadline) -> Result<(), Error> {
        let tenancy = self.tenancy().clone();
        tenancy.pools.schema.check_layer(layer)?;
        let Some(resumption) = &mut self.resumption else {
            return Ok(());
        };
        if resumption.is_attached(layer) {
            return Ok(());
        }
        tenancy.wait_shared(layer, deadline)?;
        resumption.copy_layer(layer, &tenancy, deadline)?;
        self.committed[layer.index()] = resumption.tokens();
        if resumption.is_over() {
            self.resumption = None;
        }
        Ok(())
    }

    fn check_attached(&self, layer: LayerId) -> Result<(), Error> {
        match &self.resumption {
            Some(resumption) if !resumption.is_attached(layer) => Err(ErrorKind::NotAttached {
                layer,
                prefix_tokens: resumption.tokens(),
            }
            .into()),
            _ => Ok(()),
        }
    }

    /// The slots.
    pub fn block_table(&self) -> &BlockTable {
        &self.tenancy().table
    }

    /// The request they belong to.
    pub fn room(&self) -> Room {
        self.tenancy().room
    }

    /// Number of this reservation; its pools never use it twice.
    pub fn number(&self) -> Epoch {
        self.tenancy().number()
    }

    /// What may still touch the slots from this process. Pass it with every post of them.
    pub fn ledger(&self) -> &Arc<FlightLedger> {
        &self.tenancy().ledger
    }

    /// The pages of one layer, to write and to read what was written.
    ///
    /// # Errors
    /// `UnknownLayer`; `NotAttached` for a lease that resumes, before [`WriteLease::attach_layer`].
    pub fn layer_mut(&mut self, layer: LayerId) -> Result<LayerMut<'_>, Error> {
        let tenancy = self.tenancy();
        tenancy.pools.schema.check_layer(layer)?;
        self.check_attached(layer)?;
        Ok(LayerMut::new(tenancy, layer, self.floor_tokens))
    }

    /// States that the rows of one layer for `tokens` are written by this thread, or by threads that
    /// it has joined. The witness covers everything committed so far.
    ///
    /// # Errors
    /// `UnknownLayer`; `NotAttached` as for [`WriteLease::layer_mut`]; `CommitGap` when tokens between
    /// the last commit and this one are missing or the range does not fit the reservation; `Slot` when
    /// a reader count is full.
    pub fn commit_layer(
        &mut self,
        layer: LayerId,
        tokens: Range<u32>,
    ) -> Result<WrittenLayer, Error> {
        self.tenancy().pools.schema.check_layer(layer)?;
        self.check_attached(layer)?;
        let done = self.committed[layer.index()];
        let limit = self.block_table().tokens();
        if tokens.start > done || tokens.end < done.max(1) || tokens.end > limit {
            return Err(ErrorKind::CommitGap {
                layer,
                committed: done,
                tokens,
                limit,
            }
            .into());
        }
        let source = self.source_lease()?;
        self.committed[layer.index()] = tokens.end;
        Ok(WrittenLayer {
            layer,
            tokens: 0..tokens.end,
            source,
        })
    }

    /// Tokens of a layer that have been committed.
    pub fn committed_tokens(&self, layer: LayerId) -> u32 {
        self.committed.get(layer.index()).copied().unwrap_or(0)
    }

    /// Keeps the slots beyond this lease, for operations that read them.
    ///
    /// # Errors
    /// `Slot` when a reader count is full.
    pub fn source_lease(&mut self) -> Result<SourceLease, Error> {
        let pin = match &self.source {
            Some(pin) => pin.clone(),
            None => {
                let pin = Arc::new(Pin::new(self.tenancy())?);
                self.source = Some(pin.clone());
                pin
            }
        };
        Ok(SourceLease {
            keeper: Keeper::Request(pin),
        })
    }

    /// Ends the lease. The slots are free once the operations that read them are terminal.
    pub fn close(mut self) -> DrainingFlight {
        let tenancy = self.take();
        let parked = tenancy.end(None);
        DrainingFlight::new(tenancy.pools.clone(), parked)
    }

    /// Whether its slots are slots of these pools.
    pub(crate) fn is_of(&self, pools: &Arc<PoolInner>) -> bool {
        Arc::ptr_eq(&self.tenancy().pools, pools)
    }

    /// Pages of the first `tokens` tokens are the tree's from now on: read only (I-19).
    pub(crate) fn raise_floor(&mut self, tokens: u32) {
        self.floor_tokens = self.floor_tokens.max(tokens);
    }

    /// Tokens at the start whose pages are read only.
    pub(crate) fn floor_tokens(&self) -> u32 {
        self.floor_tokens
    }

    /// Takes the slots out; the lease then ends without draining them.
    pub(crate) fn take(&mut self) -> Arc<Tenancy> {
        self.source = None;
        self.tenancy
            .take()
            .expect("I-10: a write lease is ended once, by value or by drop")
    }

    /// Puts the slots back after a step that did not happen.
    pub(crate) fn restore(&mut self, tenancy: Arc<Tenancy>) {
        self.tenancy = Some(tenancy);
    }

    pub(crate) fn tenancy(&self) -> &Arc<Tenancy> {
        self.tenancy
            .as_ref()
            .expect("I-10: a write lease is ended once, by value or by drop")
    }
}

impl Drop for WriteLease {
    fn drop(&mut self) {
        self.source = None;
        if let Some(tenancy) = self.tenancy.take() {
            tenancy.pools.park(tenancy.end(None));
        }
    }
}

impl fmt::Debug for WriteLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteLease")
            .field("tenancy", &self.tenancy)
            .finish_non_exhaustive()
    }
}

impl WrittenLayer {
    /// The layer.
    pub fn layer(&self) -> LayerId {
        self.layer
    }

    /// The tokens whose rows are written.
    pub fn tokens(&self) -> Range<u32> {
        self.tokens.clone()
    }

    /// Keeps the written pages for an operation that reads them.
    pub fn source(&self) -> &SourceLease {
        &self.source
    }
}

impl fmt::Debug for WrittenLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WrittenLayer")
            .field("layer", &self.layer)
            .field("tokens", &self.tokens)
            .finish_non_exhaustive()
    }
}

impl SourceLease {
    pub(crate) fn of_prefix(lease: &Arc<PrefixLease>) -> SourceLease {
        SourceLease {
            keeper: Keeper::Prefix(lease.clone()),
        }
    }

    /// The slots it keeps.
    pub fn block_table(&self) -> &BlockTable {
        match &self.keeper {
            Keeper::Request(pin) => &pin.tenancy.table,
            Keeper::Prefix(lease) => lease.block_table(),
        }
    }

    /// The transfer names of the pools whose slots it keeps, which must be `pools`.
    ///
    /// # Errors
    /// `InvalidRequest` for other pools: a number there is another page. `NotRegistered`.
    pub(crate) fn pool_ids_in(&self, pools: &PoolSet) -> Result<Vec<PoolId>, Error> {
        let is_of = match &self.keeper {
            Keeper::Request(pin) => Arc::ptr_eq(&pin.tenancy.pools, &pools.inner),
            Keeper::Prefix(lease) => lease.is_of(pools),
        };
        if !is_of {
            let expected = "the pools that the witness is of".to_owned();
            return Err(invalid("pools", 0_u32, expected));
        }
        Ok(pools.pool_ids().ok_or(ErrorKind::NotRegistered)?)
    }

    /// Whether it keeps the slots of that request.
    pub(crate) fn is_of(&self, tenancy: &Arc<Tenancy>) -> bool {
        matches!(&self.keeper, Keeper::Request(pin) if Arc::ptr_eq(&pin.tenancy, tenancy))
    }
}

impl fmt::Debug for SourceLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SourceLease")
            .field("block_table", self.block_table())
            .finish()
    }
}
