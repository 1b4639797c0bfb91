//! Manifold-constrained hyper-connections: n residual streams around every sub-layer.

use crate::math::{exp, sigmoid};

/// Constants of the mixing matrices.
#[derive(Clone, Copy, Debug)]
pub struct MhcParams {
    /// Streams.
    pub streams: usize,
    /// Sinkhorn iterations; the first is the softmax with one column step.
    pub sinkhorn_iterations: usize,
    /// Added to weights and sums.
    pub eps: f32,
}

/// Mixing of one token.
#[derive(Clone, Debug, Default)]
pub struct Mix {
    /// Weight of each stream in the input of the sub-layer, `[n]`.
    pub pre: Vec<f32>,
    /// Weight of the sub-layer's output in each stream, `[n]`.
    pub post: Vec<f32>,
    /// Stream mixing [n, n]; the first index is summed.
    pub comb: Vec<f32>,
}

/// The mixing matrices from v = fn . rms(streams) [(2+n)n].
pub fn mix(p: &MhcParams, v: &[f32], scale: &[f32], base: &[f32]) -> Mix {
    let n = p.streams;
    let pre = (0..n)
        .map(|j| sigmoid(v[j] * scale[0] + base[j]) + p.eps)
        .collect();
    let post = (n..2 * n)
        .map(|j| 2.0 * sigmoid(v[j] * scale[1] + base[j]))
        .collect();
    let mut comb: Vec<f32> = (2 * n..(2 + n) * n)
        .map(|j| v[j] * scale[2] + base[j])
        .collect();
    for row in comb.chunks_exact_mut(n) {
        softmax_plus(row, p.eps);
    }
    divide_columns(&mut comb, n, p.eps);
    for _ in 1..p.sinkhorn_iterations {
        for row in comb.chunks_exact_mut(n) {
            let total = row.iter().fold(0.0f32, |s, v| s + v) + p.eps;
            for v in row {
                *v /= total;
            }
        }
        divide_columns(&mut comb, n, p.eps);
    }
    Mix { pre, post, comb }
}

fn softmax_plus(row: &mut [f32], eps: f32) {
    let top = row.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v));
    let mut total = 0.0f32;
    for v in row.iter_mut() {
        *v = exp(*v - top);
        total += *v;
    }
    for v in row {
        *v = *v / total + eps;
    }
}

fn divide_columns(comb: &mut [f32], n: usize, eps: f32) {
    for column in 0..n {
        let total = (0..n).fold(0.0f32, |s, row| s + comb[row * n + column]) + eps;
        for row in 0..n {
            comb[row * n + column] /= total;
        }
    }
}

/// x = sum_j pre_j X_j for streams X [n, d].
pub fn collapse(pre: &[f32], streams: &[f32], x: &mut [f32]) {
    x.fill(0.0);
    for (weight, stream) in pre.iter().zip(streams.chunks_exact(x.len())) {
        for (o, v) in x.iter_mut().zip(stream) {
            *o += weight * v;
        }
    }
}

/// `X'_k = post_k * y + sum_j comb[j,k] X_j`, in place.
pub fn expand(m: &Mix, y: &[f32], streams: &mut [f32]) {
    let n = m.post.len();
    let d = y.len();
    let before = streams.to_vec();
    for (k, out) in streams.chunks_exact_mut(d).enumerate() {
        out.fill(0.0);
        for (j, stream) in before.chunks_exact(d).enumerate() {
            let weight = m.comb[j * n + k];
            for (o, v) in out.iter_mut().zip(stream) {
                *o += weight * v;
            }
        }
        for (o, v) in out.iter_mut().zip(y) {
            *o += m.post[k] * v;
        }
    }
}

/// Weights of the final collapse: sigmoid(v_j * scale + base_j) + eps.
pub fn head_weights(p: &MhcParams, v: &[f32], scale: f32, base: &[f32]) -> Vec<f32> {
    v.iter()
        .zip(base)
        .map(|(v, b)| sigmoid(v * scale + b) + p.eps)
        .collect()
}
