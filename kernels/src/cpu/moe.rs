//! Expert routing and the clipped swiglu.

use super::topk::top_k;
use crate::math::{silu, softplus};

/// sqrt(softplus(z)).
pub fn router_score(logit: f32) -> f32 {
    softplus(logit).sqrt()
}

/// Experts with the `count` largest biased scores, ascending ids; ties to the lower id.
pub fn pick_experts(scores: &[f32], bias: &[f32], count: usize) -> Vec<u32> {
    let biased: Vec<f32> = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
    top_k(&biased, count)
}

/// a_e = s_e / sum(s) * factor over the picked experts, in the order of `picks`.
pub fn route_weights(scores: &[f32], picks: &[u32], factor: f32) -> Vec<f32> {
    let total = picks
        .iter()
        .fold(0.0f32, |sum, e| sum + scores[*e as usize]);
    picks
        .iter()
        .map(|e| scores[*e as usize] / total * factor)
        .collect()
}

/// gate = silu(min(gate, limit)) * clamp(up, -limit, limit) [* weight], in place.
pub fn swiglu(gate: &mut [f32], up: &[f32], limit: f32, weight: Option<f32>) {
    for (g, u) in gate.iter_mut().zip(up) {
        let product = silu(g.min(limit)) * u.max(-limit).min(limit);
        *g = weight.map_or(product, |w| product * w);
    }
}
