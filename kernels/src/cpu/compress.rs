//! Pooling of the compressors: softmax over the source tokens of a group, per channel.

use crate::math::exp;

/// One source token of a group: projections, raw gates and the position bias, all `[dd]`.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Projection.
    pub kv: &'a [f32],
    /// Raw gate.
    pub gate: &'a [f32],
    /// Bias of this place in the group.
    pub ape: &'a [f32],
}

/// c = sum_r softmax_r(gate_r + ape_r) * kv_r per channel, r in the given order.
pub fn pool(sources: &[Source<'_>], out: &mut [f32]) {
    let width = out.len();
    let mut weights: Vec<f32> = Vec::with_capacity(sources.len() * width);
    let mut top = vec![f32::NEG_INFINITY; width];
    for s in sources {
        for ((g, a), t) in s.gate[..width].iter().zip(&s.ape[..width]).zip(&mut top) {
            let biased = g + a;
            *t = t.max(biased);
            weights.push(biased);
        }
    }
    let mut total = vec![0.0f32; width];
    for row in weights.chunks_exact_mut(width.max(1)) {
        for ((w, m), sum) in row.iter_mut().zip(&top).zip(&mut total) {
            *w = exp(*w - m);
            *sum += *w;
        }
    }
    out.fill(0.0);
    for (row, s) in weights.chunks_exact(width.max(1)).zip(sources) {
        for (((o, w), sum), kv) in out.iter_mut().zip(row).zip(&total).zip(s.kv) {
            *o += w / sum * kv;
        }
    }
}

/// Running softmax of an open group: maximum, sum and weighted mean per channel, `[3][dd]`.
///
/// After the last token of a group the mean is the pooled row.
#[derive(Debug)]
pub struct OnlinePool<'a> {
    state: &'a mut [f32],
}

impl<'a> OnlinePool<'a> {
    /// The state in `state` [3 * dd].
    pub fn new(state: &'a mut [f32]) -> Self {
        Self { state }
    }

    /// Starts a group with its first token: (S, 1, kv).
    pub fn start(&mut self, s: Source<'_>) {
        let width = self.state.len() / 3;
        let (top, rest) = self.state.split_at_mut(width);
        let (sum, mean) = rest.split_at_mut(width);
        for ((t, g), a) in top.iter_mut().zip(s.gate).zip(s.ape) {
            *t = g + a;
        }
        sum.fill(1.0);
        mean.copy_from_slice(&s.kv[..width]);
    }

    /// Adds the next token.
    pub fn push(&mut self, s: Source<'_>) {
        let width = self.state.len() / 3;
        let (top, rest) = self.state.split_at_mut(width);
        let (sum, mean) = rest.split_at_mut(width);
        for c in 0..width {
            let biased = s.gate[c] + s.ape[c];
            let next = top[c].max(biased);
            let kept = sum[c] * exp(top[c] - next);
            let added = exp(biased - next);
            let total = kept + added;
            mean[c] = (mean[c] * kept + s.kv[c] * added) / total;
            sum[c] = total;
            top[c] = next;
        }
    }

    /// The weighted mean so far.
    pub fn mean(&self) -> &[f32] {
        &self.state[self.state.len() / 3 * 2..]
    }
}
