//! Conversations over an object store: a folder, and a real S3 server (moto). Without the program the latter says SKIP.
#![cfg(feature = "object")]
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use kvgate_transfer::Deadline;
use serde_json::Value;
use support::{Finished, Running};

const PROGRAM: &str = env!("CARGO_BIN_EXE_pd-handoff");

/// Two conversations of one turn, over two processes.
fn turns(extra: &[&str], variables: &[(&str, &str)]) -> Finished {
    let args = ["--sessions", "2", "--turns", "1", "--json"];
    Running::start_with(PROGRAM, &[&args[..], extra].concat(), variables).finish()
}

fn good(run: &Finished) -> Value {
    let json = run.json();
    assert_eq!(run.code, Some(0), "{json}\n{}", run.stderr);
    assert_eq!(json["verdict"], "bit-identical", "{json}");
    json
}

fn first_turn_hits(json: &Value) -> u64 {
    let tiers = json["tiers"].as_array().unwrap();
    let remote = tiers.iter().find(|tier| tier["tier"] == "remote").unwrap();
    remote["first_turn_hits"].as_u64().unwrap()
}

#[test]
fn a_folder_keeps_what_the_next_run_goes_on_from() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}", folder.path().display());
    let kept = ["--remote", &*url, "--verify-cold"];
    let first = good(&turns(&kept, &[]));
    assert!(first["storage"]["tiers"][0]["stored"].as_u64() > Some(0));
    let second = good(&turns(&kept, &[]));
    assert_eq!(first_turn_hits(&second), 2, "{second}");
    let gone = folder.path().join("none");
    let run = turns(&["--remote", &format!("file://{}", gone.display())], &[]);
    assert_eq!(run.code, Some(2), "{}", run.stdout);
    assert_eq!(run.json()["error"]["field"], "remote", "{}", run.stdout);
}

/// A server of its own, which ends with the test.
struct Server {
    child: Child,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Server {
    /// With the bucket `kvgate`. `None`, after a word about it, without the program.
    fn start() -> Option<Server> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
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
        let server = Server { child, port };
        let deadline = Deadline::after_ms(120_000);
        while server.make_bucket() != Some(true) {
            assert!(!deadline.has_passed(), "moto_server does not answer");
            std::thread::yield_now();
        }
        Some(server)
    }

    fn make_bucket(&self) -> Option<bool> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        let head = "PUT /kvgate HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\
            Authorization: AWS4-HMAC-SHA256 Credential=key/20240101/us-east-1/s3/aws4_request, \
            SignedHeaders=host, Signature=0\r\nContent-Length: 0\r\n\r\n";
        stream.write_all(head.as_bytes()).ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).ok()?;
        Some(answer.get(9..12)? == b"200")
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_bucket_keeps_what_the_next_run_goes_on_from() {
    let Some(mut server) = Server::start() else {
        return;
    };
    let endpoint = format!("http://127.0.0.1:{}", server.port);
    let variables = [
        ("AWS_ENDPOINT_URL", &*endpoint),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "a-secret-word"),
    ];
    let kept = ["--remote", "s3://kvgate/run", "--verify-cold"];
    let first = good(&turns(&kept, &variables));
    assert!(first["storage"]["tiers"][0]["stored"].as_u64() > Some(0));
    let second = good(&turns(&kept, &variables));
    assert_eq!(first_turn_hits(&second), 2, "{second}");
    server.kill();
    // A server that is gone is a miss, and what it was told is not repeated.
    let third = turns(&kept, &variables);
    let json = good(&third);
    assert_eq!(first_turn_hits(&json), 0, "{json}");
    let misses = &json["storage"]["tiers"][0]["misses"];
    assert!(misses["unavailable"].as_u64() > Some(0), "{json}");
    assert!(!third.stderr.contains("a-secret-word"), "{}", third.stderr);
}

#[test]
fn a_bucket_without_credentials_is_one_clear_error() {
    let variables = [("AWS_ACCESS_KEY_ID", ""), ("AWS_SECRET_ACCESS_KEY", "")];
    let run = turns(&["--remote", "s3://kvgate/run"], &variables);
    let json = run.json();
    assert_eq!(run.code, Some(2), "{json}");
    assert_eq!(json["error"]["field"], "remote", "{json}");
    let message = json["error"]["message"].as_str().unwrap();
    assert!(message.contains("credentials"), "{message}");
}
