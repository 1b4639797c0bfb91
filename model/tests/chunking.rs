//! The same bits for every chunking: logits and every row that a later call or a peer reads.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use kvgate_kernels::Isa;
use kvgate_kvcache::{Component, Formats, LayerId};
use kvgate_model::{Config, DecodeState, LayerCaches, Model, MonoCaches, Weights};

/// Compares logits and final rows of several chunkings with the first one.
fn assert_equal(model: &Model, formats: &Formats, ids: &[u32], chunkings: &[Vec<usize>]) {
    let mut reference = None;
    for ends in chunkings {
        let mut caches = caches(model, formats, ids.len());
        let logits = bits(&run(model, &mut caches, ids, 0, ends));
        let rows = DecodeState::read(model, &mut caches, ids.len() as u32).unwrap();
        let rows: Vec<_> = rows
            .tensors()
            .iter()
            .map(|(n, t)| (n.clone(), t.bytes.clone()))
            .collect();
        match &reference {
            None => reference = Some((logits, rows)),
            Some((want_logits, want_rows)) => {
                assert!(
                    logits == *want_logits,
                    "logits of {formats:?} in calls that end at {:?}",
                    &ends[..4.min(ends.len())]
                );
                for (got, want) in rows.iter().zip(want_rows) {
                    assert!(got == want, "{} of {formats:?}", got.0);
                }
            }
        }
    }
}

fn ends_of(total: usize, step: usize) -> Vec<usize> {
    let mut ends: Vec<usize> = (step..total).step_by(step).collect();
    ends.push(total);
    ends
}

#[test]
fn tiny_v4_in_every_format() {
    let model = Model::tiny_v4(3).unwrap();
    // Past the window ring of 512 rows, two groups of 128 and a page end inside; sparse from 131 on.
    let ids = noise_ids(530, 320, 4);
    for formats in all_formats() {
        let chunkings = [ends_of(530, 530), ends_of(530, 256), ends_of(530, 97)];
        assert_equal(&model, &formats, &ids, &chunkings);
    }
}

#[test]
fn tiny_v4_token_by_token() {
    let model = Model::tiny_v4(3).unwrap();
    let ids = noise_ids(300, 320, 5);
    for formats in [Formats::default(), F32] {
        assert_equal(
            &model,
            &formats,
            &ids,
            &[
                ends_of(300, 300),
                ends_of(300, 1),
                vec![127, 128, 129, 255, 257, 300],
            ],
        );
    }
}

#[test]
fn fixture_models() {
    for name in ["basic", "realhead"] {
        let model = Model::load(&fixture(name)).unwrap();
        let ids = ids_of(fixture(name).join("golden.safetensors"), "a.ids");
        let total = ids.len();
        assert_equal(
            &model,
            &F32,
            &ids,
            &[
                ends_of(total, total),
                ends_of(total, 1),
                vec![50, 51, 133, total],
            ],
        );
    }
}

/// Windows that are shorter, longer and not a multiple of a page; first layers that compress.
#[test]
fn odd_windows() {
    for window in [1, 7, 255, 256, 257, 300] {
        let config = Config {
            sliding_window: window,
            ..small_config()
        };
        let model = Model::new(config.clone(), Weights::generate(&config, 9).unwrap());
        let ids = noise_ids(1000, config.vocab_size, 6);
        assert_equal(
            &model,
            &F32,
            &ids,
            &[ends_of(1000, 1000), ends_of(1000, 1), ends_of(1000, 333)],
        );
    }
}

/// Fills every row of the caches with bytes that decode to NaN in every format.
fn poison(model: &Model, caches: &mut MonoCaches) {
    for layer in 0..model.config().num_hidden_layers as u16 {
        let view = caches.layer(LayerId(layer)).unwrap();
        for component in Component::ALL {
            let Some(mut rows) = view.component(component) else {
                continue;
            };
            let image = vec![0xFF; rows.row_image_bytes()];
            for page in 0..rows.table().len() as u32 {
                for row in 0..rows.rows_per_page() {
                    let entry = page.wrapping_mul(rows.entries_per_page()).wrapping_add(row);
                    rows.write_row(entry, &image).unwrap();
                }
            }
        }
    }
}

/// No row is read that this sequence has not written.
#[test]
fn rows_of_a_former_owner_are_never_read() {
    let model = Model::tiny_v4(2).unwrap();
    let ids = noise_ids(600, 320, 11);
    for formats in [Formats::default(), F32] {
        for ends in [ends_of(600, 200), ends_of(600, 600)] {
            let run_in = |is_poisoned: bool| {
                let mut caches = caches(&model, &formats, ids.len());
                if is_poisoned {
                    poison(&model, &mut caches);
                }
                bits(&run(&model, &mut caches, &ids, 0, &ends))
            };
            assert!(run_in(true) == run_in(false), "{formats:?}");
        }
    }
}

#[test]
fn every_instruction_set() {
    let ids = noise_ids(150, 320, 7);
    let run_with = |isa| {
        let model = Model::tiny_v4(1).unwrap().with_isa(isa);
        assert_eq!(model.isa(), isa);
        let mut caches = caches(&model, &Formats::default(), ids.len());
        bits(&run(&model, &mut caches, &ids, 0, &[100, 149, 150]))
    };
    let scalar = run_with(Isa::Scalar);
    for isa in Isa::usable() {
        assert!(run_with(isa) == scalar, "{}", isa.name());
    }
}
