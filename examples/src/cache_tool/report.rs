//! What `kvgate-cache` prints.

use std::path::Path;

use kvgate_hicache::Error;
use kvgate_hicache::log::{Exported, Finding, Listed, SegmentLog, VerifyReport};
use kvgate_hicache::record::Head;
use serde_json::{Value, json};

use super::SCHEMA;
use crate::handoff::failure::{Failure, FailureKind};
use crate::tool::Finished;

/// Every record. Ends with 1 if files have something wrong: not every record may be there.
pub(super) fn list(log: &SegmentLog) -> Finished {
    let listing = log.list();
    let lines = listing.records.iter().map(|listed| {
        let entry = &listed.entry;
        format!(
            "{} position {} {} bytes in {} at {}",
            entry.id,
            entry.position,
            entry.record_bytes,
            listed.segment.file_name(),
            entry.offset_bytes
        )
    });
    let mut lines: Vec<String> = lines.collect();
    let stats = log.stats();
    lines.push(format!(
        "{} records, {} bytes in {} segments of {} bytes",
        stats.record_count, stats.live_bytes, stats.segment_count, stats.file_bytes
    ));
    let recovery = log.recovery();
    lines.extend(
        recovery
            .foreign
            .iter()
            .map(|name| format!("foreign: {name}")),
    );
    lines.extend(
        recovery
            .damaged
            .iter()
            .map(|name| format!("damaged: {name}")),
    );
    let unreadable = texts(&listing.unreadable);
    lines.extend(unreadable.iter().map(|text| format!("unreadable: {text}")));
    let records: Vec<Value> = listing.records.iter().map(row).collect();
    let is_whole = recovery.damaged.is_empty() && unreadable.is_empty();
    Finished {
        json: json!({
            "schema": SCHEMA, "action": "list", "verdict": verdict(is_whole), "records": records,
            "live_bytes": stats.live_bytes, "file_bytes": stats.file_bytes,
            "segments": stats.segment_count, "was_closed": recovery.was_closed,
            "foreign": recovery.foreign, "damaged": recovery.damaged, "unreadable": unreadable,
        }),
        lines,
        exit_code: u8::from(!is_whole),
    }
}

/// What an export holds. Ends with 1 if it may lack records: some, or files of the directory, are damaged.
pub(super) fn export(log: &SegmentLog, exported: &Exported, file: &Path) -> Finished {
    let files = &log.recovery().damaged;
    let left_out = texts(&exported.left_out);
    let is_whole = left_out.is_empty() && files.is_empty();
    let count = exported.record_count;
    let mut lines = vec![format!("exported: {count} records to {}", file.display())];
    lines.extend(left_out.iter().map(|text| format!("left out: {text}")));
    lines.extend(files.iter().map(|name| format!("damaged: {name}")));
    Finished {
        json: json!({
            "schema": SCHEMA, "action": "export", "verdict": verdict(is_whole),
            "records": count, "left_out": left_out, "damaged": files,
        }),
        lines,
        exit_code: u8::from(!is_whole),
    }
}

fn texts(errors: &[Error]) -> Vec<String> {
    errors.iter().map(Error::to_string).collect()
}

fn verdict(is_whole: bool) -> &'static str {
    if is_whole { "ok" } else { "mismatch" }
}

fn row(listed: &Listed) -> Value {
    let entry = &listed.entry;
    json!({
        "record": entry.id.to_string(), "kind": entry.id.kind.to_string(),
        "key": entry.id.key.to_string(), "parent": entry.parent.to_string(),
        "namespace": entry.namespace.to_string(), "position": entry.position,
        "bytes": entry.record_bytes, "file": listed.segment.file_name(),
        "offset": entry.offset_bytes, "sequence": entry.sequence,
    })
}

/// The headers of the records whose names begin so.
pub(super) fn inspect(log: &SegmentLog, name: &str) -> Result<Finished, Failure> {
    let (mut lines, mut records) = (Vec::new(), Vec::new());
    let listing = log.list();
    let unreadable = texts(&listing.unreadable);
    let mut is_whole = unreadable.is_empty();
    for listed in listing.records {
        if !listed.entry.id.to_string().starts_with(name) {
            continue;
        }
        let mut json = row(&listed);
        lines.push(listed.entry.id.to_string());
        match log.record_bytes(&listed) {
            Ok((head, _)) => {
                lines.extend(head_lines(&head));
                json["components"] = head_json(&head);
            }
            Err(error) => {
                is_whole = false;
                lines.push(format!("  {error}"));
                json["error"] = error.to_string().into();
            }
        }
        records.push(json);
    }
    lines.extend(unreadable.iter().map(|text| format!("unreadable: {text}")));
    if records.is_empty() && is_whole && !name.is_empty() {
        let text = format!("no record has a name that begins with {name:?}");
        let mut failure = Failure::new(FailureKind::BadInput, text);
        failure.field = Some("record".into());
        failure.value = Some(name.to_owned());
        return Err(failure);
    }
    Ok(Finished {
        json: json!({
            "schema": SCHEMA, "action": "inspect", "verdict": verdict(is_whole), "records": records,
            "unreadable": unreadable,
        }),
        lines,
        exit_code: u8::from(!is_whole),
    })
}

fn head_lines(head: &Head) -> Vec<String> {
    let mut lines = vec![
        format!("  namespace {}", head.namespace),
        format!("  parent {} position {}", head.parent, head.position),
    ];
    lines.extend(head.parts.iter().map(|part| {
        let found = &part.part;
        format!(
            "  {} layer {}: {} rows of {} bytes, crc32c {:08x}",
            found.component, found.layer, found.row_count, found.row_bytes, part.crc32c
        )
    }));
    lines
}

fn head_json(head: &Head) -> Value {
    let parts = head.parts.iter().map(|part| {
        let found = &part.part;
        json!({
            "component": found.component.id(), "layer": found.layer.0,
            "row_bytes": found.row_bytes, "rows": found.row_count,
            "bytes": found.length_bytes(), "crc32c": format!("{:08x}", part.crc32c),
        })
    });
    parts.collect()
}

/// What a look at every byte has given.
pub(super) fn verify(dir: &Path, report: &VerifyReport) -> Finished {
    let is_clean = report.findings.is_empty();
    let mut lines: Vec<String> = report.findings.iter().map(Finding::to_string).collect();
    if report.tail_bytes > 0 {
        lines.push(format!(
            "note: {} uncommitted tail bytes after a crash",
            report.tail_bytes
        ));
    }
    let verdict = if is_clean { "ok" } else { "mismatch" };
    lines.push(format!(
        "{}: {} records in {} segments of {} bytes, {}: {verdict}",
        dir.display(),
        report.record_count,
        report.segment_count,
        report.file_bytes,
        if report.was_closed {
            "closed"
        } else {
            "not closed"
        },
    ));
    let findings: Vec<Value> = report.findings.iter().map(finding).collect();
    Finished {
        json: json!({
            "schema": SCHEMA, "action": "verify", "verdict": verdict, "findings": findings,
            "records": report.record_count, "segments": report.segment_count,
            "file_bytes": report.file_bytes, "was_closed": report.was_closed,
            "tail_bytes": report.tail_bytes,
        }),
        lines,
        exit_code: u8::from(!is_clean),
    }
}

fn finding(finding: &Finding) -> Value {
    let component = finding.component.as_ref();
    json!({
        "file": finding.file, "offset": finding.offset_bytes,
        "record": finding.record.as_ref().map(ToString::to_string),
        "component": component.map(|(component, _)| component.id()),
        "layer": component.map(|(_, layer)| layer.0),
        "reason": finding.reason,
    })
}
