//! The normalised Walsh-Hadamard transform.

/// Transforms a row whose length is a power of two, in place: Sylvester order, butterflies with
/// stride 1, 2, 4, …, then times length^-0.5. A row of another length is left as it is and `false`
/// returned.
#[must_use = "false means that the row was not transformed"]
pub fn hadamard(row: &mut [f32]) -> bool {
    if !row.len().is_power_of_two() {
        return false;
    }
    let mut stride = 1;
    while stride < row.len() {
        for pair in row.chunks_exact_mut(2 * stride) {
            let (low, high) = pair.split_at_mut(stride);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        stride *= 2;
    }
    let factor = 1.0 / (row.len() as f32).sqrt();
    for v in row {
        *v *= factor;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transform_is_its_own_inverse() {
        let row: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut twice = row.clone();
        assert!(hadamard(&mut twice) && hadamard(&mut twice));
        assert!(row.iter().zip(&twice).all(|(a, b)| (a - b).abs() < 1e-5));
        assert!(!hadamard(&mut [0.0; 3]));
    }
}
