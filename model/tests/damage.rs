//! Negative controls: a damaged state or a wrong constant moves the logits, and by how much at least.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use kvgate_model::safetensors::SafetensorsFile;
use kvgate_model::{Config, DecodeState, Model, Weights};
use serde_json::{Value, json};

/// Rows of a tensor of the state.
type Rows<'a> = (&'a str, std::ops::Range<usize>);

const STATE_TOKENS: usize = 131;

/// Continues prompt a from the stored state with rows of one tensor zeroed, token by token.
fn resume(name: &str, model: &Model, damaged: &[Rows<'_>]) -> Vec<f32> {
    let mut tensors = SafetensorsFile::open(&fixture(name).join("handoff.safetensors"))
        .unwrap()
        .read_all()
        .unwrap();
    for (tensor, rows) in damaged {
        let tensor = tensors.get_mut(*tensor).unwrap();
        let row_bytes = tensor.bytes.len() / tensor.shape[0];
        let part = &mut tensor.bytes[rows.start * row_bytes..rows.end * row_bytes];
        assert!(part.iter().any(|b| *b != 0), "a live row");
        part.fill(0);
    }
    let ids = ids_of(fixture(name).join("golden.safetensors"), "a.ids");
    let state = DecodeState::from_tensors(tensors, model).unwrap();
    let mut caches = caches(model, &F32, ids.len());
    state.store(model, &mut caches).unwrap();
    let ends: Vec<usize> = (STATE_TOKENS + 1..=ids.len()).collect();
    run(model, &mut caches, &ids, STATE_TOKENS, &ends)
}

/// First position at which the logits differ by more than `limit`.
fn first_change(a: &[f32], b: &[f32], vocabulary: usize, limit: f32) -> Option<usize> {
    let rows = a.chunks(vocabulary).zip(b.chunks(vocabulary));
    rows.enumerate()
        .find(|(_, (a, b))| max_change(a, b) > limit)
        .map(|(i, _)| STATE_TOKENS + i)
}

fn check(name: &str, window: usize, weakest: [f32; 6]) {
    let model = Model::load(&fixture(name)).unwrap();
    let want = resume(name, &model, &[]);
    let change = |damaged: &[Rows<'_>]| {
        let got = resume(name, &model, damaged);
        (
            max_change(&want, &got),
            first_change(&want, &got, 160, 1e-5),
        )
    };
    let cases: [(&[Rows<'_>], usize); 6] = [
        (&[("layers.1.index.entries", 0..16)], 131),
        (&[("layers.1.index.entries", 31..32)], 150),
        (&[("layers.1.comp.overlap_kv", 0..1)], 132),
        (&[("layers.1.comp.open_gate", 1..2)], 132),
        (&[("layers.1.window_kv", 1..2)], 131),
        (&[("layers.2.comp.open_kv", 1..2)], 255),
    ];
    for ((damaged, latest), least) in cases.iter().zip(weakest) {
        let (size, first) = change(damaged);
        println!("{name} {damaged:?}: {size} from {first:?}");
        assert!(
            size > least,
            "{name} {damaged:?} changes the logits by {size} only"
        );
        assert!(
            first.is_some_and(|f| f <= *latest),
            "{name} {damaged:?} is first seen at {first:?}"
        );
    }
    let (_, open_c128) = change(&[("layers.2.comp.open_kv", 1..2)]);
    assert_eq!(
        open_c128,
        Some(255),
        "an open ratio-128 row is read when its group closes"
    );
    let oldest = resume(name, &model, &[("layers.1.window_kv", 0..1)]);
    assert!(
        bits(&oldest) == bits(&want),
        "row N-W of a window of {window} is never read"
    );
}

#[test]
fn damaged_states_of_basic() {
    check("basic", 16, [0.3, 0.1, 0.1, 0.1, 0.1, 0.05]);
}

#[test]
fn damaged_states_of_realhead() {
    check("realhead", 64, [0.1, 0.01, 0.01, 0.01, 0.005, 0.002]);
}

/// Largest change of the logits of 200 tokens of basic under another configuration.
fn with_config(change: impl Fn(&mut Value)) -> f32 {
    let dir = fixture("basic");
    let mut json: Value =
        serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    change(&mut json);
    let config = Config::from_json(&json).unwrap();
    let weights = Weights::load(&dir, &config).unwrap();
    deviation(&Model::new(config, weights))
}

/// The same with edited weights.
fn with_weights(change: impl Fn(&str, &mut Vec<f32>)) -> f32 {
    use kvgate_model::safetensors::{Tensor, write_tensors};
    let (from, to) = (fixture("basic"), tempfile::tempdir().unwrap());
    std::fs::copy(from.join("config.json"), to.path().join("config.json")).unwrap();
    let mut tensors = SafetensorsFile::open(&from.join("model.safetensors"))
        .unwrap()
        .read_all()
        .unwrap();
    for (name, tensor) in &mut tensors {
        if let Some(mut values) = tensor.to_f32() {
            change(name, &mut values);
            *tensor = Tensor::f32(&tensor.shape.clone(), &values);
        }
    }
    write_tensors(&to.path().join("model.safetensors"), &tensors).unwrap();
    deviation(&Model::load(to.path()).unwrap())
}

fn deviation(model: &Model) -> f32 {
    let golden = fixture("basic").join("golden.safetensors");
    let ids = ids_of(golden.clone(), "a.ids")[..200].to_vec();
    let want = floats_of(golden, "a.logits");
    let got = run(model, &mut caches(model, &F32, 200), &ids, 0, &[200]);
    max_change(&got, &want[..got.len()])
}

#[test]
fn wrong_constants_are_seen() {
    assert!(with_config(|_| ()) < 2e-5);
    let table: [(&str, f32, f32); 6] = [
        (
            "clip off",
            with_config(|c| c["swiglu_limit"] = json!(1e9)),
            5.4,
        ),
        (
            "top-k unlimited",
            with_config(|c| c["index_topk"] = json!(100_000)),
            3.2,
        ),
        (
            "YaRN factor 1",
            with_config(|c| c["rope_scaling"]["factor"] = json!(1)),
            2.9,
        ),
        (
            "window W-1",
            with_config(|c| c["sliding_window"] = json!(15)),
            3.1,
        ),
        (
            "3 sinkhorn iterations",
            with_config(|c| c["hc_sinkhorn_iters"] = json!(3)),
            1.8,
        ),
        (
            "19 sinkhorn iterations",
            with_config(|c| c["hc_sinkhorn_iters"] = json!(19)),
            2.9e-4,
        ),
    ];
    for (name, got, reference) in table {
        assert!(
            (got / reference - 1.0).abs() < 0.1,
            "{name}: {got}, reference implementation {reference}"
        );
    }
}

#[test]
fn wrong_weights_are_seen() {
    assert!(with_weights(|_, _| ()) < 2e-5);
    let edit = |end: &'static str, f: fn(&mut f32)| {
        with_weights(move |name, values| {
            if name.ends_with(end) {
                values.iter_mut().for_each(f);
            }
        })
    };
    let table = [
        ("sink off", edit("attn_sink", |v| *v -= 1e4), 2.8),
        ("gate bias ignored", edit("gate.bias", |v| *v = 0.0), 1.5),
    ];
    for (name, got, reference) in table {
        assert!(
            (got / reference - 1.0).abs() < 0.1,
            "{name}: {got}, reference implementation {reference}"
        );
    }
}
