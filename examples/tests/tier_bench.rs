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

const SMALL: [&str; 6] = [
    "--block-bytes",
    "16384",
    "--working-set",
    "1048576",
    "--duration",
    "0.05",
];

fn rows_of(args: &[&str]) -> Vec<Value> {
    let output = bench(&[&SMALL[..], args].concat());
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = json(&output);
    assert_eq!(report["schema"], "kvgate.tier-bench/1");
    let rows = report["rows"].as_array().unwrap();
    for row in rows {
        assert_eq!(row["bad_blocks"], 0, "{row}");
        assert!(row["gbps_med"].as_f64().unwrap() > 0.0, "{row}");
    }
    rows.clone()
}

#[test]
fn every_row_has_its_bare_loop_and_no_bad_block() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("rows.svg");
    let args = ["--writers", "2", "--durable", "--dir"];
    let places = [folder.path().to_str().unwrap(), "--plot"];
    let rows = rows_of(&[&args[..], &places, &[picture.to_str().unwrap()]].concat());
    let ops: Vec<&str> = rows.iter().map(|row| row["op"].as_str().unwrap()).collect();
    let expected = [
        "put", "get", "put", "get", "get", "loadback", "loadback", "prefetch", "lookup", "lookup",
        "lookup", "lookup", "lookup", "recover", "recover", "recover",
    ];
    assert_eq!(ops, expected);
    for row in &rows {
        assert!(row["baseline"]["gbps_med"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["ratio_med"].as_f64().unwrap() > 0.0, "{row}");
    }
    let durable = (&rows[2]["durable"], &rows[2]["writers"]);
    assert_eq!(durable, (&true.into(), &2.into()));
    let verified: Vec<_> = rows[5..7].iter().map(|row| &row["verify"]).collect();
    assert_eq!(verified, ["on", "off"]);
    for row in &rows[5..7] {
        let share = row["first_layer_share"].as_f64().unwrap();
        assert!(share > 0.0 && share <= 1.0, "{row}");
    }
    assert_eq!(rows[8]["tokens"], 1_048_576);
    let drawn = std::fs::read_to_string(picture).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.contains("lookup"));
    let left = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, 1, "only the picture is left");
}

#[test]
fn a_resumed_run_gives_the_bits_of_a_computed_one() {
    let rows = rows_of(&["--op", "resume", "--tokens", "512"]);
    let of = |row: &Value| (row["case"].to_string(), row["tokens"].as_u64().unwrap());
    let (computed, resumed) = ("\"computed\"", "\"resumed from the host tier\"");
    let expected = [
        (computed.to_owned(), 256),
        (resumed.to_owned(), 256),
        (computed.to_owned(), 512),
        (resumed.to_owned(), 512),
    ];
    assert_eq!(rows.iter().map(of).collect::<Vec<_>>(), expected);
}

#[test]
fn a_trace_is_replayed_under_both_policies() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    let round = |round: u32| {
        let first = 1000 + 60 * round;
        format!("0-9 # shared\n{first}-{}\n", first + 59)
    };
    std::fs::write(&trace, (0..100).map(round).collect::<String>()).unwrap();
    let args = ["--trace", trace.to_str().unwrap()];
    let output = bench(&[&SMALL[..], &args].concat());
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = json(&output);
    let replays = report["trace"].as_array().unwrap();
    let of = |at: usize, key: &str| replays[at][key].as_f64().unwrap();
    assert_eq!(
        (&replays[0]["policy"], &replays[1]["policy"]),
        (&"lru".into(), &"s3-fifo".into())
    );
    assert_eq!((of(0, "asked"), of(0, "capacity_blocks")), (7_000.0, 64.0));
    assert!(
        of(1, "scan_resistance") > 0.9 && of(0, "scan_resistance") < 0.1,
        "{report}"
    );
    std::fs::write(&trace, "1 2\nx\n").unwrap();
    let output = bench(&args);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(json(&output)["error"]["field"], "trace");
}

#[test]
fn what_is_not_installed_is_named_beside_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_str().unwrap();
    let args = ["--compare", "--compare-bytes", "16384", "--peers", place];
    let output = bench(&[&SMALL[..], &args].concat());
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = json(&output);
    let absent = report["absent"].as_array().unwrap();
    assert!(absent.len() >= 5, "{absent:?}");
    for one in absent {
        assert!(
            one["message"].as_str().unwrap().contains("setup.sh"),
            "{one}"
        );
    }
    let engines: Vec<_> = report["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| &row["engine"])
        .collect();
    for engine in [
        "kvgate_memory",
        "kvgate_file",
        "kvgate_file_durable",
        "files",
        "files_fsync",
    ] {
        assert!(engines.iter().any(|name| **name == engine), "{engines:?}");
    }
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
        bench(&["--op", "recover", "--tier", "host"]).status.code(),
        Some(2)
    );
}
