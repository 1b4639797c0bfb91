//! A complete DeepSeek-V4 host model in f32 whose KV cache lives in kvgate pages.
//!
//! [`Config`] and [`Weights`] come from a checkpoint folder with hub names, or from the seed of the
//! built-in `tiny-v4`. [`Model::forward`] processes spans of any length at any position; whatever a
//! later call needs is in the pages that [`LayerCaches`] hands out, in their stored format, and the
//! result has the same bits for every chunking.
#![deny(missing_docs)]
#![deny(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

#[allow(unsafe_code)]
mod bridge;
mod caches;
pub mod check;
mod config;
mod dsv4;
mod error;
mod probe;
mod state;
mod weights;

pub use caches::{LayerCaches, MonoCaches};
pub use config::{ARCHITECTURE, Config, RopeScaling};
pub use dsv4::{Logits, Model};
pub use error::{ErrorKind, ModelError};
pub use probe::Probe;
pub use state::DecodeState;
pub use weights::{Weights, dump_generated, safetensors};
