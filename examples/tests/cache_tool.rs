//! `kvgate-cache` as a user runs it.
#![allow(clippy::unwrap_used)]

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use clap::Parser;
use kvgate_examples::cache_tool;
use kvgate_hicache::log::{LOCK_NAME, LogConfig, SegmentLog};
use kvgate_hicache::record::RecordKind::{Block, Checkpoint};
use kvgate_hicache::testkit::Sample;
use kvgate_transfer::Deadline;
use serde_json::Value;

fn soon() -> Deadline {
    Deadline::after_ms(20_000)
}

/// A closed log of four blocks and a checkpoint, in two segments.
fn filled(dir: &Path) -> Sample {
    let sample = Sample::small(4);
    let log = open(dir);
    for k in 0..4 {
        sample
            .with_record(Block, k, |record| log.append(record, soon()))
            .unwrap();
    }
    sample
        .with_record(Checkpoint, 3, |record| log.append(record, soon()))
        .unwrap();
    log.close(soon()).unwrap();
    sample
}

fn open(dir: &Path) -> SegmentLog {
    let config = LogConfig {
        segment_bytes: 48 << 10,
        ..LogConfig::default()
    };
    SegmentLog::open_directory(dir, config).unwrap()
}

fn tool(args: &[&str], paths: &[&Path]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvgate-cache"))
        .args(args)
        .args(paths)
        .output()
        .unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("one JSON object on stdout")
}

fn segment(dir: &Path) -> PathBuf {
    let mut names: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().contains("segment-"))
        .collect();
    names.sort();
    names[0].clone()
}

fn flip(path: &Path, at: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at] ^= 4;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_closed_directory_is_clean_and_listed() {
    let dir = tempfile::tempdir().unwrap();
    let sample = filled(dir.path());
    let output = tool(&["verify", "--json"], &[dir.path()]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = json(&output);
    assert_eq!(report["verdict"], "ok");
    assert_eq!(
        (&report["records"], &report["tail_bytes"]),
        (&5.into(), &0.into())
    );
    let list = json(&tool(&["list", "--json"], &[dir.path()]));
    assert_eq!(list["records"].as_array().unwrap().len(), 5);
    assert_eq!(
        list["records"][1]["record"],
        sample.id(Block, 1).to_string()
    );
    let name = sample.id(Checkpoint, 3).to_string();
    let output = tool(&["inspect", "--json", "--record", &name], &[dir.path()]);
    let inspected = json(&output);
    let components = inspected["records"][0]["components"].as_array().unwrap();
    assert_eq!(components[0]["component"], "swa_latent");
    assert_eq!(
        tool(&["verify"], &[dir.path()]).status.code(),
        Some(0),
        "looking changed it"
    );
}

#[test]
fn a_wrong_bit_is_named_and_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let sample = filled(dir.path());
    let path = segment(dir.path());
    // The first component of the second record.
    flip(&path, 4096 + 8192 + 4096 + 3);
    let output = tool(&["verify", "--json"], &[dir.path()]);
    assert_eq!(output.status.code(), Some(1));
    let finding = &json(&output)["findings"][0];
    assert_eq!(
        finding["file"],
        path.file_name().unwrap().to_string_lossy().as_ref()
    );
    assert_eq!(finding["offset"], 4096 + 8192 + 4096);
    assert_eq!(finding["record"], sample.id(Block, 1).to_string());
    assert_eq!(finding["component"], "c4_latent");
    let output = tool(&["repair", "--json"], &[dir.path()]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(json(&output)["lost"], 1);
    assert_eq!(tool(&["verify"], &[dir.path()]).status.code(), Some(0));
    let log = open(dir.path());
    let read = |k| sample.check_read(Block, k, |wanted, into| log.read(wanted, into));
    assert!(read(0).is_ok() && read(1).is_err() && read(2).is_ok() && read(3).is_ok());
}

#[test]
fn an_export_that_lacks_a_damaged_record_says_so() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let sample = filled(dir.path());
    // The first component of the second record.
    flip(&segment(dir.path()), 4096 + 8192 + 4096 + 3);
    let file = other.path().join("all.kvexport");
    let output = tool(&["export", "--json"], &[dir.path(), &file]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let report = json(&output);
    assert_eq!(
        (&report["verdict"], &report["records"]),
        (&"mismatch".into(), &4.into())
    );
    let left_out = report["left_out"][0].as_str().unwrap();
    assert!(
        left_out.contains(&sample.id(Block, 1).to_string()),
        "{left_out}"
    );
    let target = other.path().join("cache");
    assert_eq!(tool(&["import"], &[&target, &file]).status.code(), Some(0));
    assert_eq!(tool(&["verify"], &[&target]).status.code(), Some(0));
}

#[test]
fn a_list_over_a_damaged_file_says_so() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path());
    let path = segment(dir.path());
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(path.metadata().unwrap().len() / 2).unwrap();
    let output = tool(&["list", "--json"], &[dir.path()]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    assert_eq!(json(&output)["damaged"][0], Value::from(name));
}

/// The tool in this process, for each byte of every file of a small directory.
#[test]
fn a_wrong_bit_at_any_byte_makes_verify_end_with_1() {
    let dir = tempfile::tempdir().unwrap();
    let (sample, log) = (Sample::small(1), open(dir.path()));
    sample
        .with_record(Block, 0, |record| log.append(record, soon()))
        .unwrap();
    log.close(soon()).unwrap();
    let words = ["kvgate-cache", "verify", dir.path().to_str().unwrap()];
    let args = cache_tool::Args::try_parse_from(words).unwrap();
    let verify = || cache_tool::run(&args).unwrap().exit_code;
    assert_eq!(verify(), 0);
    let mut count = 0;
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.ends_with(LOCK_NAME) {
            assert_eq!(path.metadata().unwrap().len(), 0);
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        for (at, byte) in bytes.iter().enumerate() {
            let put = |byte| file.write_all_at(&[byte], at as u64).unwrap();
            put(byte ^ 1 << (at % 8));
            assert_eq!(verify(), 1, "byte {at} of {}", path.display());
            put(*byte);
            count += 1;
        }
    }
    assert!(count > 16_000, "{count} bytes");
    assert_eq!(verify(), 0);
}

#[test]
fn truncation_and_foreign_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path());
    std::fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    let output = tool(&["verify"], &[dir.path()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("notes.txt"));
    std::fs::remove_file(dir.path().join("notes.txt")).unwrap();
    let path = segment(dir.path());
    let len_bytes = std::fs::metadata(&path).unwrap().len();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(len_bytes / 2).unwrap();
    assert_eq!(tool(&["verify"], &[dir.path()]).status.code(), Some(1));
}

#[test]
fn a_crash_is_a_note_and_a_second_owner_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let sample = filled(dir.path());
    let log = open(dir.path());
    sample
        .with_record(Checkpoint, 0, |record| log.append(record, soon()))
        .unwrap();
    for action in ["verify", "list", "repair"] {
        let output = tool(&[action, "--json"], &[dir.path()]);
        assert_eq!(output.status.code(), Some(3), "{action}");
        assert_eq!(json(&output)["error"]["kind"], "locked");
    }
    // As a killed process leaves it, in the middle of a write.
    drop(log);
    let mut names: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    names.sort();
    let last = names
        .iter()
        .rfind(|path| path.to_string_lossy().contains("segment-"))
        .unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(last).unwrap();
    file.set_len(file.metadata().unwrap().len() + 5000).unwrap();
    let output = tool(&["verify", "--json"], &[dir.path()]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(json(&output)["tail_bytes"], 5000);
    assert_eq!(json(&output)["was_closed"], false);
}

#[test]
fn export_import_and_prune() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let sample = filled(dir.path());
    let file = other.path().join("all.kvexport");
    assert_eq!(
        tool(&["export"], &[dir.path(), &file]).status.code(),
        Some(0)
    );
    assert_eq!(
        tool(&["export"], &[dir.path(), &file]).status.code(),
        Some(2),
        "it exists"
    );
    let target = other.path().join("cache");
    let output = tool(&["import", "--json"], &[&target, &file]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(json(&output)["records"], 5);
    assert_eq!(tool(&["verify"], &[&target]).status.code(), Some(0));
    {
        let log = open(&target);
        assert!(
            sample
                .check_read(Block, 3, |w, into| log.read(w, into))
                .is_ok()
        );
        log.close(soon()).unwrap();
    }
    flip(&file, 4096 + 50);
    let output = tool(&["import"], &[&other.path().join("none"), &file]);
    assert_eq!(output.status.code(), Some(2));
    let output = tool(&["prune", "--max-bytes", "0", "--json"], &[&target]);
    assert_eq!(json(&output)["records"], 0);
    let output = tool(&["verify", "--json"], &[&other.path().join("absent")]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(json(&output)["error"]["field"], "dir");
}
