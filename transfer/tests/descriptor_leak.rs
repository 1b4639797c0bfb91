//! Connections leave nothing behind: no file descriptor, no thread, no name in the file system. The
//! only test of its process, because it counts what the process has.

#![allow(clippy::unwrap_used)]

use kvgate_transfer::{Address, Agent, AgentEvent, Deadline, Memory, PoolGeometry, sync::Arc};

fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

fn soon() -> Deadline {
    Deadline::after_ms(10_000)
}

fn agent(name: &str) -> (Agent, kvgate_transfer::MemoryRegion) {
    let agent = Agent::builder(name).build().unwrap();
    let pool = PoolGeometry {
        offset_bytes: 0,
        stride_bytes: 64,
        slot_bytes: 64,
        slot_count: 4,
    };
    let region = agent
        .register(Arc::new(Memory::shared("leak", 256).unwrap()), &[pool])
        .unwrap();
    (agent, region)
}

/// `rounds` connections to one agent, each closed by one of the two sides.
fn connect_and_close(address: &Address, rounds: usize) {
    let (listener, _region) = agent("listener");
    let bound = listener.listen(address).unwrap();
    for round in 0..rounds {
        let (other, region) = agent("connector");
        let peer = other.connect(&bound, soon()).unwrap();
        assert!(matches!(
            listener.next_event(soon()),
            Some(AgentEvent::PeerUp { .. })
        ));
        other.send(peer, b"hello").unwrap();
        assert!(matches!(
            listener.next_event(soon()),
            Some(AgentEvent::Message { .. })
        ));
        if round % 2 == 0 {
            assert!(other.shutdown(soon()).running_threads == 0);
        }
        drop((other, region));
        let down = listener.next_event(soon());
        assert!(
            matches!(
                down,
                Some(AgentEvent::PeerDown {
                    is_proven: true,
                    ..
                })
            ),
            "{down:?}"
        );
    }
    assert!(listener.shutdown(soon()).running_threads == 0);
}

#[test]
fn two_hundred_connections_of_each_kind_leave_nothing_behind() {
    let name = format!("kvgate-leak-{}", std::process::id());
    let addresses = [
        Address::Tcp("127.0.0.1:0".parse().unwrap()),
        Address::Shm(name.clone()),
        Address::Cma(name),
    ];
    for address in &addresses {
        connect_and_close(address, 3); // whatever the process opens once
        let (before, threads) = (count("/proc/self/fd"), count("/proc/self/task"));
        let shm = count("/dev/shm");
        connect_and_close(address, 200);
        assert_eq!(count("/proc/self/fd"), before, "{address}");
        assert!(count("/proc/self/task") <= threads, "{address}");
        assert!(count("/dev/shm") <= shm, "{address}");
    }
}
