//! The contract of a tier over a real Redis server, and servers that die, stall or lie. Without the
//! program the tests say SKIP.
#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use kvgate_hicache::record::RecordId;
use kvgate_hicache::record::RecordKind::{Block, Checkpoint};
use kvgate_hicache::testkit::Sample;
use kvgate_hicache::testkit::contract::{self, Damage, Subject, soon};
use kvgate_hicache::tier::{Presence, RedisTier, Tier};
use kvgate_hicache::{ErrorKind, Miss};
use kvgate_transfer::Deadline;
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
    assert!(
        matches!(miss, Err(Miss::Late { .. } | Miss::Unavailable { .. })),
        "{miss:?}"
    );
    assert!(hurried.has_passed());
    assert_eq!(tier.stats().miss_count(), 1);
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
