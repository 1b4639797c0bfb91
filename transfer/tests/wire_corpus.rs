//! Hostile bytes against a listening agent. Each file of `tests/corpus` is what one connection says:
//! `refused_*` must never become a peer and is counted with a reason; `peer_*` finishes the handshake and
//! then misbehaves. After each of them the agent still listens, and nothing has panicked or landed.

#![allow(clippy::unwrap_used)]

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    path::PathBuf,
    time::Duration,
};

use kvgate_transfer::{
    Address, Agent, AgentEvent, Deadline, Memory, MemoryRegion, PoolGeometry, sync::Arc,
};

const SLOT_BYTES: u64 = 4096;

fn agent(name: &str) -> (Agent, MemoryRegion) {
    let agent = Agent::builder(name).build().unwrap();
    let memory = Arc::new(Memory::host(4 * SLOT_BYTES).unwrap());
    let pool = PoolGeometry {
        offset_bytes: 0,
        stride_bytes: SLOT_BYTES,
        slot_bytes: SLOT_BYTES,
        slot_count: 4,
    };
    let region = agent.register(memory, &[pool]).unwrap();
    (agent, region)
}

fn corpus(prefix: &str) -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| {
            (
                path.file_stem().unwrap().to_str().unwrap().to_owned(),
                std::fs::read(&path).unwrap(),
            )
        })
        .filter(|(name, _)| name.starts_with(prefix))
        .collect();
    files.sort();
    assert!(files.len() >= 20, "{} files of {prefix}", files.len());
    files
}

/// Says `words`, then listens until the agent closes.
fn say(address: &Address, words: &[u8]) {
    let Address::Tcp(socket) = address else {
        panic!("{address}")
    };
    let mut stream = TcpStream::connect(socket).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    // The agent may close before it has read everything.
    let _ = stream.write_all(words);
    let _ = stream.shutdown(Shutdown::Write);
    match stream.read_to_end(&mut Vec::new()) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
            panic!("left open: {error}")
        }
        _ => {}
    }
}

fn next(agent: &Agent, name: &str) -> AgentEvent {
    agent
        .next_event(Deadline::after_ms(10_000))
        .unwrap_or_else(|| panic!("nothing was told of {name}"))
}

fn an_honest_peer_is_welcome(agent: &Agent, address: &Address) {
    let (honest, _region) = self::agent("honest");
    honest.connect(address, Deadline::after_ms(10_000)).unwrap();
    assert!(matches!(next(agent, "honest"), AgentEvent::PeerUp { .. }));
    drop((honest, _region));
    assert!(matches!(
        next(agent, "honest"),
        AgentEvent::PeerDown {
            is_proven: true,
            ..
        }
    ));
}

#[test]
fn strangers_are_refused_counted_and_named() {
    let (agent, _region) = agent("listener");
    let address = agent
        .listen(&Address::Tcp("127.0.0.1:0".parse().unwrap()))
        .unwrap();
    let files = corpus("refused_");
    for (index, (name, words)) in files.iter().enumerate() {
        say(&address, words);
        match next(&agent, name) {
            AgentEvent::Refused { reason, .. } => assert!(!reason.is_empty(), "{name}"),
            other => panic!("{name}: {other:?}"),
        }
        assert_eq!(
            agent.counters().refused_connections,
            index as u64 + 1,
            "{name}"
        );
    }
    an_honest_peer_is_welcome(&agent, &address);
    assert!(agent.shutdown(Deadline::after_ms(10_000)).running_threads == 0);
}

#[test]
fn peers_that_misbehave_lose_their_connection_and_nothing_else() {
    let (agent, _region) = agent("listener");
    let address = agent
        .listen(&Address::Tcp("127.0.0.1:0".parse().unwrap()))
        .unwrap();
    for (name, words) in corpus("peer_") {
        say(&address, &words);
        let AgentEvent::PeerUp { peer } = next(&agent, &name) else {
            panic!("{name} is no peer")
        };
        match next(&agent, &name) {
            AgentEvent::PeerDown {
                peer: down,
                is_proven,
                ..
            } => assert!(down == peer && is_proven, "{name}"),
            other => panic!("{name}: {other:?}"),
        }
    }
    assert_eq!(agent.counters().landed, 0);
    an_honest_peer_is_welcome(&agent, &address);
}
