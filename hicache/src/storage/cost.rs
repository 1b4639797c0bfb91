//! [`CostModel`]: whether a prefix is loaded or computed again, by measured rates.
//!
//! A tier that is slower than the model is no help: what it has is computed. Both sides are measured, the tiers by the
//! reads of this process and the model by what the host says of its prompts ([`crate::Hicache::note_prefill`]). While one
//! of the two is not known well enough, what is there is loaded. The decision changes how long a request takes and
//! nothing else.
//!
//! **What is protected by what.** One mutex guards the rates. **Lock order.** It is a leaf.

use std::time::Duration;

use kvgate_transfer::sync::Mutex;

/// How rates are measured, and how often a slow tier is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostConfig {
    /// Reads of a tier, and prompts, that must have been seen before they count.
    pub least_observations: u32,
    /// One observation counts for so much of a rate, in 1/1,000.
    pub weight_permille: u32,
    /// After so many prefixes in a row that were computed instead, one is loaded all the same: a tier may have become
    /// fast again.
    pub retry_after: u32,
}

impl Default for CostConfig {
    /// 8 observations, an eighth for the last one, every 16th slow prefix is loaded.
    fn default() -> CostConfig {
        CostConfig {
            least_observations: 8,
            weight_permille: 125,
            retry_after: 16,
        }
    }
}

/// Rates as far as they are known.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CostRates {
    /// Tokens of prompts that are computed in a second.
    pub prefill_tokens_per_s: Option<f64>,
    /// Payload bytes that come out of each tier in a second, nearest first.
    pub read_bytes_per_s: Vec<Option<f64>>,
}

/// A prefix that could be brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    /// Its length.
    pub tokens: u32,
    /// Payload bytes that come from each tier for it, nearest first.
    pub bytes: Vec<u64>,
    /// Time that limits of bandwidth keep it waiting.
    pub wait: Duration,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The candidate of this number is loaded, the rest computed.
    Load(usize),
    /// The longest one is loaded: a rate that it takes is not known yet.
    Unweighed,
    /// The longest one is loaded although it is slow: its tiers are tried again.
    Retry,
    /// Nothing is loaded: computing is faster.
    Compute,
}

/// Measured rates, and the decision by them.
#[derive(Debug)]
pub struct CostModel {
    config: CostConfig,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    prefill: Rate,
    reads: Vec<Rate>,
    /// Prefixes in a row that were computed instead.
    computed: u32,
}

/// Something per second, each side weighted exponentially: a long observation counts for more than a short one.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    amount: f64,
    seconds: f64,
    count: u32,
}

impl Rate {
    fn note(&mut self, amount: f64, seconds: f64, weight: f64) {
        self.amount += (amount - self.amount) * weight;
        self.seconds += (seconds - self.seconds) * weight;
        self.count = self.count.saturating_add(1);
    }

    /// `None` until enough was seen.
    fn per_second(&self, least: u32) -> Option<f64> {
        let is_known = self.count >= least && self.count > 0 && self.seconds > 0.0;
        is_known.then(|| self.amount / self.seconds)
    }
}

impl CostModel {
    /// Nothing is known.
    pub fn new(config: CostConfig, tier_count: usize) -> CostModel {
        CostModel {
            config,
            state: Mutex::new(State {
                prefill: Rate::default(),
                reads: vec![Rate::default(); tier_count],
                computed: 0,
            }),
        }
    }

    /// So many tokens of a prompt were computed in `elapsed`.
    pub fn note_prefill(&self, tokens: u32, elapsed: Duration) {
        if tokens > 0 {
            let weight = self.weight();
            let mut state = self.state.lock();
            let (tokens, seconds) = (f64::from(tokens), elapsed.as_secs_f64());
            state.prefill.note(tokens, seconds, weight);
        }
    }

    /// A read of a tier took `elapsed` and gave so many bytes; 0 for a failed one, whose time is lost too.
    pub fn note_read(&self, tier: usize, bytes: u64, elapsed: Duration) {
        let weight = self.weight();
        if let Some(rate) = self.state.lock().reads.get_mut(tier) {
            rate.note(bytes as f64, elapsed.as_secs_f64(), weight);
        }
    }

    /// What is known.
    pub fn rates(&self) -> CostRates {
        let least = self.config.least_observations;
        let state = self.state.lock();
        let reads = state.reads.iter();
        CostRates {
            prefill_tokens_per_s: state.prefill.per_second(least),
            read_bytes_per_s: reads.map(|rate| rate.per_second(least)).collect(),
        }
    }

    /// What takes the least time for a request that has `known_tokens` already: to load one of the candidates, which
    /// are longest first, and compute the rest, or to compute everything. Of equals, what loads more.
    pub fn choose(&self, known_tokens: u32, candidates: &[Candidate]) -> Choice {
        let rates = self.rates();
        let Some(longest) = candidates.first() else {
            return Choice::Compute;
        };
        let Some(prefill) = rates.prefill_tokens_per_s.filter(|rate| *rate > 0.0) else {
            return Choice::Unweighed;
        };
        // Against the longest: what it saves another candidate has to compute.
        let mut best: Option<(usize, f64)> = None;
        for (index, candidate) in candidates.iter().enumerate() {
            let Some(load) = load_seconds(candidate, &rates) else {
                return Choice::Unweighed;
            };
            let rest = longest.tokens.saturating_sub(candidate.tokens);
            let seconds = load + f64::from(rest) / prefill;
            if best.is_none_or(|(_, least)| seconds < least) {
                best = Some((index, seconds));
            }
        }
        let whole = f64::from(longest.tokens.saturating_sub(known_tokens)) / prefill;
        let mut state = self.state.lock();
        match best {
            Some((index, seconds)) if seconds <= whole => {
                state.computed = 0;
                Choice::Load(index)
            }
            _ if state.computed >= self.config.retry_after => {
                state.computed = 0;
                Choice::Retry
            }
            _ => {
                state.computed += 1;
                Choice::Compute
            }
        }
    }

    fn weight(&self) -> f64 {
        f64::from(self.config.weight_permille.clamp(1, 1_000)) / 1_000.0
    }
}

/// `None` while the rate of a tier that it takes is not known. A tier that gave nothing in its last reads takes forever.
fn load_seconds(candidate: &Candidate, rates: &CostRates) -> Option<f64> {
    let mut seconds = candidate.wait.as_secs_f64();
    for (tier, bytes) in candidate.bytes.iter().enumerate() {
        if *bytes > 0 {
            seconds += *bytes as f64 / rates.read_bytes_per_s.get(tier).copied().flatten()?;
        }
    }
    Some(seconds)
}

#[cfg(all(test, not(kv_loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CONFIG: CostConfig = CostConfig {
        least_observations: 4,
        weight_permille: 250,
        retry_after: 3,
    };

    fn model(prefill_tokens_per_s: u32, read_bytes_per_s: &[u64]) -> CostModel {
        let model = CostModel::new(CONFIG, read_bytes_per_s.len());
        for _ in 0..4 {
            model.note_prefill(prefill_tokens_per_s, Duration::from_secs(1));
            for (tier, bytes) in read_bytes_per_s.iter().enumerate() {
                model.note_read(tier, *bytes, Duration::from_secs(1));
            }
        }
        model
    }

    fn candidate(tokens: u32, bytes: &[u64]) -> Candidate {
        Candidate {
            tokens,
            bytes: bytes.to_vec(),
            wait: Duration::ZERO,
        }
    }

    #[test]
    fn what_is_not_known_is_loaded() {
        let slow = candidate(1_024, &[1 << 30]);
        let model = CostModel::new(CONFIG, 1);
        for _ in 0..4 {
            assert_eq!(
                model.choose(0, std::slice::from_ref(&slow)),
                Choice::Unweighed
            );
            model.note_prefill(10_000, Duration::from_secs(1));
        }
        for _ in 0..4 {
            assert_eq!(
                model.choose(0, std::slice::from_ref(&slow)),
                Choice::Unweighed
            );
            model.note_read(0, 1_000, Duration::from_secs(1));
        }
        assert_eq!(model.choose(0, &[slow]), Choice::Compute);
    }

    #[test]
    fn a_slow_tier_is_tried_again_and_a_fast_one_used() {
        let model = model(1_000, &[1_000]);
        let far = [candidate(512, &[10_000])];
        let asked: Vec<Choice> = (0..8).map(|_| model.choose(0, &far)).collect();
        let compute = [Choice::Compute; 3].as_slice();
        assert_eq!(
            asked,
            [compute, &[Choice::Retry], compute, &[Choice::Retry]].concat()
        );
        for _ in 0..40 {
            model.note_read(0, 1_000_000, Duration::from_secs(1));
        }
        assert_eq!(model.choose(0, &far), Choice::Load(0));
    }

    #[test]
    fn a_tier_that_gives_nothing_takes_forever_and_limits_count() {
        let dead = model(1_000, &[0, 1 << 30]);
        assert_eq!(dead.choose(0, &[candidate(512, &[1, 0])]), Choice::Compute);
        let mut near = candidate(512, &[0, 1]);
        assert_eq!(dead.choose(0, std::slice::from_ref(&near)), Choice::Load(0));
        near.wait = Duration::from_secs(10);
        assert_eq!(dead.choose(0, &[near]), Choice::Compute);
    }

    /// Near blocks are loaded and those of a slow tier behind them computed.
    #[test]
    fn the_slow_end_of_a_prefix_is_computed() {
        let model = model(1_000, &[1_000_000, 100]);
        let both = [
            candidate(1_024, &[512_000, 512_000]),
            candidate(512, &[512_000, 0]),
        ];
        assert_eq!(model.choose(0, &both), Choice::Load(1));
        assert_eq!(model.choose(512, &both), Choice::Compute, "it is there");
    }

    #[test]
    fn rates_follow_what_is_seen() {
        let model = model(1_000, &[1_000]);
        let rate = |model: &CostModel| model.rates().read_bytes_per_s[0];
        assert!((rate(&model).unwrap_or(0.0) - 1_000.0).abs() < 1e-6);
        model.note_read(0, 0, Duration::from_secs(1));
        let after_a_miss = rate(&model).unwrap_or(0.0);
        assert!(
            after_a_miss < 900.0 && after_a_miss > 500.0,
            "{after_a_miss}"
        );
    }

    fn seconds(candidate: &Candidate, longest: u32, prefill: u32, reads: &[u64]) -> f64 {
        let bytes = candidate.bytes.iter().zip(reads);
        let load: f64 = bytes
            .map(|(bytes, rate)| *bytes as f64 / *rate as f64)
            .sum();
        load + f64::from(longest - candidate.tokens) / f64::from(prefill)
    }

    proptest! {
        /// No candidate, and no computing of everything, would have been faster than what was chosen.
        #[test]
        fn what_is_chosen_is_the_fastest(
            prefill in 1_u32..100_000,
            reads in prop::collection::vec(1_u64..1 << 34, 3),
            known in 0_u32..2_048,
            mut ends in prop::collection::vec((1_u32..8_192, prop::collection::vec(0_u64..1 << 32, 3)), 1..8),
        ) {
            ends.sort_by_key(|(tokens, _)| std::cmp::Reverse(*tokens));
            let candidates: Vec<_> = ends.iter().map(|(tokens, bytes)| candidate(known + tokens, bytes)).collect();
            let longest = candidates[0].tokens;
            let all = f64::from(longest - known) / f64::from(prefill);
            let times: Vec<f64> = candidates.iter().map(|c| seconds(c, longest, prefill, &reads)).collect();
            let least = times.iter().copied().fold(all, f64::min);
            let chosen = match model(prefill, &reads).choose(known, &candidates) {
                Choice::Load(index) => times[index],
                Choice::Compute => all,
                other => return Err(TestCaseError::fail(format!("{other:?}"))),
            };
            prop_assert!(chosen <= least * (1.0 + 1e-9), "{chosen} of {times:?}, {all}");
        }

        /// A faster tier never turns a load into a computation.
        #[test]
        fn a_faster_tier_is_not_left_alone(
            prefill in 1_u32..100_000,
            read in 1_u64..1 << 30,
            factor in 1_u64..1_000,
            tokens in 1_u32..8_192,
            bytes in 1_u64..1 << 40,
        ) {
            let end = [candidate(tokens, &[bytes])];
            if model(prefill, &[read]).choose(0, &end) == Choice::Load(0) {
                prop_assert_eq!(model(prefill, &[read * factor]).choose(0, &end), Choice::Load(0));
            }
        }
    }
}
