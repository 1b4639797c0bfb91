//! A process of a run dies, stops or is interrupted: everything ends in time and nothing stays.

#![allow(clippy::unwrap_used, reason = "a test ends here")]

mod support;

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::{Finished, Running, pid_of, wait_until_gone};

const PROGRAM: &str = env!("CARGO_BIN_EXE_pd-handoff");
/// The rule for a killed process.
const END_LIMIT: Duration = Duration::from_secs(5);
/// Long enough to be hit in every phase; no run of this file is meant to finish.
const LONG: [&str; 5] = ["--json", "--phase-markers", "--steps", "4000", "--tokens"];

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Starts a long run, sends `sent` to `role` once `phase` is reached, and returns what was left.
fn hit(
    transport: &str,
    role: &str,
    phase: &str,
    sent: Signal,
    extra: &[&str],
) -> (Finished, Duration) {
    let args = [&LONG[..], &["300", "--transport", transport], extra].concat();
    let mut run = Running::start(PROGRAM, &args);
    let pids = run.wait_for_stderr("pids ");
    run.wait_for_stderr(&format!("phase {phase}"));
    signal(pid_of(&pids, role), sent);
    let sent_at = Instant::now();
    let finished = run.finish();
    let took = sent_at.elapsed();
    for role in ["launcher", "prefill", "decode", "reference"] {
        wait_until_gone(pid_of(&pids, role), Duration::from_secs(1));
    }
    (finished, took)
}

#[test]
fn a_killed_role_ends_the_run_with_3() {
    for transport in ["shm", "tcp", "cma"] {
        for (role, phase) in [
            ("prefill", "prefill"),
            ("decode", "decode"),
            ("reference", "transfer"),
            ("decode", "handshake"),
        ] {
            let (run, took) = hit(transport, role, phase, Signal::KILL, &[]);
            assert_eq!(
                run.code,
                Some(3),
                "{transport} {role} {phase}: {}",
                run.stderr
            );
            assert!(took < END_LIMIT, "{transport} {role} {phase}: {took:?}");
            assert_eq!(run.json()["error"]["kind"], "peer_lost", "{}", run.stdout);
            assert!(run.stderr.contains("killed by signal 9"), "{}", run.stderr);
            assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
        }
    }
}

/// In the middle of conversations: some turns are answered, prefixes are kept on both sides, others are on their way.
#[test]
fn a_role_killed_between_turns_ends_the_run_with_3() {
    for (transport, role) in [("shm", "prefill"), ("tcp", "decode"), ("shm", "reference")] {
        let sizes = ["--device-pages", "small", "--host-pages", "small"];
        let turns = ["--sessions", "20", "--turns", "4", "--transport", transport];
        let args = [&["--json", "--phase-markers"][..], &turns, &sizes].concat();
        let mut run = Running::start(PROGRAM, &args);
        let pids = run.wait_for_stderr("pids ");
        run.wait_for_stderr("phase decode");
        signal(pid_of(&pids, role), Signal::KILL);
        let sent_at = Instant::now();
        let finished = run.finish();
        let took = sent_at.elapsed();
        for role in ["launcher", "prefill", "decode", "reference"] {
            wait_until_gone(pid_of(&pids, role), Duration::from_secs(1));
        }
        assert_eq!(
            finished.code,
            Some(3),
            "{transport} {role}: {}",
            finished.stderr
        );
        assert!(took < END_LIMIT, "{transport} {role}: {took:?}");
        assert_eq!(
            finished.json()["error"]["kind"],
            "peer_lost",
            "{}",
            finished.stdout
        );
        assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
    }
}

#[test]
fn a_killed_launcher_takes_everything_with_it() {
    for transport in ["shm", "tcp", "cma"] {
        let (run, took) = hit(transport, "launcher", "decode", Signal::KILL, &[]);
        assert_eq!(run.code, None);
        assert!(took < END_LIMIT, "{transport}: {took:?}");
    }
}

#[test]
fn a_stopped_role_runs_into_the_deadline() {
    for role in ["prefill", "decode", "reference"] {
        let phase = if role == "prefill" {
            "prefill"
        } else {
            "decode"
        };
        let (run, took) = hit("shm", role, phase, Signal::STOP, &["--deadline-ms", "1500"]);
        assert_eq!(run.code, Some(3), "{role}: {}", run.stderr);
        assert!(
            took < Duration::from_millis(1500) + END_LIMIT,
            "{role}: {took:?}"
        );
        assert_eq!(
            run.json()["error"]["kind"],
            "deadline_exceeded",
            "{role}: {}",
            run.stdout
        );
    }
}

#[test]
fn signals_to_the_launcher_clean_up() {
    for (sent, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let (run, took) = hit("tcp", "launcher", "decode", sent, &[]);
        assert_eq!(run.code, Some(code), "{}", run.stderr);
        assert!(took < END_LIMIT, "{took:?}");
        assert_eq!(run.json()["verdict"], "invalid");
    }
}

#[test]
fn threads_of_one_process_end_on_a_signal_too() {
    let (run, _) = hit("local", "launcher", "decode", Signal::INT, &[]);
    assert_eq!(run.code, Some(130), "{}", run.stderr);
}

#[test]
fn conversations_in_one_process_end_on_a_signal_too() {
    for (sent, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let turns = ["--transport", "local", "--sessions", "20", "--turns", "4"];
        let args = [&["--json", "--phase-markers"][..], &turns].concat();
        let mut run = Running::start(PROGRAM, &args);
        let pids = run.wait_for_stderr("pids ");
        run.wait_for_stderr("phase decode");
        signal(pid_of(&pids, "launcher"), sent);
        let sent_at = Instant::now();
        let finished = run.finish();
        assert_eq!(finished.code, Some(code), "{}", finished.stderr);
        assert!(sent_at.elapsed() < END_LIMIT, "{:?}", sent_at.elapsed());
        assert_eq!(finished.json()["verdict"], "invalid");
        assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
    }
}
