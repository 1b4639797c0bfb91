//! Who may go on with a session, and who may not. The peer here is made of frames.

use std::io::Write;
use std::net::TcpStream;

use super::*;
use crate::agent::wire::{self, Frame, SessionWords};
use crate::backend::handshake::SESSION_OVER;
use crate::backend::reader::FrameReader;
use crate::backend::socket::{Bounds, Socket, StreamEnd};
use crate::backend::tcp::session::Desk;
use crate::config::TransferConfig;

/// A host that keeps sessions.
struct Keeper(Arc<Host>, Arc<Desk>);

impl LinkHost for Keeper {
    fn introduction(&self) -> Introduction {
        self.0.introduction()
    }
    fn secret(&self) -> Option<Vec<u8>> {
        self.0.secret()
    }
    fn desk(&self) -> Option<Arc<Desk>> {
        Some(self.1.clone())
    }
    fn established(&self, established: Established) {
        self.0.established(established);
    }
    fn refused(&self, address: String, field: crate::obs::RefusedField, reason: String) {
        self.0.refused(address, field, reason);
    }
}

fn keeper(secret: Option<&str>) -> (Arc<Host>, Listener) {
    let host = Host::with("keeper", secret, false);
    let desk = Desk::new(&TransferConfig::default()).unwrap();
    let keeper = Arc::new(Keeper(host.clone(), desk));
    let listener = listen(&addresses("keeper")[1], keeper).unwrap();
    (host, listener)
}

/// A connection whose words are written by hand.
struct Raw {
    stream: TcpStream,
    socket: Socket,
    reader: FrameReader,
}

impl Raw {
    fn next(&mut self) -> Result<Frame, StreamEnd> {
        let bounds = Bounds {
            stop: None,
            deadline: Some(soon()),
            process: None,
            writable: None,
        };
        self.reader.next(&self.socket, bounds)
    }

    /// Says hello and wishes for a session; gives back the answer.
    fn wish(
        listener: &Listener,
        change: impl FnOnce(&mut AgentMetadata),
        wish: Option<SessionWords>,
    ) -> (Self, Frame) {
        let Address::Tcp(address) = listener.address() else {
            panic!("not a TCP address")
        };
        let stream = TcpStream::connect(address).unwrap();
        let socket = Socket::new(stream.try_clone().unwrap().into()).unwrap();
        let mut raw = Self {
            stream,
            socket,
            reader: FrameReader::new(false),
        };
        raw.reader.trust(usize::MAX);
        let mut metadata = Host::new("raw").introduction().metadata;
        change(&mut metadata);
        let mut words = Vec::new();
        wire::append_hello(&mut words, &[1; 32], false);
        wire::append_metadata(&mut words, &metadata.encode());
        wire::append_ready(&mut words, wish.as_ref());
        raw.say(&words);
        let answer = loop {
            match raw.next().unwrap() {
                Frame::Hello { .. } | Frame::Metadata(_) => {}
                answer => break answer,
            }
        };
        (raw, answer)
    }

    fn say(&mut self, words: &[u8]) {
        self.stream.write_all(words).unwrap();
    }

    fn message(&mut self, number: u64, text: &[u8]) {
        let mut words = Vec::new();
        wire::append_numbered(&mut words, number, text);
        self.say(&words);
    }
}

/// A session with `host`, over its first connection, which has brought message 1.
fn session(host: &Arc<Host>, listener: &Listener) -> (Raw, SessionWords, Arc<dyn Link>) {
    let wish = SessionWords {
        window_ms: 60_000,
        every_items: 1,
        most_items: 10,
        ..SessionWords::default()
    };
    let (mut raw, answer) = Raw::wish(listener, |_| {}, Some(wish));
    let Frame::Ready(Some(words)) = answer else {
        panic!("{answer:?}")
    };
    assert!(!words.is_resumed && words.session != 0 && words.received == 0);
    let link = host.await_established().link;
    link.start(PEER, host.clone()).unwrap();
    raw.message(1, b"one");
    await_message(host, b"one");
    let again = SessionWords {
        is_resumed: true,
        session: words.session,
        ..wish
    };
    (raw, again, link)
}

fn await_message(host: &Host, text: &'static [u8]) {
    let expected = Seen::Message(Bytes::from_static(text));
    host.await_seen(|seen| (*seen == expected).then_some(()));
}

fn messages(host: &Host) -> usize {
    let seen = host.seen.lock();
    seen.iter()
        .filter(|seen| matches!(seen, Seen::Message(_)))
        .count()
}

#[test]
fn nobody_goes_on_with_the_session_of_another() {
    let (host, listener) = keeper(None);
    let (mut raw, again, _link) = session(&host, &listener);
    let unknown = SessionWords {
        session: again.session ^ 1,
        ..again
    };
    let beyond = SessionWords {
        received: 1,
        ..again
    };
    let same = |_: &mut AgentMetadata| {};
    let other_life = |metadata: &mut AgentMetadata| metadata.incarnation = Incarnation(8);
    let other_schema = |metadata: &mut AgentMetadata| metadata.app = Bytes::from_static(b"other");
    type Change = fn(&mut AgentMetadata);
    let wrong: [(Change, SessionWords, &str); 4] = [
        (same, unknown, "no such session"),
        (same, beyond, "never sent"),
        (other_life, again, "another life"),
        (other_schema, again, "another life"),
    ];
    for (change, wish, reason) in wrong {
        let (_, answer) = Raw::wish(&listener, change, Some(wish));
        let Frame::Refuse(refusal) = answer else {
            panic!("{reason}: {answer:?}")
        };
        assert_eq!(refusal.code, SESSION_OVER, "{reason}");
        assert!(refusal.reason.contains(reason), "{}", refusal.reason);
        assert!(host.await_refusal().contains(reason));
    }
    // The connection that stands has noticed nothing.
    raw.message(2, b"two");
    await_message(&host, b"two");
    assert_eq!(messages(&host), 2);
}

#[test]
fn a_session_is_claimed_only_with_the_secret() {
    let (host, listener) = keeper(Some("secret"));
    let wish = SessionWords {
        is_resumed: true,
        session: 1,
        ..SessionWords::default()
    };
    let (_, answer) = Raw::wish(&listener, |_| {}, Some(wish));
    let Frame::Refuse(refusal) = answer else {
        panic!("{answer:?}")
    };
    assert_ne!(refusal.code, SESSION_OVER, "not even whether there is one");
    assert!(host.await_refusal().contains("secret"));
}

#[test]
fn the_newer_connection_goes_on_past_the_older_one() {
    let (host, listener) = keeper(None);
    let (mut older, again, _link) = session(&host, &listener);
    let (mut newer, answer) = Raw::wish(&listener, |_| {}, Some(again));
    let Frame::Ready(Some(words)) = answer else {
        panic!("{answer:?}")
    };
    assert!(words.is_resumed && words.session == again.session);
    assert_eq!(words.received, 1, "what came over the older one");
    // The older one has ended, and nothing that comes over it is heard.
    while older.next().is_ok() {}
    let _ = older.stream.write_all(b"KVGL");
    newer.message(1, b"one more time");
    newer.message(2, b"two");
    await_message(&host, b"two");
    assert_eq!(messages(&host), 2, "number 1 was handled");
    let through = loop {
        match newer.next().unwrap() {
            Frame::Ack { through: 2, .. } => break 2,
            Frame::Ack { through: 1, .. } => {}
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(through, 2);
    // One that is missing cannot come any more: the end, for good.
    newer.message(4, b"four");
    host.await_seen(|seen| matches!(seen, Seen::Down(Quiesce::Proven)).then_some(()));
    assert_eq!(messages(&host), 2);
    let (_, answer) = Raw::wish(&listener, |_| {}, Some(again));
    assert!(matches!(answer, Frame::Refuse(refusal) if refusal.code == SESSION_OVER));
}

#[test]
fn what_was_never_sent_cannot_be_acknowledged() {
    let (host, listener) = keeper(None);
    let (mut raw, _, link) = session(&host, &listener);
    link.send(b"only one").unwrap();
    let mut words = Vec::new();
    wire::append_ack(&mut words, 2, Visibility::RemoteVisible);
    raw.say(&words);
    host.await_seen(|seen| matches!(seen, Seen::Down(Quiesce::Proven)).then_some(()));
    assert!(link.send(b"more").is_err());
}
