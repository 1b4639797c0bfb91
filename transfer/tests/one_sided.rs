//! Addresses of libraries: what is said when one is absent, or when two sides want different transports.

#![allow(clippy::unwrap_used)]

use kvgate_transfer::{
    Address, Agent, AgentEvent, BackendKind, Deadline, DescriptorList, ErrorKind, Memory,
    MemoryRegion, Op, PeerId, PoolGeometry, PostOptions, SourceReady, Status, sync::Arc,
};

const SLOT_BYTES: u64 = 4096;
const SLOT_COUNT: u32 = 64;

fn soon() -> Deadline {
    Deadline::after_ms(10_000)
}

fn agent(name: &str) -> Agent {
    Agent::builder(name).build().unwrap()
}

fn address(text: &str) -> Address {
    Address::resolve(text).unwrap().remove(0)
}

/// Whether this build and this machine have the backend; otherwise what is said must name it.
fn is_there(backend: BackendKind) -> bool {
    let wanted = address(&format!("{backend}:127.0.0.1:0"));
    let Err(error) = agent("probe").listen(&wanted) else {
        return true;
    };
    match error.kind() {
        ErrorKind::BackendUnavailable {
            backend: found,
            tried,
        } => {
            assert_eq!(*found, backend);
            assert!(!tried.is_empty() && tried.iter().all(|place| !place.is_empty()));
            assert!(error.to_string().contains(&tried[0]), "{error}");
            println!("SKIP: {error}");
        }
        other => panic!("{other:?}"),
    }
    let refused = agent("connector").connect(&wanted, soon()).unwrap_err();
    assert_eq!(
        refused.kind(),
        error.kind(),
        "asked before anybody connects"
    );
    false
}

#[test]
fn a_backend_that_is_not_there_says_what_was_tried() {
    let has = [cfg!(feature = "ucx"), cfg!(feature = "libfabric")];
    for (backend, has_feature) in [BackendKind::Ucx, BackendKind::Libfabric]
        .into_iter()
        .zip(has)
    {
        assert!(has_feature || !is_there(backend), "{backend}");
    }
}

/// A side that speaks only tcp, and one that wants a library, part at once and with a reason.
#[test]
fn two_sides_that_want_different_transports_part_with_a_reason() {
    let all = [BackendKind::Ucx, BackendKind::Libfabric];
    for backend in all.into_iter().filter(|backend| is_there(*backend)) {
        let listener = agent("listener");
        let bound = listener.listen(&address("tcp:127.0.0.1:0")).unwrap();
        let Address::Tcp(socket) = bound else {
            panic!("{bound}")
        };
        let wrong = address(&format!("{backend}:{socket}"));
        let refused = agent("connector").connect(&wrong, soon()).unwrap_err();
        assert!(
            matches!(refused.kind(), ErrorKind::HandshakeRefused { reason, .. } if !reason.is_empty()),
            "{refused}"
        );

        let listener = agent("listener");
        let bound = listener
            .listen(&address(&format!("{backend}:127.0.0.1:0")))
            .unwrap();
        let (Address::Ucx(socket) | Address::Libfabric(socket)) = bound else {
            panic!("{bound}")
        };
        // The tcp side finds no frame of its own, closes, and the listener names it.
        let connector = agent("connector");
        let _peer = connector.connect(&Address::Tcp(socket), soon()).unwrap();
        match listener.next_event(soon()).expect("an event in time") {
            AgentEvent::Refused { reason, .. } => {
                assert!(reason.contains(&backend.to_string()), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
}

fn register(agent: &Agent, value: u8) -> (MemoryRegion, Arc<Memory>) {
    let pool = PoolGeometry {
        offset_bytes: 0,
        stride_bytes: SLOT_BYTES,
        slot_bytes: SLOT_BYTES,
        slot_count: SLOT_COUNT,
    };
    let mut memory = Memory::host(SLOT_BYTES * u64::from(SLOT_COUNT)).unwrap();
    let bytes = vec![value; (SLOT_BYTES * u64::from(SLOT_COUNT)) as usize];
    memory.write_at(0, &bytes).unwrap();
    let memory = Arc::new(memory);
    (agent.register(memory.clone(), &[pool]).unwrap(), memory)
}

/// Every other slot of `region` to the same slot of the peer, which makes one request a slot.
fn send(agent: &Agent, region: &MemoryRegion, peer: PeerId) -> Status {
    let info = agent.peer(peer).unwrap();
    let slots: Vec<u32> = (0..SLOT_COUNT).step_by(2).collect();
    let (mut local, mut remote) = (
        DescriptorList::new(),
        DescriptorList::remote(info.incarnation),
    );
    local.push(region.pools()[0], &slots);
    remote.push(info.pools[0].pool, &slots);
    let transfer = agent.prepare(Op::Write, &local, &remote, peer).unwrap();
    let options = PostOptions::default();
    let posted = agent.post(&transfer, SourceReady::host_written(), options);
    posted.unwrap().wait(soon())
}

/// The library learns of a source that was registered after the connection was made, and forgets it before
/// its memory is given back.
#[test]
fn sources_may_be_registered_and_closed_while_a_connection_stands() {
    let all = [BackendKind::Ucx, BackendKind::Libfabric];
    for backend in all.into_iter().filter(|backend| is_there(*backend)) {
        let (a, b) = (agent("a"), agent("b"));
        let (target, target_memory) = register(&b, 0);
        let bound = b
            .listen(&address(&format!("{backend}:127.0.0.1:0")))
            .unwrap();
        let peer = a.connect(&bound, soon()).unwrap();
        for value in 1..=3u8 {
            let (source, memory) = register(&a, value);
            assert!(matches!(send(&a, &source, peer), Status::Done(_)));
            source.close(soon()).map_err(|(_, error)| error).unwrap();
            assert!(
                Arc::into_inner(memory).is_some(),
                "the engine has let go of it"
            );
        }
        target.close(soon()).map_err(|(_, error)| error).unwrap();
        let mut target_memory = Arc::into_inner(target_memory).expect("let go of");
        let mut bytes = vec![9; (SLOT_BYTES * u64::from(SLOT_COUNT)) as usize];
        target_memory.read_at(0, &mut bytes).unwrap();
        for (slot, bytes) in bytes.chunks(SLOT_BYTES as usize).enumerate() {
            let expected = if slot % 2 == 0 { 3 } else { 0 };
            assert!(bytes.iter().all(|byte| *byte == expected), "slot {slot}");
        }
    }
}
