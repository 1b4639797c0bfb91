//! I-25: what is said of a slot while its operation is under way, fails or is lost.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_loom_tests::{Cell, ModelLink, deadline, model, model_peer, model_region, still_agent};
use kvgate_transfer::backend::Posted;
use kvgate_transfer::sync::{Arc, thread};
use kvgate_transfer::{
    DescriptorList, Incarnation, Op, PoolId, PostOptions, SlotState, SourceReady, Status,
};

/// The peer is lost while a write of three slots is under way: the first has landed, the second
/// has been sent, the third has not. Somebody looks all the time.
#[test]
fn nothing_unknown_is_said_to_be_known() {
    model("nothing_unknown_is_said_to_be_known", || {
        let agent = still_agent("prefill");
        let page = Arc::new(Cell::new());
        let link = {
            let page = page.clone();
            ModelLink::new(true, move |op| {
                op.landing.begun_to(1);
                page.write(7);
                op.landing.landed(0..1);
                op.landing.begun_to(2);
                Ok(Posted::Pending)
            })
        };
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let region = model_region(&agent);
        let (mut local, mut remote) = (
            DescriptorList::new(),
            DescriptorList::remote(Incarnation(1)),
        );
        local.push(region.pools()[0], &[0, 1, 2]);
        remote.push(PoolId(0), &[0, 1, 2]);
        let transfer = agent.prepare(Op::Write, &local, &remote, peer).unwrap();
        let options = PostOptions::default();
        let posted = agent.post(&transfer, SourceReady::host_written(), options);
        let handle = posted.unwrap();
        assert_eq!(handle.landed().count(SlotState::NotLanded), 3);
        let worker = {
            let (agent, link) = (agent.clone(), link.clone());
            thread::spawn(move || {
                agent.run_queued(peer);
                link.lose();
            })
        };
        // Loom itself reports a read of what is said to have landed and is not there.
        if handle.landed().slot(0) == Some(SlotState::Landed) {
            assert_eq!(page.read(), 7);
        }
        worker.join().unwrap();
        assert!(matches!(handle.status(), Status::Failed(_)));
        let landed = handle.landed();
        let states = [0, 1, 2].map(|slot| landed.slot(slot).unwrap());
        let expected = [SlotState::Landed, SlotState::Unknown, SlotState::NotLanded];
        assert_eq!(states, expected);
        drop(handle);
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}
