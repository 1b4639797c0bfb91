//! Rotary positions on the last channels of a row, interleaved pairs.

use crate::math::sin_cos;

/// YaRN scaling of the compress rope.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Factor of the slow pairs.
    pub factor: f64,
    /// L0.
    pub original_max_position_embeddings: f64,
    /// Rotations above which a pair is left alone.
    pub beta_fast: f64,
    /// Rotations below which a pair is scaled fully.
    pub beta_slow: f64,
}

/// f_i = base^(-2i/rd), i < rd/2, with YaRN where given.
pub fn frequencies(rope_dim: usize, base: f64, yarn: Option<&Yarn>) -> Vec<f32> {
    let plain = (0..rope_dim / 2).map(|i| {
        let exponent = (2 * i) as f32 / rope_dim as f32;
        1.0 / (libm::pow(base, exponent as f64) as f32)
    });
    let Some(y) = yarn else {
        return plain.collect();
    };
    let rd = rope_dim as f64;
    let turn = |rotations: f64| {
        let wavelengths =
            y.original_max_position_embeddings / (rotations * 2.0 * std::f64::consts::PI);
        rd * libm::log(wavelengths) / (2.0 * libm::log(base))
    };
    let low = turn(y.beta_fast).floor().max(0.0);
    let mut high = turn(y.beta_slow).ceil().min(rd - 1.0);
    if low == high {
        high += 0.001;
    }
    let (low32, span) = (low as f32, (high - low) as f32);
    let factor = y.factor as f32;
    plain
        .enumerate()
        .map(|(i, f)| {
            let ramp = ((i as f32 - low32) / span).clamp(0.0, 1.0);
            let smooth = 1.0 - ramp;
            f / factor * (1.0 - smooth) + f * smooth
        })
        .collect()
}

/// Cosines and sines of the angles f32(position) * f_i.
#[derive(Clone, Debug)]
pub struct RopeTable {
    pairs: usize,
    cos_sin: Vec<(f32, f32)>,
}

impl RopeTable {
    /// Angles for each of `positions`.
    pub fn new(frequencies: &[f32], positions: impl Iterator<Item = u32>) -> Self {
        let mut cos_sin = Vec::with_capacity(positions.size_hint().0 * frequencies.len());
        for position in positions {
            cos_sin.extend(frequencies.iter().map(|f| {
                let (sin, cos) = sin_cos(position as f32 * f);
                (cos, sin)
            }));
        }
        Self {
            pairs: frequencies.len(),
            cos_sin,
        }
    }

    /// Rotates the last channels of `row` to the `index`-th position.
    pub fn rotate(&self, row: &mut [f32], index: usize) {
        for (pair, (c, s)) in self.pairs_of(row, index) {
            let (a, b) = (pair[0], pair[1]);
            pair[0] = a * c - b * s;
            pair[1] = a * s + b * c;
        }
    }

    /// Rotates back.
    pub fn rotate_back(&self, row: &mut [f32], index: usize) {
        for (pair, (c, s)) in self.pairs_of(row, index) {
            let (a, b) = (pair[0], pair[1]);
            pair[0] = a * c + b * s;
            pair[1] = b * c - a * s;
        }
    }

    fn pairs_of<'a>(
        &'a self,
        row: &'a mut [f32],
        index: usize,
    ) -> impl Iterator<Item = (&'a mut [f32], (f32, f32))> {
        let first = row.len() - 2 * self.pairs;
        let angles = &self.cos_sin[index * self.pairs..(index + 1) * self.pairs];
        row[first..].chunks_exact_mut(2).zip(angles.iter().copied())
    }
}
