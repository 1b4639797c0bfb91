//! The configuration of a DeepSeek-V4 model, read from a hub `config.json`.
//!
//! All geometry comes from the file; nothing is assumed from Flash or Pro. Values that no model of
//! this architecture can have are refused with the field and the value.

mod fields;

use std::path::Path;

use kvgate_kernels::cpu::rope::Yarn;
use kvgate_kvcache::V4Geometry;
use serde::Serialize;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::error::ModelError;
use fields::Fields;

/// Name of the architecture in `architectures`.
pub const ARCHITECTURE: &str = "DeepseekV4ForCausalLM";

/// YaRN parameters of the compress rope.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RopeScaling {
    /// Factor of the slow pairs.
    pub factor: f64,
    /// Context length before the extension, in tokens.
    pub original_max_position_embeddings: u32,
    /// Rotations above which a pair is left alone.
    pub beta_fast: f64,
    /// Rotations below which a pair is scaled fully.
    pub beta_slow: f64,
}

impl RopeScaling {
    pub(crate) fn yarn(&self) -> Yarn {
        Yarn {
            factor: self.factor,
            original_max_position_embeddings: f64::from(self.original_max_position_embeddings),
            beta_fast: self.beta_fast,
            beta_slow: self.beta_slow,
        }
    }
}

/// A checked configuration. Field names are those of the file.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Config {
    pub vocab_size: u32,
    pub hidden_size: u32,
    pub num_hidden_layers: u32,
    pub num_attention_heads: u32,
    pub head_dim: u32,
    pub qk_rope_head_dim: u32,
    pub q_lora_rank: u32,
    pub o_groups: u32,
    pub o_lora_rank: u32,
    pub sliding_window: u32,
    /// Ratio of each main layer: 0, 4 or 128. Entries of draft blocks are cut off.
    pub compress_ratios: Vec<u32>,
    pub index_n_heads: u32,
    pub index_head_dim: u32,
    pub index_topk: u32,
    pub rope_theta: f64,
    pub compress_rope_theta: f64,
    pub rope_scaling: RopeScaling,
    pub max_position_embeddings: u32,
    pub n_routed_experts: u32,
    pub num_experts_per_tok: u32,
    pub moe_intermediate_size: u32,
    pub num_hash_layers: u32,
    pub routed_scaling_factor: f64,
    pub swiglu_limit: f64,
    pub hc_mult: u32,
    pub hc_sinkhorn_iters: u32,
    pub hc_eps: f64,
    pub num_nextn_predict_layers: u32,
    pub rms_norm_eps: f64,
}

impl Config {
    /// Reads `config.json` of a checkpoint folder.
    ///
    /// # Errors
    /// The file cannot be read, is not JSON, or a field is refused.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let text = std::fs::read(&path).map_err(|e| ModelError::io(&path, e))?;
        let value: Value = serde_json::from_slice(&text)
            .map_err(|e| ModelError::corrupt(&path, format!("not JSON: {e}")))?;
        Self::from_json(&value)
    }

    /// Checks a parsed `config.json`.
    ///
    /// # Errors
    /// A field is missing, has a wrong type, or a value that is refused.
    pub fn from_json(value: &Value) -> Result<Self, ModelError> {
        let Value::Object(map) = value else {
            return Err(ModelError::config(
                "config.json",
                kind_of(value),
                "a JSON object",
            ));
        };
        let f = Fields::new(map);
        check_identity(&f)?;
        let num_hidden_layers = f.int("num_hidden_layers", 1..=4096)?;
        let head_dim = f.int("head_dim", 1..=1 << 16)?;
        let drafts = f.int_or("num_nextn_predict_layers", 0, 0..=64)?;
        let config = Self {
            vocab_size: f.int("vocab_size", 1..=1 << 24)?,
            hidden_size: f.int("hidden_size", 1..=1 << 17)?,
            num_hidden_layers,
            num_attention_heads: f.int("num_attention_heads", 1..=1 << 13)?,
            head_dim,
            qk_rope_head_dim: rope_dim(&f, head_dim)?,
            q_lora_rank: f.int("q_lora_rank", 1..=1 << 17)?,
            o_groups: f.int("o_groups", 1..=1 << 13)?,
            o_lora_rank: f.int("o_lora_rank", 1..=1 << 17)?,
            sliding_window: f.int("sliding_window", 1..=1 << 20)?,
            compress_ratios: compress_ratios(&f, num_hidden_layers, drafts)?,
            index_n_heads: f.int("index_n_heads", 1..=1 << 13)?,
            index_head_dim: f.int("index_head_dim", 1..=1 << 16)?,
            index_topk: f.int("index_topk", 1..=1 << 24)?,
            rope_theta: rope_theta(&f)?,
            compress_rope_theta: compress_rope_theta(&f)?,
            rope_scaling: rope_scaling(&f)?,
            max_position_embeddings: f.int("max_position_embeddings", 1..=1 << 28)?,
            n_routed_experts: f.int("n_routed_experts", 1..=1 << 16)?,
            num_experts_per_tok: f.int("num_experts_per_tok", 1..=1 << 16)?,
            moe_intermediate_size: f.int("moe_intermediate_size", 1..=1 << 17)?,
            num_hash_layers: hash_layers(&f, num_hidden_layers)?,
            routed_scaling_factor: f.positive("routed_scaling_factor")?,
            swiglu_limit: f.positive("swiglu_limit")?,
            hc_mult: f.int("hc_mult", 1..=64)?,
            hc_sinkhorn_iters: f.int("hc_sinkhorn_iters", 1..=1000)?,
            hc_eps: f.not_negative("hc_eps")?,
            num_nextn_predict_layers: drafts,
            rms_norm_eps: f.not_negative("rms_norm_eps")?,
        };
        config.check_relations()?;
        Ok(config)
    }

    fn check_relations(&self) -> Result<(), ModelError> {
        let heads = self.num_attention_heads;
        if !heads.is_multiple_of(self.o_groups) {
            let expected = format!("a divisor of num_attention_heads = {heads}");
            return Err(ModelError::config("o_groups", self.o_groups, expected));
        }
        let rope_limit = match self.has_indexer() {
            true => self.head_dim.min(self.index_head_dim),
            false => self.head_dim,
        };
        let rd = self.qk_rope_head_dim;
        if rd == 0 || rd > rope_limit || !rd.is_multiple_of(2) {
            let expected =
                format!("an even number from 2 to {rope_limit} (head_dim, index_head_dim)");
            return Err(ModelError::config("qk_rope_head_dim", rd, expected));
        }
        let expert_limit = (1 << 18) / self.num_hidden_layers;
        if self.n_routed_experts > expert_limit {
            let expected = format!(
                "at most {expert_limit} in each of {} layers",
                self.num_hidden_layers
            );
            return Err(ModelError::config(
                "n_routed_experts",
                self.n_routed_experts,
                expected,
            ));
        }
        if self.num_experts_per_tok > self.n_routed_experts {
            let expected = format!("at most n_routed_experts = {}", self.n_routed_experts);
            return Err(ModelError::config(
                "num_experts_per_tok",
                self.num_experts_per_tok,
                expected,
            ));
        }
        Ok(())
    }

    /// Whether a layer has an indexer.
    pub fn has_indexer(&self) -> bool {
        self.compress_ratios.contains(&4)
    }

    /// The configuration as a hub `config.json`, with the constants of the architecture.
    pub fn to_json(&self) -> Value {
        let mut map = match serde_json::to_value(self) {
            Ok(Value::Object(map)) => map,
            _ => Map::new(),
        };
        if let Some(Value::Object(scaling)) = map.get_mut("rope_scaling") {
            scaling.insert("type".into(), json!("yarn"));
        }
        let mut ratios = self.compress_ratios.clone();
        ratios.extend(std::iter::repeat_n(
            0,
            self.num_nextn_predict_layers.max(1) as usize,
        ));
        map.insert("compress_ratios".into(), json!(ratios));
        for (name, value) in [
            ("architectures", json!([ARCHITECTURE])),
            ("model_type", json!("deepseek_v4")),
            ("num_key_value_heads", json!(1)),
            ("n_shared_experts", json!(1)),
            ("scoring_func", json!("sqrtsoftplus")),
            ("topk_method", json!("noaux_tc")),
            ("norm_topk_prob", json!(true)),
            ("hidden_act", json!("silu")),
            ("tie_word_embeddings", json!(false)),
            ("attention_bias", json!(false)),
            ("attention_dropout", json!(0.0)),
            ("initializer_range", json!(0.02)),
            ("use_cache", json!(true)),
            ("torch_dtype", json!("bfloat16")),
            ("bos_token_id", json!(0)),
            ("eos_token_id", json!(1)),
        ] {
            map.insert(name.into(), value);
        }
        Value::Object(map)
    }

    /// The part of the configuration that decides the shape and the meaning of a cache.
    pub fn geometry(&self, weights_digest: [u8; 32]) -> V4Geometry {
        V4Geometry {
            layer_ratios: self.compress_ratios.clone(),
            head_dim: self.head_dim,
            rope_dim: self.qk_rope_head_dim,
            index_head_dim: self.index_head_dim,
            window_tokens: self.sliding_window,
            rope_theta: self.rope_theta,
            compress_rope_theta: self.compress_rope_theta,
            yarn: kvgate_kvcache::Yarn {
                factor: self.rope_scaling.factor,
                original_max_position_embeddings: self
                    .rope_scaling
                    .original_max_position_embeddings,
                beta_fast: self.rope_scaling.beta_fast,
                beta_slow: self.rope_scaling.beta_slow,
            },
            drafting: false,
            architecture: ARCHITECTURE.to_owned(),
            config_digest: self.digest(),
            weights_digest,
        }
    }

    /// SHA-256 over the fields that change what the model computes.
    pub fn digest(&self) -> [u8; 32] {
        let canonical = serde_json::to_vec(self).unwrap_or_default();
        Sha256::digest(canonical).into()
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Refuses other architectures and the variants that this model does not compute.
fn check_identity(f: &Fields<'_>) -> Result<(), ModelError> {
    match f.value("model_type") {
        Some(Value::String(t)) if t == "deepseek_v4" => {}
        other => return Err(f.refuse("model_type", other, "\"deepseek_v4\"")),
    }
    if let Some(value) = f.value("architectures") {
        let named = value
            .as_array()
            .is_some_and(|a| a.iter().any(|v| v == ARCHITECTURE));
        if !named {
            return Err(f.refuse(
                "architectures",
                Some(value),
                "a list with \"DeepseekV4ForCausalLM\"",
            ));
        }
    }
    for (field, only) in [
        ("num_key_value_heads", json!(1)),
        ("n_shared_experts", json!(1)),
        ("scoring_func", json!("sqrtsoftplus")),
        ("topk_method", json!("noaux_tc")),
        ("norm_topk_prob", json!(true)),
        ("hidden_act", json!("silu")),
        ("tie_word_embeddings", json!(false)),
        ("attention_bias", json!(false)),
        ("mlp_bias", json!(false)),
    ] {
        match f.value(field) {
            None => {}
            Some(value) if *value == only => {}
            other => return Err(f.refuse(field, other, only.to_string())),
        }
    }
    Ok(())
}

/// `qk_rope_head_dim`, or head_dim times `partial_rotary_factor`.
fn rope_dim(f: &Fields<'_>, head_dim: u32) -> Result<u32, ModelError> {
    if f.value("qk_rope_head_dim").is_none() && f.value("partial_rotary_factor").is_some() {
        let share = f.positive("partial_rotary_factor")?;
        return Ok((f64::from(head_dim) * share) as u32);
    }
    f.int("qk_rope_head_dim", 1..=1 << 16)
}

/// `compress_ratios` by layer id, or `layer_types`.
fn compress_ratios(f: &Fields<'_>, layers: u32, drafts: u32) -> Result<Vec<u32>, ModelError> {
    let field = "compress_ratios";
    let Some(value) = f.value(field) else {
        return ratios_of_types(f, layers);
    };
    let Some(list) = value.as_array() else {
        return Err(f.refuse(field, Some(value), "a list of 0, 4 and 128"));
    };
    if list.len() < layers as usize {
        let got = format!("a list of {} entries", list.len());
        let expected = format!("an entry for each of the {layers} layers");
        return Err(ModelError::config(field, got, expected));
    }
    let mut ratios = Vec::with_capacity(layers as usize);
    for (i, entry) in list.iter().enumerate().take((layers + drafts) as usize) {
        let is_draft = i >= layers as usize;
        match entry.as_u64() {
            Some(0) if is_draft => {}
            Some(ratio @ (0 | 4 | 128)) if !is_draft => ratios.push(ratio as u32),
            _ => {
                let expected = if is_draft {
                    "0 (draft block)"
                } else {
                    "0, 4 or 128"
                };
                return Err(ModelError::config(format!("{field}[{i}]"), entry, expected));
            }
        }
    }
    Ok(ratios)
}

fn ratios_of_types(f: &Fields<'_>, layers: u32) -> Result<Vec<u32>, ModelError> {
    let rate = |name: &str, usual: u32| match f.value("compress_rates").and_then(|r| r.get(name)) {
        None => Ok(usual),
        Some(v) if v.as_u64() == Some(u64::from(usual)) => Ok(usual),
        other => Err(f.refuse(&format!("compress_rates.{name}"), other, usual.to_string())),
    };
    let (csa, hca) = (
        rate("compressed_sparse_attention", 4)?,
        rate("heavily_compressed_attention", 128)?,
    );
    let types = f.strings("layer_types", layers, "compress_ratios")?;
    let ratio = |(i, t): (usize, &str)| match t {
        "sliding_attention" => Ok(0),
        "compressed_sparse_attention" => Ok(csa),
        "heavily_compressed_attention" => Ok(hca),
        other => Err(ModelError::config(
            format!("layer_types[{i}]"),
            other,
            "an attention type of DeepSeek-V4",
        )),
    };
    types.into_iter().enumerate().map(ratio).collect()
}

/// `num_hash_layers`, or the leading `hash_moe` entries of `mlp_layer_types`.
fn hash_layers(f: &Fields<'_>, layers: u32) -> Result<u32, ModelError> {
    if f.value("num_hash_layers").is_some() || f.value("mlp_layer_types").is_none() {
        return f.int("num_hash_layers", 0..=4096);
    }
    let types = f.strings("mlp_layer_types", layers, "num_hash_layers")?;
    let count = types.iter().take_while(|t| **t == "hash_moe").count();
    match types
        .iter()
        .enumerate()
        .skip(count)
        .find(|(_, t)| **t != "moe")
    {
        Some((i, t)) => Err(ModelError::config(
            format!("mlp_layer_types[{i}]"),
            t,
            "hash_moe layers first, then moe",
        )),
        None => Ok(count as u32),
    }
}

/// A field of `rope_parameters.{group}`.
fn rope_group<'a>(f: &Fields<'a>, group: &str) -> Option<Fields<'a>> {
    f.value("rope_parameters")?
        .get(group)?
        .as_object()
        .map(Fields::new)
}

fn rope_theta(f: &Fields<'_>) -> Result<f64, ModelError> {
    match rope_group(f, "main") {
        Some(group) if group.value("rope_theta").is_some() => group.above_one("rope_theta"),
        _ => f.above_one("rope_theta"),
    }
}

fn compress_rope_theta(f: &Fields<'_>) -> Result<f64, ModelError> {
    match rope_group(f, "compress") {
        Some(group) if group.value("rope_theta").is_some() => group.above_one("rope_theta"),
        _ => f.above_one("compress_rope_theta"),
    }
}

fn rope_scaling(f: &Fields<'_>) -> Result<RopeScaling, ModelError> {
    let field = "rope_scaling";
    let group = match f.value(field) {
        Some(Value::Object(map)) => Fields::new(map),
        None | Some(Value::Null) => match (rope_group(f, "compress"), f.value("rope_parameters")) {
            (Some(group), _) => group,
            (None, Some(Value::Object(map))) => Fields::new(map),
            _ => return Err(f.refuse(field, None, "the YaRN parameters")),
        },
        other => return Err(f.refuse(field, other, "an object")),
    };
    match group.value("type").or_else(|| group.value("rope_type")) {
        Some(Value::String(t)) if t == "yarn" => {}
        other => return Err(f.refuse("rope_scaling.type", other, "\"yarn\"")),
    }
    Ok(RopeScaling {
        factor: group.positive("factor")?,
        original_max_position_embeddings: group
            .int("original_max_position_embeddings", 1..=1 << 28)?,
        beta_fast: group.positive("beta_fast")?,
        beta_slow: group.positive("beta_slow")?,
    })
}
