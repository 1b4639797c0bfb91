//! Slices in alternating order, and what they say.

use std::time::{Duration, Instant};

use crate::handoff::failure::Failure;

/// One kind of work: does `count` operations and says how long each took.
pub(super) type Work<'a> = dyn FnMut(u64, &mut Vec<Duration>) -> Result<(), Failure> + 'a;

/// What two kinds of work showed.
pub(super) struct Figures {
    /// GB/s of the tier, median of the slices.
    pub(super) gbps_med: f64,
    /// GB/s of the bare loop.
    pub(super) bare_gbps_med: f64,
    /// Median of the pairwise ratios.
    pub(super) ratio_med: f64,
    pub(super) count: u64,
    pub(super) ops_s: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
}

/// Runs slices of `slice_count` operations of `bytes` bytes each, tier and bare loop in the order
/// A B B A, for `duration`, at least four rounds.
pub(super) fn alternate(
    bytes: u64,
    slice_count: u64,
    duration: Duration,
    tier: &mut Work<'_>,
    bare: &mut Work<'_>,
) -> Result<Figures, Failure> {
    let (mut times, mut bare_times) = (Vec::new(), Vec::new());
    let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let begun = Instant::now();
    while begun.elapsed() < duration || ratios.len() < 4 {
        let a = slice(bytes, slice_count, tier, &mut times)?;
        let b = slice(bytes, slice_count, bare, &mut bare_times)?;
        let b_again = slice(bytes, slice_count, bare, &mut bare_times)?;
        let a_again = slice(bytes, slice_count, tier, &mut times)?;
        ratios.extend([a / b, a_again / b_again]);
        ours.extend([a, a_again]);
        theirs.extend([b, b_again]);
    }
    times.sort_unstable();
    let at = |share: usize| times[(times.len() * share / 100).min(times.len() - 1)];
    let gbps_med = median(&mut ours);
    Ok(Figures {
        gbps_med,
        bare_gbps_med: median(&mut theirs),
        ratio_med: median(&mut ratios),
        count: times.len() as u64,
        ops_s: gbps_med * 1e9 / bytes as f64,
        p50_us: at(50).as_secs_f64() * 1e6,
        p99_us: at(99).as_secs_f64() * 1e6,
    })
}

fn slice(
    bytes: u64,
    count: u64,
    work: &mut Work<'_>,
    times: &mut Vec<Duration>,
) -> Result<f64, Failure> {
    let begun = Instant::now();
    work(count, times)?;
    Ok((bytes * count) as f64 / begun.elapsed().as_secs_f64() / 1e9)
}

/// The middle one.
pub(super) fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
