//! I-21: memory stays registered and mapped until its operations are terminal.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_loom_tests::{Cell, ModelLink, deadline, model, model_peer, model_region, still_agent};
use kvgate_transfer::backend::Posted;
use kvgate_transfer::sync::{Arc, AtomicU32, Ordering, thread};
use kvgate_transfer::{
    Agent, DescriptorList, Incarnation, MemoryRegion, Op, PeerId, PoolId, PostOptions,
    PreparedTransfer, SourceReady, Status, TransferHandle, Visibility,
};

fn prepared(agent: &Agent, region: &MemoryRegion, peer: PeerId) -> PreparedTransfer {
    let (mut local, mut remote) = (
        DescriptorList::new(),
        DescriptorList::remote(Incarnation(1)),
    );
    local.push(region.pools()[0], &[1]);
    remote.push(PoolId(0), &[2]);
    agent.prepare(Op::Write, &local, &remote, peer).unwrap()
}

fn post(agent: &Agent, transfer: &PreparedTransfer, options: PostOptions) -> TransferHandle {
    agent
        .post(transfer, SourceReady::host_written(), options)
        .unwrap()
}

/// The region is closed while an operation that was posted reads it.
#[test]
fn closing_waits_for_the_operation() {
    model("closing_waits_for_the_operation", || {
        let agent = still_agent("prefill");
        let memory = Arc::new(Cell::new());
        let link = {
            let memory = memory.clone();
            ModelLink::new(true, move |_| {
                memory.read();
                Ok(Posted::Done(Visibility::RemoteVisible))
            })
        };
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let region = model_region(&agent);
        let transfer = prepared(&agent, &region, peer);
        let handle = post(&agent, &transfer, PostOptions::default());
        drop(transfer);
        let worker = {
            let agent = agent.clone();
            thread::spawn(move || agent.run_queued(peer))
        };
        region
            .close(deadline())
            .map_err(|(_, error)| error)
            .unwrap();
        memory.write(9);
        worker.join().unwrap();
        assert!(matches!(handle.status(), Status::Done(_)));
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}

/// An operation is cancelled while the worker takes it: it ends once, and gives its source back once and
/// never while the copy still reads it.
#[test]
fn a_cancel_races_with_the_worker() {
    model("a_cancel_races_with_the_worker", || {
        struct Source(Arc<AtomicU32>, Arc<Cell>);
        impl Drop for Source {
            fn drop(&mut self) {
                self.1.write(7);
                self.0.fetch_add(1, Ordering::AcqRel);
            }
        }
        let agent = still_agent("prefill");
        let memory = Arc::new(Cell::new());
        let link = {
            let memory = memory.clone();
            ModelLink::new(true, move |_| {
                memory.read();
                Ok(Posted::Done(Visibility::RemoteVisible))
            })
        };
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let region = model_region(&agent);
        let transfer = prepared(&agent, &region, peer);
        let given_back = Arc::new(AtomicU32::new(0));
        let keepalive = Source(given_back.clone(), memory);
        let options = PostOptions {
            keepalive: Some(Box::new(keepalive)),
            ..PostOptions::default()
        };
        let handle = post(&agent, &transfer, options);
        let worker = {
            let agent = agent.clone();
            thread::spawn(move || agent.run_queued(peer))
        };
        handle.cancel();
        worker.join().unwrap();
        assert!(matches!(
            handle.wait(deadline()),
            Status::Done(_) | Status::Failed(_)
        ));
        assert_eq!(given_back.load(Ordering::Acquire), 1);
        drop((handle, transfer));
        region
            .close(deadline())
            .map_err(|(_, error)| error)
            .unwrap();
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}
