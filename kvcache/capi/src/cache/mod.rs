//! The paged cache of a model: its shape, its pools, and the leases whose gates give out addresses.

pub(crate) mod config;
pub(crate) mod layer;
pub(crate) mod offer;
pub(crate) mod plan;
pub(crate) mod pools;
pub(crate) mod receive;
pub(crate) mod schema;
pub(crate) mod write;
