//! The contract of a tier over a real Redis server, and servers that die, stall or lie. Without the
//! program the tests say SKIP.
#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvgate_hicache::record::RecordId;
use kvgate_hicache::record::RecordKind::{Block, Checkpoint};
use kvgate_hicache::testkit::Sample;
use kvgate_hicache::testkit::contract::{self, Damage, Subject, soon};
use kvgate_hicache::tier::{Presence, RedisTier, Tier};
use kvgate_hicache::{ErrorKind, Miss};
use kvgate_transfer::Deadline;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use tempfile::TempDir;

/// A server of its own, which ends with the test.
struct Server {
    child: Child,
    port: u16,
    _folder: TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Server {
    /// `None`, after a word about it, without the program.
    fn start() -> Option<Server> {
        let folder = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let spawned = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
            .args([
                "--save",
                "",
                "--appendonly",
                "no",
                "--maxmemory",
                "512mb",
                "--dir",
            ])
            .arg(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = match spawned {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                eprintln!("SKIP: redis: apt-get install redis-server");
                return None;
            }
            Err(error) => panic!("redis-server: {error}"),
        };
        let server = Server {
            child,
            port,
            _folder: folder,
        };
        let deadline = soon();
        while server
            .raw(b"PING\r\n")
            .is_none_or(|answer| !answer.starts_with("+PONG"))
        {
            assert!(!deadline.has_passed(), "redis-server does not answer");
            std::thread::yield_now();
        }
        Some(server)
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn tier(&self) -> RedisTier {
        RedisTier::new(&format!("redis://127.0.0.1:{}/", self.port), "test").unwrap()
    }

    /// One command by hand; the first line of the answer.
    fn raw(&self, command: &[u8]) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.write_all(command).ok()?;
        let mut answer = [0; 64];
        let count = stream.read(&mut answer).ok()?;
        Some(String::from_utf8_lossy(&answer[..count]).into_owned())
    }

    fn command(&self, words: &[&[u8]]) -> String {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            bytes.extend(format!("${}\r\n", word.len()).into_bytes());
            bytes.extend_from_slice(word);
            bytes.extend(b"\r\n");
        }
        self.raw(&bytes).unwrap()
    }

    fn set(&self, id: &RecordId, value: &[u8]) {
        let name = format!("test:{id}:0");
        assert!(
            self.command(&[b"SET", name.as_bytes(), value])
                .starts_with("+OK")
        );
    }
}

impl Subject for Server {
    fn open(&self) -> Box<dyn Tier> {
        Box::new(self.tier())
    }

    fn open_tight(&self) -> Option<Box<dyn Tier>> {
        None
    }

    fn outlives_its_tier(&self) -> bool {
        true
    }

    fn damage(&self, _tier: &dyn Tier, id: &RecordId, damage: Damage) -> bool {
        let sample = Sample::small(40);
        let bytes_of = |id: &RecordId| {
            let k = (0..40).find(|k| sample.id(Block, *k) == *id).unwrap();
            sample.with_record(Block, k, |record| record.to_bytes(0))
        };
        let mut bytes = bytes_of(id);
        match damage {
            Damage::Flip(share) => {
                let at = bytes.len() * share as usize / 1000;
                bytes[at] ^= 1;
            }
            Damage::Replaced(other) => bytes = bytes_of(&other),
            Damage::Half => bytes.truncate(bytes.len() / 2),
            Damage::Longer => bytes.extend([0; 4096]),
            Damage::Gone => {
                let name = format!("test:{id}:0");
                self.command(&[b"DEL", name.as_bytes()]);
                return true;
            }
        }
        self.set(id, &bytes);
        true
    }
}

#[test]
fn redis_keeps_the_contract() {
    for point in [
        contract::round_trip,
        contract::damage,
        contract::gone_between_look_and_read,
        contract::namespaces,
        contract::restart,
        contract::readers_beside_writers,
        contract::real_records,
    ] {
        let Some(server) = Server::start() else {
            return;
        };
        point(&server);
    }
}

/// A record of several values: each of them counts.
#[test]
fn redis_any_part_that_is_missing_makes_a_miss() {
    let Some(server) = Server::start() else {
        return;
    };
    let geometry = kvgate_kvcache::V4Geometry::flash();
    let sample = Sample::of(&geometry, &kvgate_kvcache::Formats::default(), b"", 2);
    let tier = server.tier();
    let read = || sample.check_read(Checkpoint, 1, |w, into| tier.read(w, into, soon()));
    let put = || {
        sample
            .with_record(Checkpoint, 1, |record| tier.write(record, soon()))
            .unwrap()
    };
    for part in 0..4 {
        put();
        assert_eq!(read(), Ok(()));
        let name = format!("test:{}:{part}", sample.id(Checkpoint, 1));
        assert!(server.command(&[b"DEL", name.as_bytes()]).starts_with(":1"));
        let miss = read().unwrap_err();
        let expected = if part == 0 { "absent" } else { "length" };
        assert_eq!(miss.label(), expected, "part {part}");
    }
}

#[test]
fn redis_killed_in_the_middle_gives_misses_and_nothing_wrong() {
    let Some(mut server) = Server::start() else {
        return;
    };
    let sample = Sample::small(16);
    let tier = server.tier();
    for k in 0..16 {
        sample
            .with_record(Block, k, |record| tier.write(record, soon()))
            .unwrap();
    }
    std::thread::scope(|scope| {
        let (tier, sample) = (&tier, &sample);
        let reader = scope.spawn(move || {
            let mut hits = 0_u64;
            for k in (0..16).cycle() {
                match sample.check_read(Block, k, |w, into| tier.read(w, into, soon())) {
                    Ok(()) => hits += 1,
                    Err(Miss::Unavailable { .. }) => return hits,
                    Err(other) => panic!("{other}"),
                }
            }
            hits
        });
        while tier.stats().hit_count < 50 {
            std::thread::yield_now();
        }
        server.kill();
        assert!(reader.join().unwrap() >= 50);
    });
    let ids = [sample.id(Block, 0)];
    assert_eq!(tier.probe(&ids, soon()), [Presence::Unknown]);
    let error = sample
        .with_record(Block, 0, |record| tier.write(record, soon()))
        .unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Unavailable { .. }),
        "{error}"
    );
}

/// A server that takes the connection and says nothing ends in a miss at the deadline.
#[test]
fn redis_that_says_nothing_is_late() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let sample = Sample::small(1);
    let tier = RedisTier::new(&format!("redis://127.0.0.1:{port}/"), "test").unwrap();
    let hurried = Deadline::after_ms(200);
    let miss = sample.check_read(Block, 0, |w, into| tier.read(w, into, hurried));
    assert!(matches!(miss, Err(Miss::Late { .. })), "{miss:?}");
    assert!(hurried.has_passed());
    assert_eq!(tier.stats().miss_count(), 1);
    let namespace = sample.namespace().digest();
    let hurried = Deadline::after_ms(50);
    let error = tier
        .remove(namespace, sample.id(Block, 0), hurried)
        .unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Late { .. }), "{error}");
}

/// A Unix socket whose server accepts nobody and has a full backlog: a connect that blocks would never come back.
#[test]
fn redis_that_accepts_nobody_is_late() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let address = SocketAddrUnix::new(&path).unwrap();
    let new = || {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    };
    let listener = new();
    bind(&listener, &address).unwrap();
    listen(&listener, 0).unwrap();
    let mut waiting = vec![new()];
    while connect(waiting.last().unwrap(), &address).is_ok() {
        waiting.push(new());
    }
    let sample = Sample::small(1);
    let url = format!("redis+unix://{}", path.display());
    let tier = RedisTier::new(&url, "test").unwrap();
    let (told, ended) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let hurried = Deadline::after_ms(200);
            let miss = sample.check_read(Block, 0, |w, into| tier.read(w, into, hurried));
            told.send(miss).unwrap();
        });
        let miss = ended.recv_timeout(Duration::from_secs(10));
        // Ends a connect that blocks, too.
        drop(listener);
        assert!(matches!(miss, Ok(Err(Miss::Late { .. }))), "{miss:?}");
    });
}

/// A server that goes on sending for ever: `begun`, then `piece` again and again. The tier at it, and where
/// the number of the bytes that it got rid of comes when the tier lets go.
fn endless(begun: &'static [u8], piece: &'static [u8]) -> (RedisTier, JoinHandle<u64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut asked = [0; 4096];
        assert!(stream.read(&mut asked).unwrap() > 0);
        let mut sent_bytes = 0;
        let mut next = begun;
        while stream.write_all(next).is_ok() {
            sent_bytes += next.len() as u64;
            next = piece;
        }
        sent_bytes
    });
    let url = format!("redis://127.0.0.1:{port}/");
    (RedisTier::new(&url, "test").unwrap(), server)
}

/// A server that never stops to send, so that no single wait is long.
#[test]
fn redis_that_never_ends_a_reply_is_bounded_by_its_bytes_and_by_the_deadline() {
    let sample = Sample::small(1);
    let read = |tier: &RedisTier, deadline| {
        sample.check_read(Block, 0, |w, into| tier.read(w, into, deadline))
    };
    let long = Deadline::after_ms(60_000);
    for begun in [&b"$99999999999\r\n"[..], b"*99999999\r\n", b"+"] {
        let (tier, server) = endless(begun, b":1\r\n:1\r\n:1\r\n:1\r\n");
        let miss = read(&tier, long).unwrap_err();
        assert!(matches!(miss, Miss::Unavailable { .. }), "{miss}");
        assert!(!long.has_passed(), "{begun:?}: the bytes did not end it");
        drop(tier);
        // What the sockets hold is more than what was taken.
        assert!(server.join().unwrap() < 64 << 20);
    }
}

/// A reply of one byte at a time: each comes in time, all of them do not.
#[test]
fn redis_that_trickles_is_late() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_nodelay(true).unwrap();
        stream.write_all(b"$8192\r\n").unwrap();
        let pace = std::time::Duration::from_millis(20);
        stream.set_read_timeout(Some(pace)).unwrap();
        let mut asked = [0; 4096];
        // Nobody asks again: each read is a pause, until the tier has let go.
        loop {
            match stream.read(&mut asked) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
            if stream.write_all(b"x").is_err() {
                return;
            }
        }
    });
    let tier = RedisTier::new(&format!("redis://127.0.0.1:{port}/"), "test").unwrap();
    let sample = Sample::small(1);
    let begun = Instant::now();
    let hurried = Deadline::after_ms(200);
    let miss = sample.check_read(Block, 0, |w, into| tier.read(w, into, hurried));
    assert_eq!(miss, Err(Miss::Late { deadline_ms: 200 }));
    // 8,192 bytes would take 160 s.
    assert!(begun.elapsed().as_secs() < 20);
    drop(tier);
    server.join().unwrap();
}

/// The connection goes where the URL says: another database, and a server that wants a password.
#[test]
fn redis_is_asked_in_the_database_and_with_the_password_of_the_url() {
    let Some(server) = Server::start() else {
        return;
    };
    let sample = Sample::small(1);
    let at = |user: &str, db: u32| {
        let url = format!("redis://{user}127.0.0.1:{}/{db}", server.port);
        RedisTier::new(&url, "test").unwrap()
    };
    let put = |tier: &RedisTier| sample.with_record(Block, 0, |record| tier.write(record, soon()));
    let has = |tier: &RedisTier| tier.probe(&[sample.id(Block, 0)], soon())[0];
    put(&at("", 3)).unwrap();
    assert_eq!(has(&at("", 3)), Presence::Present);
    assert_eq!(has(&at("", 0)), Presence::Absent);
    assert!(
        server
            .command(&[b"CONFIG", b"SET", b"requirepass", b"word"])
            .starts_with("+OK")
    );
    assert_eq!(has(&at("", 3)), Presence::Unknown);
    assert_eq!(has(&at(":other@", 3)), Presence::Unknown);
    assert_eq!(has(&at(":word@", 3)), Presence::Present);
}

/// A server that answers garbage, or promises more than it has.
#[test]
fn redis_that_lies_gives_misses() {
    for answer in [
        &b"+OK\r\n"[..],
        b"$99999999999\r\n",
        b"-ERR no\r\n",
        b"\xff\xfe\xfd",
        b"*-7\r\n",
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = std::thread::spawn(move || {
            let Ok((mut stream, _)) = listener.accept() else {
                return;
            };
            let mut buffer = [0; 4096];
            while stream.read(&mut buffer).is_ok_and(|count| count > 0) {
                if stream.write_all(answer).is_err() {
                    return;
                }
            }
        });
        let sample = Sample::small(1);
        let tier = RedisTier::new(&format!("redis://127.0.0.1:{port}/"), "test").unwrap();
        let hurried = Deadline::after_ms(500);
        let miss = sample.check_read(Block, 0, |w, into| tier.read(w, into, hurried));
        assert!(miss.is_err(), "{answer:?}");
        drop(tier);
        server.join().unwrap();
    }
}
