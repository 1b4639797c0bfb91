//! What the model asks of whoever owns its caches.

use std::ops::Range;
use std::sync::Arc;

use kvgate_kvcache::{CacheSchema, LayerId, LayerMut, PoolConfig, PoolSet, Room, WriteLease};
use kvgate_transfer::MemoryKind;

use crate::error::ModelError;

/// The caches of one sequence, layer by layer.
///
/// A producer commits and posts a layer in `layer_done`; a consumer waits for the layer's arrival in
/// `layer`.
pub trait LayerCaches {
    /// A view of `layer` that the call may read and write.
    ///
    /// # Errors
    /// The layer is not ready, or does not exist.
    fn layer(&mut self, layer: LayerId) -> Result<LayerMut<'_>, ModelError>;

    /// The rows of `tokens` of this layer are written.
    ///
    /// # Errors
    /// The layer cannot be committed.
    fn layer_done(&mut self, layer: LayerId, tokens: Range<u32>) -> Result<(), ModelError>;
}

/// Caches of a sequence that one process computes from the first to the last token.
///
/// The lease is read and written without a commit: nothing is sent.
#[derive(Debug)]
pub struct MonoCaches {
    lease: WriteLease,
}

impl MonoCaches {
    /// Pools for one sequence of at most `total_tokens` tokens, in private memory.
    ///
    /// # Errors
    /// The pools do not fit the memory, or `total_tokens` is 0.
    pub fn new(schema: &CacheSchema, total_tokens: u32) -> Result<Self, ModelError> {
        let counts = schema.slots_for(total_tokens);
        let config = PoolConfig {
            pages: counts.pages,
            windows: counts.windows,
            requests: counts.requests,
            memory: MemoryKind::Host,
        };
        let pools = PoolSet::new(Arc::new(schema.clone()), config)?;
        Ok(Self::over(pools.reserve(total_tokens, Room(0))?))
    }

    /// Caches in a reservation of shared pools.
    pub fn over(lease: WriteLease) -> Self {
        Self { lease }
    }

    /// The reservation.
    pub fn lease(&self) -> &WriteLease {
        &self.lease
    }
}

impl LayerCaches for MonoCaches {
    fn layer(&mut self, layer: LayerId) -> Result<LayerMut<'_>, ModelError> {
        Ok(self.lease.layer_mut(layer)?)
    }

    fn layer_done(&mut self, _layer: LayerId, _tokens: Range<u32>) -> Result<(), ModelError> {
        Ok(())
    }
}
