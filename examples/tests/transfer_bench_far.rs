//! `transfer-bench serve` and `--peer`, as on two hosts.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use serde_json::Value;
use support::{Finished, Running};

const PROGRAM: &str = env!("CARGO_BIN_EXE_transfer-bench");

/// Starts a serving side and waits for its address.
fn serve(args: &[&str]) -> (Running, String) {
    let listen = ["serve", "--listen", "127.0.0.1:0"];
    let mut serve = Running::start(PROGRAM, &[&listen, args].concat());
    let line = serve.wait_for_stdout("listening ");
    let address = line.trim_start_matches("listening ").to_owned();
    (serve, address)
}

fn measure(address: &str, args: &[&str]) -> Finished {
    let peer = ["--peer", address, "--json"];
    Running::start(PROGRAM, &[args, &peer].concat()).finish()
}

const BRIEF: [&str; 6] = ["--pages", "16", "--duration", "0.02", "--pool-mib", "2"];

fn error_of(finished: &Finished) -> Value {
    let object = finished.json();
    assert_eq!(object["verdict"], "invalid", "{object}");
    object["error"].clone()
}

#[test]
fn every_kind_of_run_ends_well_on_both_sides() {
    let runs: [(&[&str], &str); 4] = [
        (&["throughput", "--backend", "tcp"], "rows"),
        (
            &[
                "throughput",
                "--backend",
                "tcp",
                "--op",
                "read",
                "--check",
                "full",
            ],
            "rows",
        ),
        (&["latency", "--park-us", "50", "--events", "16"], "latency"),
        (
            &[
                "notify",
                "--backend",
                "tcp",
                "--park-us",
                "50",
                "--events",
                "16",
            ],
            "notify",
        ),
    ];
    let count = runs.len().to_string();
    let (serve, address) = serve(&["--runs", &count]);
    for (args, key) in runs {
        let rest: &[&str] = if key == "rows" { &BRIEF } else { &[] };
        let finished = measure(&address, &[args, rest].concat());
        assert_eq!(finished.code, Some(0), "{args:?}: {}", finished.stderr);
        let object = finished.json();
        if key == "rows" {
            let row = &object["rows"][0];
            assert_eq!(
                (&row["backend"], &row["bad_pages"]),
                (&"tcp".into(), &0.into())
            );
            assert_eq!(row["limit"]["name"], "writev/readv with acks");
            assert!(row["limit"]["gbps_med"].as_f64() > Some(0.0), "{row}");
            assert!(row["checked_pages"].as_u64() >= Some(64), "{row}");
            assert!(row["cpu_target"].as_f64() > Some(0.0), "{row}");
        } else {
            let found = &object[key];
            assert_eq!(
                (
                    &found["events"],
                    &found["bad_pages"],
                    &found["is_round_trip"]
                ),
                (&16.into(), &0.into(), &true.into())
            );
            assert!(found["post_to_seen"]["p50_us"].as_f64() > Some(0.0));
            assert!(found["bare"]["p50_us"].as_f64() > Some(0.0));
        }
    }
    let serve = serve.finish();
    assert_eq!(serve.code, Some(0), "{}", serve.stderr);
    assert!(serve.stdout.starts_with("listening 127.0.0.1:"));
}

#[test]
fn strangers_are_named_and_the_next_one_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let token = |name: &str, secret: &str| {
        let file = dir.path().join(name);
        std::fs::write(&file, secret).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let (right, wrong) = (token("right", "a secret\n"), token("wrong", "another"));
    let (mut serve, address) = serve(&["--auth-token-file", &right]);
    let mut stream = TcpStream::connect(&address).unwrap();
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n")
        .unwrap();
    serve.wait_for_stderr("transfer-bench: refused");
    // The connection was closed or reset; either ends the read.
    let _ = stream.read_to_end(&mut Vec::new());
    let refused = measure(
        &address,
        &[&BRIEF[..], &["--auth-token-file", &wrong]].concat(),
    );
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert_eq!(error_of(&refused)["field"], "peer");
    let good = measure(
        &address,
        &[&BRIEF[..], &["--auth-token-file", &right]].concat(),
    );
    assert_eq!(good.code, Some(0), "{}", good.stderr);
    let serve = serve.finish();
    assert_eq!(serve.code, Some(0), "{}", serve.stderr);
    assert!(!serve.stderr.contains("a secret"), "{}", serve.stderr);
}

#[test]
fn a_side_that_is_lost_ends_the_other_with_3() {
    let long = ["--pages", "16", "--pool-mib", "2", "--duration", "600"];
    let start = |address: &str| {
        let words = [
            "--peer",
            address,
            "--backend",
            "tcp",
            "--json",
            "--deadline-ms",
            "3000",
        ];
        Running::start(PROGRAM, &[&long[..], &words].concat())
    };
    let (mut serving, address) = serve(&["--deadline-ms", "3000"]);
    let mut measuring = start(&address);
    serving.wait_for_stderr("transfer-bench: serves");
    let second = measure(&address, &BRIEF);
    assert_eq!(second.code, Some(2), "{}", second.stderr);
    assert_eq!(error_of(&second)["kind"], "unavailable");
    measuring.child.kill().unwrap();
    drop(measuring);
    let serving = serving.finish();
    assert_eq!(serving.code, Some(3), "{}", serving.stderr);

    let (mut serving, address) = serve(&["--deadline-ms", "3000"]);
    let measuring = start(&address);
    serving.wait_for_stderr("transfer-bench: serves");
    serving.child.kill().unwrap();
    let measuring = measuring.finish();
    assert_eq!(measuring.code, Some(3), "{}", measuring.stderr);
    let kind = error_of(&measuring)["kind"].clone();
    assert!(kind == "peer_lost" || kind == "deadline_exceeded", "{kind}");
    drop(serving);
}

#[test]
fn another_tool_is_no_peer() {
    let mut decode = Running::start(
        env!("CARGO_BIN_EXE_pd-handoff"),
        &["decode", "--listen", "127.0.0.1:0", "--transport", "tcp"],
    );
    let line = decode.wait_for_stdout("listening ");
    let refused = measure(line.trim_start_matches("listening "), &BRIEF);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    let error = error_of(&refused);
    assert_eq!(
        (&error["kind"], &error["field"]),
        (&"schema_mismatch".into(), &"peer".into())
    );
}

#[test]
fn addresses_are_judged_before_anything_is_sent() {
    let run = |args: &[&str]| Running::start(PROGRAM, &[args, &["--json"]].concat()).finish();
    let closed = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().to_string()
    };
    let cases: [(&[&str], i32, &str); 6] = [
        (&["serve", "--listen", "0.0.0.0:0"], 2, "listen"),
        (&["serve", "--listen", "nonsense"], 2, "listen"),
        (
            &["serve", "--listen", "127.0.0.1:0", "--deadline-ms", "50"],
            3,
            "deadline_ms",
        ),
        (&["--peer", "192.0.2.1:7000"], 2, "peer"),
        (&["--peer", &closed], 3, "peer"),
        (&["--peer", &closed, "--backend", "cma"], 2, "backend"),
    ];
    for (args, code, field) in cases {
        let finished = run(args);
        assert_eq!(finished.code, Some(code), "{args:?}: {}", finished.stderr);
        let last = finished.stdout.lines().last().unwrap();
        let object: Value = serde_json::from_str(last).unwrap();
        assert_eq!(object["error"]["field"], field, "{args:?}: {object}");
    }
}
