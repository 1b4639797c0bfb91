//! I-6, I-24: a shutdown wakes whoever waits.
#![cfg(kv_loom)]

use kvgate_loom_tests::{ModelLink, deadline, model, model_peer, still_agent};
use kvgate_transfer::sync::thread;
use kvgate_transfer::{BarrierError, Cause, StageId, WriterRank};

/// A reader waits for a layer that will never land.
#[test]
fn a_shutdown_wakes_the_readers() {
    model("a_shutdown_wakes_the_readers", || {
        let agent = still_agent("decode");
        let link = ModelLink::receiver();
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let barrier = kvgate_loom_tests::barrier(&[1], 1);
        let flight = agent
            .expect(&barrier, &[(peer, WriterRank(0))], None)
            .unwrap();
        barrier.arm().unwrap();
        let reader = {
            let barrier = barrier.clone();
            thread::spawn(move || barrier.wait(StageId(0), deadline()))
        };
        let _left = agent.shutdown(deadline());
        assert!(matches!(
            reader.join().unwrap(),
            Err(BarrierError::Failed(Cause::Shutdown))
        ));
        drop(flight.close());
        link.forget();
    });
}

/// Somebody waits for events of an agent that is shut down.
#[test]
fn a_shutdown_wakes_the_event_loop() {
    model("a_shutdown_wakes_the_event_loop", || {
        let agent = still_agent("decode");
        let listener = {
            let agent = agent.clone();
            thread::spawn(move || agent.next_event(deadline()))
        };
        let _left = agent.shutdown(deadline());
        assert!(listener.join().unwrap().is_none());
    });
}
