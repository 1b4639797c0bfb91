use std::io::Read;
use std::os::unix::net::UnixStream;

use super::*;
use crate::backend::socket::Socket;
use crate::backend::tcp::{Item, TcpLink};
use crate::sync::thread;

/// The listening side of a session, the stream of its peer, what that says of itself, and the words of both.
fn waiting() -> (TcpLink, UnixStream, AgentMetadata, SessionWords) {
    let (here, there) = UnixStream::pair().unwrap();
    let channel = channel_of(here);
    let desk = Desk::new(&TransferConfig::default()).unwrap();
    let peer = AgentMetadata {
        incarnation: Incarnation(7),
        name: "peer".into(),
        regions: Vec::new(),
        pools: Vec::new(),
        app: bytes::Bytes::new(),
    };
    let words = SessionWords {
        session: 7,
        ..desk.words()
    };
    let terms = Terms::new(&peer, (words, words), None, desk);
    let reader = FrameReader::new(false);
    let link = TcpLink::new(channel, StopSignal::new().unwrap(), reader, Some(terms));
    (link, there, peer, words)
}

fn channel_of(stream: UnixStream) -> Channel {
    let socket = Socket::new(stream.into()).unwrap();
    Channel::new(socket, StopSignal::new().unwrap())
}

fn soon() -> Deadline {
    Deadline::after_ms(20_000)
}

/// The peer has begun another connection, and then the old one has brought an answer that it had not counted.
#[test]
fn an_attempt_that_was_overtaken_does_not_end_the_session() {
    let (link, _there, peer, words) = waiting();
    let shared = &link.shared;
    shared.push(Item::Message(b"one"[..].into())).unwrap();
    let wish = |received| SessionWords {
        is_resumed: true,
        received,
        ..words
    };
    let claim = |wish: SessionWords| {
        let (shared, peer) = (shared.clone(), peer.clone());
        thread::spawn(move || {
            let claimed = shared.claim(&peer, &wish, soon());
            claimed.map(|(_, handled)| handled)
        })
    };
    let (_, old) = shared.session.connection().unwrap();
    let overtaken = claim(wish(0));
    let deadline = soon();
    while !StopSignal::is_raised(&old.stop) {
        assert!(!deadline.has_passed(), "the old connection stands");
        thread::yield_now();
    }
    shared.session.answered(1, 1, None, |_, _| {}).unwrap();
    shared.session.suspend();
    let parked = {
        let shared = shared.clone();
        thread::spawn(move || matches!(shared.handover.park(5, soon()), Parked::Closed))
    };
    let refused = overtaken.join().unwrap().unwrap_err();
    assert_eq!(refused.code, SESSION_BUSY, "{}", refused.reason);
    assert_eq!(claim(wish(1)).join().unwrap().unwrap(), 5);
    shared.handover.close();
    assert!(parked.join().unwrap());
}

/// The session ends between the claim and the connection.
#[test]
fn a_connection_that_comes_too_late_is_ended_with_a_goodbye() {
    let (link, _there, peer, _) = waiting();
    let claim = Claim {
        shared: link.shared.clone(),
        is_given: false,
    };
    let (here, mut there) = UnixStream::pair().unwrap();
    link.shared.handover.close();
    claim.give(Next {
        metadata: peer,
        channel: Arc::new(channel_of(here)),
        reader: FrameReader::new(false),
        received: 0,
    });
    let mut words = Vec::new();
    wire::append_bye(&mut words);
    let mut told = Vec::new();
    there
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    there.read_to_end(&mut told).unwrap();
    assert_eq!(told, words);
}
