//! The JSON object of a run, schema `kvgate.pd-handoff/1`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::failure::{Failure, FailureKind};
pub use super::storage_work::{StorageTierWork, StorageWork};

/// The name and version of the JSON form.
pub const SCHEMA: &str = "kvgate.pd-handoff/1";

/// Bytes by component id.
pub type ByComponent = BTreeMap<String, u64>;

/// What the run showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Every compared bit is equal.
    BitIdentical,
    /// A bit differs, or a detector fired.
    Mismatch,
    /// The run shows nothing.
    Invalid,
}

/// Process ids; with `--transport local` all are one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pids {
    /// The program that was started.
    pub launcher: u32,
    /// The prefill side.
    pub prefill: u32,
    /// The decode side.
    pub decode: u32,
    /// The run to compare with.
    pub reference: u32,
}

/// What became of the requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requests {
    /// `--requests`.
    pub asked: u32,
    /// Decoded to the end.
    pub finished: u32,
    /// Aborted on purpose.
    pub cancelled: u32,
    /// Ended by an error.
    pub failed: u32,
}

/// The first logit that differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogitDifference {
    /// The request, from 0.
    pub request: u32,
    /// The decode step, from 0.
    pub step: u32,
    /// The vocabulary index.
    pub index: u32,
    /// Bits of the run in one process.
    pub expected_bits: u32,
    /// Bits after the hand-off.
    pub got_bits: u32,
}

/// The comparison of the logits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Logits {
    /// Finished requests × M × V.
    pub compared: u64,
    /// Of these, with other bits.
    pub differing: u64,
    /// The first one in order of request, step, index.
    pub first_difference: Option<LogitDifference>,
    /// Over all compared logits of the run in one process, little-endian, in that order.
    pub sha256_mono: String,
    /// Over all compared logits after the hand-off.
    pub sha256_handoff: String,
}

/// The first cache row that differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowDifference {
    /// The request, from 0.
    pub request: u32,
    /// `landed` (after the hand-off, before the first step) or `final` (after the last step).
    pub when: String,
    /// The component id.
    pub component: String,
    /// The layer, from 0.
    pub layer: u16,
    /// The row: a token position, a compressed entry, or 0.
    pub entry: u64,
}

/// The comparison of the cache rows: a row that no query happened to pick counts too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheRows {
    /// Rows compared, as landed and after the last step.
    pub compared_rows: u64,
    /// Of these, with other bytes.
    pub differing: u64,
    /// The first one.
    pub first_difference: Option<RowDifference>,
}

/// Work of the decode side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecodeWork {
    /// Prompt tokens it computed: none.
    pub prefill_tokens: u64,
    /// CPU time.
    pub cpu_ms: u64,
}

/// Work of the prefill side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefillWork {
    /// CPU time.
    pub cpu_ms: u64,
}

/// Bytes moved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes {
    /// By the transport, whole pages.
    pub total: u64,
    /// Live rows only.
    pub row_total: u64,
    /// `total` by component.
    pub by_component: ByComponent,
}

/// One layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerReport {
    /// From 0.
    pub layer: u16,
    /// `window`, `csa` (ratio 4) or `hca` (ratio 128).
    pub kind: String,
    /// Bytes moved by component.
    pub bytes: ByComponent,
    /// When the layer had landed, from the first post; the mean over the finished requests.
    pub landed_us: u64,
    /// What the first step waited at the gate, summed over the finished requests.
    pub gate_wait_us: u64,
}

/// A page that is not what its reader took it for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CanaryViolation {
    /// The component id.
    pub component: String,
    /// The layer, from 0.
    pub layer: u16,
    /// The physical page of the decode side.
    pub page: u32,
    /// Its generation.
    pub generation: u32,
    /// The request, from 0.
    pub request: u32,
    /// What is wrong.
    pub kind: String,
    /// What stood in the provenance.
    pub expected: String,
    /// What was there.
    pub found: String,
}

/// The run-time detector.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Canary {
    /// `canary`, `checksum` or `off`.
    pub mode: String,
    /// Pages checked.
    pub checked: u64,
    /// What it found, in order of time.
    pub violations: Vec<CanaryViolation>,
}

/// Events that must not pass silently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Completions of another epoch, refused.
    pub stale: u64,
    /// Completions that came again, ignored.
    pub duplicate: u64,
    /// Completions outside the plan or below the needed level, refused.
    pub unknown: u64,
    /// Arrivals after their flight was closed.
    pub late_after_close: u64,
    /// Connections that were closed during the handshake.
    pub refused_connections: u64,
    /// The most pages that were not reusable for lack of proof at one time, or at the end.
    pub quarantined_pages: u64,
    /// Slots that were never returned.
    pub leaked_pages: u64,
}

/// The place that a fault hit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlantedFault {
    /// The kind.
    pub kind: String,
    /// The component id.
    pub component: String,
    /// The layer, from 0.
    pub layer: u16,
    /// The physical page of the decode side.
    pub page: u32,
    /// The request, from 0.
    pub request: u32,
}

/// Prompt tokens that were not computed because a tier had them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hits {
    /// In device pools.
    pub device_tokens: u64,
    /// In host memory.
    pub host_tokens: u64,
    /// In files.
    pub storage_tokens: u64,
    /// On another host.
    pub remote_tokens: u64,
}

/// What one tier gave.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TierHits {
    /// `device`, `host`, `storage` or `remote`.
    pub tier: String,
    /// Turns that went on behind a prefix of which this is the farthest tier, or a storage tier that gave records of it.
    pub hits: u64,
    /// Of these, the first turns of a conversation: they went on from what another conversation or a former run left.
    pub first_turn_hits: u64,
    /// Tokens of the prefixes of which this is the farthest tier.
    pub hit_tokens: u64,
    /// Bytes of the slots that these were loaded into, 0 for the device pool, where nothing moves; and of the records for
    /// the other prefixes.
    pub bytes: u64,
    /// Time from the lookup until the last layer could be read, over all hits.
    pub load_ms: f64,
}

impl TierHits {
    /// That a run says nothing about this tier.
    pub fn failure(&self) -> Failure {
        let tier = &self.tier;
        let message = format!(
            "the {tier} tier had 0 hits, expected at least 1: the run shows nothing about it"
        );
        Failure::new(FailureKind::ProvesNothing, message).with_field(tier, 0)
    }
}

/// The first tier that a run shows nothing about: it had no hit. Where every turn went on from a prefix, the first ones
/// too, a former run has left all of it in the farthest tier with hits: device pool and host tier then had no turn of
/// their own, and what was found has come through them. That says nothing about another storage tier.
pub fn tier_without_hit(tiers: &[TierHits], misses: u64) -> Option<&TierHits> {
    let farthest = tiers.iter().rposition(|tier| tier.hits > 0).unwrap_or(0);
    let is_passed = |at: usize, tier: &TierHits| {
        misses == 0 && at < farthest && ["device", "host"].contains(&&*tier.tier)
    };
    let mut without = tiers.iter().enumerate().filter(|(_, tier)| tier.hits == 0);
    let shown = without.find(|(at, tier)| !is_passed(*at, tier));
    shown.map(|(_, tier)| tier)
}

/// Moves between the device pool and the host tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moves {
    /// Begun.
    pub started: u64,
    /// Landed whole.
    pub landed: u64,
    /// Failed: a miss, never a hit.
    pub failed: u64,
    /// Not begun for want of room.
    pub no_room: u64,
}

impl From<kvgate_hicache::cache::MoveCounts> for Moves {
    fn from(counts: kvgate_hicache::cache::MoveCounts) -> Moves {
        Moves {
            started: counts.started,
            landed: counts.landed,
            failed: counts.failed,
            no_room: counts.no_room,
        }
    }
}

/// What the tiers of the prefill side did in a run of conversations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TierWork {
    /// Logical pages of the device pool.
    pub device_pages: u32,
    /// Logical pages of the host tier.
    pub host_pages: u32,
    /// By tier.
    pub tiers: Vec<TierHits>,
    /// Turns that were computed from their first token.
    pub misses: u64,
    /// Prompt tokens of all turns that were computed; the others were found.
    pub computed_tokens: u64,
    /// Into the host tier.
    pub backups: Moves,
    /// Out of it.
    pub loads: Moves,
    /// What the tiers behind it did; absent without any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage: Option<StorageWork>,
}

/// Pages of earlier prompts that did not cross a second time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixReuse {
    /// Turns whose first pages the decode side had.
    pub hits: u64,
    /// Tokens of these pages.
    pub hit_tokens: u64,
    /// Bytes that did not cross.
    pub bytes: u64,
}

/// A run of conversations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Conversations {
    /// Conversations.
    pub sessions: u32,
    /// Turns of each.
    pub turns: u32,
    /// What was found where.
    #[serde(flatten)]
    pub work: TierWork,
    /// Pages that the decode side had already.
    pub decode_reuse: PrefixReuse,
}

/// The whole object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// What the run showed.
    pub verdict: Verdict,
    /// N.
    pub prompt_tokens: u64,
    /// M.
    pub steps: u32,
    /// C.
    pub chunk: u32,
    /// The path of the bytes: `shm`, `tcp`, `cma`, `ucx`, `libfabric` or `local`.
    pub transport: String,
    /// Storage of the indexer keys.
    pub index_k: String,
    /// Storage of the latents.
    pub latent: String,
    /// `tiny-v4` or the folder.
    pub model: String,
    /// S.
    pub seed: u64,
    /// Which code path computed.
    pub isa: String,
    /// Processes.
    pub pids: Pids,
    /// What became of the requests.
    pub requests: Requests,
    /// The comparison of the logits.
    pub logits: Logits,
    /// The comparison of the cache rows.
    pub cache: CacheRows,
    /// Some query saw more entries than `index_topk`.
    pub index_k_consulted: bool,
    /// Work of the decode side.
    pub decode: DecodeWork,
    /// Work of the prefill side.
    pub prefill: PrefillWork,
    /// Usable logical pages per side.
    pub pages: u64,
    /// Transfers posted.
    pub transfers: u64,
    /// Bytes moved.
    pub bytes: Bytes,
    /// Per layer.
    pub layers: Vec<LayerReport>,
    /// Bytes moved over the time that transfers were under way.
    pub transfer_gbps: f64,
    /// Share of the transfer that decode did not wait for.
    pub hidden_share: f64,
    /// Times that a page of the decode side went to another owner.
    pub page_reuses: u64,
    /// Requests between Submit and end at one time, at the most.
    pub peak_in_flight: u32,
    /// Every page of both sides is free or accounted for at the end.
    pub pages_conserved: bool,
    /// The run-time detector.
    pub canary: Canary,
    /// Events that must not pass silently.
    pub counters: Counters,
    /// The place that the fault hit.
    pub fault: Option<PlantedFault>,
    /// Tiers.
    pub hits: Hits,
    /// With `--sessions` or `--turns`.
    #[serde(flatten)]
    pub conversations: Option<Conversations>,
    /// Why the verdict is `invalid`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorObject>,
}

/// The error of a run without a verdict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorObject {
    /// The class.
    pub kind: String,
    /// One line.
    pub message: String,
    /// The offending option, file, tensor or schema field.
    pub field: Option<String>,
    /// The offending value.
    pub value: Option<String>,
}

impl ErrorObject {
    /// The object of a failure.
    #[must_use]
    pub fn of(failure: &Failure) -> Self {
        let kind = serde_json::to_value(failure.kind).ok();
        Self {
            kind: kind
                .as_ref()
                .and_then(|kind| kind.as_str())
                .unwrap_or("internal")
                .to_owned(),
            message: failure.message.clone(),
            field: failure.field.clone(),
            value: failure.value.clone(),
        }
    }
}

/// The JSON object of a run that has nothing to report but its failure.
#[must_use]
pub fn failure_json(failure: &Failure, pids: Option<Pids>) -> serde_json::Value {
    let mut object = serde_json::json!({
        "schema": SCHEMA,
        "verdict": Verdict::Invalid,
        "error": ErrorObject::of(failure),
    });
    if let (Some(pids), Some(map)) = (pids, object.as_object_mut()) {
        map.insert("pids".to_owned(), serde_json::json!(pids));
    }
    object
}

impl Report {
    /// The last line of the plain output.
    #[must_use]
    pub fn verdict_line(&self) -> String {
        match self.verdict {
            Verdict::BitIdentical => {
                format!("verdict: bit-identical ({} logits)", self.logits.compared)
            }
            Verdict::Mismatch => format!("verdict: MISMATCH ({})", self.mismatch_text()),
            Verdict::Invalid => {
                let reason = self
                    .error
                    .as_ref()
                    .map_or("no reason given", |error| &error.message);
                format!("verdict: INVALID ({reason})")
            }
        }
    }

    /// The exit code of the run.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self.verdict {
            Verdict::BitIdentical => 0,
            Verdict::Mismatch => 1,
            Verdict::Invalid => 2,
        }
    }

    fn mismatch_text(&self) -> String {
        let mut parts = Vec::new();
        let logits = &self.logits;
        if let Some(first) = &logits.first_difference {
            parts.push(format!(
                "{} of {} logits differ, first: request {} step {} index {} expected {:#010x} got {:#010x}",
                logits.differing, logits.compared, first.request, first.step, first.index,
                first.expected_bits, first.got_bits,
            ));
        }
        if let Some(first) = &self.cache.first_difference {
            parts.push(format!(
                "{} of {} cache rows differ, first: request {} {} layer {} row {} ({})",
                self.cache.differing,
                self.cache.compared_rows,
                first.request,
                first.component,
                first.layer,
                first.entry,
                first.when,
            ));
        }
        if let Some(first) = self.canary.violations.first() {
            parts.push(format!(
                "{} violations, first: {} layer {} page {} generation {} request {}: {}",
                self.canary.violations.len(),
                first.component,
                first.layer,
                first.page,
                first.generation,
                first.request,
                first.kind,
            ));
        }
        parts.join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without_hit(hits: [u64; 4], misses: u64) -> Option<String> {
        let names = ["device", "host", "storage", "remote"];
        let tiers: Vec<TierHits> = names
            .iter()
            .zip(hits)
            .map(|(tier, hits)| TierHits {
                tier: (*tier).to_owned(),
                hits,
                ..TierHits::default()
            })
            .collect();
        tier_without_hit(&tiers, misses).map(|tier| tier.tier.clone())
    }

    #[test]
    fn a_storage_tier_without_a_hit_shows_nothing_whatever_the_others_did() {
        assert_eq!(without_hit([3, 2, 1, 1], 1), None);
        assert_eq!(without_hit([0, 0, 1, 7], 0), None);
        assert_eq!(without_hit([0, 0, 0, 8], 0).as_deref(), Some("storage"));
        assert_eq!(without_hit([0, 0, 8, 0], 0).as_deref(), Some("remote"));
        assert_eq!(without_hit([0, 1, 1, 1], 1).as_deref(), Some("device"));
        assert_eq!(without_hit([1, 0, 0, 0], 0).as_deref(), Some("host"));
        assert_eq!(without_hit([0, 0, 0, 0], 4).as_deref(), Some("device"));
    }
}
