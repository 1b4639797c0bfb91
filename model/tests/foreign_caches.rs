//! Caches that were made for another model are refused by name, before a row of them is touched.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use kvgate_kvcache::{CacheSchema, V4Geometry};
use kvgate_model::{Logits, Model, ModelError, MonoCaches};

fn refusal(edit: impl FnOnce(&mut V4Geometry)) -> ModelError {
    let model = Model::tiny_v4(1).unwrap();
    let mut geometry = model.config().geometry(model.weights().digest());
    edit(&mut geometry);
    let schema = CacheSchema::deepseek_v4(&geometry, &F32).unwrap();
    let mut caches = MonoCaches::new(&schema, 16).unwrap();
    let forward = model.forward(&[1; 9], 0, &mut caches, Logits::Last, None);
    forward.unwrap_err()
}

#[test]
fn rows_of_another_width_are_refused_with_both_widths() {
    let head = refusal(|geometry| geometry.head_dim *= 2).to_string();
    assert!(head.contains("channels, expected"), "{head}");
    let index = refusal(|geometry| geometry.index_head_dim *= 2).to_string();
    assert!(index.contains("index_k"), "{index}");
    assert!(index.contains("channels, expected"), "{index}");
}

#[test]
fn layers_without_the_component_of_the_model_are_refused() {
    let error = refusal(|geometry| {
        let of_index = |ratio: &u32| *ratio == 4;
        let layer = geometry.layer_ratios.iter().position(of_index).unwrap();
        geometry.layer_ratios[layer] = 0;
    });
    let text = error.to_string();
    assert!(text.contains("lacks this component"), "{text}");
}
