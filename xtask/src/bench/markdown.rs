//! The tables of `cargo xtask bench transfer`, from what the runs printed.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::Value;

use super::steps::{CURVES, GRIDS, Rule, Step};

/// A machine that had more to do than this is not quiet.
const QUIET_LOAD: f64 = 0.7;

/// Whether this one-minute load is that of a machine with nothing else to do.
pub(super) fn is_quiet(load: f64) -> bool {
    load <= QUIET_LOAD
}

/// Where it was measured.
pub(super) struct Machine {
    pub(super) processor: String,
    pub(super) cores: usize,
    pub(super) memory_gib: u64,
    pub(super) kernel: String,
    /// One-minute load before the first run.
    pub(super) load_before: f64,
    /// And after the last.
    pub(super) load_after: f64,
    /// Shorter slices than figures need.
    pub(super) is_quick: bool,
}

/// A step and the object that it printed.
pub(super) struct Measured {
    pub(super) step: &'static Step,
    /// Words of the command line.
    pub(super) args: String,
    pub(super) result: Value,
}

/// A grid and its command line.
pub(super) struct Grid {
    pub(super) args: String,
    pub(super) result: Value,
}

/// One line of the speed table.
pub(super) struct Line {
    pub(super) case: String,
    pub(super) limit: String,
    pub(super) measured: String,
    pub(super) is_met: bool,
}

/// A line as a row of the table; figures that miss their limit are bold.
pub(super) fn line_of(line: &Line, command: &str) -> String {
    let mark = if line.is_met { "" } else { "**" };
    format!(
        "| {} | {} | {mark}{}{mark} | {command} |\n",
        line.case, line.limit, line.measured
    )
}

/// Everything between the marks.
pub(super) fn page(machine: &Machine, measured: &[Measured], grids: &[Grid]) -> String {
    let mut text = String::new();
    head(&mut text, machine);
    text += "\n### Cases and limits\n\n| case | limit | measured | command |\n|---|---|---|---|\n";
    for one in measured {
        let mut command = format!("`{} {}`", one.step.program, one.args);
        for line in lines(one.step, &one.result) {
            text += &line_of(&line, &command);
            command = "″".to_owned();
        }
    }
    let alike = symmetry(measured)
        .into_iter()
        .map(|line| (line, "the rows of tcp above"));
    let beside = beside_peers(grids)
        .into_iter()
        .map(|line| (line, "the grid below"));
    for (line, from) in alike.chain(beside) {
        text += &line_of(&line, from);
    }
    text += "\nBold figures miss their limit.\n";
    let is_drawn = |case: &str| measured.iter().any(|one| one.step.case == case);
    for (case, file) in CURVES.iter().filter(|(case, _)| is_drawn(case)) {
        let _ = writeln!(text, "\n![{case}](performance/{file})");
    }
    for (grid, (op, file)) in grids.iter().zip(GRIDS) {
        grid_tables(&mut text, grid, (op, file));
    }
    text
}

pub(super) fn head(text: &mut String, machine: &Machine) {
    let Machine {
        processor,
        cores,
        memory_gib,
        kernel,
        load_before,
        load_after,
        is_quick,
    } = machine;
    let _ = writeln!(
        text,
        "{processor}, {cores} cores, {memory_gib} GiB, Linux {kernel}; one-minute load {load_before:.1} before the \
         first run, {load_after:.1} after the last."
    );
    if *is_quick {
        text.push_str("\n**A quick run (`--quick`): shorter slices than figures need, and a part of the grid.**\n");
    }
    if !is_quiet(*load_before) {
        text.push_str(
            "\n**Measured on a busy machine: other programs had the processor, too. Ratios were taken in the same \
             milliseconds and bear that better than times and GB/s, but none of these figures is to be relied on.**\n",
        );
    }
}

pub(super) fn number(value: &Value, path: &str) -> f64 {
    value
        .pointer(path)
        .and_then(Value::as_f64)
        .unwrap_or(f64::NAN)
}

fn failed(step: &Step, result: &Value) -> Option<Line> {
    let message = result.pointer("/error/message")?.as_str()?;
    Some(Line {
        case: step.case.to_owned(),
        limit: "–".to_owned(),
        measured: format!("failed: {}", message.replace('|', "/")),
        is_met: false,
    })
}

/// The lines of one step.
fn lines(step: &Step, result: &Value) -> Vec<Line> {
    if let Some(line) = failed(step, result) {
        return vec![line];
    }
    match step.rule {
        Rule::SeenUs(limit_us) => vec![seen(step, result, limit_us)],
        Rule::OverBareUs(p50_us, p99_us) => vec![over_bare(step, result, (p50_us, p99_us))],
        Rule::Plan(ms, bytes) => vec![plan(step, result, (ms, bytes))],
        Rule::PostUs(limit_us) => vec![posts(step, result, limit_us)],
        Rule::Idle(cores, switches) => idle(step, result, (cores, switches)),
        Rule::Curve => curve(step, result).into_iter().collect(),
        Rule::Limit(_) | Rule::Memcpy(_) | Rule::OverMemcpyUs(_) => rows(result)
            .iter()
            .map(|row| throughput(step, row))
            .collect(),
    }
}

pub(super) fn rows(result: &Value) -> &[Value] {
    let rows = result.get("rows").and_then(Value::as_array);
    rows.map_or(&[], Vec::as_slice)
}

fn throughput(step: &Step, row: &Value) -> Line {
    let of = |path| number(row, path);
    let (bytes, pages) = (of("/page_bytes"), of("/pages"));
    let gbps = of("/gbps_med");
    let case = match row.get("model") {
        Some(_) => step.case.to_owned(),
        None => format!("{}, {bytes} B × {pages}", step.case),
    };
    let (limit, measured, is_met) = match step.rule {
        Rule::OverMemcpyUs(limit_us) => {
            let copy_us = bytes * pages / of("/memcpy_gbps_med") / 1e3;
            let over_us = of("/p50_us") - copy_us;
            (
                format!("memcpy ({copy_us:.1} us) + {limit_us} us"),
                format!("{:.1} us p50 (+ {over_us:.1})", of("/p50_us")),
                over_us <= limit_us,
            )
        }
        Rule::Limit(share) => {
            let (ratio, name) = (of("/limit/ratio_med"), row["limit"]["name"].as_str());
            let name = name.unwrap_or("its loop");
            (
                format!("{share:.2} of {name}"),
                format!(
                    "{ratio:.2} ({gbps:.2} GB/s, {:.2} of memcpy)",
                    of("/ratio_med")
                ),
                ratio >= share,
            )
        }
        Rule::Memcpy(share) => {
            let ratio = of("/ratio_med");
            (
                format!("{share:.2} of memcpy"),
                format!("{ratio:.2} ({gbps:.2} GB/s)"),
                ratio >= share,
            )
        }
        _ => (String::new(), String::new(), true),
    };
    let is_right = of("/bad_pages") == 0.0;
    Line {
        case,
        limit,
        measured: match is_right {
            true => measured,
            false => format!("{} BAD PAGES", of("/bad_pages")),
        },
        is_met: is_met && is_right,
    }
}

fn seen(step: &Step, result: &Value, limit_us: f64) -> Line {
    let us = number(result, "/latency/post_to_seen/p50_us");
    let p99 = number(result, "/latency/post_to_seen/p99_us");
    Line {
        case: step.case.to_owned(),
        limit: format!("{limit_us} us p50"),
        measured: format!("{us:.2} us p50, {p99:.1} us p99"),
        is_met: us <= limit_us,
    }
}

fn over_bare(step: &Step, result: &Value, (p50_us, p99_us): (f64, f64)) -> Line {
    let found = result.get("latency").or_else(|| result.get("notify"));
    let found = found.unwrap_or(&Value::Null);
    let (p50, p99) = (
        number(found, "/over_bare_p50_us"),
        number(found, "/over_bare_p99_us"),
    );
    let bare = number(found, "/bare/p50_us");
    Line {
        case: step.case.to_owned(),
        limit: format!("bare wake + {p50_us} us p50, + {p99_us} us p99"),
        measured: format!("{bare:.1} us {p50:+.1} us p50, {p99:+.1} us p99"),
        is_met: p50 <= p50_us && p99 <= p99_us,
    }
}

fn plan(step: &Step, result: &Value, (limit_ms, limit_bytes): (f64, f64)) -> Line {
    let of = |key: &str| number(result, &format!("/plan/{key}"));
    let (plan_ms, post_ms) = (of("plan_us") / 1e3, of("post_us") / 1e3);
    let bytes = of("bytes_per_descriptor");
    Line {
        case: format!("{}, {} descriptors", step.case, of("descriptors")),
        limit: format!("plan + post {limit_ms} ms, {limit_bytes} B a descriptor"),
        measured: format!("{plan_ms:.1} + {post_ms:.1} ms, {bytes:.1} B"),
        is_met: plan_ms + post_ms <= limit_ms && bytes <= limit_bytes,
    }
}

fn posts(step: &Step, result: &Value, limit_us: f64) -> Line {
    let of = |key: &str| number(result, &format!("/plan/{key}"));
    let each_us = of("post_us") / of("posts");
    Line {
        case: step.case.to_owned(),
        limit: format!("{limit_us} us a post, without the bytes"),
        measured: format!("{each_us:.1} us ({} posts)", of("posts")),
        is_met: each_us <= limit_us,
    }
}

fn idle(step: &Step, result: &Value, (limit_cores, limit_switches): (f64, f64)) -> Vec<Line> {
    let of = |who: &str, key: &str| number(result, &format!("/idle/{who}/{key}"));
    let one = |who: &str, case: &str, limits: (f64, f64)| {
        let (cores, switches) = (of(who, "cpu_share"), of(who, "context_switches_s"));
        Line {
            case: format!("{}, {case}", step.case),
            limit: format!("{} core, {} context switches a second", limits.0, limits.1),
            measured: format!("{cores:.6} core, {switches:.2}"),
            is_met: cores <= limits.0 && switches <= limits.1,
        }
    };
    vec![
        one("with_peer", "one peer", (limit_cores, limit_switches)),
        one("peer", "its peer", (limit_cores, limit_switches)),
        // Reading the clock and /proc at both ends is all there is.
        one("alone", "no peer", (0.0001, 0.0)),
    ]
}

/// How much the cost of a page moves over the curve, apart from the copy of its bytes.
fn curve(step: &Step, result: &Value) -> Option<Line> {
    let ns = |row: &Value, key: &str| number(row, "/page_bytes") / number(row, key);
    let rows = rows(result);
    let (first, last) = (rows.first()?, rows.last()?);
    let at = |row: &Value| {
        format!(
            "{:.0} ns a page at {} pages (memcpy {:.0})",
            ns(row, "/gbps_med"),
            number(row, "/pages"),
            ns(row, "/memcpy_gbps_med")
        )
    };
    Some(Line {
        case: step.case.to_owned(),
        limit: "flat".to_owned(),
        measured: format!("{}, {}", at(first), at(last)),
        is_met: true,
    })
}

/// Reads and writes over tcp are alike.
fn symmetry(measured: &[Measured]) -> Vec<Line> {
    let find = |case: &str| measured.iter().find(|one| one.step.case == case);
    let (Some(write), Some(read)) = (find("tcp, write"), find("tcp, read")) else {
        return Vec::new();
    };
    let pairs = rows(&write.result).iter().zip(rows(&read.result));
    pairs
        .map(|(write, read)| {
            let ratio = number(write, "/gbps_med") / number(read, "/gbps_med");
            let factor = ratio.max(1.0 / ratio);
            Line {
                case: format!(
                    "tcp, read against write, {} B × {}",
                    number(write, "/page_bytes"),
                    number(write, "/pages")
                ),
                limit: "within 1.25 ×".to_owned(),
                measured: format!("{factor:.2} ×"),
                is_met: factor <= 1.25,
            }
        })
        .collect()
}

/// The cells of a grid.
fn cells(grid: &Value) -> &[Value] {
    let cells = grid.pointer("/compare/cells").and_then(Value::as_array);
    cells.map_or(&[], Vec::as_slice)
}

fn cell<'a>(grid: &'a Value, engine: &str, bytes: u64, pages: u64) -> Option<&'a Value> {
    cells(grid).iter().find(|cell| {
        cell["engine"] == engine && cell["page_bytes"] == bytes && cell["pages"] == pages
    })
}

/// The limits that name a peer.
fn beside_peers(grids: &[Grid]) -> Vec<Line> {
    let mut lines = Vec::new();
    for (grid, (op, _)) in grids.iter().zip(GRIDS) {
        let grid = &grid.result;
        let gbps = |engine: &str, bytes, pages| {
            cell(grid, engine, bytes, pages).map(|cell| number(cell, "/gbps_med"))
        };
        let against = |own: &str, peer: &str, bytes, pages, factor: f64| {
            let ratio = gbps(own, bytes, pages)? / gbps(peer, bytes, pages)?;
            Some(Line {
                case: format!("{own}, {op}, {bytes} B × {pages}"),
                limit: format!("{factor} × {peer}"),
                measured: format!("{ratio:.2} ×"),
                is_met: ratio >= factor,
            })
        };
        for bytes in [4096, 8448, 16384, 37376] {
            lines.extend(against("kvgate_shm", "nixl_default", bytes, 1024, 4.0));
            lines.extend(against("kvgate_shm", "ucx_posix", bytes, 1024, 1.3));
            lines.extend(processor_time(grid, op, bytes));
        }
        for (bytes, pages) in [
            (4096, 64),
            (4096, 1024),
            (8448, 64),
            (8448, 1024),
            (16384, 64),
            (16384, 1024),
            (37376, 64),
            (37376, 1024),
            (65536, 64),
            (65536, 1024),
        ] {
            let is_named = bytes <= 8448 && pages == 1024;
            let (ucx, nixl) = if is_named { (1.5, 3.0) } else { (0.85, 0.85) };
            lines.extend(against("kvgate_tcp", "ucx_tcp", bytes, pages, ucx));
            lines.extend(against("kvgate_tcp", "nixl_tcp", bytes, pages, nixl));
        }
    }
    lines
}

fn processor_time(grid: &Value, op: &str, bytes: u64) -> Option<Line> {
    let of = |engine| cell(grid, engine, bytes, 1024).map(|cell| number(cell, "/cpu_ns_kib"));
    let ratio = of("kvgate_shm")? / of("ucx_posix")?;
    Some(Line {
        case: format!("kvgate_shm, {op}, {bytes} B × 1024, processor time for a KiB"),
        limit: "0.6 of ucx_posix".to_owned(),
        measured: format!("{ratio:.2}"),
        is_met: ratio <= 0.6,
    })
}

fn grid_tables(text: &mut String, Grid { args, result }: &Grid, (op, file): (&str, &str)) {
    let grid = result;
    let _ = writeln!(text, "\n### Grid, {op}\n");
    if let Some(message) = grid.pointer("/error/message").and_then(Value::as_str) {
        let _ = writeln!(text, "failed: {message}");
        return;
    }
    let _ = writeln!(text, "`transfer-bench {args}`\n");
    let mut engines: Vec<&str> = Vec::new();
    for engine in cells(grid)
        .iter()
        .filter_map(|cell| cell["engine"].as_str())
    {
        if !engines.contains(&engine) {
            engines.push(engine);
        }
    }
    for (title, key) in [
        ("GB/s, median of slices", "/gbps_med"),
        (
            "share of memcpy of the same pages, median of pairs",
            "/ratio_med",
        ),
        (
            "processor time of both processes, ns for a KiB",
            "/cpu_ns_kib",
        ),
        ("time of a request, us, p50", "/p50_us"),
        ("time of a request, us, p99", "/p99_us"),
    ] {
        let _ = writeln!(
            text,
            "**{title}**\n\n| B × pages | {} |",
            engines.join(" | ")
        );
        let _ = writeln!(text, "|---|{}", "---|".repeat(engines.len()));
        for (bytes, pages) in loads(grid) {
            let values = engines.iter().map(|engine| {
                let found = cell(grid, engine, bytes, pages);
                found.map_or("–".to_owned(), |cell| shown(number(cell, key)))
            });
            let values: Vec<_> = values.collect();
            let _ = writeln!(text, "| {bytes} × {pages} | {} |", values.join(" | "));
        }
        text.push('\n');
    }
    let bad: Vec<_> = cells(grid)
        .iter()
        .filter(|cell| cell["bad_pages"] != 0)
        .map(|cell| {
            format!(
                "{} {} × {}",
                cell["engine"], cell["page_bytes"], cell["pages"]
            )
        })
        .collect();
    match bad.is_empty() {
        true => text.push_str(
            "Every page of the verified requests held what was sent, with every engine.\n",
        ),
        false => {
            let _ = writeln!(text, "**Bad pages: {}**", bad.join(", "));
        }
    }
    for key in ["absent", "failed"] {
        let all = grid
            .pointer(&format!("/compare/{key}"))
            .and_then(Value::as_array);
        for one in all.into_iter().flatten() {
            let word = |key: &str| one[key].as_str().unwrap_or_default().to_owned();
            let _ = match key {
                "absent" => writeln!(
                    text,
                    "\nNot installed: {} ({}).",
                    word("engine"),
                    word("install")
                ),
                _ => writeln!(
                    text,
                    "\n{} on {}: {}.",
                    word("engine"),
                    word("asked"),
                    word("message")
                ),
            };
        }
    }
    let _ = writeln!(text, "\n![grid, {op}](performance/{file})");
}

fn loads(grid: &Value) -> BTreeSet<(u64, u64)> {
    let of = |cell: &Value| Some((cell["page_bytes"].as_u64()?, cell["pages"].as_u64()?));
    cells(grid).iter().filter_map(of).collect()
}

/// Three digits are enough.
pub(super) fn shown(value: f64) -> String {
    match value {
        value if !value.is_finite() => "–".to_owned(),
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value if value >= 0.1 => format!("{value:.2}"),
        value => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests;
