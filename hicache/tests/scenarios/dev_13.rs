//! DEV-13: a failed load is counted as loaded.
//!
//! **Given** a load whose source goes away at any moment. **When** the failure is reported. **Expected** what has
//! not landed is never a hit, whoever waits hears of the cause, the slots come back once nothing can write
//! them any more, and the request is computed. **In the field** the error path advanced the counter of success, and
//! another request's KV was served.
//!
//! Guard: I-2, I-9, I-12. A failed flight takes its nodes out of the tree (`kvcache/src/prefix/mod.rs`), and a move
//! is landed only when every gate is open (`hicache/src/flight/mod.rs`).

use kvgate_kvcache::{ErrorKind, Room};
use kvgate_transfer::Deadline;
use kvgate_transfer::sim::Death;

use crate::common::*;

/// What becomes of a load whose source is killed after so many events. Answers whether it had landed before.
fn killed_after(steps: u32, death: Death) -> bool {
    let world = World::sim(&ROOMY);
    let digests = world.compute(1, 512);
    world.cache.backup(&tokens(1, 512)).unwrap();
    world.run();
    world.evict_device();
    let found = world.cache.lookup(&tokens(1, 600)).unwrap();
    let waiting = world.cache.lookup(&tokens(1, 600)).unwrap();
    assert_eq!(
        world.cache.counts().loads.started,
        1,
        "two requests share one load"
    );
    world.step(steps);
    let net = world.net.as_ref().unwrap();
    net.kill(world.cache.host().agent(), death);
    net.run_until_idle();
    world.cache.settle();
    let counts = world.cache.counts();
    let has_landed = counts.loads.landed == 1;
    assert_eq!(counts.loads.failed, u64::from(!has_landed));
    let tree = world.cache.device().tree();
    if has_landed {
        let (lease, restored) = world.resume(found, 1).unwrap();
        assert_eq!(restored, digests);
        drop((lease, waiting));
        return true;
    }
    assert_eq!(
        tree.probe(&tokens(1, 600)),
        (0, 0),
        "a failed load was counted as loaded"
    );
    assert_eq!(tree.page_counts(), (0, 0));
    assert!(world.cache.last_failure().is_some());
    for found in [found, waiting] {
        let resumed = world.pools().resume(found.lease, 600, Room(1));
        let mut lease = resumed.map_err(|refused| refused.1).unwrap();
        let last = world.pools().schema().layers().last().unwrap();
        let refused = lease.attach_layer(last, Deadline::now()).unwrap_err();
        assert!(
            matches!(refused.kind(), ErrorKind::Gate { .. }),
            "{refused}"
        );
    }
    world.cache.settle();
    let pages = world.pools().stats().pages;
    match death {
        // Nobody can write them any more: they are free, and the request is computed there.
        Death::Proven => assert_eq!(pages.free, pages.capacity, "{pages:?}"),
        // Writes that had not begun never will; of the others nobody knows.
        Death::Unprovable if steps == 0 => assert_eq!(pages.free, pages.capacity, "{pages:?}"),
        Death::Unprovable => assert_eq!((pages.free, pages.draining), (6, 2), "{pages:?}"),
    }
    assert_eq!(world.compute(1, 512), digests);
    false
}

#[test]
fn dev_13_a_failed_load_is_a_miss() {
    let proven: Vec<bool> = (0..40)
        .map(|steps| killed_after(steps, Death::Proven))
        .collect();
    assert!(
        proven.contains(&true) && proven.contains(&false),
        "{proven:?}"
    );
    for steps in [0, 1, 4, 8] {
        assert!(!killed_after(steps, Death::Unprovable));
    }
}
