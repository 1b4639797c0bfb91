//! Two agents that keep sessions, with a proxy between them that carries one connection after the other.

use std::{
    cell::RefCell,
    net::{Ipv4Addr, SocketAddr},
};

use kvgate_transfer::{sync::Arc, *};

use crate::contract::{Backend, Node, event, patience};
use crate::proxy::Proxy;

/// Far longer than a test takes: what is not resumed within it is not resumed at all.
pub(crate) const WINDOW_MS: u64 = 60_000;

/// Sockets with a proxy between them that carries one connection after the other.
pub(crate) struct Proxied {
    pub(crate) proxy: RefCell<Option<Proxy>>,
    pub(crate) window_ms: u64,
}

impl Backend for Proxied {
    fn new() -> Self {
        Self::within(WINDOW_MS)
    }

    fn agent(&self, name: &str, config: TransferConfig) -> Agent {
        let config = TransferConfig {
            reconnect_ms: self.window_ms,
            ..config
        };
        Agent::builder(name).config(config).build().unwrap()
    }

    fn memory(&self, len_bytes: u64) -> Memory {
        Memory::host(len_bytes).unwrap()
    }

    fn connect(&self, a: &Agent, b: &Agent) -> (PeerId, PeerId) {
        let any_port = Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let Address::Tcp(bound) = b.listen(&any_port).unwrap() else {
            panic!("another transport")
        };
        let proxy = Proxy::lasting(bound);
        let address = Address::Tcp(proxy.address);
        self.proxy.replace(Some(proxy));
        let b_at_a = a.connect(&address, patience()).unwrap();
        let up = |agent| {
            event(self, agent, |event| match event {
                AgentEvent::PeerUp { peer } => Some(peer),
                _ => None,
            })
        };
        assert_eq!(up(a), b_at_a);
        (b_at_a, up(b))
    }
}

impl Proxied {
    pub(crate) fn within(window_ms: u64) -> Self {
        Self {
            proxy: RefCell::default(),
            window_ms,
        }
    }
}

/// Two nodes, `a` connected to `b` through the proxy.
pub(crate) struct Pair {
    pub(crate) a: Node,
    pub(crate) b: Node,
    pub(crate) b_at_a: PeerId,
    pub(crate) a_at_b: PeerId,
    pub(crate) proxy: Proxy,
}

pub(crate) fn pair_of(backend: Proxied, config: TransferConfig) -> Pair {
    let (a, b) = (
        Node::with(&backend, "a", config.clone()),
        Node::with(&backend, "b", config),
    );
    let (b_at_a, a_at_b) = backend.connect(&a.agent, &b.agent);
    Pair {
        a,
        b,
        b_at_a,
        a_at_b,
        proxy: backend.proxy.take().unwrap(),
    }
}

pub(crate) fn pair() -> Pair {
    pair_of(Proxied::new(), TransferConfig::default())
}

pub(crate) fn next(agent: &Agent) -> AgentEvent {
    agent.next_event(patience()).expect("an event in time")
}

/// The next message; breaks and new connections before it are counted.
pub(crate) fn message(agent: &Agent, breaks: &mut u64) -> Vec<u8> {
    loop {
        match next(agent) {
            AgentEvent::Message { bytes, .. } => return bytes.to_vec(),
            AgentEvent::PeerSuspended { .. } => *breaks += 1,
            // A connection that was cut in its handshake is refused, and tried again.
            AgentEvent::PeerResumed { .. } | AgentEvent::Refused { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) fn suspended(agent: &Agent) {
    match next(agent) {
        AgentEvent::PeerSuspended { cause, .. } => assert!(!cause.to_string().is_empty()),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn resumed(agent: &Agent) {
    let resumed = next(agent);
    assert!(
        matches!(resumed, AgentEvent::PeerResumed { .. }),
        "{resumed:?}"
    );
}

/// Everything ends well, and nothing is left.
pub(crate) fn end(pair: Pair) {
    let Pair { a, b, proxy, .. } = pair;
    for mut node in [a, b] {
        let region = node.region.take().unwrap();
        region
            .close(patience())
            .map_err(|(_, error)| error)
            .unwrap();
        let report = node.agent.shutdown(patience());
        assert!(report.is_clean(), "{}: {report:?}", node.agent.name());
        assert_eq!(Arc::strong_count(&node.memory), 1, "{}", node.agent.name());
    }
    drop(proxy);
}

/// splitmix64
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}
