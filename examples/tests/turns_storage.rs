//! Conversations over a directory and a Redis server: what a run has left there is found by the next one, whatever
//! happened to it meanwhile, and the bits are those of a run without a cache.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use kvgate_hicache::log::{LogConfig, SegmentLog};
use serde_json::Value;
use support::{Finished, pd_handoff};

/// Two conversations of `turns` turns each, both sides in one process.
fn turns(turns: &str, extra: &[&str]) -> Finished {
    let args = ["--transport", "local", "--sessions", "2", "--turns", turns];
    pd_handoff(&[&args[..], &["--json"], extra].concat())
}

fn good(run: &Finished) -> Value {
    let json = run.json();
    assert_eq!(run.code, Some(0), "{json}\n{}", run.stderr);
    json
}

/// A run whose turns were compared with a run without a cache, bit for bit.
fn verified(run: &Finished) -> Value {
    let json = good(run);
    assert_eq!(json["verdict"], "bit-identical", "{json}");
    json
}

fn of_tier(json: &Value, tier: &str, what: &str) -> u64 {
    let tiers = json["tiers"].as_array().unwrap();
    let tier = tiers.iter().find(|found| found["tier"] == tier).unwrap();
    tier[what].as_u64().unwrap()
}

fn verify(dir: &Path) -> Option<i32> {
    let tool = env!("CARGO_BIN_EXE_kvgate-cache");
    let done = Command::new(tool).arg("verify").arg(dir).output().unwrap();
    done.status.code()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A copy of a directory, so that one run fills it for several tests of it.
fn copy(from: &Path, to: &Path) -> PathBuf {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    to.to_owned()
}

fn segment(dir: &Path) -> PathBuf {
    let names = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<PathBuf> = names.map(|entry| entry.unwrap().path()).collect();
    names.retain(|path| path.to_string_lossy().contains("segment-"));
    names.sort();
    names.remove(0)
}

/// Where records begin in a segment, and the bytes of each.
fn records(bytes: &[u8]) -> Vec<(usize, usize)> {
    let pages = (0..bytes.len()).step_by(4_096);
    let begins = pages.filter(|at| bytes[*at..].starts_with(b"kvgrecrd"));
    let length = |at: usize| u64::from_le_bytes(bytes[at + 136..at + 144].try_into().unwrap());
    begins.map(|at| (at, length(at) as usize)).collect()
}

/// What happens to the bytes of a segment.
type Change = dyn Fn(&mut Vec<u8>);

/// Changes the one segment of a directory.
fn damage(dir: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let path = segment(dir);
    let mut bytes = std::fs::read(&path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

/// Every session goes on from the directory in its first turn; another format, model or tenant finds nothing there.
#[test]
fn a_second_run_goes_on_from_the_directory_and_no_other_cache_does() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("cache");
    let kept = ["--hicache", text(&dir)];
    let first = good(&turns("2", &kept));
    assert!(first["storage"]["tiers"][0]["stored"].as_u64() > Some(0));
    assert_eq!(first["storage"]["is_drained"], true, "{first}");
    assert_eq!(verify(&dir), Some(0));
    let second = verified(&turns("2", &[&kept[..], &["--verify-cold"]].concat()));
    assert_eq!(
        of_tier(&second, "storage", "first_turn_hits"),
        2,
        "{second}"
    );
    assert_eq!(second["misses"], 0);
    assert_eq!(second["storage"]["tiers"][0]["stored"], 0, "stored twice");
    assert_eq!(verify(&dir), Some(0));
    for other in [
        ["--index-k", "fp8"],
        ["--seed", "2"],
        ["--salt", "tenant"],
        ["--latent", "f32"],
    ] {
        let cold = [&kept[..], &other, &["--verify-cold"]].concat();
        let run = verified(&turns("1", &cold));
        assert_eq!(of_tier(&run, "storage", "hits"), 0, "{other:?}: {run}");
        assert!(run["storage"]["tiers"][0]["stored"].as_u64() > Some(0));
    }
    // All of them lie side by side.
    assert_eq!(verify(&dir), Some(0));
    let again = verified(&turns("1", &[&kept[..], &["--verify-cold"]].concat()));
    assert_eq!(of_tier(&again, "storage", "first_turn_hits"), 2, "{again}");
}

/// A flipped bit, a cut file, two records in each other's place: a miss each, named by the tool, and no wrong bit.
#[test]
fn a_damaged_directory_is_named_and_costs_hits_only() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole");
    good(&turns("1", &["--hicache", text(&whole)]));
    let flip = |bytes: &mut Vec<u8>| {
        let (at, length) = records(bytes)[0];
        bytes[at + length / 2] ^= 16;
    };
    let cut = |bytes: &mut Vec<u8>| {
        let (at, length) = records(bytes)[2];
        bytes.truncate(at + length / 2);
    };
    let swap = |bytes: &mut Vec<u8>| {
        let found = records(bytes);
        let pairs = found.iter().zip(&found[1..]);
        let mut equal = pairs.filter(|(a, b)| a.1 == b.1 && a.0 + a.1 == b.0);
        let (a, b) = equal.next().unwrap();
        let (former, latter) = bytes[a.0..].split_at_mut(a.1);
        former.swap_with_slice(&mut latter[..b.1]);
    };
    let changes: [(&str, &Change); 3] = [("flip", &flip), ("cut", &cut), ("swap", &swap)];
    for (name, change) in changes {
        let dir = copy(&whole, &folder.path().join(name));
        damage(&dir, |bytes| change(bytes));
        assert_eq!(verify(&dir), Some(1), "{name}");
        let cold = ["--hicache", text(&dir), "--verify-cold"];
        verified(&turns("1", &cold));
    }
}

#[test]
fn a_directory_that_cannot_be_had_is_one_clear_error() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("cache");
    let log = SegmentLog::open_directory(&dir, LogConfig::default()).unwrap();
    let run = turns("1", &["--hicache", text(&dir)]);
    assert_eq!(run.code, Some(3), "{}", run.stdout);
    assert_eq!(run.json()["error"]["field"], "hicache", "{}", run.stdout);
    drop(log);
    let file = folder.path().join("file");
    std::fs::write(&file, "no directory").unwrap();
    let run = turns("1", &["--hicache", text(&file)]);
    assert_eq!(run.code, Some(2), "{}", run.stdout);
    assert_eq!(run.json()["error"]["field"], "hicache", "{}", run.stdout);
    let run = turns("1", &["--remote", "gopher://nowhere"]);
    assert_eq!(run.code, Some(2), "{}", run.stdout);
    assert_eq!(run.json()["error"]["field"], "remote", "{}", run.stdout);
}

/// A tier that is asked for and never hit shows nothing; files of others in the directory do no harm.
#[test]
fn a_storage_tier_without_a_hit_shows_nothing() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("notes.txt"), "of somebody else").unwrap();
    let args = ["--transport", "local", "--sessions", "3", "--turns", "2"];
    let kept = ["--hicache", text(folder.path()), "--device-pages", "5"];
    let run = pd_handoff(&[&args[..], &kept, &["--verify-cold", "--json"]].concat());
    assert_eq!(run.code, Some(2), "{}", run.stdout);
    let json = run.json();
    assert_eq!(json["verdict"], "invalid", "{json}");
    assert_eq!(json["error"]["field"], "storage", "{json}");
    assert!(folder.path().join("notes.txt").exists());
}

/// A server of its own, which ends with the test.
#[cfg(feature = "redis")]
struct Redis {
    child: std::process::Child,
    url: String,
    _folder: tempfile::TempDir,
}

#[cfg(feature = "redis")]
impl Redis {
    /// `None`, after a word about it, without the program.
    fn start() -> Option<Redis> {
        use std::io::{Read, Write};
        use std::net::{TcpListener, TcpStream};
        use std::process::Stdio;
        let folder = tempfile::tempdir().unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let port = address.port().to_string();
        let mut command = Command::new("redis-server");
        command.args([
            "--port",
            &port,
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
        ]);
        command
            .arg(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let Ok(child) = command.spawn() else {
            eprintln!("SKIP: redis: apt-get install redis-server");
            return None;
        };
        let url = format!("redis://{address}/0");
        let redis = Redis {
            child,
            url,
            _folder: folder,
        };
        let answers = || {
            let mut stream = TcpStream::connect(address).ok()?;
            stream.write_all(b"PING\r\n").ok()?;
            let mut answer = [0; 5];
            stream.read_exact(&mut answer).ok()?;
            Some(&answer == b"+PONG")
        };
        let limit = kvgate_transfer::Deadline::after_ms(20_000);
        while answers() != Some(true) {
            assert!(!limit.has_passed(), "redis-server does not answer");
            std::thread::yield_now();
        }
        Some(redis)
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(feature = "redis")]
impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What the directory has lost comes from the server and is kept in the directory again; a server that is gone is a
/// miss.
#[cfg(feature = "redis")]
#[test]
fn what_the_directory_has_lost_comes_from_redis() {
    let Some(mut redis) = Redis::start() else {
        return;
    };
    let url = redis.url.clone();
    let folder = tempfile::tempdir().unwrap();
    let run = |dir: &str, extra: &[&str]| {
        let dir = folder.path().join(dir);
        let kept = ["--hicache", text(&dir), "--remote", &url];
        turns("1", &[&kept[..], extra].concat())
    };
    let first = good(&run("first", &[]));
    assert!(first["storage"]["tiers"][1]["stored"].as_u64() > Some(0));
    let second = verified(&run("second", &["--verify-cold"]));
    assert_eq!(of_tier(&second, "remote", "first_turn_hits"), 2, "{second}");
    let kept = &second["storage"]["tiers"][0];
    assert_eq!(
        kept["stored"],
        second["storage"]["tiers"][1]["read_records"]
    );
    redis.kill();
    // The directory has it now, and without it everything is computed.
    let third = verified(&run("second", &["--verify-cold"]));
    assert_eq!(of_tier(&third, "storage", "first_turn_hits"), 2, "{third}");
    let fourth = verified(&run("third", &["--verify-cold"]));
    assert_eq!(of_tier(&fourth, "remote", "hits"), 0, "{fourth}");
    assert!(fourth["storage"]["tiers"][1]["misses"]["unavailable"].as_u64() > Some(0));
}

/// The server has everything and the directory, which was emptied, is never read: the run says nothing about it.
#[cfg(feature = "redis")]
#[test]
fn a_directory_that_gave_nothing_beside_a_full_server_shows_nothing() {
    let Some(redis) = Redis::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = |dir: &str, extra: &[&str]| {
        let dir = folder.path().join(dir);
        let args = ["--sessions", "2", "--turns", "2", "--json"];
        let kept = ["--hicache", text(&dir), "--remote", &redis.url];
        pd_handoff(&[&args[..], &kept, extra].concat())
    };
    good(&run("first", &[]));
    // Everything fits into the host tier, so nothing is read twice.
    let second = run("second", &["--verify-cold"]);
    assert_eq!(second.code, Some(2), "{}", second.stdout);
    assert_eq!(
        second.json()["error"]["field"],
        "storage",
        "{}",
        second.stdout
    );
}

/// A server that sends a byte now and then is a store that comes too late, during the run and at its end, and no more.
#[cfg(feature = "redis")]
#[test]
fn a_server_that_drips_bytes_costs_hits_only() {
    use std::io::Write;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}/0", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                while stream.write_all(b"+").is_ok() {
                    std::thread::sleep(std::time::Duration::from_millis(200));
                }
            });
        }
    });
    let args = ["--sessions", "2", "--turns", "2", "--json"];
    let kept = ["--remote", &*url, "--deadline-ms", "2000"];
    let json = good(&pd_handoff(&[&args[..], &kept].concat()));
    assert_eq!(json["verdict"], "bit-identical", "{json}");
    assert_eq!(json["hits"]["remote_tokens"], 0, "{json}");
    let tier = &json["storage"]["tiers"][0];
    assert_eq!(
        (&tier["stored"], &tier["read_records"]),
        (&0.into(), &0.into()),
        "{json}"
    );
}
