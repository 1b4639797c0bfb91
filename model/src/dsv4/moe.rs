//! The experts (4.8). Tokens are grouped by expert; each token adds its experts in ascending id.

use kvgate_kernels::cpu::gemm::matmul;
use kvgate_kernels::cpu::moe::{pick_experts, route_weights, router_score, swiglu};

use super::{Block, LayerProbe, Model};
use crate::error::ModelError;
use crate::weights::{ExpertWeights, FfnWeights, Router};

/// The share of one token in an expert's batch.
struct Share {
    token: usize,
    weight: f32,
}

impl Model {
    /// Shared expert plus routed experts, [T, d].
    pub(super) fn experts(
        &self,
        index: u16,
        block: &Block<'_>,
        x: &[f32],
        probe: &mut LayerProbe<'_, '_>,
    ) -> Result<Vec<f32>, ModelError> {
        let w = &self.weights.layers[usize::from(index)].ffn;
        let d = self.config.hidden_size as usize;
        let mut y = self.expert(x, &w.shared, None)?;
        for (expert, shares) in self.route(block, x, w, probe)?.iter().enumerate() {
            if shares.is_empty() {
                continue;
            }
            let mut rows = Vec::with_capacity(shares.len() * d);
            for share in shares {
                rows.extend_from_slice(&x[share.token * d..(share.token + 1) * d]);
            }
            let out = self.expert(&rows, &w.experts[expert], Some(shares))?;
            for (share, row) in shares.iter().zip(out.chunks_exact(d)) {
                for (sum, v) in y[share.token * d..(share.token + 1) * d]
                    .iter_mut()
                    .zip(row)
                {
                    *sum += v;
                }
            }
        }
        Ok(y)
    }

    /// The tokens of every expert with their route weights.
    fn route(
        &self,
        block: &Block<'_>,
        x: &[f32],
        w: &FfnWeights,
        probe: &mut LayerProbe<'_, '_>,
    ) -> Result<Vec<Vec<Share>>, ModelError> {
        let count = self.config.num_experts_per_tok as usize;
        let mut scores = matmul(self.isa, x, &w.gate)?;
        for s in &mut scores {
            *s = router_score(*s);
        }
        let mut shares: Vec<Vec<Share>> = w.experts.iter().map(|_| Vec::new()).collect();
        for (token, scores) in scores.chunks_exact(w.experts.len()).enumerate() {
            let picks = match &w.router {
                Router::Hash(table) => table[block.ids[token] as usize * count..][..count].to_vec(),
                Router::Score(bias) => pick_experts(scores, bias, count),
            };
            let weights = route_weights(scores, &picks, self.config.routed_scaling_factor as f32);
            if probe.is_on() {
                let position = block.start + token as u32;
                let ids: Vec<f32> = picks.iter().map(|e| *e as f32).collect();
                probe.row("ffn.expert_idx", position, &ids);
                probe.row("ffn.expert_weight", position, &weights);
            }
            for (expert, weight) in picks.iter().zip(weights) {
                shares[*expert as usize].push(Share { token, weight });
            }
        }
        Ok(shares)
    }

    /// w2(a * silu(min(w1 x, l)) * clamp(w3 x, -l, l)) for every row of x.
    fn expert(
        &self,
        x: &[f32],
        w: &ExpertWeights,
        shares: Option<&[Share]>,
    ) -> Result<Vec<f32>, ModelError> {
        let mut gate = matmul(self.isa, x, &w.w1)?;
        let up = matmul(self.isa, x, &w.w3)?;
        let width = w.w1.outputs();
        let limit = self.config.swiglu_limit as f32;
        for (row, (gate, up)) in gate
            .chunks_exact_mut(width)
            .zip(up.chunks_exact(width))
            .enumerate()
        {
            swiglu(gate, up, limit, shares.map(|s| s[row].weight));
        }
        Ok(matmul(self.isa, &gate, &w.w2)?)
    }
}
