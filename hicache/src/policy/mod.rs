//! Orders in which a tier gives pages up.
//!
//! [`EvictionPolicy`] is the trait of kvcache: it proposes, the tree decides what can go, so pins,
//! parents and whole block sets are respected by every policy.

mod s3fifo;

pub use kvgate_kvcache::prefix::{EvictionPolicy, Lru};
pub use s3fifo::S3Fifo;
