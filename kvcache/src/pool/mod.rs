//! Pools: the memory of all components, the slots that address it, and their allocator.
//!
//! **Lock order.** `parked` before the allocator's free lists and before any lock of the transfer
//! crate; that of the registration (`registration.rs`) before the table of its agent and no other. No lock is
//! held while a lease is dropped.

pub(crate) mod allocator;
pub(crate) mod drain;
mod registration;

use std::fmt;

use kvgate_transfer::sync::{Arc, AtomicU64, Mutex, Ordering};
use kvgate_transfer::{
    Agent, Deadline, Epoch, Incarnation, MemoryKind, PeerId, PoolGeometry, PoolId, WriterRank,
};

use crate::block_table::BlockTable;
use crate::error::{Error, ErrorKind};
use crate::ids::{PageId, Room};
use crate::lease::tenancy::{Shared, Tenancy};
use crate::lease::write::WriteLease;
use crate::page::raw::{PoolBytes, PoolSpan};
use crate::pool::allocator::Allocator;
use crate::pool::drain::Parked;
use crate::pool::registration::Registration;
use crate::schema::{CacheSchema, PoolIndex, SlotCounts, Space};

/// Pools start at multiples of this, so that a page of one pool shares no host page with another.
const POOL_ALIGN_BYTES: u64 = 4096;

/// How much a [`PoolSet`] holds. Counts are usable slots, without the null page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Logical pages of 256 tokens.
    pub pages: u32,
    /// Window slots; a request of more than 256 tokens needs [`CacheSchema::window_ring_slots`].
    pub windows: u32,
    /// Requests.
    pub requests: u32,
    /// Where the memory lives. `Shared` can be mapped by a peer on the same host.
    pub memory: MemoryKind,
}

/// The slots of one space at one moment: `free + owned + draining + retired = capacity` (I-23).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceStats {
    /// In the free list.
    pub free: u32,
    /// Held by a lease, a flight or the prefix tree.
    pub owned: u32,
    /// Ended, and not yet proven quiet.
    pub draining: u32,
    /// Of the draining ones, those whose proof may never come.
    pub quarantined: u32,
    /// Out of generations.
    pub retired: u32,
    /// All usable slots.
    pub capacity: u32,
    /// Reservations of a slot that had an owner before.
    pub reuses: u64,
}

impl SpaceStats {
    /// Whether no slot is lost or counted twice.
    pub fn is_conserved(&self) -> bool {
        self.free + self.owned + self.draining + self.retired == self.capacity
    }
}

/// [`SpaceStats`] of every space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Logical pages.
    pub pages: SpaceStats,
    /// Window slots.
    pub windows: SpaceStats,
    /// Request slots.
    pub requests: SpaceStats,
}

impl PoolStats {
    /// Whether no slot of any space is lost or counted twice.
    pub fn is_conserved(&self) -> bool {
        [self.pages, self.windows, self.requests]
            .iter()
            .all(SpaceStats::is_conserved)
    }
}

/// All pools of one cache: one memory, one pool per row of the schema. A cheap handle; the pools live
/// as long as one handle or one lease does.
#[derive(Clone)]
pub struct PoolSet {
    pub(crate) inner: Arc<PoolInner>,
}

pub(crate) struct PoolInner {
    pub(crate) schema: Arc<CacheSchema>,
    pub(crate) bytes: PoolBytes,
    pub(crate) spans: Vec<PoolSpan>,
    pub(crate) allocator: Allocator,
    pub(crate) parked: Mutex<Vec<Parked>>,
    registration: Registration,
    next_lease: AtomicU64,
    memory_bytes: u64,
}

impl PoolSet {
    /// Allocates zeroed pools for every row of the schema in one memory.
    ///
    /// # Errors
    /// `ImpossiblePool` when a count is zero or the sizes exceed 64 bits or 32-bit page numbers;
    /// `OutOfMemory` when the host has less to give, before anything was touched.
    pub fn new(schema: Arc<CacheSchema>, config: PoolConfig) -> Result<PoolSet, Error> {
        PoolSet::with_first_generation(schema, config, 0)
    }

    /// As [`PoolSet::new`], with slots that have had `first_generation` owners. For tests of the end
    /// of a slot's generations.
    ///
    /// # Errors
    /// As [`PoolSet::new`].
    #[doc(hidden)]
    pub fn with_first_generation(
        schema: Arc<CacheSchema>,
        config: PoolConfig,
        first_generation: u32,
    ) -> Result<PoolSet, Error> {
        let (_, memory_bytes) = lay_out(&schema, config.slot_counts())?;
        let bytes = allocate(memory_bytes, config.memory)?;
        PoolSet::build(schema, config, first_generation, bytes)
    }

    /// As [`PoolSet::new`], in zeroed memory that `make` gives for a number of bytes. For counting what a
    /// plan costs, apart from the pools.
    ///
    /// # Errors
    /// As [`PoolSet::new`]; `ImpossiblePool` when the memory is too short.
    #[cfg(not(kv_loom))]
    #[doc(hidden)]
    pub fn over(
        schema: Arc<CacheSchema>,
        config: PoolConfig,
        make: impl FnOnce(u64) -> Result<kvgate_transfer::Memory, kvgate_transfer::Error>,
    ) -> Result<PoolSet, Error> {
        let (_, memory_bytes) = lay_out(&schema, config.slot_counts())?;
        let memory = make(memory_bytes)?;
        if memory.len_bytes() < memory_bytes {
            let kind = ErrorKind::ImpossiblePool {
                field: "memory",
                value: memory.len_bytes(),
                expected: format!("at least {memory_bytes} bytes"),
            };
            return Err(kind.into());
        }
        PoolSet::build(schema, config, 0, PoolBytes::new(Arc::new(memory)))
    }

    fn build(
        schema: Arc<CacheSchema>,
        config: PoolConfig,
        first_generation: u32,
        bytes: PoolBytes,
    ) -> Result<PoolSet, Error> {
        let counts = config.slot_counts();
        let (spans, memory_bytes) = lay_out(&schema, counts)?;
        let inner = PoolInner {
            schema,
            bytes,
            spans,
            allocator: Allocator::new(counts, first_generation),
            parked: Mutex::new(Vec::new()),
            registration: Registration::default(),
            next_lease: AtomicU64::new(1),
            memory_bytes,
        };
        Ok(PoolSet {
            inner: Arc::new(inner),
        })
    }

    /// The schema the pools were made from.
    pub fn schema(&self) -> &Arc<CacheSchema> {
        &self.inner.schema
    }

    /// Bytes of the memory of all pools, null pages included.
    pub fn memory_bytes(&self) -> u64 {
        self.inner.memory_bytes
    }

    /// Registers every pool with an agent, in schema order; once.
    ///
    /// # Errors
    /// `AlreadyRegistered`, also while [`PoolSet::unregister`] waits; an error of the transfer crate.
    pub fn register(&self, agent: &Agent) -> Result<(), Error> {
        let geometry = |span: &PoolSpan| PoolGeometry {
            offset_bytes: span.offset_bytes,
            stride_bytes: span.stride_bytes,
            slot_bytes: span.stride_bytes,
            slot_count: span.page_count,
        };
        let geometries: Vec<PoolGeometry> = self.inner.spans.iter().map(geometry).collect();
        let memory = self.inner.bytes.memory().ok_or(ErrorKind::NoMemory)?;
        self.inner
            .registration
            .begin(agent, memory.clone(), &geometries)
    }

    /// Ends the registration once no operation and no peer uses the memory. Nothing to do when there is none.
    ///
    /// # Errors
    /// The transfer crate's, at the deadline: the pools are still registered, nothing new begins with them,
    /// and they can be unregistered again. `Unregistering`, at once, while another thread does.
    pub fn unregister(&self, deadline: Deadline) -> Result<(), Error> {
        self.inner.registration.end(deadline)
    }

    /// The transfer name of a pool; `None` while the pools are not registered.
    pub fn pool_id(&self, pool: PoolIndex) -> Option<PoolId> {
        self.inner.registration.pool(pool)
    }

    /// The transfer names of all pools in schema order; `None` while they are not registered.
    pub fn pool_ids(&self) -> Option<Vec<PoolId>> {
        self.inner.registration.pools()
    }

    /// The names that `agent` gave to the pools, in schema order: what may be told beside its incarnation.
    ///
    /// # Errors
    /// `NotRegistered`; `OtherAgent` when another one gave them; `Unregistering` when their end has begun.
    pub fn pool_ids_of(&self, agent: &Agent) -> Result<Vec<PoolId>, Error> {
        let registration = &self.inner.registration;
        registration.with_pools_of(agent.incarnation(), <[PoolId]>::to_vec)
    }

    /// Reserves the slots of all components for a request of `total_tokens` tokens, or none.
    ///
    /// # Errors
    /// `Exhausted` (retry later), `NeverFits`, `InvalidRequest` for zero tokens.
    pub fn reserve(&self, total_tokens: u32, room: Room) -> Result<WriteLease, Error> {
        if total_tokens == 0 {
            let expected = "at least 1".to_owned();
            let kind = ErrorKind::InvalidRequest {
                field: "total_tokens",
                value: 0,
                expected,
            };
            return Err(kind.into());
        }
        let schema = &self.inner.schema;
        let [pages, windows, request] = self.take_slots(schema.slots_for(total_tokens))?;
        let table = BlockTable::new(schema, total_tokens, pages, windows, request[0]);
        Ok(self.write_lease(table, room, Shared::default()))
    }

    /// Takes slots; a sweep comes before it gives up.
    pub(crate) fn take_slots(&self, counts: SlotCounts) -> Result<[Vec<PageId>; 3], Error> {
        match self.inner.allocator.reserve(counts) {
            Err(error) if error.is_retryable() => {
                self.sweep();
                self.inner.allocator.reserve(counts)
            }
            other => other,
        }
    }

    /// The lease of taken slots.
    pub(crate) fn write_lease(&self, table: BlockTable, room: Room, shared: Shared) -> WriteLease {
        let epoch = self.inner.next_number();
        WriteLease::new(Tenancy::new(&self.inner, table, room, epoch, shared))
    }

    /// Frees what has been proven quiet since. Called by `reserve` and `stats` as well.
    pub fn sweep(&self) {
        self.inner.sweep();
    }

    /// Tells a flight that ended and was parked that one of its writers is quiet. `false`, and no
    /// effect, when there is no such flight or this connection is not that writer of it.
    pub fn writer_answered(&self, epoch: Epoch, peer: PeerId, writer: WriterRank) -> bool {
        let parked = self.inner.parked.lock();
        let mut flights = parked
            .iter()
            .filter(|parked| parked.flight_epoch() == Some(epoch));
        flights.any(|flight| flight.writer_answered(peer, writer))
    }

    /// The slots by state, after a sweep.
    pub fn stats(&self) -> PoolStats {
        self.sweep();
        let parked = self.inner.parked.lock();
        let stats = |space: Space| {
            let quarantined = parked
                .iter()
                .map(|parked| parked.quarantined_count(space))
                .sum();
            SpaceStats {
                quarantined,
                ..self.inner.allocator.stats(space)
            }
        };
        PoolStats {
            pages: stats(Space::Page),
            windows: stats(Space::Window),
            requests: stats(Space::Request),
        }
    }
}

impl fmt::Debug for PoolSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolSet")
            .field("memory_bytes", &self.inner.memory_bytes)
            .field("pool_count", &self.inner.spans.len())
            .finish_non_exhaustive()
    }
}

impl PoolInner {
    /// A number for an owner of slots; never given out twice.
    pub(crate) fn next_number(&self) -> Epoch {
        Epoch(self.next_lease.fetch_add(1, Ordering::Relaxed))
    }

    /// The span of a row's pool.
    pub(crate) fn span(&self, pool: PoolIndex) -> &PoolSpan {
        &self.spans[pool.index()]
    }

    /// Whether writers can be told the names that an agent gave to the pools. Slots of a model have no bytes
    /// to register, so nobody is told of them.
    pub(crate) fn check_agent(&self, agent: Incarnation) -> Result<(), Error> {
        match self.bytes.memory() {
            Some(_) => self.registration.with_pools_of(agent, |_| ()),
            None => Ok(()),
        }
    }

    pub(crate) fn sweep(&self) {
        let mut parked = self.parked.lock();
        parked.retain_mut(|parked| !parked.try_free(&self.allocator));
    }

    /// Keeps an ended tenancy until it can be freed.
    pub(crate) fn park(&self, parked: Parked) {
        self.parked.lock().push(parked);
        self.sweep();
    }
}

impl PoolConfig {
    fn slot_counts(&self) -> SlotCounts {
        SlotCounts {
            pages: self.pages,
            windows: self.windows,
            requests: self.requests,
        }
    }
}

/// Where each pool lies, and the bytes of all.
fn lay_out(schema: &CacheSchema, counts: SlotCounts) -> Result<(Vec<PoolSpan>, u64), Error> {
    let impossible = |field: &'static str, value: u64, expected: &str| {
        let expected = expected.to_owned();
        Error::from(ErrorKind::ImpossiblePool {
            field,
            value,
            expected,
        })
    };
    for (field, space) in [
        ("pages", Space::Page),
        ("windows", Space::Window),
        ("requests", Space::Request),
    ] {
        let value = u64::from(counts.of(space));
        if value == 0 || value > 1 << 28 {
            return Err(impossible(field, value, "1 to 268435456"));
        }
    }
    let mut offset_bytes = 0_u64;
    let mut spans = Vec::with_capacity(schema.rows().len());
    for row in schema.rows() {
        let page_count = (counts.of(row.space) + 1) * row.pages_per_slot;
        let span = PoolSpan {
            offset_bytes,
            stride_bytes: row.stride_bytes,
            page_count,
        };
        let end = row
            .stride_bytes
            .checked_mul(u64::from(page_count))
            .and_then(|len_bytes| offset_bytes.checked_add(len_bytes))
            .and_then(|end| end.checked_next_multiple_of(POOL_ALIGN_BYTES));
        offset_bytes = end.ok_or_else(|| impossible("bytes", u64::MAX, "less than 2^64"))?;
        spans.push(span);
    }
    Ok((spans, offset_bytes))
}

#[cfg(not(kv_loom))]
fn allocate(memory_bytes: u64, kind: MemoryKind) -> Result<PoolBytes, Error> {
    use kvgate_transfer::Memory;
    let memory = match kind {
        MemoryKind::Shared => Memory::shared("kvgate-pools", memory_bytes)?,
        _ => Memory::host(memory_bytes)?,
    };
    Ok(PoolBytes::new(Arc::new(memory)))
}

/// Models have slots without bytes; their cells stand in the test.
#[cfg(kv_loom)]
fn allocate(_memory_bytes: u64, _kind: MemoryKind) -> Result<PoolBytes, Error> {
    Ok(PoolBytes::absent())
}
