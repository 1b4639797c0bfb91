//! I-12: a pending prefix is not readable before its flight, and disappears when that fails.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_kvcache::{Hit, InFlight, LayerId, PoolSet, PrefixTree, Room};
use kvgate_loom_tests::{Cell, ModelLink, deadline, model, model_peer, plan, pools, still_agent};
use kvgate_transfer::sync::{Arc, thread};
use kvgate_transfer::{Agent, Cause, Epoch, PeerId, Visibility, WriterRank};

const PROMPT: [u32; 256] = [5; 256];

fn page_flight(pools: &PoolSet, agent: &Agent, peer: PeerId) -> InFlight {
    let lease = pools.reserve(256, Room(1)).unwrap();
    let writers = [(peer, WriterRank(0))];
    let mut flight = lease
        .into_inflight(&plan(pools, 256), Epoch(1), &writers)
        .unwrap();
    flight.arm(agent, None).unwrap();
    flight
}

/// A reader finds the prefix while it is still on its way.
#[test]
fn a_pending_hit_waits_for_its_flight() {
    model("a_pending_hit_waits_for_its_flight", || {
        let (agent, pools) = (still_agent("decode"), pools(2));
        let link = ModelLink::receiver();
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let tree = Arc::new(PrefixTree::new(&pools));
        let flight = page_flight(&pools, &agent, peer);
        tree.insert(&PROMPT, &flight).unwrap();
        let page = Arc::new(Cell::new());
        let nic = {
            let (link, page) = (link.clone(), page.clone());
            thread::spawn(move || {
                page.write(7);
                link.arrive(1, 0, 0, Visibility::RemoteVisible);
            })
        };
        match tree.lookup(&PROMPT) {
            Hit::Ready { lease, .. } | Hit::Pending { lease, .. } => {
                drop(lease.layer(LayerId(0), deadline()).unwrap());
                assert_eq!(page.read(), 7);
            }
            Hit::Miss => panic!("the prefix was entered"),
        }
        nic.join().unwrap();
        drop((tree, flight));
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}

/// The flight fails while somebody looks: nobody gets to read, and the prefix is gone.
#[test]
fn a_failed_prefix_disappears() {
    model("a_failed_prefix_disappears", || {
        let (agent, pools) = (still_agent("decode"), pools(2));
        let link = ModelLink::receiver();
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let tree = Arc::new(PrefixTree::new(&pools));
        let flight = page_flight(&pools, &agent, peer);
        tree.insert(&PROMPT, &flight).unwrap();
        let reader = {
            let tree = tree.clone();
            thread::spawn(move || match tree.lookup(&PROMPT) {
                Hit::Pending { lease, .. } => assert!(lease.layer(LayerId(0), deadline()).is_err()),
                Hit::Ready { .. } => panic!("nothing has landed"),
                Hit::Miss => {}
            })
        };
        drop(flight.abort(Cause::Shutdown));
        reader.join().unwrap();
        assert!(matches!(tree.lookup(&PROMPT), Hit::Miss));
        drop(tree);
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}
