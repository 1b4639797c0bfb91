//! The bug, on purpose: every kind is found by two detectors that know nothing of each other.
#![allow(clippy::unwrap_used, unreachable_pub)]
#![cfg(feature = "fault-injection")]

mod support;

use serde_json::Value;
use support::{Running, pd_handoff};

const SHORT: [&str; 5] = ["--json", "--tokens", "300", "--steps", "6"];
const CORRUPTING: [&str; 8] = [
    "ungated-index-k",
    "late-write",
    "drop-page",
    "swap-pages",
    "half-page",
    "wrong-stride",
    "stale-epoch",
    "early-done",
];

fn run(transport: &str, fault: &str, extra: &[&str]) -> (Option<i32>, Value, String) {
    let args = [
        &SHORT[..],
        &["--transport", transport, "--fault", fault],
        extra,
    ]
    .concat();
    let run = pd_handoff(&args);
    let json = run.json();
    (
        run.code,
        json,
        format!("{args:?}: {}\n{}", run.stdout, run.stderr),
    )
}

#[test]
fn a_build_with_faults_is_clean_until_asked() {
    let (code, json, text) = run("shm", "none", &[]);
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(
        (
            &json["fault"],
            json["canary"]["violations"].as_array().unwrap().len()
        ),
        (&Value::Null, 0)
    );
}

#[test]
fn every_corrupting_kind_is_found_by_the_canary_at_its_place() {
    for transport in ["shm", "tcp"] {
        for kind in CORRUPTING {
            let (code, json, text) = run(transport, kind, &[]);
            assert_eq!(code, Some(1), "{text}");
            assert_eq!(json["verdict"], "mismatch", "{text}");
            assert_eq!(json["fault"]["kind"], kind, "{text}");
            let violations = json["canary"]["violations"].as_array().unwrap();
            let first = violations
                .first()
                .unwrap_or_else(|| panic!("no violation: {text}"));
            for key in ["component", "layer", "request"] {
                assert_eq!(first[key], json["fault"][key], "{key}: {text}");
            }
            assert!(
                violations
                    .iter()
                    .any(|violation| violation["page"] == json["fault"]["page"]),
                "{text}"
            );
        }
    }
}

#[test]
fn every_corrupting_kind_is_found_by_the_bits_alone() {
    for transport in ["shm", "tcp"] {
        for kind in CORRUPTING {
            let (code, json, text) = run(transport, kind, &["--verify", "off"]);
            assert_eq!(code, Some(1), "{text}");
            assert_eq!(json["verdict"], "mismatch", "{text}");
            assert_eq!(json["canary"]["checked"], 0, "{text}");
        }
    }
}

#[test]
fn with_the_checks_on_nothing_happens_and_is_counted() {
    for transport in ["shm", "tcp"] {
        for (kind, counter) in [
            ("late-write-checked", "quarantined_pages"),
            ("stale-epoch-checked", "stale"),
            ("early-done-checked", "unknown"),
            ("duplicate", "duplicate"),
        ] {
            let (code, json, text) = run(transport, kind, &[]);
            assert_eq!(code, Some(0), "{text}");
            assert_eq!(json["verdict"], "bit-identical", "{text}");
            assert!(
                json["counters"][counter].as_u64() >= Some(1),
                "{counter}: {text}"
            );
            assert_eq!(
                json["canary"]["violations"].as_array().map(Vec::len),
                Some(0),
                "{text}"
            );
        }
    }
}

#[test]
fn every_component_can_be_chosen() {
    for (component, layer) in [
        ("swa_latent", 0),
        ("c4_latent", 1),
        ("index_k", 5),
        ("c128_latent", 2),
        ("c4_state", 3),
        ("index_state", 1),
        ("c128_state", 4),
    ] {
        let fault = format!("drop-page,component={component},layer={layer},page=0");
        let (code, json, text) = run("shm", &fault, &[]);
        assert_eq!(code, Some(1), "{text}");
        assert_eq!(json["fault"]["component"], component, "{text}");
        assert_eq!(json["fault"]["layer"], layer, "{text}");
        let first = &json["canary"]["violations"][0];
        assert_eq!(
            (&first["component"], &first["layer"]),
            (&json["fault"]["component"], &json["fault"]["layer"])
        );
    }
}

#[test]
fn every_seed_finds_a_place_that_is_found_again() {
    for seed in ["1", "2", "3", "4", "5", "6"] {
        let (code, json, text) = run("shm", "drop-page", &["--fault-seed", seed]);
        assert_eq!(code, Some(1), "{text}");
        let again = run("shm", "drop-page", &["--fault-seed", seed]).1;
        for key in ["component", "layer", "request"] {
            assert_eq!(json["fault"][key], again["fault"][key], "{text}");
        }
    }
}

#[test]
fn a_place_that_does_not_exist_is_refused() {
    for fault in [
        "drop-page,component=index_k,layer=0",
        "drop-page,component=index_k,layer=2",
        "drop-page,component=nothing",
        "drop-page,layer=6",
        "drop-page,component=index_k,layer=1,page=2",
        "drop-page,request=1",
        "ungated-index-k,component=c4_latent",
        "swap-pages,component=c128_state",
    ] {
        let (code, json, text) = run("shm", fault, &[]);
        assert_eq!(
            (code, json["verdict"].as_str()),
            (Some(2), Some("invalid")),
            "{text}"
        );
    }
}

#[test]
fn a_fault_without_a_live_row_proves_nothing() {
    let args = [
        "--json",
        "--tokens",
        "3",
        "--steps",
        "2",
        "--fault",
        "ungated-index-k",
    ];
    let run = pd_handoff(&args);
    assert_eq!(
        (run.code, run.json()["verdict"].as_str()),
        (Some(2), Some("invalid")),
        "{}",
        run.stderr
    );
}

#[test]
fn a_held_layer_is_waited_for_and_nothing_is_lost() {
    for transport in ["shm", "tcp"] {
        let (code, json, text) = run(transport, "none", &["--hold", "layer=3,ms=2000"]);
        assert_eq!(code, Some(0), "{text}");
        assert!(
            json["layers"][3]["gate_wait_us"].as_u64() >= Some(900 * 2_000),
            "{text}"
        );
    }
}

/// A conversation needs its answers: nothing is planted, and nobody is told that something was found to be good.
#[test]
fn a_fault_in_conversations_is_refused() {
    for transport in ["shm", "tcp", "local"] {
        let args = ["--json", "--sessions", "1", "--transport", transport];
        let run = pd_handoff(&[&args[..], &["--fault", "drop-page"]].concat());
        assert_eq!(run.code, Some(2), "{transport}: {}", run.stdout);
        let json = run.json();
        assert_eq!(json["verdict"], "invalid", "{transport}: {json}");
        assert_eq!(json["error"]["field"], "fault", "{transport}: {json}");
        assert_eq!(json["error"]["value"], "drop-page", "{transport}: {json}");
    }
}

/// The layer behind it is sent without it, so the held one lands last by nearly all of the delay.
#[test]
fn a_layer_of_a_turn_can_be_held() {
    let args = ["--json", "--sessions", "1", "--transport", "local"];
    let run = pd_handoff(&[&args[..], &["--hold", "layer=3,ms=2000"]].concat());
    let json = run.json();
    assert_eq!(run.code, Some(0), "{json}");
    let landed_us = |layer: usize| json["layers"][layer]["landed_us"].as_u64().unwrap();
    assert!(landed_us(3) > landed_us(4) + 1_000_000, "{json}");
}

#[test]
fn a_damaged_page_is_found_by_the_benchmark() {
    for op in ["read", "write"] {
        for check in ["full", "sample"] {
            let args = [
                "--json",
                "--op",
                op,
                "--check",
                check,
                "--pages",
                "8",
                "--pool-mib",
                "2",
                "--duration",
                "0.01",
                "--damage-page",
            ];
            let run = Running::start(env!("CARGO_BIN_EXE_transfer-bench"), &args).finish();
            assert_eq!(run.code, Some(1), "{}", run.stderr);
            let object = run.json();
            assert_eq!(object["verdict"], "bad-pages");
            let row = &object["rows"][0];
            // One page of each request that was compared, and no other.
            let checked = row["checked_pages"].as_u64().unwrap();
            assert_eq!(row["bad_pages"].as_u64(), Some(checked / 8), "{row}");
        }
    }
}
