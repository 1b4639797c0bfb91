//! Paged DeepSeek-V4 KV cache.

#![deny(unsafe_code)]
#![deny(missing_docs)]

pub mod block_table;
pub mod canary;
pub mod error;
#[cfg(all(feature = "fault-injection", not(kv_loom)))]
#[doc(hidden)]
pub mod fault;
pub mod fingerprint;
pub mod geometry;
pub mod handoff;
pub mod ids;
pub mod layout;
pub mod lease;
pub mod page;
pub mod plan;
pub mod pool;
pub mod prefix;
pub mod schema;

pub use block_table::BlockTable;
pub use error::{Error, ErrorKind};
pub use fingerprint::{FieldDifference, Fingerprint};
pub use geometry::{Formats, IndexKFormat, LatentFormat, V4Geometry, WindowPage, Yarn};
pub use ids::{Attempt, LayerId, PageId, Room};
pub use kvgate_transfer::MemoryKind;
pub use layout::{RowFormat, RowPlace};
pub use lease::{
    AllReady, AppendLease, ComponentView, InFlight, LayerMut, LayerRef, PageLease, ReadyLayer,
    SourceLease, WriteLease, WrittenLayer,
};
pub use plan::{KvPost, PageMove, PlannedChunk, PostTarget, TransferPlan, WriterLayers};
pub use pool::drain::DrainingFlight;
pub use pool::{PoolConfig, PoolSet, PoolStats, SpaceStats};
pub use prefix::{Hit, PrefixLease, PrefixTree};
pub use schema::{CacheSchema, Component, ComponentRow, LivePage, PoolIndex, Space};
