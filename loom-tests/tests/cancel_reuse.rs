//! I-9: a page of an aborted flight goes to the next owner only when the writer is quiet.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_kvcache::LayerId;
use kvgate_loom_tests::{Cell, ModelLink, deadline, flight, model, model_peer, pools, still_agent};
use kvgate_transfer::sync::{Arc, AtomicBool, Ordering, thread};
use kvgate_transfer::{Cause, Visibility, WriterRank};

/// One page. Its flight is aborted while the hardware still writes; the writer then says that it is quiet.
#[test]
fn a_late_write_never_hits_the_next_owner() {
    model("a_late_write_never_hits_the_next_owner", || {
        let (agent, pools) = (still_agent("decode"), pools(1));
        let link = ModelLink::receiver();
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let page = Arc::new(Cell::new());
        let aborted = flight(&pools, &agent, peer, 1).unwrap();
        let quiet = Arc::new(AtomicBool::new(false));
        let nic = {
            let (link, page, quiet) = (link.clone(), page.clone(), quiet.clone());
            thread::spawn(move || {
                page.write(7);
                link.arrive(1, 0, 0, Visibility::RemoteVisible);
                quiet.store(true, Ordering::Release);
            })
        };
        let mut draining = aborted.abort(Cause::Shutdown);
        if quiet.load(Ordering::Acquire) {
            assert!(draining.writer_answered(peer, WriterRank(0)));
        }
        draining.poll();
        if let Some(next) = flight(&pools, &agent, peer, 2) {
            page.write(9);
            link.arrive(2, 0, 0, Visibility::RemoteVisible);
            drop(next.lease().unwrap().layer(LayerId(0), deadline()).unwrap());
            assert_eq!(page.read(), 9);
            drop(next.close());
        }
        nic.join().unwrap();
        // Without effect when the slots are free already.
        draining.writer_answered(peer, WriterRank(0));
        assert!(draining.poll());
        drop(draining);
        link_down(&agent, &link);
        let stats = pools.stats();
        assert!(stats.is_conserved());
        assert_eq!(stats.pages.free, 1);
    });
}

/// The owner ends while a lease reads: the page stays until the lease is gone.
#[test]
fn a_lease_keeps_its_page() {
    model("a_lease_keeps_its_page", || {
        let (agent, pools) = (still_agent("decode"), pools(1));
        let link = ModelLink::receiver();
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let page = Arc::new(Cell::new());
        let landed = flight(&pools, &agent, peer, 1).unwrap();
        page.write(7);
        link.arrive(1, 0, 0, Visibility::RemoteVisible);
        let lease = landed.lease().unwrap();
        let reader = {
            let page = page.clone();
            thread::spawn(move || {
                drop(lease.layer(LayerId(0), deadline()).unwrap());
                assert_eq!(page.read(), 7);
                drop(lease);
            })
        };
        drop(landed.close());
        if let Ok(next) = pools.reserve(8, kvgate_kvcache::Room(2)) {
            page.write(9);
            drop(next);
        }
        reader.join().unwrap();
        link_down(&agent, &link);
    });
}

/// A writer that is lost without a proof keeps the page for good; with a proof it is free.
#[test]
fn only_a_proven_death_frees() {
    model("only_a_proven_death_frees", || {
        for is_proven in [true, false] {
            let (agent, pools) = (still_agent("decode"), pools(1));
            let link = ModelLink::new(is_proven, |_| Ok(posted()));
            let peer = agent
                .attach_link(ModelLink::object(&link), &model_peer(1))
                .unwrap();
            let aborted = flight(&pools, &agent, peer, 1).unwrap();
            let loser = {
                let link = link.clone();
                thread::spawn(move || link.lose())
            };
            let mut draining = aborted.abort(Cause::Shutdown);
            let early = draining.poll();
            loser.join().unwrap();
            assert_eq!(draining.poll(), is_proven);
            assert!(is_proven || !early);
            drop(draining);
            assert_eq!(pools.stats().pages.quarantined, u32::from(!is_proven));
            link_down(&agent, &link);
        }
    });
}

fn posted() -> kvgate_transfer::backend::Posted {
    kvgate_transfer::backend::Posted::Done(Visibility::RemoteVisible)
}

/// Ends the connection, so that engine and link let go of each other.
fn link_down(agent: &kvgate_transfer::Agent, link: &Arc<ModelLink>) {
    let _left = agent.shutdown(deadline());
    link.forget();
}
