//! The caches of a prompt that is computed: what is written is committed and posted at once.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kvgate_kvcache::prefix::CheckpointWriter;
use kvgate_kvcache::{self as kvcache, LayerId, LayerMut, PrefixTree, WriteLease, WrittenLayer};
use kvgate_model::{ErrorKind, LayerCaches, ModelError};
use kvgate_transfer::Deadline;

use super::Side;
use super::compute::Computed;
use super::flight::Flight;
use super::outbox::{Outbox, Posted};
use crate::handoff::failure::Failure;
use crate::handoff::model::cache_failure;
use crate::handoff::timeline::{self, Span, SpanKind};

/// Why a forward pass was ended by its caches.
pub(super) type Ended = Result<Option<Computed>, Failure>;

/// Writes and sends, layer by layer.
pub(super) struct PrefillCaches {
    side: Arc<Side>,
    flight: Arc<Flight>,
    /// `None` only between a prefix that was missed and the slots to compute it in.
    lease: Option<WriteLease>,
    outbox: Outbox,
    layer_began_us: u64,
    ended: Option<Ended>,
    /// Until when a prefix must have landed.
    deadline: Deadline,
    last_layer: LayerId,
    /// When the last layer of the prefix could be read.
    attached_at: Option<Instant>,
    is_missed: bool,
    /// Takes the end of a prefix that is to be kept, layer by layer.
    checkpoint: Option<CheckpointWriter>,
    /// What the present pass has written, while a prefix is to be kept.
    written: Vec<WrittenLayer>,
}

impl PrefillCaches {
    pub(super) fn new(
        side: &Arc<Side>,
        flight: &Arc<Flight>,
        lease: WriteLease,
    ) -> Result<Self, Failure> {
        let outbox = Outbox::new(side, flight, lease.ledger())?;
        let (side, flight) = (Arc::clone(side), Arc::clone(flight));
        Ok(Self {
            deadline: Deadline::after(side.watch.deadline()),
            last_layer: LayerId(side.host.schema.layer_count().saturating_sub(1)),
            side,
            flight,
            lease: Some(lease),
            outbox,
            layer_began_us: 0,
            ended: None,
            attached_at: None,
            is_missed: false,
            checkpoint: None,
            written: Vec::new(),
        })
    }

    /// The request keeps its pages until they have arrived.
    pub(super) fn keep(self) {
        if let Some(lease) = self.lease {
            self.flight.keep(lease);
        }
    }

    /// Why these caches ended the pass, if they did.
    pub(super) fn take_ended(&mut self) -> Option<Ended> {
        self.ended.take()
    }

    /// The prefix did not come.
    pub(super) fn is_missed(&self) -> bool {
        self.is_missed
    }

    /// When the last layer of the prefix could be read.
    pub(super) fn attached_at(&self) -> Option<Instant> {
        self.attached_at
    }

    /// The prefix did not come: its slots, and those behind it, go back as soon as nothing posted reads them.
    pub(super) fn give_up_prefix(&mut self) {
        self.checkpoint = None;
        self.written.clear();
        if let Some(lease) = self.lease.take() {
            self.flight.keep_former(lease);
        }
    }

    /// Computes everything in these slots. What was posted stands: its layers had landed, and the bits of a
    /// prompt do not depend on how it was computed.
    pub(super) fn begin_again(&mut self, lease: WriteLease) {
        self.outbox.post_from(lease.ledger());
        self.is_missed = false;
        self.lease = Some(lease);
    }

    /// The next pass ends at a boundary; its end goes here. `None`: nothing is kept.
    pub(super) fn set_checkpoint(&mut self, checkpoint: Option<CheckpointWriter>) {
        self.written.clear();
        self.checkpoint = checkpoint;
    }

    /// Enters the prefix that the last pass ended at, with its end. Answers whether there was one.
    pub(super) fn publish(
        &mut self,
        tree: &PrefixTree,
        prefix: &[u32],
    ) -> Result<bool, kvcache::Error> {
        let (Some(checkpoint), Some(lease)) = (self.checkpoint.take(), &mut self.lease) else {
            return Ok(false);
        };
        let written = std::mem::take(&mut self.written);
        let checkpoint = checkpoint.finish()?;
        tree.publish(prefix, lease, &written, Some(checkpoint))?;
        Ok(true)
    }

    /// Commits a layer and posts every segment of it that is complete now.
    fn commit(&mut self, layer: LayerId, tokens: Range<u32>) -> Result<Posted, Failure> {
        let lease = slots(&mut self.lease)?;
        let written = lease
            .commit_layer(layer, tokens)
            .map_err(|error| cache_failure(&error))?;
        if let Some(checkpoint) = &mut self.checkpoint {
            checkpoint
                .save_layer(layer, lease)
                .map_err(|error| cache_failure(&error))?;
        }
        let posted = self.outbox.send(layer, &written)?;
        if self.checkpoint.is_some() {
            self.written.push(written);
        }
        Ok(posted)
    }

    fn end(&mut self, ended: Ended) -> ModelError {
        self.ended = Some(ended);
        ModelError::new(ErrorKind::Lease)
    }
}

fn slots(lease: &mut Option<WriteLease>) -> Result<&mut WriteLease, Failure> {
    lease
        .as_mut()
        .ok_or_else(|| Failure::internal("a prompt is computed without slots"))
}

impl LayerCaches for PrefillCaches {
    fn layer(&mut self, layer: LayerId) -> Result<LayerMut<'_>, ModelError> {
        if self.flight.is_aborted() {
            return Err(self.end(Ok(None)));
        }
        self.layer_began_us = timeline::now_us();
        let Some(lease) = &mut self.lease else {
            return Err(ModelError::new(ErrorKind::Lease));
        };
        // A layer of a prefix is neither read nor sent before it has landed: without this there is no witness.
        if let Err(error) = lease.attach_layer(layer, self.deadline) {
            self.is_missed = true;
            return Err(ModelError::from(error));
        }
        if layer == self.last_layer {
            self.attached_at.get_or_insert_with(Instant::now);
        }
        lease.layer_mut(layer).map_err(ModelError::from)
    }

    fn layer_done(&mut self, layer: LayerId, tokens: Range<u32>) -> Result<(), ModelError> {
        let span = Span {
            kind: SpanKind::PrefillCompute,
            request: self.flight.request(),
            layer: layer.0,
            start_us: self.layer_began_us,
            end_us: timeline::now_us(),
        };
        self.side.note(|summary| summary.spans.push(span));
        match self.commit(layer, tokens) {
            Ok(Posted::All) => Ok(()),
            Ok(Posted::Aborted) => Err(self.end(Ok(None))),
            Ok(Posted::ReachedItsMoment) => {
                let flight = Arc::clone(&self.flight);
                Err(self.end(Ok(Some(Computed::Abort(flight)))))
            }
            Err(failure) => Err(self.end(Err(failure))),
        }
    }
}
