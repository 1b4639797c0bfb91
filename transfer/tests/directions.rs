//! What a first transfer costs, and that both directions of a path are alike. Times are compared with times of the
//! same run, in pairs one after the other, and the middle pair counts: a busy host slows both sides of a pair.

#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use kvgate_transfer::sync::Arc;
use kvgate_transfer::{
    Address, Agent, AgentEvent, Deadline, DescriptorList, Memory, MemoryRegion, Op, PeerId,
    PoolGeometry, PostOptions, SourceReady, Status,
};

fn soon() -> Deadline {
    Deadline::after_ms(60_000)
}

struct Pair {
    here: Agent,
    there: PeerId,
    local: MemoryRegion,
    /// The word of the peer that its slots may be read.
    told: AgentEvent,
    slot_count: u32,
    _peer: (Agent, MemoryRegion),
}

impl Pair {
    fn new(address: &Address, slot_bytes: u64, slot_count: u32) -> Self {
        let agent = |name: &str| {
            let pool = PoolGeometry {
                offset_bytes: 0,
                stride_bytes: slot_bytes,
                slot_bytes,
                slot_count,
            };
            let agent = Agent::builder(name).build().unwrap();
            let memory = Memory::shared(name, slot_bytes * u64::from(slot_count)).unwrap();
            let region = agent.register(Arc::new(memory), &[pool]).unwrap();
            (agent, region)
        };
        let ((here, local), peer) = (agent("here"), agent("there"));
        let bound = peer.0.listen(address).unwrap();
        let there = here.connect(&bound, soon()).unwrap();
        let Some(AgentEvent::PeerUp { peer: back }) = peer.0.next_event(soon()) else {
            panic!("the connection is the first event");
        };
        peer.0.send(back, "the slots may be read").unwrap();
        let told = loop {
            match here.next_event(soon()).unwrap() {
                event @ AgentEvent::Message { .. } => break event,
                _ => continue,
            }
        };
        Self {
            here,
            there,
            local,
            told,
            slot_count,
            _peer: peer,
        }
    }

    /// Every slot, from the lists to the end.
    fn transfer(&self, op: Op) -> Duration {
        let began = Instant::now();
        let info = self.here.peer(self.there).unwrap();
        // Not in a row on the other side, so that nothing joins.
        let slots: Vec<u32> = (0..self.slot_count).collect();
        let turned: Vec<u32> = slots.iter().rev().copied().collect();
        let mut local = DescriptorList::new();
        let mut remote = DescriptorList::remote(info.incarnation);
        local.push(self.local.pools()[0], &slots);
        remote.push(info.pools[0].pool, &turned);
        let transfer = self.here.prepare(op, &local, &remote, self.there).unwrap();
        let source = match op {
            Op::Read => SourceReady::announced(&self.told).unwrap(),
            _ => SourceReady::host_written(),
        };
        let posted = self.here.post(&transfer, source, PostOptions::default());
        let status = posted.unwrap().wait(soon());
        assert!(matches!(status, Status::Done(_)), "{status:?}");
        began.elapsed()
    }
}

fn addresses(name: &str) -> [Address; 2] {
    let name = format!("kvgate-{name}-{}", std::process::id());
    let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    [Address::Shm(name), Address::Tcp(any_port)]
}

fn middle<T: PartialOrd + Copy>(mut of: Vec<T>) -> T {
    of.sort_by(|a, b| a.partial_cmp(b).unwrap());
    of[of.len() / 2]
}

/// FR-19: nothing is built, exchanged or looked up for each descriptor when a peer is met for the first time.
#[test]
fn a_first_transfer_costs_what_a_later_one_costs() {
    for address in addresses("first") {
        let ratios = (0..5).map(|_| {
            let pair = Pair::new(&address, 64, 200_000);
            let first = pair.transfer(Op::Write);
            let later = pair.transfer(Op::Write);
            first.as_secs_f64() / later.as_secs_f64()
        });
        let ratio = middle(ratios.collect());
        assert!(
            ratio < 4.0,
            "{address}: the first takes {ratio:.1} times as long"
        );
    }
}

/// FR-38: a read takes the path that a write takes.
#[test]
fn a_read_is_as_fast_as_a_write() {
    for address in addresses("direction") {
        let pair = Pair::new(&address, 64 * 1024, 256);
        pair.transfer(Op::Write);
        pair.transfer(Op::Read);
        let ratios = (0..9).map(|_| {
            let write = pair.transfer(Op::Write);
            let read = pair.transfer(Op::Read);
            read.as_secs_f64() / write.as_secs_f64()
        });
        let ratio = middle(ratios.collect());
        let alike = 0.25..4.0;
        assert!(
            alike.contains(&ratio),
            "{address}: a read takes {ratio:.2} of a write"
        );
    }
}
