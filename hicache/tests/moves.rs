//! Backups and load-backs between the device pool and the host tier.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use kvgate_hicache::cache::{Backup, Origin};
use kvgate_kvcache::Hit;
use kvgate_transfer::StepClock;

#[test]
fn what_was_backed_up_and_evicted_comes_back_whole() {
    for world in [World::local(&ROOMY), World::sim(&ROOMY)] {
        let digests = world.compute(1, 512);
        assert_eq!(
            world.cache.backup(&tokens(1, 512)).unwrap(),
            Backup::Started
        );
        assert_eq!(
            world.cache.backup(&tokens(1, 511)).unwrap(),
            Backup::NotThere
        );
        world.run();
        assert_eq!(world.cache.backup(&tokens(1, 512)).unwrap(), Backup::Taken);
        world.evict_device();
        let found = world.cache.lookup(&tokens(1, 600)).unwrap();
        assert_eq!((found.tokens, found.origin), (512, Origin::Host));
        world.run();
        let (lease, restored) = world.resume(found, 1).unwrap();
        assert_eq!(restored, digests);
        drop(lease);
        let again = world.cache.lookup(&tokens(1, 600)).unwrap();
        assert_eq!(again.origin, Origin::Device);
        let (again, restored) = world.resume(again, 1).unwrap();
        assert_eq!(restored, digests);
        drop(again);
        let counts = world.cache.counts();
        assert_eq!((counts.backups.landed, counts.loads.landed), (1, 1));
        assert_eq!((counts.backups.failed, counts.loads.failed), (0, 0));
        world.check_conserved();
    }
}

/// The host tier gives the oldest prefix up for a new one, from its end; what is leased stays.
#[test]
fn a_small_host_tier_makes_room() {
    let world = World::local(&Sizes {
        device: (8, 8),
        host: (3, 2),
    });
    for number in 1..=3 {
        world.compute(number, 256);
        assert_eq!(
            world.cache.backup(&tokens(number, 256)).unwrap(),
            Backup::Started
        );
        world.run();
    }
    let host = world.cache.host().tree();
    let there: Vec<u32> = (1..=3)
        .map(|number| host.probe(&tokens(number, 300)).1)
        .collect();
    assert_eq!(there, [0, 256, 256], "two checkpoints fit");
    world.compute(4, 1_024);
    assert_eq!(
        world.cache.backup(&tokens(4, 1_024)).unwrap(),
        Backup::NoRoom
    );
    assert_eq!(world.cache.counts().backups.no_room, 1);
    world.check_conserved();
}

/// Requests that ask for one prefix at the same moment share one load, and all of them have its rows.
#[test]
fn many_loads_of_one_prefix_are_one() {
    const ROUNDS: u64 = 60;
    let world = World::local(&ROOMY);
    let digests = world.compute(1, 512);
    world.cache.backup(&tokens(1, 512)).unwrap();
    world.run();
    for round in 1..=ROUNDS {
        world.cache.device().tree().evict(u32::MAX);
        let start = std::sync::Barrier::new(3);
        let ask = || {
            start.wait();
            world.cache.lookup(&tokens(1, 600))
        };
        let found: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(ask)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        world.run();
        // Whoever lost the race for the slots goes without, or shares; nobody loads twice.
        assert_eq!(world.cache.counts().loads.started, round);
        let mut served = 0;
        for found in found.into_iter().flatten() {
            let (lease, restored) = world.resume(found, 1).unwrap();
            assert_eq!(restored, digests);
            drop(lease);
            served += 1;
        }
        assert!(served > 0);
    }
    assert_eq!(world.cache.counts().loads.landed, ROUNDS);
    world.check_conserved();
}

/// Slots that a reading step still uses come free later: one page goes for the one that is missing, and the
/// rest of the tree stays.
#[test]
fn room_that_comes_later_does_not_cost_the_whole_tree() {
    let world = World::local(&ROOMY);
    let (tree, clock) = (world.cache.device().tree(), StepClock::new());
    let step = clock.begin_step();
    for number in 1..=4 {
        world.compute(number, 256);
        let Hit::Ready { lease, .. } = tree.resumable(&tokens(number, 257)) else {
            panic!("published");
        };
        lease.fence(&clock).unwrap();
    }
    let device = world.cache.device();
    assert!(!device.make_room(5, 0), "a step reads the page");
    assert_eq!(tree.page_counts(), (3, 0));
    assert!(!device.make_room(0, 7), "it reads the checkpoints too");
    assert_eq!(tree.checkpoint_counts(), (2, 0));
    clock.finish(step);
    assert!(device.make_room(5, 6));
    assert_eq!(
        (tree.page_counts(), tree.checkpoint_counts()),
        ((3, 0), (2, 0))
    );
    assert!(device.make_room(8, 8));
    assert!(!device.make_room(9, 0), "more than there is");
    world.check_conserved();
}
