//! One measurement, as it is printed.

use serde::Serialize;

use super::Args;
use super::bare::Figures;

/// The bare loop beside a row.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Baseline {
    pub(super) name: String,
    pub(super) gbps_med: f64,
}

/// Another loop beside a row.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Beside {
    pub(super) name: String,
    pub(super) gbps_med: f64,
    /// Median of the pairwise ratios, row to this loop.
    pub(super) ratio_med: f64,
}

/// One measurement.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Row {
    pub(super) engine: String,
    pub(super) tier: &'static str,
    pub(super) op: &'static str,
    /// What is special about it.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(super) case: &'static str,
    pub(super) block_bytes: u64,
    pub(super) count: u64,
    pub(super) writers: u32,
    pub(super) durable: bool,
    pub(super) verify: &'static str,
    pub(super) gbps_med: f64,
    pub(super) ops_s: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) baseline: Baseline,
    pub(super) ratio_med: f64,
    /// More loops of the same run, the ratio to each beside it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) beside: Vec<Beside>,
    /// Tokens of the prefix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tokens: Option<u32>,
    /// Until the first layer could be read, as a share of the time until all could.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) first_layer_share: Option<f64>,
    /// Resident memory of the process beyond what it had before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) memory_bytes: Option<u64>,
    /// Blocks that a cache had let go.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) missed: Option<u64>,
    pub(super) bad_blocks: u64,
}

impl Row {
    /// From slices; the first bare loop is the baseline.
    pub(super) fn new(args: &Args, tier: &'static str, op: &'static str, figures: &Figures) -> Row {
        let mut bares = figures.bares.iter();
        let first = bares.next();
        let beside = bares.map(|bare| Beside {
            name: bare.name.to_owned(),
            gbps_med: bare.gbps_med,
            ratio_med: bare.ratio_med,
        });
        Row {
            engine: "kvgate".to_owned(),
            tier,
            op,
            block_bytes: args.block_bytes,
            count: figures.count,
            writers: 1,
            verify: "on",
            gbps_med: figures.gbps_med,
            ops_s: figures.ops_s,
            p50_us: figures.p50_us,
            p99_us: figures.p99_us,
            baseline: first.map_or_else(Baseline::default, |bare| Baseline {
                name: bare.name.to_owned(),
                gbps_med: bare.gbps_med,
            }),
            ratio_med: first.map_or(0.0, |bare| bare.ratio_med),
            beside: beside.collect(),
            ..Row::default()
        }
    }

    /// The row as a line for people.
    pub(super) fn line(&self) -> String {
        let mut line = format!(
            "{:<14} {:<7} {:<8} {:>8} B x {:<6} {:>2} writers{} {:>7.3} GB/s {:>9.1} us p50 {:>9.1} us p99",
            self.engine,
            self.tier,
            self.op,
            self.block_bytes,
            self.count,
            self.writers,
            if self.durable { " durable" } else { "" },
            self.gbps_med,
            self.p50_us,
            self.p99_us,
        );
        if let Some(tokens) = self.tokens {
            line += &format!("  {tokens} tokens");
        }
        if !self.case.is_empty() {
            line += &format!("  ({})", self.case);
        }
        if !self.baseline.name.is_empty() {
            let Baseline { name, gbps_med } = &self.baseline;
            line += &format!("  {name} {gbps_med:.3} GB/s, ratio {:.3}", self.ratio_med);
        }
        for one in &self.beside {
            line += &format!(
                "  {} {:.3}, ratio {:.3}",
                one.name, one.gbps_med, one.ratio_med
            );
        }
        if let Some(share) = self.first_layer_share {
            line += &format!("  first layer after {share:.3}");
        }
        if let Some(memory) = self.memory_bytes {
            line += &format!("  {:.1} MiB of memory", memory as f64 / 1_048_576.0);
        }
        if let Some(missed) = self.missed {
            line += &format!("  {missed} missed");
        }
        if self.bad_blocks > 0 {
            line += &format!("  {} BAD BLOCKS", self.bad_blocks);
        }
        line
    }
}
