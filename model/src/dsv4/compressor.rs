//! The compressors (4.5): project, write the state row, pool a group when it closes.
//!
//! The rows of a group are read back from the state pages also when this very call wrote them: a
//! group that a prefill began is closed by decode from the same bytes.

use kvgate_kernels::cpu::compress::{OnlinePool, Source, pool};
use kvgate_kernels::cpu::gemm::matmul;
use kvgate_kernels::cpu::hadamard::hadamard;
use kvgate_kernels::cpu::norm::rms_weighted;
use kvgate_kernels::cpu::rope::RopeTable;

use super::{Block, Model};
use crate::bridge::CompressedPages;
use crate::error::ModelError;
use crate::weights::CompressorWeights;

impl Model {
    /// Ratio 4: every entry pools the Ca halves of the group before and the Cb halves of its own.
    pub(super) fn compress_overlapping(
        &self,
        block: &Block<'_>,
        x: &[f32],
        w: &CompressorWeights,
        pages: &mut Option<CompressedPages<'_>>,
    ) -> Result<(), ModelError> {
        let Some(pages) = pages else { return Ok(()) };
        let width = w.norm.len();
        let (kv, gate) = (matmul(self.isa, x, &w.wkv)?, matmul(self.isa, x, &w.wgate)?);
        let mut row = vec![0.0f32; 4 * width];
        let mut sources = vec![0.0f32; 8 * 2 * width];
        for (t, position) in block.positions().enumerate() {
            row[..2 * width].copy_from_slice(&kv[t * 2 * width..(t + 1) * 2 * width]);
            row[2 * width..].copy_from_slice(&gate[t * 2 * width..(t + 1) * 2 * width]);
            pages.state.store_row(position, &row)?;
            if position % 4 == 3 {
                let mut entry = vec![0.0f32; width];
                pool_overlapping(position / 4, w, pages, &mut sources, &mut entry)?;
                self.emit(position / 4, 4, entry, w, pages)?;
            }
        }
        Ok(())
    }

    /// Ratio 128: a running softmax per channel; its mean is the entry when the group closes.
    pub(super) fn compress_online(
        &self,
        block: &Block<'_>,
        x: &[f32],
        w: &CompressorWeights,
        pages: &mut Option<CompressedPages<'_>>,
    ) -> Result<(), ModelError> {
        let Some(pages) = pages else { return Ok(()) };
        let width = w.norm.len();
        let (kv, gate) = (matmul(self.isa, x, &w.wkv)?, matmul(self.isa, x, &w.wgate)?);
        let mut state = vec![0.0f32; 3 * width];
        if !block.start.is_multiple_of(128) {
            pages
                .state
                .as_ref()
                .load_row(block.start / 128, &mut state)?;
        }
        for (t, position) in block.positions().enumerate() {
            let place = (position % 128) as usize;
            let source = Source {
                kv: &kv[t * width..(t + 1) * width],
                gate: &gate[t * width..(t + 1) * width],
                ape: &w.ape[place * width..(place + 1) * width],
            };
            let mut online = OnlinePool::new(&mut state);
            match place {
                0 => online.start(source),
                _ => online.push(source),
            }
            if place == 127 {
                let entry = online.mean().to_vec();
                self.emit(position / 128, 128, entry, w, pages)?;
            }
        }
        let end = block.positions().end;
        if !end.is_multiple_of(128) {
            pages.state.store_row(end / 128, &state)?;
        }
        Ok(())
    }

    /// Norm, rope at the group's first position, Hadamard where the page format has it, store.
    fn emit(
        &self,
        entry: u32,
        ratio: u32,
        mut values: Vec<f32>,
        w: &CompressorWeights,
        pages: &mut CompressedPages<'_>,
    ) -> Result<(), ModelError> {
        rms_weighted(&mut values, &w.norm, self.eps());
        RopeTable::new(&self.compress_frequencies, std::iter::once(entry * ratio))
            .rotate(&mut values, 0);
        if pages.is_rotated && !hadamard(&mut values) {
            return Err(pages.refuse_rotation(values.len()));
        }
        Ok(pages.entries.store_row(entry, &values)?)
    }
}

/// Pools entry `group` from its state rows: 4 Ca rows of the group before (none for group 0), 4 Cb rows.
fn pool_overlapping(
    group: u32,
    w: &CompressorWeights,
    pages: &CompressedPages<'_>,
    scratch: &mut [f32],
    out: &mut [f32],
) -> Result<(), ModelError> {
    let width = out.len();
    let state = pages.state.as_ref();
    // (position, first kv channel in the row): Ca halves lie at 0 and 2*width, Cb at width and 3*width.
    let before = (group > 0).then(|| (4 * group - 4..4 * group).map(|p| (p, 0)));
    let own = (4 * group..4 * group + 4).map(|p| (p, width));
    let rows: Vec<(u32, usize)> = before.into_iter().flatten().chain(own).collect();
    for ((position, half), slot) in rows.iter().zip(scratch.chunks_exact_mut(2 * width)) {
        let (kv, gate) = slot.split_at_mut(width);
        state.load_channels(*position, *half, kv)?;
        state.load_channels(*position, 2 * width + half, gate)?;
    }
    let sources: Vec<Source<'_>> = rows
        .iter()
        .zip(scratch.chunks_exact(2 * width))
        .map(|((position, half), slot)| Source {
            kv: &slot[..width],
            gate: &slot[width..],
            ape: &w.ape[(position % 4) as usize * 2 * width + half..][..width],
        })
        .collect();
    pool(&sources, out);
    Ok(())
}
