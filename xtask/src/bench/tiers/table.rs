//! Rows of `tier-bench` against their limits.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value;

use super::Line;
use crate::bench::markdown::{number, rows, shown};

/// What the rows of a step are held against.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Judge {
    /// 0.9 of a copy with a checksum, 0.7 of a plain one.
    Memory,
    /// As a get with verification, 0.9 of memcpy without; the first layer after 1/20.
    Loadback,
    /// 0.8 of appends with as many syncs; so many times a synced file a block.
    Durable(Option<f64>),
    /// 0.9 of O_DIRECT when the page cache was dropped; no limit of its own for what is in it.
    FileGet,
    /// A ratio without a limit.
    Ratio,
    /// 1 s; after a kill, the time of one segment at half the disk's rate more. 128 B a record and 64 MiB of memory.
    Open,
    /// The longest one in milliseconds, at most; the others are the curve.
    LookupMs(f64),
    /// Computed against resumed.
    Resume,
    /// Hit ratios.
    Trace,
    /// Against LMCache.
    Compare,
}

/// The lines of one step.
pub(super) fn lines(judge: Judge, case: &str, result: &Value) -> Vec<Line> {
    if let Some(message) = result.pointer("/error/message").and_then(Value::as_str) {
        return vec![line(
            case,
            "–",
            format!("failed: {}", message.replace('|', "/")),
            false,
        )];
    }
    let rows = rows(result);
    let mut lines = match judge {
        Judge::Memory => rows.iter().flat_map(|row| memory(case, row)).collect(),
        Judge::Loadback => rows.iter().flat_map(|row| loadback(case, row)).collect(),
        Judge::Durable(files) => rows
            .iter()
            .flat_map(|row| durable(case, row, files))
            .collect(),
        Judge::FileGet => rows.iter().map(|row| file_get(case, row)).collect(),
        Judge::Ratio => rows.iter().map(|row| ratio_only(case, row)).collect(),
        Judge::Open => rows.iter().map(|row| opened(case, row)).collect(),
        Judge::LookupMs(limit) => lookup(case, rows, limit),
        Judge::Resume => resume(case, rows),
        Judge::Trace => trace(case, result),
        Judge::Compare => compare(rows),
    };
    let bad: f64 = rows.iter().map(|row| number(row, "/bad_blocks")).sum();
    if bad != 0.0 {
        lines.push(line(
            case,
            "no bad block",
            format!("{bad} BAD BLOCKS"),
            false,
        ));
    }
    lines
}

fn line(case: &str, limit: impl Into<String>, measured: String, is_met: bool) -> Line {
    Line {
        case: case.to_owned(),
        limit: limit.into(),
        measured,
        is_met,
    }
}

/// The row's rate and ratio against a loop beside it.
fn against(case: &str, row: &Value, (name, ratio): (&str, f64), least: f64) -> Line {
    let gbps = number(row, "/gbps_med");
    line(
        case,
        format!("{least:.2} of {name}"),
        format!("{ratio:.2} ({} GB/s)", shown(gbps)),
        ratio >= least,
    )
}

fn first(row: &Value) -> (&str, f64) {
    let name = row.pointer("/baseline/name").and_then(Value::as_str);
    (name.unwrap_or("its loop"), number(row, "/ratio_med"))
}

/// Ratio to a loop beside the row, by its name.
fn beside(row: &Value, name: &str) -> f64 {
    let all = row.get("beside").and_then(Value::as_array);
    let mut all = all.into_iter().flatten();
    let found = all.find(|one| one["name"] == name);
    found.map_or(f64::NAN, |one| number(one, "/ratio_med"))
}

fn memory(case: &str, row: &Value) -> Vec<Line> {
    let memcpy = beside(row, "memcpy");
    vec![
        against(case, row, first(row), 0.9),
        against(case, row, ("memcpy", memcpy), 0.7),
    ]
}

fn loadback(case: &str, row: &Value) -> Vec<Line> {
    let verify = row["verify"].as_str().unwrap_or_default();
    let case = format!(
        "{case}, verification {verify}, {} tokens",
        number(row, "/tokens")
    );
    let share = number(row, "/first_layer_share");
    vec![
        against(&case, row, first(row), 0.9),
        line(
            &format!("{case}, first layer"),
            "after 1/20 of the whole",
            format!("after {share:.3}"),
            share <= 0.05,
        ),
    ]
}

fn durable(case: &str, row: &Value, files: Option<f64>) -> Vec<Line> {
    let mut lines = vec![against(case, row, first(row), 0.8)];
    let name = "a file a block, fsync";
    let ratio = beside(row, name);
    lines.push(match files {
        Some(least) => line(
            case,
            format!("{least} × {name}"),
            format!("{ratio:.1} ×"),
            ratio >= least,
        ),
        None => line(
            case,
            format!("beside {name}"),
            format!("{ratio:.1} ×"),
            true,
        ),
    });
    lines
}

fn file_get(case: &str, row: &Value) -> Line {
    let place = row["case"].as_str().unwrap_or_default();
    let case = format!("{case}, {place}");
    match place {
        "page cache" => ratio_line(&case, row),
        _ => against(&case, row, first(row), 0.9),
    }
}

fn ratio_only(case: &str, row: &Value) -> Line {
    let place = row["case"].as_str().unwrap_or_default();
    match place {
        "" => ratio_line(case, row),
        place => ratio_line(&format!("{case}, {place}"), row),
    }
}

fn ratio_line(case: &str, row: &Value) -> Line {
    let (name, ratio) = first(row);
    let (gbps, ms) = (number(row, "/gbps_med"), number(row, "/p50_us") / 1e3);
    line(
        case,
        format!("beside {name}"),
        format!(
            "{} × ({} GB/s, {} ms p50)",
            shown(ratio),
            shown(gbps),
            shown(ms)
        ),
        true,
    )
}

/// Bytes of a segment.
const SEGMENT_BYTES: f64 = (128 << 20) as f64;

fn opened(case: &str, row: &Value) -> Line {
    let place = row["case"].as_str().unwrap_or_default();
    let limit_s = match place {
        "after kill -9" => 1.0 + SEGMENT_BYTES / (number(row, "/baseline/gbps_med") * 1e9 / 2.0),
        _ => 1.0,
    };
    let seconds = number(row, "/p50_us") / 1e6;
    let bytes = number(row, "/memory_bytes");
    let records =
        number(row, "/gbps_med") * number(row, "/p50_us") * 1e3 / number(row, "/block_bytes");
    let limit_bytes = 128.0 * records + (64 << 20) as f64;
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    line(
        &format!("{case}, {place}"),
        format!("{limit_s:.2} s, {:.0} MiB", mib(limit_bytes)),
        format!("{seconds:.3} s, {:.1} MiB", mib(bytes)),
        seconds <= limit_s && bytes <= limit_bytes,
    )
}

fn lookup(case: &str, rows: &[Value], limit_ms: f64) -> Vec<Line> {
    let ms = |row: &Value| number(row, "/p50_us") / 1e3;
    let (Some(longest), Some(shortest)) = (rows.first(), rows.last()) else {
        return Vec::new();
    };
    let each = |row: &Value| ms(row) * 1e6 / number(row, "/tokens");
    vec![
        line(
            &format!(
                "{case} of {} tokens, names included",
                number(longest, "/tokens")
            ),
            format!("{limit_ms} ms"),
            format!("{:.2} ms", ms(longest)),
            ms(longest) <= limit_ms,
        ),
        line(
            &format!("{case}, over the length"),
            "linear",
            format!(
                "{:.2} ns a token at {}, {:.2} at {}",
                each(shortest),
                number(shortest, "/tokens"),
                each(longest),
                number(longest, "/tokens")
            ),
            each(longest) <= 1.5 * each(shortest),
        ),
    ]
}

fn resume(case: &str, rows: &[Value]) -> Vec<Line> {
    let of = |pair: &[Value]| {
        let [computed, resumed] = pair else {
            return None;
        };
        let ms = |row: &Value| number(row, "/p50_us") / 1e3;
        Some(line(
            &format!("{case} of {} tokens", number(computed, "/tokens")),
            "–",
            format!(
                "{} ms from the host tier, {} ms computed",
                shown(ms(resumed)),
                shown(ms(computed))
            ),
            true,
        ))
    };
    rows.chunks(2).filter_map(of).collect()
}

fn trace(case: &str, result: &Value) -> Vec<Line> {
    let all = result.get("trace").and_then(Value::as_array);
    let one = |replay: &Value| {
        line(
            &format!("{case}, {}", replay["policy"].as_str().unwrap_or_default()),
            "–",
            format!(
                "hit ratio {:.2}, {:.2} of the hits that are left without scans",
                number(replay, "/hit_ratio"),
                number(replay, "/scan_resistance")
            ),
            true,
        )
    };
    all.into_iter().flatten().map(one).collect()
}

/// A row of kvgate, what it does, and the least it must be of what.
const LEAST: [(&str, &str, u64, &str, f64); 6] = [
    ("kvgate_memory", "put", 65_536, "lmcache_cpu", 2.0),
    ("kvgate_memory", "put", 262_144, "lmcache_cpu", 0.8),
    ("kvgate_memory", "put", 1_048_576, "lmcache_cpu", 0.8),
    ("kvgate_file", "get", 65_536, "lmcache_disk", 1.0),
    ("kvgate_file", "get", 262_144, "lmcache_disk", 1.0),
    ("kvgate_file", "get", 1_048_576, "lmcache_disk", 1.0),
];

fn compare(rows: &[Value]) -> Vec<Line> {
    let find = |engine: &str, op: &str, bytes: u64| {
        rows.iter().find(|row| {
            row["engine"] == engine && row["op"] == op && row["block_bytes"].as_u64() == Some(bytes)
        })
    };
    let one = |(engine, op, bytes, other, least): (&str, &str, u64, &str, f64)| {
        let row = find(engine, op, bytes)?;
        let ratio = beside(row, other);
        let case = format!("{engine}, {op}, {bytes} B (verified; {other} verifies nothing)");
        Some(match ratio.is_finite() {
            true => line(
                &case,
                format!("{least} × {other}"),
                format!("{ratio:.2} ×"),
                ratio >= least,
            ),
            false => line(
                &case,
                format!("{least} × {other}"),
                "not installed".to_owned(),
                false,
            ),
        })
    };
    LEAST.into_iter().filter_map(one).collect()
}

/// GB/s of every store.
pub(super) fn others(result: &Value) -> String {
    let mut text = String::from("\n### Beside other stores\n");
    let mut sizes: Vec<u64> = Vec::new();
    let mut cells: BTreeMap<(String, u64), [f64; 2]> = BTreeMap::new();
    let mut names: Vec<(String, String)> = Vec::new();
    for row in rows(result) {
        let name = row["engine"].as_str().unwrap_or_default().to_owned();
        let bytes = row["block_bytes"].as_u64().unwrap_or_default();
        if !sizes.contains(&bytes) {
            sizes.push(bytes);
        }
        if !names.iter().any(|(known, _)| *known == name) {
            let verify = row["verify"].as_str().unwrap_or_default().to_owned();
            names.push((name.clone(), verify));
        }
        let at = usize::from(row["op"] == "get");
        cells.entry((name, bytes)).or_insert([f64::NAN; 2])[at] = number(row, "/gbps_med");
    }
    sizes.sort_unstable();
    let headings: Vec<String> = sizes.iter().map(|bytes| format!("{bytes} B")).collect();
    let _ = writeln!(
        text,
        "\nPut / get in GB/s, one client, medians of rounds.\n\n| store | verifies | {} |\n|---|---|{}",
        headings.join(" | "),
        "---|".repeat(sizes.len())
    );
    for (name, verify) in &names {
        let cell = |bytes: &u64| {
            let found = cells.get(&(name.clone(), *bytes));
            found.map_or("–".to_owned(), |[put, get]| {
                format!("{} / {}", shown(*put), shown(*get))
            })
        };
        let all: Vec<String> = sizes.iter().map(cell).collect();
        let _ = writeln!(text, "| `{name}` | {verify} | {} |", all.join(" | "));
    }
    let absent = result.get("absent").and_then(Value::as_array);
    for one in absent.into_iter().flatten() {
        let word = |key: &str| one[key].as_str().unwrap_or_default();
        // A path of one machine says nothing on a page.
        let message = match word("message").split_once("; get it with ") {
            Some((_, how)) => format!("not installed; get it with {how}"),
            None => word("message").to_owned(),
        };
        let _ = writeln!(text, "\n`{}`: {message}.", word("engine"));
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn met(judge: Judge, row: Value) -> Vec<bool> {
        let lines = lines(judge, "case", &json!({ "rows": [row] }));
        lines.iter().map(|line| line.is_met).collect()
    }

    #[test]
    fn a_limit_that_is_missed_is_marked() {
        let row = |ratio: f64, memcpy: f64| {
            json!({"gbps_med": 1.0, "ratio_med": ratio, "bad_blocks": 0,
                   "baseline": {"name": "bare"}, "beside": [{"name": "memcpy", "ratio_med": memcpy}]})
        };
        assert_eq!(met(Judge::Memory, row(0.95, 0.6)), [true, false]);
        assert_eq!(met(Judge::Memory, row(0.85, 0.8)), [false, true]);
        let mut bad = row(1.0, 1.0);
        bad["bad_blocks"] = 1.into();
        assert_eq!(met(Judge::Memory, bad), [true, true, false]);
    }

    #[test]
    fn what_is_not_there_is_not_met() {
        let row = json!({"engine": "kvgate_memory", "op": "put", "block_bytes": 65536, "bad_blocks": 0, "beside": []});
        assert_eq!(met(Judge::Compare, row), [false]);
        let failed = json!({"error": {"message": "no disk"}});
        assert!(!lines(Judge::Ratio, "case", &failed)[0].is_met);
        // A row without figures is no row that is good.
        assert_eq!(met(Judge::Memory, json!({"bad_blocks": 0})), [false, false]);
    }
}
