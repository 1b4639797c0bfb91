//! What of a model's configuration decides the shape and the meaning of its cache.

use crate::error::{Error, ErrorKind};

/// The YaRN parameters of the compressed rope. Stored keys are post-rope, so they are part of what
/// two peers must agree on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Context extension factor.
    pub factor: f64,
    /// Context length the model was trained with before the extension, in tokens.
    pub original_max_position_embeddings: u32,
    /// Upper bound of the interpolation ramp, in rotations.
    pub beta_fast: f64,
    /// Lower bound of the interpolation ramp, in rotations.
    pub beta_slow: f64,
}

/// The geometry of a DeepSeek-V4 model as far as its cache depends on it.
#[derive(Clone, Debug, PartialEq)]
pub struct V4Geometry {
    /// Compression ratio of each main layer: 0 (window only), 4 or 128.
    pub layer_ratios: Vec<u32>,
    /// Channels of a latent row (D).
    pub head_dim: u32,
    /// Channels of a latent row that carry the rope, at its end (rd).
    pub rope_dim: u32,
    /// Channels of an indexer key.
    pub index_head_dim: u32,
    /// Sliding window (W), in tokens.
    pub window_tokens: u32,
    /// Rope base of the layers with ratio 0 and of the draft block.
    pub rope_theta: f64,
    /// Rope base of the layers with ratio 4 or 128.
    pub compress_rope_theta: f64,
    /// YaRN parameters of the compressed rope.
    pub yarn: Yarn,
    /// Whether the draft block's window is part of the cache.
    pub drafting: bool,
    /// Name of the architecture, for example `DeepseekV4ForCausalLM`.
    pub architecture: String,
    /// Digest of the configuration file.
    pub config_digest: [u8; 32],
    /// Digest of the weights.
    pub weights_digest: [u8; 32],
}

impl V4Geometry {
    /// DeepSeek-V4-Flash: 43 layers (2 window only, 21 of ratio 4, 20 of ratio 128), no drafting,
    /// digests zero.
    pub fn flash() -> V4Geometry {
        let ratio = |layer: u32| match layer {
            0 | 1 => 0,
            even if even.is_multiple_of(2) => 4,
            _ => 128,
        };
        V4Geometry {
            layer_ratios: (0..43).map(ratio).collect(),
            head_dim: 512,
            rope_dim: 64,
            index_head_dim: 128,
            window_tokens: 128,
            rope_theta: 10_000.0,
            compress_rope_theta: 160_000.0,
            yarn: Yarn {
                factor: 16.0,
                original_max_position_embeddings: 65_536,
                beta_fast: 32.0,
                beta_slow: 1.0,
            },
            drafting: false,
            architecture: "DeepseekV4ForCausalLM".to_owned(),
            config_digest: [0; 32],
            weights_digest: [0; 32],
        }
    }

    /// DeepSeek-V4-Pro: 61 layers (30 of ratio 4, 31 of ratio 128), no drafting, digests zero.
    pub fn pro() -> V4Geometry {
        let ratio = |layer: u32| {
            if layer >= 2 && layer.is_multiple_of(2) {
                4
            } else {
                128
            }
        };
        V4Geometry {
            layer_ratios: (0..61).map(ratio).collect(),
            ..V4Geometry::flash()
        }
    }

    /// Checks that the cache of this geometry can be laid out.
    ///
    /// # Errors
    /// `ImpossibleGeometry` naming the field, its value and what was expected.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let refuse = |field: &str, value: String, expected: &str| {
            Err(Error::new(ErrorKind::ImpossibleGeometry {
                field: field.to_owned(),
                value,
                expected: expected.to_owned(),
            }))
        };
        let layer_limit = usize::from(u16::MAX) - 1;
        if self.layer_ratios.is_empty() || self.layer_ratios.len() > layer_limit {
            let value = self.layer_ratios.len().to_string();
            return refuse("num_hidden_layers", value, "1 to 65534");
        }
        for (layer, &ratio) in self.layer_ratios.iter().enumerate() {
            if ![0, 4, 128].contains(&ratio) {
                let field = format!("compress_ratios[{layer}]");
                return refuse(&field, ratio.to_string(), "0, 4 or 128");
            }
        }
        let dim_limit = 1 << 16;
        for (field, value) in [
            ("head_dim", self.head_dim),
            ("index_head_dim", self.index_head_dim),
        ] {
            if value == 0 || value > dim_limit {
                return refuse(field, value.to_string(), "1 to 65536");
            }
        }
        if self.rope_dim > self.head_dim || !self.rope_dim.is_multiple_of(2) {
            let expected = format!("an even number of at most head_dim = {}", self.head_dim);
            return refuse("qk_rope_head_dim", self.rope_dim.to_string(), &expected);
        }
        if self.window_tokens == 0 || self.window_tokens > 1 << 20 {
            return refuse(
                "sliding_window",
                self.window_tokens.to_string(),
                "1 to 1048576",
            );
        }
        Ok(())
    }
}

/// How a latent row is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LatentFormat {
    /// 584-byte rows: 448 e4m3 values, 64 bf16 values, 7 ue8m0 scales and a pad byte (encoding `v4`
    /// of the format descriptor). Needs `head_dim` 512 and `rope_dim` 64.
    PackedFp8,
    /// Plain f32 rows, any geometry.
    F32,
}

/// How an indexer key is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexKFormat {
    /// 128 bf16 values, Hadamard-rotated.
    Bf16,
    /// 128 e4m3 values and one f32 scale, Hadamard-rotated.
    Fp8,
    /// Plain f32 rows, not rotated, any geometry.
    F32,
}

/// Rows per physical page of the window pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum WindowPage {
    /// Four pages of 64 rows per logical page.
    #[default]
    P64,
    /// One page of 256 rows per logical page.
    P256,
}

impl WindowPage {
    /// Rows per physical page.
    pub fn rows(self) -> u32 {
        match self {
            WindowPage::P64 => 64,
            WindowPage::P256 => 256,
        }
    }
}

/// The storage formats of one cache. Two peers exchange pages only when all of them are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Formats {
    /// Encoding of the latent rows (window, ratio 4, ratio 128, draft).
    pub latent: LatentFormat,
    /// Encoding of the indexer keys.
    pub index_k: IndexKFormat,
    /// Page size of the window pools.
    pub window_page: WindowPage,
}

impl Default for Formats {
    /// Packed latents, bf16 indexer keys, window pages of 64 rows.
    fn default() -> Formats {
        Formats {
            latent: LatentFormat::PackedFp8,
            index_k: IndexKFormat::Bf16,
            window_page: WindowPage::P64,
        }
    }
}

impl Formats {
    /// Checks the formats against the geometry.
    ///
    /// # Errors
    /// `FormatNotAllowed` naming the geometry field that forbids the format.
    pub(crate) fn check(&self, geometry: &V4Geometry) -> Result<(), Error> {
        let need = |field: &str, value: u32, expected: u32, format: &str| {
            if value == expected {
                return Ok(());
            }
            Err(Error::new(ErrorKind::FormatNotAllowed {
                field: field.to_owned(),
                value: value.to_string(),
                expected: format!("{expected} for {format}"),
            }))
        };
        if self.latent == LatentFormat::PackedFp8 {
            need("head_dim", geometry.head_dim, 512, "latent packed-fp8")?;
            need(
                "qk_rope_head_dim",
                geometry.rope_dim,
                64,
                "latent packed-fp8",
            )?;
        }
        match self.index_k {
            IndexKFormat::F32 => Ok(()),
            IndexKFormat::Fp8 => need(
                "index_head_dim",
                geometry.index_head_dim,
                128,
                "index-k fp8",
            ),
            IndexKFormat::Bf16 => need(
                "index_head_dim",
                geometry.index_head_dim,
                128,
                "index-k bf16",
            ),
        }
    }
}
