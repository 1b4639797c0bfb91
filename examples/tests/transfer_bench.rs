//! `transfer-bench` as a user runs it: keys, exit codes, no statement about time.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
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

const XB_KEYS: [&str; 20] = [
    "size",
    "gbps_med",
    "gbps_p90",
    "memcpy_med",
    "memcpy_p90",
    "ratio_med",
    "ratio_p90",
    "descs_s",
    "p50_us",
    "p99_us",
    "min_us",
    "reqs",
    "rounds",
    "cpu_init",
    "cpu_target",
    "cpu_ns_kib",
    "memcpy_cpu_ns_kib",
    "bad_first",
    "bad_last",
    "setup_us",
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

/// Those that are usable here. A kernel may forbid copies between processes, and a library may be absent or not
/// in this build; nothing else may be missing.
fn every_path() -> Vec<&'static str> {
    let object = bench(&["--list-backends", "--json"]).json();
    let is_usable = |name: &str| {
        let all = object["backends"].as_array().unwrap();
        all.iter()
            .any(|one| one["name"] == name && one["usable"] == true)
    };
    let usable: Vec<_> = ["local", "shm", "tcp", "cma", "ucx", "libfabric"]
        .into_iter()
        .filter(|name| is_usable(name))
        .collect();
    let always = ["local", "shm", "tcp"];
    assert!(usable.starts_with(&always), "{object}");
    usable
}

/// The bare loop of a path.
fn limit_of(backend: &str, op: &str) -> &'static str {
    match (backend, op) {
        ("tcp", _) => "writev/readv with acks",
        ("cma", "write") => "process_vm_writev",
        ("cma", _) => "process_vm_readv",
        ("ucx", "write") => "ucp_put_nbx and ucp_ep_flush_nbx",
        ("ucx", _) => "ucp_get_nbx",
        ("libfabric", "write") => "fi_writemsg, delivery complete",
        ("libfabric", _) => "fi_readmsg",
        _ => "memcpy",
    }
}

#[test]
fn every_path_fills_every_key() {
    for backend in every_path() {
        for (check, op) in [("full", "write"), ("sample", "read"), ("sample", "write")] {
            let row = row(&brief(&[
                "throughput",
                "--backend",
                backend,
                "--pages",
                "64",
                "--check",
                check,
                "--op",
                op,
            ]));
            assert_eq!(row["op"], op);
            for key in ROW_KEYS {
                assert!(!row[key].is_null(), "{backend}: {key} in {row}");
            }
            assert_eq!(row["limit"]["name"], limit_of(backend, op));
            for key in ["gbps_med", "ratio_med"] {
                assert!(
                    row["limit"][key].as_f64() > Some(0.0),
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
    let cases: [(&[&str], &str); 8] = [
        (&["--backend", "carrier-pigeon"], "--backend"),
        (&["--pages", "0"], "--pages"),
        (&["--page-bytes", "0"], "--page-bytes"),
        (&["--page-bytes", "18446744073709551616"], "--page-bytes"),
        (&["--pages", "99999999999"], "--pages"),
        (&["--duration", "0"], "--duration"),
        (&["--model", "flash"], "--tokens"),
        (
            &["--pages", "1", "--plot", "/no/such/folder/rows.svg"],
            "plot",
        ),
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

#[test]
fn a_comma_list_makes_a_grid_and_a_picture() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rows.svg");
    let plot = ["--plot", file.to_str().unwrap()];
    let sizes = ["--page-bytes", "576,4096", "--pages", "1,16"];
    let finished = brief(&[sizes, [plot[0], plot[1], "--order", "random"]].concat());
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    let object = finished.json();
    let of = |key: &str| -> Vec<u64> {
        let rows = object["rows"].as_array().unwrap();
        rows.iter().map(|row| row[key].as_u64().unwrap()).collect()
    };
    assert_eq!(of("page_bytes"), [576, 576, 4096, 4096]);
    assert_eq!(of("pages"), [1, 16, 1, 16]);
    let picture = std::fs::read_to_string(file).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("memcpy"));
}

#[test]
fn readers_of_the_other_process_see_the_bytes_that_they_were_told_of() {
    let cases: [&[&str]; 4] = [
        &["latency", "--waiter", "spin"],
        &["latency", "--waiter", "park", "--park-us", "50"],
        &[
            "latency",
            "--waiter",
            "park",
            "--park-us",
            "0",
            "--backend",
            "tcp",
        ],
        &["notify", "--park-us", "50"],
    ];
    for args in cases {
        let finished = bench(&[args, &["--events", "16", "--json"]].concat());
        assert_eq!(finished.code, Some(0), "{args:?}: {}", finished.stderr);
        let object = finished.json();
        let found = &object[args[0]];
        assert_eq!(
            (&found["events"], &found["bad_pages"]),
            (&Value::from(16), &Value::from(0))
        );
        for key in ["post_to_seen", "bare"] {
            for quantile in ["p50_us", "p99_us", "min_us"] {
                assert!(
                    found[key][quantile].as_f64() > Some(0.0),
                    "{args:?}: {object}"
                );
            }
        }
        assert!(found["bare_name"].is_string() && found["over_bare_p50_us"].is_number());
    }
}

#[test]
fn a_plan_is_counted_without_its_pools() {
    let args = ["--model", "flash", "--tokens", "1048576", "--json"];
    let finished = Running::start(env!("CARGO_BIN_EXE_plan-bench"), &args).finish();
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    let object = finished.json();
    assert_eq!(object["schema"], "kvgate.plan-bench/1");
    let plan = &object["plan"];
    // 62 pools of 4,096 pages, and the window, the states and the request row.
    assert!(plan["descriptors"].as_u64() >= Some(253_952), "{plan}");
    for key in ["plan_us", "post_us", "bytes_per_descriptor"] {
        assert!(plan[key].as_f64() > Some(0.0), "{key} in {plan}");
    }
}

#[test]
fn idle_counts_both_processes_and_an_agent_alone() {
    let finished = bench(&["idle", "--seconds", "0.2", "--json"]);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    let idle = &finished.json()["idle"];
    for who in ["with_peer", "peer", "alone"] {
        for key in ["cpu_share", "context_switches_s", "threads"] {
            assert!(idle[who][key].is_number(), "{who}.{key} in {idle}");
        }
    }
}

#[test]
fn the_grid_of_the_peers_is_spoken() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_transfer-bench"))
        .args(["xb", "shm"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let lines = "WRITE 1048576 2 1 1\nREAD 1048576 1 1 2\nWRITE 1073741824 2 1 1\nnonsense\nQ\n";
    stdin.write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("READY kvgate_shm"));
    let mut next = || -> Value { serde_json::from_str(lines.next().unwrap()).unwrap() };
    for (op, n) in [("WRITE", 2), ("READ", 1)] {
        let answer = next();
        assert_eq!(
            (&answer["op"], &answer["n"]),
            (&Value::from(op), &Value::from(n))
        );
        for key in XB_KEYS {
            assert!(answer[key].is_number(), "{key} in {answer}");
        }
        assert_eq!(
            (&answer["bad_first"], &answer["bad_last"]),
            (&Value::from(0), &Value::from(0))
        );
    }
    assert_eq!(next(), serde_json::json!({ "skip": 1 }));
    assert!(next()["err"].is_string());
    assert_eq!(lines.next(), None);
}

/// A peer that spins reads no control socket, and one that is stopped does nothing at all: the kernel ends it.
#[test]
fn a_peer_ends_with_a_run_that_is_killed() {
    let mut run = Command::new(env!("CARGO_BIN_EXE_transfer-bench"))
        .args(["xb", "shm"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (stdin, stdout) = (run.stdin.as_mut().unwrap(), run.stdout.take().unwrap());
    stdin.write_all(b"WRITE 1048576 1 1 1\n").unwrap();
    let mut lines = BufReader::new(stdout).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "READY kvgate_shm");
    // The peer stays for the next line of the grid.
    assert!(lines.next().unwrap().unwrap().contains("gbps_med"));
    let task = format!("/proc/{0}/task/{0}/children", run.id());
    let children = std::fs::read_to_string(task).unwrap();
    let peer: u32 = children.trim().parse().unwrap();
    let pid = Pid::from_raw(peer as i32).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    run.kill().unwrap();
    run.wait().unwrap();
    let until = Instant::now() + Duration::from_secs(5);
    while support::is_alive(peer) && Instant::now() < until {
        std::thread::yield_now();
    }
    let is_alive = support::is_alive(peer);
    if is_alive {
        kill_process(pid, Signal::KILL).unwrap();
    }
    assert!(!is_alive, "the peer outlived its run");
}

#[test]
fn every_path_is_listed_with_its_reason_and_an_absent_one_is_refused_with_it() {
    let program = env!("CARGO_BIN_EXE_transfer-bench");
    let without = |args: &[&str]| {
        let mut command = Command::new(program);
        command.args(args).arg("--json");
        let output = command.output().unwrap();
        let object: Value = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code(), object)
    };
    let (code, object) = without(&["--list-backends"]);
    assert_eq!(code, Some(0), "{object}");
    let all = object["backends"].as_array().unwrap();
    let names: Vec<_> = all
        .iter()
        .map(|one| one["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["local", "shm", "cma", "tcp", "ucx", "libfabric"]);
    for one in all {
        let (name, why) = (one["name"].as_str().unwrap(), one["why"].as_str().unwrap());
        assert!(!why.is_empty(), "{one}");
        if one["usable"] == true {
            continue;
        }
        // What is listed as not usable is refused, with the same reason.
        let (code, object) = without(&["--backend", name, "--pages", "1"]);
        assert_eq!(code, Some(2), "{object}");
        let error = &object["error"];
        assert_eq!(
            (&error["kind"], &error["field"]),
            (&Value::from("unavailable"), &Value::from("backend"))
        );
        assert!(error["message"].as_str().unwrap().contains(why), "{object}");
    }
    let is_built = |name: &str| match name {
        "ucx" => cfg!(feature = "ucx"),
        _ => cfg!(feature = "libfabric"),
    };
    for name in ["ucx", "libfabric"] {
        let one = all.iter().find(|one| one["name"] == name).unwrap();
        let why = one["why"].as_str().unwrap();
        assert_eq!(
            why.contains(&format!("this build has no feature {name}")),
            !is_built(name),
            "{why}"
        );
    }
}

#[test]
fn a_comparison_names_what_is_not_installed_and_does_not_fail() {
    let nowhere = ["--compare", "--peers", "/no/such/folder"];
    let short = [
        "--compare-ms",
        "1",
        "--compare-rounds",
        "1",
        "--pages",
        "1",
        "--page-bytes",
        "576,536870912",
    ];
    let finished = brief(&[&nowhere[..], &short].concat());
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    let compare = &finished.json()["compare"];
    let cells = compare["cells"].as_array().unwrap();
    // What the engines cannot be asked for is left out, and told.
    assert_eq!(cells.len(), 1, "{compare}");
    assert!(
        finished.stderr.contains("536870912 B x 1 is left out"),
        "{}",
        finished.stderr
    );
    assert_eq!(
        (&cells[0]["engine"], &cells[0]["bad_pages"]),
        (&"kvgate_auto".into(), &0.into())
    );
    assert!(cells[0]["gbps_med"].as_f64() > Some(0.0), "{compare}");
    for name in ["ucx_tcp", "ofi_tcp", "nixl_default", "mooncake_tcp"] {
        let absent = compare["absent"].as_array().unwrap();
        let one = absent.iter().find(|one| one["engine"] == name).unwrap();
        assert!(
            one["install"].as_str().unwrap().contains("setup.sh"),
            "{one}"
        );
    }
    let refused = brief(&["--compare", "--concurrency", "2"]);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
}

#[test]
fn auto_takes_the_nearest_path() {
    let row = row(&brief(&["--pages", "4"]));
    assert_eq!(row["backend"], "shm");
}
