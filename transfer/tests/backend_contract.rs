//! The contract of the backends, one run per backend.

#![allow(clippy::unwrap_used)]

#[macro_use]
mod contract;

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::{AtomicU32, Ordering},
};

use contract::{Backend, event, patience};
use kvgate_transfer::{Address, Agent, AgentEvent, Memory, PeerId, TransferConfig};

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
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvgate-contract-{}-{number}", std::process::id());
        connect_to(self, a, b, &Address::Shm(name))
    }
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
contract!(shm, Shm);
