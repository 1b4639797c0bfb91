//! Checkpoints from outside: every defect is an error that names the tensor, field or file.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::*;
use kvgate_model::safetensors::{Dtype, SafetensorsFile, Tensor, write_tensors};
use kvgate_model::{Config, ErrorKind, Model, ModelError, Weights, dump_generated};
use proptest::prelude::*;
use serde_json::{Value, json};

type Tensors = BTreeMap<String, Tensor>;

fn good() -> (tempfile::TempDir, Tensors) {
    let dir = tempfile::tempdir().unwrap();
    dump_generated(dir.path(), &small_config(), 2).unwrap();
    let tensors = SafetensorsFile::open(&dir.path().join("model.safetensors"))
        .unwrap()
        .read_all()
        .unwrap();
    (dir, tensors)
}

/// Loads a changed copy of a good checkpoint.
fn load_with(change: impl FnOnce(&mut Tensors)) -> Result<Model, ModelError> {
    let (dir, mut tensors) = good();
    change(&mut tensors);
    write_tensors(&dir.path().join("model.safetensors"), &tensors).unwrap();
    Model::load(dir.path())
}

fn refused(change: impl FnOnce(&mut Tensors)) -> ModelError {
    load_with(change).expect_err("the change must be refused")
}

fn rename(tensors: &mut Tensors, name: impl Fn(&str) -> String) {
    *tensors = std::mem::take(tensors)
        .into_iter()
        .map(|(n, t)| (name(&n), t))
        .collect();
}

const WQ_A: &str = "layers.1.attn.wq_a.weight";

#[test]
fn missing_unknown_and_mis_shaped_tensors_are_named() {
    let e = refused(|t| drop(t.remove(WQ_A)));
    assert!(
        matches!(e.kind(), ErrorKind::TensorMissing { name } if name == WQ_A),
        "{e}"
    );
    let e = refused(|t| {
        drop(t.insert(
            "layers.0.attn.indexer.wq_b.weight".into(),
            Tensor::f32(&[1], &[0.0]),
        ))
    });
    assert!(
        matches!(e.kind(), ErrorKind::TensorUnknown { .. }),
        "a ratio-128 layer has no indexer: {e}"
    );
    assert!(e.to_string().contains("layers.0.attn.indexer.wq_b.weight"));
    let e = refused(|t| drop(t.insert(WQ_A.into(), Tensor::f32(&[12, 6], &[0.0; 72]))));
    let shape = matches!(e.kind(), ErrorKind::TensorShape { name, got, expected }
        if name == WQ_A && *got == [12, 6] && *expected == [6, 12]);
    assert!(shape, "{e}");
    assert_eq!(
        (e.field(), e.value().as_deref()),
        (Some(WQ_A), Some("[12, 6]"))
    );
}

#[test]
fn packed_weights_are_refused_by_name() {
    for (dtype, bytes) in [
        (Dtype::F8E4M3, 72),
        (Dtype::I8, 72),
        (Dtype::U8, 72),
        (Dtype::F16, 144),
    ] {
        let e = refused(|t| {
            t.insert(
                WQ_A.into(),
                Tensor {
                    dtype,
                    shape: vec![6, 12],
                    bytes: vec![0; bytes],
                },
            );
        });
        assert!(
            matches!(e.kind(), ErrorKind::TensorDtype { name, .. } if name == WQ_A),
            "{e}"
        );
        assert!(e.to_string().contains(dtype.name()), "{e}");
    }
    let e = refused(|t| {
        t.insert(
            "layers.1.attn.wq_a.scale".into(),
            Tensor {
                dtype: Dtype::F8E8M0,
                shape: vec![1, 1],
                bytes: vec![0],
            },
        );
    });
    assert!(matches!(e.kind(), ErrorKind::TensorDtype { .. }), "{e}");
    let e = refused(|t| {
        t.insert(
            "layers.0.ffn.gate.tid2eid".into(),
            Tensor::f32(&[20, 2], &[0.0; 40]),
        );
    });
    assert_eq!(e.field(), Some("layers.0.ffn.gate.tid2eid"));
}

#[test]
fn values_outside_their_range_are_refused() {
    let e =
        refused(|t| t.get_mut("norm.weight").unwrap().bytes[0..2].copy_from_slice(&[0x80, 0x7F]));
    assert!(
        matches!(e.kind(), ErrorKind::TensorValue { name, .. } if name == "norm.weight"),
        "{e}"
    );
    let e = refused(|t| {
        t.insert(
            "layers.0.ffn.gate.tid2eid".into(),
            Tensor::i64(&[20, 2], &[3; 40]),
        );
    });
    assert_eq!(e.value().as_deref(), Some("3"), "{e}");
}

#[test]
fn names_of_the_converter_are_accepted() {
    let (dir, _) = good();
    let digest = Model::load(dir.path()).unwrap().weights().digest();
    let alias = |n: &str| {
        let n = n.replace(".attn.", ".self_attn.").replace(".ffn.", ".mlp.");
        format!(
            "model.{}",
            n.replace("gate.bias", "gate.e_score_correction_bias")
        )
    };
    let loaded = load_with(|t| rename(t, alias)).unwrap();
    assert_eq!(loaded.weights().digest(), digest);
    let e = refused(|t| {
        let copy = t[WQ_A].clone();
        t.insert(format!("model.{WQ_A}"), copy);
    });
    assert!(
        matches!(e.kind(), ErrorKind::TensorDuplicate { name } if name == WQ_A),
        "{e}"
    );
}

#[test]
fn bf16_and_f32_storage_of_the_same_values_compute_the_same() {
    let (dir, _) = good();
    let widened = load_with(|t| {
        for tensor in t.values_mut() {
            if let Some(values) = tensor.to_f32() {
                *tensor = Tensor::f32(&tensor.shape.clone(), &values);
            }
        }
    });
    let ids = noise_ids(30, 20, 3);
    let logits = |m: &Model| bits(&run(m, &mut caches(m, &F32, 30), &ids, 0, &[30]));
    assert_eq!(
        logits(&widened.unwrap()),
        logits(&Model::load(dir.path()).unwrap())
    );
}

/// Splits a checkpoint into two shards with an index.
fn shard(dir: &Path, tensors: &Tensors, edit: impl FnOnce(&mut Value)) {
    std::fs::remove_file(dir.join("model.safetensors")).unwrap();
    let mut map = serde_json::Map::new();
    for half in 0..2 {
        let file = format!("model-0000{}-of-00002.safetensors", half + 1);
        let part: Tensors = tensors
            .iter()
            .enumerate()
            .filter(|(i, _)| i % 2 == half)
            .map(|(_, (n, t))| (n.clone(), t.clone()))
            .collect();
        map.extend(part.keys().map(|n| (n.clone(), json!(file))));
        write_tensors(&dir.join(file), &part).unwrap();
    }
    let mut index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    edit(&mut index);
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

#[test]
fn shards_equal_the_single_file() {
    let (dir, tensors) = good();
    let digest = Model::load(dir.path()).unwrap().weights().digest();
    shard(dir.path(), &tensors, |_| ());
    assert_eq!(Model::load(dir.path()).unwrap().weights().digest(), digest);
}

#[test]
fn a_wrong_index_is_refused() {
    let refused = |edit: &dyn Fn(&mut Value)| {
        let (dir, tensors) = good();
        shard(dir.path(), &tensors, |index| edit(index));
        Model::load(dir.path())
            .expect_err("the index must be refused")
            .to_string()
    };
    let e = refused(&|i| i["weight_map"][WQ_A] = json!("../model-00001-of-00002.safetensors"));
    assert!(e.contains("plain file name"), "{e}");
    let e = refused(&|i| i["weight_map"][WQ_A] = json!("absent.safetensors"));
    assert!(e.contains("absent.safetensors"), "{e}");
    let e = refused(&|i| drop(i["weight_map"].as_object_mut().unwrap().remove(WQ_A)));
    assert!(e.contains(WQ_A) && e.contains("not in the index"), "{e}");
    let e = refused(&|i| i["weight_map"]["layers.9.x"] = json!("model-00001-of-00002.safetensors"));
    assert!(e.contains("layers.9.x"), "{e}");
    let e = refused(&|i| *i = json!({"weight_map": 3}));
    assert!(e.contains("index"), "{e}");
}

#[test]
fn draft_blocks_are_checked_but_not_loaded() {
    let with_drafts = |count: u32, name: &str, shape: &[usize]| {
        let (dir, mut tensors) = good();
        let plain = Model::load(dir.path()).unwrap().weights().digest();
        let config = Config {
            num_nextn_predict_layers: count,
            ..small_config()
        };
        std::fs::write(dir.path().join("config.json"), config.to_json().to_string()).unwrap();
        tensors.insert(
            name.into(),
            Tensor::f32(shape, &vec![0.5; shape.iter().product()]),
        );
        write_tensors(&dir.path().join("model.safetensors"), &tensors).unwrap();
        Model::load(dir.path()).map(|m| assert_eq!(m.weights().digest(), plain))
    };
    with_drafts(1, "mtp.0.e_proj.weight", &[12, 12]).unwrap();
    with_drafts(1, "mtp.0.embed.weight", &[1, 1]).unwrap();
    let e = with_drafts(1, "mtp.0.e_proj.weight", &[12, 11]).unwrap_err();
    assert_eq!(e.field(), Some("mtp.0.e_proj.weight"));
    let e = with_drafts(0, "mtp.0.e_proj.weight", &[12, 12]).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::TensorUnknown { .. }), "{e}");
    let e = with_drafts(1, "mtp.0.attn.compressor.ape", &[4, 20]).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::TensorUnknown { .. }), "{e}");
}

#[test]
fn damaged_files_are_refused() {
    let (dir, _) = good();
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let header_end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let corrupt = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let e = Model::load(dir.path()).expect_err("a damaged file");
        assert!(
            matches!(e.kind(), ErrorKind::Corrupt { path, .. } if path.ends_with("model.safetensors")),
            "{e}"
        );
        e.to_string()
    };
    assert!(corrupt(&bytes[..bytes.len() - 1]).contains("truncated"));
    corrupt(&bytes[..header_end]);
    corrupt(&bytes[..header_end - 5]);
    corrupt(&bytes[..7]);
    corrupt(&[]);
    corrupt(&[&bytes[..], &[0]].concat());
    corrupt(&[&u64::MAX.to_le_bytes()[..], &bytes[8..]].concat());
    let mut broken = bytes.clone();
    broken[8] = b'x';
    corrupt(&broken);
    let header = |text: &str, data: usize| {
        [
            &(text.len() as u64).to_le_bytes()[..],
            text.as_bytes(),
            &vec![0; data],
        ]
        .concat()
    };
    let e = corrupt(&header(
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
        8,
    ));
    assert!(e.contains("twice"), "{e}");
    let e = corrupt(&header(
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
        8,
    ));
    assert!(e.contains("begins at byte 4"), "{e}");
    let e = corrupt(&header(
        r#"{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}"#,
        0,
    ));
    assert!(e.contains("shape"), "{e}");
    let e = corrupt(&header(
        r#"{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}"#,
        4,
    ));
    assert!(e.contains("F99"), "{e}");
    corrupt(&header(
        r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#,
        4,
    ));
    corrupt(&header(r#"[]"#, 0));
}

#[test]
fn an_absent_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let e = Model::load(dir.path()).unwrap_err();
    assert!(
        matches!(e.kind(), ErrorKind::Io { path } if path.ends_with("config.json")),
        "{e}"
    );
    std::fs::write(dir.path().join("config.json"), "{").unwrap();
    let e = Model::load(dir.path()).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Corrupt { .. }), "{e}");
    std::fs::write(
        dir.path().join("config.json"),
        small_config().to_json().to_string(),
    )
    .unwrap();
    let e = Model::load(dir.path()).unwrap_err();
    assert!(
        matches!(e.kind(), ErrorKind::Io { path } if path.ends_with("model.safetensors")),
        "{e}"
    );
}

#[test]
fn calls_outside_vocabulary_or_context_are_refused() {
    let config = small_config();
    let model = Model::new(config.clone(), Weights::generate(&config, 1).unwrap());
    let mut caches = caches(&model, &F32, 10);
    let mut call = |ids: &[u32], start| {
        model.forward(ids, start, &mut caches, kvgate_model::Logits::Last, None)
    };
    assert_eq!(call(&[20], 0).unwrap_err().field(), Some("token id"));
    assert_eq!(
        call(&[1], 1024).unwrap_err().field(),
        Some("last position + 1")
    );
    assert!(call(&[], 0).unwrap().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Random damage gives an error or a model, never a panic.
    #[test]
    fn random_damage_never_panics(places in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let (dir, _) = good();
        let path = dir.path().join("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        let header_end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for (place, value) in places {
            bytes[place.index(header_end)] = value;
        }
        std::fs::write(&path, bytes).unwrap();
        let _outcome = Model::load(dir.path());
    }
}
