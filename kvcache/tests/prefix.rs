//! The prefix tree over real flights.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::*;
use kvgate_kvcache::prefix::ComponentSet;
use kvgate_kvcache::*;
use kvgate_transfer::{Cause, Deadline, Side, StepClock};
use proptest::prelude::*;

fn prompt(len: u32, seed: u32) -> Vec<u32> {
    (0..len).map(|token| token ^ seed << 20).collect()
}

fn abort() -> Cause {
    Cause::Aborted {
        by: Side::Local,
        reason: "test".to_owned(),
    }
}

#[test]
fn a_pending_prefix_is_found_but_read_only_through_its_gate() {
    let pair = pair(8, 4, 4);
    let tree = PrefixTree::new(&pair.target);
    let tokens = prompt(600, 1);
    assert!(matches!(tree.lookup(&tokens), Hit::Miss));

    let flight = pair.flight(600, 620, 1);
    assert_eq!(
        tree.insert(&tokens, &flight).unwrap(),
        2,
        "the open page is not entered"
    );
    let Hit::Pending { lease, tokens: hit } = tree.lookup(&tokens) else {
        panic!("not pending")
    };
    assert_eq!(hit, 512);
    let error = lease.layer(LayerId(1), Deadline::after_ms(1)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Gate { .. }), "{error}");

    let mut source = pair.source.reserve(600, Room(1)).unwrap();
    pair.send(&mut source, &flight, 600, 7, &[LayerId(1)]);
    let ready = lease.layer(LayerId(1), deadline()).unwrap();
    let row = *pair
        .target
        .schema()
        .row(LayerId(1), Component::IndexK)
        .unwrap();
    let view = ready.view().component(Component::IndexK).unwrap();
    let mut found = vec![0; view.row_image_bytes()];
    view.read_row(127, &mut found);
    assert_eq!(found, image(&row, 127, 7, found.len()));
    assert!(
        ready.view().component(Component::SwaLatent).is_none(),
        "a prefix has no window"
    );
    assert!(
        lease.layer(LayerId(2), Deadline::after_ms(1)).is_err(),
        "the other layer is pending"
    );

    pair.send(&mut source, &flight, 600, 7, &[LayerId(0), LayerId(2)]);
    let Hit::Ready { tokens: hit, .. } = tree.lookup(&tokens) else {
        panic!("not ready")
    };
    assert_eq!(hit, 512);
    // Another end finds the common pages only.
    let mut other = tokens.clone();
    other[300] += 1;
    let Hit::Ready { tokens: hit, .. } = tree.lookup(&other) else {
        panic!("not ready")
    };
    assert_eq!(hit, 256);
}

#[test]
fn pages_of_the_tree_outlive_their_flight_and_come_back_when_evicted() {
    let pair = pair(3, 4, 4);
    let tree = PrefixTree::new(&pair.target);
    let tokens = prompt(520, 1);
    let flight = pair.hand_over(520, 520, 1, 7);
    tree.insert(&tokens, &flight).unwrap();
    tree.settle();
    flight.close().wait(deadline()).unwrap();
    let stats = pair.target.stats();
    assert!(stats.is_conserved(), "{stats:?}");
    assert_eq!(
        (stats.pages.free, stats.pages.owned),
        (1, 2),
        "two pages went to the tree"
    );
    assert_eq!(stats.windows.free, 4);

    let Hit::Ready { lease, .. } = tree.lookup(&tokens) else {
        panic!("not ready")
    };
    assert_eq!(tree.evict(2), 0, "leased pages are not evicted");
    let ready = lease.layer(LayerId(1), deadline()).unwrap();
    let row = *pair
        .target
        .schema()
        .row(LayerId(1), Component::C4Latent)
        .unwrap();
    let view = ready.view().component(Component::C4Latent).unwrap();
    let mut found = vec![0; view.row_image_bytes()];
    view.read_row(100, &mut found);
    assert_eq!(found, image(&row, 100, 7, found.len()));
    drop(lease);
    assert_eq!(tree.evict(1), 1);
    let Hit::Ready { tokens: hit, .. } = tree.lookup(&tokens) else {
        panic!("not ready")
    };
    assert_eq!(hit, 256, "the page at the end goes first");
    assert_eq!(tree.evict(9), 1);
    assert_eq!(pair.target.stats().pages.free, 3);
}

#[test]
fn a_failed_flight_takes_its_pages_out_of_the_tree() {
    let pair = pair(8, 8, 4);
    let tree = PrefixTree::new(&pair.target);
    let tokens = prompt(512, 1);
    let flight = pair.flight(512, 520, 1);
    tree.insert(&tokens, &flight).unwrap();
    let Hit::Pending { lease, .. } = tree.lookup(&tokens) else {
        panic!("not pending")
    };
    let draining = flight.abort(abort());
    assert!(
        matches!(tree.lookup(&tokens), Hit::Miss),
        "a failed prefix is no hit"
    );
    assert!(
        lease.layer(LayerId(1), deadline()).is_err(),
        "a lease of it never opens"
    );
    assert!(lease.failure().is_some());
    assert_eq!(tree.page_counts(), (0, 0));

    // A second try fills the same prefix.
    let flight = pair.hand_over(512, 520, 2, 9);
    assert_eq!(tree.insert(&tokens, &flight).unwrap(), 2);
    assert!(matches!(tree.lookup(&tokens), Hit::Ready { .. }));
    drop((lease, draining));
    assert!(pair.target.stats().is_conserved());
}

#[test]
fn a_landed_flight_that_was_closed_before_it_was_settled_is_a_miss() {
    let pair = pair(8, 4, 4);
    let tree = PrefixTree::new(&pair.target);
    let tokens = prompt(256, 1);
    let flight = pair.flight(256, 256, 1);
    tree.insert(&tokens, &flight).unwrap();
    let mut source = pair.source.reserve(256, Room(1)).unwrap();
    pair.send(&mut source, &flight, 256, 7, &pair.layers());
    flight.close().wait(deadline()).unwrap();
    assert!(matches!(tree.lookup(&tokens), Hit::Miss));
    assert_eq!(pair.target.stats().pages.free, 8);
}

#[test]
fn a_prefix_that_is_there_keeps_its_first_pages() {
    let pair = pair(8, 8, 4);
    let tree = PrefixTree::new(&pair.target);
    let tokens = prompt(768, 1);
    let first = pair.hand_over(512, 512, 1, 3);
    tree.insert(&tokens[..512], &first).unwrap();
    let second = pair.hand_over(768, 768, 2, 3);
    assert_eq!(
        tree.insert(&tokens, &second).unwrap(),
        1,
        "two pages are there already"
    );
    tree.settle();
    first.close().wait(deadline()).unwrap();
    second.close().wait(deadline()).unwrap();
    let stats = pair.target.stats();
    assert_eq!((stats.pages.owned, stats.pages.free), (3, 5));
    drop(tree);
    let stats = pair.target.stats();
    assert_eq!(
        stats.pages.free, 8,
        "a dropped tree gives everything back: {stats:?}"
    );
}

#[test]
fn a_reading_step_keeps_an_evicted_page() {
    let pair = pair(4, 4, 4);
    let tree = PrefixTree::new(&pair.target);
    let tokens = prompt(256, 1);
    let flight = pair.hand_over(256, 256, 1, 3);
    tree.insert(&tokens, &flight).unwrap();
    tree.settle();
    // A step of the first owner and a step of a prefix lease are both under way.
    let (owner_clock, prefix_clock) = (StepClock::new(), StepClock::new());
    let (owner_step, prefix_step) = (owner_clock.begin_step(), prefix_clock.begin_step());
    flight.fence(&owner_clock).unwrap();
    let Hit::Ready { lease, .. } = tree.lookup(&tokens) else {
        panic!("not ready")
    };
    lease.fence(&prefix_clock).unwrap();
    drop(lease);
    drop(flight.close());
    assert_eq!(tree.evict(1), 1);
    assert_eq!(pair.target.stats().pages.draining, 1);
    prefix_clock.finish(prefix_step);
    assert_eq!(
        pair.target.stats().pages.draining,
        1,
        "the owner's step still reads"
    );
    owner_clock.finish(owner_step);
    // The owner's proof first, then that of the page.
    pair.target.sweep();
    assert_eq!(pair.target.stats().pages.free, 4);
}

#[test]
fn a_shared_page_is_copied_before_it_is_appended_to() {
    let pair = pair(8, 4, 4);
    let tree = PrefixTree::new(&pair.target);
    let tokens = prompt(256, 1);
    let flight = pair.hand_over(256, 256, 1, 3);
    tree.insert(&tokens, &flight).unwrap();
    let Hit::Ready { lease, .. } = tree.lookup(&tokens) else {
        panic!("not ready")
    };
    let mut own = pair.target.reserve(300, Room(2)).unwrap();
    lease.copy_page(0, &mut own, 0, deadline()).unwrap();
    let row = *pair
        .target
        .schema()
        .row(LayerId(1), Component::IndexK)
        .unwrap();
    let layer = own.layer_mut(LayerId(1)).unwrap();
    let mut view = layer.component(Component::IndexK).unwrap();
    let mut found = vec![0; view.row_image_bytes()];
    view.read_row(63, &mut found);
    assert_eq!(found, image(&row, 63, 3, found.len()), "copied");
    view.write_row(63, &vec![0xee; found.len()]).unwrap();
    let shared = lease.layer(LayerId(1), deadline()).unwrap();
    let shared = shared.view().component(Component::IndexK).unwrap();
    shared.read_row(63, &mut found);
    assert_eq!(
        found,
        image(&row, 63, 3, found.len()),
        "the shared page is as it was"
    );
    assert!(lease.copy_page(1, &mut own, 0, deadline()).is_err());
    let mut foreign = pair.source.reserve(10, Room(1)).unwrap();
    assert!(lease.copy_page(0, &mut foreign, 0, deadline()).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// The hit is as long as the shortest component, counted in whole pages from the start.
    #[test]
    fn a_hit_is_the_minimum_over_the_components(
        holes in proptest::collection::vec(0_usize..5, 4),
        asked_pages in 0_u32..6,
    ) {
        let pair = pair(16, 8, 8);
        let tree = PrefixTree::new(&pair.target);
        let components = [Component::C4Latent, Component::IndexK, Component::C128Latent];
        let tokens = prompt(4 * 256, 1);
        let mut flights = Vec::new();
        // Page i lacks the component that holes[i] names, if it names one.
        for (page, hole) in holes.iter().enumerate() {
            let n = (page as u32 + 1) * 256;
            let flight = pair.hand_over(n, n, n.into(), 1);
            let set = match components.get(*hole) {
                Some(component) => ComponentSet::ALL.without(*component),
                None => ComponentSet::ALL,
            };
            tree.insert_with(&tokens[..n as usize], &flight, set).unwrap();
            tree.settle();
            flight.close().wait(deadline()).unwrap();
            flights.push(n);
        }
        let reach = |component: Component| {
            let lacks = |hole: &usize| components.get(*hole) == Some(&component);
            holes.iter().position(lacks).unwrap_or(holes.len()) as u32
        };
        let shortest = components.iter().map(|component| reach(*component)).min().unwrap();
        let mut asked = prompt(4 * 256, 1);
        asked.extend(prompt(512, 2));
        asked.truncate(asked_pages as usize * 256);
        let expected = shortest.min(asked_pages) * 256;
        let found = match tree.lookup(&asked) {
            Hit::Ready { tokens, .. } => tokens,
            Hit::Pending { .. } => unreachable!("everything has landed"),
            Hit::Miss => 0,
        };
        prop_assert_eq!(found, expected);
        prop_assert!(pair.target.stats().is_conserved());
    }
}

/// Asks nobody and proposes what it likes.
#[derive(Debug)]
struct Rogue(identity::BlockKey);

impl prefix::EvictionPolicy for Rogue {
    fn inserted(&mut self, block: identity::BlockKey) {
        self.0 = block;
    }

    fn used(&mut self, _block: identity::BlockKey) {}

    fn removed(&mut self, _block: identity::BlockKey) {}

    fn victim(
        &mut self,
        _can_go: &mut dyn FnMut(&identity::BlockKey) -> bool,
    ) -> Option<identity::BlockKey> {
        Some(self.0)
    }
}

#[test]
fn a_policy_cannot_give_up_what_is_leased_or_unknown() {
    let pair = pair(8, 4, 4);
    let pools = &pair.target;
    let policy = Box::new(Rogue(identity::BlockKey([7; 32])));
    let namespace = identity::Namespace::new(pools.schema(), 256, b"").unwrap();
    let tree = PrefixTree::in_namespace(pools, namespace, policy).unwrap();
    assert_eq!(tree.evict(1), 0, "a page that nobody knows");
    let flight = pair.hand_over(256, 280, 1, 5);
    tree.insert(&prompt(256, 1), &flight).unwrap();
    tree.settle();
    drop(flight);
    let Hit::Ready { lease, .. } = tree.lookup(&prompt(300, 1)) else {
        panic!("it has landed");
    };
    assert_eq!(tree.evict(1), 0, "leased");
    drop(lease);
    assert_eq!(tree.evict(9), 1, "and then nothing is left of it");
}
