//! Where output goes: the result to stdout, everything else to stderr.

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::SubscriberInitExt;

use super::control::Progress;
use super::failure::Failure;
use super::report::{Pids, Report, SCHEMA, Verdict, failure_json};
use super::table;

/// Sends logs to stderr; `RUST_LOG` wins over `-v`.
pub fn start_logging(verbosity: u8) {
    let default = match verbosity {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .finish();
    // It fails when a subscriber is set already: with threads as roles, the first one is enough.
    let _ = subscriber.try_init();
}

/// Prints a line on stderr; a closed stderr ends nothing.
pub fn note(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Prints a line on stdout; a closed stdout ends nothing.
pub fn print(line: &str) {
    let mut stdout = io::stdout().lock();
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
}

/// Prints an error line.
pub fn error(failure: &Failure) {
    note(&format!("pd-handoff: {failure}"));
}

/// The output of one run.
#[derive(Debug)]
pub struct Console {
    is_json: bool,
    bars: Mutex<Option<Bars>>,
}

#[derive(Debug)]
struct Bars {
    group: MultiProgress,
    prefill: ProgressBar,
    decode: ProgressBar,
}

impl Console {
    /// The progress bar stands on stderr, and only on a terminal.
    #[must_use]
    pub fn new(is_json: bool) -> Self {
        Self {
            is_json,
            bars: Mutex::new(io::stderr().is_terminal().then(Bars::new)),
        }
    }

    /// Moves the bars.
    pub fn progress(&self, progress: Progress) {
        if let Some(bars) = &*self.bars.lock().unwrap_or_else(PoisonError::into_inner) {
            advance(
                &bars.prefill,
                progress.prefill_tokens,
                progress.prefill_tokens_total,
            );
            advance(
                &bars.decode,
                progress.decoded_tokens,
                progress.decoded_tokens_total,
            );
        }
    }

    /// Prints table, totals and verdict, or the JSON object. The verdict line is the last one.
    pub fn report(&self, report: &Report) {
        self.clear_bars();
        let table = table::render(report);
        for violation in &report.canary.violations {
            note(&format!(
                "pd-handoff: canary: {} layer {} page {} generation {} request {}: {}, expected {}, found {}",
                violation.component,
                violation.layer,
                violation.page,
                violation.generation,
                violation.request,
                violation.kind,
                violation.expected,
                violation.found,
            ));
        }
        if self.is_json {
            note(&table);
            note(&report.verdict_line());
            print(&serde_json::json!(report).to_string());
        } else {
            print(&table);
            print(&report.verdict_line());
        }
    }

    /// Prints why there is no verdict.
    pub fn failure(&self, failure: &Failure, pids: Option<Pids>) {
        self.clear_bars();
        error(failure);
        if self.is_json {
            print(&failure_json(failure, pids).to_string());
        } else {
            print(&format!("verdict: INVALID ({failure})"));
        }
    }

    /// Prints the verdict that the decode side sent, for a prefill side on its own.
    pub fn peer_verdict(&self, code: u8, text: &str) {
        self.clear_bars();
        if self.is_json {
            let verdict = match code {
                0 => Verdict::BitIdentical,
                1 => Verdict::Mismatch,
                _ => Verdict::Invalid,
            };
            note(text);
            print(
                &serde_json::json!({ "schema": SCHEMA, "verdict": verdict, "text": text })
                    .to_string(),
            );
        } else {
            print(text);
        }
    }

    fn clear_bars(&self) {
        if let Some(bars) = self
            .bars
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            // A terminal that cannot be cleared keeps its bars.
            let _ = bars.group.clear();
        }
    }
}

impl Bars {
    fn new() -> Self {
        let group = MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        let style =
            ProgressStyle::with_template("{prefix:>8} {bar:40} {pos}/{len} tokens {elapsed}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = |name: &'static str| {
            group.add(
                ProgressBar::new(0)
                    .with_style(style.clone())
                    .with_prefix(name),
            )
        };
        let prefill = bar("prefill");
        let decode = bar("decode");
        Self {
            group,
            prefill,
            decode,
        }
    }
}

/// Two processes report on the bars; what one does not know, it leaves at 0.
fn advance(bar: &ProgressBar, position: u64, total: u64) {
    if total > 0 {
        bar.set_length(total);
        bar.set_position(position);
    }
}
