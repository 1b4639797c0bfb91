//! `v4-check` and `v4-logits` as a user runs them.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kvgate_model::safetensors::{SafetensorsFile, Tensor, write_tensors};
use serde_json::Value;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../model/tests/fixtures")
        .join(name)
}

fn check(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_v4-check"))
        .arg(dir)
        .args(args)
        .output()
        .unwrap()
}

fn logits(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_v4-logits"))
        .args(args)
        .output()
        .unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("one JSON object on stdout")
}

/// A copy of basic with an edited golden.safetensors.
fn edited(edit: impl FnOnce(&mut std::collections::BTreeMap<String, Tensor>)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("basic").join(file), dir.path().join(file)).unwrap();
    }
    let mut tensors = SafetensorsFile::open(&fixture("basic").join("golden.safetensors"))
        .unwrap()
        .read_all()
        .unwrap();
    edit(&mut tensors);
    write_tensors(&dir.path().join("golden.safetensors"), &tensors).unwrap();
    dir
}

#[test]
fn the_fixtures_pass() {
    for (name, compared, pending) in [
        ("basic", 107, 5),
        ("realhead", 68, 5),
        ("primitives", 25, 0),
    ] {
        let output = check(&fixture(name), &["--json"]);
        assert_eq!(output.status.code(), Some(0), "{name}");
        let json = json(&output);
        let rows = json["rows"].as_array().unwrap();
        assert_eq!(
            (rows.len(), json["not_yet"].as_array().unwrap().len()),
            (compared, pending),
            "{name}"
        );
        assert!(
            rows.iter()
                .all(|r| r["ok"] == true && r["max_error"].as_f64() <= r["bound"].as_f64())
        );
    }
    let text = String::from_utf8(check(&fixture("basic"), &[]).stdout).unwrap();
    assert!(
        text.lines()
            .any(|l| l.contains("a.mtp_logits") && l.ends_with("not yet")),
        "{text}"
    );
}

#[test]
fn a_miss_is_exit_1() {
    let dir = edited(|t| {
        let tensor = t.get_mut("a.prefill64.last_logits").unwrap();
        let mut values = tensor.to_f32().unwrap();
        values[17] += 2e-4;
        *tensor = Tensor::f32(&[160], &values);
    });
    let output = check(dir.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let json = json(&output);
    let missed: Vec<&Value> = json["rows"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|r| r["ok"] == false)
        .collect();
    assert_eq!(missed.len(), 1);
    assert_eq!(missed[0]["tensor"], "a.prefill64.last_logits");
}

#[test]
fn what_cannot_be_compared_is_exit_2() {
    let unknown = edited(|t| drop(t.insert("a.surprise".into(), Tensor::f32(&[1], &[0.0]))));
    let output = check(unknown.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(json(&output)["error"]["field"], "a.surprise");
    let short = edited(|t| drop(t.insert("a.logits".into(), Tensor::f32(&[2, 160], &[0.0; 320]))));
    assert_eq!(check(short.path(), &[]).status.code(), Some(2));
    let empty = tempfile::tempdir().unwrap();
    let output = check(empty.path(), &["--json"]);
    assert_eq!(
        (output.status.code(), json(&output)["verdict"].clone()),
        (Some(2), "invalid".into())
    );
    assert_eq!(logits(&["--json"]).status.code(), Some(2));
}

#[test]
fn logits_equal_the_golden_ones_and_do_not_depend_on_the_chunk() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (fixture("basic"), dir.path().join("out.safetensors"));
    let ids = format!("{}:a.ids", model.join("golden.safetensors").display());
    let run = |extra: &[&str]| {
        let mut args = vec![
            "--model",
            model.to_str().unwrap(),
            "--out",
            out.to_str().unwrap(),
        ];
        args.extend_from_slice(extra);
        let output = logits(&args);
        assert_eq!(
            output.status.code(),
            Some(0),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        SafetensorsFile::open(&out).unwrap().read_all().unwrap()
    };
    let golden = SafetensorsFile::open(&model.join("golden.safetensors"))
        .unwrap()
        .read_all()
        .unwrap();
    let error = |a: &Tensor, b: &Tensor| {
        assert_eq!(a.shape, b.shape);
        let pairs = a.to_f32().unwrap().into_iter().zip(b.to_f32().unwrap());
        pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    };
    let whole = run(&["--ids", &ids, "--prefill", "129", "--steps", "24"]);
    assert!(
        error(
            &whole["prefill_last_logits"],
            &golden["a.prefill129.last_logits"]
        ) < 1e-4
    );
    assert!(
        error(
            &whole["decode_logits"],
            &golden["a.prefill129.decode_logits"]
        ) < 1e-4
    );
    assert_eq!(
        run(&[
            "--ids",
            &ids,
            "--prefill",
            "129",
            "--steps",
            "24",
            "--chunk",
            "7"
        ]),
        whole
    );

    let state = model.join("handoff.safetensors");
    let resumed = run(&["--state", state.to_str().unwrap()]);
    let stored = SafetensorsFile::open(&state).unwrap().read_all().unwrap();
    assert!(error(&resumed["decode_logits"], &stored["decode_logits"]) < 1e-4);
    assert!(!resumed.contains_key("prefill_last_logits"));
}

#[test]
fn refused_runs_name_the_field() {
    let model = fixture("basic");
    let ids = format!("{}:a.ids", model.join("golden.safetensors").display());
    let refused = |args: &[&str]| {
        let mut all = vec![
            "--model",
            model.to_str().unwrap(),
            "--out",
            "/dev/null",
            "--json",
        ];
        all.extend_from_slice(args);
        let output = logits(&all);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let json = json(&output);
        assert_eq!(json["verdict"], "invalid");
        json["error"]["field"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    assert_eq!(
        refused(&["--ids", &ids, "--prefill", "320", "--steps", "24"]),
        "length of a.ids"
    );
    assert_eq!(
        refused(&["--ids", &ids, "--prefill", "0", "--steps", "1"]),
        "prefill"
    );
    assert_eq!(
        refused(&["--ids", "a.ids", "--prefill", "1", "--steps", "1"]),
        "ids"
    );
    assert_eq!(
        refused(&[
            "--ids",
            &ids.replace("a.ids", "c.ids"),
            "--prefill",
            "1",
            "--steps",
            "1"
        ]),
        "c.ids"
    );
    assert_eq!(
        refused(&[
            "--ids",
            &ids,
            "--prefill",
            "9",
            "--steps",
            "1",
            "--latent",
            "packed-fp8"
        ]),
        "head_dim"
    );
    assert_eq!(
        refused(&[
            "--ids",
            &ids,
            "--prefill",
            "9",
            "--steps",
            "1",
            "--index-k",
            "fp8"
        ]),
        "index_head_dim"
    );
}
