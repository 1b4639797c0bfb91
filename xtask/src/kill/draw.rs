//! Seeded draws.

/// A splitmix64 sequence.
pub(super) struct Draw(u64);

impl Draw {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is not zero.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// A share from 0 to just below 1.
    pub(super) fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_and_shares_stay_in_range() {
        let (mut a, mut b) = (Draw::new(7), Draw::new(7));
        for _ in 0..100 {
            let share = a.share();
            assert_eq!(share, b.share());
            assert!((0.0..1.0).contains(&share));
        }
        assert_ne!(Draw::new(8).share(), Draw::new(9).share());
    }
}
