//! `v4-check DIR`: every gate whose reference tensors lie in a folder.

use std::path::PathBuf;

use clap::Parser;
use kvgate_kernels::Isa;
use kvgate_model::check::{CheckReport, check_dir};
use serde_json::json;

use crate::handoff::failure::Failure;
use crate::handoff::version;
use crate::tool::{Finished, model_failure};

/// Names the JSON object.
pub const SCHEMA: &str = "kvgate.v4-check/1";

/// Compares this implementation with the reference tensors of a folder.
#[derive(Debug, Parser)]
#[command(name = "v4-check", version = version::LINE)]
pub struct Args {
    /// Folder with config.json, model.safetensors and golden, debug or handoff.safetensors, or with
    /// primitives.safetensors.
    pub dir: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Runs the gates.
///
/// # Errors
/// The folder holds nothing to compare, is damaged, or holds a tensor that no gate knows.
pub fn run(args: &Args) -> Result<Finished, Failure> {
    let report = check_dir(&args.dir).map_err(|error| model_failure(&error))?;
    let exit_code = u8::from(!report.is_ok());
    let verdict = if report.is_ok() { "ok" } else { "mismatch" };
    let rows: Vec<_> = report
        .rows
        .iter()
        .map(|r| {
            json!({
                "gate": r.gate, "tensor": r.tensor, "how": r.how,
                "max_error": r.max_error.min(f64::MAX), "bound": r.bound, "ok": r.ok,
            })
        })
        .collect();
    let not_yet: Vec<_> = report
        .not_yet
        .iter()
        .map(|n| json!({"gate": n.gate, "tensor": n.tensor}))
        .collect();
    let json = json!({
        "schema": SCHEMA, "verdict": verdict, "dir": args.dir.display().to_string(),
        "isa": Isa::detect().name(), "rows": rows, "not_yet": not_yet,
    });
    Ok(Finished {
        json,
        lines: lines(&report, verdict),
        exit_code,
    })
}

fn lines(report: &CheckReport, verdict: &str) -> Vec<String> {
    let mut lines: Vec<String> = report
        .rows
        .iter()
        .map(|r| {
            let mark = if r.ok { "ok" } else { "MISS" };
            let how = if r.how.is_empty() {
                String::new()
            } else {
                format!("  ({})", r.how)
            };
            format!(
                "{:4} {:40} max error {:8.2e}  bound {:7.1e}  {mark}{how}",
                r.gate, r.tensor, r.max_error, r.bound
            )
        })
        .collect();
    lines.extend(
        report
            .not_yet
            .iter()
            .map(|n| format!("{:4} {:40} not yet", n.gate, n.tensor)),
    );
    let missed = report.rows.iter().filter(|r| !r.ok).count();
    lines.push(format!(
        "{verdict}: {} compared, {missed} missed, {} not yet (isa {})",
        report.rows.len(),
        report.not_yet.len(),
        Isa::detect().name()
    ));
    lines
}
