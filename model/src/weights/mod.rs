//! The weights in memory: f32, projections packed for the matrix product.

mod checkpoint;
pub mod safetensors;
mod spec;
mod tiny;

use std::fmt;
use std::path::Path;

use kvgate_kernels::cpu::gemm::PackedMatrix;
use sha2::{Digest, Sha256};

use crate::config::Config;
use crate::error::{ErrorKind, ModelError};
use checkpoint::{Checkpoint, SINGLE_FILE};
use safetensors::{Dtype, Tensor};
use tiny::Generated;

/// Where tensors come from, by hub name.
trait Source {
    fn read(&mut self, name: &str) -> Result<Tensor, ModelError>;
}

/// Mixing parameters around a sub-layer, or before the head.
pub(crate) struct Mixing {
    pub(crate) projection: PackedMatrix,
    pub(crate) base: Vec<f32>,
    pub(crate) scale: Vec<f32>,
}

/// A compressor: projections [coff*dd, d], position bias [m, coff*dd], norm [dd].
pub(crate) struct CompressorWeights {
    pub(crate) wkv: PackedMatrix,
    pub(crate) wgate: PackedMatrix,
    pub(crate) ape: Vec<f32>,
    pub(crate) norm: Vec<f32>,
}

/// The indexer of a ratio-4 layer.
pub(crate) struct IndexerWeights {
    pub(crate) wq_b: PackedMatrix,
    pub(crate) weights_proj: PackedMatrix,
    pub(crate) compressor: CompressorWeights,
}

/// Attention of one layer.
pub(crate) struct AttentionWeights {
    pub(crate) sinks: Vec<f32>,
    pub(crate) wq_a: PackedMatrix,
    pub(crate) q_norm: Vec<f32>,
    pub(crate) wq_b: PackedMatrix,
    pub(crate) wkv: PackedMatrix,
    pub(crate) kv_norm: Vec<f32>,
    /// One matrix [R, H*D/G] per group.
    pub(crate) wo_a: Vec<PackedMatrix>,
    pub(crate) wo_b: PackedMatrix,
    pub(crate) compressor: Option<CompressorWeights>,
    pub(crate) indexer: Option<IndexerWeights>,
}

/// One expert.
pub(crate) struct ExpertWeights {
    pub(crate) w1: PackedMatrix,
    pub(crate) w2: PackedMatrix,
    pub(crate) w3: PackedMatrix,
}

/// How a layer picks its experts.
pub(crate) enum Router {
    /// Expert ids per token id, [V][K].
    Hash(Vec<u32>),
    /// Bias of the scores.
    Score(Vec<f32>),
}

/// Experts of one layer.
pub(crate) struct FfnWeights {
    pub(crate) gate: PackedMatrix,
    pub(crate) router: Router,
    pub(crate) experts: Vec<ExpertWeights>,
    pub(crate) shared: ExpertWeights,
}

/// One layer.
pub(crate) struct LayerWeights {
    pub(crate) attn_norm: Vec<f32>,
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) attn_mixing: Mixing,
    pub(crate) ffn_mixing: Mixing,
    pub(crate) attn: AttentionWeights,
    pub(crate) ffn: FfnWeights,
}

/// All weights of a model, with the digest of the stored tensors.
pub struct Weights {
    pub(crate) embed: Vec<f32>,
    pub(crate) head: PackedMatrix,
    pub(crate) norm: Vec<f32>,
    pub(crate) head_mixing: Mixing,
    pub(crate) layers: Vec<LayerWeights>,
    digest: [u8; 32],
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digest: String = self.digest.iter().map(|b| format!("{b:02x}")).collect();
        write!(f, "Weights({} layers, sha256 {digest})", self.layers.len())
    }
}

impl Weights {
    /// Loads a checkpoint folder with hub names: `model.safetensors`, or the shards of
    /// `model.safetensors.index.json`.
    ///
    /// # Errors
    /// A file is damaged, or a tensor is missing, unknown, mis-shaped, packed or out of range.
    pub fn load(dir: &Path, config: &Config) -> Result<Self, ModelError> {
        Self::build(config, &mut Checkpoint::open(dir, config)?)
    }

    /// Weights made from a seed; with [`Config::tiny_v4`] the built-in model.
    ///
    /// # Errors
    /// None for a checked configuration.
    pub fn generate(config: &Config, seed: u64) -> Result<Self, ModelError> {
        Self::build(config, &mut Generated::new(config, seed))
    }

    /// SHA-256 over the names, types, shapes and bytes of the tensors.
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    fn build(config: &Config, source: &mut dyn Source) -> Result<Self, ModelError> {
        let mut b = Builder {
            config,
            source,
            hasher: Sha256::new(),
        };
        let embed = b.values("embed.weight")?;
        let head = b.matrix("head")?;
        let norm = b.values("norm.weight")?;
        let head_mixing = b.mixing("hc_head")?;
        let layers = (0..config.num_hidden_layers)
            .map(|i| b.layer(i))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            embed,
            head,
            norm,
            head_mixing,
            layers,
            digest: b.hasher.finalize().into(),
        })
    }
}

/// Writes `config.json` and `model.safetensors` of a generated model; loading them gives the same bits.
///
/// # Errors
/// A file cannot be written.
pub fn dump_generated(dir: &Path, config: &Config, seed: u64) -> Result<(), ModelError> {
    std::fs::create_dir_all(dir).map_err(|e| ModelError::io(dir, e))?;
    let path = dir.join("config.json");
    let text = serde_json::to_string_pretty(&config.to_json()).unwrap_or_default();
    std::fs::write(&path, text + "\n").map_err(|e| ModelError::io(&path, e))?;
    let mut source = Generated::new(config, seed);
    let specs = source.specs.clone();
    let infos: Vec<(&str, Dtype, &[usize])> = specs
        .iter()
        .map(|(n, s)| (n.as_str(), Generated::dtype(s.role), s.shape.as_slice()))
        .collect();
    safetensors::write_file(&dir.join(SINGLE_FILE), &infos, |name| source.read(name))
}

fn shape_error(name: &str, got: &[usize], expected: &[usize]) -> ModelError {
    ModelError::new(ErrorKind::TensorShape {
        name: name.to_owned(),
        got: got.to_vec(),
        expected: expected.to_vec(),
    })
}

struct Builder<'a> {
    config: &'a Config,
    source: &'a mut dyn Source,
    hasher: Sha256,
}

impl Builder<'_> {
    fn tensor(&mut self, name: &str) -> Result<Tensor, ModelError> {
        let tensor = self.source.read(name)?;
        self.hasher.update((name.len() as u64).to_le_bytes());
        self.hasher.update(name);
        self.hasher.update(tensor.dtype.name());
        for dim in &tensor.shape {
            self.hasher.update((*dim as u64).to_le_bytes());
        }
        self.hasher.update(&tensor.bytes);
        Ok(tensor)
    }

    fn values_of(&mut self, name: &str, tensor: &Tensor) -> Result<Vec<f32>, ModelError> {
        let got = tensor.dtype.name().to_owned();
        let values = tensor.to_f32().ok_or_else(|| {
            ModelError::new(ErrorKind::TensorDtype {
                name: name.to_owned(),
                got,
                expected: "BF16 or F32",
            })
        })?;
        match values.iter().find(|v| !v.is_finite()) {
            None => Ok(values),
            Some(v) => Err(ModelError::new(ErrorKind::TensorValue {
                name: name.to_owned(),
                value: v.to_string(),
                expected: "finite numbers".into(),
            })),
        }
    }

    fn values(&mut self, name: &str) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name)?;
        self.values_of(name, &tensor)
    }

    /// The two-dimensional tensor `name`, cut into `parts` matrices of equal rows.
    fn packed(&mut self, name: &str, parts: usize) -> Result<Vec<PackedMatrix>, ModelError> {
        let tensor = self.tensor(name)?;
        let values = self.values_of(name, &tensor)?;
        let [rows, columns] = tensor.shape[..] else {
            return Err(shape_error(name, &tensor.shape, &[0, 0]));
        };
        let rows = rows / parts;
        let pack = |part: &[f32]| PackedMatrix::pack(part, rows, columns);
        let packed: Result<_, _> = values
            .chunks_exact((rows * columns).max(1))
            .map(pack)
            .collect();
        Ok(packed?)
    }

    fn parameter_matrix(&mut self, name: &str) -> Result<PackedMatrix, ModelError> {
        let mut parts = self.packed(name, 1)?;
        parts.pop().ok_or_else(|| {
            ModelError::new(ErrorKind::TensorMissing {
                name: name.to_owned(),
            })
        })
    }

    fn matrix(&mut self, name: &str) -> Result<PackedMatrix, ModelError> {
        self.parameter_matrix(&format!("{name}.weight"))
    }

    fn mixing(&mut self, prefix: &str) -> Result<Mixing, ModelError> {
        Ok(Mixing {
            projection: self.parameter_matrix(&format!("{prefix}_fn"))?,
            base: self.values(&format!("{prefix}_base"))?,
            scale: self.values(&format!("{prefix}_scale"))?,
        })
    }

    fn layer(&mut self, index: u32) -> Result<LayerWeights, ModelError> {
        let p = format!("layers.{index}");
        Ok(LayerWeights {
            attn_norm: self.values(&format!("{p}.attn_norm.weight"))?,
            ffn_norm: self.values(&format!("{p}.ffn_norm.weight"))?,
            attn_mixing: self.mixing(&format!("{p}.hc_attn"))?,
            ffn_mixing: self.mixing(&format!("{p}.hc_ffn"))?,
            attn: self.attention(
                &format!("{p}.attn"),
                self.config.compress_ratios[index as usize],
            )?,
            ffn: self.ffn(&format!("{p}.ffn"), index < self.config.num_hash_layers)?,
        })
    }

    fn attention(&mut self, p: &str, ratio: u32) -> Result<AttentionWeights, ModelError> {
        Ok(AttentionWeights {
            sinks: self.values(&format!("{p}.attn_sink"))?,
            wq_a: self.matrix(&format!("{p}.wq_a"))?,
            q_norm: self.values(&format!("{p}.q_norm.weight"))?,
            wq_b: self.matrix(&format!("{p}.wq_b"))?,
            wkv: self.matrix(&format!("{p}.wkv"))?,
            kv_norm: self.values(&format!("{p}.kv_norm.weight"))?,
            wo_a: self.packed(&format!("{p}.wo_a.weight"), self.config.o_groups as usize)?,
            wo_b: self.matrix(&format!("{p}.wo_b"))?,
            compressor: match ratio {
                0 => None,
                _ => Some(self.compressor(&format!("{p}.compressor"))?),
            },
            indexer: match ratio {
                4 => Some(IndexerWeights {
                    wq_b: self.matrix(&format!("{p}.indexer.wq_b"))?,
                    weights_proj: self.matrix(&format!("{p}.indexer.weights_proj"))?,
                    compressor: self.compressor(&format!("{p}.indexer.compressor"))?,
                }),
                _ => None,
            },
        })
    }

    fn compressor(&mut self, p: &str) -> Result<CompressorWeights, ModelError> {
        Ok(CompressorWeights {
            wkv: self.matrix(&format!("{p}.wkv"))?,
            wgate: self.matrix(&format!("{p}.wgate"))?,
            ape: self.values(&format!("{p}.ape"))?,
            norm: self.values(&format!("{p}.norm.weight"))?,
        })
    }

    fn ffn(&mut self, p: &str, is_hash: bool) -> Result<FfnWeights, ModelError> {
        let gate = self.matrix(&format!("{p}.gate"))?;
        let router = if is_hash {
            Router::Hash(self.expert_ids(&format!("{p}.gate.tid2eid"))?)
        } else {
            Router::Score(self.values(&format!("{p}.gate.bias"))?)
        };
        let experts = (0..self.config.n_routed_experts)
            .map(|e| self.expert(&format!("{p}.experts.{e}")))
            .collect::<Result<_, _>>()?;
        Ok(FfnWeights {
            gate,
            router,
            experts,
            shared: self.expert(&format!("{p}.shared_experts"))?,
        })
    }

    fn expert(&mut self, p: &str) -> Result<ExpertWeights, ModelError> {
        Ok(ExpertWeights {
            w1: self.matrix(&format!("{p}.w1"))?,
            w2: self.matrix(&format!("{p}.w2"))?,
            w3: self.matrix(&format!("{p}.w3"))?,
        })
    }

    fn expert_ids(&mut self, name: &str) -> Result<Vec<u32>, ModelError> {
        let tensor = self.tensor(name)?;
        let experts = i64::from(self.config.n_routed_experts);
        let ids = tensor.to_i64().unwrap_or_default();
        match ids.iter().find(|id| !(0..experts).contains(*id)) {
            None => Ok(ids.iter().map(|id| *id as u32).collect()),
            Some(id) => Err(ModelError::new(ErrorKind::TensorValue {
                name: name.to_owned(),
                value: id.to_string(),
                expected: format!("expert ids from 0 to {}", experts - 1),
            })),
        }
    }
}
