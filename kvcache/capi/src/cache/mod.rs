//! The paged cache of a model: its shape, its pools, and the leases whose gates give out addresses.

pub(crate) mod config;

// The order of the header is the order of these.
pub(crate) mod schema;

pub(crate) mod pools;

pub(crate) mod plan;

pub(crate) mod write;

pub(crate) mod layer;

pub(crate) mod receive;

pub(crate) mod offer;
