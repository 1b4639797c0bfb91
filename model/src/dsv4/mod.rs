//! The forward pass of DeepSeek-V4 in f32, the same bits for every chunking.
//!
//! Shapes: T tokens of the call, d hidden, n streams, H heads, D latent channels. Sections are those
//! of the model specification.

mod attn;
mod compressor;
mod indexer;
mod layer;
mod moe;

use std::ops::Range;

use kvgate_kernels::Isa;
use kvgate_kernels::cpu::gemm::matmul;
use kvgate_kernels::cpu::mhc::{self, MhcParams};
use kvgate_kernels::cpu::norm::{rms, rms_weighted};
use kvgate_kernels::cpu::rope::{RopeTable, Yarn, frequencies};
use kvgate_kvcache::LayerId;

use crate::bridge;
use crate::caches::LayerCaches;
use crate::config::Config;
use crate::error::ModelError;
use crate::probe::Probe;
use crate::weights::Weights;

/// Rope bases and YaRN of the published models, on which the primitive fixtures are based.
pub(crate) fn flash_rope() -> (f64, f64, Yarn) {
    let config = Config::tiny_v4();
    (
        config.rope_theta,
        config.compress_rope_theta,
        config.rope_scaling.yarn(),
    )
}

/// Which logits a call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: the result is empty.
    None,
    /// `[V]` of the last token.
    Last,
    /// [T, V].
    All,
}

/// A model: configuration, weights and the tables derived from them.
#[derive(Debug)]
pub struct Model {
    config: Config,
    weights: Weights,
    isa: Isa,
    /// Frequencies of layers without compression.
    main_frequencies: Vec<f32>,
    /// Frequencies of every rope of compressed layers.
    compress_frequencies: Vec<f32>,
}

/// The tokens of one call, with the rope angles of their positions.
struct Span<'a> {
    ids: &'a [u32],
    start: u32,
    main_rope: RopeTable,
    compress_rope: RopeTable,
}

impl Span<'_> {
    fn end(&self) -> u32 {
        self.start + self.ids.len() as u32
    }
}

/// Consecutive tokens of a span that one layer handles together.
struct Block<'a> {
    ids: &'a [u32],
    /// Position of the first token.
    start: u32,
    /// Angles of the layer's own rope; index 0 = the span's first token.
    rope: &'a RopeTable,
    /// Index of the block's first token in `rope`.
    rope_first: usize,
}

impl Block<'_> {
    fn tokens(&self) -> usize {
        self.ids.len()
    }

    fn positions(&self) -> Range<u32> {
        self.start..self.start + self.ids.len() as u32
    }
}

/// A probe that may be absent, with the layer it is in.
struct LayerProbe<'a, 'b> {
    layer: u16,
    probe: Option<&'a mut (dyn Probe + 'b)>,
}

impl LayerProbe<'_, '_> {
    fn is_on(&self) -> bool {
        self.probe.is_some()
    }

    fn row(&mut self, name: &'static str, position: u32, values: &[f32]) {
        if let Some(probe) = self.probe.as_deref_mut() {
            probe.row(self.layer, name, position, values);
        }
    }

    /// Equal rows of consecutive positions.
    fn rows(&mut self, name: &'static str, first: u32, width: usize, values: &[f32]) {
        if self.is_on() {
            for (position, row) in (first..).zip(values.chunks_exact(width)) {
                self.row(name, position, row);
            }
        }
    }
}

impl Model {
    /// A model of checked parts. `weights` must have been loaded with `config`.
    pub fn new(config: Config, weights: Weights) -> Self {
        let rd = config.qk_rope_head_dim as usize;
        let yarn = config.rope_scaling.yarn();
        let main_frequencies = frequencies(rd, config.rope_theta, None);
        let compress_frequencies = frequencies(rd, config.compress_rope_theta, Some(&yarn));
        Self {
            config,
            weights,
            isa: Isa::detect(),
            main_frequencies,
            compress_frequencies,
        }
    }

    /// The built-in model of a seed.
    ///
    /// # Errors
    /// None in practice; the loader's checks are shared with checkpoints.
    pub fn tiny_v4(seed: u64) -> Result<Self, ModelError> {
        let config = Config::tiny_v4();
        let weights = Weights::generate(&config, seed)?;
        Ok(Self::new(config, weights))
    }

    /// The model of a checkpoint folder.
    ///
    /// # Errors
    /// As [`Config::from_dir`] and [`Weights::load`].
    pub fn load(dir: &std::path::Path) -> Result<Self, ModelError> {
        let config = Config::from_dir(dir)?;
        let weights = Weights::load(dir, &config)?;
        Ok(Self::new(config, weights))
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The weights.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Computes with another instruction set that this processor has; the bits stay the same.
    #[must_use]
    pub fn with_isa(self, isa: Isa) -> Self {
        let isa = if Isa::usable().contains(&isa) {
            isa
        } else {
            self.isa
        };
        Self { isa, ..self }
    }

    /// Processes `ids` at positions `start`.. and returns logits as asked.
    ///
    /// All rows of earlier positions that the layers need are read from `caches`, and all new rows
    /// are written there; nothing else is kept between calls. A call leaves exactly the rows that
    /// token by token calls would leave.
    ///
    /// # Errors
    /// A token id is outside the vocabulary, a position outside the context, or the caches refuse.
    pub fn forward(
        &self,
        ids: &[u32],
        start: u32,
        caches: &mut dyn LayerCaches,
        want: Logits,
        mut probe: Option<&mut dyn Probe>,
    ) -> Result<Vec<f32>, ModelError> {
        self.check_input(ids, start)?;
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let positions = start..start + ids.len() as u32;
        let span = Span {
            ids,
            start,
            main_rope: RopeTable::new(&self.main_frequencies, positions.clone()),
            compress_rope: RopeTable::new(&self.compress_frequencies, positions.clone()),
        };
        let mut streams = self.embed(ids);
        for index in 0..self.config.num_hidden_layers as u16 {
            {
                let mut view = caches.layer(LayerId(index))?;
                let mut pages = bridge::layer_pages(&mut view, &self.config, index)?;
                let mut probe = LayerProbe {
                    layer: index,
                    probe: probe.as_deref_mut(),
                };
                self.layer(index, &span, &mut streams, &mut pages, &mut probe)?;
            }
            caches.layer_done(LayerId(index), positions.clone())?;
        }
        self.logits(&streams, want)
    }

    fn check_input(&self, ids: &[u32], start: u32) -> Result<(), ModelError> {
        let context = self.config.max_position_embeddings;
        let end = u64::from(start) + ids.len() as u64;
        if end > u64::from(context) {
            return Err(ModelError::input(
                "last position + 1",
                end,
                format!("at most {context} (the context)"),
            ));
        }
        let vocabulary = self.config.vocab_size;
        match ids.iter().find(|id| **id >= vocabulary) {
            Some(id) => Err(ModelError::input(
                "token id",
                u64::from(*id),
                format!("below {vocabulary}"),
            )),
            None => Ok(()),
        }
    }

    /// X [T, n, d]: every stream starts as the token's embedding (4.1).
    fn embed(&self, ids: &[u32]) -> Vec<f32> {
        let d = self.config.hidden_size as usize;
        let n = self.config.hc_mult as usize;
        let mut streams = Vec::with_capacity(ids.len() * n * d);
        for id in ids {
            let row = &self.weights.embed[*id as usize * d..][..d];
            for _ in 0..n {
                streams.extend_from_slice(row);
            }
        }
        streams
    }

    /// Collapse, norm and head (4.2).
    fn logits(&self, streams: &[f32], want: Logits) -> Result<Vec<f32>, ModelError> {
        let d = self.config.hidden_size as usize;
        let width = self.config.hc_mult as usize * d;
        let streams = match want {
            Logits::None => return Ok(Vec::new()),
            Logits::Last => &streams[streams.len() - width..],
            Logits::All => streams,
        };
        let mixing = &self.weights.head_mixing;
        let v = matmul(self.isa, &self.normed_streams(streams), &mixing.projection)?;
        let mut x = vec![0.0; streams.len() / width * d];
        let rows = x.chunks_exact_mut(d).zip(streams.chunks_exact(width));
        for ((x, streams), v) in rows.zip(v.chunks_exact(self.config.hc_mult as usize)) {
            let pre = mhc::head_weights(&self.mhc_params(), v, mixing.scale[0], &mixing.base);
            mhc::collapse(&pre, streams, x);
            rms_weighted(x, &self.weights.norm, self.eps());
        }
        Ok(matmul(self.isa, &x, &self.weights.head)?)
    }

    /// RMS over all n*d values of each token's streams.
    fn normed_streams(&self, streams: &[f32]) -> Vec<f32> {
        let width = self.config.hc_mult as usize * self.config.hidden_size as usize;
        let mut normed = streams.to_vec();
        for row in normed.chunks_exact_mut(width) {
            rms(row, self.eps());
        }
        normed
    }

    fn eps(&self) -> f32 {
        self.config.rms_norm_eps as f32
    }

    fn mhc_params(&self) -> MhcParams {
        MhcParams {
            streams: self.config.hc_mult as usize,
            sinkhorn_iterations: self.config.hc_sinkhorn_iters as usize,
            eps: self.config.hc_eps as f32,
        }
    }
}
