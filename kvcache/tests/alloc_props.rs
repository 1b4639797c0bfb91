//! Random histories of the allocator: no slot is lost, doubled or handed out early.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::{BTreeSet, HashMap};

use common::small_schema;
use kvgate_kvcache::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Reserve { tokens: u32 },
    Drop { which: usize },
    Close { which: usize },
    Hold { which: usize },
    Release { which: usize },
    Poll { which: usize },
    Park { which: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let which = 0_usize..64;
    prop_oneof![
        4 => (1_u32..1_300).prop_map(|tokens| Step::Reserve { tokens }),
        1 => which.clone().prop_map(|which| Step::Drop { which }),
        3 => which.clone().prop_map(|which| Step::Close { which }),
        2 => which.clone().prop_map(|which| Step::Hold { which }),
        2 => which.clone().prop_map(|which| Step::Release { which }),
        2 => which.clone().prop_map(|which| Step::Poll { which }),
        1 => which.prop_map(|which| Step::Park { which }),
    ]
}

/// Everything that counts on slots at one moment.
#[derive(Default)]
struct World {
    leases: Vec<WriteLease>,
    holds: Vec<(SourceLease, u64)>,
    draining: Vec<(DrainingFlight, u64)>,
    parked: Vec<u64>,
    tables: HashMap<u64, BlockTable>,
}

impl World {
    /// Reservations whose slots must not be in anybody else's hands.
    fn live(&self) -> BTreeSet<u64> {
        let leases = self.leases.iter().map(|lease| lease.number().0);
        let holds = self.holds.iter().map(|(_, number)| *number);
        leases
            .chain(holds)
            .chain(self.draining.iter().map(|(_, number)| *number))
            .collect()
    }
}

fn apply(pools: &PoolSet, world: &mut World, step: Step) {
    let pick = |which: usize, len: usize| (len > 0).then(|| which % len);
    match step {
        Step::Reserve { tokens } => {
            let before = pools.stats();
            match pools.reserve(tokens, Room(1)) {
                Ok(lease) => {
                    world
                        .tables
                        .insert(lease.number().0, lease.block_table().clone());
                    world.leases.push(lease);
                }
                Err(_) => {
                    let after = pools.stats();
                    assert_eq!(before, after, "a refused reservation keeps nothing");
                }
            }
        }
        Step::Drop { which } => {
            if let Some(index) = pick(which, world.leases.len()) {
                let lease = world.leases.swap_remove(index);
                world.parked.push(lease.number().0);
            }
        }
        Step::Close { which } => {
            if let Some(index) = pick(which, world.leases.len()) {
                let lease = world.leases.swap_remove(index);
                let number = lease.number().0;
                world.draining.push((lease.close(), number));
            }
        }
        Step::Hold { which } => {
            if let Some(index) = pick(which, world.leases.len()) {
                let lease = &mut world.leases[index];
                let number = lease.number().0;
                world.holds.push((lease.source_lease().unwrap(), number));
            }
        }
        Step::Release { which } => {
            if let Some(index) = pick(which, world.holds.len()) {
                drop(world.holds.swap_remove(index));
            }
        }
        Step::Poll { which } => {
            if let Some(index) = pick(which, world.draining.len()) {
                let number = world.draining[index].1;
                let is_held = world.holds.iter().any(|(_, holder)| *holder == number);
                let is_free = world.draining[index].0.poll();
                assert_eq!(is_free, !is_held, "free exactly when nobody reads");
                if is_free {
                    drop(world.draining.swap_remove(index));
                }
            }
        }
        Step::Park { which } => {
            if let Some(index) = pick(which, world.draining.len()) {
                let (draining, number) = world.draining.swap_remove(index);
                draining.quarantine();
                world.parked.push(number);
            }
        }
    }
}

fn check(pools: &PoolSet, world: &World) {
    let stats = pools.stats();
    assert!(stats.is_conserved(), "{stats:?}");
    let mut owned: HashMap<(Space, u32), u64> = HashMap::new();
    for number in world.live() {
        for (space, id) in world.tables[&number].iter() {
            assert_ne!(id.index, 0, "the null page was handed out");
            let other = owned.insert((space, id.index), number);
            assert_eq!(other, None, "{space} slot {id} has two owners");
        }
    }
    for (space, stats) in [
        (Space::Page, stats.pages),
        (Space::Window, stats.windows),
        (Space::Request, stats.requests),
    ] {
        let live = owned.keys().filter(|(of, _)| *of == space).count() as u32;
        assert_eq!(stats.free, stats.capacity - live - stats.retired, "{space}");
    }
}

fn run(first_generation: u32, steps: Vec<Step>) {
    let config = PoolConfig {
        pages: 13,
        windows: 7,
        requests: 5,
        memory: MemoryKind::Host,
    };
    let pools = PoolSet::with_first_generation(small_schema(), config, first_generation).unwrap();
    let mut world = World::default();
    for step in steps {
        apply(&pools, &mut world, step);
        check(&pools, &world);
    }
    drop(world);
    let stats = pools.stats();
    assert_eq!(stats.pages.free + stats.pages.retired, 13, "{stats:?}");
    assert_eq!(stats.windows.free + stats.windows.retired, 7, "{stats:?}");
    assert_eq!(stats.requests.free + stats.requests.retired, 5, "{stats:?}");
    assert_eq!(
        stats.pages.quarantined + stats.pages.draining,
        0,
        "{stats:?}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn slots_are_conserved(steps in proptest::collection::vec(step(), 1..80)) {
        run(0, steps);
    }

    #[test]
    fn slots_are_conserved_at_the_end_of_their_generations(
        steps in proptest::collection::vec(step(), 1..80),
    ) {
        run(u32::MAX - 1, steps);
    }
}
