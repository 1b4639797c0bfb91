//! What a run of conversations found.

use serde::Serialize;

use crate::handoff::console;
use crate::handoff::failure::{Failure, FailureKind};

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

/// What one tier gave.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct TierHits {
    pub(super) tier: &'static str,
    pub(super) hits: u64,
    pub(super) hit_tokens: u64,
    /// Bytes of the slots that were loaded; 0 for the device pool, where nothing moves.
    pub(super) bytes: u64,
    /// Time from the lookup until the last layer could be read, over all hits.
    pub(super) load_ms: f64,
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
    pub(super) compared_turns: u64,
    pub(super) differing_turns: u64,
    pub(super) first_difference: Option<Difference>,
    pub(super) elapsed_ms: u64,
}

/// Moves between the device pool and the host tier.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Moves {
    pub(super) started: u64,
    pub(super) landed: u64,
    pub(super) failed: u64,
    pub(super) no_room: u64,
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

impl Report {
    pub(super) fn schema() -> &'static str {
        SCHEMA
    }

    /// A comparison over several turns in which a tier had no hit says nothing about that tier.
    pub(super) fn proves_nothing(&self) -> Option<Failure> {
        if self.verdict != Verdict::BitIdentical || self.turns < 2 {
            return None;
        }
        let tier = self.tiers.iter().find(|tier| tier.hits == 0)?;
        let message = format!(
            "the {} tier had 0 hits, expected at least 1: the run shows nothing about it",
            tier.tier
        );
        Some(Failure::new(FailureKind::ProvesNothing, message).with_field(tier.tier, 0))
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
