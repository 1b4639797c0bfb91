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

#[test]
fn what_shows_nothing_about_a_tier_is_not_good() {
    let args = ["--transport", "local", "--sessions", "1", "--turns", "2"];
    let run = pd_handoff(&[&args[..], &["--verify-cold", "--json"]].concat());
    assert_eq!(run.code, Some(2), "{}", run.stdout);
    assert_eq!(run.json()["error"]["field"], "host");
}
