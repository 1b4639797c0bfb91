//! Attention of one layer (4.3): queries, the window row, the compressed rows, the output projection.
//!
//! Every key, the token's own included, is read back from its page, so that the stored format is
//! what attention sees whether a row was written in this call, in an earlier one or by a peer.

use kvgate_kernels::cpu::attention::{KeyRows, attend};
use kvgate_kernels::cpu::gemm::{Rows, matmul, matmul_strided};
use kvgate_kernels::cpu::norm::rms;

use super::indexer::Selection;
use super::{Block, LayerProbe, Model};
use crate::bridge::LayerPages;
use crate::error::ModelError;
use crate::weights::AttentionWeights;

/// Decoded rows of one block: window rows first, then compressed rows.
struct Keys {
    rows: KeyRows,
    /// Position of the first window row.
    first_position: u32,
    /// Row of each compressed entry, where it is decoded.
    compressed: Vec<Option<u32>>,
}

impl Model {
    /// Attention output [T, d] for the normed input x [T, d].
    pub(super) fn attention(
        &self,
        index: u16,
        block: &Block<'_>,
        x: &[f32],
        pages: &mut LayerPages<'_>,
        probe: &mut LayerProbe<'_, '_>,
    ) -> Result<Vec<f32>, ModelError> {
        let w = &self.weights.layers[usize::from(index)].attn;
        let mut qr = matmul(self.isa, x, &w.wq_a)?;
        self.norm_rows(&mut qr, &w.q_norm);
        let q = self.queries(block, &qr, w)?;
        let heads_width = w.wq_b.outputs();
        probe.rows("attn.q", block.start, heads_width, &q);

        self.write_window(block, x, w, pages, probe)?;
        let ratio = self.config.compress_ratios[usize::from(index)];
        let selections = match (ratio, &w.compressor, &w.indexer) {
            (4, Some(compressor), Some(indexer)) => {
                self.compress_overlapping(block, x, compressor, &mut pages.c4)?;
                self.compress_overlapping(block, x, &indexer.compressor, &mut pages.index)?;
                self.select(block, x, &qr, indexer, pages, probe)?
            }
            (128, Some(compressor), _) => {
                self.compress_online(block, x, compressor, &mut pages.c128)?;
                block
                    .positions()
                    .map(|p| Selection::First((p + 1) / 128))
                    .collect()
            }
            _ => vec![Selection::First(0); block.tokens()],
        };
        let mut o = self.attend_block(block, &q, w, &selections, pages)?;
        let dim = self.config.head_dim as usize;
        for (t, token) in o.chunks_exact_mut(heads_width).enumerate() {
            for head in token.chunks_exact_mut(dim) {
                block.rope.rotate_back(head, block.rope_first + t);
            }
        }
        probe.rows("attn.o_pre_proj", block.start, heads_width, &o);
        self.project_out(block, &o, w)
    }

    /// q [T, H*D]: normed per head, roped.
    fn queries(
        &self,
        block: &Block<'_>,
        qr: &[f32],
        w: &AttentionWeights,
    ) -> Result<Vec<f32>, ModelError> {
        let mut q = matmul(self.isa, qr, &w.wq_b)?;
        let dim = self.config.head_dim as usize;
        for (t, token) in q.chunks_exact_mut(w.wq_b.outputs()).enumerate() {
            for head in token.chunks_exact_mut(dim) {
                rms(head, self.eps());
                block.rope.rotate(head, block.rope_first + t);
            }
        }
        Ok(q)
    }

    /// Writes the latent row of every token.
    fn write_window(
        &self,
        block: &Block<'_>,
        x: &[f32],
        w: &AttentionWeights,
        pages: &mut LayerPages<'_>,
        probe: &mut LayerProbe<'_, '_>,
    ) -> Result<(), ModelError> {
        let mut kv = matmul(self.isa, x, &w.wkv)?;
        self.norm_rows(&mut kv, &w.kv_norm);
        for (t, (position, row)) in block
            .positions()
            .zip(kv.chunks_exact_mut(w.kv_norm.len()))
            .enumerate()
        {
            block.rope.rotate(row, block.rope_first + t);
            probe.row("attn.kv", position, row);
            pages.swa.store_row(position, row)?;
        }
        Ok(())
    }

    /// o [T, H*D] before the inverse rope.
    fn attend_block(
        &self,
        block: &Block<'_>,
        q: &[f32],
        w: &AttentionWeights,
        selections: &[Selection],
        pages: &LayerPages<'_>,
    ) -> Result<Vec<f32>, ModelError> {
        let (heads, dim) = (w.sinks.len(), self.config.head_dim as usize);
        let window = self.config.sliding_window;
        let mut keys = self.window_keys(block, pages)?;
        let scale = (1.0 / f64::from(self.config.head_dim).sqrt()) as f32;
        let mut o = vec![0.0f32; q.len()];
        let (mut query, mut out) = (KeyRows::zeroed(heads, dim), KeyRows::zeroed(heads, dim));
        let mut picks: Vec<u32> = Vec::new();
        for (t, (position, selection)) in block.positions().zip(selections).enumerate() {
            let oldest = (position + 1).saturating_sub(window);
            picks.clear();
            picks.extend(oldest - keys.first_position..=position - keys.first_position);
            match selection {
                Selection::First(count) => {
                    for entry in 0..*count {
                        picks.push(keys.compressed_row(entry, pages)?);
                    }
                }
                Selection::Picked(entries) => {
                    for entry in entries {
                        picks.push(keys.compressed_row(*entry, pages)?);
                    }
                }
            }
            for (h, head) in q[t * heads * dim..(t + 1) * heads * dim]
                .chunks_exact(dim)
                .enumerate()
            {
                query.row_mut(h).copy_from_slice(head);
            }
            attend(
                self.isa, &query, &keys.rows, &picks, &w.sinks, scale, &mut out,
            )?;
            for (h, head) in o[t * heads * dim..(t + 1) * heads * dim]
                .chunks_exact_mut(dim)
                .enumerate()
            {
                head.copy_from_slice(out.row(h));
            }
        }
        Ok(o)
    }

    /// The window rows that any query of the block sees, decoded from their pages.
    fn window_keys(&self, block: &Block<'_>, pages: &LayerPages<'_>) -> Result<Keys, ModelError> {
        let positions = block.positions();
        let first_position = (positions.start + 1).saturating_sub(self.config.sliding_window);
        let mut rows = KeyRows::zeroed(0, self.config.head_dim as usize);
        let swa = pages.swa.as_ref();
        for position in first_position..positions.end {
            let row = rows.push();
            swa.load_row(position, rows.row_mut(row))?;
        }
        Ok(Keys {
            rows,
            first_position,
            compressed: Vec::new(),
        })
    }

    /// out = wo_b (wo_a[g] o[g]) per token, heads in G consecutive groups.
    fn project_out(
        &self,
        block: &Block<'_>,
        o: &[f32],
        w: &AttentionWeights,
    ) -> Result<Vec<f32>, ModelError> {
        let (tokens, width) = (block.tokens(), w.wq_b.outputs());
        let group_rows = w.wo_b.inputs();
        let mut z = vec![0.0f32; tokens * group_rows];
        for (g, group) in w.wo_a.iter().enumerate() {
            let x = Rows {
                values: &o[g * group.inputs()..],
                stride: width,
            };
            matmul_strided(
                self.isa,
                tokens,
                x,
                group,
                &mut z[g * group.outputs()..],
                group_rows,
            )?;
        }
        Ok(matmul(self.isa, &z, &w.wo_b)?)
    }
}

impl Keys {
    /// Row of a compressed entry, decoded on first use.
    fn compressed_row(&mut self, entry: u32, pages: &LayerPages<'_>) -> Result<u32, ModelError> {
        let index = entry as usize;
        if index >= self.compressed.len() {
            self.compressed.resize(index + 1, None);
        }
        if let Some(row) = self.compressed[index] {
            return Ok(row);
        }
        let row = self.rows.push();
        pages
            .compressed_latent()?
            .load_row(entry, self.rows.row_mut(row))?;
        self.compressed[index] = Some(row as u32);
        Ok(row as u32)
    }
}
