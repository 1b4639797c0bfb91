//! The transcendental functions of the model, from one compiled-in implementation.
//!
//! The platform's libm differs between hosts; two hosts that exchange pages must not. The `libm`
//! crate is plain Rust arithmetic, which is never contracted.

/// e^x.
#[inline]
pub fn exp(x: f32) -> f32 {
    libm::expf(x)
}

/// ln(1 + x).
#[inline]
pub fn log1p(x: f32) -> f32 {
    libm::log1pf(x)
}

/// 1/(1 + e^-x).
#[inline]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x * sigmoid(x).
#[inline]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// max(x, 0) + log1p(e^-|x|).
#[inline]
pub fn softplus(x: f32) -> f32 {
    x.max(0.0) + log1p(exp(-x.abs()))
}

/// 1/sqrt(x) with two IEEE roundings.
#[inline]
pub fn rsqrt(x: f32) -> f32 {
    1.0 / x.sqrt()
}

/// Sine and cosine of an angle in radians.
#[inline]
pub fn sin_cos(angle: f32) -> (f32, f32) {
    (libm::sinf(angle), libm::cosf(angle))
}

/// Lanes of the fixed summation order.
pub const LANES: usize = 16;

/// Sum of 16 lanes in the one fixed tree order that every reduction uses.
#[inline]
pub fn sum_lanes(lanes: &[f32; LANES]) -> f32 {
    let mut eight = [0.0f32; 8];
    for (i, e) in eight.iter_mut().enumerate() {
        *e = lanes[i] + lanes[i + 8];
    }
    let mut four = [0.0f32; 4];
    for (i, f) in four.iter_mut().enumerate() {
        *f = eight[i] + eight[i + 4];
    }
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Sum of squares in 16 lanes: lane l takes the elements l, l+16, l+32, …
pub fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let mut blocks = x.chunks_exact(LANES);
    for block in &mut blocks {
        for (lane, v) in lanes.iter_mut().zip(block) {
            *lane += v * v;
        }
    }
    for (lane, v) in lanes.iter_mut().zip(blocks.remainder()) {
        *lane += v * v;
    }
    sum_lanes(&lanes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_close_to_f64() {
        for i in -400..400 {
            let x = i as f32 * 0.037;
            let rel = |got: f32, want: f64| ((got as f64 - want) / want.abs().max(1e-30)).abs();
            assert!(rel(exp(x), (x as f64).exp()) < 2e-7, "exp({x})");
            assert!(
                rel(softplus(x), ((x as f64).exp()).ln_1p()) < 4e-7,
                "softplus({x})"
            );
            let (s, c) = sin_cos(x * 1000.0);
            let angle = (x * 1000.0) as f64;
            assert!((s as f64 - angle.sin()).abs() < 1e-7 && (c as f64 - angle.cos()).abs() < 1e-7);
        }
    }

    #[test]
    fn sum_of_squares_handles_remainders() {
        for n in 0..70 {
            let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let want: f32 = (0..n).map(|i| (i * i) as f32).sum();
            assert_eq!(sum_of_squares(&x), want);
        }
    }
}
