//! What is handed over: the cache of DeepSeek-V4-Flash after a prompt, in its real formats.

use std::sync::Arc;

use kvgate_kvcache::{
    CacheSchema, Error, Formats, MemoryKind, PoolConfig, PoolSet, Space, TransferPlan, V4Geometry,
    WriterLayers,
};
use kvgate_transfer::WriterRank;

/// The one writer.
pub const RANK: WriterRank = WriterRank(0);
/// Tokens of a segment: a prefill of real size computes chunks like this.
const SEGMENT_TOKENS: u32 = 2_048;

/// The schema: 43 layers, packed latents, bf16 indexer keys.
pub fn schema() -> Result<Arc<CacheSchema>, Error> {
    Ok(Arc::new(CacheSchema::deepseek_v4(
        &V4Geometry::flash(),
        &Formats::default(),
    )?))
}

/// Pools for one prompt of `tokens` tokens, mapped by both processes.
pub fn pools(schema: &Arc<CacheSchema>, tokens: u32) -> Result<PoolSet, Error> {
    let counts = schema.slots_for(tokens);
    let config = PoolConfig {
        pages: counts.of(Space::Page),
        windows: counts.of(Space::Window),
        requests: counts.of(Space::Request),
        memory: MemoryKind::Shared,
    };
    PoolSet::new(Arc::clone(schema), config)
}

/// The plan that both sides compile.
pub fn plan(schema: &Arc<CacheSchema>, tokens: u32) -> Result<TransferPlan, Error> {
    let mut ends: Vec<u32> = (1..)
        .map(|count| count * SEGMENT_TOKENS)
        .take_while(|end| *end < tokens)
        .collect();
    ends.push(tokens);
    let writers = vec![WriterLayers {
        rank: RANK,
        layers: 0..schema.layer_count(),
    }];
    TransferPlan::compile(Arc::clone(schema), tokens, ends, writers)
}
