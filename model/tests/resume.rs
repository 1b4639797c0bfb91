//! A request that goes on behind a prefix of the device pool leaves the same bits as a cold run.
#![allow(clippy::unwrap_used)]

mod common;

use std::ops::Range;
use std::sync::Arc;

use common::*;
use kvgate_kvcache::canary::{PageDigest, page_digests};
use kvgate_kvcache::prefix::CheckpointWriter;
use kvgate_kvcache::{
    CacheSchema, Component, Formats, Hit, LayerId, LayerMut, MemoryKind, PoolConfig, PoolSet,
    PrefixLease, PrefixTree, Room, WindowPage, WriteLease, WrittenLayer,
};
use kvgate_model::{LayerCaches, Logits, Model, ModelError};
use kvgate_transfer::Deadline;

/// Tails behind a boundary: group ends, window ends and what lies beside them.
const TAILS: [u32; 8] = [1, 3, 4, 5, 127, 128, 129, 255];

/// The caches of one request, committed as they are written.
struct Caches {
    lease: WriteLease,
    written: Vec<WrittenLayer>,
    checkpoint: Option<CheckpointWriter>,
}

impl Caches {
    fn over(lease: WriteLease) -> Caches {
        Caches {
            lease,
            written: Vec::new(),
            checkpoint: None,
        }
    }
}

impl LayerCaches for Caches {
    fn layer(&mut self, layer: LayerId) -> Result<LayerMut<'_>, ModelError> {
        self.lease.attach_layer(layer, Deadline::after_ms(1_000))?;
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

/// What a run leaves at one length: logits of its tokens, digests of every live row.
type Left = (Vec<u32>, Vec<PageDigest>);

struct World {
    model: Model,
    pools: PoolSet,
    tree: PrefixTree,
    ids: Vec<u32>,
}

impl World {
    fn new(formats: &Formats, seed: u64) -> World {
        let model = Model::tiny_v4(3).unwrap();
        let geometry = model.config().geometry(model.weights().digest());
        let schema = Arc::new(CacheSchema::deepseek_v4(&geometry, formats).unwrap());
        let config = PoolConfig {
            pages: 10,
            windows: 8,
            requests: 2,
            memory: MemoryKind::Host,
        };
        let pools = PoolSet::new(schema, config).unwrap();
        let tree = PrefixTree::new(&pools);
        World {
            model,
            pools,
            tree,
            ids: noise_ids(768, 320, seed),
        }
    }

    /// Goes on from `start` in calls that end at `ends`.
    fn run(
        &self,
        caches: &mut Caches,
        start: u32,
        ends: impl IntoIterator<Item = u32>,
    ) -> Vec<Left> {
        let mut from = start;
        let mut left = Vec::new();
        for end in ends {
            let ids = &self.ids[from as usize..end as usize];
            let logits = self.model.forward(ids, from, caches, Logits::All, None);
            let digests = page_digests(&self.pools, caches.lease.block_table(), end);
            left.push((bits(&logits.unwrap()), digests));
            from = end;
        }
        left
    }

    /// A cold run that publishes its first `boundaries` boundaries, and what it left at each tail behind them.
    fn cold(&self, boundaries: u32) -> Vec<Vec<Left>> {
        let total = 256 * boundaries + 255;
        let mut caches = Caches::over(self.pools.reserve(total, Room(1)).unwrap());
        let mut left = Vec::new();
        let mut from = 0;
        for boundary in (1..=boundaries).map(|k| 256 * k) {
            caches.checkpoint = Some(self.pools.reserve_checkpoint(boundary, Room(1)).unwrap());
            self.run(&mut caches, from, [boundary]);
            let checkpoint = caches.checkpoint.take().unwrap().finish().unwrap();
            let written = std::mem::take(&mut caches.written);
            let ids = &self.ids[..boundary as usize];
            let lease = &mut caches.lease;
            let new_count = self.tree.publish(ids, lease, &written, Some(checkpoint));
            assert_eq!(new_count.unwrap(), 1);
            left.push(self.run(&mut caches, boundary, TAILS.map(|tail| boundary + tail)));
            from = boundary + 255;
        }
        left
    }

    fn resumable(&self, tokens: u32) -> Option<PrefixLease> {
        match self.tree.resumable(&self.ids[..tokens as usize]) {
            Hit::Ready { lease, .. } => Some(lease),
            Hit::Pending { .. } => panic!("nothing is on its way"),
            Hit::Miss => None,
        }
    }

    fn resume(&self, prefix: PrefixLease, total: u32) -> Caches {
        Caches::over(
            self.pools
                .resume(prefix, total, Room(2))
                .map_err(|e| e.1)
                .unwrap(),
        )
    }
}

#[test]
fn a_resumed_run_leaves_the_bits_of_a_cold_one() {
    // How window pages are cut makes no difference to the rest; the other cut stands below.
    let cut = |formats: &Formats| formats.window_page == WindowPage::P64;
    for formats in all_formats().into_iter().filter(cut) {
        let world = World::new(&formats, 6);
        let cold = world.cold(2);
        for (boundary, cold) in [256, 512].into_iter().zip(&cold) {
            // The longest usable end lies before the last token.
            let prefix = world.resumable(boundary + 1).unwrap();
            assert_eq!(prefix.tokens(), boundary);
            let shared = prefix.block_table().pages().to_vec();
            let mut caches = world.resume(prefix, boundary + 255);
            assert_eq!(caches.lease.block_table().pages()[..shared.len()], shared);
            let resumed = world.run(&mut caches, boundary, TAILS.map(|tail| boundary + tail));
            for (tail, (resumed, cold)) in TAILS.iter().zip(resumed.iter().zip(cold)) {
                assert!(
                    resumed.0 == cold.0,
                    "logits at {boundary} + {tail}, {formats:?}"
                );
                let differs = resumed.1.iter().zip(&cold.1).find(|(a, b)| a != b);
                assert_eq!(differs, None, "{boundary} + {tail}, {formats:?}");
                assert_eq!(resumed.1.len(), cold.1.len());
            }
        }
        assert_eq!(world.resumable(512).unwrap().tokens(), 256);
        assert!(world.resumable(256).is_none());
    }
}

/// Two branches of one prefix, in turn: neither sees the other's window, nor the prefix's own.
#[test]
fn branches_do_not_see_each_other() {
    let formats = Formats {
        window_page: WindowPage::P256,
        ..Formats::default()
    };
    let world = World::new(&formats, 7);
    let cold = world.cold(1).remove(0);
    let mut other = World::new(&formats, 8);
    other.ids[..256].copy_from_slice(&world.ids[..256]);
    let other_cold = other.cold(1).remove(0);
    let mut first = world.resume(world.resumable(257).unwrap(), 511);
    let mut second = world.resume(world.resumable(257).unwrap(), 511);
    let (mut from, mut left, mut other_left) = (256, Vec::new(), Vec::new());
    for end in TAILS.map(|tail| 256 + tail) {
        left.extend(world.run(&mut first, from, [end]));
        let ids = &other.ids[from as usize..end as usize];
        let logits = world
            .model
            .forward(ids, from, &mut second, Logits::All, None);
        let digests = page_digests(&world.pools, second.lease.block_table(), end);
        other_left.push((bits(&logits.unwrap()), digests));
        from = end;
    }
    assert!(left == cold);
    assert!(other_left == other_cold);
    drop((first, second));
    let mut third = world.resume(world.resumable(257).unwrap(), 511);
    assert!(world.run(&mut third, 256, TAILS.map(|tail| 256 + tail)) == cold);
}

/// The pages of the prefix are read only for the one that goes on behind it.
#[test]
fn shared_rows_are_not_written() {
    let world = World::new(&Formats::default(), 9);
    drop(world.cold(1));
    let mut caches = world.resume(world.resumable(257).unwrap(), 300);
    for layer in world.pools.schema().layers() {
        let view = caches.layer(layer).unwrap();
        for component in [
            Component::C4Latent,
            Component::IndexK,
            Component::C128Latent,
        ] {
            let Some(mut rows) = view.component(component) else {
                continue;
            };
            let first = 256 / component.spec().group_tokens;
            let row = vec![0; rows.row_image_bytes()];
            assert!(rows.write_row(first - 1, &row).is_err(), "{component}");
            rows.write_row(first, &row).unwrap();
        }
    }
    // A call at a position of the prefix would write them: refused, at whatever layer.
    let refused = world
        .model
        .forward(&world.ids[252..256], 252, &mut caches, Logits::None, None);
    assert!(refused.is_err());
}
