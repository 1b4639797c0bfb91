//! DEV-07: a host page is evicted while it is being loaded.
//!
//! **Given** a full host tier, and a load whose copies are queued. **When** a backup needs room and the evictor
//! considers the prefix that is being loaded. **Expected** it stays until the copies are complete, not until they
//! are queued; then it can go. **In the field** the sources were overwritten in the middle of the copy.
//!
//! Guard: I-13. The pin moves into the operation (`hicache/src/flight/mod.rs`), and a leased page is no victim
//! (`kvcache/src/prefix/mod.rs`).

use kvgate_hicache::cache::Backup;

use crate::common::*;

#[test]
fn dev_07_a_host_page_stays_until_its_copy_is_complete() {
    let world = World::sim(&Sizes {
        device: (8, 8),
        host: (2, 1),
    });
    let digests = world.compute(1, 512);
    world.cache.backup(&tokens(1, 512)).unwrap();
    world.run();
    world.evict_device();
    world.compute(2, 512);
    let found = world.cache.lookup(&tokens(1, 600)).unwrap();
    assert_eq!(world.cache.open_moves(), (0, 1), "the load is queued");
    let mut refused = 0;
    while world.cache.open_moves().1 > 0 {
        let backup = world.cache.backup(&tokens(2, 512)).unwrap();
        if world.cache.open_moves().1 == 0 {
            break;
        }
        assert_eq!(
            backup,
            Backup::NoRoom,
            "the source of a running copy was given up"
        );
        refused += 1;
        world.step(1);
    }
    assert!(refused > 3, "{refused} tries while the copies ran");
    let (lease, restored) = world.resume(found, 1).unwrap();
    assert_eq!(
        restored, digests,
        "the source was overwritten in the middle of the copy"
    );
    world.run();
    let backup = world.cache.backup(&tokens(2, 512)).unwrap();
    assert!(matches!(backup, Backup::Started | Backup::Taken));
    world.run();
    assert_eq!(world.cache.host().tree().probe(&tokens(2, 600)).1, 512);
    drop(lease);
    world.check_conserved();
}
