//! I-10: abort, completion and drop: one terminal transition, one release.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_kvcache::LayerId;
use kvgate_loom_tests::{ModelLink, deadline, flight, model, model_peer, pools, still_agent};
use kvgate_transfer::sync::{Arc, AtomicU32, Ordering, thread};
use kvgate_transfer::{Cause, Visibility};

/// The last chunk lands while the flight is aborted. The slots come back once, whoever wins.
#[test]
fn an_abort_races_with_the_last_chunk() {
    model("an_abort_races_with_the_last_chunk", || {
        let (agent, pools) = (still_agent("decode"), pools(1));
        let link = ModelLink::receiver();
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let aborted = flight(&pools, &agent, peer, 1).unwrap();
        let nic = {
            let link = link.clone();
            thread::spawn(move || link.arrive(1, 0, 0, Visibility::RemoteVisible))
        };
        let mut draining = aborted.abort(Cause::Shutdown);
        draining.poll();
        nic.join().unwrap();
        assert!(draining.poll(), "everything of the only writer has landed");
        drop(draining);
        let stats = pools.stats();
        assert!(stats.is_conserved());
        assert_eq!(
            (stats.pages.free, stats.windows.free, stats.requests.free),
            (1, 1, 1)
        );
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}

/// A reader waits at the gate while the flight is aborted and its last chunk lands: it reads or it is told.
#[test]
fn a_reader_is_told_one_thing() {
    model("a_reader_is_told_one_thing", || {
        let (agent, pools) = (still_agent("decode"), pools(1));
        let link = ModelLink::receiver();
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let aborted = flight(&pools, &agent, peer, 1).unwrap();
        let landed = Arc::new(AtomicU32::new(0));
        let lease = aborted.lease().unwrap();
        let reader = {
            let landed = landed.clone();
            thread::spawn(move || {
                if lease.layer(LayerId(0), deadline()).is_ok() {
                    assert_eq!(landed.load(Ordering::Relaxed), 7, "I-2");
                }
            })
        };
        landed.store(7, Ordering::Relaxed);
        link.arrive(1, 0, 0, Visibility::RemoteVisible);
        drop(aborted.abort(Cause::Shutdown));
        reader.join().unwrap();
        assert_eq!(pools.stats().pages.free, 1);
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}
