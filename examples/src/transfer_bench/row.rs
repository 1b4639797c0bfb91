//! The figures of one load, as they are printed.

use serde::Serialize;

use super::options::{Backend, Load};
use super::throughput::{Cpu, Figures, Round};

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
    /// The ratio that nine rounds in ten exceed: how much it moves.
    pub ratio_p10: f64,
    /// The fastest request.
    pub min_us: f64,
    /// Processor time of the plain copy for a KiB.
    pub memcpy_cpu_ns_kib: f64,
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
    /// From the figures of a load.
    #[must_use]
    pub fn new(load: &Load, backend: Backend, figures: Figures) -> Self {
        let rounds = &figures.rounds;
        let of = |value: fn(&Round) -> f64| rounds.iter().map(value).collect::<Vec<_>>();
        let engine = sorted(of(|round| round.engine));
        let ratios = sorted(of(|round| round.engine / round.memcpy));
        let memcpy_gbps_med = median(of(|round| round.memcpy));
        let ratio_med = quantile(&ratios, 0.5);
        let limit_ratio = |round: &Round| round.limit.map(|limit| round.engine / limit);
        let limit = match figures.limit_name {
            None => Limit {
                name: "memcpy",
                gbps_med: memcpy_gbps_med,
                ratio_med,
            },
            Some(name) => Limit {
                name,
                gbps_med: median(rounds.iter().filter_map(|round| round.limit).collect()),
                ratio_med: median(rounds.iter().filter_map(limit_ratio).collect()),
            },
        };
        let slices = rounds.len();
        let latencies = sorted(figures.latencies_us);
        let (cpu, gbps_p90) = (figures.cpu, quantile(&engine, 0.9));
        let request_bytes = figures.request_bytes.max(1) as f64;
        Self {
            backend: backend.id().to_owned(),
            op: load.op.id(),
            page_bytes: figures.request_bytes / figures.pages.max(1),
            pages: figures.pages,
            order: load.order.id(),
            concurrency: load.concurrency,
            check: load.check.id(),
            gbps_med: quantile(&engine, 0.5),
            gbps_p90,
            descs_s: gbps_p90 * 1e9 * figures.pages as f64 / request_bytes,
            p50_us: quantile(&latencies, 0.5),
            p99_us: quantile(&latencies, 0.99),
            cpu_ns_kib: cpu.ns_kib(),
            cpu_init: cpu.here_ns as f64 / cpu.wall_ns.max(1) as f64,
            cpu_target: cpu.there_ns as f64 / cpu.wall_ns.max(1) as f64,
            memcpy_gbps_med,
            ratio_med,
            limit,
            requests: figures.requests,
            slices,
            bad_pages: figures.bad_pages,
            load: machine_load(),
            ratio_p10: quantile(&ratios, 0.1),
            min_us: quantile(&latencies, 0.0),
            memcpy_cpu_ns_kib: figures.memcpy_cpu.ns_kib(),
            checked_pages: figures.checked_pages,
            model: load.model.zip(load.tokens).map(|(model, tokens)| ModelRow {
                name: model.id(),
                tokens,
                index_k: load.index_k.id(),
            }),
        }
    }

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

impl Cpu {
    /// Processor time of both processes for a KiB.
    #[must_use]
    pub fn ns_kib(&self) -> f64 {
        (self.here_ns + self.there_ns) as f64 * 1024.0 / self.bytes.max(1) as f64
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
