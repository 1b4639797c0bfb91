//! I-11: who looks whether operations go on overlooks none and ends none.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use kvgate_loom_tests::{DirectLink, deadline, model, model_peer, model_region, watched_agent};
use kvgate_transfer::sync::{Arc, Mutex, thread};
use kvgate_transfer::{
    Agent, DescriptorList, Event, Incarnation, MemoryRegion, Op, PeerId, PoolId, PostOptions,
    PreparedTransfer, Recorder, SourceReady, Status, TransferHandle,
};

/// Longer than `stall_ms` of the agent.
const LATER: Duration = Duration::from_secs(2);

/// What was said of stalls.
struct Said(Arc<Mutex<Vec<&'static str>>>);

impl Recorder for Said {
    fn record(&self, event: &Event) {
        match event {
            Event::Stalled { .. } => self.0.lock().push("stalled"),
            Event::Resumed { .. } => self.0.lock().push("resumed"),
            _ => {}
        }
    }
}

struct Sender {
    agent: Agent,
    link: Arc<DirectLink>,
    peer: PeerId,
    region: MemoryRegion,
}

fn sender(agent: Agent) -> Sender {
    let link = DirectLink::new();
    let peer = agent
        .attach_link(DirectLink::object(&link), &model_peer(1))
        .unwrap();
    let region = model_region(&agent);
    Sender {
        agent,
        link,
        peer,
        region,
    }
}

impl Sender {
    fn prepare(&self) -> PreparedTransfer {
        let (mut local, mut remote) = (
            DescriptorList::new(),
            DescriptorList::remote(Incarnation(1)),
        );
        local.push(self.region.pools()[0], &[1]);
        remote.push(PoolId(0), &[2]);
        let agent = &self.agent;
        let transfer = agent.prepare(Op::Write, &local, &remote, self.peer);
        transfer.unwrap()
    }

    fn post(&self, transfer: &PreparedTransfer) -> TransferHandle {
        let options = PostOptions::default();
        let source = SourceReady::host_written();
        self.agent.post(transfer, source, options).unwrap()
    }

    /// The link takes what was posted last, and it ends.
    fn complete(&self) {
        self.agent.run_queued(self.peer);
        self.link.complete(self.link.next_posted().unwrap());
    }
}

/// An operation is posted while the thread that looks goes to sleep, since nothing was in flight.
#[test]
fn a_post_wakes_whoever_looks() {
    model("a_post_wakes_whoever_looks", || {
        let sender = sender(watched_agent("prefill"));
        let transfer = sender.prepare();
        let first = sender.post(&transfer);
        assert!(sender.agent.await_in_flight());
        sender.complete();
        let watcher = {
            let agent = sender.agent.clone();
            thread::spawn(move || assert!(agent.await_in_flight()))
        };
        let second = sender.post(&transfer);
        // A thread that sleeps on is found by loom itself.
        watcher.join().unwrap();
        sender.complete();
        drop((transfer, first, second));
        let _left = sender.agent.shutdown(deadline());
    });
}

/// An operation ends while it is found to stand still: it ends as it would have, and whoever heard of the stall
/// hears that it is over.
#[test]
fn a_stall_ends_nothing() {
    model("a_stall_ends_nothing", || {
        let said = Arc::new(Mutex::new(Vec::new()));
        let agent = {
            let recorder = Said(said.clone());
            let recorder = kvgate_transfer::arc_dyn!(recorder => dyn Recorder);
            kvgate_loom_tests::recorded_agent("prefill", recorder)
        };
        let sender = sender(agent);
        let handle = sender.post(&sender.prepare());
        sender.agent.run_queued(sender.peer);
        sender.agent.look_for_stalls(Duration::ZERO);
        let nic = {
            let link = sender.link.clone();
            thread::spawn(move || link.complete(link.next_posted().unwrap()))
        };
        sender.agent.look_for_stalls(LATER);
        nic.join().unwrap();
        let status = handle.status();
        assert!(matches!(status, Status::Done(_)), "{status:?}");
        let said = said.lock().clone();
        assert!(
            said.is_empty() || said == ["stalled", "resumed"],
            "{said:?}"
        );
        assert_eq!(sender.agent.counters().stalls, said.len() as u64 / 2);
        drop(handle);
        let _left = sender.agent.shutdown(deadline());
    });
}
