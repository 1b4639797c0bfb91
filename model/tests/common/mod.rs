//! What the integration tests share.
#![allow(dead_code)]

use std::path::PathBuf;

use kvgate_kvcache::{CacheSchema, Formats, IndexKFormat, LatentFormat, WindowPage};
use kvgate_model::safetensors::SafetensorsFile;
use kvgate_model::{Config, Logits, Model, MonoCaches};

pub(crate) const F32: Formats = Formats {
    latent: LatentFormat::F32,
    index_k: IndexKFormat::F32,
    window_page: WindowPage::P64,
};

/// Every combination of storage formats of the real head geometry.
pub(crate) fn all_formats() -> Vec<Formats> {
    let mut all = Vec::new();
    for latent in [LatentFormat::PackedFp8, LatentFormat::F32] {
        for index_k in [IndexKFormat::Bf16, IndexKFormat::Fp8, IndexKFormat::F32] {
            for window_page in [WindowPage::P64, WindowPage::P256] {
                all.push(Formats {
                    latent,
                    index_k,
                    window_page,
                });
            }
        }
    }
    all
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

pub(crate) fn caches(model: &Model, formats: &Formats, tokens: usize) -> MonoCaches {
    let geometry = model.config().geometry(model.weights().digest());
    let schema = CacheSchema::deepseek_v4(&geometry, formats).unwrap();
    MonoCaches::new(&schema, tokens as u32).unwrap()
}

/// Logits of ids[start..], in calls that end at `ends`.
pub(crate) fn run(
    model: &Model,
    caches: &mut MonoCaches,
    ids: &[u32],
    start: usize,
    ends: &[usize],
) -> Vec<f32> {
    let (mut from, mut logits) = (start, Vec::new());
    for end in ends {
        logits.extend(
            model
                .forward(&ids[from..*end], from as u32, caches, Logits::All, None)
                .unwrap(),
        );
        from = *end;
    }
    logits
}

pub(crate) fn ids_of(path: PathBuf, tensor: &str) -> Vec<u32> {
    let values = SafetensorsFile::open(&path)
        .unwrap()
        .read(tensor)
        .unwrap()
        .to_i64()
        .unwrap();
    values.iter().map(|v| *v as u32).collect()
}

pub(crate) fn floats_of(path: PathBuf, tensor: &str) -> Vec<f32> {
    SafetensorsFile::open(&path)
        .unwrap()
        .read(tensor)
        .unwrap()
        .to_f32()
        .unwrap()
}

/// Token ids without a pattern.
pub(crate) fn noise_ids(count: usize, vocabulary: u32, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) as u32 % vocabulary
        })
        .collect()
}

pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

pub(crate) fn max_change(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

/// A model of a few kilobytes with every kind of layer.
pub(crate) fn small_config() -> Config {
    Config {
        vocab_size: 20,
        hidden_size: 12,
        num_hidden_layers: 3,
        num_attention_heads: 2,
        head_dim: 10,
        qk_rope_head_dim: 4,
        q_lora_rank: 6,
        o_groups: 2,
        o_lora_rank: 3,
        sliding_window: 5,
        compress_ratios: vec![128, 4, 0],
        index_n_heads: 3,
        index_head_dim: 8,
        index_topk: 4,
        n_routed_experts: 3,
        num_experts_per_tok: 2,
        moe_intermediate_size: 8,
        hc_mult: 2,
        max_position_embeddings: 1024,
        ..Config::tiny_v4()
    }
}
