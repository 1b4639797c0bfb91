//! What a run of conversations found.

use serde::Serialize;

use crate::handoff::console;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::report::{Moves, StorageWork, TierHits, tier_without_hit};

/// The schema of the JSON object.
const SCHEMA: &str = "kvgate-turns/1";

/// Whether the bits are those of a run without a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Verdict {
    /// Every logit and every row of every turn.
    BitIdentical,
    /// Not.
    Mismatch,
    /// Nothing was compared.
    Unverified,
}

/// The first turn whose bits differ.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Difference {
    pub(super) session: u32,
    pub(super) turn: u32,
    pub(super) prompt_tokens: u32,
    pub(super) hit_tokens: u32,
    pub(super) what: String,
}

/// The result of a run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) schema: &'static str,
    pub(super) verdict: Verdict,
    pub(super) sessions: u32,
    pub(super) turns: u32,
    pub(super) device_pages: u32,
    pub(super) host_pages: u32,
    pub(super) tiers: Vec<TierHits>,
    pub(super) misses: u64,
    pub(super) prompt_tokens: u64,
    pub(super) computed_tokens: u64,
    pub(super) backups: Moves,
    pub(super) loads: Moves,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) storage: Option<StorageWork>,
    pub(super) compared_turns: u64,
    pub(super) differing_turns: u64,
    pub(super) first_difference: Option<Difference>,
    pub(super) elapsed_ms: u64,
}

impl Report {
    pub(super) fn schema() -> &'static str {
        SCHEMA
    }

    /// A comparison over several turns in which a tier had no hit says nothing about that tier.
    pub(super) fn proves_nothing(&self) -> Option<Failure> {
        if self.verdict != Verdict::BitIdentical || self.turns < 2 {
            return None;
        }
        Some(tier_without_hit(&self.tiers, self.misses)?.failure())
    }

    pub(super) fn exit_code(&self) -> u8 {
        match self.verdict {
            Verdict::BitIdentical | Verdict::Unverified => 0,
            Verdict::Mismatch => FailureKind::Mismatch.exit_code(),
        }
    }

    pub(super) fn print(&self, is_json: bool) {
        let text = self.text();
        if is_json {
            console::note(&text);
            console::print(&serde_json::json!(self).to_string());
        } else {
            console::print(&text);
        }
    }

    pub(super) fn text(&self) -> String {
        let mut lines = vec![format!(
            "{:<8} {:>6} {:>11} {:>14} {:>10}",
            "tier", "hits", "hit tokens", "bytes", "load ms"
        )];
        for tier in &self.tiers {
            lines.push(format!(
                "{:<8} {:>6} {:>11} {:>14} {:>10.1}",
                tier.tier, tier.hits, tier.hit_tokens, tier.bytes, tier.load_ms
            ));
        }
        lines.push(format!("{:<8} {:>6}", "miss", self.misses));
        lines.push(format!(
            "prompt tokens {}, computed {}; pages: device {}, host {}; backups {} ({} no room), loads {} ({} failed); {} ms",
            self.prompt_tokens,
            self.computed_tokens,
            self.device_pages,
            self.host_pages,
            self.backups.landed,
            self.backups.no_room,
            self.loads.landed,
            self.loads.failed,
            self.elapsed_ms
        ));
        lines.extend(self.storage.iter().map(StorageWork::text));
        lines.push(match (self.verdict, &self.first_difference) {
            (Verdict::BitIdentical, _) => {
                format!("verdict: BIT-IDENTICAL ({} turns)", self.compared_turns)
            }
            (Verdict::Mismatch, Some(first)) => format!(
                "verdict: MISMATCH ({} of {} turns; first: session {} turn {}, prompt {} behind {}: {})",
                self.differing_turns,
                self.compared_turns,
                first.session,
                first.turn,
                first.prompt_tokens,
                first.hit_tokens,
                first.what
            ),
            (Verdict::Mismatch, None) => "verdict: MISMATCH".to_owned(),
            (Verdict::Unverified, _) => "verdict: none (--verify-cold compares)".to_owned(),
        });
        lines.join("\n")
    }
}
