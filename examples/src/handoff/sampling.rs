//! The next token: greedy, the lower id first among equals.

/// The index of the largest logit. NaN is never larger than anything.
#[must_use]
pub fn arg_max(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (index, &logit) in logits.iter().enumerate() {
        if logit > best.1 {
            best = (index as u32, logit);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_id_and_nan_never_wins() {
        assert_eq!(arg_max(&[1.0, 3.0, 3.0]), 1);
        assert_eq!(arg_max(&[f32::NAN, -1.0]), 1);
        assert_eq!(arg_max(&[]), 0);
    }
}
