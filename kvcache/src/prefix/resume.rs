//! What goes on behind a prefix: a request that resumes, and slots for a prefix that arrives.
//!
//! Pages of compressed rows are shared for reading. The window and the states of the end are copied into
//! slots of the request's own, layer by layer, and never mapped: they move on with every token (I-19).

use kvgate_transfer::Deadline;

use crate::block_table::BlockTable;
use crate::error::{Error, ErrorKind};
use crate::ids::{LayerId, PageId, Room};
use crate::lease::tenancy::{Shared, Tenancy, wait_gates};
use crate::lease::write::WriteLease;
use crate::pool::{PoolInner, PoolSet};
use crate::prefix::lease::{PrefixLease, PrefixParts, Run, gates_of};
use crate::schema::{PAGE_TOKENS, SlotCounts, Space};

/// The end of a prefix that a request still has to copy.
pub(crate) struct Resumption {
    /// The prefix: its length, and where the rows of its end lie.
    table: BlockTable,
    /// Keeps the window slots of the end; empty without a checkpoint.
    tail: Vec<Run>,
    is_attached: Vec<bool>,
}

impl Resumption {
    pub(crate) fn tokens(&self) -> u32 {
        self.table.tokens()
    }

    pub(crate) fn is_attached(&self, layer: LayerId) -> bool {
        self.is_attached[layer.index()]
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_attached.iter().all(|attached| *attached)
    }

    /// Copies the live rows of the end in one layer, once they have landed.
    pub(crate) fn copy_layer(
        &mut self,
        layer: LayerId,
        into: &Tenancy,
        deadline: Deadline,
    ) -> Result<(), Error> {
        if self.tail.is_empty() {
            let prefix_tokens = self.tokens();
            return Err(ErrorKind::NoCheckpoint { prefix_tokens }.into());
        }
        wait_gates(&gates_of(&self.tail), layer, deadline)?;
        copy_boundary(&into.pools, layer, self.tokens(), &self.table, &into.table);
        self.is_attached[layer.index()] = true;
        Ok(())
    }
}

/// Copies every page of the window space that holds a live row of a layer at a boundary. The caller
/// leases the source and owns the destination.
pub(crate) fn copy_boundary(
    pools: &PoolInner,
    layer: LayerId,
    tokens: u32,
    from: &BlockTable,
    into: &BlockTable,
) {
    let schema = &pools.schema;
    let rows = schema.rows_of(layer).iter();
    for row in rows.filter(|row| row.space == Space::Window) {
        for ordinal in schema.live_ordinals(row, tokens) {
            let (from, into) = (
                from.physical_page(row, ordinal),
                into.physical_page(row, ordinal),
            );
            pools.bytes.copy_page(pools.span(row.pool), from, into);
        }
    }
}

impl PoolSet {
    /// Slots for a request of `total_tokens` tokens, prompt and output, that goes on behind `prefix`: its
    /// pages are shared, everything else is the request's own.
    ///
    /// To compute, attach each layer first ([`WriteLease::attach_layer`]), then go on at the length of
    /// the prefix. To receive the rest from elsewhere, promise the slots with a plan that starts there
    /// ([`crate::TransferPlan::compile_from`]); then no checkpoint is needed.
    ///
    /// # Errors
    /// The prefix comes back with the reason: `Exhausted` (retry later), `NeverFits`; `InvalidRequest` for a
    /// prefix of other pools, or one that leaves no token: the last token of a prompt is always
    /// computed, so a prefix ends before it.
    pub fn resume(
        &self,
        prefix: PrefixLease,
        total_tokens: u32,
        room: Room,
    ) -> Result<WriteLease, Box<(PrefixLease, Error)>> {
        match self.take_behind(&prefix, total_tokens) {
            Ok([pages, windows, request]) => {
                let schema = self.schema();
                let pages = [prefix.block_table().pages(), &pages].concat();
                let table = BlockTable::new(schema, total_tokens, pages, windows, request[0]);
                let PrefixParts {
                    table: prefix_table,
                    holds,
                    gates,
                    tail,
                } = prefix.into_parts();
                let resumption = Resumption {
                    table: prefix_table,
                    tail,
                    is_attached: vec![false; usize::from(schema.layer_count())],
                };
                let lease = self.write_lease(table, room, Shared { holds, gates });
                Ok(lease.resuming(resumption))
            }
            Err(error) => Err(Box::new((prefix, error))),
        }
    }

    fn take_behind(
        &self,
        prefix: &PrefixLease,
        total_tokens: u32,
    ) -> Result<[Vec<PageId>; Space::COUNT], Error> {
        check_pools(self, prefix)?;
        if total_tokens <= prefix.tokens() {
            let expected = format!("more than the {} of the prefix", prefix.tokens());
            return Err(invalid("total_tokens", total_tokens, expected));
        }
        let counts = self.schema().slots_for(total_tokens);
        self.take_slots(SlotCounts {
            pages: counts.pages - prefix.block_table().pages().len() as u32,
            ..counts
        })
    }

    /// Slots for a prefix of `tokens` tokens that comes from elsewhere: the pages behind `held`, if there is
    /// such a prefix here already, and the window slots of its end. No request slot: nobody computes in
    /// them. Promise them with a plan that starts behind `held`.
    ///
    /// # Errors
    /// `Exhausted`, `NeverFits`; `InvalidRequest` when `tokens` is no multiple of 256, or `held` is longer or
    /// of other pools. Then `held` is given up.
    pub fn reserve_prefix(
        &self,
        tokens: u32,
        held: Option<PrefixLease>,
        room: Room,
    ) -> Result<WriteLease, Error> {
        let schema = self.schema();
        let held_tokens = held.as_ref().map_or(0, PrefixLease::tokens);
        if tokens == 0 || !tokens.is_multiple_of(PAGE_TOKENS) || held_tokens > tokens {
            let expected = format!("a multiple of {PAGE_TOKENS}, at least {held_tokens}, above 0");
            return Err(invalid("tokens", tokens, expected));
        }
        if let Some(held) = &held {
            check_pools(self, held)?;
        }
        let [pages, windows, _] = self.take_slots(SlotCounts {
            pages: (tokens - held_tokens) / PAGE_TOKENS,
            windows: schema.boundary_windows(tokens).len() as u32,
            requests: 0,
        })?;
        let held_pages = held
            .as_ref()
            .map_or(&[][..], |held| held.block_table().pages());
        let pages = [held_pages, &pages].concat();
        let table = BlockTable::of_prefix(schema, tokens, pages, windows);
        let shared = held.map_or_else(Shared::default, |held| {
            let PrefixParts { holds, gates, .. } = held.into_parts();
            Shared { holds, gates }
        });
        Ok(self.write_lease(table, room, shared))
    }
}

fn check_pools(pools: &PoolSet, prefix: &PrefixLease) -> Result<(), Error> {
    match prefix.is_of(pools) {
        true => Ok(()),
        false => Err(invalid(
            "prefix",
            0_u32,
            "a prefix of the same pools".to_owned(),
        )),
    }
}

pub(crate) fn invalid(field: &'static str, value: impl Into<u64>, expected: String) -> Error {
    let value = value.into();
    ErrorKind::InvalidRequest {
        field,
        value,
        expected,
    }
    .into()
}
