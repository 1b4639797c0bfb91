//! Pictures of the rows: what varies in a run is the axis, and every engine and every bare loop is a line.

use std::path::Path;

use super::row::Row;
use crate::handoff::failure::Failure;
use crate::transfer_bench::plot::{Axes, Line, draw_lines};

/// Draws the rows into an SVG file: milliseconds over tokens where rows have them, otherwise GB/s over the bytes of a
/// block.
pub(super) fn draw(path: &Path, rows: &[Row]) -> Result<(), Failure> {
    let curve: Vec<&Row> = rows
        .iter()
        .filter(|row| row.tokens.is_some() && row.op != "loadback")
        .collect();
    if !curve.is_empty() {
        let axes = Axes {
            caption: format!("{} over the length of the prefix, median", curve[0].op),
            x: "tokens",
            y: "ms",
        };
        return draw_lines(path, &axes, &times(&curve));
    }
    let axes = Axes {
        caption: "Median of slices".to_owned(),
        x: "bytes of a block",
        y: "GB/s",
    };
    draw_lines(path, &axes, &rates(rows))
}

fn times(rows: &[&Row]) -> Vec<Line> {
    let mut lines = Vec::new();
    for row in rows {
        let tokens = f64::from(row.tokens.unwrap_or_default());
        let name = match row.case {
            "" => format!("kvgate {}", row.op),
            case => case.to_owned(),
        };
        push(&mut lines, &name, (tokens, row.p50_us / 1e3));
        if row.baseline.gbps_med > 0.0 {
            let bytes = row.gbps_med * row.p50_us * 1e3;
            let ms = bytes / row.baseline.gbps_med / 1e6;
            push(&mut lines, &row.baseline.name, (tokens, ms));
        }
    }
    lines
}

fn rates(rows: &[Row]) -> Vec<Line> {
    let mut lines = Vec::new();
    for row in rows {
        let at = row.block_bytes as f64;
        let what = format!("{} {} {}", row.tier, row.op, row.case);
        let what = what.trim();
        push(
            &mut lines,
            &format!("{} {what}", row.engine),
            (at, row.gbps_med),
        );
        let beside = row.beside.iter().map(|one| (&one.name, one.gbps_med));
        let bares = std::iter::once((&row.baseline.name, row.baseline.gbps_med)).chain(beside);
        for (name, gbps) in bares.filter(|(name, _)| !name.is_empty()) {
            push(&mut lines, &format!("{name} ({what})"), (at, gbps));
        }
    }
    lines
}

fn push(lines: &mut Vec<Line>, name: &str, point: (f64, f64)) {
    match lines.iter_mut().find(|line: &&mut Line| line.name == name) {
        Some(line) => line.points.push(point),
        None => lines.push(Line {
            name: name.to_owned(),
            points: vec![point],
        }),
    }
}
