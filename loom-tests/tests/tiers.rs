//! I-1, I-9, I-12, I-13: prefixes with their ends on the way between two tiers.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_kvcache::{
    CacheSchema, Formats, Hit, InFlight, IndexKFormat, LatentFormat, LayerId, MemoryKind,
    PoolConfig, PoolSet, PrefixLease, PrefixTree, Room, TransferPlan, V4Geometry, WindowPage,
    WriterLayers,
};
use kvgate_loom_tests::{Cell, ModelLink, deadline, model, model_peer, plan, pools, still_agent};
use kvgate_transfer::sync::{Arc, thread};
use kvgate_transfer::{Agent, Cause, Epoch, PeerId, Visibility, WriterRank};

const PREFIX: [u32; 256] = [5; 256];
const PROMPT: [u32; 257] = [5; 257];
const WRITER: WriterRank = WriterRank(0);

fn connected(name: &str) -> (Agent, Arc<ModelLink>, PeerId) {
    let (agent, link) = (still_agent(name), ModelLink::receiver());
    let peer = agent
        .attach_link(ModelLink::object(&link), &model_peer(1))
        .unwrap();
    (agent, link, peer)
}

/// A flight of one page and its end, armed, not yet in the tree.
fn move_of(
    pools: &PoolSet,
    plan: &TransferPlan,
    agent: &Agent,
    peer: PeerId,
    epoch: u64,
) -> InFlight {
    let slots = pools.reserve_prefix(256, None, Room(epoch)).unwrap();
    let flight = slots.into_inflight(plan, Epoch(epoch), &[(peer, WRITER)]);
    let mut flight = flight.map_err(|refused| refused.1).unwrap();
    flight.arm(agent, None).unwrap();
    flight
}

fn leased(tree: &PrefixTree) -> Option<PrefixLease> {
    match tree.resumable(&PROMPT) {
        Hit::Ready { lease, .. } | Hit::Pending { lease, .. } => Some(lease),
        Hit::Miss => None,
    }
}

/// A layer of ratio 4: five components.
fn pools_of_five() -> PoolSet {
    let geometry = V4Geometry {
        layer_ratios: vec![4],
        head_dim: 16,
        rope_dim: 4,
        index_head_dim: 8,
        ..V4Geometry::flash()
    };
    let formats = Formats {
        latent: LatentFormat::F32,
        index_k: IndexKFormat::F32,
        window_page: WindowPage::P64,
    };
    let schema = Arc::new(CacheSchema::deepseek_v4(&geometry, &formats).unwrap());
    let config = PoolConfig {
        pages: 2,
        windows: 3,
        requests: 1,
        memory: MemoryKind::Host,
    };
    PoolSet::new(schema, config).unwrap()
}

/// A load lands component by component while a request goes on behind it.
#[test]
fn a_request_reads_every_component_behind_its_load() {
    model("a_request_reads_every_component_behind_its_load", || {
        let ((agent, link, peer), pools) = (connected("device"), pools_of_five());
        let writers = vec![WriterLayers {
            rank: WRITER,
            layers: 0..1,
        }];
        let schema = pools.schema().clone();
        let plan = TransferPlan::compile(schema, 256, vec![256], writers).unwrap();
        let chunks = plan.chunks(LayerId(0)).len();
        assert_eq!(chunks, 5);
        let tree = PrefixTree::new(&pools);
        let flight = move_of(&pools, &plan, &agent, peer, 1);
        assert!(tree.insert_prefix(&PREFIX, &flight).unwrap());
        let cells: Arc<Vec<Cell>> = Arc::new((0..chunks).map(|_| Cell::new()).collect());
        let nic = {
            let (link, cells) = (link.clone(), cells.clone());
            thread::spawn(move || {
                for (chunk, cell) in cells.iter().enumerate() {
                    cell.write(7);
                    link.arrive(1, 0, chunk as u16, Visibility::RemoteVisible);
                }
            })
        };
        let lease = leased(&tree).unwrap();
        let mut request = pools.resume(lease, 300, Room(2)).map_err(|e| e.1).unwrap();
        assert!(request.layer_mut(LayerId(0)).is_err());
        request.attach_layer(LayerId(0), deadline()).unwrap();
        cells.iter().for_each(|cell| assert_eq!(cell.read(), 7));
        nic.join().unwrap();
        drop((request, flight, tree));
        assert!(pools.stats().is_conserved());
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}

/// Two requests miss the same prefix at once: one of their loads brings it, the other is dropped.
#[test]
fn two_loads_of_one_prefix_are_one() {
    model("two_loads_of_one_prefix_are_one", || {
        let ((agent, link, peer), pools) = (connected("device"), pools(2));
        let tree = Arc::new(PrefixTree::new(&pools));
        let plan = Arc::new(plan(&pools, 256));
        let load = move |epoch: u64,
                         agent: &Agent,
                         pools: &PoolSet,
                         tree: &PrefixTree,
                         plan: &TransferPlan| {
            let flight = move_of(pools, plan, agent, peer, epoch);
            if tree.insert_prefix(&PREFIX, &flight).unwrap() {
                return Some((epoch, flight));
            }
            let mut draining = flight.abort(Cause::Shutdown);
            assert!(draining.writer_answered(peer, WRITER));
            assert!(draining.poll(), "nothing was posted");
            None
        };
        let other = {
            let (agent, pools, tree, plan) =
                (agent.clone(), pools.clone(), tree.clone(), plan.clone());
            thread::spawn(move || load(2, &agent, &pools, &tree, &plan))
        };
        let mine = load(1, &agent, &pools, &tree, &plan);
        let theirs = other.join().unwrap();
        assert!(
            mine.is_some() != theirs.is_some(),
            "one load, not none and not both"
        );
        let (epoch, flight) = mine.or(theirs).unwrap();
        link.arrive(epoch, 0, 0, Visibility::RemoteVisible);
        tree.settle();
        drop(flight.close());
        assert_eq!(
            (tree.page_counts(), tree.checkpoint_counts()),
            ((1, 0), (1, 0))
        );
        let stats = pools.stats();
        assert_eq!((stats.pages.owned, stats.windows.owned), (1, 1));
        drop(tree);
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}

/// A copy reads a prefix of the host tier, page and end, while the tier makes room for another one.
#[test]
fn host_slots_are_used_again_behind_their_copy() {
    model("host_slots_are_used_again_behind_their_copy", || {
        let ((agent, link, peer), pools) = (connected("host"), pools(1));
        let tree = Arc::new(PrefixTree::new(&pools));
        let plan = plan(&pools, 256);
        let (page, end) = (Arc::new(Cell::new()), Arc::new(Cell::new()));
        page.write(7);
        end.write(7);
        let flight = move_of(&pools, &plan, &agent, peer, 1);
        assert!(tree.insert_prefix(&PREFIX, &flight).unwrap());
        link.arrive(1, 0, 0, Visibility::RemoteVisible);
        tree.settle();
        drop(flight.close());
        let copy = {
            let (tree, page, end) = (tree.clone(), page.clone(), end.clone());
            thread::spawn(move || {
                // The pin is the operation's: it ends with it.
                if let Some(pin) = leased(&tree) {
                    assert_eq!((page.read(), end.read()), (7, 7));
                    drop(pin);
                }
            })
        };
        tree.evict_checkpoints(1);
        tree.evict(1);
        if let Ok(next) = pools.reserve_prefix(256, None, Room(2)) {
            page.write(9);
            end.write(9);
            drop(next);
        }
        copy.join().unwrap();
        drop(tree);
        let stats = pools.stats();
        assert_eq!((stats.pages.free, stats.windows.free), (1, 1));
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}

/// A load fails while a request waits for it: the request hears of it, and the slots come back.
#[test]
fn who_waits_for_a_failed_load_hears_of_it() {
    model("who_waits_for_a_failed_load_hears_of_it", || {
        let ((agent, link, peer), pools) = (connected("device"), pools(3));
        let tree = PrefixTree::new(&pools);
        let plan = plan(&pools, 256);
        let flight = move_of(&pools, &plan, &agent, peer, 1);
        assert!(tree.insert_prefix(&PREFIX, &flight).unwrap());
        let lease = leased(&tree).unwrap();
        let waiter = {
            let pools = pools.clone();
            thread::spawn(move || {
                let mut request = pools.resume(lease, 257, Room(2)).map_err(|e| e.1).unwrap();
                assert!(request.attach_layer(LayerId(0), deadline()).is_err());
                assert!(request.layer_mut(LayerId(0)).is_err());
            })
        };
        let draining = flight.abort(Cause::Shutdown);
        assert!(draining.writer_answered(peer, WRITER));
        drop(draining);
        assert!(leased(&tree).is_none());
        waiter.join().unwrap();
        drop(tree);
        let stats = pools.stats();
        assert_eq!(
            (stats.pages.free, stats.windows.free, stats.requests.free),
            (3, 3, 3)
        );
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}

/// The tree takes a prefix and its end over while their flight is closed: each slot has one owner.
#[test]
fn an_end_is_taken_over_or_given_back() {
    model("an_end_is_taken_over_or_given_back", || {
        let ((agent, link, peer), pools) = (connected("device"), pools(1));
        let tree = Arc::new(PrefixTree::new(&pools));
        let flight = move_of(&pools, &plan(&pools, 256), &agent, peer, 1);
        assert!(tree.insert_prefix(&PREFIX, &flight).unwrap());
        link.arrive(1, 0, 0, Visibility::RemoteVisible);
        let settler = {
            let tree = tree.clone();
            thread::spawn(move || tree.settle())
        };
        drop(flight.close());
        settler.join().unwrap();
        tree.settle();
        let ((pages, pending), (ends, pending_ends)) =
            (tree.page_counts(), tree.checkpoint_counts());
        assert_eq!((pending, pending_ends), (0, 0));
        assert!(ends <= pages, "an end without its page");
        let stats = pools.stats();
        assert_eq!((stats.pages.owned, stats.windows.owned), (pages, ends));
        drop(tree);
        let stats = pools.stats();
        assert_eq!((stats.pages.free, stats.windows.free), (1, 1));
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}
