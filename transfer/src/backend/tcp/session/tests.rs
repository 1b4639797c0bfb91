use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Condvar as StdCondvar, Mutex as StdMutex};

use super::*;
use crate::backend::socket::Socket;
use crate::backend::tcp::{Item, TcpLink, give_up};
use crate::backend::{Link, LinkEvents, Quiesce, ReadRequest, RemoteRun, Resolved};
use crate::error::{Cause, Error, ErrorKind};
use crate::ids::{OpId, PeerId};
use crate::sync::thread;
use crate::{Arrival, Visibility};

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

/// What the engine hears of the end of a link.
#[derive(Default)]
struct Ears {
    told: Mutex<Vec<String>>,
    /// The link, for ears that close it with the first message.
    closes: Mutex<Option<Arc<TcpLink>>>,
    is_over: StdMutex<bool>,
    changed: StdCondvar,
}

impl Ears {
    fn note_end(&self) {
        *self.is_over.lock().unwrap() = true;
        self.changed.notify_all();
    }

    /// What was told until the link was down or closed.
    fn told_in_time(&self) -> Vec<String> {
        let goes_on = |is_over: &mut bool| !*is_over;
        let (_over, waited) = self
            .changed
            .wait_timeout_while(
                self.is_over.lock().unwrap(),
                Duration::from_secs(20),
                goes_on,
            )
            .unwrap();
        let told = self.told.lock().clone();
        assert!(!waited.timed_out(), "{told:?}");
        told
    }
}

impl LinkEvents for Ears {
    fn arrived(&self, _: PeerId, _: Arrival, _: Visibility) {}
    fn message(&self, _: PeerId, bytes: bytes::Bytes) {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        self.told.lock().push(text);
        let link = self.closes.lock().take();
        if let Some(link) = link {
            link.close();
            assert_eq!(link.quiesce(), Quiesce::Proven);
            self.note_end();
        }
    }
    fn completed(&self, _: PeerId, _: OpId, _: Result<Visibility, Error>) {}
    fn progress(&self, _: PeerId, _: u64) {}
    fn suspended(&self, _: PeerId, cause: Cause) {
        self.told.lock().push(format!("suspended: {cause}"));
    }
    fn down(&self, _: PeerId, cause: Cause, _: Quiesce) {
        self.told.lock().push(format!("down: {cause}"));
        self.note_end();
    }
    fn asked(&self, _: PeerId, _: ReadRequest) -> bool {
        false
    }
    fn resolve(&self, _: PeerId, _: &[RemoteRun]) -> Result<Resolved, Error> {
        Err(ErrorKind::Closed.into())
    }
}

/// A sender finds the end of the connection before the receive thread has read the last words of the peer.
#[test]
fn a_goodbye_wins_over_a_sender_that_has_found_the_end() {
    let (link, mut there, ..) = waiting();
    let mut words = Vec::new();
    wire::append_numbered(&mut words, 1, b"last words");
    wire::append_bye(&mut words);
    there.write_all(&words).unwrap();
    let (_, channel) = link.shared.session.connection().unwrap();
    give_up(&channel);
    let ears = Arc::new(Ears::default());
    link.start(PeerId(1), ears.clone()).unwrap();
    let told = ears.told_in_time();
    assert_eq!(told.len(), 2, "{told:?}");
    assert_eq!(told[0], "last words");
    assert!(told[1].starts_with("down: ") && told[1].contains("closed by the peer"));
}

/// The first of the last words closes the link: from then on it is said to be quiet, so nothing more is handled.
#[test]
fn a_close_out_of_the_last_words_is_the_end_of_them() {
    let (link, mut there, ..) = waiting();
    let link = Arc::new(link);
    let mut words = Vec::new();
    wire::append_numbered(&mut words, 1, b"one");
    wire::append_numbered(&mut words, 2, b"two");
    there.write_all(&words).unwrap();
    let (_, channel) = link.shared.session.connection().unwrap();
    give_up(&channel);
    let ears = Arc::new(Ears::default());
    *ears.closes.lock() = Some(link.clone());
    link.start(PeerId(1), ears.clone()).unwrap();
    assert_eq!(ears.told_in_time(), ["one"]);
    link.close();
    assert_eq!(ears.told.lock().clone(), ["one"], "behind the proof");
}
