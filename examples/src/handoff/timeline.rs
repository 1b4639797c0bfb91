//! What happened when, in microseconds of the host's monotonic clock, so that spans of several processes
//! of one host stand on one axis.

use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

/// What a span of time was spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpanKind {
    /// A layer of a prefill chunk was computed.
    PrefillCompute,
    /// A (layer, segment) was on its way, from post to landed.
    Transfer,
    /// A decode step waited at the gate of a layer.
    GateWait,
    /// A layer of a decode step was computed.
    DecodeCompute,
}

/// One span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// What for.
    pub kind: SpanKind,
    /// The request, from 0.
    pub request: u32,
    /// The layer, from 0.
    pub layer: u16,
    /// Begin.
    pub start_us: u64,
    /// End.
    pub end_us: u64,
}

impl Span {
    /// The span on a clock that is `shift_us` ahead.
    #[must_use]
    pub fn shifted(self, shift_us: i64) -> Self {
        Self {
            start_us: self.start_us.saturating_add_signed(shift_us),
            end_us: self.end_us.saturating_add_signed(shift_us),
            ..self
        }
    }

    /// Its length.
    #[must_use]
    pub fn length_us(&self) -> u64 {
        self.end_us.saturating_sub(self.start_us)
    }
}

/// The spans of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// In no order.
    pub spans: Vec<Span>,
}

/// More spans than this tell nobody anything; the rest is dropped.
const MAX_SPANS: usize = 50_000;

/// Collects spans from several threads.
#[derive(Debug, Default)]
pub struct Recorder {
    spans: Mutex<Vec<Span>>,
}

impl Recorder {
    /// Adds a span.
    pub fn record(&self, span: Span) {
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        if spans.len() < MAX_SPANS {
            spans.push(span);
        }
    }

    /// Takes what was collected.
    #[must_use]
    pub fn take(&self) -> Timeline {
        Timeline {
            spans: std::mem::take(&mut *self.spans.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

/// The host's monotonic clock.
#[must_use]
pub fn now_us() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000
        + u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000
}

/// CPU time of this process so far.
#[must_use]
pub fn process_cpu_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000
        + u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000_000
}

/// CPU time of the calling thread so far: with `--transport local` the roles share one process.
#[must_use]
pub fn thread_cpu_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000
        + u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000_000
}
