//! A build without the feature `fault-injection` plants nothing.

use std::collections::VecDeque;
use std::sync::Arc;

use kvgate_kvcache::{BlockTable, KvPost, LayerId, TransferPlan, WrittenLayer};

use super::flight::Flight;
use super::outbox::Courier;
use crate::handoff::failure::Failure;
use crate::handoff::fault::FaultSpec;
use crate::handoff::model::Host;
use crate::handoff::plan::RunPlan;
use crate::handoff::protocol::FlightId;

/// Plants nothing.
pub(super) struct Planter;

/// What becomes of a post.
#[allow(dead_code, reason = "the seam has one shape with and without faults")]
pub(super) enum Intercepted {
    /// It goes its way.
    Post(KvPost),
    /// Never, in this build.
    Handled,
    /// Never, in this build.
    GiveUp,
}

/// What a post is part of.
#[allow(dead_code, reason = "the seam has one shape with and without faults")]
pub(super) struct Context<'a> {
    pub(super) courier: &'a Courier,
    pub(super) plan: &'a TransferPlan,
    pub(super) table: &'a BlockTable,
    pub(super) layer: LayerId,
    pub(super) is_last_segment: bool,
    pub(super) written: &'a WrittenLayer,
}

impl Planter {
    pub(super) fn new(
        _fault: Option<&FaultSpec>,
        _host: &Host,
        _plan: &RunPlan,
    ) -> Result<Self, Failure> {
        Ok(Self)
    }

    pub(super) fn gives_up_at_once(&self, _id: FlightId) -> bool {
        false
    }

    pub(super) fn tries_again(&self, _id: FlightId) -> bool {
        false
    }

    pub(super) fn lets_others_in(&self, _is_open: &dyn Fn(u32) -> bool) -> bool {
        true
    }

    pub(super) fn is_replaced(&self, _request: u32) -> bool {
        false
    }

    pub(super) fn keeps(&self, _flight: &Flight) -> bool {
        false
    }

    pub(super) fn before_release(&self, _is_alone: bool) {}

    pub(super) fn offered(&self, _flight: &Flight) -> Result<(), Failure> {
        Ok(())
    }

    pub(super) fn pick(
        &self,
        ready: &VecDeque<Arc<Flight>>,
        _is_open: &dyn Fn(u32) -> bool,
        _is_offered: &dyn Fn(u32) -> bool,
    ) -> Option<usize> {
        (!ready.is_empty()).then_some(0)
    }

    pub(super) fn layer_was_read(&self, _request: u32, _layer: u16) -> Result<(), Failure> {
        Ok(())
    }

    pub(super) fn intercept(
        &self,
        _context: &Context<'_>,
        post: KvPost,
    ) -> Result<Intercepted, Failure> {
        Ok(Intercepted::Post(post))
    }
}
