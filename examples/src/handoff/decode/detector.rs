//! The run-time detector of one request: provenance and checksums of its pages, looked at before reads.
//!
//! It knows what the sender wrote about each page and what is in the page now. It does not know whether
//! a fault was planted, nor where.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};

use kvgate_kvcache::canary::{ProvenanceTable, VerifyMode, Violation};
use kvgate_kvcache::{LayerId, PageLease};

use super::Side;
use crate::handoff::options::Verify;
use crate::handoff::report::CanaryViolation;

/// More violations than this say nothing new.
const MAX_VIOLATIONS: usize = 1_000;

/// What all requests of a run found.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Pages looked at.
    pub(super) checked: u64,
    /// In order of time.
    pub(super) violations: Vec<CanaryViolation>,
}

/// Looks at the pages of one request.
pub(super) struct Detector {
    table: Arc<ProvenanceTable>,
    verify: Verify,
    request: u32,
    /// What was reported already: the same damage is found again in every step.
    reported: BTreeSet<(u16, String, u32, String)>,
}

impl Detector {
    pub(super) fn new(table: Arc<ProvenanceTable>, verify: Verify, request: u32) -> Self {
        Self {
            table,
            verify,
            request,
            reported: BTreeSet::new(),
        }
    }

    /// With checksums, pages are looked at once, when everything has landed.
    pub(super) fn checks_once(&self) -> bool {
        self.verify == Verify::Checksum
    }

    /// Looks at every page of a layer, when its gate has opened and before the first read.
    pub(super) fn check_landed(
        &mut self,
        side: &Side,
        lease: &PageLease,
        prompt_tokens: u32,
        layer: LayerId,
    ) {
        let mode = self.mode();
        let violations =
            self.table
                .verify_layer(&side.pools, lease.block_table(), prompt_tokens, layer, mode);
        self.report(side, violations);
    }

    /// Looks at the pages that decode never changes, in a later step or at the end.
    pub(super) fn check_again(
        &mut self,
        side: &Side,
        lease: &PageLease,
        prompt_tokens: u32,
        layer: LayerId,
    ) {
        let mode = self.mode();
        let violations = self.table.verify_unchanging(
            &side.pools,
            lease.block_table(),
            prompt_tokens,
            layer,
            mode,
        );
        self.report(side, violations);
    }

    fn mode(&self) -> VerifyMode {
        match self.verify {
            Verify::Canary => VerifyMode::Canary,
            Verify::Checksum => VerifyMode::Checksum,
            Verify::Off => VerifyMode::Off,
        }
    }

    fn report(&mut self, side: &Side, violations: Vec<Violation>) {
        let mut found = side.found.lock().unwrap_or_else(PoisonError::into_inner);
        for violation in violations {
            let violation = self.describe(violation);
            let key = (
                violation.layer,
                violation.component.clone(),
                violation.page,
                violation.kind.clone(),
            );
            if self.reported.insert(key) && found.violations.len() < MAX_VIOLATIONS {
                found.violations.push(violation);
            }
        }
    }

    /// The request is over: what was looked at counts.
    pub(super) fn finish(&self, side: &Side) {
        side.found
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .checked += self.table.checked_count();
    }

    fn describe(&self, violation: Violation) -> CanaryViolation {
        CanaryViolation {
            component: violation.component.id().to_owned(),
            layer: violation.layer.0,
            page: violation.page,
            generation: violation.generation,
            request: self.request,
            kind: violation.kind.id().to_owned(),
            expected: violation.expected,
            found: violation.found,
        }
    }
}
