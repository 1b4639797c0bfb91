//! The series of one backend, looked up once, so that an operation costs a few atomic additions.

use std::time::Duration;

use prometheus_client::metrics::{counter::Counter, gauge::Gauge, histogram::Histogram};

use super::families::Families;
use crate::{backend::BackendKind, op::Op};

/// The series of one backend.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) up: Gauge,
    pub(super) reconnects: Counter,
    pub(super) back_pressure: Counter,
    pub(super) notifications_received: Counter,
    lost_proven: Counter,
    lost_unprovable: Counter,
    write: OpLane,
    read: OpLane,
}

/// The series of one kind of operation over one backend.
#[derive(Debug)]
pub(super) struct OpLane {
    pub(super) post_seconds: Histogram,
    pub(super) failed: Counter,
    pub(super) unknown: Counter,
    done: Counter,
    bytes: Counter,
    descriptors: Counter,
    seconds: Histogram,
    notifications_sent: Counter,
}

impl Lane {
    pub(super) fn new(families: &Families, backend: BackendKind) -> Self {
        Self {
            up: families.peers(backend),
            reconnects: families.reconnects(backend),
            back_pressure: families.back_pressure(backend),
            notifications_received: families.notifications_received(backend),
            lost_proven: families.peers_lost(backend, "proven"),
            lost_unprovable: families.peers_lost(backend, "none"),
            write: OpLane::new(families, backend, Op::Write),
            read: OpLane::new(families, backend, Op::Read),
        }
    }

    pub(super) fn lost(&self, is_proven: bool) -> &Counter {
        match is_proven {
            true => &self.lost_proven,
            false => &self.lost_unprovable,
        }
    }

    pub(super) fn of(&self, op: Op) -> &OpLane {
        match op {
            Op::Write => &self.write,
            Op::Read => &self.read,
        }
    }
}

impl OpLane {
    fn new(families: &Families, backend: BackendKind, op: Op) -> Self {
        Self {
            post_seconds: families.post_seconds(op, backend),
            done: families.transfers(op, backend, "done"),
            failed: families.transfers(op, backend, "failed"),
            unknown: families.transfers(op, backend, "unknown"),
            bytes: families.bytes(op, backend),
            descriptors: families.descriptors(op, backend),
            seconds: families.transfer_seconds(op, backend),
            notifications_sent: families.notifications_sent(backend),
        }
    }

    pub(super) fn completed(
        &self,
        bytes: u64,
        descriptor_count: u64,
        is_announced: bool,
        elapsed: Duration,
    ) {
        self.done.inc();
        self.bytes.inc_by(bytes);
        self.descriptors.inc_by(descriptor_count);
        self.seconds.observe(elapsed.as_secs_f64());
        self.notifications_sent.inc_by(u64::from(is_announced));
    }
}
