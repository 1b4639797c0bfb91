//! What an agent says about itself: a transfer that is held, a peer that is stopped, and the socket.

#![cfg(all(feature = "fault-injection", feature = "status"))]
#![allow(clippy::unwrap_used)]

#[allow(dead_code, unused_macros)] // Only the nodes are used here.
mod contract;

use std::{
    io::{BufRead, BufReader, Read},
    os::unix::{
        fs::MetadataExt,
        net::{UnixListener, UnixStream},
    },
    path::Path,
    process::{Child, Command, Stdio},
};

use contract::{Backend, Node, SLOT_BYTES, arrival, done, event, expect, fence, patience};
use kvgate_transfer::{fault::HoldGate, sync::Arc, *};
use rustix::process::{Pid, Signal, kill_process};

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

/// Posts slot 0 to slot 0 of the peer; it stays in flight until the gate opens.
fn post_held(node: &Node, peer: PeerId, gate: &Arc<HoldGate>, arrival: Arrival) -> TransferHandle {
    let transfer = node.prepare(peer, &[0], &[0]).unwrap();
    let options = PostOptions {
        arrival: Some(arrival),
        hold: Some(gate.clone()),
        ..PostOptions::default()
    };
    let source = SourceReady::host_written();
    node.agent.post(&transfer, source, options).unwrap()
}

/// What a reader of the socket gets.
fn read_status(path: &Path) -> AgentStatus {
    let mut text = String::new();
    let mut stream = UnixStream::connect(path).unwrap();
    stream.read_to_string(&mut text).unwrap();
    assert_eq!(text.lines().count(), 1, "one line");
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_held_transfer_and_its_flight_are_listed_until_they_end() {
    let (mut a, b) = (Node::new(&Local, "a"), Node::new(&Local, "b"));
    let (to_b, from_a) = Local.connect(&a.agent, &b.agent);
    let (_barrier, flight) = expect(&b, from_a, 3, 2);
    let gate = HoldGate::new();
    let handle = post_held(&a, to_b, &gate, arrival(3, 0, 1));
    done(&Local, &a.send(to_b, 0, 1, arrival(3, 0, 0)));
    fence(&Local, &a, to_b, &b);
    assert!(matches!(
        handle.wait(Deadline::after_ms(20)),
        Status::InFlight
    ));

    let status = a.agent.status();
    let [transfer] = &status.transfers[..] else {
        panic!("{status:?}");
    };
    assert_eq!(transfer.id, handle.id().0);
    assert_eq!((transfer.peer, &*transfer.op), (to_b.0, "write"));
    assert_eq!((transfer.bytes, transfer.descriptor_count), (SLOT_BYTES, 1));
    assert_eq!(transfer.state, TransferState::Running);
    assert!(transfer.age_ms >= 20 && transfer.age_ms < 20_000);
    let [peer] = &status.peers[..] else {
        panic!("{status:?}");
    };
    assert_eq!((&*peer.name, &*peer.backend), ("b", "local"));
    let life = format!("{:032x}", b.agent.incarnation().0);
    assert_eq!((&peer.incarnation, &peer.down), (&life, &None));
    assert_eq!(peer.memories[0].kind, "host");

    // The registration that it touches cannot be closed.
    let region = a.region.take().unwrap();
    let (region, _) = region.close(Deadline::after_ms(1)).unwrap_err();
    let revoking = &a.agent.status().regions[0];
    assert!(
        revoking.is_revoking && revoking.hold_count == 1,
        "{revoking:?}"
    );
    assert_eq!(
        (&*revoking.kind, revoking.len_bytes),
        ("host", a.memory.len_bytes())
    );
    assert!(
        revoking
            .huge_bytes
            .is_some_and(|bytes| bytes <= revoking.len_bytes)
    );

    // The receiver waits for one more chunk, first open, then draining.
    let status = b.agent.status();
    assert_eq!((status.flights.len(), status.transfers.len()), (1, 0));
    let seen = &status.flights[0];
    assert_eq!((seen.epoch, seen.missing_chunk_count), (3, 1));
    assert_eq!(seen.state, FlightState::Open);
    let draining = flight.close().wait(Deadline::now()).unwrap_err();
    let status = b.agent.status();
    let seen = &status.flights[0];
    assert_eq!(seen.state, FlightState::Draining);
    let [writer] = &seen.unquiet_writers[..] else {
        panic!("{seen:?}");
    };
    assert_eq!((writer.rank, writer.peer), (0, from_a.0));
    assert!(!writer.is_quarantined && status.quarantined_writer_count == 0);
    let text = status.to_string();
    assert!(text.contains("3 draining"), "{text}");

    gate.open();
    done(&Local, &handle);
    assert!(draining.wait(patience()).is_ok());
    region.close(patience()).unwrap();
    let (sender, receiver) = (a.agent.status(), b.agent.status());
    assert!(
        sender.transfers.is_empty() && sender.regions.is_empty(),
        "{sender:?}"
    );
    assert!(receiver.flights.is_empty(), "{receiver:?}");
}

#[test]
fn the_socket_answers_each_reader_and_goes_with_the_agent() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("status.sock");
    let (a, b) = (Node::new(&Local, "a"), Node::new(&Local, "b"));
    let (to_b, _) = Local.connect(&a.agent, &b.agent);
    a.agent.serve_status(&path).unwrap();
    let file = std::fs::metadata(&path).unwrap();
    assert_eq!(file.mode() & 0o777, 0o600, "{:o}", file.mode());
    assert_eq!(file.uid(), rustix::process::getuid().as_raw());

    assert!(read_status(&path).transfers.is_empty());
    let gate = HoldGate::new();
    let handle = post_held(&a, to_b, &gate, arrival(1, 0, 0));
    let status = read_status(&path);
    assert_eq!(status.transfers[0].id, handle.id().0);
    assert_eq!(status.name, "a");
    // One that hangs up and one that never reads are nobody's trouble.
    drop(UnixStream::connect(&path).unwrap());
    let _mute = UnixStream::connect(&path).unwrap();
    assert_eq!(read_status(&path).transfers.len(), 1);
    gate.open();
    done(&Local, &handle);
    assert!(read_status(&path).transfers.is_empty());

    let in_use = b.agent.serve_status(&path).unwrap_err();
    assert!(
        matches!(in_use.kind(), ErrorKind::AddressInUse { .. }),
        "{in_use}"
    );
    let _ = a.agent.shutdown(patience());
    assert!(!path.exists());
    let closed = a.agent.serve_status(&path).unwrap_err();
    assert!(matches!(closed.kind(), ErrorKind::Closed), "{closed}");
}

#[test]
fn only_a_socket_that_nobody_serves_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let agent = Agent::builder("a").build().unwrap();
    let file = folder.path().join("notes");
    std::fs::write(&file, "keep me").unwrap();
    assert!(agent.serve_status(&file).is_err());
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "keep me");

    // As a killed process leaves it.
    let left_over = folder.path().join("left-over");
    drop(UnixListener::bind(&left_over).unwrap());
    agent.serve_status(&left_over).unwrap();
    assert_eq!(read_status(&left_over).name, "a");

    // The file of another one at the same place is not ours to remove.
    std::fs::remove_file(&left_over).unwrap();
    let _other = UnixListener::bind(&left_over).unwrap();
    let _ = agent.shutdown(patience());
    assert!(left_over.exists());

    let too_long = folder.path().join("x".repeat(200));
    let refused = Agent::builder("b").build().unwrap().serve_status(too_long);
    let kind = refused.unwrap_err().kind().clone();
    assert!(
        matches!(kind, ErrorKind::InvalidArgument { .. }),
        "{kind:?}"
    );
}

const ROLE: &str = "KVGATE_TEST_ROLE";

/// A process that is ended with its owner.
struct Other(Child);

impl Other {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The second process: listens, says where, and lives until its input ends.
#[test]
fn child() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let node = Node::new(&Local, "child");
    let address = Address::Tcp("127.0.0.1:0".parse().unwrap());
    let Address::Tcp(bound) = node.agent.listen(&address).unwrap() else {
        panic!("another kind of address");
    };
    println!("\nlistens at {bound}");
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn a_stopped_peer_grows_old_and_keeps_its_transfers() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(ROLE, "listener")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let other = Other(child);
    let said = |line: std::io::Result<String>| {
        line.unwrap().strip_prefix("listens at ").map(str::to_owned)
    };
    let address = lines.into_iter().find_map(said).unwrap();
    let here = Node::new(&Local, "here");
    let address = Address::Tcp(address.parse().unwrap());
    let peer = here.agent.connect(&address, patience()).unwrap();
    done(&Local, &here.send(peer, 0, 0, arrival(1, 0, 0)));

    other.signal(Signal::STOP);
    let handle = here.send(peer, 0, 0, arrival(1, 0, 0));
    assert!(matches!(
        handle.wait(Deadline::after_ms(100)),
        Status::InFlight
    ));
    let status = here.agent.status();
    let [transfer] = &status.transfers[..] else {
        panic!("{status:?}");
    };
    assert_eq!(
        transfer.state,
        TransferState::Running,
        "sent and not answered"
    );
    assert!(transfer.age_ms >= 100, "{transfer:?}");
    assert!(status.peers[0].last_progress_age_ms >= 100, "{status:?}");
    assert_eq!(status.peers[0].down, None, "a stopped peer is not dead");
    assert_eq!(status.peers[0].backend, "tcp");

    other.signal(Signal::CONT);
    done(&Local, &handle);
    let status = here.agent.status();
    assert!(status.transfers.is_empty(), "{status:?}");
    drop(other);
    event(&Local, &here.agent, |event| {
        matches!(event, AgentEvent::PeerDown { .. }).then_some(())
    });
    assert!(here.agent.status().peers[0].down.is_some());
}
