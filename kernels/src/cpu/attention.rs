//! Attention of one token over gathered latent rows, with a sink per head.

use super::simd::{self, Gather};
use crate::error::{KernelError, expect_len};
use crate::isa::Isa;
use crate::math::{LANES, exp};

/// Rows of f32 padded with zeros to a multiple of 16 channels: scratch of one call.
#[derive(Debug, Default)]
pub struct KeyRows {
    channels: usize,
    width: usize,
    values: Vec<f32>,
}

impl KeyRows {
    /// `rows` rows of `channels` zeros.
    pub fn zeroed(rows: usize, channels: usize) -> Self {
        let width = channels.next_multiple_of(LANES);
        Self {
            channels,
            width,
            values: vec![0.0; rows * width],
        }
    }

    /// Appends a row of zeros and returns its number.
    pub fn push(&mut self) -> usize {
        self.values.resize(self.values.len() + self.width, 0.0);
        self.rows() - 1
    }

    /// Row count.
    pub fn rows(&self) -> usize {
        self.values.len().checked_div(self.width).unwrap_or(0)
    }

    /// Padded channels of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The channels of a row.
    pub fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.width..][..self.channels]
    }

    /// The channels of a row, for writing.
    pub fn row_mut(&mut self, index: usize) -> &mut [f32] {
        &mut self.values[index * self.width..][..self.channels]
    }
}

/// `o[h] = sum_s p[h,s] k_s`, `p = exp(l - M) / (sum exp(l - M) + exp(sink_h - M))`, `l = scale * q[h].k_s`.
///
/// `q` and `out` have `heads` rows; keys are visited in the order of `picks`. K = V.
///
/// # Errors
/// `q`, `sinks` or `out` do not have the same heads, or not the channels of the keys.
pub fn attend(
    isa: Isa,
    q: &KeyRows,
    keys: &KeyRows,
    picks: &[u32],
    sinks: &[f32],
    scale: f32,
    out: &mut KeyRows,
) -> Result<(), KernelError> {
    let heads = sinks.len();
    expect_len("query heads", q.rows(), heads)?;
    expect_len("query channels", q.width, keys.width)?;
    expect_len("output values", out.values.len(), q.values.len())?;
    let gather = Gather {
        isa,
        heads,
        width: keys.width,
        keys: &keys.values,
        picks,
    };
    let mut weights = vec![0.0f32; heads * picks.len()];
    simd::scores(&gather, &q.values, &mut weights);
    if !picks.is_empty() {
        for (row, sink) in weights.chunks_exact_mut(picks.len()).zip(sinks) {
            softmax_with_sink(row, *sink, scale);
        }
    }
    simd::weighted_sum(&gather, &weights, &mut out.values);
    Ok(())
}

/// Turns the raw products of one head into weights, in place.
fn softmax_with_sink(row: &mut [f32], sink: f32, scale: f32) {
    let mut top = sink;
    for v in row.iter_mut() {
        *v *= scale;
        top = top.max(*v);
    }
    let mut total = 0.0f32;
    for v in row.iter_mut() {
        *v = exp(*v - top);
        total += *v;
    }
    total += exp(sink - top);
    for v in row.iter_mut() {
        *v /= total;
    }
}
