//! The timeline of a run as one static file: inline SVG, no script, nothing loaded from anywhere.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use super::failure::{Failure, FailureKind};
use super::report::Report;
use super::table;
use super::timeline::{Span, SpanKind, Timeline};

const CHART_WIDTH_PX: f64 = 1_100.0;
const LABEL_WIDTH_PX: f64 = 130.0;
const ROW_HEIGHT_PX: f64 = 14.0;
const AXIS_HEIGHT_PX: f64 = 22.0;
/// More requests than this make the picture longer and tell nothing new.
const MAX_REQUESTS: usize = 24;
/// Spans closer than this and of one kind are drawn as one.
const MERGE_PX: f64 = 0.4;

/// A report file that could be created; opened before the run, so that a wrong path costs no run.
#[derive(Debug)]
pub struct ReportFile {
    path: PathBuf,
    file: File,
    /// This run created it and has not written it yet.
    is_unfinished: bool,
}

impl ReportFile {
    /// Creates the file.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        let is_unfinished = !path.exists();
        let file = File::create(path).map_err(|error| refusal(path, &error))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            is_unfinished,
        })
    }

    /// Writes it; a full disk is an error and not a shorter report.
    pub fn write(mut self, report: &Report, timeline: &Timeline) -> Result<(), Failure> {
        let text = render(report, timeline);
        let written = self
            .file
            .write_all(text.as_bytes())
            .and_then(|()| self.file.flush());
        // A device such as /dev/full has nothing to synchronise; what counts there is the write.
        let is_file = self
            .file
            .metadata()
            .is_ok_and(|metadata| metadata.is_file());
        let synced = written.and_then(|()| {
            if is_file {
                self.file.sync_all()
            } else {
                Ok(())
            }
        });
        synced.map_err(|error| refusal(&self.path, &error))?;
        self.is_unfinished = false;
        Ok(())
    }
}

impl Drop for ReportFile {
    /// A run that fails leaves no empty file where there was none.
    fn drop(&mut self) {
        if self.is_unfinished {
            // The file may have been removed meanwhile; nothing depends on it.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn refusal(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(
        FailureKind::Output,
        format!("--report {}: {error}", path.display()),
    )
    .with_field("report", path.display())
}

/// Renders the page.
#[must_use]
pub fn render(report: &Report, timeline: &Timeline) -> String {
    let mut page = String::new();
    let title = escape(&format!(
        "{} tokens, {} steps, {} request(s), {}, index_k {}, latent {}",
        report.prompt_tokens,
        report.steps,
        report.requests.asked,
        report.transport,
        report.index_k,
        report.latent,
    ));
    page.push_str("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    push(
        &mut page,
        format_args!(
            "<title>pd-handoff: {title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        ),
    );
    push(
        &mut page,
        format_args!("<h1>pd-handoff</h1>\n<p>{title}</p>\n"),
    );
    push(
        &mut page,
        format_args!(
            "<p class=\"verdict\">{}</p>\n",
            escape(&report.verdict_line())
        ),
    );
    push_legend(&mut page);
    push_chart(&mut page, timeline);
    push(
        &mut page,
        format_args!(
            "<h2>Per layer</h2>\n<pre>{}</pre>\n",
            escape(&table::render(report))
        ),
    );
    page.push_str("</body>\n</html>\n");
    page
}

const STYLE: &str = "body{font:14px/1.5 system-ui,sans-serif;margin:2rem;color:#1c2330;background:#fff}\
h1{margin:0;font-size:1.4rem}h2{font-size:1.1rem}.verdict{font-weight:600}\
pre{font:12px/1.4 ui-monospace,monospace;overflow-x:auto}\
svg{display:block;font:11px ui-monospace,monospace;max-width:100%;height:auto}\
.key{display:inline-block;width:.9em;height:.9em;margin:0 .3em 0 1.2em;vertical-align:-.1em}";

/// Kind, colour, words of the legend; drawn in this order.
const KINDS: [(SpanKind, &str, &str); 4] = [
    (SpanKind::PrefillCompute, "#3b6fb6", "prefill computes"),
    (SpanKind::Transfer, "#e0a030", "transfer: post to landed"),
    (SpanKind::GateWait, "#c0392b", "decode waits at the gate"),
    (SpanKind::DecodeCompute, "#4c9a6a", "decode computes"),
];

fn push_legend(page: &mut String) {
    page.push_str("<p>");
    for (_, colour, words) in KINDS {
        push(
            page,
            format_args!("<span class=\"key\" style=\"background:{colour}\"></span>{words}"),
        );
    }
    page.push_str("</p>\n");
}

/// One row per (request, layer): compute above, transfer in the middle, decode below.
fn push_chart(page: &mut String, timeline: &Timeline) {
    let Some(start_us) = timeline.spans.iter().map(|span| span.start_us).min() else {
        page.push_str("<p>Nothing was recorded.</p>\n");
        return;
    };
    let end_us = timeline
        .spans
        .iter()
        .map(|span| span.end_us)
        .max()
        .unwrap_or(start_us)
        .max(start_us + 1);
    let mut rows: BTreeMap<(u32, u16), Vec<Span>> = BTreeMap::new();
    for span in &timeline.spans {
        rows.entry((span.request, span.layer))
            .or_default()
            .push(*span);
    }
    let requests: Vec<u32> = rows
        .keys()
        .map(|key| key.0)
        .fold(Vec::new(), |mut seen, request| {
            if seen.last() != Some(&request) {
                seen.push(request);
            }
            seen
        });
    if requests.len() > MAX_REQUESTS {
        push(
            page,
            format_args!(
                "<p>The first {MAX_REQUESTS} of {} requests.</p>\n",
                requests.len()
            ),
        );
        let shown = requests.get(..MAX_REQUESTS).unwrap_or(&requests);
        rows.retain(|key, _| shown.contains(&key.0));
    }
    let height = AXIS_HEIGHT_PX + rows.len() as f64 * ROW_HEIGHT_PX + 4.0;
    let width = LABEL_WIDTH_PX + CHART_WIDTH_PX + 20.0;
    push(
        page,
        format_args!(
            "<svg viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" role=\"img\" aria-label=\"timeline\">\n"
        ),
    );
    let scale = CHART_WIDTH_PX / (end_us - start_us) as f64;
    push_axis(page, (end_us - start_us) as f64, scale, height);
    for (index, ((request, layer), spans)) in rows.iter().enumerate() {
        let top = AXIS_HEIGHT_PX + index as f64 * ROW_HEIGHT_PX;
        push(
            page,
            format_args!(
                "<text x=\"0\" y=\"{:.1}\">request {request} layer {layer}</text>\n",
                top + 10.0
            ),
        );
        for (kind, colour, words) in KINDS {
            let (offset, bar) = lane(kind);
            for (from, to) in merged(spans, kind, start_us, scale) {
                push(
                    page,
                    format_args!(
                        "<rect x=\"{:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{bar}\" fill=\"{colour}\"><title>{words}: {:.3} to {:.3} ms</title></rect>\n",
                        LABEL_WIDTH_PX + from * scale,
                        top + offset,
                        ((to - from) * scale).max(0.5),
                        from / 1e3,
                        to / 1e3,
                    ),
                );
            }
        }
    }
    page.push_str("</svg>\n");
}

/// Offset and height of a kind's bars inside its row.
fn lane(kind: SpanKind) -> (f64, f64) {
    match kind {
        SpanKind::PrefillCompute => (1.0, 4.0),
        SpanKind::Transfer => (5.0, 4.0),
        SpanKind::GateWait | SpanKind::DecodeCompute => (9.0, 4.0),
    }
}

/// The spans of one kind in microseconds from the start; neighbours that touch on the screen are joined.
fn merged(spans: &[Span], kind: SpanKind, start_us: u64, scale: f64) -> Vec<(f64, f64)> {
    let mut bars: Vec<(f64, f64)> = spans
        .iter()
        .filter(|span| span.kind == kind)
        .map(|span| {
            (
                (span.start_us - start_us) as f64,
                span.end_us.saturating_sub(start_us) as f64,
            )
        })
        .collect();
    bars.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut joined: Vec<(f64, f64)> = Vec::new();
    for bar in bars {
        match joined.last_mut() {
            Some(last) if (bar.0 - last.1) * scale < MERGE_PX => last.1 = last.1.max(bar.1),
            _ => joined.push(bar),
        }
    }
    joined
}

fn push_axis(page: &mut String, total_us: f64, scale: f64, height: f64) {
    let step_us = tick_us(total_us);
    let mut at_us = 0.0;
    while at_us <= total_us {
        let x = LABEL_WIDTH_PX + at_us * scale;
        push(
            page,
            format_args!(
                "<line x1=\"{x:.1}\" y1=\"14\" x2=\"{x:.1}\" y2=\"{height:.0}\" stroke=\"#ddd\"/><text x=\"{x:.1}\" y=\"11\">{} ms</text>\n",
                at_us / 1e3,
            ),
        );
        at_us += step_us;
    }
}

/// A step of 1, 2 or 5 times a power of ten that gives at most ten ticks.
fn tick_us(total_us: f64) -> f64 {
    let mut step = 1.0;
    for factor in [2.0, 2.5, 2.0].into_iter().cycle() {
        if total_us / step <= 10.0 {
            break;
        }
        step *= factor;
    }
    step
}

fn push(page: &mut String, arguments: std::fmt::Arguments<'_>) {
    // Writing into a String cannot fail.
    let _ = page.write_fmt(arguments);
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(
            [9.0, 11.0, 99.0, 1_234.0].map(tick_us),
            [1.0, 2.0, 10.0, 200.0]
        );
    }

    #[test]
    fn touching_spans_are_joined_and_others_not() {
        let span = |start_us, end_us| Span {
            kind: SpanKind::Transfer,
            request: 0,
            layer: 0,
            start_us,
            end_us,
        };
        let spans = [span(110, 120), span(100, 110), span(190, 200)];
        assert_eq!(
            merged(&spans, SpanKind::Transfer, 100, 1.0),
            [(0.0, 20.0), (90.0, 100.0)]
        );
    }
}
