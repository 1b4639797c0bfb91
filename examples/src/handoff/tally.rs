//! Times and bytes of a run, from what both sides noted, put together for the report.

use std::collections::{BTreeMap, BTreeSet};

use kvgate_kvcache::{CacheSchema, Component};

use super::plan::{Moment, PrefillSummary};
use super::report::{Bytes, LayerReport};
use super::timeline::{Span, SpanKind};

/// What the decode side noted.
#[derive(Clone, Debug, Default)]
pub struct Notes {
    /// When each (layer, segment) had landed.
    pub landings: Vec<Moment>,
    /// Waits at the gates in the first step of each request, and decode compute.
    pub spans: Vec<Span>,
    /// Requests that ran to their end: only these count in times.
    pub finished: BTreeSet<u32>,
}

/// Times and bytes as the report has them.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Bytes moved.
    pub bytes: Bytes,
    /// Per layer.
    pub layers: Vec<LayerReport>,
    /// Bytes over the time that transfers were under way.
    pub transfer_gbps: f64,
    /// Share of the transfer that decode did not wait for.
    pub hidden_share: f64,
    /// From post to landed.
    pub transfers: Vec<Span>,
}

/// Puts both sides' notes together. `shift_us` takes the prefill side's clock to the decode side's.
#[must_use]
pub fn totals(
    schema: &CacheSchema,
    notes: &Notes,
    summary: &PrefillSummary,
    shift_us: i64,
) -> Totals {
    let transfers = transfer_spans(notes, summary, shift_us);
    let bytes = bytes(summary);
    let first_posts = first_posts(&transfers);
    let (wait_us, under_way_us) = waits_and_ways(notes, &transfers, &first_posts);
    let busy_us = covered_us(&transfers);
    Totals {
        layers: schema
            .layers()
            .map(|layer| layer_report(schema, layer.0, notes, summary, &transfers, &first_posts))
            .collect(),
        transfer_gbps: if busy_us == 0 {
            0.0
        } else {
            bytes.total as f64 / (busy_us as f64 * 1e3)
        },
        hidden_share: if under_way_us == 0 {
            1.0
        } else {
            (1.0 - wait_us as f64 / under_way_us as f64).clamp(0.0, 1.0)
        },
        bytes,
        transfers,
    }
}

/// `window`, `csa` (ratio 4) or `hca` (ratio 128).
fn layer_kind(schema: &CacheSchema, layer: u16) -> &'static str {
    let has = |component| {
        schema
            .rows()
            .iter()
            .any(|row| row.layer.0 == layer && row.component == component)
    };
    if has(Component::C4Latent) {
        "csa"
    } else if has(Component::C128Latent) {
        "hca"
    } else {
        "window"
    }
}

fn bytes(summary: &PrefillSummary) -> Bytes {
    let mut by_component = BTreeMap::new();
    for row in &summary.bytes {
        *by_component.entry(row.component.clone()).or_insert(0) += row.bytes;
    }
    Bytes {
        total: by_component.values().sum(),
        row_total: summary.row_bytes,
        by_component,
    }
}

fn transfer_spans(notes: &Notes, summary: &PrefillSummary, shift_us: i64) -> Vec<Span> {
    let key = |moment: &Moment| (moment.request, moment.layer, moment.segment);
    let landed: BTreeMap<_, _> = notes
        .landings
        .iter()
        .map(|moment| (key(moment), moment.at_us))
        .collect();
    let spans = summary.posts.iter().filter_map(|post| {
        let end_us = *landed.get(&key(post))?;
        let start_us = post.at_us.saturating_add_signed(shift_us).min(end_us);
        Some(Span {
            kind: SpanKind::Transfer,
            request: post.request,
            layer: post.layer,
            start_us,
            end_us,
        })
    });
    spans.collect()
}

fn first_posts(transfers: &[Span]) -> BTreeMap<u32, u64> {
    let mut first = BTreeMap::new();
    for span in transfers {
        let at = first.entry(span.request).or_insert(span.start_us);
        *at = span.start_us.min(*at);
    }
    first
}

/// Of the finished requests: what they waited at gates, and from first post to last landed.
fn waits_and_ways(
    notes: &Notes,
    transfers: &[Span],
    first_posts: &BTreeMap<u32, u64>,
) -> (u64, u64) {
    let waits = notes
        .spans
        .iter()
        .filter(|span| span.kind == SpanKind::GateWait);
    let wait_us = waits
        .filter(|span| notes.finished.contains(&span.request))
        .map(Span::length_us)
        .sum();
    let mut last: BTreeMap<u32, u64> = BTreeMap::new();
    for span in transfers
        .iter()
        .filter(|span| notes.finished.contains(&span.request))
    {
        let at = last.entry(span.request).or_insert(span.end_us);
        *at = span.end_us.max(*at);
    }
    let way_us = last
        .iter()
        .map(|(request, end)| end - first_posts.get(request).copied().unwrap_or(*end))
        .sum();
    (wait_us, way_us)
}

/// Time that at least one of the spans covers.
fn covered_us(spans: &[Span]) -> u64 {
    let mut spans: Vec<_> = spans
        .iter()
        .map(|span| (span.start_us, span.end_us))
        .collect();
    spans.sort_unstable();
    let mut covered = 0;
    let mut reached = 0;
    for (start, end) in spans {
        covered += end.saturating_sub(start.max(reached));
        reached = reached.max(end);
    }
    covered
}

fn layer_report(
    schema: &CacheSchema,
    layer: u16,
    notes: &Notes,
    summary: &PrefillSummary,
    transfers: &[Span],
    first_posts: &BTreeMap<u32, u64>,
) -> LayerReport {
    let of_layer = |span: &&Span| span.layer == layer && notes.finished.contains(&span.request);
    let waits = notes
        .spans
        .iter()
        .filter(|span| span.kind == SpanKind::GateWait)
        .filter(of_layer);
    let mut landed: BTreeMap<u32, u64> = BTreeMap::new();
    for span in transfers.iter().filter(of_layer) {
        let after = span.end_us
            - first_posts
                .get(&span.request)
                .copied()
                .unwrap_or(span.end_us);
        let at = landed.entry(span.request).or_insert(after);
        *at = after.max(*at);
    }
    let bytes = summary.bytes.iter().filter(|row| row.layer == layer);
    LayerReport {
        layer,
        kind: layer_kind(schema, layer).to_owned(),
        bytes: bytes
            .map(|row| (row.component.clone(), row.bytes))
            .collect(),
        landed_us: landed
            .values()
            .sum::<u64>()
            .checked_div(landed.len() as u64)
            .unwrap_or(0),
        gate_wait_us: waits.map(Span::length_us).sum(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(request: u32, start_us: u64, end_us: u64) -> Span {
        Span {
            kind: SpanKind::Transfer,
            request,
            layer: 0,
            start_us,
            end_us,
        }
    }

    #[test]
    fn overlapping_spans_are_covered_once() {
        assert_eq!(
            covered_us(&[
                span(0, 10, 20),
                span(0, 15, 30),
                span(0, 40, 50),
                span(0, 41, 42)
            ]),
            30
        );
        assert_eq!(covered_us(&[]), 0);
    }

    #[test]
    fn a_post_is_paired_with_its_own_landing_and_the_other_clock_is_shifted() {
        let moment = |segment, at_us| Moment {
            request: 2,
            layer: 0,
            segment,
            at_us,
        };
        let notes = Notes {
            landings: vec![moment(0, 1_100), moment(1, 1_300)],
            ..Notes::default()
        };
        let summary = PrefillSummary {
            posts: vec![moment(1, 200), moment(0, 50), moment(2, 60)],
            ..Default::default()
        };
        assert_eq!(
            transfer_spans(&notes, &summary, 1_000),
            [span(2, 1_200, 1_300), span(2, 1_050, 1_100)]
        );
    }
}
