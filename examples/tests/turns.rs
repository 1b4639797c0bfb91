//! Conversations over the tiers of the cache: hits in each of them, and the bits of a run without one.
#![allow(clippy::unwrap_used)]

mod support;

use support::pd_handoff;

#[test]
fn turns_over_a_small_device_pool_have_the_bits_of_a_cold_run() {
    let args = ["--transport", "local", "--sessions", "3", "--turns", "2"];
    let tiers = ["--device-pages", "6", "--verify-cold", "--json"];
    let run = pd_handoff(&[&args[..], &tiers].concat());
    let json = run.json();
    assert_eq!(run.code, Some(0), "{json}");
    assert_eq!(json["verdict"], "bit-identical", "{json}");
    assert_eq!(
        (&json["compared_turns"], &json["differing_turns"]),
        (&6.into(), &0.into())
    );
    let tiers = json["tiers"].as_array().unwrap();
    let hits = |tier: usize| tiers[tier]["hits"].as_u64().unwrap();
    assert_eq!(
        (tiers[0]["tier"].as_str(), tiers[1]["tier"].as_str()),
        (Some("device"), Some("host"))
    );
    assert!(hits(0) > 0 && hits(1) > 0, "{json}");
    assert_eq!(hits(0) + hits(1) + json["misses"].as_u64().unwrap(), 6);
    assert_eq!(json["loads"]["failed"], 0, "{json}");
    assert!(json["computed_tokens"].as_u64() < json["prompt_tokens"].as_u64());
}

/// The prefill process goes on behind its tiers, the decode process answers, and the next prompt has the answer.
#[test]
fn turns_between_two_processes_have_the_bits_of_a_cold_run() {
    for (transport, in_flight) in [("shm", "1"), ("tcp", "2")] {
        let args = ["--transport", transport, "--sessions", "3", "--turns", "2"];
        // The pages of the longest conversation, so that each takes those of another one.
        let tiers = ["--device-pages", "5", "--verify-cold", "--json"];
        let run = pd_handoff(&[&args[..], &tiers, &["--concurrency", in_flight]].concat());
        let json = run.json();
        assert_eq!(run.code, Some(0), "{transport}: {json}");
        assert_eq!(json["verdict"], "bit-identical", "{transport}: {json}");
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

#[test]
fn what_cannot_be_asked_of_conversations_is_refused() {
    let small = ["--sessions", "1", "--turns", "2", "--json"];
    for (extra, field) in [
        (["--cancel-share", "0.5"], "cancel_share"),
        (["--device-pages", "2"], "device_pages"),
    ] {
        let run = pd_handoff(&[&small[..], &extra].concat());
        assert_eq!(run.code, Some(2), "{extra:?}: {}", run.stdout);
        assert_eq!(run.json()["error"]["field"], field, "{}", run.stdout);
    }
    let run = pd_handoff(&["--sessions", "1", "--turns", "1000", "--json"]);
    assert_eq!(run.code, Some(2), "{}", run.stdout);
    assert_eq!(run.json()["error"]["field"], "turns", "{}", run.stdout);
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
