//! Names, labels and help of every series.

use std::{
    collections::BTreeMap,
    fmt::{self, Display, Write},
    time::Duration,
};

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use crate::{
    backend::BackendKind,
    obs::{Counters, RefusedField},
    op::Op,
    status::TransferState,
    sync::AtomicU64,
};

/// A label value that is written as it is displayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shown<T>(T);

impl<T: Display> EncodeLabelValue for Shown<T> {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        write!(encoder, "{}", self.0)
    }
}

macro_rules! labels {
    ($($name:ident { $($label:ident: $type:ty),* })*) => {
        $(#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
        struct $name { $($label: $type),* })*
    };
}

labels! {
    OfOp { op: &'static str, backend: Shown<BackendKind> }
    OfEnd { op: &'static str, backend: Shown<BackendKind>, outcome: &'static str }
    OfBackend { backend: Shown<BackendKind> }
    OfLoss { backend: Shown<BackendKind>, proof: &'static str }
    OfField { field: Shown<RefusedField> }
    OfCause { cause: &'static str }
    OfOutcome { outcome: &'static str }
    OfWhere { r#where: &'static str }
    OfReason { reason: &'static str }
    OfKind { kind: &'static str }
    OfState { state: Shown<TransferState> }
}

fn op_name(op: Op) -> &'static str {
    match op {
        Op::Write => "write",
        Op::Read => "read",
    }
}

/// From 1 µs to 67 s in steps of four.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(1e-6, 4.0, 14))
}

type Timed<L> = Family<L, Histogram, fn() -> Histogram>;

fn timed<L: Clone + Eq + std::hash::Hash>() -> Timed<L> {
    Family::new_with_constructor(seconds)
}

/// Every series that grows with an event.
#[derive(Debug)]
pub(super) struct Families {
    bytes: Family<OfOp, Counter>,
    descriptors: Family<OfOp, Counter>,
    transfer_seconds: Timed<OfOp>,
    post_seconds: Timed<OfOp>,
    transfers: Family<OfEnd, Counter>,
    stalls: Family<OfCause, Counter>,
    back_pressure: Family<OfBackend, Counter>,
    notifications_sent: Family<OfBackend, Counter>,
    notifications_received: Family<OfBackend, Counter>,
    peers: Family<OfBackend, Gauge>,
    reconnects: Family<OfBackend, Counter>,
    peers_lost: Family<OfLoss, Counter>,
    refused: Family<OfField, Counter>,
    source_not_ready: Family<OfCause, Counter>,
    barrier_wait: Timed<OfWhere>,
    drain: Timed<OfOutcome>,
}

impl Default for Families {
    fn default() -> Self {
        Self {
            bytes: Family::default(),
            descriptors: Family::default(),
            transfer_seconds: timed(),
            post_seconds: timed(),
            transfers: Family::default(),
            stalls: Family::default(),
            back_pressure: Family::default(),
            notifications_sent: Family::default(),
            notifications_received: Family::default(),
            peers: Family::default(),
            reconnects: Family::default(),
            peers_lost: Family::default(),
            refused: Family::default(),
            source_not_ready: Family::default(),
            barrier_wait: timed(),
            drain: timed(),
        }
    }
}

macro_rules! series {
    ($($name:ident($($argument:ident: $type:ty),*) -> $metric:ty = $labels:expr;)*) => {
        impl Families {
            $(pub(super) fn $name(&self, $($argument: $type),*) -> $metric {
                self.$name.get_or_create_owned(&$labels)
            })*
        }
    };
}

fn of_op(op: Op, backend: BackendKind) -> OfOp {
    OfOp {
        op: op_name(op),
        backend: Shown(backend),
    }
}

fn of(backend: BackendKind) -> OfBackend {
    OfBackend {
        backend: Shown(backend),
    }
}

series! {
    bytes(op: Op, backend: BackendKind) -> Counter = of_op(op, backend);
    descriptors(op: Op, backend: BackendKind) -> Counter = of_op(op, backend);
    transfer_seconds(op: Op, backend: BackendKind) -> Histogram = of_op(op, backend);
    post_seconds(op: Op, backend: BackendKind) -> Histogram = of_op(op, backend);
    transfers(op: Op, backend: BackendKind, outcome: &'static str) -> Counter =
        OfEnd { op: op_name(op), backend: Shown(backend), outcome };
    stalls(cause: &'static str) -> Counter = OfCause { cause };
    back_pressure(backend: BackendKind) -> Counter = of(backend);
    notifications_sent(backend: BackendKind) -> Counter = of(backend);
    notifications_received(backend: BackendKind) -> Counter = of(backend);
    peers(backend: BackendKind) -> Gauge = of(backend);
    reconnects(backend: BackendKind) -> Counter = of(backend);
    peers_lost(backend: BackendKind, proof: &'static str) -> Counter =
        OfLoss { backend: Shown(backend), proof };
    refused(field: RefusedField) -> Counter = OfField { field: Shown(field) };
    source_not_ready(cause: &'static str) -> Counter = OfCause { cause };
    barrier_wait(place: &'static str) -> Histogram = OfWhere { r#where: place };
    drain(outcome: &'static str) -> Histogram = OfOutcome { outcome };
}

impl Families {
    /// Puts them all under their names. The registry adds the prefix, and `_total` to counters.
    pub(super) fn register(&self, registry: &mut Registry) {
        macro_rules! all {
            ($($field:ident as $name:literal: $help:literal,)*) => {
                $(registry.register($name, $help, self.$field.clone());)*
            };
        }
        all! {
            bytes as "transfer_bytes": "Bytes of the operations that ended well",
            descriptors as "descriptors": "Slots moved by the operations that ended well",
            transfer_seconds as "transfer_seconds": "Time from the admission of an operation to its good end",
            post_seconds as "post_seconds": "Time that a caller spent in a post that was admitted",
            transfers as "transfers": "Operations that have ended, by their end",
            stalls as "stalls": "Times that an operation in flight stood still, by what it waited for",
            back_pressure as "back_pressure": "Posts that were told to try again for want of room",
            notifications_sent as "notifications_sent": "Arrivals that peers were told of by the end of a write",
            notifications_received as "notifications_received": "Arrivals that came in, whatever they were worth",
            peers as "peers": "Connections that stand",
            reconnects as "reconnects": "Connections that took the place of one that broke, or are to an incarnation that was connected before",
            peers_lost as "peers_lost": "Connections that have ended, and whether the peer is proven not to write any more",
            refused as "handshake_refused": "Connections that were refused, by what was wrong",
            source_not_ready as "source_not_ready": "Posts whose witness does not say that their source is complete",
            barrier_wait as "barrier_wait_seconds": "Time that threads slept at a gate that was shut when they came",
            drain as "drain_seconds": "Time from the end of a flight to the proof that its memory is quiet, or to the loss of that proof",
        }
    }
}

/// What the agent counts by itself.
pub(super) fn register_counters(registry: &mut Registry, counters: &Counters) {
    let late = Family::<OfReason, Counter>::default();
    for (reason, count) in [
        ("stale", counters.stale),
        ("duplicate", counters.duplicate),
        ("unknown", counters.unknown),
    ] {
        late.get_or_create(&OfReason { reason }).inc_by(count);
    }
    let help = "Completions that were weighed and had no effect";
    registry.register("barrier_late", help, late);

    let stale = Family::<OfKind, Counter>::default();
    for (kind, count) in [
        ("nobody_waits", counters.stale),
        ("draining", counters.late_after_close),
    ] {
        stale.get_or_create(&OfKind { kind }).inc_by(count);
    }
    let help = "Completions of a flight that is over or ends";
    registry.register("stale_epoch", help, stale);

    let messages = Family::<OfOutcome, Counter>::default();
    for (outcome, count) in [
        ("delivered", counters.messages),
        ("late", counters.late_messages),
    ] {
        messages.get_or_create(&OfOutcome { outcome }).inc_by(count);
    }
    let help = "Control messages that came in";
    registry.register("messages", help, messages);

    let retries = Counter::<u64>::default();
    retries.inc_by(counters.retries);
    let help = "Operations that were sent again over another connection";
    registry.register("retries", help, retries);

    let notes = Family::<OfOutcome, Counter>::default();
    for (outcome, count) in [
        ("sent", counters.notes_sent),
        ("replayed", counters.notes_replayed),
        ("duplicate", counters.notes_duplicate),
    ] {
        notes.get_or_create(&OfOutcome { outcome }).inc_by(count);
    }
    let help = "Arrivals and messages: first sent, sent again, and come again and dropped";
    registry.register("notifications", help, notes);

    let chunks = Counter::<u64>::default();
    chunks.inc_by(counters.landed);
    registry.register(
        "chunks_landed",
        "Chunks whose bytes are visible here",
        chunks,
    );

    let quarantined = Counter::<u64>::default();
    quarantined.inc_by(counters.quarantined_writers);
    let help = "Writers that are gone without a proof that they do not write";
    registry.register("quarantined_writers", help, quarantined);

    let revoking = Gauge::<i64>::default();
    revoking.set(i64::try_from(counters.draining_regions).unwrap_or(i64::MAX));
    let help = "Registrations that are being closed and are not quiet yet";
    registry.register("regions_revoking", help, revoking);
}

/// The oldest operation of each state; 0 without one.
pub(super) fn register_oldest(registry: &mut Registry, oldest: &BTreeMap<TransferState, Duration>) {
    let ages = Family::<OfState, Gauge<f64, AtomicU64>>::default();
    for state in [
        TransferState::Queued,
        TransferState::Running,
        TransferState::Ending,
        TransferState::Unknown,
    ] {
        let seconds = oldest.get(&state).map_or(0.0, Duration::as_secs_f64);
        let state = Shown(state);
        ages.get_or_create(&OfState { state }).set(seconds);
    }
    let help = "Age of the oldest operation that is not terminal, by where it stands";
    registry.register("oldest_inflight_seconds", help, ages);
}
