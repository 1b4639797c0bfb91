//! The numbered examples run to their ends and show what they promise.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod support;

use support::Running;

fn says(program: &str, lines: &[&str]) {
    let run = Running::start(program, &[]).finish();
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    for line in lines {
        assert!(run.stdout.contains(line), "{line:?} in {}", run.stdout);
    }
}

#[test]
fn register_and_copy() {
    says(
        env!("CARGO_BIN_EXE_01-register-and-copy"),
        &[
            "NotArmed",
            "Pending",
            "Ready",
            "RemoteVisible",
            "slot 3 holds 5",
        ],
    );
}

#[test]
fn paged_pool() {
    says(
        env!("CARGO_BIN_EXE_02-paged-pool"),
        &[
            "index_k",
            "request 2: no room now",
            "had generation 0, now 1",
        ],
    );
}

#[test]
fn layer_gate() {
    says(
        env!("CARGO_BIN_EXE_03-layer-gate"),
        &["before the first byte", "layer 2 is ready"],
    );
}

#[test]
fn two_flights() {
    says(
        env!("CARGO_BIN_EXE_04-two-flights"),
        &["the batch waits", "the client went away", "new owner"],
    );
}
