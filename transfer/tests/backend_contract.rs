//! The contract of the backends, one run per backend.

#![allow(clippy::unwrap_used)]

#[macro_use]
mod contract;

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::{AtomicU32, Ordering},
};

use contract::{Backend, event, patience};
#[cfg(any(feature = "ucx", feature = "libfabric"))]
use kvgate_transfer::ErrorKind;
use kvgate_transfer::{Address, Agent, AgentEvent, Memory, PeerId, Status, TransferConfig};

/// Two agents of one process.
struct Local;

impl Backend for Local {
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
        Agent::connect_local(a, b).unwrap()
    }
}

/// Sockets of this host.
struct Tcp;

impl Backend for Tcp {
    fn new() -> Self {
        Self
    }

    fn agent(&self, name: &str, config: TransferConfig) -> Agent {
        Local.agent(name, config)
    }

    fn memory(&self, len_bytes: u64) -> Memory {
        Memory::host(len_bytes).unwrap()
    }

    fn connect(&self, a: &Agent, b: &Agent) -> (PeerId, PeerId) {
        let any_port = Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        connect_to(self, a, b, &any_port)
    }
}

/// Mapped memory of this host.
struct Shm;

impl Backend for Shm {
    fn new() -> Self {
        Self
    }

    fn agent(&self, name: &str, config: TransferConfig) -> Agent {
        Local.agent(name, config)
    }

    fn memory(&self, len_bytes: u64) -> Memory {
        Memory::shared("contract", len_bytes).unwrap()
    }

    fn connect(&self, a: &Agent, b: &Agent) -> (PeerId, PeerId) {
        connect_to(self, a, b, &Address::Shm(unused_name()))
    }
}

/// A library that moves the bytes, over sockets of this host. Absent, the tests say so and pass.
#[cfg(any(feature = "ucx", feature = "libfabric"))]
macro_rules! library {
    ($name:ident, $kind:ident) => {
        struct $name;

        impl Backend for $name {
            fn new() -> Self {
                Self
            }

            fn is_there() -> bool {
                match Self
                    .agent("probe", TransferConfig::default())
                    .listen(&Self::address())
                {
                    Ok(_) => true,
                    Err(error) if matches!(error.kind(), ErrorKind::BackendUnavailable { .. }) => {
                        println!("SKIP: {error}");
                        false
                    }
                    Err(error) => panic!("{error}"),
                }
            }

            fn agent(&self, name: &str, config: TransferConfig) -> Agent {
                given::$kind(Agent::builder(name).config(config))
                    .build()
                    .unwrap()
            }

            fn memory(&self, len_bytes: u64) -> Memory {
                Memory::host(len_bytes).unwrap()
            }

            fn connect(&self, a: &Agent, b: &Agent) -> (PeerId, PeerId) {
                connect_to(self, a, b, &Self::address())
            }
        }

        impl $name {
            fn address() -> Address {
                Address::$name(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
            }
        }
    };
}

/// Libraries that the environment names; this crate itself reads none.
#[cfg(any(feature = "ucx", feature = "libfabric"))]
mod given {
    use kvgate_transfer::*;

    fn named(variable: &str) -> Vec<std::path::PathBuf> {
        let named = std::env::var_os(variable);
        named.map(Into::into).into_iter().collect()
    }

    #[cfg(feature = "ucx")]
    pub(crate) fn ucx(builder: AgentBuilder) -> AgentBuilder {
        builder.ucx(UcxConfig {
            libraries: named("KVGATE_UCX_LIBRARY"),
            ..UcxConfig::default()
        })
    }

    #[cfg(feature = "libfabric")]
    pub(crate) fn libfabric(builder: AgentBuilder) -> AgentBuilder {
        builder.libfabric(LibfabricConfig {
            libraries: named("KVGATE_LIBFABRIC_LIBRARY"),
            ..LibfabricConfig::default()
        })
    }
}

#[cfg(feature = "ucx")]
library!(Ucx, ucx);
#[cfg(feature = "libfabric")]
library!(Libfabric, libfabric);

/// Copies by the kernel, of memory that nobody else maps.
struct Cma;

impl Backend for Cma {
    fn new() -> Self {
        Self
    }

    fn agent(&self, name: &str, config: TransferConfig) -> Agent {
        Local.agent(name, config)
    }

    fn memory(&self, len_bytes: u64) -> Memory {
        Memory::host(len_bytes).unwrap()
    }

    fn connect(&self, a: &Agent, b: &Agent) -> (PeerId, PeerId) {
        connect_to(self, a, b, &Address::Cma(unused_name()))
    }
}

fn unused_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("kvgate-contract-{}-{number}", std::process::id())
}

fn connect_to(backend: &impl Backend, a: &Agent, b: &Agent, address: &Address) -> (PeerId, PeerId) {
    let bound = b.listen(address).unwrap();
    let b_at_a = a.connect(&bound, patience()).unwrap();
    let a_at_b = event(backend, b, |event| match event {
        AgentEvent::PeerUp { peer } => Some(peer),
        _ => None,
    });
    assert_eq!(b.peer(a_at_b).unwrap().name, a.name());
    (b_at_a, a_at_b)
}

/// The simulation without faults: its own tests have them.
#[cfg(feature = "sim")]
struct Sim(kvgate_transfer::sim::SimNet);

#[cfg(feature = "sim")]
impl Backend for Sim {
    fn new() -> Self {
        Self(kvgate_transfer::sim::SimNet::new(
            1,
            kvgate_transfer::sim::SimFaults::none(),
        ))
    }

    fn agent(&self, name: &str, config: TransferConfig) -> Agent {
        self.0.agent(name).config(config).build().unwrap()
    }

    fn memory(&self, len_bytes: u64) -> Memory {
        Memory::host(len_bytes).unwrap()
    }

    fn connect(&self, a: &Agent, b: &Agent) -> (PeerId, PeerId) {
        self.0.connect(a, b).unwrap()
    }

    fn run(&self) {
        self.0.run_until_idle();
    }
}

contract!(local, Local);
#[cfg(feature = "sim")]
contract!(sim, Sim);
contract!(tcp, Tcp);
#[cfg(feature = "ucx")]
contract!(ucx, Ucx);
#[cfg(feature = "libfabric")]
contract!(libfabric, Libfabric);
contract!(shm, Shm);
contract!(cma, Cma);

/// Where whoever posts reaches the memory of the peer, a short operation is over when its post returns.
fn a_short_operation_is_over_when_its_post_returns(backend: impl Backend) {
    let (a, b) = (
        contract::Node::new(&backend, "a"),
        contract::Node::new(&backend, "b"),
    );
    let (to_b, to_a) = backend.connect(&a.agent, &b.agent);
    let mut over_count = 0;
    for round in 0..100 {
        a.fill(1, round);
        let handle = a.send(to_b, 1, 2, contract::arrival(1, 0, 0));
        over_count += u32::from(matches!(handle.status(), Status::Done(_)));
        assert!(matches!(handle.wait(patience()), Status::Done(_)));
    }
    // The thread of the connection has the turn when it tells of progress, seldom.
    assert!(over_count > 50, "{over_count}");
    // Nothing is left lying behind those that were not queued.
    b.agent.send(to_a, b"message").unwrap();
    event(&backend, &a.agent, |event| match event {
        AgentEvent::Message { bytes, .. } => Some(bytes),
        _ => None,
    });
}

#[test]
fn shm_copies_short_operations_in_the_thread_that_posts() {
    a_short_operation_is_over_when_its_post_returns(Shm);
}

#[test]
fn cma_copies_short_operations_in_the_thread_that_posts() {
    a_short_operation_is_over_when_its_post_returns(Cma);
}
