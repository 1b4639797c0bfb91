//! `transfer-bench` as a user runs it: keys, exit codes, no statement about time.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{Finished, Running};

const ROW_KEYS: [&str; 21] = [
    "backend",
    "op",
    "page_bytes",
    "pages",
    "order",
    "concurrency",
    "check",
    "gbps_med",
    "gbps_p90",
    "descs_s",
    "p50_us",
    "p99_us",
    "cpu_ns_kib",
    "cpu_init",
    "cpu_target",
    "memcpy_gbps_med",
    "ratio_med",
    "requests",
    "slices",
    "bad_pages",
    "load",
];

fn bench(args: &[&str]) -> Finished {
    Running::start(env!("CARGO_BIN_EXE_transfer-bench"), args).finish()
}

/// A short run with small pools.
fn brief(args: &[&str]) -> Finished {
    bench(&[args, &["--duration", "0.02", "--pool-mib", "2", "--json"]].concat())
}

fn row(finished: &Finished) -> Value {
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    let object = finished.json();
    assert_eq!(object["schema"], "kvgate.transfer-bench/1");
    let rows = object["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "{object}");
    rows[0].clone()
}

#[test]
fn every_path_fills_every_key() {
    for backend in ["local", "shm", "tcp"] {
        for check in ["full", "sample"] {
            let row = row(&brief(&[
                "throughput",
                "--backend",
                backend,
                "--pages",
                "64",
                "--check",
                check,
            ]));
            for key in ROW_KEYS {
                assert!(!row[key].is_null(), "{backend}: {key} in {row}");
            }
            for key in ["name", "gbps_med", "ratio_med"] {
                assert!(
                    !row["limit"][key].is_null(),
                    "{backend}: limit.{key} in {row}"
                );
            }
            assert_eq!(
                (&row["backend"], &row["check"]),
                (&Value::from(backend), &Value::from(check))
            );
            assert_eq!(
                (row["pages"].as_u64(), row["page_bytes"].as_u64()),
                (Some(64), Some(8448))
            );
            assert_eq!(row["bad_pages"], 0);
            assert!(row["checked_pages"].as_u64() > Some(64), "{row}");
            assert!(row["slices"].as_u64() >= Some(3) && row["requests"].as_u64() >= Some(3));
        }
    }
}

#[test]
fn requests_in_flight_odd_sizes_and_orders() {
    let load = [
        "--page-bytes",
        "577",
        "--pages",
        "9",
        "--concurrency",
        "8",
        "--check",
        "sample",
    ];
    let random = row(&brief(&load));
    assert_eq!(
        (&random["backend"], &random["op"]),
        (&Value::from("shm"), &Value::from("write"))
    );
    assert_eq!(
        (&random["concurrency"], &random["bad_pages"]),
        (&Value::from(8), &Value::from(0))
    );
    let ordered = row(&brief(&[
        "--order",
        "sequential",
        "--page-bytes",
        "4096",
        "--pages",
        "7",
    ]));
    assert_eq!(ordered["bad_pages"], 0);
    let unchecked = row(&brief(&["--check", "off", "--pages", "1"]));
    assert_eq!(unchecked["checked_pages"], 0);
}

#[test]
fn the_cache_of_a_model_is_a_load_too() {
    let load = ["--model", "flash", "--tokens", "300", "--index-k", "fp8"];
    let row = row(&brief(&load));
    assert_eq!(row["model"]["name"], "flash");
    assert_eq!(row["bad_pages"], 0);
    // Every component of every layer, two pages of tokens.
    assert!(row["pages"].as_u64() > Some(200), "{row}");
}

#[test]
fn wrong_usage_is_exit_2_and_one_object() {
    let cases: [(&[&str], &str); 5] = [
        (&["--backend", "carrier-pigeon"], "--backend"),
        (&["--pages", "0"], "--pages"),
        (&["--duration", "0"], "--duration"),
        (&["--backend", "ucx"], "backend"),
        (&["--backend", "libfabric"], "backend"),
    ];
    for (args, field) in cases {
        let finished = bench(&[args, &["--json"]].concat());
        assert_eq!(finished.code, Some(2), "{args:?}: {}", finished.stderr);
        let object = finished.json();
        assert_eq!(object["verdict"], "invalid", "{object}");
        let named = object["error"]["field"].as_str().unwrap();
        assert!(named.contains(field), "{args:?}: {object}");
    }
}

#[test]
fn more_memory_than_there_is_is_refused_before_anything_moves() {
    let load = [
        "--page-bytes",
        "1073741824",
        "--pages",
        "16777216",
        "--json",
    ];
    let finished = bench(&load);
    assert_eq!(finished.code, Some(2), "{}", finished.stderr);
    assert_eq!(finished.json()["error"]["kind"], "out_of_memory");
}
