//! Memory is made whatever the process may lock; the only test of its process, whose limit it changes.

#![allow(clippy::unwrap_used)]

use kvgate_transfer::sync::Arc;
use kvgate_transfer::{
    Address, Agent, AgentEvent, Deadline, Huge, Memory, MemoryOptions, PoolGeometry,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const LEN_BYTES: u64 = 2 << 20;

#[test]
fn nothing_is_locked_and_the_status_says_how_memory_lies() {
    let lowered = Rlimit {
        current: Some(0),
        ..getrlimit(Resource::Memlock)
    };
    setrlimit(Resource::Memlock, lowered).unwrap();
    let options = MemoryOptions {
        huge: Huge::IfPossible,
        numa_node: None,
    };
    let pool = PoolGeometry {
        offset_bytes: 0,
        stride_bytes: 4096,
        slot_bytes: 4096,
        slot_count: 512,
    };
    let agent = |name: &str| {
        let agent = Agent::builder(name).build().unwrap();
        let memory = Memory::shared_with(name, LEN_BYTES, options).unwrap();
        let region = agent.register(Arc::new(memory), &[pool]).unwrap();
        (agent, region)
    };
    let (a, b) = (agent("a"), agent("b"));
    let soon = || Deadline::after_ms(20_000);
    let name = format!("kvgate-limits-{}", std::process::id());
    let bound = b.0.listen(&Address::Shm(name)).unwrap();
    a.0.connect(&bound, soon()).unwrap();
    assert!(matches!(
        b.0.next_event(soon()),
        Some(AgentEvent::PeerUp { .. })
    ));

    let own = &a.0.status().regions[0];
    match &own.not_huge {
        None => assert_eq!(own.granule_bytes, 2 << 20),
        Some(reason) => assert!(
            own.granule_bytes < 2 << 20 && reason.contains("huge pages"),
            "{reason}"
        ),
    }
    let status = b.0.status();
    let theirs = status.peers[0].memories[0].granule_bytes;
    assert_eq!(theirs, Some(own.granule_bytes), "both see the same pages");
    let text = status.to_string();
    assert!(
        text.contains(&format!("pages of {} B", own.granule_bytes)),
        "{text}"
    );
}
