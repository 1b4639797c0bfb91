//! Storage tiers behind the host tier: what is there goes to them as records, and comes back from them.
//!
//! **Storing.** A prefix that is whole in the host tier becomes records: its blocks, then its end. A worker gathers
//! the rows under a pin that moves into the work, and writes what a tier does not have. The queue is bounded and never
//! waited for; a store that finds it full is dropped and counted.
//!
//! **Fetching.** A worker asks the tiers, nearest first, which blocks and ends they have, decides on the longest prefix
//! that a request can go on from, claims its records, reserves slots in the host tier and fills them with rows of
//! verified records. Nobody sees the slots before the prefix is published, and it is published with every record or
//! not at all: where a record turns out to be missing, the prefix is the one that ends before it, if one does
//! (I-22). A deadline ends a wait, never a read; the slots are kept until the read is over.
//!
//! **Weighing.** Before a byte is read, a [`CostModel`] says by measured rates whether the prefix, or how much of it, comes
//! sooner from the tiers than from the model. What is not known is loaded.
//!
//! **Limits.** [`TierLimits`] hold each tier to so many bytes a second, in and out, and to so many a day. A read whose turn
//! is behind its deadline is a miss; a write makes its worker wait, and nobody else.
//!
//! An error of a tier is a miss with a cause. It is never an error of a request, and never a hit. A tier that panics
//! has failed in the same way: what was begun ends, and its worker goes on.
//!
//! No call here talks to another rank or waits for one.

mod claims;
mod cost;
mod counts;
#[cfg(not(kv_loom))]
mod fetch;
#[cfg(not(kv_loom))]
mod gate;
mod limit;
mod queue;
#[cfg(not(kv_loom))]
mod rows;
#[cfg(not(kv_loom))]
mod store;
#[cfg(not(kv_loom))]
mod weigh;

#[cfg(not(kv_loom))]
mod stack;

pub use claims::{Claim, Claims};
pub use cost::{Candidate, Choice, CostConfig, CostModel, CostRates};
pub use counts::{FetchCounts, StorageCounts, StorageTierCounts, StoreCounts};
pub use limit::{Limit, Limiter, Refused, TierLimits, Wear};
pub use queue::{Queue, Running};

#[cfg(not(kv_loom))]
pub use fetch::Fetch;
#[cfg(not(kv_loom))]
pub(crate) use stack::Storage;
#[cfg(not(kv_loom))]
pub use stack::{Place, PrefetchPolicy, StorageConfig, StorageEnd, StorageTier, WritePolicy};

/// Runs what calls into tiers, which may be the code of others: `None` when it panicked. Slots, claims and pins have
/// been given back by then, as on any way out.
#[cfg(not(kv_loom))]
pub(crate) fn contained<T>(work: impl FnOnce() -> T) -> Option<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).ok()
}
