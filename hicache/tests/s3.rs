//! The contract of a tier over a real S3 server (moto), and servers that die, stall or lie. Without the
//! program the tests of the real one say SKIP.
#![cfg(feature = "object")]
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use kvgate_hicache::record::RecordId;
use kvgate_hicache::record::RecordKind::Block;
use kvgate_hicache::testkit::Sample;
use kvgate_hicache::testkit::contract::{self, Damage, Subject, soon};
use kvgate_hicache::tier::{ObjectTier, Presence, Stored, Tier};
use kvgate_hicache::{ErrorKind, Miss};
use kvgate_transfer::Deadline;

/// Bytes of a block of [`Sample::small`].
const BLOCK_BYTES: usize = 8192;

/// What the server takes for a signature.
const SIGNED: &str = "AWS4-HMAC-SHA256 Credential=key/20240101/us-east-1/s3/aws4_request, \
    SignedHeaders=host, Signature=0";

/// A tier at the endpoint of this port.
fn tier_at(port: u16, place: &str) -> ObjectTier {
    let endpoint = format!("http://127.0.0.1:{port}");
    let options = [
        ("endpoint", endpoint.as_str()),
        ("region", "us-east-1"),
        ("access_key_id", "key"),
        ("secret_access_key", "word"),
        ("allow_http", "true"),
    ];
    ObjectTier::open(&format!("s3://{place}"), &options).unwrap()
}

/// A server of its own, which ends with the test.
struct Server {
    child: Child,
    port: u16,
    /// Each tier that a contract opens anew is over a folder of its own.
    folder: AtomicU32,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Server {
    /// With the bucket `kvgate`. `None`, after a word about it, without the program.
    fn start() -> Option<Server> {
        let port = free_port();
        let spawned = Command::new("moto_server")
            .args(["-H", "127.0.0.1", "-p", &port.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = match spawned {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                eprintln!("SKIP: s3: pip install 'moto[s3]' flask flask-cors");
                return None;
            }
            Err(error) => panic!("moto_server: {error}"),
        };
        let server = Server {
            child,
            port,
            folder: AtomicU32::new(0),
        };
        let deadline = Deadline::after_ms(60_000);
        while server
            .ask("PUT", "/kvgate", &[])
            .is_none_or(|code| code != 200)
        {
            assert!(!deadline.has_passed(), "moto_server does not answer");
            std::thread::yield_now();
        }
        Some(server)
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn place(&self) -> String {
        format!("kvgate/folder-{}", self.folder.load(Ordering::Relaxed))
    }

    fn tier(&self) -> ObjectTier {
        tier_at(self.port, &self.place())
    }

    /// One request by hand; the status of the answer.
    fn ask(&self, method: &str, path: &str, body: &[u8]) -> Option<u32> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nAuthorization: {SIGNED}\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).ok()?;
        stream.write_all(body).ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).ok()?;
        let status = answer.get(9..12)?;
        std::str::from_utf8(status).ok()?.parse().ok()
    }

    fn path(&self, id: &RecordId) -> String {
        format!("/{}/{}/{}", self.place(), id.kind, id.key)
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
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
                assert_eq!(self.ask("DELETE", &self.path(id), &[]), Some(204));
                return true;
            }
        }
        assert_eq!(self.ask("PUT", &self.path(id), &bytes), Some(200));
        true
    }
}

#[test]
fn s3_keeps_the_contract() {
    let Some(server) = Server::start() else {
        return;
    };
    server.tier().check(soon()).unwrap();
    for point in [
        contract::round_trip,
        contract::damage,
        contract::gone_between_look_and_read,
        contract::namespaces,
        contract::restart,
        contract::readers_beside_writers,
        contract::real_records,
    ] {
        point(&server);
        server.folder.fetch_add(1, Ordering::Relaxed);
    }
}

/// Many writers of one record: one of them has written it, and it is right.
#[test]
fn s3_stores_a_record_once() {
    let Some(server) = Server::start() else {
        return;
    };
    let (tier, sample) = (server.tier(), Sample::small(1));
    let stored: Vec<Stored> = std::thread::scope(|scope| {
        let put = || sample.with_record(Block, 0, |record| tier.write(record, soon()));
        let writers: Vec<_> = (0..6).map(|_| scope.spawn(put)).collect();
        let done = writers.into_iter().map(|writer| writer.join().unwrap());
        done.map(Result::unwrap).collect()
    });
    let written = stored.iter().filter(|stored| **stored == Stored::Written);
    assert_eq!(written.count(), 1, "{stored:?}");
    let found = sample.check_read(Block, 0, |w, into| tier.read(w, into, soon()));
    assert_eq!(found, Ok(()));
}

#[test]
fn s3_without_the_bucket_is_one_clear_error() {
    let Some(server) = Server::start() else {
        return;
    };
    let (tier, sample) = (tier_at(server.port, "nobody/here"), Sample::small(1));
    let expected = "s3://nobody is unavailable: the bucket does not exist";
    assert_eq!(tier.check(soon()).unwrap_err().to_string(), expected);
    let error = sample.with_record(Block, 0, |record| tier.write(record, soon()));
    assert_eq!(error.unwrap_err().to_string(), expected);
    let miss = sample.check_read(Block, 0, |w, into| tier.read(w, into, soon()));
    let reason = "the bucket does not exist".to_owned();
    assert_eq!(miss, Err(Miss::Unavailable { reason }));
}

#[test]
fn s3_killed_in_the_middle_gives_misses_and_nothing_wrong() {
    let Some(mut server) = Server::start() else {
        return;
    };
    let sample = Sample::small(8);
    let tier = server.tier();
    for k in 0..8 {
        let stored = sample.with_record(Block, k, |record| tier.write(record, soon()));
        assert_eq!(stored.unwrap(), Stored::Written);
    }
    std::thread::scope(|scope| {
        let (tier, sample) = (&tier, &sample);
        let reader = scope.spawn(move || {
            let mut hits = 0_u64;
            for k in (0..8).cycle() {
                match sample.check_read(Block, k, |w, into| tier.read(w, into, soon())) {
                    Ok(()) => hits += 1,
                    Err(Miss::Unavailable { .. }) => return hits,
                    Err(other) => panic!("{other}"),
                }
            }
            hits
        });
        while tier.stats().hit_count < 20 {
            std::thread::yield_now();
        }
        server.kill();
        assert!(reader.join().unwrap() >= 20);
    });
    let ids = [sample.id(Block, 0)];
    assert_eq!(tier.probe(&ids, soon()), [Presence::Unknown]);
    let error = sample.with_record(Block, 0, |record| tier.write(record, soon()));
    let error = error.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Unavailable { .. }),
        "{error}"
    );
    let error = tier.check(soon()).unwrap_err();
    assert!(error.is_retryable(), "{error}");
}

/// Nobody there: an error or the deadline, whichever is first, in every call.
#[test]
fn s3_that_is_not_there_ends_within_the_deadline() {
    let (tier, sample) = (tier_at(free_port(), "kvgate/x"), Sample::small(1));
    let begun = Instant::now();
    for allowed_ms in [1, 100, 20_000] {
        let miss = sample.check_read(Block, 0, |w, into| {
            tier.read(w, into, Deadline::after_ms(allowed_ms))
        });
        match miss {
            Err(Miss::Late { deadline_ms }) => assert_eq!(deadline_ms, allowed_ms),
            Err(Miss::Unavailable { .. }) => assert!(allowed_ms > 1),
            other => panic!("{other:?}"),
        }
    }
    let late = sample.with_record(Block, 0, |record| tier.write(record, Deadline::now()));
    let late = late.unwrap_err();
    assert!(matches!(late.kind(), ErrorKind::Late { .. }), "{late}");
    // The client's own budget would be three minutes for each.
    assert!(begun.elapsed() < Duration::from_secs(60));
    assert_eq!(tier.stats().miss_count(), 3);
    assert_eq!(tier.stats().failed_count, 1);
}

/// A server of one kind of answer: it reads a request, then `answer` writes until it has enough or nobody
/// listens any more.
fn server(answer: impl Fn(&mut TcpStream) -> std::io::Result<()> + Send + Clone + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // Ends with the process: nobody is left to connect.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, answer) = (stream.unwrap(), answer.clone());
            std::thread::spawn(move || {
                let mut asked = Vec::new();
                let mut piece = [0; 4096];
                while !asked.windows(4).any(|end| end == b"\r\n\r\n") {
                    match stream.read(&mut piece) {
                        Ok(count) if count > 0 => asked.extend_from_slice(&piece[..count]),
                        _ => return,
                    }
                }
                let _ended_or_left = answer(&mut stream);
            });
        }
    });
    port
}

fn head(status: &str, fields: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\nETag: \"e\"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n{fields}\r\n\r\n"
    )
}

/// Lengths that are not the record's are seen before a byte is taken; what never ends is bounded.
#[test]
fn s3_that_lies_about_lengths_gives_misses() {
    let sample = Sample::small(1);
    let read = |port: u16, deadline: Deadline| {
        let tier = tier_at(port, "kvgate/x");
        sample.check_read(Block, 0, |w, into| tier.read(w, into, deadline))
    };
    // The whole length is announced and nothing comes: taking a byte would be late.
    for found_bytes in [1, BLOCK_BYTES as u64 - 1, BLOCK_BYTES as u64 + 1, 1 << 50] {
        let port = server(move |stream| {
            let fields = format!("Content-Length: {found_bytes}");
            stream.write_all(head("200 OK", &fields).as_bytes())?;
            stream.read(&mut [0; 16]).map(drop)
        });
        let miss = read(port, Deadline::after_ms(60_000));
        let expected_bytes = BLOCK_BYTES as u64;
        let expected = Miss::Length {
            expected_bytes,
            found_bytes,
        };
        assert_eq!(miss, Err(expected));
    }
    let endless = |status: &'static str, fields: &'static str| {
        server(move |stream| {
            stream.write_all(head(status, fields).as_bytes())?;
            loop {
                stream.write_all(&[b'a'; 1 << 16])?;
            }
        })
    };
    let begun = Instant::now();
    let ports = [
        endless("200 OK", "X: no length"),
        endless("404 Not Found", "X: no length"),
        endless("400 Bad Request", "Content-Length: 99999999999999"),
        server(|stream| stream.write_all(&[0xff; 100_000])),
        server(|stream| stream.write_all(head("200 OK", "Content-Length: -7").as_bytes())),
    ];
    for (case, port) in ports.into_iter().enumerate() {
        let miss = read(port, Deadline::after_ms(60_000)).unwrap_err();
        assert!(
            matches!(miss, Miss::Unavailable { .. } | Miss::Absent),
            "{case}: {miss}"
        );
    }
    assert!(begun.elapsed() < Duration::from_secs(60));
}

/// The right length, and then the server is gone, again and again; or it trickles; or it brings other bytes.
#[test]
fn s3_that_stops_in_the_middle_is_a_miss() {
    let sample = Sample::small(1);
    let bytes = sample.with_record(Block, 0, |record| record.to_bytes(0));
    let fields = format!("Content-Length: {BLOCK_BYTES}");
    let whole = head("200 OK", &fields);
    let read = |port: u16, allowed_ms| {
        let tier = tier_at(port, "kvgate/x");
        let deadline = Deadline::after_ms(allowed_ms);
        sample.check_read(Block, 0, |w, into| tier.read(w, into, deadline))
    };
    let (begun, half) = (whole.clone(), bytes.clone());
    let port = server(move |stream| {
        stream.write_all(begun.as_bytes())?;
        stream.write_all(&half[..BLOCK_BYTES / 2])
    });
    let miss = read(port, 20_000).unwrap_err();
    assert!(matches!(miss, Miss::Unavailable { .. }), "{miss}");

    let begun = whole.clone();
    let port = server(move |stream| {
        stream.write_all(begun.as_bytes())?;
        stream.set_read_timeout(Some(Duration::from_millis(20)))?;
        while stream.write_all(b"x").is_ok() {
            // Nobody asks again: a pause, until the tier has let go.
            let _timed_out = stream.read(&mut [0; 16]);
        }
        Ok(())
    });
    let miss = read(port, 300);
    assert_eq!(miss, Err(Miss::Late { deadline_ms: 300 }));

    let (begun, mut other) = (whole, bytes);
    other[5000] ^= 1;
    let port = server(move |stream| {
        stream.write_all(begun.as_bytes())?;
        stream.write_all(&other)
    });
    let miss = read(port, 20_000).unwrap_err();
    assert!(miss.is_damage(), "{miss}");
}
