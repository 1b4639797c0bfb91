//! DEV-06: an offload copies pages that the kernel has not finished.
//!
//! **Given** a host that runs ahead of its device. **When** pages are to be copied to the host tier as soon as the
//! scheduler counts their tokens. **Expected** there is nothing to copy before the kernel of every layer is done and says
//! so; later hits have the right bytes. **In the field** no error, and garbage on later hits.
//!
//! Guard: I-7. A prefix enters the tree against the witness of every layer only (`kvcache/src/prefix/publish.rs`),
//! and a backup copies what is ready in the tree (`hicache/src/flight/backup.rs`).

use kvgate_hicache::cache::Backup;
use kvgate_kvcache::{ErrorKind, LayerId, Room};

use crate::common::*;

#[test]
fn dev_06_nothing_is_backed_up_before_it_is_written() {
    let world = World::local(&ROOMY);
    let (pools, tree) = (world.pools(), world.cache.device().tree());
    let mut lease = pools.reserve(264, Room(1)).unwrap();
    let mut checkpoint = pools.reserve_checkpoint(256, Room(1)).unwrap();
    let layers: Vec<LayerId> = pools.schema().layers().collect();
    let mut written = Vec::new();
    for &layer in &layers[..layers.len() - 1] {
        written.push(lease.commit_layer(layer, 0..256).unwrap());
        checkpoint.save_layer(layer, &lease).unwrap();
    }
    // The kernel of the last layer still runs.
    let refused = tree
        .publish(&tokens(1, 256), &mut lease, &written, None)
        .unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::NotWritten { layer, .. } if *layer == layers[2]));
    let backup = world.cache.backup(&tokens(1, 256)).unwrap();
    assert_eq!(
        backup,
        Backup::NotThere,
        "pages were copied that the kernel still writes"
    );
    written.push(lease.commit_layer(layers[2], 0..256).unwrap());
    checkpoint.save_layer(layers[2], &lease).unwrap();
    let checkpoint = checkpoint.finish().unwrap();
    tree.publish(&tokens(1, 256), &mut lease, &written, Some(checkpoint))
        .unwrap();
    assert_eq!(
        world.cache.backup(&tokens(1, 256)).unwrap(),
        Backup::Started
    );
    world.run();
    assert_eq!(world.cache.host().tree().probe(&tokens(1, 300)), (256, 256));
    drop((lease, written));
    world.check_conserved();
}
