//! The fingerprint changes with every field that decides the shape or the meaning of a byte (I-15).
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used, missing_docs)]

use kvgate_kvcache::fingerprint::fingerprint_of;
use kvgate_kvcache::*;
use proptest::prelude::*;

fn schema(change: impl FnOnce(&mut V4Geometry, &mut Formats)) -> CacheSchema {
    let mut geometry = V4Geometry::flash();
    let mut formats = Formats::default();
    change(&mut geometry, &mut formats);
    CacheSchema::deepseek_v4(&geometry, &formats).unwrap()
}

#[test]
fn every_input_of_the_schema_is_in_it() {
    type Change = fn(&mut V4Geometry, &mut Formats);
    let changes: [(&str, Change); 20] = [
        ("layer_ratios", |g, _| g.layer_ratios[3] = 4),
        ("layer count", |g, _| g.layer_ratios.push(0)),
        ("head_dim", |g, f| {
            (f.latent, g.head_dim) = (LatentFormat::F32, 256);
        }),
        ("rope_dim", |g, f| {
            (f.latent, g.rope_dim) = (LatentFormat::F32, 32)
        }),
        ("index_head_dim", |g, f| {
            (f.index_k, g.index_head_dim) = (IndexKFormat::F32, 64)
        }),
        ("window_tokens", |g, _| g.window_tokens = 64),
        ("rope_theta", |g, _| g.rope_theta = 10_001.0),
        ("compress_rope_theta", |g, _| {
            g.compress_rope_theta = 160_001.0
        }),
        ("yarn.factor", |g, _| g.yarn.factor = 8.0),
        ("yarn.original", |g, _| {
            g.yarn.original_max_position_embeddings = 4_096
        }),
        ("yarn.beta_fast", |g, _| g.yarn.beta_fast = 31.0),
        ("yarn.beta_slow", |g, _| g.yarn.beta_slow = 2.0),
        ("drafting", |g, _| g.drafting = true),
        ("architecture", |g, _| g.architecture.push('x')),
        ("config_digest", |g, _| g.config_digest[31] = 1),
        ("weights_digest", |g, _| g.weights_digest[31] = 1),
        ("latent", |_, f| f.latent = LatentFormat::F32),
        ("index_k fp8", |_, f| f.index_k = IndexKFormat::Fp8),
        ("index_k f32", |_, f| f.index_k = IndexKFormat::F32),
        ("window_page", |_, f| f.window_page = WindowPage::P256),
    ];
    let base = schema(|_, _| {});
    let mut seen = vec![base.fingerprint()];
    for (name, change) in changes {
        let changed = schema(change);
        assert!(
            !seen.contains(&changed.fingerprint()),
            "{name} is not in the fingerprint"
        );
        seen.push(changed.fingerprint());
        let difference = base.first_difference(&changed.fields()).expect(name);
        assert_ne!(difference.ours, difference.theirs, "{name}");
        let other_way = changed.first_difference(&base.fields()).expect(name);
        assert_ne!(other_way.ours, other_way.theirs, "{name}");
    }
    assert_eq!(base.first_difference(&base.fields()), None);
}

#[test]
fn the_order_of_the_fields_does_not_matter_and_their_names_are_unique() {
    let fields = schema(|_, _| {}).fields();
    let mut turned = fields.clone();
    turned.reverse();
    assert_eq!(fingerprint_of(fields.clone()), fingerprint_of(turned));
    let mut names: Vec<&String> = fields.iter().map(|(name, _)| name).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), fields.len());
}

proptest! {
    /// Changing, removing or adding any one field changes the fingerprint and is found by name.
    #[test]
    fn any_field_counts(which in 0_usize..200, kind in 0..3) {
        let base = schema(|_, _| {});
        let mut fields = base.fields();
        let index = which % fields.len();
        let name = match kind {
            0 => {
                fields[index].1.push('1');
                fields[index].0.clone()
            }
            1 => fields.remove(index).0,
            _ => {
                fields.push(("other.field".to_owned(), "1".to_owned()));
                "other.field".to_owned()
            }
        };
        prop_assert_ne!(fingerprint_of(fields.clone()), base.fingerprint());
        prop_assert_eq!(base.first_difference(&fields).unwrap().field, name);
    }
}
