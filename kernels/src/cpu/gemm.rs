//! Matrix product with one summation order for every batch size.

use std::fmt;

use super::simd;
use crate::error::{ErrorKind, KernelError, expect_len};
use crate::isa::Isa;
use crate::math::LANES;

/// A weight matrix [outputs, inputs] in panels of 16 outputs: `[outputs/16][inputs][16]`, padded with zeros.
pub struct PackedMatrix {
    outputs: usize,
    inputs: usize,
    values: Vec<f32>,
    /// Skipped values at the front, so that panels start at a multiple of 64 bytes.
    offset: usize,
}

impl fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackedMatrix[{}, {}]", self.outputs, self.inputs)
    }
}

impl PackedMatrix {
    /// A matrix of zeros.
    pub fn zeroed(outputs: usize, inputs: usize) -> Self {
        let count = outputs.div_ceil(LANES) * LANES * inputs;
        let values = vec![0.0f32; count + LANES];
        let offset = values.as_ptr().align_offset(64).min(LANES);
        Self {
            outputs,
            inputs,
            values,
            offset,
        }
    }

    /// Packs the row-major matrix `rows` [outputs, inputs].
    ///
    /// # Errors
    /// `rows` has another length.
    pub fn pack(rows: &[f32], outputs: usize, inputs: usize) -> Result<Self, KernelError> {
        expect_len(
            "matrix elements",
            rows.len(),
            outputs.saturating_mul(inputs),
        )?;
        let mut packed = Self::zeroed(outputs, inputs);
        for o in 0..outputs {
            packed.set_row(o, &rows[o * inputs..(o + 1) * inputs]);
        }
        Ok(packed)
    }

    /// Replaces row `output`, which must exist and have [`Self::inputs`] values.
    pub fn set_row(&mut self, output: usize, row: &[f32]) {
        assert!(
            output < self.outputs && row.len() == self.inputs,
            "I-16: a row of the matrix"
        );
        let base = self.offset + output / LANES * self.inputs * LANES + output % LANES;
        for (slot, v) in self.values[base..].iter_mut().step_by(LANES).zip(row) {
            *slot = *v;
        }
    }

    /// Rows of the matrix.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns of the matrix.
    pub fn inputs(&self) -> usize {
        self.inputs
    }
}

/// Rows of equal width at a fixed distance.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Values from the first row's first value on.
    pub values: &'a [f32],
    /// Distance of two rows.
    pub stride: usize,
}

/// y[t, o] = sum over k of x[t, k] * w[o, k], k ascending, for `tokens` rows. `y` has row distance `y_stride`.
///
/// # Errors
/// `x` or `y` is too short.
pub fn matmul_strided(
    isa: Isa,
    tokens: usize,
    x: Rows<'_>,
    w: &PackedMatrix,
    y: &mut [f32],
    y_stride: usize,
) -> Result<(), KernelError> {
    if tokens == 0 {
        return Ok(());
    }
    let x_needed = (tokens - 1) * x.stride + w.inputs;
    if x.values.len() < x_needed {
        return Err(KernelError::new(
            ErrorKind::Shape,
            "matmul input values",
            x.values.len(),
            x_needed,
        ));
    }
    let y_needed = (tokens - 1) * y_stride + w.outputs;
    if y.len() < y_needed {
        return Err(KernelError::new(
            ErrorKind::Shape,
            "matmul output values",
            y.len(),
            y_needed,
        ));
    }
    simd::gemm(&mut simd::Gemm {
        isa,
        tokens,
        inputs: w.inputs,
        outputs: w.outputs,
        x: x.values,
        x_stride: x.stride,
        panels: &w.values[w.offset..],
        y,
        y_stride,
    });
    Ok(())
}

/// [`matmul_strided`] for dense rows: x [T, inputs] to a new [T, outputs].
///
/// # Errors
/// `x` is not whole rows.
pub fn matmul(isa: Isa, x: &[f32], w: &PackedMatrix) -> Result<Vec<f32>, KernelError> {
    let tokens = x.len().checked_div(w.inputs).unwrap_or(0);
    expect_len("matmul input values", x.len(), tokens * w.inputs)?;
    let mut y = vec![0.0; tokens * w.outputs];
    matmul_strided(
        isa,
        tokens,
        Rows {
            values: x,
            stride: w.inputs,
        },
        w,
        &mut y,
        w.outputs,
    )?;
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn product_equals_the_plain_sum_for_every_batch() {
        for (tokens, outputs, inputs) in [
            (1, 1, 1),
            (5, 24, 33),
            (9, 130, 64),
            (3, 64, 7),
            (2, 200, 16),
        ] {
            let value = |i: usize| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0;
            let x: Vec<f32> = (0..tokens * inputs).map(value).collect();
            let w: Vec<f32> = (0..outputs * inputs).map(|i| value(i + 5)).collect();
            let packed = PackedMatrix::pack(&w, outputs, inputs).unwrap();
            let y = matmul(Isa::detect(), &x, &packed).unwrap();
            for t in 0..tokens {
                let one = matmul(Isa::detect(), &x[t * inputs..(t + 1) * inputs], &packed).unwrap();
                assert_eq!(one, y[t * outputs..(t + 1) * outputs]);
                for o in 0..outputs {
                    let mut want = 0.0f32;
                    for k in 0..inputs {
                        want += x[t * inputs + k] * w[o * inputs + k];
                    }
                    assert_eq!(y[t * outputs + o], want, "row {t} output {o}");
                }
            }
        }
    }

    #[test]
    fn wrong_shapes_are_errors() {
        let packed = PackedMatrix::zeroed(3, 4);
        assert!(matmul(Isa::Scalar, &[0.0; 5], &packed).is_err());
        assert!(PackedMatrix::pack(&[0.0; 5], 3, 4).is_err());
        let mut y = [0.0; 5];
        let x = Rows {
            values: &[0.0; 8],
            stride: 4,
        };
        assert!(matmul_strided(Isa::Scalar, 2, x, &packed, &mut y, 3).is_err());
    }
}
