//! Scores of the lightning indexer.

use super::gemm::{PackedMatrix, Rows, matmul_strided};
use crate::error::{KernelError, expect_len};
use crate::isa::Isa;

/// score[t, j] = sum_h weights[t, h] * max(q[t, h] . k_j, 0), h ascending, for the first `entries` keys.
///
/// `q` [T, h, di], `weights` [T, h], `keys` packed [n, di] with n >= entries; result [T, entries].
///
/// # Errors
/// The operands do not fit together.
pub fn index_scores(
    isa: Isa,
    q: &[f32],
    weights: &[f32],
    heads: usize,
    keys: &PackedMatrix,
    entries: usize,
) -> Result<Vec<f32>, KernelError> {
    let tokens = weights.len().checked_div(heads).unwrap_or(0);
    expect_len("indexer queries", q.len(), tokens * heads * keys.inputs())?;
    let n = keys.outputs();
    if entries > n {
        return Err(KernelError::new(
            crate::ErrorKind::Shape,
            "indexer entries",
            entries,
            n,
        ));
    }
    let mut products = vec![0.0f32; tokens * heads * n];
    let rows = Rows {
        values: q,
        stride: keys.inputs(),
    };
    matmul_strided(isa, tokens * heads, rows, keys, &mut products, n)?;
    let mut scores = vec![0.0f32; tokens * entries];
    if entries == 0 {
        return Ok(scores);
    }
    for (t, out) in scores.chunks_exact_mut(entries).enumerate() {
        for h in 0..heads {
            let weight = weights[t * heads + h];
            for (o, p) in out
                .iter_mut()
                .zip(&products[(t * heads + h) * n..][..entries])
            {
                *o += p.max(0.0) * weight;
            }
        }
    }
    Ok(scores)
}
