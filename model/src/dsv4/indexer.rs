//! The lightning indexer (4.6): which compressed entries a query of a ratio-4 layer sees.

use kvgate_kernels::cpu::gemm::{PackedMatrix, matmul};
use kvgate_kernels::cpu::hadamard::hadamard;
use kvgate_kernels::cpu::indexer::index_scores;
use kvgate_kernels::cpu::topk::top_k;

use super::{Block, LayerProbe, Model};
use crate::bridge::{CompressedPages, LayerPages};
use crate::error::ModelError;
use crate::weights::IndexerWeights;

/// Queries scored together; bounds the scratch memory.
const SCORED_TOKENS: usize = 16;

/// Compressed entries of one query.
#[derive(Clone, Debug)]
pub(super) enum Selection {
    /// Entries 0..count.
    First(u32),
    /// These entries, ascending.
    Picked(Vec<u32>),
}

impl Model {
    /// The selection of every token of the block. Keys are read from the index pages.
    pub(super) fn select(
        &self,
        block: &Block<'_>,
        x: &[f32],
        qr: &[f32],
        w: &IndexerWeights,
        pages: &LayerPages<'_>,
        probe: &mut LayerProbe<'_, '_>,
    ) -> Result<Vec<Selection>, ModelError> {
        let visible = |position: u32| (position + 1) / 4;
        let top = self.config.index_topk;
        let entries = visible(block.positions().end - 1);
        let is_sparse = entries > top;
        let Some(index) = pages.index.as_ref().filter(|_| is_sparse || probe.is_on()) else {
            return Ok(block
                .positions()
                .map(|p| Selection::First(visible(p)))
                .collect());
        };
        let q = self.index_queries(block, qr, w, index)?;
        let keys = self.index_keys(entries, index)?;
        let heads = self.config.index_n_heads as usize;
        let dim = f64::from(self.config.index_head_dim);
        let factor =
            (1.0 / dim.sqrt() * (1.0 / f64::from(self.config.index_n_heads).sqrt())) as f32;
        let mut weights = matmul(self.isa, x, &w.weights_proj)?;
        for v in &mut weights {
            *v *= factor;
        }
        let mut selections = Vec::with_capacity(block.tokens());
        let query_groups = q
            .chunks(SCORED_TOKENS * w.wq_b.outputs())
            .zip(weights.chunks(SCORED_TOKENS * heads));
        let mut position = block.start;
        for (q, weights) in query_groups {
            let count = weights.len() / heads;
            let last_visible = visible(position + count as u32 - 1) as usize;
            let scores = index_scores(self.isa, q, weights, heads, &keys, last_visible)?;
            for t in 0..count {
                let seen = &scores[t * last_visible..][..visible(position) as usize];
                let picked = top_k(seen, top as usize);
                if probe.is_on() {
                    let ids: Vec<f32> = picked.iter().map(|e| *e as f32).collect();
                    probe.row("attn.indexer.score", position, seen);
                    probe.row("attn.indexer.selected", position, &ids);
                }
                selections.push(Selection::Picked(picked));
                position += 1;
            }
        }
        Ok(selections)
    }

    /// Indexer queries [T, h*di], roped, rotated exactly when the stored keys are.
    fn index_queries(
        &self,
        block: &Block<'_>,
        qr: &[f32],
        w: &IndexerWeights,
        index: &CompressedPages<'_>,
    ) -> Result<Vec<f32>, ModelError> {
        let mut q = matmul(self.isa, qr, &w.wq_b)?;
        let dim = self.config.index_head_dim as usize;
        for (t, token) in q.chunks_exact_mut(w.wq_b.outputs()).enumerate() {
            for head in token.chunks_exact_mut(dim) {
                block.rope.rotate(head, block.rope_first + t);
                if index.is_rotated && !hadamard(head) {
                    return Err(index.refuse_rotation(dim));
                }
            }
        }
        Ok(q)
    }

    /// Keys 0..entries, decoded from their pages and packed for the score product.
    fn index_keys(
        &self,
        entries: u32,
        index: &CompressedPages<'_>,
    ) -> Result<PackedMatrix, ModelError> {
        let dim = self.config.index_head_dim as usize;
        let mut keys = PackedMatrix::zeroed(entries as usize, dim);
        let mut row = vec![0.0f32; dim];
        let stored = index.entries.as_ref();
        for entry in 0..entries {
            stored.load_row(entry, &mut row)?;
            keys.set_row(entry as usize, &row);
        }
        Ok(keys)
    }
}
