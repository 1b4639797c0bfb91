//! Paged DeepSeek-V4 KV cache.

#![deny(unsafe_code)]
#![deny(missing_docs)]

pub mod error;
pub mod fingerprint;
pub mod geometry;
pub mod ids;
pub mod layout;
pub mod schema;

pub use error::{Error, ErrorKind};
pub use fingerprint::{FieldDifference, Fingerprint};
pub use geometry::{Formats, IndexKFormat, LatentFormat, V4Geometry, WindowPage, Yarn};
pub use ids::{Attempt, LayerId, PageId, Room};
pub use layout::{RowFormat, RowPlace};
pub use schema::{CacheSchema, Component, ComponentRow, LivePage, PoolIndex, Space};
