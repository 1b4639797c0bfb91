//! Trials against stand-ins for the real program: one that behaves, some that do not.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::super::setting::Setting;
use super::super::{Blow, Phase, Transport, watch};
use super::{Aim, Ended, Hit, run};

const PHASES: &str =
    "for name in handshake prefill transfer decode comparison; do echo phase $name >&2; done";

fn program(folder: &Path, body: &str) -> PathBuf {
    let path = folder.join("stand-in");
    fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Strikes process number `victim` of the stand-in's `pids` line.
fn strike(body: &str, victim: u64) -> Hit {
    watch::adopt_orphans().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = program(folder.path(), body);
    let aim = Aim {
        phase: Phase::Comparison,
        delay: Duration::ZERO,
        victim,
        blow: Blow::Kill,
    };
    match run(&path, &Setting::of(Transport::Shm), aim).unwrap() {
        Ended::Hit(hit) => hit,
        Ended::Missed => panic!("the stand-in had ended already"),
    }
}

#[test]
fn a_launcher_that_notices_is_no_surprise() {
    let body =
        format!("sleep 61 & p=$!\necho pids launcher=$$ prefill=$p >&2\n{PHASES}\nwait $p\nexit 3");
    let hit = strike(&body, 1);
    assert_eq!((hit.victim, hit.launcher_code), ("prefill", Some(3)));
    assert_eq!(hit.surprises, [""; 0]);
}

#[test]
fn an_orphan_a_file_and_a_panic_are_surprises() {
    let body = format!(
        "touch left.sock\nsleep 61 & p=$!\necho pids launcher=$$ prefill=$p >&2\n\
         echo \"thread 'main' panicked at here\" >&2\n{PHASES}\nwait $p"
    );
    let hit = strike(&body, 0);
    assert_eq!(hit.victim, "launcher");
    for what in [
        "prefill still runs",
        "1 processes left",
        "left behind: left.sock",
        "a panic",
    ] {
        let told = hit
            .surprises
            .iter()
            .any(|surprise| surprise.starts_with(what));
        assert!(told, "{what}: {:?}", hit.surprises);
    }
}

#[test]
fn a_verdict_after_a_death_is_a_surprise() {
    let body = format!(
        "sleep 61 & p=$!\necho pids launcher=$$ prefill=$p >&2\n{PHASES}\nwait $p\n\
         echo 'verdict: MISMATCH'\nexit 1"
    );
    let hit = strike(&body, 1);
    assert_eq!(
        hit.surprises,
        ["a mismatch verdict", "the launcher ended with 1"]
    );
}
