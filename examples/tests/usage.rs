//! Wrong command lines and bad input: one clear line, exit code 2, and one JSON object if asked for.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod support;

use support::pd_handoff;

/// Exit code 2, the field in the error object, no panic, and never the good word.
fn refused(args: &[&str], field: &str, value: &str) {
    let mut args = args.to_vec();
    args.push("--json");
    let run = pd_handoff(&args);
    assert_eq!(run.code, Some(2), "{args:?}: {}", run.stderr);
    let json = run.json();
    assert_eq!(json["verdict"], "invalid", "{args:?}");
    let error = &json["error"];
    assert!(
        error["field"]
            .as_str()
            .is_some_and(|text| text.contains(field)),
        "{args:?}: {error}"
    );
    assert!(
        error["value"]
            .as_str()
            .is_some_and(|text| text.contains(value)),
        "{args:?}: {error}"
    );
    assert!(
        !run.stderr.is_empty() && !run.stderr.contains("panicked"),
        "{args:?}: {}",
        run.stderr
    );
    assert!(!run.stdout.contains("bit-identical"), "{args:?}");
}

#[test]
fn options_that_do_not_parse() {
    refused(&["--transport", "pigeon"], "transport", "pigeon");
    refused(&["--index-k", "fp4"], "index-k", "fp4");
    refused(&["--tokens", "0"], "tokens", "0");
    refused(&["--cancel-share", "1.5"], "cancel-share", "1.5");
    refused(&["--pool-pages", "0"], "pool-pages", "0");
    refused(&["--chunk", "0"], "chunk", "0");
    refused(&["--turns", "0"], "turns", "0");
    refused(&["--host-pages", "tiny"], "host-pages", "tiny");
    refused(&["--sessions", "0"], "sessions", "0");
}

#[test]
fn numbers_that_the_model_does_not_allow() {
    refused(&["--tokens", "65473", "--steps", "64"], "tokens", "65473");
    refused(&["--steps", "65536"], "steps", "65536");
    refused(
        &["--tokens", "100", "--pool-pages", "4000000000"],
        "pool_pages",
        "4000000000",
    );
    refused(
        &["--tokens", "1000", "--pool-pages", "1"],
        "pool_pages",
        "1",
    );
}

#[test]
fn a_run_that_compares_nothing_proves_nothing() {
    let run = pd_handoff(&["--json", "--tokens", "5", "--steps", "0"]);
    assert_eq!(
        (run.code, run.json()["verdict"].as_str()),
        (Some(2), Some("invalid"))
    );
    let run = pd_handoff(&[
        "--json",
        "--tokens",
        "5",
        "--steps",
        "1",
        "--cancel-share",
        "1",
    ]);
    assert_eq!(
        (run.code, run.json()["verdict"].as_str()),
        (Some(2), Some("invalid"))
    );
}

#[test]
fn files_that_cannot_be_used() {
    refused(
        &["--prompt-file", "/no/such/file"],
        "prompt_file",
        "/no/such/file",
    );
    refused(&["--model", "/no/such/model"], "model", "/no/such/model");
    refused(
        &[
            "--tokens",
            "3",
            "--steps",
            "1",
            "--report",
            "/no/such/dir/r.html",
        ],
        "report",
        "/no/such/dir/r.html",
    );
    refused(
        &["--tokens", "3", "--steps", "1", "--report", "/dev/full"],
        "report",
        "/dev/full",
    );
    refused(
        &[
            "--tokens",
            "3",
            "--steps",
            "1",
            "--out",
            "/no/such/dir/o.safetensors",
        ],
        "out",
        "/no/such/dir",
    );
    refused(
        &["--requests", "2", "--out", "/tmp/never-written.safetensors"],
        "out",
        "",
    );
    let dir = tempfile::tempdir().unwrap();
    refused(
        &["--model", dir.path().to_str().unwrap()],
        "model",
        dir.path().to_str().unwrap(),
    );
}

#[test]
fn without_json_the_last_line_says_invalid() {
    let run = pd_handoff(&["--tokens", "65536"]);
    assert_eq!(run.code, Some(2));
    assert!(
        run.last_line().starts_with("verdict: INVALID"),
        "{}",
        run.stdout
    );
    assert!(run.stderr.contains("65536"), "{}", run.stderr);
}

#[test]
#[cfg(not(feature = "fault-injection"))]
fn faults_do_not_exist_in_this_build() {
    for args in [
        ["--fault", "drop-page"],
        ["--fault", "none"],
        ["--hold", "layer=3,ms=10"],
        ["--fault-seed", "1"],
    ] {
        let run = pd_handoff(&args);
        assert_eq!(run.code, Some(2), "{args:?}");
        assert!(run.stdout.is_empty(), "{args:?}: {}", run.stdout);
    }
    let help = pd_handoff(&["--help"]);
    assert!(
        help.code == Some(0) && !help.stdout.contains("--fault"),
        "{}",
        help.stdout
    );
}

#[test]
fn version_names_features_and_the_commit() {
    let run = pd_handoff(&["--version"]);
    assert_eq!(run.code, Some(0));
    assert!(
        run.stdout.contains(env!("CARGO_PKG_VERSION")),
        "{}",
        run.stdout
    );
    assert!(
        run.stdout.contains("features=") && run.stdout.contains("git="),
        "{}",
        run.stdout
    );
}
