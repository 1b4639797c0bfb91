//! `kvgate-status` beside an agent of another process.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use kvgate_transfer::{Agent, Deadline};
use serde_json::Value;

fn kvgate_status(args: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_kvgate-status");
    Command::new(program).args(args).output().unwrap()
}

#[test]
fn an_agent_is_read_in_words_and_as_json_until_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.sock");
    let socket = path.to_str().unwrap();
    let (a, b) = (
        Agent::builder("here").build().unwrap(),
        Agent::builder("there").build().unwrap(),
    );
    a.serve_status(&path).unwrap();
    Agent::connect_local(&a, &b).unwrap();

    let words = kvgate_status(&[socket]);
    assert!(words.status.success(), "{words:?}");
    let words = String::from_utf8(words.stdout).unwrap();
    assert!(words.starts_with("agent here "), "{words}");
    assert!(words.contains(" there "), "{words}");

    let json = kvgate_status(&[socket, "--json"]);
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["schema"], "kvgate.status/1");
    assert_eq!(json["status"]["peers"][0]["name"], "there");
    assert_eq!(json["status"]["transfers"], Value::Array(Vec::new()));

    let _ = a.shutdown(Deadline::after_ms(5_000));
    let gone = kvgate_status(&[socket, "--json"]);
    assert_eq!(gone.status.code(), Some(2), "{gone:?}");
    let json: Value = serde_json::from_slice(&gone.stdout).unwrap();
    assert_eq!(json["error"]["field"], "socket");
}

#[test]
fn both_sides_of_a_hand_off_can_be_asked_while_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_str().unwrap();
    let mut run = Command::new(env!("CARGO_BIN_EXE_pd-handoff"))
        .args(["--status-dir", directory, "--phase-markers"])
        .args(["--tokens", "1000", "--steps", "16"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(run.stderr.take().unwrap()).lines();
    let mut asked = 0;
    for line in lines.map_while(Result::ok) {
        // The prefill side is connected from here on, and the comparison comes later.
        if line == "phase transfer" && asked == 0 {
            for side in ["prefill", "decode"] {
                let socket = folder.path().join(format!("{side}.sock"));
                let json = kvgate_status(&[socket.to_str().unwrap(), "--json"]);
                let json: Value = serde_json::from_slice(&json.stdout).unwrap();
                assert_eq!(json["status"]["name"], side, "{json}");
                assert!(json["status"]["peers"][0]["name"].is_string(), "{json}");
                asked += 1;
            }
        }
    }
    assert!(run.wait().unwrap().success());
    assert_eq!(asked, 2);
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        0,
        "both are gone"
    );
}
