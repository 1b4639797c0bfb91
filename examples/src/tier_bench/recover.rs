//! Opening a log: after a clean close, and after its process was killed. Who fills it and who opens it are processes of
//! their own, so that the one can be killed and the memory of the other is that of the log.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use kvgate_hicache::log::Durability;
use serde_json::{Value, json};

use super::Args;
use super::blocks::Blocks;
use super::file::drop_page_cache;
use super::measure::{Folder, failed, fill, open, soon};
use super::row::{Baseline, Row};
use super::single::{row, timed};
use crate::handoff::failure::Failure;
use crate::tool::Finished;

/// What the filling process says when it is done.
const FILLED: &str = "filled";
/// Openings of the closed log.
const ROUNDS: usize = 3;

/// Opening a log whose process was killed, and one that was closed, beside reading its files; the page cache is dropped
/// before each, and kept in the last row.
pub(super) fn run(args: &Args) -> Result<Vec<Row>, Failure> {
    let folder = Folder::new(args, "recover")?;
    fill_and_kill(args, &folder.path)?;
    let record_count = args.working_set / args.block_bytes;
    let mut rows = Vec::new();
    for (case, rounds, is_cold) in [
        ("after kill -9", 1, true),
        ("closed", ROUNDS, true),
        ("closed, page cache", ROUNDS, false),
    ] {
        drop_page_cache(&folder.path)?;
        let (read_us, read_bytes) = timed(|| read_files(&folder.path));
        let read_bytes = read_bytes.map_err(|error| failed("read", &error))?;
        let (mut times, mut bad_blocks, mut memory) = (Vec::new(), 0, 0);
        for _ in 0..rounds {
            if is_cold {
                drop_page_cache(&folder.path)?;
            }
            let told = open_in_child(args, &folder.path)?;
            times.push(told["open_us"].as_f64().unwrap_or(f64::NAN));
            bad_blocks += record_count.abs_diff(told["records"].as_u64().unwrap_or(0));
            memory = memory.max(told["memory_bytes"].as_u64().unwrap_or(u64::MAX));
            if told["was_closed"] == (case == "after kill -9") {
                return Err(failed(case, &"the log was in another state"));
            }
        }
        let mut row = row(args, "file", "recover", read_bytes, &mut times);
        row.case = case;
        row.bad_blocks = bad_blocks;
        row.memory_bytes = Some(memory);
        row.ratio_med = read_us / row.p50_us;
        row.baseline = Baseline {
            name: "reading the files".to_owned(),
            gbps_med: read_bytes as f64 / read_us / 1e3,
        };
        rows.push(row);
    }
    Ok(rows)
}

/// This program once more, on the log in `folder`.
fn child(args: &Args, op: &str, folder: &Path) -> Result<Child, Failure> {
    let program = std::env::current_exe().map_err(|error| failed("this program", &error))?;
    Command::new(program)
        .args(["--op", op, "--json", "--dir"])
        .arg(folder)
        .args(["--working-set", &args.working_set.to_string()])
        .args(["--block-bytes", &args.block_bytes.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| failed("this program", &error))
}

fn fill_and_kill(args: &Args, folder: &Path) -> Result<(), Failure> {
    let mut child = child(args, "fill", folder)?;
    let stdout = child.stdout.take().map(BufReader::new);
    let line = stdout.and_then(|stdout| stdout.lines().next()?.ok());
    let killed = child.kill();
    let _status = child.wait().map_err(|error| failed("fill", &error))?;
    match line.as_deref() {
        Some(FILLED) => killed.map_err(|error| failed("kill", &error)),
        other => Err(failed("fill", &format!("the process said {other:?}"))),
    }
}

fn open_in_child(args: &Args, folder: &Path) -> Result<Value, Failure> {
    let child = child(args, "open", folder)?;
    let done = child
        .wait_with_output()
        .map_err(|error| failed("open", &error))?;
    serde_json::from_slice(&done.stdout).map_err(|error| failed("open", &error))
}

/// The filling process: keeps the log open until it is killed, or its parent goes away.
pub(super) fn fill_process(args: &Args) -> Result<Finished, Failure> {
    let log = open(&folder_of(args)?, args, Durability::None)?;
    let blocks = Blocks::new(args.block_bytes, args.working_set / args.block_bytes)?;
    fill(&log, &blocks)?;
    crate::handoff::console::print(FILLED);
    let mut line = String::new();
    std::io::stdin()
        .read_line(&mut line)
        .map_err(|error| failed("fill", &error))?;
    Ok(Finished {
        json: json!({ "schema": super::SCHEMA, "verdict": "ok", "rows": [] }),
        lines: Vec::new(),
        exit_code: 0,
    })
}

/// The opening process: opens the log, says what it took, and closes it.
pub(super) fn open_process(args: &Args) -> Result<Finished, Failure> {
    let folder = folder_of(args)?;
    let before = memory_bytes()?;
    let (open_us, log) = timed(|| open(&folder, args, Durability::None));
    let log = log?;
    let memory = memory_bytes()?.saturating_sub(before);
    let (recovery, records) = (log.recovery().clone(), log.stats().record_count);
    log.close(soon()).map_err(|error| failed("close", &error))?;
    let line = format!(
        "{records} records in {:.1} ms, {memory} bytes of memory, closed before: {}, {} bytes looked through",
        open_us / 1e3,
        recovery.was_closed,
        recovery.scanned_bytes
    );
    let json = json!({
        "schema": super::SCHEMA, "verdict": "ok", "rows": [], "open_us": open_us, "records": records,
        "memory_bytes": memory, "was_closed": recovery.was_closed, "scanned_bytes": recovery.scanned_bytes,
    });
    Ok(Finished {
        json,
        lines: vec![line],
        exit_code: 0,
    })
}

fn folder_of(args: &Args) -> Result<std::path::PathBuf, Failure> {
    use crate::handoff::failure::FailureKind;
    let missing = || {
        let failure = Failure::new(
            FailureKind::Usage,
            "--dir is missing, expected the folder of a log",
        );
        failure.with_field("dir", "")
    };
    args.dir.clone().ok_or_else(missing)
}

/// Resident memory of this process.
fn memory_bytes() -> Result<u64, Failure> {
    let text = std::fs::read_to_string("/proc/self/statm");
    let text = text.map_err(|error| failed("/proc/self/statm", &error))?;
    let pages = text
        .split(' ')
        .nth(1)
        .and_then(|word| word.parse::<u64>().ok());
    let pages = pages.ok_or_else(|| failed("/proc/self/statm", &text))?;
    Ok(pages * rustix::param::page_size() as u64)
}

fn read_files(folder: &Path) -> std::io::Result<u64> {
    use std::io::Read;
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder)? {
        let mut file = std::fs::File::open(entry?.path())?;
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                count => bytes += count as u64,
            }
        }
    }
    Ok(bytes)
}
