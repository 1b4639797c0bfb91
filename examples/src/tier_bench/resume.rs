//! Time to the first token of a request that goes on behind a prefix: computed from the start, and with the prefix
//! loaded from the host tier. The model is tiny-v4, and both must give the same bits.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kvgate_hicache::Hicache;
use kvgate_hicache::cache::Origin;
use kvgate_kvcache::prefix::CheckpointWriter;
use kvgate_kvcache::{
    CacheSchema, Formats, LayerId, LayerMut, Room, Space, WriteLease, WrittenLayer,
};
use kvgate_model::{LayerCaches, Logits, Model, ModelError};

use super::Args;
use super::loadback::{connect, make_cold};
use super::measure::{failed, soon};
use super::row::Row;
use super::single::row;
use crate::handoff::failure::Failure;
use crate::handoff::model::{cache_failure, model_failure};

/// Tokens that the request has behind the prefix.
const TAIL_TOKENS: u32 = 64;
/// Tokens that are computed at once.
const CHUNK_TOKENS: u32 = 256;
/// The shortest prefix.
const LEAST_TOKENS: u32 = 256;
/// Resumed runs of each length.
const ROUNDS: usize = 3;

/// A computed and a resumed row for each length of the prefix.
pub(super) fn run(args: &Args) -> Result<Vec<Row>, Failure> {
    let model = Model::tiny_v4(1).map_err(|error| model_failure(&error))?;
    let geometry = model.config().geometry(model.weights().digest());
    let schema = CacheSchema::deepseek_v4(&geometry, &Formats::default())
        .map_err(|error| cache_failure(&error))?;
    let world = World {
        model,
        schema: Arc::new(schema),
    };
    let lengths = std::iter::successors(Some(LEAST_TOKENS), |tokens| Some(tokens * 2));
    let mut rows = Vec::new();
    for prefix in lengths.take_while(|tokens| *tokens <= args.tokens) {
        rows.extend(world.measure(args, prefix)?);
    }
    Ok(rows)
}

struct World {
    model: Model,
    schema: Arc<CacheSchema>,
}

/// The caches of one request.
struct Caches {
    lease: WriteLease,
    written: Vec<WrittenLayer>,
    checkpoint: Option<CheckpointWriter>,
}

impl World {
    fn measure(&self, args: &Args, prefix: u32) -> Result<[Row; 2], Failure> {
        let total = prefix + TAIL_TOKENS;
        let vocabulary = self.model.config().vocab_size;
        let ids: Vec<u32> = (0..total)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 9) % vocabulary)
            .collect();
        let cache = connect(&self.schema, total).map_err(|error| cache_failure(&error))?;
        let begun = Instant::now();
        let expected = self.compute(&cache, &ids, prefix)?;
        let cold_us = begun.elapsed().as_secs_f64() * 1e6;
        if !cache.wait(soon()) {
            return Err(failed("backup", &"it does not end"));
        }
        let (mut times, mut differing) = (Vec::new(), 0);
        for _ in 0..ROUNDS {
            make_cold(&cache, total)?;
            let begun = Instant::now();
            let logits = self.resume(&cache, &ids, prefix)?;
            times.push(begun.elapsed().as_secs_f64() * 1e6);
            let is_same = logits.len() == expected.len()
                && logits
                    .iter()
                    .zip(&expected)
                    .all(|(a, b)| a.to_bits() == b.to_bits());
            differing += u64::from(!is_same);
            if !cache.wait(soon()) {
                return Err(failed("load", &"it does not end"));
            }
        }
        let pages = u64::from(prefix / 256) * self.schema.slot_bytes(Space::Page);
        let named = |case, times: &mut [f64]| Row {
            case,
            tokens: Some(prefix),
            ..row(args, "host", "resume", pages, times)
        };
        let cold = named("computed", &mut [cold_us]);
        let mut resumed = named("resumed from the host tier", &mut times);
        resumed.ratio_med = cold_us / resumed.p50_us;
        resumed.bad_blocks = differing;
        Ok([cold, resumed])
    }

    /// Everything from the first token on; the prefix is published and backed up on the way. Answers the last logits.
    fn compute(&self, cache: &Hicache, ids: &[u32], prefix: u32) -> Result<Vec<f32>, Failure> {
        let pools = cache.device().pools();
        let lease = pools.reserve(ids.len() as u32, Room(0));
        let mut caches = Caches::new(lease.map_err(|error| cache_failure(&error))?);
        let mut from = 0;
        while from < prefix {
            let to = prefix.min(from + CHUNK_TOKENS);
            if to == prefix {
                let checkpoint = pools.reserve_checkpoint(prefix, caches.lease.room());
                caches.checkpoint = Some(checkpoint.map_err(|error| cache_failure(&error))?);
            }
            self.forward(&mut caches, ids, from..to, Logits::None)?;
            from = to;
        }
        let checkpoint = caches.checkpoint.take().map(CheckpointWriter::finish);
        let checkpoint = checkpoint
            .transpose()
            .map_err(|error| cache_failure(&error))?;
        let tokens = &ids[..prefix as usize];
        let tree = cache.device().tree();
        tree.publish(tokens, &mut caches.lease, &caches.written, checkpoint)
            .and_then(|_| cache.backup(tokens))
            .map_err(|error| cache_failure(&error))?;
        self.forward(&mut caches, ids, prefix..ids.len() as u32, Logits::Last)
    }

    /// Behind the prefix of the host tier.
    fn resume(&self, cache: &Hicache, ids: &[u32], prefix: u32) -> Result<Vec<f32>, Failure> {
        let found = cache.lookup(ids);
        let found = found.filter(|found| (found.tokens, found.origin) == (prefix, Origin::Host));
        let found =
            found.ok_or_else(|| failed("lookup", &"the host tier does not have the prefix"))?;
        let total = ids.len() as u32;
        let lease = cache.device().pools().resume(found.lease, total, Room(1));
        let lease = lease.map_err(|refused| cache_failure(&refused.1))?;
        self.forward(&mut Caches::new(lease), ids, prefix..total, Logits::Last)
    }

    fn forward(
        &self,
        caches: &mut Caches,
        ids: &[u32],
        range: Range<u32>,
        want: Logits,
    ) -> Result<Vec<f32>, Failure> {
        caches.written.clear();
        let part = &ids[range.start as usize..range.end as usize];
        let logits = self.model.forward(part, range.start, caches, want, None);
        logits.map_err(|error| model_failure(&error))
    }
}

impl Caches {
    fn new(lease: WriteLease) -> Caches {
        Caches {
            lease,
            written: Vec::new(),
            checkpoint: None,
        }
    }
}

impl LayerCaches for Caches {
    fn layer(&mut self, layer: LayerId) -> Result<LayerMut<'_>, ModelError> {
        self.lease.attach_layer(layer, soon())?;
        Ok(self.lease.layer_mut(layer)?)
    }

    fn layer_done(&mut self, layer: LayerId, tokens: Range<u32>) -> Result<(), ModelError> {
        self.written.push(self.lease.commit_layer(layer, tokens)?);
        if let Some(checkpoint) = &mut self.checkpoint {
            checkpoint.save_layer(layer, &self.lease)?;
        }
        Ok(())
    }
}
