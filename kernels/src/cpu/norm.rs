//! Root-mean-square norms.

use crate::math::{rsqrt, sum_of_squares};

/// x * rsqrt(mean(x^2) + eps), in place.
pub fn rms(x: &mut [f32], eps: f32) {
    let factor = rsqrt(sum_of_squares(x) / x.len() as f32 + eps);
    for v in x {
        *v *= factor;
    }
}

/// w * rms(x), in place; `w` has the width of `x`.
pub fn rms_weighted(x: &mut [f32], w: &[f32], eps: f32) {
    rms(x, eps);
    for (v, w) in x.iter_mut().zip(w) {
        *v *= w;
    }
}
