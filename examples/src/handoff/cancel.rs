//! Which requests a run aborts, and when: both sides draw the same from the seed.

use super::prompt::mix;

/// When a request is aborted, and by whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelMoment {
    /// By prefill, right after Submit: the Offer crosses the abort.
    BeforeOffer,
    /// By prefill, after so many parts of 1,000 of its posts.
    MidSend {
        /// 0 to 999.
        permille: u32,
    },
    /// By decode, when everything has landed and before the first step.
    AfterLanding,
    /// By decode, after so many steps.
    MidDecode {
        /// From 1, below the steps of the run (or 1).
        steps: u32,
    },
}

/// Words that keep the draws apart.
const CHOICE: u64 = 0xca11;
const MOMENT: u64 = 0xca12;

/// The moments of all requests; `None` for a request that runs to its end. The share is met exactly,
/// up to rounding.
#[must_use]
pub fn draw(seed: u64, requests: u32, share: f64, steps: u32) -> Vec<Option<CancelMoment>> {
    let count = (f64::from(requests) * share).round() as usize;
    let mut order: Vec<u32> = (0..requests).collect();
    order.sort_by_key(|&request| mix(seed, u64::from(request), CHOICE));
    let mut moments = vec![None; requests as usize];
    for &request in order.iter().take(count) {
        if let Some(moment) = moments.get_mut(request as usize) {
            *moment = Some(moment_of(mix(seed, u64::from(request), MOMENT), steps));
        }
    }
    moments
}

fn moment_of(draw: u64, steps: u32) -> CancelMoment {
    let detail = (draw >> 8) % 1_000;
    match draw % 4 {
        0 => CancelMoment::BeforeOffer,
        1 => CancelMoment::MidSend {
            permille: detail as u32,
        },
        2 => CancelMoment::AfterLanding,
        _ => CancelMoment::MidDecode {
            steps: 1 + (detail as u32) % steps.saturating_sub(1).max(1),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_exact_and_every_moment_occurs() {
        let moments = draw(1, 200, 0.2, 8);
        let drawn: Vec<_> = moments.iter().flatten().collect();
        assert_eq!(drawn.len(), 40);
        assert!(
            drawn
                .iter()
                .any(|moment| matches!(moment, CancelMoment::BeforeOffer))
        );
        assert!(
            drawn
                .iter()
                .any(|moment| matches!(moment, CancelMoment::MidSend { .. }))
        );
        assert!(
            drawn
                .iter()
                .any(|moment| matches!(moment, CancelMoment::AfterLanding))
        );
        assert!(
            drawn
                .iter()
                .any(|moment| matches!(moment, CancelMoment::MidDecode { steps: 1..=7 }))
        );
        assert_eq!(moments, draw(1, 200, 0.2, 8));
        assert_ne!(moments, draw(2, 200, 0.2, 8));
    }

    #[test]
    fn none_and_all() {
        assert!(draw(1, 10, 0.0, 8).iter().all(Option::is_none));
        assert!(draw(1, 10, 1.0, 1).iter().all(Option::is_some));
    }
}
