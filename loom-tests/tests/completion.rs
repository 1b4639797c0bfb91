//! I-9, I-10: an operation of this side ends once, and its source is kept until then.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_loom_tests::{Cell, DirectLink, deadline, model, model_peer, model_region, still_agent};
use kvgate_transfer::sync::{Arc, AtomicU32, Ordering, thread};
use kvgate_transfer::{
    Agent, DescriptorList, Epoch, FlightLedger, Incarnation, MemoryRegion, Op, PeerId, PoolId,
    PostOptions, SourceReady, Status, TransferHandle,
};

/// Counts how often the source was given back.
struct Source(Arc<AtomicU32>);

impl Drop for Source {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

struct Sender {
    agent: Agent,
    link: Arc<DirectLink>,
    peer: PeerId,
    region: MemoryRegion,
    ledger: Arc<FlightLedger>,
    given_back: Arc<AtomicU32>,
}

fn sender() -> Sender {
    let agent = still_agent("prefill");
    let link = DirectLink::new();
    let region = model_region(&agent);
    let peer = agent
        .attach_link(DirectLink::object(&link), &model_peer(1))
        .unwrap();
    Sender {
        agent,
        link,
        peer,
        region,
        ledger: FlightLedger::new(Epoch(1)),
        given_back: Arc::new(AtomicU32::new(0)),
    }
}

impl Sender {
    /// Posts one slot; nothing else is posted on the ledger.
    fn post(&self) -> TransferHandle {
        let mut local = DescriptorList::new();
        let mut remote = DescriptorList::remote(Incarnation(1));
        local.push(self.region.pools()[0], &[1]);
        remote.push(PoolId(0), &[2]);
        let transfer = self
            .agent
            .prepare(Op::Write, &local, &remote, self.peer)
            .unwrap();
        let options = PostOptions {
            keepalive: Some(Box::new(Source(self.given_back.clone()))),
            ledger: Some(self.ledger.clone()),
            ..PostOptions::default()
        };
        let handle = self
            .agent
            .post(&transfer, SourceReady::host_written(), options)
            .unwrap();
        self.ledger.close();
        handle
    }

    /// Ends the connection; the source was given back once.
    fn end(self) {
        let _left = self.agent.shutdown(deadline());
        drop(self.region);
        assert_eq!(self.given_back.load(Ordering::Acquire), 1);
    }
}

/// The hardware reads the source and reports the end while `post` has not returned yet.
#[test]
fn an_end_races_with_the_return_of_the_post() {
    model("an_end_races_with_the_return_of_the_post", || {
        let sender = sender();
        let page = Arc::new(Cell::new());
        page.write(7);
        let handle = sender.post();
        let nic = {
            let (link, page) = (sender.link.clone(), page.clone());
            thread::spawn(move || {
                let op = link.next_posted().expect("it is posted");
                assert_eq!(page.read(), 7);
                link.complete(op);
            })
        };
        sender.agent.run_queued(sender.peer);
        assert!(FlightLedger::wait(&sender.ledger, deadline()).is_some());
        page.write(9);
        assert!(matches!(handle.wait(deadline()), Status::Done(_)));
        nic.join().unwrap();
        drop(handle);
        sender.end();
    });
}

/// A cancel comes too late: the hardware reads the source still.
#[test]
fn a_late_cancel_does_not_free_the_source() {
    model("a_late_cancel_does_not_free_the_source", || {
        let sender = sender();
        let page = Arc::new(Cell::new());
        let handle = sender.post();
        sender.agent.run_queued(sender.peer);
        let nic = {
            let (link, page) = (sender.link.clone(), page.clone());
            thread::spawn(move || {
                let op = link.next_posted().expect("it is posted");
                page.read();
                link.complete(op);
            })
        };
        handle.cancel();
        if FlightLedger::poll(&sender.ledger).is_some() {
            page.write(9);
        } else {
            assert!(FlightLedger::wait(&sender.ledger, deadline()).is_some());
            page.write(9);
        }
        nic.join().unwrap();
        drop(handle);
        sender.end();
    });
}

/// The peer dies while its last completion comes in: one end, one release, whoever wins.
#[test]
fn an_end_races_with_the_death_of_the_peer() {
    model("an_end_races_with_the_death_of_the_peer", || {
        let sender = sender();
        let handle = sender.post();
        let nic = {
            let link = sender.link.clone();
            thread::spawn(move || {
                // An operation whose peer was lost before never gets here.
                if let Some(op) = link.next_posted() {
                    link.complete(op);
                }
            })
        };
        let death = {
            let link = sender.link.clone();
            thread::spawn(move || link.lose())
        };
        sender.agent.run_queued(sender.peer);
        let ended = handle.wait(deadline());
        assert!(
            matches!(ended, Status::Done(_) | Status::Failed(_)),
            "{ended:?}"
        );
        assert!(FlightLedger::wait(&sender.ledger, deadline()).is_some());
        death.join().unwrap();
        drop(handle);
        sender.end();
        nic.join().unwrap();
    });
}
