//! `kvgate-cache`: the directory of a storage tier from outside.

mod report;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Parser, Subcommand};
use kvgate_hicache::log::{
    Directory, LogConfig, Mode, SecondChance, SegmentLog, export, import, verify,
};
use kvgate_hicache::{Error, ErrorKind};
use kvgate_transfer::Deadline;
use serde_json::json;

use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::version;
use crate::tool::Finished;

/// Name of the JSON object.
pub const SCHEMA: &str = "kvgate.cache/1";

/// Lists, inspects, verifies, prunes, exports, imports and repairs a directory of the storage tier
#[derive(Parser, Debug)]
#[command(name = "kvgate-cache", version = version::LINE)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
    /// Print one JSON object
    #[arg(long, global = true)]
    pub json: bool,
    /// How long a write may take, in milliseconds
    #[arg(long, global = true, default_value_t = 60_000)]
    deadline_ms: u64,
}

/// What to do.
#[derive(Subcommand, Debug)]
enum Action {
    /// Every record: kind, key, position, length, place
    List {
        /// Directory of the tier
        dir: PathBuf,
    },
    /// The header of records: identity, component table, checksums
    Inspect {
        /// Directory of the tier
        dir: PathBuf,
        /// Begin of the record's name, such as block-3f9a; every record without it
        #[arg(long, value_name = "NAME", default_value = "")]
        record: String,
    },
    /// Every byte of every file; changes nothing
    Verify {
        /// Directory of the tier
        dir: PathBuf,
    },
    /// Lets the oldest segments go
    Prune {
        /// Directory of the tier
        dir: PathBuf,
        /// Bytes that the files may take
        #[arg(long, value_name = "BYTES")]
        max_bytes: u64,
    },
    /// Writes every good record into one file
    Export {
        /// Directory of the tier
        dir: PathBuf,
        /// The file, which must not exist
        file: PathBuf,
    },
    /// Stores the records of an export that are not there yet
    Import {
        /// Directory of the tier, made if it does not exist
        dir: PathBuf,
        /// The file
        file: PathBuf,
    },
    /// Moves the good records of damaged segments into new ones
    Repair {
        /// Directory of the tier
        dir: PathBuf,
    },
}

/// Runs one action.
///
/// # Errors
/// A directory that is in use, is none, or cannot be read or written.
pub fn run(args: &Args) -> Result<Finished, Failure> {
    let deadline = Deadline::after_ms(args.deadline_ms);
    match &args.action {
        Action::List { dir } => Ok(report::list(&open(dir, Mode::ReadOnly)?)),
        Action::Inspect { dir, record } => report::inspect(&open(dir, Mode::ReadOnly)?, record),
        Action::Verify { dir } => {
            let report = verify(&directory(dir)?).map_err(|error| failure(&error))?;
            Ok(report::verify(dir, &report))
        }
        Action::Prune { dir, max_bytes } => {
            let log = open(dir, Mode::ReadWrite)?;
            log.prune(*max_bytes, deadline).map_err(|e| failure(&e))?;
            let stats = log.stats();
            close(log, deadline)?;
            let text = format!(
                "pruned: {} records gone, {} records of {} bytes left",
                stats.evicted_count, stats.record_count, stats.file_bytes
            );
            let json = json!({
                "evicted": stats.evicted_count, "records": stats.record_count,
                "file_bytes": stats.file_bytes,
            });
            Ok(done("prune", json, text))
        }
        Action::Export { dir, file } => {
            let log = open(dir, Mode::ReadOnly)?;
            let (folder, name) = split(file)?;
            let exported = export(&log, &folder, &name).map_err(|error| failure(&error))?;
            Ok(report::export(&log, &exported, file))
        }
        Action::Import { dir, file } => {
            let (folder, name) = split(file)?;
            Directory::create(dir).map_err(|error| bad_directory(dir, &error))?;
            let log = open(dir, Mode::ReadWrite)?;
            let count = import(&log, &folder, &name, deadline).map_err(|e| failure(&e))?;
            close(log, deadline)?;
            let text = format!("imported: {count} new records");
            Ok(done("import", json!({ "records": count }), text))
        }
        Action::Repair { dir } => {
            let log = open(dir, Mode::ReadWrite)?;
            let lost = log.repair(deadline).map_err(|error| failure(&error))?;
            let count = log.stats().record_count;
            close(log, deadline)?;
            let text = format!("repaired: {count} records left, {lost} could not be saved");
            let json = json!({ "records": count, "lost": lost });
            Ok(done("repair", json, text))
        }
    }
}

fn done(action: &str, mut json: serde_json::Value, text: String) -> Finished {
    json["schema"] = SCHEMA.into();
    json["action"] = action.into();
    json["verdict"] = "ok".into();
    Finished {
        json,
        lines: vec![text],
        exit_code: 0,
    }
}

fn directory(dir: &Path) -> Result<Directory, Failure> {
    Directory::open(dir).map_err(|error| bad_directory(dir, &error))
}

fn bad_directory(dir: &Path, error: &std::io::Error) -> Failure {
    let mut failure = Failure::new(
        FailureKind::BadInput,
        format!("{}: {error}, expected a directory", dir.display()),
    );
    failure.field = Some("dir".into());
    failure.value = Some(dir.display().to_string());
    failure
}

/// Opens the log whatever its owner's limits are: nothing leaves that was not asked to.
fn open(dir: &Path, mode: Mode) -> Result<SegmentLog, Failure> {
    let config = LogConfig {
        capacity_bytes: u64::MAX >> 1,
        ..LogConfig::default()
    };
    let medium = Arc::new(directory(dir)?);
    let log = SegmentLog::open(medium, config, Box::new(SecondChance::default()), mode)
        .map_err(|error| failure(&error))?;
    if mode == Mode::ReadWrite && log.stats().is_read_only {
        let text = format!("{}: the directory can not be written", dir.display());
        return Err(Failure::new(FailureKind::BadInput, text));
    }
    Ok(log)
}

fn close(log: SegmentLog, deadline: Deadline) -> Result<(), Failure> {
    log.close(deadline).map_err(|error| failure(&error))
}

/// The folder of a file and its name in it.
fn split(file: &Path) -> Result<(Directory, String), Failure> {
    let name = file
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());
    let Some(name) = name else {
        let text = format!("{}: expected the name of a file", file.display());
        return Err(Failure::new(FailureKind::BadInput, text));
    };
    let folder = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    Ok((directory(folder)?, name))
}

fn failure(error: &Error) -> Failure {
    let kind = match error.kind() {
        ErrorKind::Locked { .. } => FailureKind::Locked,
        ErrorKind::Late { .. } => FailureKind::DeadlineExceeded,
        _ => FailureKind::BadInput,
    };
    Failure::new(kind, error.to_string())
}
