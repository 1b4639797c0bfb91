//! Conversations over the tiers of the cache: hits in each of them, and the bits of a run without one.
#![allow(clippy::unwrap_used)]

mod support;

use support::pd_handoff;

/// The prefill side goes on behind its tiers, the decode side answers, and the next prompt has the answer; over `local`
/// both are threads of one process.
#[test]
fn turns_over_every_kind_of_transport_have_the_bits_of_a_cold_run() {
    for (transport, in_flight) in [("shm", "1"), ("tcp", "2"), ("local", "1")] {
        let args = ["--transport", transport, "--sessions", "3", "--turns", "2"];
        // The pages of the longest conversation, so that each takes those of another one.
        let tiers = ["--device-pages", "5", "--verify-cold", "--json"];
        let run = pd_handoff(&[&args[..], &tiers, &["--concurrency", in_flight]].concat());
        let json = run.json();
        assert_eq!(run.code, Some(0), "{transport}: {json}");
        assert_eq!(json["verdict"], "bit-identical", "{transport}: {json}");
        assert_eq!(json["schema"], "kvgate.pd-handoff/1");
        assert_eq!(json["transport"], transport);
        let pids = &json["pids"];
        let is_one = pids["prefill"] == pids["launcher"] && pids["decode"] == pids["launcher"];
        assert_eq!(is_one, transport == "local", "{json}");
        assert!(
            json["bytes"]["total"].as_u64() > Some(0),
            "{transport}: {json}"
        );
        assert_eq!(json["requests"]["finished"], 6, "{transport}: {json}");
        // 16 tokens of each of 6 turns, 320 logits each.
        let logits = &json["logits"];
        assert_eq!(
            (&logits["compared"], &logits["differing"]),
            (&30_720.into(), &0.into())
        );
        let hits = |tier: usize| json["tiers"][tier]["hits"].as_u64().unwrap();
        assert!(hits(0) > 0 && hits(1) > 0, "{transport}: {json}");
        assert_eq!(
            hits(0) + hits(1) + json["misses"].as_u64().unwrap(),
            6,
            "{transport}"
        );
        assert!(
            json["hits"]["host_tokens"].as_u64() > Some(0),
            "{transport}"
        );
        assert_eq!(json["loads"]["failed"], 0, "{transport}: {json}");
        assert_eq!(json["pages_conserved"], true, "{transport}: {json}");
        assert!(json["computed_tokens"].as_u64() < json["prompt_tokens"].as_u64());
        // Every turn but the first begins with pages that the decode side has, at least the common ones.
        let reuse = &json["decode_reuse"];
        assert_eq!(reuse["hits"], 5, "{transport}: {json}");
        assert!(
            reuse["hit_tokens"].as_u64() >= Some(5 * 512),
            "{transport}: {json}"
        );
        assert!(reuse["bytes"].as_u64() > Some(0), "{transport}: {json}");
        assert_eq!(
            json["canary"]["violations"].as_array().unwrap().len(),
            0,
            "{json}"
        );
    }
}

/// No option is dropped in silence, over no transport.
#[test]
fn what_cannot_be_asked_of_conversations_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.safetensors");
    for transport in ["shm", "tcp", "local"] {
        for (option, value, field) in [
            ("--cancel-share", "0.5", "cancel_share"),
            ("--device-pages", "2", "device_pages"),
            ("--tokens", "300", "tokens"),
            ("--steps", "8", "steps"),
            ("--requests", "3", "requests"),
            ("--pool-pages", "40", "pool_pages"),
            ("--out", out.to_str().unwrap(), "out"),
        ] {
            let args = ["--transport", transport, "--turns", "2", "--json"];
            let run = pd_handoff(&[&args[..], &[option, value]].concat());
            assert_eq!(run.code, Some(2), "{transport} {option}: {}", run.stdout);
            let error = &run.json()["error"];
            assert_eq!(error["field"], field, "{transport} {option}: {error}");
            assert_eq!(error["value"], value, "{transport} {option}: {error}");
        }
    }
    assert!(!out.exists());
    // Refused before 16 GB of prompts are made.
    for sessions in ["1", "1000"] {
        let args = ["--sessions", sessions, "--turns", "1000", "--json"];
        let run = pd_handoff(&[&args[..], &["--turn-tokens", "4096"]].concat());
        assert_eq!(run.code, Some(2), "{}", run.stdout);
        assert_eq!(run.json()["error"]["field"], "turns", "{}", run.stdout);
    }
    let run = pd_handoff(&["--turns", "2", "--json", "--salt", &"x".repeat(129)]);
    assert_eq!(run.code, Some(2), "{}", run.stdout);
    assert_eq!(run.json()["error"]["field"], "salt", "{}", run.stdout);
    let run = pd_handoff(&["--turns", "2", "--transport", "local", "--steps", "8"]);
    assert_eq!(run.code, Some(2), "{}", run.stdout);
    let line = run.last_line();
    assert!(line.starts_with("verdict: INVALID (--steps 8 "), "{line}");
}

/// One turn is one request: what it leaves is written as after any other, and compared without being asked.
#[test]
fn one_turn_in_one_process_is_compared_and_writes_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (out, page) = (path("out.safetensors"), path("report.html"));
    let args = ["--transport", "local", "--sessions", "1"];
    let files = ["--out", &out, "--report", &page, "--verify", "checksum"];
    let run = pd_handoff(&[&args[..], &files].concat());
    assert_eq!(run.code, Some(0), "{}\n{}", run.stdout, run.stderr);
    assert!(run.stderr.starts_with("pids launcher="), "{}", run.stderr);
    // 16 tokens of 320 logits.
    assert_eq!(run.last_line(), "verdict: bit-identical (5120 logits)");
    let bytes = std::fs::read(&out).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("decode_logits").unwrap().shape(), [16, 320]);
    assert!(std::fs::read_to_string(&page).unwrap().contains("</html>"));
}

#[test]
fn what_shows_nothing_about_a_tier_is_not_good() {
    for transport in ["local", "shm"] {
        let args = ["--transport", transport, "--sessions", "1", "--turns", "2"];
        let run = pd_handoff(&[&args[..], &["--verify-cold", "--json"]].concat());
        assert_eq!(run.code, Some(2), "{transport}: {}", run.stdout);
        assert_eq!(run.json()["error"]["field"], "host", "{transport}");
    }
}

/// A prompt of 1 to 255 tokens behind a page end, and one that ends with a page. `--turn-tokens 1..257
/// --sessions 256` has all of them.
#[test]
fn short_tails_behind_a_boundary_have_the_bits_of_a_cold_run() {
    let args = ["--sessions", "7", "--turn-tokens", "300,1,3,4,128,255,256"];
    let run = pd_handoff(&[&args[..], &["--verify-cold", "--json"]].concat());
    let json = run.json();
    assert_eq!(
        (run.code, &json["verdict"]),
        (Some(0), &"bit-identical".into()),
        "{json}"
    );
    // The first conversation computes the common part, all others go on behind it.
    assert_eq!(
        (&json["misses"], &json["tiers"][0]["hits"]),
        (&1.into(), &6.into()),
        "{json}"
    );
    assert_eq!(json["hits"]["device_tokens"], 6 * 512, "{json}");
}
