//! Operations that stand still: it is said once, with what is known of the cause, and nothing else changes.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unused_macros)] // Only the nodes are used here.
mod contract;
#[allow(dead_code)] // Nothing is cut here.
mod proxy;

use std::net::{Ipv4Addr, SocketAddr};

use contract::patience;
use kvgate_transfer::{
    sync::{Arc, Condvar, Mutex},
    *,
};
use proxy::{Fault, Proxy, Way};

const STALL_MS: u64 = 50;
const SLOT_BYTES: u64 = 1 << 20;

/// What was said of stalls, in order.
#[derive(Default)]
struct Said {
    events: Mutex<Vec<Event>>,
    changed: Condvar,
}

impl Recorder for Said {
    fn record(&self, event: &Event) {
        if matches!(event, Event::Stalled { .. } | Event::Resumed { .. }) {
            self.events.lock().push(event.clone());
            self.changed.notify_all();
        }
    }
}

impl Said {
    /// The events, once there are so many.
    fn first(&self, count: usize) -> Vec<Event> {
        let deadline = patience();
        let mut events = self.events.lock();
        while events.len() < count {
            assert!(!deadline.has_passed(), "{events:?}");
            self.changed.wait_until(&mut events, deadline.instant());
        }
        events.clone()
    }
}

struct Node {
    agent: Agent,
    region: MemoryRegion,
    said: Arc<Said>,
}

impl Node {
    fn new(name: &str, stall_ms: u64, slot_count: u32) -> Self {
        let said = Arc::new(Said::default());
        let config = TransferConfig {
            stall_ms,
            ..TransferConfig::default()
        };
        let builder = Agent::builder(name).config(config);
        let agent = builder.recorder(said.clone()).build().unwrap();
        let geometry = PoolGeometry {
            offset_bytes: 0,
            stride_bytes: SLOT_BYTES,
            slot_bytes: SLOT_BYTES,
            slot_count,
        };
        let memory = Memory::host(SLOT_BYTES * u64::from(slot_count)).unwrap();
        let region = agent.register(Arc::new(memory), &[geometry]).unwrap();
        Self {
            agent,
            region,
            said,
        }
    }
}

/// Two agents with a proxy between their sockets.
struct Pair {
    a: Node,
    b: Node,
    to_b: PeerId,
    proxy: Proxy,
}

fn pair(stall_ms: u64, slot_count: u32) -> Pair {
    let a = Node::new("a", stall_ms, slot_count);
    let b = Node::new("b", stall_ms, slot_count);
    let any_port = Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    let Address::Tcp(bound) = b.agent.listen(&any_port).unwrap() else {
        panic!("another transport")
    };
    let proxy = Proxy::new(bound);
    let to_b = a.agent.connect(&Address::Tcp(proxy.address), patience());
    Pair {
        to_b: to_b.unwrap(),
        a,
        b,
        proxy,
    }
}

impl Pair {
    fn post(&self, op: Op, slots: &[u32]) -> TransferHandle {
        let mut local = DescriptorList::new();
        let mut remote = DescriptorList::remote(self.b.agent.incarnation());
        local.push(self.a.region.pools()[0], slots);
        remote.push(self.b.region.pools()[0], slots);
        let agent = &self.a.agent;
        let transfer = agent.prepare(op, &local, &remote, self.to_b).unwrap();
        let source = match op {
            Op::Read => {
                let told = AgentEvent::Message {
                    peer: self.to_b,
                    bytes: Default::default(),
                };
                SourceReady::announced(&told).unwrap()
            }
            _ => SourceReady::host_written(),
        };
        let posted = agent.post(&transfer, source, PostOptions::default());
        posted.unwrap()
    }
}

fn done(handle: &TransferHandle) {
    let status = handle.wait(patience());
    assert!(matches!(status, Status::Done(_)), "{status:?}");
}

#[test]
fn a_stall_is_said_with_its_cause_and_changes_nothing() {
    for (op, way) in [(Op::Write, Way::ToListener), (Op::Read, Way::ToConnector)] {
        let pair = pair(STALL_MS, 1);
        pair.proxy.arm(way, 40, Fault::Stop);
        let handle = pair.post(op, &[0]);
        let said = pair.a.said.first(1);
        let Event::Stalled {
            peer,
            op: stalled,
            age_ms,
            bytes_moved,
            cause,
        } = &said[0]
        else {
            panic!("{said:?}")
        };
        assert_eq!((*peer, *stalled), (pair.to_b, handle.id()));
        assert!(*age_ms >= STALL_MS && *bytes_moved <= SLOT_BYTES);
        let expected = match op {
            Op::Read => [StallCause::NotAnswered; 2],
            // As much as the buffers on the way take.
            _ => [StallCause::NotAnswered, StallCause::SocketFull],
        };
        assert!(expected.contains(cause), "{op}: {cause}");
        // Nothing has ended, and the memory is in use.
        assert!(matches!(handle.status(), Status::InFlight));
        let status = pair.a.agent.status();
        let [shown] = &status.transfers[..] else {
            panic!("{status:?}")
        };
        assert_eq!(shown.stall.as_deref(), Some(cause.to_string().as_str()));
        assert!(shown.stalled_ms >= Some(STALL_MS));
        assert!(status.to_string().contains("stalled for"), "{status}");
        let (region, error) = pair.a.region.close(Deadline::now()).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::RegionBusy { .. }),
            "{error}"
        );
        // It goes on where it was.
        pair.proxy.release(way);
        done(&handle);
        let said = pair.a.said.first(2);
        assert!(
            matches!(&said[1], Event::Resumed { op, .. } if *op == handle.id()),
            "{said:?}"
        );
        assert_eq!(pair.a.agent.counters().failed_transfers, 0);
        region.close(patience()).map_err(|(_, e)| e).unwrap();
        #[cfg(feature = "metrics")]
        {
            let line = format!("kvgate_stalls_total{{cause=\"{}\"}} ", cause.name());
            assert!(pair.a.agent.metrics_text().contains(&line));
        }
    }
}

#[test]
fn a_full_socket_is_named_and_what_waits_behind_it() {
    let pair = pair(STALL_MS, 128);
    let slots: Vec<u32> = (0..127).collect();
    pair.proxy.arm(Way::ToListener, 5 << 20, Fault::Stop);
    let first = pair.post(Op::Write, &slots);
    let second = pair.post(Op::Write, &[127]);
    let said = pair.a.said.first(2);
    let stalls: Vec<_> = said
        .iter()
        .filter_map(|event| match event {
            Event::Stalled {
                op,
                bytes_moved,
                cause,
                ..
            } => Some((*op, *cause, *bytes_moved)),
            _ => None,
        })
        .collect();
    let [(op, cause, moved), behind] = stalls[..] else {
        panic!("{said:?}")
    };
    assert_eq!((op, cause), (first.id(), StallCause::SocketFull));
    assert!((4 << 20..127 << 20).contains(&moved), "{moved}");
    let waits = StallCause::Behind { op: first.id() };
    assert_eq!(behind, (second.id(), waits, 0));
    pair.proxy.release(Way::ToListener);
    done(&first);
    done(&second);
    assert_eq!(pair.a.agent.counters().failed_transfers, 0);
}

#[test]
fn nobody_looks_when_nobody_asks() {
    let pair = pair(0, 1);
    pair.proxy.arm(Way::ToListener, 40, Fault::Stop);
    let handle = pair.post(Op::Write, &[0]);
    pair.proxy.await_fault(Way::ToListener);
    let status = handle.wait(Deadline::after_ms(3 * STALL_MS));
    assert!(matches!(status, Status::InFlight), "{status:?}");
    pair.proxy.release(Way::ToListener);
    done(&handle);
    assert!(pair.a.said.events.lock().is_empty());
    assert_eq!(pair.a.agent.counters().stalls, 0);
}
