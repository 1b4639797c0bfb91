//! A picture of the rows: GB/s of the engine, the plain copy and the bare loop, one group of bars per row.

use std::path::Path;

use plotters::prelude::*;

use super::row::Row;
use crate::handoff::failure::{Failure, FailureKind};

const COLOURS: [RGBColor; 3] = [
    RGBColor(0, 90, 160),
    RGBColor(150, 150, 150),
    RGBColor(220, 130, 30),
];

/// Draws the rows into an SVG file.
pub fn draw(path: &Path, rows: &[Row]) -> Result<(), Failure> {
    let width = (160 + 90 * rows.len() as u32).max(640);
    let root = SVGBackend::new(path, (width, 480)).into_drawing_area();
    picture(&root, rows).map_err(|error| {
        let message = format!("--plot {}: {error}", path.display());
        Failure::new(FailureKind::Output, message).with_field("plot", path.display())
    })
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn picture(root: &Area<'_>, rows: &[Row]) -> Result<(), Box<dyn std::error::Error>> {
    root.fill(&WHITE)?;
    let bars = |row: &Row| [row.gbps_med, row.memcpy_gbps_med, row.limit.gbps_med];
    let highest = rows.iter().flat_map(bars).fold(1.0, f64::max) * 1.15;
    let mut chart = ChartBuilder::on(root)
        .caption("Median of slices, GB/s", ("sans-serif", 18))
        .margin(10)
        .x_label_area_size(50)
        .y_label_area_size(50)
        .build_cartesian_2d(0.0..rows.len().max(1) as f64, 0.0..highest)?;
    let label = |x: &f64| {
        let row = rows.get(*x as usize);
        row.map_or(String::new(), |row| {
            format!(
                "{} {} {} x {}",
                row.backend, row.op, row.page_bytes, row.pages
            )
        })
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(rows.len().max(1))
        .x_label_formatter(&label)
        .x_label_offset(40)
        .y_desc("GB/s")
        .draw()?;
    for (kind, name) in ["engine", "memcpy", "bare loop"].into_iter().enumerate() {
        let colour = COLOURS[kind];
        let bar = |(index, row): (usize, &Row)| {
            let left = index as f64 + 0.12 + kind as f64 * 0.26;
            Rectangle::new(
                [(left, 0.0), (left + 0.24, bars(row)[kind])],
                colour.filled(),
            )
        };
        chart
            .draw_series(rows.iter().enumerate().map(bar))?
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
