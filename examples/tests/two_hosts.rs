//! The two sides started by hand, as on two hosts.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;

use kvgate_examples::handoff::failure::{Failure, FailureKind};
use kvgate_examples::handoff::plan::{self, SideMessage};
use kvgate_transfer::{Address, Agent, Deadline, PeerId};
use support::{Finished, Running};

const PROGRAM: &str = env!("CARGO_BIN_EXE_pd-handoff");

/// Starts decode, waits for its address, and returns both.
fn decode(args: &[&str]) -> (Running, String) {
    let mut decode = Running::start(PROGRAM, &[&["decode"], args].concat());
    let line = decode.wait_for_stdout("listening ");
    let address = line.trim_start_matches("listening ").to_owned();
    (decode, address)
}

fn prefill(address: &str, args: &[&str]) -> Finished {
    Running::start(
        PROGRAM,
        &[&["prefill", "--connect", address], args].concat(),
    )
    .finish()
}

#[test]
fn both_sides_end_with_the_verdict() {
    for transport in ["tcp", "shm", "cma", "auto"] {
        let (decode, address) = decode(&["--listen", "127.0.0.1:0", "--transport", transport]);
        let prefill = prefill(
            &address,
            &["--transport", transport, "--tokens", "131", "--steps", "3"],
        );
        let decode = decode.finish();
        assert_eq!(
            (prefill.code, decode.code),
            (Some(0), Some(0)),
            "{}\n{}",
            prefill.stderr,
            decode.stderr
        );
        assert_eq!(decode.last_line(), "verdict: bit-identical (960 logits)");
        assert_eq!(prefill.last_line(), decode.last_line());
        assert!(decode.stdout.starts_with("listening 127.0.0.1:"));
    }
}

#[test]
fn ipv6_and_host_names_work() {
    let (by_name, address) = decode(&["--listen", "localhost:0"]);
    assert_eq!(
        prefill(&address, &["--tokens", "4", "--steps", "1"]).code,
        Some(0)
    );
    assert_eq!(by_name.finish().code, Some(0));
    if TcpStream::connect("[::1]:1")
        .is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
    {
        let (ipv6, address) = decode(&["--listen", "[::1]:0"]);
        assert!(address.starts_with("[::1]:"), "{address}");
        assert_eq!(
            prefill(&address, &["--tokens", "4", "--steps", "1"]).code,
            Some(0)
        );
        assert_eq!(ipv6.finish().code, Some(0));
    }
}

#[test]
fn another_schema_ends_both_with_2_and_the_field() {
    let fields = [
        (["--index-k", "fp8"], "index_k.encoding"),
        (["--latent", "f32"], "encoding"),
        (["--seed", "2"], "weights"),
    ];
    for (option, field) in fields {
        let (decode, address) = decode(&["--listen", "127.0.0.1:0", "--json"]);
        let prefill = prefill(
            &address,
            &[&option[..], &["--tokens", "4", "--steps", "1", "--json"]].concat(),
        );
        let decode = decode.finish();
        assert_eq!(
            (prefill.code, decode.code),
            (Some(2), Some(2)),
            "{}\n{}",
            prefill.stderr,
            decode.stderr
        );
        for stderr in [&prefill.stderr, &decode.stderr] {
            assert!(stderr.contains(field), "{field}: {stderr}");
        }
        assert!(
            prefill.json()["error"]["field"]
                .as_str()
                .unwrap()
                .contains(field),
            "{}",
            prefill.stdout
        );
    }
}

#[test]
fn garbage_is_named_and_decode_goes_on_listening() {
    let (mut decode, address) = decode(&["--listen", "127.0.0.1:0", "--json"]);
    let mut stream = TcpStream::connect(&address).unwrap();
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n")
        .unwrap();
    let refused = decode.wait_for_stderr("pd-handoff: refused");
    assert!(refused.contains("127.0.0.1"), "{refused}");
    let mut rest = Vec::new();
    // The connection was closed or reset; either ends the read.
    let _ = stream.read_to_end(&mut rest);
    assert_eq!(
        prefill(&address, &["--tokens", "4", "--steps", "1"]).code,
        Some(0)
    );
    let decode = decode.finish();
    assert_eq!(decode.code, Some(0), "{}", decode.stderr);
    let json: serde_json::Value =
        serde_json::from_str(decode.stdout.lines().nth(1).unwrap()).unwrap();
    assert!(
        json["counters"]["refused_connections"].as_u64() >= Some(1),
        "{}",
        json["counters"]
    );
}

#[test]
fn nobody_comes_and_nobody_answers() {
    let (decode, _) = decode(&["--listen", "127.0.0.1:0", "--deadline-ms", "300"]);
    assert_eq!(decode.finish().code, Some(3));
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let alone = prefill(
        &port.to_string(),
        &["--tokens", "4", "--steps", "1", "--deadline-ms", "300"],
    );
    assert_eq!(alone.code, Some(3), "{}", alone.stderr);
}

#[test]
fn addresses_that_cannot_be_used() {
    let (_decode, address) = decode(&["--listen", "127.0.0.1:0"]);
    let in_use = Running::start(PROGRAM, &["decode", "--listen", &address]).finish();
    assert_eq!(in_use.code, Some(2), "{}", in_use.stderr);
    assert!(in_use.stderr.contains(&address), "{}", in_use.stderr);
    for args in [
        ["decode", "--listen", "0.0.0.0:0"],
        ["decode", "--listen", "nonsense"],
        ["prefill", "--connect", "192.0.2.1:7"],
    ] {
        let run = Running::start(PROGRAM, &args).finish();
        assert_eq!(run.code, Some(2), "{args:?}: {}", run.stderr);
    }
    let other_host = prefill("192.0.2.1:7", &["--transport", "shm"]);
    assert_eq!(other_host.code, Some(2), "{}", other_host.stderr);
}

#[test]
fn a_token_is_proven_and_a_wrong_one_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (right, wrong) = (dir.path().join("right"), dir.path().join("wrong"));
    std::fs::write(&right, "open sesame\n").unwrap();
    std::fs::write(&wrong, "open barley\n").unwrap();
    let (right, wrong) = (right.to_str().unwrap(), wrong.to_str().unwrap());
    let (mut decode, address) = decode(&["--listen", "127.0.0.1:0", "--auth-token-file", right]);
    let refused = prefill(
        &address,
        &["--auth-token-file", wrong, "--tokens", "4", "--steps", "1"],
    );
    assert!(matches!(refused.code, Some(2 | 3)), "{}", refused.stderr);
    decode.wait_for_stderr("pd-handoff: refused");
    let accepted = prefill(
        &address,
        &["--auth-token-file", right, "--tokens", "4", "--steps", "1"],
    );
    assert_eq!(accepted.code, Some(0), "{}", accepted.stderr);
    assert_eq!(decode.finish().code, Some(0));
}

/// An agent that decode accepts and that is not the prefill side.
fn stranger(address: &str) -> (Agent, PeerId) {
    let agent = Agent::builder("stranger").build().unwrap();
    let address = Address::Tcp(address.parse().unwrap());
    let peer = agent.connect(&address, Deadline::after_ms(20_000)).unwrap();
    (agent, peer)
}

/// Neither before the prefill side has come nor after it another connection can end the run, or say what came of it.
#[test]
fn what_another_connection_says_changes_nothing() {
    let args = ["--listen", "127.0.0.1:0", "--json", "--phase-markers"];
    let (mut decode, address) = decode(&[&args[..], &["--deadline-ms", "60000"]].concat());
    let (early, its_peer) = stranger(&address);
    early.send(its_peer, b"\x07no message of ours").unwrap();
    decode.wait_for_stderr("pd-handoff: refused a connection of \"stranger\"");
    let (late, peer) = stranger(&address);
    let args = ["prefill", "--connect", &address, "--tokens", "2049"];
    let prefill = Running::start(PROGRAM, &[&args[..], &["--steps", "16"]].concat());
    decode.wait_for_stderr("phase prefill");
    let failure = Failure::new(FailureKind::Internal, "forged");
    late.send(peer, plan::encode(&SideMessage::Failed(failure)))
        .unwrap();
    late.send(peer, b"").unwrap();
    let second = self::prefill(&address, &["--tokens", "4", "--index-k", "fp8", "--json"]);
    assert_eq!(second.code, Some(3), "{}", second.stdout);
    let said = second.json()["error"]["message"].to_string();
    assert!(said.contains("another prefill side"), "{said}");
    let prefill = prefill.finish();
    let decode = decode.finish();
    let codes = (prefill.code, decode.code);
    assert_eq!(
        codes,
        (Some(0), Some(0)),
        "{}\n{}",
        prefill.stderr,
        decode.stderr
    );
    let report = decode.stdout.lines().nth(1).unwrap();
    let report: serde_json::Value = serde_json::from_str(report).unwrap();
    assert_eq!(report["verdict"], "bit-identical");
    assert_eq!(report["counters"]["refused_connections"], 3, "{report}");
}
