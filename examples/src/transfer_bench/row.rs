//! The figures of one load, as they are printed.

use serde::Serialize;

/// What one load showed.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The path, never `auto`.
    pub backend: String,
    /// `read` or `write`.
    pub op: &'static str,
    /// Bytes of a page; of a model, the mean.
    pub page_bytes: u64,
    /// Pages of a request.
    pub pages: u64,
    /// How they lie.
    pub order: &'static str,
    /// Requests in flight.
    pub concurrency: u32,
    /// Which pages were compared.
    pub check: &'static str,
    /// GB/s, median of the slices.
    pub gbps_med: f64,
    /// GB/s, the slice that one in ten beats: the least disturbed ones.
    pub gbps_p90: f64,
    /// Pages per second in that slice.
    pub descs_s: f64,
    /// From the first list entry to visible at the target.
    pub p50_us: f64,
    /// The same, one request in a hundred takes longer.
    pub p99_us: f64,
    /// Processor time of both processes for a KiB.
    pub cpu_ns_kib: f64,
    /// Cores used by this process.
    pub cpu_init: f64,
    /// Cores used by the peer process; 0 within one process.
    pub cpu_target: f64,
    /// One thread that copies the same pages.
    pub memcpy_gbps_med: f64,
    /// Median of the pairwise ratios to it.
    pub ratio_med: f64,
    /// The bare loop of this path.
    pub limit: Limit,
    /// Timed requests.
    pub requests: u64,
    /// Slices of each kind.
    pub slices: usize,
    /// Pages that did not hold what was sent.
    pub bad_pages: u64,
    /// One-minute load of the machine.
    pub load: f64,
    /// The slowest slice pair in ten: how much the ratio moves.
    pub ratio_p10: f64,
    /// Pages that were compared.
    pub checked_pages: u64,
    /// The model, if its cache was moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelRow>,
}

/// What of a model was moved.
#[derive(Clone, Debug, Serialize)]
pub struct ModelRow {
    /// Its name.
    pub name: &'static str,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Storage of the indexer keys.
    pub index_k: &'static str,
}

/// A bare loop in the same run.
#[derive(Clone, Debug, Serialize)]
pub struct Limit {
    /// Which one.
    pub name: &'static str,
    /// GB/s, median of its slices.
    pub gbps_med: f64,
    /// Median of the pairwise ratios of the engine to it.
    pub ratio_med: f64,
}

impl Row {
    /// One line for people.
    #[must_use]
    pub fn line(&self) -> String {
        format!(
            "{:<9} {:<5} {:>8} B x {:<6} c={} | {:7.2} GB/s (p90 {:.2}) | {:.2} of memcpy {:.2} | {:.2} of {} {:.2} | \
             p50 {:.1} us, p99 {:.1} us | {:.0} ns/KiB, cores {:.2} + {:.2} | bad pages {} of {}",
            self.backend,
            self.op,
            self.page_bytes,
            self.pages,
            self.concurrency,
            self.gbps_med,
            self.gbps_p90,
            self.ratio_med,
            self.memcpy_gbps_med,
            self.limit.ratio_med,
            self.limit.name,
            self.limit.gbps_med,
            self.p50_us,
            self.p99_us,
            self.cpu_ns_kib,
            self.cpu_init,
            self.cpu_target,
            self.bad_pages,
            self.checked_pages,
        )
    }
}

/// The value that `share` of the sorted values do not exceed; 0 of none.
#[must_use]
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let index = (sorted.len() as f64 * share) as usize;
    let last = sorted.len().saturating_sub(1);
    sorted.get(index.min(last)).copied().unwrap_or(0.0)
}

/// Sorts values for [`quantile`].
#[must_use]
pub fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

/// The middle of the values; 0 of none.
#[must_use]
pub fn median(values: Vec<f64>) -> f64 {
    quantile(&sorted(values), 0.5)
}

/// One-minute load of the machine.
#[must_use]
pub fn machine_load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split_whitespace().next();
    first.and_then(|word| word.parse().ok()).unwrap_or(-1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_stay_inside() {
        assert_eq!(quantile(&[], 0.5), 0.0);
        let values = sorted(vec![3.0, 1.0, 2.0, 4.0]);
        assert_eq!(quantile(&values, 0.0), 1.0);
        assert_eq!(quantile(&values, 0.5), 3.0);
        assert_eq!(quantile(&values, 1.0), 4.0);
    }
}
