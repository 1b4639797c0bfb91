//! DEV-08: a load-back goes into pages that an older forward still writes.
//!
//! **Given** a request that has ended while a step that was launched before still writes its pages. **When** a load
//! needs pages and no others are there. **Expected** it does not get them before the step has passed: freed is not quiet.
//! **In the field** restored prefixes were overwritten by the stale kernel.
//!
//! Guard: I-9, I-20. Slots are given out against the proof that every step of their generation is over
//! (`kvcache/src/pool/drain.rs`), to loads as to everybody else (`hicache/src/flight/mod.rs`).

use kvgate_kvcache::Room;
use kvgate_transfer::{FlightLedger, StepClock};

use crate::common::*;

#[test]
fn dev_08_a_load_waits_for_the_steps_of_the_pages_before() {
    let world = World::local(&Sizes {
        device: (4, 4),
        host: (4, 2),
    });
    let digests = world.compute(1, 512);
    world.cache.backup(&tokens(1, 512)).unwrap();
    world.run();
    world.evict_device();
    let clock = StepClock::new();
    let request = world.pools().reserve(4 * 256, Room(5)).unwrap();
    let step = clock.begin_step();
    FlightLedger::fence(request.ledger(), &clock, clock.latest().unwrap()).unwrap();
    let pages = request.block_table().pages().to_vec();
    drop(request);
    let found = world.cache.lookup(&tokens(1, 600));
    assert!(
        found.is_none(),
        "a load got pages that a kernel still writes"
    );
    assert_eq!(world.cache.counts().loads.no_room, 1);
    clock.finish(step);
    let found = world.cache.lookup(&tokens(1, 600)).unwrap();
    let reused = |page| pages.iter().any(|before| before.index == page);
    assert!(
        found
            .lease
            .block_table()
            .pages()
            .iter()
            .all(|page| reused(page.index))
    );
    world.run();
    let (lease, restored) = world.resume(found, 1).unwrap();
    assert_eq!(restored, digests);
    drop(lease);
    world.check_conserved();
}
