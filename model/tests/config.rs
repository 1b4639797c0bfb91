//! Configurations from outside: what is accepted, and how the rest is refused.
#![allow(clippy::unwrap_used)]

mod common;

use common::small_config;
use kvgate_model::{Config, ErrorKind};
use serde_json::{Value, json};

fn tiny() -> Value {
    Config::tiny_v4().to_json()
}

/// Field and value of the refusal of a changed tiny-v4.
fn refused(change: impl FnOnce(&mut Value)) -> (String, String) {
    let mut json = tiny();
    change(&mut json);
    match Config::from_json(&json)
        .expect_err("must be refused")
        .kind()
    {
        ErrorKind::Config { field, value, .. } => (field.clone(), value.clone()),
        other => panic!("{other:?}"),
    }
}

fn pair(field: &str, value: &str) -> (String, String) {
    (field.to_owned(), value.to_owned())
}

#[test]
fn what_is_written_reads_back() {
    for config in [Config::tiny_v4(), small_config()] {
        assert_eq!(Config::from_json(&config.to_json()).unwrap(), config);
    }
}

#[test]
fn other_architectures_are_refused() {
    assert_eq!(
        refused(|c| c["model_type"] = json!("deepseek_v41")),
        pair("model_type", "\"deepseek_v41\"")
    );
    assert_eq!(
        refused(|c| drop(c.as_object_mut().unwrap().remove("model_type"))),
        pair("model_type", "missing")
    );
    assert_eq!(
        refused(|c| c["architectures"] = json!(["LlamaForCausalLM"])).0,
        "architectures"
    );
    assert_eq!(
        refused(|c| c["num_key_value_heads"] = json!(2)),
        pair("num_key_value_heads", "2")
    );
    assert_eq!(
        refused(|c| c["scoring_func"] = json!("softmax")).0,
        "scoring_func"
    );
    assert_eq!(
        refused(|c| c["tie_word_embeddings"] = json!(true)).0,
        "tie_word_embeddings"
    );
}

#[test]
fn ratios_are_checked_by_layer() {
    assert_eq!(
        refused(|c| c["compress_ratios"][3] = json!(2)),
        pair("compress_ratios[3]", "2")
    );
    assert_eq!(
        refused(|c| c["compress_ratios"] = json!([0, 4, 128])),
        pair("compress_ratios", "a list of 3 entries")
    );
    assert_eq!(
        refused(|c| c["compress_ratios"][0] = json!("4")),
        pair("compress_ratios[0]", "\"4\"")
    );
    let mut longer = tiny();
    longer["compress_ratios"] = json!([0, 4, 128, 4, 128, 4, 0, 0, 0]);
    assert_eq!(Config::from_json(&longer).unwrap(), Config::tiny_v4());
    longer["compress_ratios"] = json!([0, 4, 128, 4, 128, 4]);
    assert_eq!(
        Config::from_json(&longer).unwrap(),
        Config::tiny_v4(),
        "an absent draft entry is 0"
    );
}

#[test]
fn impossible_sizes_are_refused() {
    for (field, value) in [
        ("hidden_size", json!(0)),
        ("hidden_size", json!(1u64 << 40)),
        ("num_attention_heads", json!(-4)),
        ("num_hidden_layers", json!(0)),
        ("num_hidden_layers", json!(1_000_000)),
        ("head_dim", json!(12.5)),
        ("sliding_window", json!(null)),
        ("index_topk", json!("32")),
        ("hc_mult", json!(0)),
        ("qk_rope_head_dim", json!(63)),
        ("qk_rope_head_dim", json!(130)),
        ("o_groups", json!(3)),
        ("num_experts_per_tok", json!(9)),
        ("n_routed_experts", json!(65_536)),
        ("rms_norm_eps", json!(-1.0)),
        ("swiglu_limit", json!(0.0)),
        ("rope_theta", json!(1.0)),
        ("routed_scaling_factor", json!(1e300)),
        ("max_position_embeddings", json!([])),
    ] {
        let shown = if value.is_null() {
            "missing".to_owned()
        } else {
            value.to_string()
        };
        assert_eq!(refused(|c| c[field] = value), pair(field, &shown));
    }
    assert_eq!(
        refused(|c| c["rope_scaling"]["type"] = json!("linear")).0,
        "rope_scaling.type"
    );
    assert_eq!(
        refused(|c| c["rope_scaling"] = json!(null)).0,
        "rope_scaling"
    );
    assert_eq!(refused(|c| *c = json!([])).0, "config.json");
}

#[test]
fn every_field_is_needed() {
    let written = serde_json::to_value(Config::tiny_v4()).unwrap();
    for field in written.as_object().unwrap().keys() {
        let mut json = tiny();
        json.as_object_mut().unwrap().remove(field);
        match Config::from_json(&json) {
            Ok(config) => assert_eq!(
                (field.as_str(), config),
                ("num_nextn_predict_layers", Config::tiny_v4())
            ),
            Err(e) => assert_eq!(e.field(), Some(field.as_str())),
        }
    }
}

#[test]
fn files_written_by_transformers_are_read() {
    let mut json = tiny();
    let map = json.as_object_mut().unwrap();
    for legacy in [
        "compress_ratios",
        "num_hash_layers",
        "qk_rope_head_dim",
        "rope_scaling",
        "rope_theta",
        "compress_rope_theta",
    ] {
        map.remove(legacy);
    }
    map.insert("partial_rotary_factor".into(), json!(0.125));
    map.insert(
        "layer_types".into(),
        json!([
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention"
        ]),
    );
    map.insert(
        "compress_rates".into(),
        json!({"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}),
    );
    map.insert(
        "mlp_layer_types".into(),
        json!(["hash_moe", "moe", "moe", "moe", "moe", "moe"]),
    );
    map.insert(
        "rope_parameters".into(),
        json!({
            "main": {"rope_type": "default", "rope_theta": 10000.0},
            "compress": {"rope_type": "yarn", "rope_theta": 160000.0, "factor": 16, "beta_fast": 32, "beta_slow": 1,
                         "original_max_position_embeddings": 65536, "attention_factor": 1.0},
        }),
    );
    assert_eq!(Config::from_json(&json).unwrap(), Config::tiny_v4());
    json["mlp_layer_types"][3] = json!("hash_moe");
    assert_eq!(
        Config::from_json(&json).unwrap_err().field(),
        Some("mlp_layer_types[3]")
    );
}

#[test]
fn the_digest_covers_every_field() {
    let tiny = Config::tiny_v4();
    let other = Config {
        index_topk: 33,
        ..tiny.clone()
    };
    assert_ne!(tiny.digest(), other.digest());
    assert_ne!(
        tiny.digest(),
        Config {
            hc_eps: 2e-6,
            ..tiny.clone()
        }
        .digest()
    );
    assert_eq!(tiny.digest(), Config::tiny_v4().digest());
}
