//! Tables from objects as `transfer-bench` prints them.

use serde_json::json;

use super::super::steps::STEPS;
use super::*;

fn measured(case: &str, result: Value) -> Measured {
    let step = STEPS.iter().find(|step| step.case == case).unwrap();
    let args = step.args.to_owned();
    Measured { step, args, result }
}

fn row(ratio: f64, bad_pages: u64) -> Value {
    json!({"rows": [{
        "page_bytes": 8448, "pages": 1024, "gbps_med": 4.0, "ratio_med": ratio, "bad_pages": bad_pages,
        "memcpy_gbps_med": 5.0, "limit": {"name": "memcpy", "gbps_med": 5.0, "ratio_med": ratio},
    }]})
}

fn text(measured: &[Measured], load_before: f64) -> String {
    let machine = Machine {
        processor: "P".to_owned(),
        cores: 2,
        memory_gib: 24,
        kernel: "6".to_owned(),
        load_before,
        load_after: 2.0,
        is_quick: false,
    };
    page(&machine, measured, &[])
}

#[test]
fn a_figure_below_its_limit_is_bold_and_names_its_command() {
    let case = "shm, write, 1 MiB and more";
    let good = text(&[measured(case, row(0.95, 0))], 0.1);
    assert!(
        good.contains("| 0.90 of memcpy | 0.95 (4.00 GB/s) | `transfer-bench --backend shm"),
        "{good}"
    );
    assert!(!good.contains("busy machine"), "{good}");
    let slow = text(&[measured(case, row(0.5, 0))], 3.0);
    assert!(slow.contains("| **0.50 (4.00 GB/s)** |"), "{slow}");
    assert!(slow.contains("busy machine"), "{slow}");
    let unknown = text(&[measured(case, row(0.95, 0))], f64::NAN);
    assert!(unknown.contains("busy machine"), "{unknown}");
    let wrong = text(&[measured(case, row(0.95, 2))], 0.1);
    assert!(wrong.contains("| **2 BAD PAGES** |"), "{wrong}");
    let error = json!({"verdict": "invalid", "error": {"message": "no library"}});
    let failed = text(&[measured(case, error)], 0.1);
    assert!(failed.contains("**failed: no library**"), "{failed}");
}

fn grid() -> Grid {
    let cell = |engine: &str, gbps: f64, cpu: f64| {
        json!({
            "engine": engine, "page_bytes": 8448, "pages": 1024, "gbps_med": gbps, "ratio_med": 0.5,
            "cpu_ns_kib": cpu, "p50_us": 2000.0, "p99_us": 3000.0, "bad_pages": 0,
        })
    };
    let cells = [
        cell("kvgate_shm", 6.0, 90.0),
        cell("nixl_default", 2.0, 400.0),
        cell("ucx_posix", 4.0, 200.0),
        cell("kvgate_tcp", 3.0, 400.0),
        cell("ucx_tcp", 1.0, 900.0),
    ];
    let absent = json!({"engine": "mooncake_tcp", "install": "setup.sh", "missing": "x"});
    let failed = json!({"engine": "ofi_shm", "asked": "WRITE 1", "message": "no answer"});
    let compare = json!({"cells": cells, "absent": [absent], "failed": [failed]});
    Grid {
        args: "--op write --compare".to_owned(),
        result: json!({ "compare": compare }),
    }
}

#[test]
fn the_grid_is_held_against_the_limits_that_name_a_peer() {
    let lines = beside_peers(&[grid()]);
    let all: Vec<_> = lines
        .iter()
        .map(|line| (line.limit.as_str(), line.measured.as_str(), line.is_met))
        .collect();
    assert_eq!(
        all,
        [
            ("4 × nixl_default", "3.00 ×", false),
            ("1.3 × ucx_posix", "1.50 ×", true),
            ("0.6 of ucx_posix", "0.45", true),
            ("1.5 × ucx_tcp", "3.00 ×", true),
        ]
    );
    let mut text = String::new();
    grid_tables(&mut text, &grid(), GRIDS[0]);
    for part in [
        "`transfer-bench --op write --compare`",
        "| B × pages | kvgate_shm | nixl_default | ucx_posix | kvgate_tcp | ucx_tcp |",
        "| 8448 × 1024 | 6.00 | 2.00 | 4.00 | 3.00 | 1.00 |",
        "Every page of the verified requests held what was sent",
        "Not installed: mooncake_tcp (setup.sh).",
        "ofi_shm on WRITE 1: no answer.",
        "![grid, write](performance/grid-write.svg)",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn a_figure_that_is_not_there_meets_nothing() {
    let found = text(&[measured("idle agent", json!({"idle": {}}))], 0.1);
    assert!(found.contains("**NaN core, NaN**"), "{found}");
}

#[test]
fn every_curve_and_limit_has_its_step() {
    for (case, _) in CURVES {
        assert!(STEPS.iter().any(|step| step.case == case), "{case}");
    }
    for case in ["tcp, write", "tcp, read"] {
        assert!(STEPS.iter().any(|step| step.case == case), "{case}");
    }
}
