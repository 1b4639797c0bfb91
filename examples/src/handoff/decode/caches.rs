//! The caches of a request after its hand-off: every layer is asked for at its gate, in every step.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kvgate_kvcache::{self as kvcache, CacheSchema, LayerId, LayerMut, ReadyLayer};
use kvgate_model::{ErrorKind, LayerCaches, ModelError};
use kvgate_transfer::BarrierError;

use super::Side;
use super::worker::{Task, What};
use crate::handoff::activity::Busy;
use crate::handoff::compare::{Outcome, RowDigests};
use crate::handoff::failure::Failure;
use crate::handoff::model::{cache_failure, model_failure};
use crate::handoff::timeline::{self, Span, SpanKind};
use crate::handoff::{link, rows};

/// Reads and appends, layer by layer.
pub(super) struct DecodeCaches<'a> {
    side: &'a Side,
    task: Task,
    say: &'a dyn Fn(What),
    /// This thread computes, unless it waits at a gate.
    busy: Option<Busy<'a>>,
    /// The first step has not ended: gates are waited for and rows digested as they are first read.
    is_first_step: bool,
    layer_began_us: u64,
    landed_rows: Vec<RowDigests>,
    /// Why a gate did not open; the model only says that it did not.
    ended: Option<Result<(), Failure>>,
}

impl<'a> DecodeCaches<'a> {
    pub(super) fn new(side: &'a Side, task: Task, say: &'a dyn Fn(What)) -> Self {
        Self {
            side,
            task,
            say,
            busy: None,
            is_first_step: true,
            layer_began_us: 0,
            landed_rows: Vec::new(),
            ended: None,
        }
    }

    /// Waits until every layer has landed.
    pub(super) fn wait_for_all(&mut self) -> Result<(), Failure> {
        for layer in self.side.host.schema.layers() {
            if let Some(ended) = self.wait_at_gate(layer) {
                return ended;
            }
        }
        Ok(())
    }

    /// With checksums, everything is checked once, when everything is here.
    pub(super) fn admit(&mut self) -> Result<(), Failure> {
        if self
            .task
            .detector
            .as_ref()
            .is_some_and(|detector| detector.checks_once())
        {
            self.wait_for_all()?;
            for layer in self.side.host.schema.layers() {
                self.check_landed(layer);
            }
        }
        Ok(())
    }

    /// The step is over.
    pub(super) fn end_step(&mut self) {
        if self.is_first_step {
            (self.say)(What::Landed);
        }
        self.is_first_step = false;
        self.busy = None;
    }

    /// The request is over: a last look at its pages, and the rows for the comparison.
    pub(super) fn finish(mut self, outcome: &mut Outcome, tokens: u32) -> Result<(), Failure> {
        if self.is_first_step {
            // No step has waited at the gates.
            self.wait_for_all()?;
            (self.say)(What::Landed);
        }
        let schema = Arc::clone(&self.side.host.schema);
        for layer in schema.layers() {
            self.check_again(layer);
            let ready = self
                .task
                .lease
                .layer(layer, link::slice())
                .map_err(|error| cache_failure(&error))?;
            if self.is_first_step {
                self.landed_rows
                    .extend(digests(&schema, &ready, self.task.prompt_tokens));
            }
            outcome.final_rows.extend(digests(&schema, &ready, tokens));
        }
        if let Some(detector) = &self.task.detector {
            detector.finish(self.side);
        }
        outcome.landed_rows = std::mem::take(&mut self.landed_rows);
        Ok(())
    }

    /// A step was refused: by a gate that this side closed, or by something worse.
    pub(super) fn why_it_ended(self, error: &ModelError) -> Result<(), Failure> {
        self.ended.unwrap_or_else(|| Err(model_failure(error)))
    }

    /// Waits in slices, since what ends the wait is the peer's lack of progress and not a time. `None`
    /// when the gate is open, `Some(Ok)` when the request was stopped.
    fn wait_at_gate(&mut self, layer: LayerId) -> Option<Result<(), Failure>> {
        self.busy = None;
        let since = Instant::now();
        let ended = loop {
            #[cfg(feature = "fault-injection")]
            if self.is_ungated(layer)
                && self.task.reader.has_all_but_the_place(
                    &self.task.lease,
                    &self.side.host.schema,
                    layer,
                )
            {
                break None;
            }
            match self.task.lease.layer(layer, link::slice()) {
                Ok(_) => break None,
                Err(_) if self.task.is_stopped() => break Some(Ok(())),
                Err(error) if is_timeout(&error) => {
                    if let Err(failure) = self
                        .task
                        .watch
                        .check(since, &format!("the transfer of layer {layer}"))
                    {
                        break Some(Err(failure));
                    }
                }
                Err(error) => break Some(Err(cache_failure(&error))),
            }
        };
        self.busy = Some(self.side.activity.busy());
        ended
    }

    /// With a canary, every page is looked at before it is read.
    fn check_before_read(&mut self, layer: LayerId) {
        match &self.task.detector {
            Some(detector) if detector.checks_once() => {}
            Some(_) if self.is_first_step => self.check_landed(layer),
            _ => self.check_again(layer),
        }
    }

    fn check_landed(&mut self, layer: LayerId) {
        if let Some(detector) = &mut self.task.detector {
            detector.check_landed(self.side, &self.task.lease, self.task.prompt_tokens, layer);
        }
    }

    fn check_again(&mut self, layer: LayerId) {
        if let Some(detector) = &mut self.task.detector
            && !detector.checks_once()
        {
            detector.check_again(self.side, &self.task.lease, self.task.prompt_tokens, layer);
        }
    }

    fn note(&self, kind: SpanKind, layer: LayerId, start_us: u64) {
        let span = Span {
            kind,
            request: self.task.request,
            layer: layer.0,
            start_us,
            end_us: timeline::now_us(),
        };
        self.side.note(|notes| notes.spans.push(span));
    }
}

#[cfg(feature = "fault-injection")]
impl DecodeCaches<'_> {
    /// The founding bug, if it is planted here: only the first step comes too early.
    fn is_ungated(&self, layer: LayerId) -> bool {
        self.is_first_step && self.task.reader.is_ungated(layer)
    }

    fn layer_without_gate(&mut self, layer: LayerId) -> Result<LayerMut<'_>, ModelError> {
        self.layer_began_us = timeline::now_us();
        let schema = Arc::clone(&self.side.host.schema);
        let view = self
            .task
            .reader
            .layer(&mut self.task.append, layer)
            .map_err(ModelError::from)?;
        let digests = rows::of_layer(&schema, layer, self.task.prompt_tokens, |row| {
            view.component(row.component)
        });
        self.landed_rows.extend(digests);
        Ok(view)
    }
}

impl LayerCaches for DecodeCaches<'_> {
    fn layer(&mut self, layer: LayerId) -> Result<LayerMut<'_>, ModelError> {
        let at_gate_us = timeline::now_us();
        if let Some(ended) = self.wait_at_gate(layer) {
            self.ended = Some(ended);
            return Err(ModelError::new(ErrorKind::Lease));
        }
        if self.is_first_step {
            self.note(SpanKind::GateWait, layer, at_gate_us);
        }
        self.check_before_read(layer);
        #[cfg(feature = "fault-injection")]
        if self.is_ungated(layer) {
            return self.layer_without_gate(layer);
        }
        let ready = self
            .task
            .lease
            .layer(layer, link::slice())
            .map_err(ModelError::from)?;
        if self.is_first_step {
            self.landed_rows.extend(digests(
                &self.side.host.schema,
                &ready,
                self.task.prompt_tokens,
            ));
        }
        self.layer_began_us = timeline::now_us();
        self.task.append.layer(&ready).map_err(ModelError::from)
    }

    fn layer_done(&mut self, layer: LayerId, tokens: Range<u32>) -> Result<(), ModelError> {
        let _ = tokens;
        if self.is_first_step {
            self.note(SpanKind::DecodeCompute, layer, self.layer_began_us);
            if self.task.reader.is_awaited(layer) {
                (self.say)(What::Read(layer));
            }
        }
        Ok(())
    }
}

/// Digests of the live rows of a layer that is ready.
fn digests(schema: &CacheSchema, ready: &ReadyLayer<'_>, tokens: u32) -> Vec<RowDigests> {
    let view = ready.view();
    rows::of_layer(schema, ready.layer(), tokens, |row| {
        view.component(row.component)
    })
}

fn is_timeout(error: &kvcache::Error) -> bool {
    matches!(
        error.kind(),
        kvcache::ErrorKind::Gate {
            error: BarrierError::TimedOut { .. },
            ..
        }
    )
}
