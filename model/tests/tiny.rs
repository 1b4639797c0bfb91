//! The built-in model: written and loaded it is the same, and every part of its state matters.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use kvgate_kvcache::Formats;
use kvgate_model::safetensors::SafetensorsFile;
use kvgate_model::{Config, DecodeState, Logits, Model, Probe, dump_generated};

#[test]
fn a_dumped_model_loads_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    dump_generated(dir.path(), &Config::tiny_v4(), 5).unwrap();
    let (built_in, loaded) = (Model::tiny_v4(5).unwrap(), Model::load(dir.path()).unwrap());
    assert_eq!(loaded.config(), built_in.config());
    assert_eq!(loaded.config().digest(), built_in.config().digest());
    assert_eq!(loaded.weights().digest(), built_in.weights().digest());
    let ids = noise_ids(40, 320, 1);
    let run = |m: &Model| {
        bits(&run(
            m,
            &mut caches(m, &Formats::default(), 40),
            &ids,
            0,
            &[40],
        ))
    };
    assert!(run(&loaded) == run(&built_in));
    let file = SafetensorsFile::open(&dir.path().join("model.safetensors")).unwrap();
    assert!(file.tensors().keys().all(|n| !n.starts_with("mtp.")));
    let text = std::fs::read_to_string(dir.path().join("config.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        json["compress_ratios"],
        serde_json::json!([0, 4, 128, 4, 128, 4, 0])
    );
}

#[test]
fn seeds_differ_and_repeat() {
    let digest = |seed| Model::tiny_v4(seed).unwrap().weights().digest();
    assert_eq!(digest(1), digest(1));
    assert_ne!(digest(1), digest(2));
}

/// What a run of tiny-v4 looks like from inside.
#[derive(Default)]
struct Life {
    experts: std::collections::BTreeSet<(u16, u32)>,
    selections: std::collections::BTreeSet<(u16, Vec<u32>)>,
}

impl Probe for Life {
    fn row(&mut self, layer: u16, name: &'static str, position: u32, values: &[f32]) {
        let ids: Vec<u32> = values.iter().map(|v| *v as u32).collect();
        match name {
            "ffn.expert_idx" => self.experts.extend(ids.iter().map(|e| (layer, *e))),
            "attn.indexer.selected" if position >= 400 => {
                self.selections.insert((layer, ids));
            }
            _ => assert!(
                values.iter().all(|v| v.is_finite()),
                "layer {layer} {name} at {position}"
            ),
        }
    }
}

#[test]
fn routing_selection_and_logits_are_lively() {
    for seed in 1..4 {
        let model = Model::tiny_v4(seed).unwrap();
        let ids = noise_ids(450, 320, seed);
        let mut life = Life::default();
        let mut caches = caches(&model, &Formats::default(), 450);
        let logits = model
            .forward(&ids, 0, &mut caches, Logits::All, Some(&mut life))
            .unwrap();
        assert_eq!(
            life.experts.len(),
            6 * 8,
            "every expert of every layer is used"
        );
        assert!(
            life.selections.len() > 140,
            "selections differ from token to token: {}",
            life.selections.len()
        );
        let mean = logits.iter().sum::<f32>() / logits.len() as f32;
        let spread =
            (logits.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / logits.len() as f32).sqrt();
        assert!((0.5..2.0).contains(&spread), "spread {spread}");
        let tops: std::collections::BTreeSet<usize> = logits
            .chunks(320)
            .map(|row| (0..320).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap())
            .collect();
        assert!(
            tops.len() > 60,
            "different tokens are predicted: {}",
            tops.len()
        );
    }
}

/// A zeroed part of the state after 403 tokens changes the logits of the next 120 tokens.
#[test]
fn every_component_matters() {
    let model = Model::tiny_v4(1).unwrap();
    let ids = noise_ids(523, 320, 8);
    let mut start = caches(&model, &F32, 523);
    run(&model, &mut start, &ids, 0, &[403]);
    let state = DecodeState::read(&model, &mut start, 403).unwrap();
    let go_on = |damaged: Option<&str>| {
        let mut tensors = state.tensors().clone();
        if let Some(name) = damaged {
            let bytes = &mut tensors.get_mut(name).unwrap().bytes;
            assert!(bytes.iter().any(|b| *b != 0));
            bytes.fill(0);
        }
        let mut caches = caches(&model, &F32, 523);
        state
            .with_tensors(tensors)
            .store(&model, &mut caches)
            .unwrap();
        let ends: Vec<usize> = (404..=523).collect();
        run(&model, &mut caches, &ids, 403, &ends)
    };
    let want = go_on(None);
    let whole = run(&model, &mut caches(&model, &F32, 523), &ids, 0, &[403, 523]);
    assert!(
        bits(&want) == bits(&whole[403 * 320..]),
        "a state that was read and stored again"
    );
    for name in state.tensors().keys() {
        let change = max_change(&want, &go_on(Some(name)));
        assert!(
            change > 1e-3,
            "{name} zeroed changes the logits by {change}"
        );
    }
}
