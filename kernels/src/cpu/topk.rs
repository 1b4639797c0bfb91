//! Selection of the best entries; ties go to the lower index.

/// Indices of the `k` largest scores, ascending. NaN counts as the largest value, -0 as 0.
pub fn top_k(scores: &[f32], k: usize) -> Vec<u32> {
    if k >= scores.len() {
        return (0..scores.len() as u32).collect();
    }
    if k == 0 {
        return Vec::new();
    }
    let mut keys: Vec<u32> = scores.iter().map(|s| sortable(*s)).collect();
    let cut = keys.len() - k;
    let (_, &mut threshold, above) = keys.select_nth_unstable(cut);
    let mut ties_left = k - above.iter().filter(|key| **key > threshold).count();
    let mut picks = Vec::with_capacity(k);
    for (i, s) in scores.iter().enumerate() {
        let key = sortable(*s);
        if key > threshold {
            picks.push(i as u32);
        } else if key == threshold && ties_left > 0 {
            ties_left -= 1;
            picks.push(i as u32);
        }
    }
    picks
}

/// An integer that orders as the value does; both zeros are equal.
fn sortable(x: f32) -> u32 {
    let bits = if x.is_nan() {
        0x7FC0_0000
    } else {
        (x + 0.0).to_bits()
    };
    if bits >> 31 == 1 {
        !bits
    } else {
        bits | 0x8000_0000
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ties_go_to_the_lower_index() {
        assert_eq!(top_k(&[0.0, -0.0, 0.0, -1.0, 0.0], 3), [0, 1, 2]);
        assert_eq!(top_k(&[-0.0, 0.0], 1), [0]);
        assert_eq!(top_k(&[1.0, 3.0, 2.0, 3.0], 2), [1, 3]);
        assert_eq!(top_k(&[1.0, 2.0], 5), [0, 1]);
        assert!(top_k(&[1.0], 0).is_empty());
    }

    proptest! {
        #[test]
        fn equals_a_stable_sort(scores in proptest::collection::vec(-4i8..4, 0..60), k in 0usize..70) {
            let scores: Vec<f32> = scores.iter().map(|s| *s as f32).collect();
            let mut order: Vec<u32> = (0..scores.len() as u32).collect();
            order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
            order.truncate(k);
            order.sort_unstable();
            prop_assert_eq!(top_k(&scores, k), order);
        }
    }
}
