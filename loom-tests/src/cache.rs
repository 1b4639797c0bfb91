//! A cache as small as it gets: slots without bytes, one page of one layer each.

use kvgate_kvcache::{
    CacheSchema, Formats, InFlight, IndexKFormat, LatentFormat, MemoryKind, PoolConfig, PoolSet,
    Room, TransferPlan, V4Geometry, WindowPage, WriterLayers,
};
use kvgate_transfer::sync::Arc;
use kvgate_transfer::{Agent, Epoch, PeerId, WriterRank};

/// Pools of `slots` slots in each space over one layer that has only a window: one chunk a flight.
pub fn pools(slots: u32) -> PoolSet {
    let geometry = V4Geometry {
        layer_ratios: vec![0],
        head_dim: 16,
        rope_dim: 4,
        index_head_dim: 8,
        ..V4Geometry::flash()
    };
    let formats = Formats {
        latent: LatentFormat::F32,
        index_k: IndexKFormat::F32,
        window_page: WindowPage::P64,
    };
    let schema = Arc::new(CacheSchema::deepseek_v4(&geometry, &formats).expect("a sound geometry"));
    let config = PoolConfig {
        pages: slots,
        windows: slots,
        requests: slots,
        memory: MemoryKind::Host,
    };
    PoolSet::new(schema, config).expect("slots without bytes need no memory")
}

/// The plan of a prompt of `tokens` tokens from one writer.
pub fn plan(pools: &PoolSet, tokens: u32) -> TransferPlan {
    let writers = vec![WriterLayers {
        rank: WriterRank(0),
        layers: 0..1,
    }];
    TransferPlan::compile(pools.schema().clone(), tokens, vec![tokens], writers)
        .expect("a sound plan")
}

/// A flight of one page that `peer` fills, armed.
pub fn flight(pools: &PoolSet, agent: &Agent, peer: PeerId, epoch: u64) -> Option<InFlight> {
    let lease = pools.reserve(8, Room(epoch)).ok()?;
    let writers = [(peer, WriterRank(0))];
    let mut flight = lease
        .into_inflight(&plan(pools, 8), Epoch(epoch), &writers)
        .expect("it fits");
    flight
        .arm(agent, None)
        .expect("the peer is there and the epoch is new");
    Some(flight)
}
