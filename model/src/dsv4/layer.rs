//! One layer: attention and experts, each between a collapse and an expansion of the streams.

use kvgate_kernels::cpu::gemm::matmul;
use kvgate_kernels::cpu::mhc::{self, Mix};
use kvgate_kernels::cpu::norm::rms_weighted;

use super::{Block, LayerProbe, Model, Span};
use crate::bridge::LayerPages;
use crate::error::ModelError;
use crate::weights::Mixing;

/// Tokens that a layer handles together at most; bounds the scratch memory.
const BLOCK_TOKENS: u32 = 256;

impl Model {
    /// Runs layer `index` over the span, block by block: a block ends before its rows would overwrite
    /// window rows that its own queries still need.
    pub(super) fn layer(
        &self,
        index: u16,
        span: &Span<'_>,
        streams: &mut [f32],
        pages: &mut LayerPages<'_>,
        probe: &mut LayerProbe<'_, '_>,
    ) -> Result<(), ModelError> {
        let limit = self.block_limit(index, span, pages)?;
        let ratio = self.config.compress_ratios[usize::from(index)];
        let rope = if ratio == 0 {
            &span.main_rope
        } else {
            &span.compress_rope
        };
        let width = self.config.hc_mult as usize * self.config.hidden_size as usize;
        let mut first = 0usize;
        while first < span.ids.len() {
            let count = (span.ids.len() - first).min(limit as usize);
            let block = Block {
                ids: &span.ids[first..first + count],
                start: span.start + first as u32,
                rope,
                rope_first: first,
            };
            self.block(
                index,
                &block,
                &mut streams[first * width..(first + count) * width],
                pages,
                probe,
            )?;
            first += count;
        }
        Ok(())
    }

    fn block_limit(
        &self,
        index: u16,
        span: &Span<'_>,
        pages: &LayerPages<'_>,
    ) -> Result<u32, ModelError> {
        let ring_rows = pages.swa.entry_capacity();
        let window = self.config.sliding_window as usize;
        if span.end() as usize <= ring_rows {
            return Ok(BLOCK_TOKENS);
        }
        match (ring_rows + 1).checked_sub(window) {
            None | Some(0) => {
                let reason =
                    format!("ring of {ring_rows} rows is shorter than the window of {window}");
                Err(ModelError::cache(index, "swa_latent", reason))
            }
            Some(limit) => Ok((limit as u32).min(BLOCK_TOKENS)),
        }
    }

    fn block(
        &self,
        index: u16,
        block: &Block<'_>,
        streams: &mut [f32],
        pages: &mut LayerPages<'_>,
        probe: &mut LayerProbe<'_, '_>,
    ) -> Result<(), ModelError> {
        let w = &self.weights.layers[usize::from(index)];
        let d = self.config.hidden_size as usize;
        let start = block.start;

        let (mut x, mixes) = self.collapse(streams, &w.attn_mixing)?;
        probe.rows("hc_attn_x", start, d, &x);
        for (position, mix) in block.positions().zip(&mixes) {
            probe.row("hc_attn_post", position, &mix.post);
            probe.row("hc_attn_comb", position, &mix.comb);
        }
        self.norm_rows(&mut x, &w.attn_norm);
        let y = self.attention(index, block, &x, pages, probe)?;
        probe.rows("attn_out", start, d, &y);
        self.expand(&mixes, &y, streams);

        let (mut x, mixes) = self.collapse(streams, &w.ffn_mixing)?;
        self.norm_rows(&mut x, &w.ffn_norm);
        let y = self.experts(index, block, &x, probe)?;
        probe.rows("ffn_out", start, d, &y);
        self.expand(&mixes, &y, streams);
        probe.rows("out", start, d * self.config.hc_mult as usize, streams);
        Ok(())
    }

    /// x [T, d] and the mixing of every token (4.2, steps 1 to 5a).
    fn collapse(
        &self,
        streams: &[f32],
        mixing: &Mixing,
    ) -> Result<(Vec<f32>, Vec<Mix>), ModelError> {
        let d = self.config.hidden_size as usize;
        let width = self.config.hc_mult as usize * d;
        let params = self.mhc_params();
        let v = matmul(self.isa, &self.normed_streams(streams), &mixing.projection)?;
        let mixes: Vec<Mix> = v
            .chunks_exact(mixing.projection.outputs())
            .map(|v| mhc::mix(&params, v, &mixing.scale, &mixing.base))
            .collect();
        let mut x = vec![0.0; mixes.len() * d];
        for ((x, streams), mix) in x
            .chunks_exact_mut(d)
            .zip(streams.chunks_exact(width))
            .zip(&mixes)
        {
            mhc::collapse(&mix.pre, streams, x);
        }
        Ok((x, mixes))
    }

    /// X' of every token (4.2, step 5b).
    fn expand(&self, mixes: &[Mix], y: &[f32], streams: &mut [f32]) {
        let d = self.config.hidden_size as usize;
        let width = self.config.hc_mult as usize * d;
        for ((streams, y), mix) in streams
            .chunks_exact_mut(width)
            .zip(y.chunks_exact(d))
            .zip(mixes)
        {
            mhc::expand(mix, y, streams);
        }
    }

    /// Weighted RMS norm of every row; a row has the width of `weight`.
    pub(super) fn norm_rows(&self, rows: &mut [f32], weight: &[f32]) {
        for row in rows.chunks_exact_mut(weight.len()) {
            rms_weighted(row, weight, self.eps());
        }
    }
}
