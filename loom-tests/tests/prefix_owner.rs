//! I-10, I-13: a page of the prefix tree has one owner at a time, and its readers keep it.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_kvcache::{Hit, InFlight, LayerId, PoolSet, PrefixTree, Room};
use kvgate_loom_tests::{Cell, ModelLink, deadline, model, model_peer, plan, pools, still_agent};
use kvgate_transfer::sync::{Arc, thread};
use kvgate_transfer::{Agent, Epoch, PeerId, Visibility, WriterRank};

const PROMPT: [u32; 256] = [5; 256];

/// A flight of one whole page, entered into the tree, with everything landed.
fn landed(
    pools: &PoolSet,
    agent: &Agent,
    link: &ModelLink,
    peer: PeerId,
    tree: &PrefixTree,
) -> InFlight {
    let lease = pools.reserve(256, Room(1)).unwrap();
    let writers = [(peer, WriterRank(0))];
    let mut flight = lease
        .into_inflight(&plan(pools, 256), Epoch(1), &writers)
        .unwrap();
    flight.arm(agent, None).unwrap();
    tree.insert(&PROMPT, &flight).unwrap();
    link.arrive(1, 0, 0, Visibility::RemoteVisible);
    flight
}

/// The flight is closed while the tree takes its page over: the page is the tree's, or free.
#[test]
fn taking_over_races_with_the_close() {
    model("taking_over_races_with_the_close", || {
        let (agent, pools) = (still_agent("decode"), pools(1));
        let link = ModelLink::receiver();
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let tree = Arc::new(PrefixTree::new(&pools));
        let flight = landed(&pools, &agent, &link, peer, &tree);
        let settler = {
            let tree = tree.clone();
            thread::spawn(move || tree.settle())
        };
        drop(flight.close());
        settler.join().unwrap();
        tree.settle();
        let (ready, pending) = tree.page_counts();
        assert_eq!(pending, 0);
        let stats = pools.stats();
        assert!(stats.is_conserved(), "{stats:?}");
        assert_eq!((stats.pages.owned, stats.pages.free), (ready, 1 - ready));
        drop(tree);
        assert_eq!(pools.stats().pages.free, 1);
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}

/// A page is found and read while another thread evicts it and the next owner writes it.
#[test]
fn a_reader_keeps_a_page_that_is_evicted() {
    model("a_reader_keeps_a_page_that_is_evicted", || {
        let (agent, pools) = (still_agent("decode"), pools(1));
        let link = ModelLink::receiver();
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let tree = Arc::new(PrefixTree::new(&pools));
        let page = Arc::new(Cell::new());
        page.write(7);
        let flight = landed(&pools, &agent, &link, peer, &tree);
        tree.settle();
        drop(flight.close());
        let reader = {
            let (tree, page) = (tree.clone(), page.clone());
            thread::spawn(move || match tree.lookup(&PROMPT) {
                Hit::Ready { lease, .. } => {
                    drop(lease.layer(LayerId(0), deadline()).unwrap());
                    assert_eq!(page.read(), 7);
                    drop(lease);
                }
                Hit::Pending { .. } => panic!("it has landed"),
                Hit::Miss => {}
            })
        };
        tree.evict(1);
        if let Ok(next) = pools.reserve(256, Room(2)) {
            page.write(9);
            drop(next);
        }
        reader.join().unwrap();
        drop(tree);
        assert_eq!(pools.stats().pages.free, 1);
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}
