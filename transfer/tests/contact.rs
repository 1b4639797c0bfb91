//! Connecting by contact: the best way that works, the one that was asked for, and nobody else.
#![allow(clippy::unwrap_used)]

use kvgate_transfer::{sync::Arc, *};

fn soon() -> Deadline {
    Deadline::after_ms(10_000)
}

const POOL: PoolGeometry = PoolGeometry {
    offset_bytes: 0,
    stride_bytes: 4096,
    slot_bytes: 4096,
    slot_count: 2,
};

/// An agent with a pool, and the memory's region, which lives as long.
fn agent(name: &str, memory: Memory) -> (Agent, MemoryRegion) {
    let agent = Agent::builder(name).build().unwrap();
    let region = agent.register(Arc::new(memory), &[POOL]).unwrap();
    (agent, region)
}

fn shared(name: &str) -> (Agent, MemoryRegion) {
    agent(name, Memory::shared(name, 8192).unwrap())
}

fn names(name: &str) -> [Address; 3] {
    let unique = format!("kvgate-contact-{name}-{}", std::process::id());
    [
        Address::Tcp(([127, 0, 0, 1], 0).into()),
        Address::Cma(format!("{unique}-cma")),
        Address::Shm(unique),
    ]
}

/// The contact as another process reads it, which is not the process of the agent for the library.
fn told(agent: &Agent) -> Contact {
    agent.contact().to_string().parse().unwrap()
}

fn way(agent: &Agent, peer: PeerId) -> BackendKind {
    agent.peer(peer).unwrap().backend
}

#[test]
fn agents_of_one_process_need_no_address() {
    let ((a, _a), (b, _b)) = (shared("near-a"), shared("near-b"));
    let peer = a.connect_to(&told(&b), PathChoice::Auto, soon()).unwrap();
    assert_eq!(way(&a, peer), BackendKind::Local);
    let error = a
        .connect_to(&told(&a), PathChoice::Auto, soon())
        .unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::InvalidArgument { .. }),
        "{error}"
    );
    let gone = told(&b);
    drop(b);
    let error = a.connect_to(&gone, PathChoice::Auto, soon()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NoPath { .. }), "{error}");
}

#[test]
fn a_way_that_was_asked_for_is_the_only_one() {
    let ((a, _a), (b, _b)) = (shared("asked-a"), shared("asked-b"));
    let [tcp, cma, shm] = names("asked");
    b.listen(&tcp).unwrap();
    b.listen(&shm).unwrap();
    for backend in [BackendKind::Tcp, BackendKind::Shm, BackendKind::Local] {
        let peer = a
            .connect_to(&told(&b), PathChoice::Only(backend), soon())
            .unwrap();
        assert_eq!(way(&a, peer), backend);
    }
    let only_cma = PathChoice::Only(BackendKind::Cma);
    let error = a.connect_to(&told(&b), only_cma, soon()).unwrap_err();
    let ErrorKind::NoPath { name, tried } = error.kind() else {
        panic!("{error}")
    };
    assert_eq!((name.as_str(), tried.len()), ("asked-b", 2), "{error}");
    assert!(error.is_retryable(), "it may listen there later");
    b.listen(&cma).unwrap();
    let peer = a.connect_to(&told(&b), only_cma, soon()).unwrap();
    assert_eq!(way(&a, peer), BackendKind::Cma);
}

/// Memory that is in no memfd cannot be mapped by others: its agent is not to be reached that way.
#[test]
fn an_agent_with_private_memory_lists_no_mapping() {
    let (a, _a) = shared("private-a");
    let (b, _b) = agent("private-b", Memory::host(8192).unwrap());
    let [tcp, cma, shm] = names("private");
    let listed: Vec<Address> = [&tcp, &shm, &cma]
        .map(|address| b.listen(address).unwrap())
        .into();
    let contact = told(&b);
    assert_eq!(contact.addresses, [listed[0].clone(), listed[2].clone()]);
    let error = a.connect_to(&contact, PathChoice::Only(BackendKind::Shm), soon());
    let error = error.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NoPath { .. }), "{error}");
}

/// It was told where the memory of this side is, so it is a peer until it has let go.
#[test]
fn another_life_at_the_address_is_refused_and_its_end_is_proven() {
    for backend in [BackendKind::Tcp, BackendKind::Shm] {
        let ((a, region), (b, _b)) = (shared("life-a"), shared("life-b"));
        for address in names("life") {
            b.listen(&address).unwrap();
        }
        let contact = told(&b);
        let found = contact.incarnation;
        let expected = Incarnation(found.0 ^ 1);
        let former = Contact {
            incarnation: expected,
            ..contact.clone()
        };
        let only = PathChoice::Only(backend);
        let error = a.connect_to(&former, only, soon()).unwrap_err();
        assert_eq!(
            *error.kind(),
            ErrorKind::IncarnationMismatch { expected, found }
        );
        let Some(AgentEvent::PeerUp { peer }) = a.next_event(soon()) else {
            panic!("no beginning")
        };
        let end = AgentEvent::PeerDown {
            peer,
            cause: Cause::PeerRestarted,
            is_proven: true,
        };
        assert_eq!(a.next_event(soon()), Some(end), "{backend}");
        a.connect_to(&contact, only, soon()).unwrap();
        drop(b);
        region.close(soon()).map_err(|(_, error)| error).unwrap();
    }
}
