//! Agents that meet more than once, in both directions, from several threads, over memory that is registered
//! twice.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unused_macros)] // Only the nodes are used here.
mod contract;

use std::sync::Barrier as Start;

use contract::{Backend, Node, SLOT_BYTES, SLOT_COUNT, arrival, done, event, expect, patience};
use kvgate_transfer::*;

struct Tcp;

impl Backend for Tcp {
    fn new() -> Self {
        Self
    }

    fn agent(&self, name: &str, config: TransferConfig) -> Agent {
        Agent::builder(name).config(config).build().unwrap()
    }

    fn memory(&self, len_bytes: u64) -> Memory {
        Memory::host(len_bytes).unwrap()
    }

    fn connect(&self, a: &Agent, b: &Agent) -> (PeerId, PeerId) {
        let to_b = a.connect(&listen(b), patience()).unwrap();
        (to_b, next_peer(b))
    }
}

fn listen(agent: &Agent) -> Address {
    let any_port = Address::Tcp("127.0.0.1:0".parse().unwrap());
    agent.listen(&any_port).unwrap()
}

fn next_peer(agent: &Agent) -> PeerId {
    event(&Tcp, agent, |event| match event {
        AgentEvent::PeerUp { peer } => Some(peer),
        _ => None,
    })
}

#[test]
fn two_agents_that_start_together_meet_in_both_directions() {
    for _ in 0..20 {
        let (a, b) = (Node::new(&Tcp, "a"), Node::new(&Tcp, "b"));
        let (at_a, at_b) = (listen(&a.agent), listen(&b.agent));
        let start = Start::new(2);
        let connect = |node: &Node, address| {
            start.wait();
            node.agent.connect(address, patience()).unwrap()
        };
        let (to_b, to_a) = std::thread::scope(|scope| {
            let to_a = scope.spawn(|| connect(&b, &at_a));
            (connect(&a, &at_b), to_a.join().unwrap())
        });
        for (node, other, peer) in [(&a, &b, to_b), (&b, &a, to_a)] {
            node.fill(1, 5);
            done(&Tcp, &node.send(peer, 1, 2, arrival(1, 0, 0)));
            assert!(other.holds(2, 5));
            let peers = [next_peer(&node.agent), next_peer(&node.agent)];
            assert!(peers.contains(&peer), "{peers:?}");
            assert_ne!(peers[0], peers[1], "two connections, two numbers");
        }
    }
}

#[test]
fn several_threads_connect_to_one_peer_again() {
    let (a, b) = (Node::new(&Tcp, "a"), Node::new(&Tcp, "b"));
    let address = listen(&b.agent);
    // A connection that was lost does not stand in the way of the next ones.
    let first = Node::new(&Tcp, "first");
    first.agent.connect(&address, patience()).unwrap();
    let lost = next_peer(&b.agent);
    drop(first);
    event(&Tcp, &b.agent, |event| match event {
        AgentEvent::PeerDown { peer, .. } => (peer == lost).then_some(()),
        _ => None,
    });
    let start = Start::new(4);
    let connect = |slot| {
        start.wait();
        let peer = a.agent.connect(&address, patience()).unwrap();
        a.fill(slot, slot as u8 + 1);
        done(&Tcp, &a.send(peer, slot, slot, arrival(1, 0, 0)));
        peer
    };
    let mut peers: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|slot| scope.spawn(move || connect(slot)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    peers.sort();
    peers.dedup();
    assert_eq!(peers.len(), 4);
    assert!((0..4).all(|slot| b.holds(slot, slot as u8 + 1)));
}

#[test]
fn memory_may_be_registered_twice_and_closed_once() {
    let (a, mut b) = (Node::new(&Tcp, "a"), Node::new(&Tcp, "b"));
    let pool = PoolGeometry {
        offset_bytes: 64,
        stride_bytes: 128,
        slot_bytes: SLOT_BYTES,
        slot_count: SLOT_COUNT,
    };
    let second = b.agent.register(b.memory.clone(), &[pool]).unwrap();
    assert_ne!(second.pools()[0], b.pool);
    let (to_b, from_a) = Tcp.connect(&a.agent, &b.agent);
    let first = b.region.take().unwrap();
    first.close(patience()).map_err(|(_, error)| error).unwrap();
    let (_barrier, _flight) = expect(&b, from_a, 1, 1);
    a.fill(0, 3);
    let info = a.agent.peer(to_b).unwrap();
    let write = |pool| {
        let (mut local, mut remote) = (
            DescriptorList::new(),
            DescriptorList::remote(info.incarnation),
        );
        local.push(a.pool, &[0]);
        remote.push(pool, &[4]);
        let transfer = a.agent.prepare(Op::Write, &local, &remote, to_b)?;
        let options = PostOptions::default();
        let posted = a
            .agent
            .post(&transfer, SourceReady::host_written(), options);
        match posted.map_err(|refused| refused.error)?.wait(patience()) {
            Status::Failed(error) => Err(error),
            status => Ok(status),
        }
    };
    let refused = write(b.pool).unwrap_err();
    assert!(
        matches!(
            refused.kind(),
            ErrorKind::PoolRevoked { .. } | ErrorKind::Refused { .. }
        ),
        "{refused}"
    );
    assert!(b.holds(4, 0));
    assert!(matches!(write(second.pools()[0]), Ok(Status::Done(_))));
    assert!(b.holds(4, 3));
}
