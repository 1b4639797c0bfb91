//! One sequence in one process: the model over pools of its own. Nothing is posted and nothing is waited
//! for; the producer's lease is read and written from the first to the last token.

use std::ops::Range;
use std::sync::Arc;

use kvgate_kvcache::{LayerId, LayerMut, PoolConfig, PoolSet, Room, Space, WriteLease};
use kvgate_model::{LayerCaches, Logits, ModelError};
use kvgate_transfer::MemoryKind;

use super::compare::RowDigests;
use super::failure::Failure;
use super::model::{Host, cache_failure, model_failure};
use super::rows;

/// Makes sequences, one at a time.
pub struct Mono<'a> {
    host: &'a Host,
    pools: Option<(u32, PoolSet)>,
}

/// A sequence that grows at its end.
pub struct Sequence<'a> {
    host: &'a Host,
    caches: Caches,
    tokens: u32,
}

struct Caches {
    lease: WriteLease,
}

impl<'a> Mono<'a> {
    /// Sequences of this model.
    #[must_use]
    pub fn new(host: &'a Host) -> Self {
        Self { host, pools: None }
    }

    /// An empty sequence that may reach `tokens` tokens. The former one must be gone.
    pub fn begin(&mut self, tokens: u32) -> Result<Sequence<'a>, Failure> {
        let (capacity, pools) = match self.pools.take() {
            Some((capacity, pools)) if capacity >= tokens => (capacity, pools),
            _ => (tokens, self.make_pools(tokens)?),
        };
        let lease = pools
            .reserve(tokens, Room(0))
            .map_err(|error| cache_failure(&error))?;
        self.pools = Some((capacity, pools));
        Ok(Sequence {
            host: self.host,
            caches: Caches { lease },
            tokens: 0,
        })
    }
}

impl Mono<'_> {
    fn make_pools(&self, tokens: u32) -> Result<PoolSet, Failure> {
        let counts = self.host.schema.slots_for(tokens);
        let config = PoolConfig {
            pages: counts.of(Space::Page),
            windows: counts.of(Space::Window),
            requests: counts.of(Space::Request),
            memory: MemoryKind::Host,
        };
        PoolSet::new(Arc::clone(&self.host.schema), config).map_err(|error| cache_failure(&error))
    }
}

impl Sequence<'_> {
    /// Appends tokens and returns the logits asked for.
    pub fn forward(&mut self, ids: &[u32], want: Logits) -> Result<Vec<f32>, Failure> {
        let logits = self
            .host
            .model
            .forward(ids, self.tokens, &mut self.caches, want, None)
            .map_err(|error| model_failure(&error))?;
        self.tokens += ids.len() as u32;
        Ok(logits)
    }

    /// Digests of every live row after `tokens` tokens.
    pub fn row_digests(&mut self, tokens: u32) -> Result<Vec<RowDigests>, Failure> {
        let schema = &self.host.schema;
        let mut digests = Vec::new();
        for layer in schema.layers() {
            let view = self
                .caches
                .lease
                .layer_mut(layer)
                .map_err(|error| cache_failure(&error))?;
            digests.extend(rows::of_layer(schema, layer, tokens, |row| {
                view.component(row.component)
            }));
        }
        Ok(digests)
    }
}

impl LayerCaches for Caches {
    fn layer(&mut self, layer: LayerId) -> Result<LayerMut<'_>, ModelError> {
        self.lease.layer_mut(layer).map_err(ModelError::from)
    }

    fn layer_done(&mut self, layer: LayerId, tokens: Range<u32>) -> Result<(), ModelError> {
        let _ = (layer, tokens);
        Ok(())
    }
}
