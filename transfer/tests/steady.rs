//! Transfers leave nothing behind: no memory, no file descriptor, no thread. The only test of its process,
//! because it counts what the process has.

#![allow(clippy::unwrap_used)]

use kvgate_transfer::{
    Address, Agent, AgentEvent, Deadline, DescriptorList, Memory, MemoryRegion, Op, PeerId,
    PoolGeometry, PostOptions, SourceReady, Status, sync::Arc,
};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Fewer than there are transfers: if each left a byte, it would show.
const SLACK_BYTES: usize = 2_000;
const TRANSFERS: usize = 4_000;

fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

fn soon() -> Deadline {
    Deadline::after_ms(20_000)
}

fn agent(name: &str) -> (Agent, MemoryRegion) {
    let agent = Agent::builder(name).build().unwrap();
    let pool = PoolGeometry {
        offset_bytes: 0,
        stride_bytes: 64,
        slot_bytes: 64,
        slot_count: 8,
    };
    let memory = Arc::new(Memory::shared("steady", 512).unwrap());
    let region = agent.register(memory, &[pool]).unwrap();
    (agent, region)
}

/// Writes of other slots each time, prepared anew, one after the other.
fn write(sender: &(Agent, MemoryRegion), peer: PeerId, transfers: usize) {
    for number in 0..transfers {
        let info = sender.0.peer(peer).unwrap();
        let slots = [0, 2, 4, 6].map(|slot| slot + number as u32 % 2);
        let (mut local, mut remote) = (
            DescriptorList::new(),
            DescriptorList::remote(info.incarnation),
        );
        local.push(sender.1.pools()[0], &slots);
        remote.push(info.pools[0].pool, &slots);
        let transfer = sender.0.prepare(Op::Write, &local, &remote, peer).unwrap();
        let options = PostOptions::default();
        let posted = sender
            .0
            .post_within(&transfer, SourceReady::host_written(), options, soon());
        let status = posted.unwrap().wait(soon());
        assert!(matches!(status, Status::Done(_)), "{status:?}");
    }
}

#[test]
fn four_thousand_transfers_leave_nothing_behind() {
    let name = format!("kvgate-steady-{}", std::process::id());
    let tcp = Address::Tcp("127.0.0.1:0".parse().unwrap());
    for address in [tcp, Address::Shm(name)] {
        let (sender, receiver) = (agent("sender"), agent("receiver"));
        let bound = receiver.0.listen(&address).unwrap();
        let peer = sender.0.connect(&bound, soon()).unwrap();
        let up = receiver.0.next_event(soon());
        assert!(matches!(up, Some(AgentEvent::PeerUp { .. })), "{up:?}");
        write(&sender, peer, 500); // what grows to its size once
        let sockets = count("/proc/self/fd");
        let threads = count("/proc/self/task");
        let heap_bytes = HEAP.current_usage();
        write(&sender, peer, TRANSFERS);
        let grown_bytes = HEAP.current_usage().saturating_sub(heap_bytes);
        assert!(
            grown_bytes < SLACK_BYTES,
            "{address}: {grown_bytes} bytes more"
        );
        assert_eq!(count("/proc/self/fd"), sockets, "{address}");
        assert_eq!(count("/proc/self/task"), threads, "{address}");
    }
}
