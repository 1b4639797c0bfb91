//! I-9, I-14: what is told of a flight while it begins or ends.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_loom_tests::{Cell, DirectLink, deadline, model, model_peer, still_agent};
use kvgate_transfer::sync::{Arc, thread};
use kvgate_transfer::{
    Arrival, ArrivalSink, BarrierError, Cause, ChunkId, Epoch, ErrorKind, PeerId, StageId,
    Visibility, WriterRank,
};

/// Looks at the page that an arrival speaks of, as the canary does.
struct Looking(Arc<Cell>);

impl ArrivalSink for Looking {
    fn arrived(&self, _peer: PeerId, _arrival: &Arrival) {
        self.0.read();
    }
}

fn arrive(link: &DirectLink, epoch: u64) {
    if let Some((peer, events)) = link.events() {
        let arrival = Arrival {
            epoch: Epoch(epoch),
            tickets: vec![(StageId(0), ChunkId(0))],
            note: Default::default(),
        };
        events.arrived(peer, arrival, Visibility::RemoteVisible);
    }
}

/// The writer has answered the abort; an arrival it sent before is handled meanwhile. Whoever has the proof
/// owns the page.
#[test]
fn nothing_is_handled_behind_the_proof() {
    model("nothing_is_handled_behind_the_proof", || {
        let agent = still_agent("decode");
        let link = DirectLink::new();
        let peer = agent
            .attach_link(DirectLink::object(&link), &model_peer(1))
            .unwrap();
        let page = Arc::new(Cell::new());
        let barrier = kvgate_loom_tests::armed(&[1], 1);
        let sink = kvgate_transfer::arc_dyn!(Looking(page.clone()) => dyn ArrivalSink);
        let flight = agent
            .expect(&barrier, &[(peer, WriterRank(0))], Some(sink))
            .unwrap();
        let receiver = {
            let link = link.clone();
            thread::spawn(move || arrive(&link, 1))
        };
        let draining = flight.abort(Cause::Shutdown);
        assert!(draining.writer_answered(peer, WriterRank(0)));
        let proof = draining.wait(deadline()).map_err(drop).unwrap();
        page.write(9);
        drop(proof);
        receiver.join().unwrap();
        let _left = agent.shutdown(deadline());
    });
}

/// The writer is lost while the receiver begins to wait for it: refused, or told at the gate.
#[test]
fn a_writer_that_is_lost_at_the_beginning_is_noticed() {
    model("a_writer_that_is_lost_at_the_beginning_is_noticed", || {
        let agent = still_agent("decode");
        let link = DirectLink::new();
        let peer = agent
            .attach_link(DirectLink::object(&link), &model_peer(1))
            .unwrap();
        let loser = {
            let link = link.clone();
            thread::spawn(move || link.lose())
        };
        let barrier = kvgate_loom_tests::armed(&[1], 1);
        match agent.expect(&barrier, &[(peer, WriterRank(0))], None) {
            Ok(flight) => {
                let told = barrier.wait(StageId(0), deadline());
                assert!(matches!(told, Err(BarrierError::Failed(_))), "{told:?}");
                assert!(flight.close().wait(deadline()).is_ok());
            }
            Err(error) => assert!(matches!(error.kind(), ErrorKind::PeerDown { .. })),
        }
        loser.join().unwrap();
        let _left = agent.shutdown(deadline());
    });
}

/// A connection is made while the agent is shut down: it is refused, or ended.
#[test]
fn a_connection_that_comes_at_the_end_is_closed() {
    model("a_connection_that_comes_at_the_end_is_closed", || {
        let agent = still_agent("decode");
        let link = DirectLink::new();
        let acceptor = {
            let (agent, link) = (agent.clone(), link.clone());
            thread::spawn(move || {
                let _peer = agent.attach_link(DirectLink::object(&link), &model_peer(1));
            })
        };
        let _left = agent.shutdown(deadline());
        acceptor.join().unwrap();
        assert!(link.is_closed());
    });
}
