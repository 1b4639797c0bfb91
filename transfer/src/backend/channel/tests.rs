use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::attend::Sleeper;
use crate::mem::ring::{self, Inbox};
use crate::mem::{Memory, PeerMapping};

/// A channel over a ring whose reader sleeps, and the socket of that reader.
fn beside_a_sleeper() -> (Channel, Inbox, Socket) {
    let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
    let (here, there) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
    let memory: Arc<Memory> = Arc::new(ring::memory().unwrap());
    let file = memory.file().unwrap().try_clone_to_owned().unwrap();
    let mapping = PeerMapping::map(&file, memory.len_bytes()).unwrap();
    let reader = ring::inbox(memory).unwrap();
    let socket = Socket::new(here).unwrap();
    let mut channel = Channel::new(socket, StopSignal::new().unwrap());
    channel.write_ring(ring::outbox(mapping).unwrap());
    assert!(reader.park(Sleeper::Owner));
    (channel, reader, Socket::new(there).unwrap())
}

/// I-6: the reader does not count as sleeping any more, so whoever sends next would not wake it.
#[test]
fn a_wake_that_fails_ends_the_connection() {
    let early: fn(&Channel) = Channel::rouse;
    let question: fn(&Channel) = |channel| assert_eq!(channel.heartbeat(), Some(Duration::ZERO));
    for wake in [early, question] {
        let (channel, _reader, there) = beside_a_sleeper();
        drop(there);
        wake(&channel);
        let sent = channel.send(|words| wire::append_message(words, b"behind it"));
        assert!(sent.is_err(), "nobody would hear it");
    }
}

/// A reader that waits on the socket, since the order goes on there, is asked there.
#[test]
fn a_question_reaches_a_reader_that_waits_on_the_socket() {
    let (channel, reader, there) = beside_a_sleeper();
    reader.unpark();
    channel.out.lock().outlet.as_mut().unwrap().go_on_socket();
    assert_eq!(channel.heartbeat(), Some(Duration::ZERO));
    let mut heard = [0; 8];
    assert_eq!(there.receive_some(&mut heard, None), Ok(1));
}
