//! DEV-02: the index pool is read without the fence of its layer.
//!
//! **Given** a load-back that goes layer by layer, every copy at a moment of its own. **When** a forward reads a
//! layer, whatever component. **Expected** it reads the layer's own bytes, or not yet; a layer can be read while
//! the next ones are still coming. **In the field** the accessors of one pool did not wait, and 94 of 100 values differed.
//!
//! Guard: I-1. A view is made from the witness of its layer (`kvcache/src/lease/write.rs`), for every component.

use kvgate_kvcache::canary::page_digests;
use kvgate_transfer::Deadline;

use crate::common::*;

#[test]
fn dev_02_a_layer_is_read_behind_its_own_fence() {
    let world = World::sim(&ROOMY);
    let digests = world.compute(1, 512);
    world.cache.backup(&tokens(1, 512)).unwrap();
    world.run();
    world.evict_device();
    let found = world.cache.lookup(&tokens(1, 600)).unwrap();
    let pools = world.pools().clone();
    let resumed = pools.resume(found.lease, 600, kvgate_kvcache::Room(1));
    let mut lease = resumed.map_err(|refused| refused.1).unwrap();
    let layers: Vec<_> = pools.schema().layers().collect();
    let mut open = vec![false; layers.len()];
    let (mut partly, mut steps) = (0, 0);
    while !open.iter().all(|open| *open) {
        for (&layer, open) in layers.iter().zip(&mut open) {
            if !*open && lease.attach_layer(layer, Deadline::now()).is_ok() {
                *open = true;
                let now = page_digests(&pools, lease.block_table(), 512);
                let of_layer = |all: &[kvgate_kvcache::canary::PageDigest]| -> Vec<_> {
                    all.iter().filter(|d| d.layer == layer).cloned().collect()
                };
                let symptom = "rows were read before they were loaded";
                assert_eq!(of_layer(&now), of_layer(&digests), "{symptom}");
            }
            assert_eq!(lease.layer_mut(layer).is_ok(), *open);
        }
        let count = open.iter().filter(|open| **open).count();
        partly += usize::from(count > 0 && count < layers.len());
        world.step(1);
        steps += 1;
        assert!(steps < 10_000, "the load never ends");
    }
    assert!(partly > 0, "no layer was readable before the last one");
    drop(lease);
    world.check_conserved();
}
