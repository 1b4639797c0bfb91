//! The comparison: what came out after the hand-off against a run in one process, bit for bit.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::report::{CacheRows, LogitDifference, Logits, RowDifference};

/// Digests of the live rows of one component of one layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowDigests {
    /// The component id.
    pub component: String,
    /// The layer, from 0.
    pub layer: u16,
    /// The first live entry.
    pub first_entry: u32,
    /// One digest per live entry.
    pub digests: Vec<u64>,
}

/// What one request produced, on either side.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// M ids; element 0 is drawn from the last prefill logits.
    pub output_ids: Vec<u32>,
    /// M × V, row i after feeding `output_ids[i]`.
    pub logits: Vec<f32>,
    /// The rows as they were handed over, before the first step read them.
    pub landed_rows: Vec<RowDigests>,
    /// The rows after the last step.
    pub final_rows: Vec<RowDigests>,
}

/// Compares requests in ascending order, whatever the order they end in.
#[derive(Debug, Default)]
pub struct Comparison {
    expected: BTreeMap<u32, Outcome>,
    got: BTreeMap<u32, Outcome>,
}

/// What a comparison found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Findings {
    /// About logits.
    pub logits: Logits,
    /// About cache rows.
    pub cache: CacheRows,
    /// The first request whose output ids differ (they follow from logits, except for the first one).
    pub differing_ids: Option<u32>,
}

impl Comparison {
    /// The run in one process has finished a request.
    pub fn expect(&mut self, request: u32, outcome: Outcome) {
        self.expected.insert(request, outcome);
    }

    /// The decode side has finished a request.
    pub fn got(&mut self, request: u32, outcome: Outcome) {
        self.got.insert(request, outcome);
    }

    /// Requests that the decode side has finished and the reference has not.
    #[must_use]
    pub fn waiting_count(&self) -> usize {
        self.got
            .keys()
            .filter(|request| !self.expected.contains_key(request))
            .count()
    }

    /// The finished request with the lowest number.
    #[must_use]
    pub fn first_outcome(&self) -> Option<&Outcome> {
        self.got.values().next()
    }

    /// Compares every finished request.
    #[must_use]
    pub fn findings(&self, vocab_size: u32) -> Findings {
        let mut findings = Findings::default();
        let (mut sha_expected, mut sha_got) = (Sha256::new(), Sha256::new());
        for (request, got) in &self.got {
            let Some(expected) = self.expected.get(request) else {
                continue;
            };
            hash(&mut sha_expected, &expected.logits);
            hash(&mut sha_got, &got.logits);
            compare_logits(&mut findings.logits, *request, expected, got, vocab_size);
            compare_rows(
                &mut findings.cache,
                *request,
                "landed",
                &expected.landed_rows,
                &got.landed_rows,
            );
            compare_rows(
                &mut findings.cache,
                *request,
                "final",
                &expected.final_rows,
                &got.final_rows,
            );
            if expected.output_ids != got.output_ids {
                findings.differing_ids.get_or_insert(*request);
            }
        }
        findings.logits.sha256_mono = hex(&sha_expected.finalize());
        findings.logits.sha256_handoff = hex(&sha_got.finalize());
        findings
    }
}

impl Findings {
    /// Nothing differs.
    #[must_use]
    pub fn is_equal(&self) -> bool {
        self.logits.differing == 0 && self.cache.differing == 0 && self.differing_ids.is_none()
    }
}

fn hash(sha: &mut Sha256, logits: &[f32]) {
    for logit in logits {
        sha.update(logit.to_bits().to_le_bytes());
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A logit that only one side has differs as well.
fn compare_logits(
    logits: &mut Logits,
    request: u32,
    expected: &Outcome,
    got: &Outcome,
    vocab_size: u32,
) {
    let count = expected.logits.len().max(got.logits.len());
    logits.compared += count as u64;
    for position in 0..count {
        let bits = |outcome: &Outcome| outcome.logits.get(position).map(|logit| logit.to_bits());
        let (expected_bits, got_bits) = (bits(expected), bits(got));
        if expected_bits != got_bits {
            logits.differing += 1;
            let position = position as u64;
            logits.first_difference.get_or_insert(LogitDifference {
                request,
                step: (position / u64::from(vocab_size)) as u32,
                index: (position % u64::from(vocab_size)) as u32,
                expected_bits: expected_bits.unwrap_or(0),
                got_bits: got_bits.unwrap_or(0),
            });
        }
    }
}

/// Rows are paired by (layer, component, entry); a row that only one side has differs.
fn compare_rows(
    cache: &mut CacheRows,
    request: u32,
    when: &str,
    expected: &[RowDigests],
    got: &[RowDigests],
) {
    let expected = by_row(expected);
    let got = by_row(got);
    let mut places: Vec<_> = expected.keys().chain(got.keys()).copied().collect();
    places.sort_unstable();
    places.dedup();
    cache.compared_rows += places.len() as u64;
    for place in places {
        if expected.get(&place) != got.get(&place) {
            cache.differing += 1;
            let (layer, component, entry) = place;
            cache.first_difference.get_or_insert_with(|| RowDifference {
                request,
                when: when.to_owned(),
                component: component.to_owned(),
                layer,
                entry: u64::from(entry),
            });
        }
    }
}

fn by_row(rows: &[RowDigests]) -> BTreeMap<(u16, &str, u32), u64> {
    let entries = rows.iter().flat_map(|rows| {
        let place = move |index: usize| {
            (
                rows.layer,
                rows.component.as_str(),
                rows.first_entry + index as u32,
            )
        };
        rows.digests
            .iter()
            .enumerate()
            .map(move |(index, digest)| (place(index), *digest))
    });
    entries.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(logits: &[f32], digests: &[u64]) -> Outcome {
        let rows = RowDigests {
            component: "index_k".to_owned(),
            layer: 3,
            first_entry: 5,
            digests: digests.to_vec(),
        };
        Outcome {
            output_ids: vec![1, 2],
            logits: logits.to_vec(),
            landed_rows: vec![rows.clone()],
            final_rows: vec![rows],
        }
    }

    fn findings(expected: Outcome, got: Outcome) -> Findings {
        let mut comparison = Comparison::default();
        comparison.got(4, got);
        assert_eq!(comparison.waiting_count(), 1);
        comparison.expect(4, expected);
        assert_eq!(comparison.waiting_count(), 0);
        comparison.findings(2)
    }

    #[test]
    fn equal_bits_are_equal_and_signs_of_zero_and_nans_count() {
        let nan = f32::from_bits(0x7fc0_0001);
        let same = findings(
            outcome(&[1.0, nan, 0.0, 2.0], &[7, 8]),
            outcome(&[1.0, nan, 0.0, 2.0], &[7, 8]),
        );
        assert!(same.is_equal());
        assert_eq!((same.logits.compared, same.cache.compared_rows), (4, 4));
        assert_eq!(same.logits.sha256_mono, same.logits.sha256_handoff);
        let zero = findings(
            outcome(&[1.0, 0.0, 0.0, 2.0], &[7]),
            outcome(&[1.0, 0.0, -0.0, 2.0], &[7]),
        );
        assert!(!zero.is_equal());
        let first = zero.logits.first_difference.unwrap();
        assert_eq!(
            (first.request, first.step, first.index, first.got_bits),
            (4, 1, 0, 0x8000_0000)
        );
    }

    #[test]
    fn a_row_that_differs_or_is_missing_is_named() {
        let row = findings(outcome(&[1.0], &[7, 8]), outcome(&[1.0], &[7, 9]));
        assert_eq!(row.cache.differing, 2);
        let first = row.cache.first_difference.unwrap();
        assert_eq!(
            (first.component.as_str(), first.layer, first.entry),
            ("index_k", 3, 6)
        );
        assert_eq!(first.when, "landed");
        let missing = findings(outcome(&[1.0], &[7, 8]), outcome(&[1.0], &[7]));
        assert_eq!(
            (missing.cache.compared_rows, missing.cache.differing),
            (4, 2)
        );
    }

    #[test]
    fn missing_logits_differ() {
        assert_eq!(
            findings(outcome(&[1.0, 2.0], &[]), outcome(&[1.0], &[]))
                .logits
                .differing,
            1
        );
    }
}
