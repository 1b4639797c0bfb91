//! Two agents with pools, and flights between them.
#![allow(clippy::needless_update, reason = "a feature adds a field")]
#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

pub mod prefixes;

use std::sync::Arc;

use kvgate_kvcache::canary::VerifyMode;
use kvgate_kvcache::*;
use kvgate_transfer::{Agent, Deadline, Epoch, Op, PeerId, PostOptions, Status, WriterRank};

pub fn deadline() -> Deadline {
    Deadline::after_ms(5_000)
}

/// Three layers of small f32 rows: window only, ratio 4, ratio 128.
pub fn small_schema() -> Arc<CacheSchema> {
    schema_of(vec![0, 4, 128], false)
}

/// Small f32 rows in a layer for each ratio.
pub fn schema_of(layer_ratios: Vec<u32>, drafting: bool) -> Arc<CacheSchema> {
    let geometry = V4Geometry {
        layer_ratios,
        head_dim: 16,
        rope_dim: 4,
        index_head_dim: 8,
        drafting,
        ..V4Geometry::flash()
    };
    let formats = Formats {
        latent: LatentFormat::F32,
        index_k: IndexKFormat::F32,
        window_page: WindowPage::P64,
    };
    Arc::new(CacheSchema::deepseek_v4(&geometry, &formats).unwrap())
}

pub struct Pair {
    pub sender: Agent,
    pub receiver: Agent,
    pub to_receiver: PeerId,
    pub to_sender: PeerId,
    pub source: PoolSet,
    pub target: PoolSet,
}

pub fn pair(pages: u32, windows: u32, requests: u32) -> Pair {
    let schema = small_schema();
    let config = PoolConfig {
        pages,
        windows,
        requests,
        memory: MemoryKind::Host,
    };
    let pools = || PoolSet::new(schema.clone(), config).unwrap();
    let (source, target) = (pools(), pools());
    let agent = |name: &str| Agent::builder(name).build().unwrap();
    let (sender, receiver) = (agent("prefill"), agent("decode"));
    source.register(&sender).unwrap();
    target.register(&receiver).unwrap();
    let (to_receiver, to_sender) = Agent::connect_local(&sender, &receiver).unwrap();
    Pair {
        sender,
        receiver,
        to_receiver,
        to_sender,
        source,
        target,
    }
}

/// The image of one row: different for every pool, entry and seed.
pub fn image(row: &ComponentRow, entry: u32, seed: u32, len: usize) -> Vec<u8> {
    let entry = if row.rows_per_page == 1 { 0 } else { entry };
    let start = seed.wrapping_mul(101) ^ row.pool.0.wrapping_mul(31) ^ entry.wrapping_mul(7);
    (0..len)
        .map(|byte| (start as usize + byte * 3) as u8)
        .collect()
}

/// Writes every live row of one layer.
pub fn fill_layer(pools: &PoolSet, lease: &mut WriteLease, layer: LayerId, n: u32, seed: u32) {
    let view = lease.layer_mut(layer).unwrap();
    for row in pools.schema().rows_of(layer) {
        let mut component = view.component(row.component).unwrap();
        for entry in row.live_entries(n, 128) {
            let image = image(row, entry, seed, component.row_image_bytes());
            component.write_row(entry, &image).unwrap();
        }
    }
}

impl Pair {
    pub fn layers(&self) -> Vec<LayerId> {
        self.source.schema().layers().collect()
    }

    pub fn plan(&self, n: u32) -> TransferPlan {
        let mut ends: Vec<u32> = (1..).map(|k| k * 256).take_while(|end| *end < n).collect();
        ends.push(n);
        let layers = 0..self.source.schema().layer_count();
        let writers = vec![WriterLayers {
            rank: WriterRank(0),
            layers,
        }];
        TransferPlan::compile(self.source.schema().clone(), n, ends, writers).unwrap()
    }

    /// An armed flight for `total_tokens` tokens, of which `n` are handed over.
    pub fn flight(&self, n: u32, total_tokens: u32, epoch: u64) -> InFlight {
        let lease = self.target.reserve(total_tokens, Room(epoch)).unwrap();
        let writers = [(self.to_sender, WriterRank(0))];
        let flight = lease.into_inflight(&self.plan(n), Epoch(epoch), &writers);
        let mut flight = flight.map_err(|refused| refused.1).unwrap();
        flight.arm(&self.receiver, None).unwrap();
        flight
    }

    /// Fills and sends some layers of a flight, and waits until they are visible.
    pub fn send(
        &self,
        lease: &mut WriteLease,
        flight: &InFlight,
        n: u32,
        seed: u32,
        layers: &[LayerId],
    ) {
        let plan = self.plan(n);
        let peer = self.sender.peer(self.to_receiver).unwrap();
        let pools: Vec<_> = peer.pools.iter().map(|pool| pool.pool).collect();
        let target = PostTarget {
            incarnation: peer.incarnation,
            pools: &pools,
            table: flight.block_table(),
            epoch: flight.barrier().epoch(),
            room: flight.room(),
            verify: VerifyMode::Off,
        };
        for &layer in layers {
            fill_layer(&self.source, lease, layer, n, seed);
            let written = lease.commit_layer(layer, 0..n).unwrap();
            for segment in 0..plan.segment_ends().len() as u32 {
                let post = plan.post(&self.source, segment, &written, &target).unwrap();
                if post.is_empty() {
                    continue;
                }
                let (local, remote) = post.descriptors();
                let x = self
                    .sender
                    .prepare(Op::Write, &local, &remote, self.to_receiver)
                    .unwrap();
                let options = PostOptions {
                    arrival: Some(post.arrival),
                    keepalive: Some(Box::new(post.keepalive)),
                    ledger: Some(lease.ledger().clone()),
                    ..PostOptions::default()
                };
                let handle = self.sender.post(&x, post.source, options).unwrap();
                let status = handle.wait(deadline());
                assert!(matches!(status, Status::Done(_)), "{status:?}");
            }
        }
    }

    /// A complete hand-off.
    pub fn hand_over(&self, n: u32, total_tokens: u32, epoch: u64, seed: u32) -> InFlight {
        let flight = self.flight(n, total_tokens, epoch);
        let mut lease = self.source.reserve(n, Room(epoch)).unwrap();
        self.send(&mut lease, &flight, n, seed, &self.layers());
        flight
    }
}
