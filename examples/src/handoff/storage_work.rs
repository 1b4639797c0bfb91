//! What the storage tiers did in a run of conversations.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What the tiers behind the host tier did in a run of conversations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StorageWork {
    /// By tier, nearest first.
    pub tiers: Vec<StorageTierWork>,
    /// Whether everything was stored that was to be, or dropped, before the run ended.
    pub is_drained: bool,
    /// Prefixes that were not stored because too many waited.
    pub stores_dropped: u64,
    /// Prefixes of which a record is missing in a tier.
    pub stores_failed: u64,
    /// Prefixes that came into the host tier.
    pub fetches_published: u64,
    /// Of these, shorter ones than the tiers had said to have.
    pub fetches_shortened: u64,
    /// Attempts of which nothing was enough to go on from.
    pub fetches_failed: u64,
    /// Waits that ended at their deadline.
    pub fetches_late: u64,
    /// Prefixes that were computed since that was faster than reading them.
    pub fetches_computed: u64,
    /// Prefixes whose end was computed since that was faster.
    pub fetches_trimmed: u64,
    /// Tokens of prompts that were computed in a second, as far as it is known.
    pub prefill_tokens_per_s: Option<f64>,
}

impl StorageWork {
    /// One line per tier, and one for all.
    pub fn text(&self) -> String {
        let of = |tier: &StorageTierWork| {
            let misses = tier.misses.iter().map(|(cause, n)| format!("{cause} {n}"));
            let misses: Vec<String> = misses.collect();
            format!(
                "{} ({}): {} records stored ({} bytes), {} there already, {} failed; {} read ({} bytes) in {:.1} ms; misses: {}\n",
                tier.tier,
                tier.store,
                tier.stored,
                tier.stored_bytes,
                tier.present,
                tier.failed,
                tier.read_records,
                tier.read_bytes,
                tier.read_ms,
                if misses.is_empty() {
                    "none".to_owned()
                } else {
                    misses.join(", ")
                },
            )
        };
        let tiers: String = self.tiers.iter().map(of).collect();
        format!(
            "{tiers}prefixes: {} fetched, {} of them shortened; {} fetches without a prefix, {} too late, {} computed instead; {} stores dropped, {} incomplete",
            self.fetches_published,
            self.fetches_shortened,
            self.fetches_failed,
            self.fetches_late,
            self.fetches_computed,
            self.stores_dropped,
            self.stores_failed,
        )
    }
}

/// What one of them did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StorageTierWork {
    /// `storage` or `remote`.
    pub tier: String,
    /// The kind of store.
    pub store: String,
    /// Records that were stored.
    pub stored: u64,
    /// Bytes of these.
    pub stored_bytes: u64,
    /// Records that were there already.
    pub present: u64,
    /// Records that could not be stored.
    pub failed: u64,
    /// Of these, those that a limit of bandwidth or of wear kept out.
    pub limited: u64,
    /// Bytes written to it by this process in the last day.
    pub today_bytes: u64,
    /// Bytes that came out of it in a second, as far as it is known.
    pub read_bytes_per_s: Option<f64>,
    /// Verified records that were read.
    pub read_records: u64,
    /// Payload bytes of these.
    pub read_bytes: u64,
    /// Time in these reads.
    pub read_ms: f64,
    /// Reads that gave no record, by cause.
    pub misses: BTreeMap<String, u64>,
}
