//! Gates G1 to G5 and G10 on the reference fixtures.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use kvgate_model::check::{CheckReport, check_dir};

fn run(name: &str) -> CheckReport {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name);
    let report = check_dir(&dir).unwrap();
    for row in &report.rows {
        println!(
            "{} {:40} {:28} {:9.2e} {:9.1e} {}",
            row.gate, row.tensor, row.how, row.max_error, row.bound, row.ok
        );
    }
    report
}

fn assert_all(name: &str, expected_rows: &[(&str, usize)]) {
    let report = run(name);
    for row in &report.rows {
        assert!(row.ok, "{name} {row:?}");
    }
    for (gate, count) in expected_rows {
        let got = report.rows.iter().filter(|r| r.gate == *gate).count();
        assert_eq!(got, *count, "{name} {gate}");
    }
}

#[test]
fn basic() {
    assert_all(
        "basic",
        &[
            ("G1", 2),
            ("G2", 8),
            ("G3", 2),
            ("G4a", 34),
            ("G4b", 2),
            ("G5", 59),
        ],
    );
}

#[test]
fn realhead() {
    assert_all(
        "realhead",
        &[
            ("G1", 2),
            ("G2", 8),
            ("G3", 2),
            ("G4a", 19),
            ("G4b", 2),
            ("G5", 35),
        ],
    );
}

#[test]
fn primitives() {
    assert_all("primitives", &[("G10", 25)]);
}
