//! The built-in model `tiny-v4`: real head geometry, six layers, weights from a seed.
//!
//! Every value is an integer from a hash times a power of two, so that it is the same on every host
//! and exact in the type in which the hub stores it.

use super::Source;
use super::safetensors::{Dtype, Tensor};
use super::spec::{Role, Specs, main_specs};
use crate::config::{Config, RopeScaling};
use crate::error::{ErrorKind, ModelError};

/// Vocabulary of the embedded byte tokenizer.
const VOCABULARY: u32 = 320;

impl Config {
    /// The configuration of `tiny-v4`.
    pub fn tiny_v4() -> Self {
        Self {
            vocab_size: VOCABULARY,
            hidden_size: 128,
            num_hidden_layers: 6,
            num_attention_heads: 4,
            head_dim: 512,
            qk_rope_head_dim: 64,
            q_lora_rank: 64,
            o_groups: 2,
            o_lora_rank: 32,
            sliding_window: 128,
            compress_ratios: vec![0, 4, 128, 4, 128, 4],
            index_n_heads: 8,
            index_head_dim: 128,
            index_topk: 32,
            rope_theta: 10_000.0,
            compress_rope_theta: 160_000.0,
            rope_scaling: RopeScaling {
                factor: 16.0,
                original_max_position_embeddings: 65_536,
                beta_fast: 32.0,
                beta_slow: 1.0,
            },
            max_position_embeddings: 65_536,
            n_routed_experts: 8,
            num_experts_per_tok: 2,
            moe_intermediate_size: 64,
            num_hash_layers: 1,
            routed_scaling_factor: 1.5,
            swiglu_limit: 10.0,
            hc_mult: 4,
            hc_sinkhorn_iters: 20,
            hc_eps: 1e-6,
            num_nextn_predict_layers: 0,
            rms_norm_eps: 1e-6,
        }
    }
}

/// Weights of a configuration, made from a seed.
pub(crate) struct Generated {
    seed: u64,
    expert_count: u64,
    pub(crate) specs: Specs,
}

impl Generated {
    pub(crate) fn new(config: &Config, seed: u64) -> Self {
        Self {
            seed,
            expert_count: u64::from(config.n_routed_experts),
            specs: main_specs(config),
        }
    }

    /// Type in which a tensor of that role is made.
    pub(crate) fn dtype(role: Role) -> Dtype {
        match role {
            Role::Weight => Dtype::Bf16,
            Role::Parameter => Dtype::F32,
            Role::ExpertIds => Dtype::I64,
        }
    }
}

impl Source for Generated {
    fn read(&mut self, name: &str) -> Result<Tensor, ModelError> {
        let Some(spec) = self.specs.get(name) else {
            return Err(ModelError::new(ErrorKind::TensorMissing {
                name: name.to_owned(),
            }));
        };
        let count = spec.shape.iter().product();
        let mut numbers = Numbers::new(self.seed, name);
        let bytes = match spec.role {
            Role::ExpertIds => expert_ids(&mut numbers, count, spec.shape[1], self.expert_count),
            Role::Weight => {
                let range = Range::of(name, &spec.shape, 7);
                let value = |n: &mut Numbers| (range.draw(n).to_bits() >> 16) as u16;
                (0..count)
                    .flat_map(|_| value(&mut numbers).to_le_bytes())
                    .collect()
            }
            Role::Parameter => {
                let range = Range::of(name, &spec.shape, 15);
                (0..count)
                    .flat_map(|_| range.draw(&mut numbers).to_le_bytes())
                    .collect()
            }
        };
        Ok(Tensor {
            dtype: Self::dtype(spec.role),
            shape: spec.shape.clone(),
            bytes,
        })
    }
}

/// For every token `picks` different experts.
fn expert_ids(numbers: &mut Numbers, count: usize, picks: usize, experts: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count * 8);
    for _ in 0..count / picks.max(1) {
        let mut left: Vec<u64> = (0..experts).collect();
        for _ in 0..picks {
            let index = numbers.next() % left.len() as u64;
            bytes.extend_from_slice(&left.swap_remove(index as usize).to_le_bytes());
        }
    }
    bytes
}

/// Uniform numbers centre + [-steps, steps] * 2^-exponent.
struct Range {
    centre: f32,
    steps: i64,
    unit: f32,
}

impl Range {
    /// The spread of a tensor by its name, with `bits` significant bits.
    fn of(name: &str, shape: &[usize], bits: u32) -> Self {
        let last = name.strip_suffix(".weight").unwrap_or(name);
        let last = last.rsplit('.').next().unwrap_or(last);
        if last.ends_with("norm") {
            // 1 + [-44, 44]/128 has eight significant bits: exact in bf16.
            return Self {
                centre: 1.0,
                steps: 44,
                unit: 1.0 / 128.0,
            };
        }
        if last.ends_with("_scale") {
            return Self {
                centre: 1.0,
                steps: 1 << 14,
                unit: 1.0 / 32_768.0,
            };
        }
        let inputs = (*shape.last().unwrap_or(&1)).max(1) as f64;
        let deviation = match last {
            "embed" | "attn_sink" => 1.0,
            _ if last.ends_with("_base") => 1.0,
            "ape" => 0.7,
            "bias" => 0.2,
            "wgate" | "gate" => 1.5 / inputs.sqrt(),
            "w1" | "w3" => 1.3 / inputs.sqrt(),
            "w2" | "wo_b" => 2.0 / inputs.sqrt(),
            _ => 1.0 / inputs.sqrt(),
        };
        // A uniform number of half-width h has deviation h / sqrt(3).
        let half_width = deviation * 3f64.sqrt();
        let mut unit = 1.0f64;
        let limit = f64::from((1u32 << bits) - 1);
        while half_width / unit > limit {
            unit *= 2.0;
        }
        while half_width / unit * 2.0 <= limit {
            unit /= 2.0;
        }
        Self {
            centre: 0.0,
            steps: (half_width / unit) as i64,
            unit: unit as f32,
        }
    }

    fn draw(&self, numbers: &mut Numbers) -> f32 {
        let span = (2 * self.steps + 1) as u64;
        let step = ((u128::from(numbers.next()) * u128::from(span)) >> 64) as i64 - self.steps;
        self.centre + step as f32 * self.unit
    }
}

/// A counter through a 64-bit mixing function, started from seed and tensor name.
struct Numbers {
    state: u64,
}

impl Numbers {
    fn new(seed: u64, name: &str) -> Self {
        let mut hash = 0xCBF2_9CE4_8422_2325u64;
        for byte in name.bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
        }
        Self {
            state: hash ^ seed.wrapping_mul(0x9E37_79B9_7F4A_7C15),
        }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}
