//! Who is told what a tree has, and when.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::{Arc, Mutex};

use common::*;
use kvgate_kvcache::identity::{BlockKey, KeyChain, Namespace};
use kvgate_kvcache::prefix::{ComponentSet, PrefixSink, StoredBlock};
use kvgate_kvcache::*;
use kvgate_transfer::{Cause, Side};

#[derive(Clone, Debug, PartialEq, Eq)]
enum Told {
    Stored(BlockKey, Option<BlockKey>, Vec<u32>),
    Removed(BlockKey),
}

#[derive(Clone, Default)]
struct Ear(Arc<Mutex<Vec<Told>>>);

impl Ear {
    fn take(&self) -> Vec<Told> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl PrefixSink for Ear {
    fn stored(&mut self, block: StoredBlock<'_>) {
        let told = Told::Stored(block.key, block.parent, block.tokens.to_vec());
        self.0.lock().unwrap().push(told);
    }

    fn removed(&mut self, key: BlockKey) {
        self.0.lock().unwrap().push(Told::Removed(key));
    }
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|token| token ^ 5 << 20).collect()
}

/// Pools with a tree that tells, and what it should say of each block of a prompt.
fn told(pair: &Pair, tokens: &[u32]) -> (PrefixTree, Ear, Vec<Told>) {
    let (tree, ear) = (PrefixTree::new(&pair.target), Ear::default());
    assert!(tree.report_to(Box::new(ear.clone())));
    let namespace = Namespace::new(pair.target.schema(), 256, b"").unwrap();
    let chain = KeyChain::of(&namespace, tokens);
    let mut parent = None;
    let stored = chain.keys().iter().zip(tokens.chunks(256));
    let stored = stored.map(|(key, tokens)| {
        let told = Told::Stored(*key, parent, tokens.to_vec());
        parent = Some(*key);
        told
    });
    let stored = stored.collect();
    (tree, ear, stored)
}

#[test]
fn a_block_is_told_of_when_it_can_be_read_and_again_when_it_goes() {
    let pair = pair(8, 4, 4);
    let tokens = prompt(600);
    let (tree, ear, stored) = told(&pair, &tokens);
    let flight = pair.flight(600, 620, 1);
    tree.insert(&tokens, &flight).unwrap();
    let mut source = pair.source.reserve(600, Room(1)).unwrap();
    for layer in pair.layers() {
        tree.settle();
        assert_eq!(ear.take(), [], "{layer} is still to come");
        pair.send(&mut source, &flight, 600, 7, &[layer]);
    }
    tree.settle();
    assert_eq!(ear.take(), stored);
    tree.settle();
    assert!(!tree.report_to(Box::new(ear.clone())), "it is not empty");
    assert_eq!(ear.take(), [], "once");
    flight.close().wait(deadline()).unwrap();
    let key = |index: usize| match &stored[index] {
        Told::Stored(key, ..) => *key,
        Told::Removed(_) => unreachable!(),
    };
    assert_eq!(tree.evict(1), 1);
    assert_eq!(ear.take(), [Told::Removed(key(1))]);
    drop(tree);
    assert_eq!(ear.take(), [Told::Removed(key(0))]);
}

#[test]
fn what_fails_or_lacks_a_component_is_never_told_of() {
    let pair = pair(8, 8, 4);
    let tokens = prompt(512);
    let (tree, ear, stored) = told(&pair, &tokens);
    let flight = pair.flight(512, 520, 1);
    tree.insert(&tokens, &flight).unwrap();
    let draining = flight.abort(Cause::Aborted {
        by: Side::Local,
        reason: "test".to_owned(),
    });
    tree.settle();
    assert_eq!(ear.take(), []);
    drop(draining);
    // The first page without the keys of the indexer, the second one whole: nobody can get behind the first.
    let lacking = pair.hand_over(256, 256, 2, 7);
    let set = ComponentSet::ALL.without(Component::IndexK);
    tree.insert_with(&tokens[..256], &lacking, set).unwrap();
    let whole = pair.hand_over(512, 512, 3, 7);
    assert_eq!(tree.insert(&tokens, &whole).unwrap(), 1);
    tree.settle();
    assert_eq!(ear.take(), []);
    // Both are given up and come again, the end of the prompt in an earlier flight than its start.
    lacking.close().wait(deadline()).unwrap();
    whole.close().wait(deadline()).unwrap();
    assert_eq!(tree.evict(2), 2);
    assert_eq!(ear.take(), []);
    let start = pair.flight(256, 256, 4);
    tree.insert(&tokens[..256], &start).unwrap();
    let end = pair.hand_over(512, 512, 5, 7);
    tree.insert(&tokens, &end).unwrap();
    tree.settle();
    assert_eq!(ear.take(), [], "its start is on its way");
    let mut source = pair.source.reserve(256, Room(4)).unwrap();
    pair.send(&mut source, &start, 256, 7, &pair.layers());
    tree.settle();
    assert_eq!(ear.take(), stored);
}
