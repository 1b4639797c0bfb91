//! Pictures of the rows. Where the length of a page varies: GB/s over it. Where the number of pages varies: ns per
//! page over it. Otherwise one group of bars per row. A comparison adds a line for each engine.

use std::collections::BTreeMap;
use std::path::Path;

use plotters::prelude::*;

use super::compare::{Comparison, EngineKind};
use super::row::Row;
use crate::handoff::failure::{Failure, FailureKind};

const COLOURS: [RGBColor; 22] = [
    RGBColor(0, 90, 160),
    RGBColor(150, 150, 150),
    RGBColor(220, 130, 30),
    RGBColor(0, 140, 110),
    RGBColor(190, 40, 60),
    RGBColor(120, 80, 170),
    RGBColor(60, 170, 220),
    RGBColor(90, 60, 40),
    RGBColor(200, 170, 0),
    RGBColor(230, 120, 170),
    RGBColor(100, 130, 40),
    RGBColor(40, 40, 90),
    RGBColor(170, 90, 20),
    RGBColor(0, 0, 0),
    RGBColor(120, 200, 150),
    RGBColor(240, 90, 70),
    RGBColor(70, 90, 220),
    RGBColor(150, 0, 100),
    RGBColor(0, 110, 60),
    RGBColor(210, 200, 120),
    RGBColor(100, 100, 100),
    RGBColor(250, 170, 120),
];

/// One named line.
#[derive(Clone, Debug)]
pub struct Line {
    /// Its name.
    pub name: String,
    /// Its points, x in order.
    pub points: Vec<(f64, f64)>,
}

/// What is drawn when one thing varies.
#[derive(Clone, Debug)]
pub struct Axes {
    /// Above the picture.
    pub caption: String,
    /// Below it.
    pub x: &'static str,
    /// Beside it.
    pub y: &'static str,
}

/// Draws the rows into an SVG file.
pub fn draw(path: &Path, rows: &[Row], comparison: Option<&Comparison>) -> Result<(), Failure> {
    let sizes = different(rows.iter().map(|row| row.page_bytes));
    let counts = different(rows.iter().map(|row| row.pages));
    let drawn = match (sizes.len(), counts.len()) {
        (2.., _) => over_sizes(path, rows, comparison, &counts),
        (_, 2..) => over_counts(path, rows, comparison),
        _ => {
            let bars = bars_of(rows, comparison);
            let width = (220 + 120 * bars.len() as u32).max(640);
            let root = SVGBackend::new(path, (width, 480)).into_drawing_area();
            bar_picture(&root, &bars)
        }
    };
    drawn.map_err(|error| cannot_draw(path, &*error))
}

type Drawn = Result<(), Box<dyn std::error::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn different(values: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut all: Vec<_> = values.collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Of several numbers of pages the largest one.
fn over_sizes(path: &Path, rows: &[Row], comparison: Option<&Comparison>, counts: &[u64]) -> Drawn {
    let pages = counts.last().copied().unwrap_or_default();
    let rows: Vec<_> = rows.iter().filter(|row| row.pages == pages).collect();
    let of = |value: fn(&Row) -> f64| {
        let points = rows.iter().map(|row| (row.page_bytes as f64, value(row)));
        points.collect()
    };
    let mut lines = own_lines(&rows, of);
    for cell in comparison.iter().flat_map(|all| &all.cells) {
        if u64::from(cell.pages) == pages {
            let point = (cell.page_bytes as f64, cell.figure("gbps_med"));
            push(&mut lines, &cell.engine, cell.kind, point);
        }
    }
    let axes = Axes {
        caption: format!("{} pages a request, {}, median of slices", pages, op(&rows)),
        x: "bytes of a page",
        y: "GB/s",
    };
    line_picture(path, &axes, &lines)
}

fn over_counts(path: &Path, rows: &[Row], comparison: Option<&Comparison>) -> Drawn {
    let rows: Vec<_> = rows.iter().collect();
    let ns = |row: &Row, gbps: f64| row.page_bytes as f64 / gbps;
    let of = |value: fn(&Row) -> f64| {
        let points = rows
            .iter()
            .map(|row| (row.pages as f64, ns(row, value(row))));
        points.collect()
    };
    let mut lines = own_lines(&rows, of);
    for cell in comparison.iter().flat_map(|all| &all.cells) {
        let ns = cell.page_bytes as f64 / cell.figure("gbps_med");
        push(
            &mut lines,
            &cell.engine,
            cell.kind,
            (f64::from(cell.pages), ns),
        );
    }
    let bytes = rows.first().map_or(0, |row| row.page_bytes);
    let axes = Axes {
        caption: format!("Pages of {bytes} B, {}, median of slices", op(&rows)),
        x: "pages a request",
        y: "ns per page",
    };
    line_picture(path, &axes, &lines)
}

fn op(rows: &[&Row]) -> &'static str {
    rows.first().map_or("", |row| row.op)
}

/// The engine, the plain copy, and the bare loop if it is another one.
fn own_lines(rows: &[&Row], of: impl Fn(fn(&Row) -> f64) -> Vec<(f64, f64)>) -> Vec<Line> {
    let Some(first) = rows.first() else {
        return Vec::new();
    };
    let line = |name: &str, points| Line {
        name: name.to_owned(),
        points,
    };
    let mut lines = vec![
        line(&first.backend, of(|row| row.gbps_med)),
        line("memcpy", of(|row| row.memcpy_gbps_med)),
    ];
    if first.limit.name != "memcpy" {
        lines.push(line(first.limit.name, of(|row| row.limit.gbps_med)));
    }
    lines
}

/// The rows have the plain copies already.
fn push(lines: &mut Vec<Line>, engine: &str, kind: EngineKind, point: (f64, f64)) {
    if kind == EngineKind::Limit && engine == "memcpy" {
        return;
    }
    match lines.iter_mut().find(|line| line.name == engine) {
        Some(line) => line.points.push(point),
        None => lines.push(Line {
            name: engine.to_owned(),
            points: vec![point],
        }),
    }
}

/// Of the picture, for the names of the lines.
const NAMES_FROM: i32 = 660;

/// Draws lines; the first one, and those of kvgate, are thick. Every value of x gets the same room: they are few, and far
/// apart. Both axes begin above 0.
///
/// # Errors
/// The file cannot be written.
pub fn draw_lines(path: &Path, axes: &Axes, lines: &[Line]) -> Result<(), Failure> {
    line_picture(path, axes, lines).map_err(|error| cannot_draw(path, &*error))
}

fn cannot_draw(path: &Path, error: &dyn std::error::Error) -> Failure {
    let message = format!("--plot {}: {error}", path.display());
    Failure::new(FailureKind::Output, message).with_field("plot", path.display())
}

fn line_picture(path: &Path, axes: &Axes, lines: &[Line]) -> Drawn {
    let root = SVGBackend::new(path, (860, 480)).into_drawing_area();
    root.fill(&WHITE)?;
    let (left, right) = root.split_horizontally(NAMES_FROM);
    let is_drawn = |value: f64| value.is_finite() && value > 0.0;
    let points = || lines.iter().flat_map(|line| &line.points);
    let values = different(points().map(|point| point.0 as u64));
    let heights = points().map(|point| point.1).filter(|y| is_drawn(*y));
    let (low, high) = heights.fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), y| {
        (low.min(y), high.max(y))
    });
    let y = match low <= high {
        true => low * 0.8..high * 1.25,
        false => 0.1..10.0,
    };
    let last = values.len().saturating_sub(1) as f64;
    let mut chart = ChartBuilder::on(&left)
        .caption(&axes.caption, ("sans-serif", 17))
        .margin(10)
        .x_label_area_size(45)
        .y_label_area_size(60)
        .build_cartesian_2d(-0.3..last + 0.3, y.log_scale())?;
    let label = |x: &f64| {
        let is_whole = (x - x.round()).abs() < 1e-6;
        let value = values.get(x.round() as usize).filter(|_| is_whole);
        value.map_or(String::new(), u64::to_string)
    };
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc(axes.x)
        .y_desc(axes.y)
        .x_labels(2 * values.len())
        .x_label_formatter(&label)
        .y_label_formatter(&|value| short(*value))
        .draw()?;
    for (number, line) in lines.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let is_own = number == 0 || line.name.starts_with("kvgate");
        let style = colour.stroke_width(if is_own { 3 } else { 1 });
        let at = |(x, y): &(f64, f64)| {
            let index = values.binary_search(&(*x as u64)).ok()?;
            is_drawn(*y).then_some((index as f64, *y))
        };
        let drawn: Vec<_> = line.points.iter().filter_map(at).collect();
        let dots = drawn.iter().map(|at| Circle::new(*at, 3, colour.filled()));
        chart.draw_series(dots)?;
        chart.draw_series([PathElement::new(drawn, style)])?;
        let row = 44 + 19 * number as i32;
        right.draw(&PathElement::new([(6, row), (28, row)], style))?;
        let text = ("sans-serif", 13).into_font();
        right.draw(&Text::new(line.name.clone(), (34, row - 7), text))?;
    }
    root.present()?;
    Ok(())
}

/// A number of an axis.
fn short(value: f64) -> String {
    match value {
        value if value >= 10.0 => format!("{value:.0}"),
        value if value >= 0.1 => format!("{value:.1}"),
        value => format!("{value}"),
    }
}

/// A group of bars: its name, and what stands in it.
struct Bars {
    label: String,
    values: [f64; 3],
}

fn bars_of(rows: &[Row], comparison: Option<&Comparison>) -> Vec<Bars> {
    let mut bars: Vec<_> = rows
        .iter()
        .map(|row| Bars {
            label: format!(
                "{} {} {} x {}",
                row.backend, row.op, row.page_bytes, row.pages
            ),
            values: [row.gbps_med, row.memcpy_gbps_med, row.limit.gbps_med],
        })
        .collect();
    // Other engines have no bare loop of their own beside them.
    let mut others = BTreeMap::new();
    for cell in comparison.iter().flat_map(|all| &all.cells) {
        others.insert(
            cell.engine.clone(),
            [cell.figure("gbps_med"), cell.figure("memcpy_med"), 0.0],
        );
    }
    let others = others.into_iter();
    bars.extend(others.map(|(label, values)| Bars { label, values }));
    bars
}

fn bar_picture(root: &Area<'_>, bars: &[Bars]) -> Drawn {
    root.fill(&WHITE)?;
    let values = bars.iter().flat_map(|bar| bar.values);
    let highest = values.fold(1.0, f64::max) * 1.15;
    let mut chart = ChartBuilder::on(root)
        .caption("Median of slices, GB/s", ("sans-serif", 18))
        .margin(10)
        .x_label_area_size(50)
        .y_label_area_size(50)
        .build_cartesian_2d(0.0..bars.len().max(1) as f64, 0.0..highest)?;
    let label = |x: &f64| {
        let bar = bars.get(*x as usize);
        bar.map_or(String::new(), |bar| bar.label.clone())
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(bars.len().max(1))
        .x_label_formatter(&label)
        .x_label_offset(40)
        .y_desc("GB/s")
        .draw()?;
    for (kind, name) in ["engine", "memcpy", "bare loop"].into_iter().enumerate() {
        let colour = COLOURS[kind];
        let bar = |(index, bar): (usize, &Bars)| {
            let left = index as f64 + 0.12 + kind as f64 * 0.26;
            Rectangle::new(
                [(left, 0.0), (left + 0.24, bar.values[kind])],
                colour.filled(),
            )
        };
        chart
            .draw_series(bars.iter().enumerate().map(bar))?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
    }
    chart
        .configure_series_labels()
        .background_style(WHITE)
        .border_style(BLACK)
        .position(SeriesLabelPosition::UpperRight)
        .draw()?;
    root.present()?;
    Ok(())
}
