//! Tiers of a paged KV cache behind the same gate as a hand-off.
//!
//! A prefix is a set of complete records or it is not there. A record holds every component of every
//! layer of one block of tokens, or of one boundary; its identity is stored in it and compared when it
//! is read, and every byte of it is under a checksum. What does not verify is a miss with a cause,
//! never data.
//!
//! * [`identity`] names blocks: one key function for lookup, insertion and storage.
//! * [`record`] is what is stored: a block of compressed rows or a boundary to go on from.
//! * [`tier`] is what every place that keeps records looks like.
//! * [`log`] keeps records on the local disk.
//! * [`storage`] puts tiers behind the host tier: stores, fetches, their policies and figures.
//! * [`figures`] are counts of lengths and of components.
//! * `testkit` (feature) has what a tier is tested with: a disk with crashes and faults, records whose
//!   content follows from their name.
//! * `events` (feature) tells a router what is where.
//! * [`Miss`] says why a read gave nothing.
//!
//! # Blocking
//! No call waits for another process without a deadline, and nothing here is a collective operation.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod cache;
pub mod error;
#[cfg(all(feature = "events", not(kv_loom)))]
pub mod events;
#[cfg(not(kv_loom))]
mod evicted;
pub mod figures;
pub mod flight;
pub mod host;
#[cfg(not(kv_loom))]
pub mod log;
#[cfg(all(feature = "metrics", not(kv_loom)))]
mod metrics;
mod miss;
pub mod policy;
pub mod record;
mod side;
pub mod storage;
#[cfg(all(feature = "testkit", not(kv_loom)))]
pub mod testkit;
#[cfg(not(kv_loom))]
pub mod tier;

pub use cache::Hicache;
pub use error::{Error, ErrorKind};
pub use kvgate_kvcache::identity;
pub use miss::Miss;
pub use side::Side;
