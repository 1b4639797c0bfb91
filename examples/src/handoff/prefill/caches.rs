//! The caches of a prompt that is computed: what is written is committed and posted at once.

use std::ops::Range;
use std::sync::Arc;

use kvgate_kvcache::{LayerId, LayerMut, WriteLease};
use kvgate_model::{ErrorKind, LayerCaches, ModelError};

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
    lease: WriteLease,
    outbox: Outbox,
    layer_began_us: u64,
    ended: Option<Ended>,
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
            side,
            flight,
            lease,
            outbox,
            layer_began_us: 0,
            ended: None,
        })
    }

    /// The pages, for whoever keeps them until they have arrived.
    pub(super) fn into_lease(self) -> WriteLease {
        self.lease
    }

    /// Whether these caches ended the pass, and why.
    pub(super) fn why_it_ended(self) -> Option<Ended> {
        self.flight.keep(self.lease);
        self.ended
    }

    /// Commits a layer and posts every segment of it that is complete now.
    fn commit(&mut self, layer: LayerId, tokens: Range<u32>) -> Result<Posted, Failure> {
        let written = self
            .lease
            .commit_layer(layer, tokens)
            .map_err(|error| cache_failure(&error))?;
        self.outbox.send(layer, &written)
    }

    fn end(&mut self, ended: Ended) -> ModelError {
        self.ended = Some(ended);
        ModelError::new(ErrorKind::Lease)
    }
}

impl LayerCaches for PrefillCaches {
    fn layer(&mut self, layer: LayerId) -> Result<LayerMut<'_>, ModelError> {
        if self.flight.is_aborted() {
            return Err(self.end(Ok(None)));
        }
        self.layer_began_us = timeline::now_us();
        self.lease.layer_mut(layer).map_err(ModelError::from)
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
