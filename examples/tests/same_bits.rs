//! `pd-handoff` and `v4-logits` on the same ids and formats: the same bits, in one process or handed over.

#![allow(clippy::unwrap_used, reason = "a test ends here")]

mod support;

use std::path::Path;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use support::{Running, pd_handoff};

/// The ids of a run, prompt and output, as one tensor.
fn join_ids(out: &Path, ids: &Path) {
    let bytes = std::fs::read(out).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let joined = [
        file.tensor("prompt_ids").unwrap().data(),
        file.tensor("output_ids").unwrap().data(),
    ]
    .concat();
    let view = TensorView::new(Dtype::I64, vec![joined.len() / 8], &joined).unwrap();
    serialize_to_file([("ids", view)], None, ids).unwrap();
}

fn tensor(path: &Path, name: &str) -> Vec<u8> {
    let bytes = std::fs::read(path).unwrap();
    SafeTensors::deserialize(&bytes)
        .unwrap()
        .tensor(name)
        .unwrap()
        .data()
        .to_vec()
}

fn v4_logits(args: &[&str]) {
    let run = Running::start(env!("CARGO_BIN_EXE_v4-logits"), args).finish();
    assert_eq!(run.code, Some(0), "{args:?}: {}", run.stderr);
}

#[test]
fn every_way_to_the_same_logits() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (model, out, ids) = (
        path("model"),
        path("out.safetensors"),
        path("ids.safetensors"),
    );
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    assert_eq!(
        pd_handoff(&["--dump-model", &text(&model), "--seed", "3"]).code,
        Some(0)
    );
    for (index_k, latent) in [("bf16", "packed-fp8"), ("f32", "f32")] {
        let formats = ["--index-k", index_k, "--latent", latent];
        let args = [
            "--seed",
            "3",
            "--tokens",
            "140",
            "--steps",
            "5",
            "--out",
            &text(&out),
        ];
        let run = pd_handoff(&[&args[..], &formats].concat());
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        join_ids(&out, &ids);
        let ids = format!("{}:ids", text(&ids));
        let (model, mono, handed) = (
            text(&model),
            path("mono.safetensors"),
            path("handed.safetensors"),
        );
        let common = [
            "--model",
            &model,
            "--ids",
            &ids,
            "--prefill",
            "140",
            "--steps",
            "5",
        ];
        let common = [&common[..], &formats].concat();
        v4_logits(
            &[
                &common[..],
                &["--mode", "mono", "--chunk", "33", "--out", &text(&mono)],
            ]
            .concat(),
        );
        v4_logits(
            &[
                &common[..],
                &[
                    "--mode",
                    "handoff",
                    "--chunk",
                    "64",
                    "--out",
                    &text(&handed),
                ],
            ]
            .concat(),
        );
        let expected = tensor(&out, "decode_logits");
        assert_eq!(tensor(&mono, "decode_logits"), expected, "{formats:?}");
        assert_eq!(tensor(&handed, "decode_logits"), expected, "{formats:?}");
        assert_eq!(
            tensor(&mono, "prefill_last_logits"),
            tensor(&handed, "prefill_last_logits"),
            "{formats:?}"
        );
    }
}

#[test]
fn ids_outside_the_vocabulary_are_refused_by_both_modes() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    let model = model.to_str().unwrap();
    assert_eq!(pd_handoff(&["--dump-model", model]).code, Some(0));
    let ids = dir.path().join("ids.safetensors");
    let bytes: Vec<u8> = [1_i64, 320, 2]
        .iter()
        .flat_map(|id| id.to_le_bytes())
        .collect();
    serialize_to_file(
        [("ids", TensorView::new(Dtype::I64, vec![3], &bytes).unwrap())],
        None,
        &ids,
    )
    .unwrap();
    let ids = format!("{}:ids", ids.to_str().unwrap());
    let out = dir.path().join("out.safetensors");
    for mode in ["mono", "handoff"] {
        let args = [
            "--model",
            model,
            "--ids",
            &ids,
            "--prefill",
            "2",
            "--steps",
            "1",
            "--mode",
            mode,
            "--out",
        ];
        let args = [&args[..], &[out.to_str().unwrap()]].concat();
        let run = Running::start(env!("CARGO_BIN_EXE_v4-logits"), &args).finish();
        assert_eq!(run.code, Some(2), "{mode}: {}", run.stderr);
        assert!(run.stderr.contains("320"), "{mode}: {}", run.stderr);
    }
}
