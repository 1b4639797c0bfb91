//! [`Checkpoint`]: the window and the states of one boundary, in slots of their own.
//!
//! A request goes on and its window moves; what the next request needs at a boundary is copied out
//! while it is still there. Between the boundary and its copy the request may go on as far as its
//! ring of window slots allows.

use std::fmt;

use kvgate_transfer::Epoch;
use kvgate_transfer::sync::Arc;

use crate::block_table::BlockTable;
use crate::error::{Error, ErrorKind};
use crate::ids::{LayerId, Room};
use crate::lease::tenancy::{Shared, Tenancy};
use crate::lease::write::WriteLease;
use crate::pool::PoolSet;
use crate::prefix::resume::{copy_boundary, invalid};
use crate::schema::{PAGE_TOKENS, SlotCounts};

/// A checkpoint that is being copied, layer by layer. Dropped, its slots are free.
#[must_use = "dropping it gives its slots up"]
pub struct CheckpointWriter {
    lease: WriteLease,
    /// The request that the first layer came from: the others must too.
    source: Option<Epoch>,
    is_saved: Vec<bool>,
}

/// A complete checkpoint. [`crate::PrefixTree::publish`] takes it; dropped, its slots are free.
#[must_use = "dropping it gives its slots up"]
pub struct Checkpoint {
    lease: WriteLease,
    source: Epoch,
}

impl PoolSet {
    /// Window slots for the checkpoint of a boundary after `tokens` tokens.
    ///
    /// # Errors
    /// `Exhausted`, `NeverFits`; `InvalidRequest` when `tokens` is no multiple of 256, or 0.
    pub fn reserve_checkpoint(&self, tokens: u32, room: Room) -> Result<CheckpointWriter, Error> {
        if tokens == 0 || !tokens.is_multiple_of(PAGE_TOKENS) {
            let expected = format!("a multiple of {PAGE_TOKENS} above 0");
            return Err(invalid("tokens", tokens, expected));
        }
        let schema = self.schema();
        let [_, windows, _] = self.take_slots(SlotCounts {
            pages: 0,
            windows: schema.boundary_windows(tokens).len() as u32,
            requests: 0,
        })?;
        let table = BlockTable::of_prefix(schema, tokens, Vec::new(), windows);
        Ok(CheckpointWriter {
            lease: self.write_lease(table, room, Shared::default()),
            source: None,
            is_saved: vec![false; usize::from(schema.layer_count())],
        })
    }
}

impl CheckpointWriter {
    /// Tokens of the boundary.
    pub fn tokens(&self) -> u32 {
        self.lease.block_table().tokens()
    }

    /// Copies the live rows of one layer at the boundary from a request that has committed them. Nothing
    /// behind the last commit of the layer may have been written yet.
    ///
    /// # Errors
    /// `NotWritten` when the request has not committed the layer up to the boundary; `InvalidRequest` when it
    /// has gone on so far that rows of the boundary are overwritten, began behind it, is another one than for
    /// the layers before, or is of other pools.
    pub fn save_layer(&mut self, layer: LayerId, from: &WriteLease) -> Result<(), Error> {
        let into = self.lease.tenancy();
        let pools = &into.pools;
        pools.schema.check_layer(layer)?;
        if !from.is_of(pools) {
            return Err(invalid(
                "from",
                0_u32,
                "a lease of the same pools".to_owned(),
            ));
        }
        if let Some(source) = self.source
            && source != from.number()
        {
            let expected = format!("{source}, the request that the other layers are of");
            return Err(invalid("from.number", from.number().0, expected));
        }
        let tokens = self.tokens();
        // Of its prefix a request has the pages and the last end, no earlier one.
        let prefix_tokens = from.tenancy().shared_tokens();
        if tokens < prefix_tokens {
            let expected = format!("at least the {prefix_tokens} that the request goes on behind");
            return Err(invalid("tokens", tokens, expected));
        }
        let committed = from.committed_tokens(layer);
        if committed < tokens {
            return Err(ErrorKind::NotWritten {
                layer,
                needed_tokens: tokens,
                written_tokens: committed,
            }
            .into());
        }
        let ring = from.block_table().windows().len() as u32;
        let limit = (pools.schema.boundary_windows(tokens).start + ring) * PAGE_TOKENS;
        if committed > limit {
            let expected = format!(
                "at most {limit}: rows of the boundary at {tokens} are overwritten behind it"
            );
            return Err(invalid("committed tokens", committed, expected));
        }
        copy_boundary(pools, layer, tokens, from.block_table(), &into.table);
        self.is_saved[layer.index()] = true;
        self.source = Some(from.number());
        Ok(())
    }

    /// The checkpoint, once every layer is saved.
    ///
    /// # Errors
    /// `NotWritten` naming the first layer that is missing; the slots are given up.
    pub fn finish(self) -> Result<Checkpoint, Error> {
        let missing = self.is_saved.iter().position(|saved| !saved);
        match (missing, self.source) {
            (None, Some(source)) => Ok(Checkpoint {
                lease: self.lease,
                source,
            }),
            (layer, _) => Err(ErrorKind::NotWritten {
                layer: LayerId(layer.unwrap_or(0) as u16),
                needed_tokens: self.tokens(),
                written_tokens: 0,
            }
            .into()),
        }
    }
}

impl Checkpoint {
    /// Tokens of the boundary.
    pub fn tokens(&self) -> u32 {
        self.lease.block_table().tokens()
    }

    /// The request whose end it is, by [`WriteLease::number`].
    pub(crate) fn source(&self) -> Epoch {
        self.source
    }

    pub(crate) fn tenancy(&self) -> &Arc<Tenancy> {
        self.lease.tenancy()
    }

    pub(crate) fn is_of(&self, pools: &PoolSet) -> bool {
        self.lease.is_of(&pools.inner)
    }
}

impl fmt::Debug for CheckpointWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckpointWriter")
            .field("tokens", &self.tokens())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("tokens", &self.tokens())
            .finish_non_exhaustive()
    }
}
