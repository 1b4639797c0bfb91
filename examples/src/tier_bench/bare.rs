//! Slices in alternating order, and what they say.

use std::time::{Duration, Instant};

use crate::handoff::failure::Failure;

/// One kind of work: does `count` operations and says how long each took.
type Work<'a> = Box<dyn FnMut(u64, &mut Vec<Duration>) -> Result<(), Failure> + 'a>;

/// What is done in a slice.
pub(super) struct Side<'a> {
    pub(super) name: &'static str,
    /// Operations of a slice.
    count: u64,
    /// Before the clock of a slice starts.
    before: Box<dyn FnMut() -> Result<(), Failure> + 'a>,
    work: Work<'a>,
}

impl<'a> Side<'a> {
    /// `work` does so many operations in each slice.
    pub(super) fn new(
        name: &'static str,
        count: u64,
        work: impl FnMut(u64, &mut Vec<Duration>) -> Result<(), Failure> + 'a,
    ) -> Side<'a> {
        Side {
            name,
            count: count.max(1),
            before: Box::new(|| Ok(())),
            work: Box::new(work),
        }
    }

    /// With something that is done before the clock of each slice starts.
    pub(super) fn before(self, before: impl FnMut() -> Result<(), Failure> + 'a) -> Side<'a> {
        Side {
            before: Box::new(before),
            ..self
        }
    }

    /// GB/s of one slice.
    fn slice(&mut self, bytes: u64, times: &mut Vec<Duration>) -> Result<f64, Failure> {
        (self.before)()?;
        let begun = Instant::now();
        (self.work)(self.count, times)?;
        Ok((bytes * self.count) as f64 / begun.elapsed().as_secs_f64() / 1e9)
    }
}

/// What a bare loop showed beside the tier.
pub(super) struct Bare {
    pub(super) name: &'static str,
    pub(super) gbps_med: f64,
    /// Median of the pairwise ratios, tier to bare loop.
    pub(super) ratio_med: f64,
}

/// What the slices of a tier and of its bare loops showed.
pub(super) struct Figures {
    /// GB/s of the tier, median of the slices.
    pub(super) gbps_med: f64,
    /// The bare loops, in their order.
    pub(super) bares: Vec<Bare>,
    pub(super) count: u64,
    pub(super) ops_s: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
}

/// Rounds at least, whatever the time.
const LEAST_ROUNDS: u32 = 2;

/// Runs slices, the tier and its bare loops in the order A B C C B A, for `duration`. An operation of each moves
/// `bytes` bytes.
pub(super) fn alternate(
    bytes: u64,
    duration: Duration,
    mut tier: Side<'_>,
    mut bares: Vec<Side<'_>>,
) -> Result<Figures, Failure> {
    let (mut times, mut unused) = (Vec::new(), Vec::new());
    let mut ours = Vec::new();
    let mut theirs = vec![(Vec::new(), Vec::new()); bares.len()];
    let begun = Instant::now();
    let mut rounds = 0;
    while begun.elapsed() < duration || rounds < LEAST_ROUNDS {
        rounds += 1;
        let first = tier.slice(bytes, &mut times)?;
        let mut down = Vec::new();
        for bare in &mut bares {
            down.push(bare.slice(bytes, &mut unused)?);
        }
        let mut up = Vec::new();
        for bare in bares.iter_mut().rev() {
            up.push(bare.slice(bytes, &mut unused)?);
        }
        up.reverse();
        let last = tier.slice(bytes, &mut times)?;
        ours.extend([first, last]);
        for (at, (rates, ratios)) in theirs.iter_mut().enumerate() {
            rates.extend([down[at], up[at]]);
            ratios.extend([first / down[at], last / up[at]]);
        }
    }
    times.sort_unstable();
    let at = |share: usize| {
        let index = (times.len() * share / 100).min(times.len().saturating_sub(1));
        times
            .get(index)
            .map_or(0.0, |time| time.as_secs_f64() * 1e6)
    };
    let gbps_med = median(&mut ours);
    let bares = bares
        .iter()
        .zip(&mut theirs)
        .map(|(bare, (rates, ratios))| Bare {
            name: bare.name,
            gbps_med: median(rates),
            ratio_med: median(ratios),
        });
    Ok(Figures {
        gbps_med,
        bares: bares.collect(),
        count: times.len() as u64,
        ops_s: gbps_med * 1e9 / bytes as f64,
        p50_us: at(50),
        p99_us: at(99),
    })
}

/// The middle one.
pub(super) fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_take_turns_and_ratios_are_of_neighbours() {
        let order = std::cell::RefCell::new(String::new());
        let side = |name: &'static str, ms: u64| {
            let order = &order;
            Side::new(name, 1, move |_, times: &mut Vec<Duration>| {
                order.borrow_mut().push_str(name);
                let begun = Instant::now();
                while begun.elapsed() < Duration::from_millis(ms) {}
                times.push(begun.elapsed());
                Ok(())
            })
        };
        let bares = vec![side("b", 4), side("c", 1)];
        let found = alternate(1000, Duration::ZERO, side("a", 2), bares).unwrap();
        assert_eq!(*order.borrow(), "abccbaabccba");
        assert_eq!(found.count, 4);
        let ratios: Vec<f64> = found.bares.iter().map(|bare| bare.ratio_med).collect();
        assert!(ratios[0] > 1.0 && ratios[1] < 1.0, "{ratios:?}");
    }
}
