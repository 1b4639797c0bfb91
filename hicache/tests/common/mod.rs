//! A device pool and a host tier, connected in one process or over a network on a virtual clock.
#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

use kvgate_hicache::policy::{EvictionPolicy, Lru};
use kvgate_hicache::{Hicache, Side, cache::Found};
use kvgate_kvcache::canary::{PageDigest, page_digests};
use kvgate_kvcache::identity::Namespace;
use kvgate_kvcache::*;
use kvgate_transfer::sim::{SimFaults, SimNet};
use kvgate_transfer::sync::Arc;
use kvgate_transfer::{Agent, Deadline};

pub fn patience() -> Deadline {
    Deadline::after_ms(20_000)
}

/// Three layers of small f32 rows: window only, ratio 4, ratio 128.
pub fn schema() -> Arc<CacheSchema> {
    let geometry = V4Geometry {
        layer_ratios: vec![0, 4, 128],
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
    Arc::new(CacheSchema::deepseek_v4(&geometry, &formats).unwrap())
}

/// The tokens of conversation `number`.
pub fn tokens(number: u32, count: u32) -> Vec<u32> {
    (0..count).map(|token| number * 100_000 + token).collect()
}

pub struct World {
    pub cache: Hicache,
    pub net: Option<SimNet>,
}

/// Slots of the two sides: pages and windows of the device, pages and checkpoints of the host.
pub struct Sizes {
    pub device: (u32, u32),
    pub host: (u32, u32),
}

pub const ROOMY: Sizes = Sizes {
    device: (8, 8),
    host: (8, 4),
};

impl World {
    /// Over the local backend.
    pub fn local(sizes: &Sizes) -> World {
        World::new(None, sizes)
    }

    /// On a virtual clock: nothing is copied but by [`World::run`] and [`World::step`].
    pub fn sim(sizes: &Sizes) -> World {
        World::new(Some(SimNet::new(1, SimFaults::none())), sizes)
    }

    fn new(net: Option<SimNet>, sizes: &Sizes) -> World {
        let schema = schema();
        let side = |name: &str, pages: u32, windows: u32| {
            let builder = match &net {
                Some(net) => net.agent(name),
                None => Agent::builder(name),
            };
            let agent = builder.build().unwrap();
            let config = PoolConfig {
                pages,
                windows,
                requests: 2,
                memory: MemoryKind::Host,
            };
            let pools = PoolSet::new(schema.clone(), config).unwrap();
            pools.register(&agent).unwrap();
            let namespace = Namespace::new(&schema, 256, b"").unwrap();
            let policy: Box<dyn EvictionPolicy> = Box::<Lru>::default();
            let tree = PrefixTree::in_namespace(&pools, namespace, policy).unwrap();
            Side::new(&agent, &pools, tree).unwrap()
        };
        let device = side("device", sizes.device.0, sizes.device.1);
        let host = side("host", sizes.host.0, sizes.host.1);
        let (to_host, to_device) = match &net {
            Some(net) => net.connect(device.agent(), host.agent()).unwrap(),
            None => Agent::connect_local(device.agent(), host.agent()).unwrap(),
        };
        World {
            cache: Hicache::over(device, host, to_host, to_device).unwrap(),
            net,
        }
    }

    pub fn pools(&self) -> &PoolSet {
        self.cache.device().pools()
    }

    /// Lets everything happen that is under way, and takes note of it.
    pub fn run(&self) {
        match &self.net {
            Some(net) => self.run_posted(net),
            None => assert!(self.cache.wait(patience())),
        }
        self.cache.settle();
    }

    /// The same of the moves between device pool and host tier alone.
    pub fn run_moves(&self) {
        match &self.net {
            Some(net) => self.run_posted(net),
            None => assert!(self.cache.wait_moves(patience())),
        }
        self.cache.settle();
    }

    /// The clock of the network knows nothing of the thread that posts.
    fn run_posted(&self, net: &SimNet) {
        assert!(self.cache.wait_posted(patience()));
        net.run_until_idle();
    }

    pub fn step(&self, count: u32) {
        assert!(self.cache.wait_posted(patience()));
        for _ in 0..count {
            self.net.as_ref().unwrap().step();
        }
    }

    /// Computes the first `end` tokens of a conversation, from wherever a prefix allows, and publishes them.
    pub fn compute(&self, number: u32, end: u32) -> Vec<PageDigest> {
        let pools = self.pools();
        let prompt = tokens(number, end);
        let mut lease = pools.reserve(end + 8, Room(number.into())).unwrap();
        let mut checkpoint = pools.reserve_checkpoint(end, Room(number.into())).unwrap();
        let mut written = Vec::new();
        for layer in pools.schema().layers() {
            let view = lease.layer_mut(layer).unwrap();
            for row in pools.schema().rows_of(layer) {
                let mut rows = view.component(row.component).unwrap();
                for entry in row.live_entries(end, 128) {
                    let image = image(row, entry, number, rows.row_image_bytes());
                    rows.write_row(entry, &image).unwrap();
                }
            }
            written.push(lease.commit_layer(layer, 0..end).unwrap());
            checkpoint.save_layer(layer, &lease).unwrap();
        }
        let digests = page_digests(pools, lease.block_table(), end);
        let checkpoint = checkpoint.finish().unwrap();
        let tree = self.cache.device().tree();
        let published = tree.publish(&prompt, &mut lease, &written, Some(checkpoint));
        assert!(published.unwrap() > 0);
        digests
    }

    /// Gives everything up that the device pool holds and nobody leases.
    pub fn evict_device(&self) {
        let tree = self.cache.device().tree();
        tree.evict(u32::MAX);
        assert_eq!(tree.page_counts(), (0, 0));
        // The next owner of the slots leaves something else in them.
        let pools = self.pools();
        let free = pools.stats().pages.free;
        let mut lease = pools.reserve(free * 256, Room(99)).unwrap();
        for layer in pools.schema().layers() {
            let view = lease.layer_mut(layer).unwrap();
            for row in pools.schema().rows_of(layer) {
                let mut rows = view.component(row.component).unwrap();
                let image = vec![0xee; rows.row_image_bytes()];
                let last = rows.table().len() as u32 * rows.entries_per_page().min(256);
                (0..last.min(free * 256)).for_each(|e| rows.write_row(e, &image).unwrap());
            }
        }
    }

    /// Goes on behind a prefix, and says what its rows are.
    pub fn resume(
        &self,
        found: Found,
        number: u32,
    ) -> Result<(WriteLease, Vec<PageDigest>), Error> {
        let tokens = found.tokens;
        let lease = self
            .pools()
            .resume(found.lease, tokens + 8, Room(number.into()));
        let mut lease = lease.map_err(|refused| refused.1)?;
        for layer in self.pools().schema().layers() {
            lease.attach_layer(layer, Deadline::now())?;
        }
        let digests = page_digests(self.pools(), lease.block_table(), tokens);
        Ok((lease, digests))
    }

    /// Everything comes back once nothing is under way.
    pub fn check_conserved(self) {
        self.run();
        assert_eq!(self.cache.open_moves(), (0, 0));
        for side in [self.cache.device(), self.cache.host()] {
            side.tree().evict(u32::MAX);
            side.tree().evict_checkpoints(u32::MAX);
            let stats = side.pools().stats();
            assert!(stats.is_conserved(), "{stats:?}");
            for space in [stats.pages, stats.windows, stats.requests] {
                assert_eq!(space.free, space.capacity, "{stats:?}");
            }
        }
    }
}

/// The image of one row: different for every pool, entry and conversation.
pub fn image(row: &ComponentRow, entry: u32, number: u32, len: usize) -> Vec<u8> {
    let start = number.wrapping_mul(101) ^ row.pool.0.wrapping_mul(31) ^ entry.wrapping_mul(7);
    (0..len)
        .map(|byte| (start as usize + byte * 3) as u8)
        .collect()
}
