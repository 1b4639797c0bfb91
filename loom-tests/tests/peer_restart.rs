//! I-14: what another life of a peer says has no effect.
#![cfg(kv_loom)]

use kvgate_loom_tests::{Cell, ModelLink, deadline, model, model_peer, still_agent};
use kvgate_transfer::sync::{Arc, thread};
use kvgate_transfer::{StageId, StageState, Visibility, WriterRank};

/// Two lives of one process are connected. The flight expects the second; the first reports chunk 0, which
/// nothing else completes before the end.
#[test]
fn a_former_life_completes_nothing() {
    model("a_former_life_completes_nothing", || {
        let agent = still_agent("decode");
        let (old, new) = (ModelLink::receiver(), ModelLink::receiver());
        agent
            .attach_link(ModelLink::object(&old), &model_peer(1))
            .unwrap();
        let peer = agent
            .attach_link(ModelLink::object(&new), &model_peer(2))
            .unwrap();
        let barrier = kvgate_loom_tests::barrier(&[1], 5);
        let flight = agent
            .expect(&barrier, &[(peer, WriterRank(0))], None)
            .unwrap();
        barrier.arm().unwrap();
        let page = Arc::new(Cell::new());
        let late = {
            let old = old.clone();
            thread::spawn(move || old.arrive(5, 0, 0, Visibility::RemoteVisible))
        };
        if barrier.check(StageId(0)) == StageState::Ready {
            page.read();
        }
        late.join().unwrap();
        assert_eq!(
            barrier.check(StageId(0)),
            StageState::Pending { missing: 1 }
        );
        page.write(7);
        new.arrive(5, 0, 0, Visibility::RemoteVisible);
        barrier.wait(StageId(0), deadline()).unwrap();
        assert_eq!(page.read(), 7);
        drop(flight.close());
        let _left = agent.shutdown(deadline());
        old.forget();
        new.forget();
    });
}
