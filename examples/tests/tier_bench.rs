//! `tier-bench` as a user runs it.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};

use serde_json::Value;

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tier-bench"))
        .args(args)
        .arg("--json")
        .output()
        .unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("one JSON object on stdout")
}

#[test]
fn every_row_has_its_bare_loop_and_no_bad_block() {
    let small = ["--block-bytes", "16384", "--working-set", "1048576"];
    let output = bench(
        &[
            &small[..],
            &["--duration", "0.05", "--writers", "2", "--durable"],
        ]
        .concat(),
    );
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = json(&output);
    assert_eq!(report["schema"], "kvgate.tier-bench/1");
    let rows = report["rows"].as_array().unwrap();
    let ops: Vec<&str> = rows.iter().map(|row| row["op"].as_str().unwrap()).collect();
    let expected = [
        "put",
        "get",
        "put",
        "get",
        "lookup",
        "recover, not closed",
        "recover, closed",
    ];
    assert_eq!(ops, expected);
    for row in rows {
        assert_eq!(row["bad_blocks"], 0, "{row}");
        assert!(row["gbps_med"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["baseline"]["gbps_med"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert_eq!(
        (&rows[2]["durable"], &rows[2]["writers"]),
        (&true.into(), &2.into())
    );
}

#[test]
fn numbers_that_cannot_be_used_are_named() {
    for (args, field) in [
        (["--block-bytes", "1000"], "block-bytes"),
        (["--working-set", "10"], "working-set"),
        (["--writers", "0"], "writers"),
    ] {
        let output = bench(&args);
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(json(&output)["error"]["field"], field);
    }
    assert_eq!(
        bench(&["--op", "recover", "--tier", "memory"])
            .status
            .code(),
        Some(2)
    );
}
