//! I-21 between two processes: a region goes away only when the peer does not touch it any more.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_loom_tests::{Cell, DirectLink, deadline, model, model_peer, model_region, still_agent};
use kvgate_transfer::backend::RemoteRun;
use kvgate_transfer::sync::{Arc, thread};
use kvgate_transfer::{
    Agent, DescriptorList, Incarnation, MemoryRegion, Op, PoolId, PostOptions, SourceReady,
};

/// First byte of the frames "let go of a region" and "I have": docs/wire.md.
const REVOKE: u8 = 1;
const REVOKE_ACK: u8 = 2;

fn close(region: MemoryRegion) {
    let closed = region.close(deadline());
    closed.map_err(|(_, error)| error).unwrap();
}

/// The peer writes by itself until it is asked to let go. The request goes through a worker.
#[test]
fn closing_waits_for_the_answer_of_the_peer() {
    model("closing_waits_for_the_answer_of_the_peer", || {
        let agent = Agent::builder("decode").build().unwrap();
        let link = DirectLink::new();
        let region = model_region(&agent);
        agent
            .attach_link(DirectLink::object(&link), &model_peer(1))
            .unwrap();
        let memory = Arc::new(Cell::new());
        let writer = {
            let (link, memory) = (link.clone(), memory.clone());
            thread::spawn(move || {
                let mut frame = link.next_frame();
                assert_eq!(frame[0], REVOKE);
                memory.write(7);
                frame[0] = REVOKE_ACK;
                link.receive(frame);
            })
        };
        close(region);
        memory.write(9);
        writer.join().unwrap();
        let _left = agent.shutdown(deadline());
    });
}

/// The peer dies instead of answering, before or after it was asked.
#[test]
fn a_proven_death_is_an_answer() {
    model("a_proven_death_is_an_answer", || {
        let agent = still_agent("decode");
        let link = DirectLink::new();
        let region = model_region(&agent);
        agent
            .attach_link(DirectLink::object(&link), &model_peer(1))
            .unwrap();
        let memory = Arc::new(Cell::new());
        let writer = {
            let (link, memory) = (link.clone(), memory.clone());
            thread::spawn(move || {
                memory.write(7);
                link.lose();
            })
        };
        close(region);
        memory.write(9);
        writer.join().unwrap();
        let _left = agent.shutdown(deadline());
    });
}

/// A write of the peer is applied by this side while the region is closed.
#[test]
fn closing_waits_for_a_write_that_is_applied() {
    model("closing_waits_for_a_write_that_is_applied", || {
        let agent = still_agent("decode");
        let link = DirectLink::new();
        let region = model_region(&agent);
        let pool = region.pools()[0];
        let memory = Arc::new(Cell::new());
        agent
            .attach_link(DirectLink::object(&link), &model_peer(1))
            .unwrap();
        let writer = {
            let (link, memory) = (link.clone(), memory.clone());
            thread::spawn(move || {
                let (peer, events) = link.events().expect("nobody closes before");
                let run = RemoteRun {
                    pool,
                    generation: 1,
                    slot: 1,
                    slot_count: 2,
                };
                if let Ok(resolved) = events.resolve(peer, &[run]) {
                    memory.write(7);
                    drop(resolved);
                }
                drop(events);
                link.lose();
            })
        };
        close(region);
        memory.write(9);
        writer.join().unwrap();
        let _left = agent.shutdown(deadline());
    });
}

/// The peer asks this side to let go of a region that an operation of ours writes.
#[test]
fn the_answer_comes_after_the_operation() {
    model("the_answer_comes_after_the_operation", || {
        let agent = still_agent("prefill");
        let link = DirectLink::new();
        let region = model_region(&agent);
        let peer = agent
            .attach_link(DirectLink::object(&link), &model_peer(1))
            .unwrap();
        let (mut local, mut remote) = (
            DescriptorList::new(),
            DescriptorList::remote(Incarnation(1)),
        );
        local.push(region.pools()[0], &[1]);
        remote.push(PoolId(0), &[2]);
        let transfer = agent.prepare(Op::Write, &local, &remote, peer).unwrap();
        let handle = agent
            .post(
                &transfer,
                SourceReady::host_written(),
                PostOptions::default(),
            )
            .unwrap();
        agent.run_queued(peer);
        let theirs = Arc::new(Cell::new());
        let nic = {
            let (link, theirs) = (link.clone(), theirs.clone());
            thread::spawn(move || {
                let op = link.next_posted().expect("it was posted");
                theirs.write(7);
                link.complete(op);
            })
        };
        link.receive(vec![REVOKE, 0, 0, 0, 0]);
        agent.run_queued(peer);
        if link.has_sent() {
            assert_eq!(link.next_frame(), [REVOKE_ACK, 0, 0, 0, 0]);
            theirs.write(9);
            nic.join().unwrap();
        } else {
            nic.join().unwrap();
            agent.run_queued(peer);
            assert_eq!(link.next_frame(), [REVOKE_ACK, 0, 0, 0, 0]);
            theirs.write(9);
        }
        assert!(!link.has_sent(), "one answer");
        drop((handle, transfer));
        let _left = agent.shutdown(deadline());
        drop(region);
    });
}
