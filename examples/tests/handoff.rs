//! Hand-offs through the built program: every transport, format and kind of prompt end.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod support;

use sha2::Digest;
use support::pd_handoff;

/// A run without a fault: exit 0, every logit compared and equal, nothing left in the pools.
fn identical(args: &[&str]) -> serde_json::Value {
    let mut args = args.to_vec();
    args.push("--json");
    let run = pd_handoff(&args);
    assert_eq!(
        run.code,
        Some(0),
        "{args:?}: {}\n{}",
        run.stdout,
        run.stderr
    );
    let json = run.json();
    assert_eq!(json["verdict"], "bit-identical", "{args:?}");
    assert_eq!(json["logits"]["differing"], 0);
    assert_eq!(
        json["logits"]["sha256_mono"],
        json["logits"]["sha256_handoff"]
    );
    assert_eq!(json["cache"]["differing"], 0);
    assert_eq!(json["decode"]["prefill_tokens"], 0);
    assert_eq!(json["pages_conserved"], true);
    assert_eq!(
        json["canary"]["violations"].as_array().map(Vec::len),
        Some(0)
    );
    assert!(
        json["canary"]["checked"].as_u64() > Some(0),
        "{}",
        json["canary"]
    );
    assert!(run.stderr.starts_with("pids launcher="), "{}", run.stderr);
    json
}

#[test]
fn every_transport_at_lengths_around_every_boundary() {
    for transport in ["shm", "tcp", "cma", "local"] {
        for tokens in [
            "1", "3", "4", "5", "127", "128", "129", "131", "255", "256", "257",
        ] {
            let json = identical(&["--transport", transport, "--tokens", tokens, "--steps", "3"]);
            assert_eq!(json["logits"]["compared"], 3 * 320, "{transport} {tokens}");
            assert_eq!(json["prompt_tokens"].to_string(), tokens);
            let is_sparse = tokens.parse::<u32>().unwrap() + 3 > 131;
            assert_eq!(json["index_k_consulted"], is_sparse, "{tokens}");
        }
    }
}

#[test]
fn auto_takes_the_nearest_way_and_says_which() {
    let json = identical(&["--transport", "auto", "--tokens", "257", "--steps", "2"]);
    assert_eq!(json["transport"], "shm");
}

#[test]
fn every_format() {
    for index_k in ["bf16", "fp8", "f32"] {
        for latent in ["packed-fp8", "f32"] {
            for transport in ["shm", "tcp"] {
                let args = [
                    "--transport",
                    transport,
                    "--index-k",
                    index_k,
                    "--latent",
                    latent,
                    "--tokens",
                    "257",
                ];
                let json = identical(&[&args[..], &["--steps", "4"]].concat());
                assert_eq!(
                    (json["index_k"].as_str(), json["latent"].as_str()),
                    (Some(index_k), Some(latent))
                );
            }
        }
    }
}

#[test]
fn steps_cross_the_end_of_a_page_and_of_a_group_of_128() {
    identical(&["--tokens", "250", "--steps", "16"]);
    identical(&["--tokens", "383", "--steps", "4"]);
}

#[test]
fn every_chunking_gives_the_same_bits() {
    let sums: std::collections::BTreeSet<String> = ["1", "7", "64", "256", "300"]
        .into_iter()
        .map(|chunk| identical(&["--tokens", "300", "--steps", "2", "--chunk", chunk]))
        .map(|json| json["logits"]["sha256_handoff"].to_string())
        .collect();
    assert_eq!(sums.len(), 1);
}

#[test]
fn many_requests_share_a_small_pool() {
    for transport in ["shm", "tcp"] {
        let json = identical(&[
            "--transport",
            transport,
            "--requests",
            "24",
            "--concurrency",
            "6",
            "--tokens",
            "40",
            "--steps",
            "3",
            "--pool-pages",
            "8",
            "--cancel-share",
            "0.25",
        ]);
        assert_eq!(json["requests"]["asked"], 24);
        assert_eq!(json["requests"]["cancelled"], 6);
        assert_eq!(json["requests"]["finished"], 18);
        assert_eq!(json["peak_in_flight"], 6);
        assert_eq!(json["logits"]["compared"], 18 * 3 * 320);
        assert!(
            json["page_reuses"].as_u64() >= Some(10),
            "{}",
            json["page_reuses"]
        );
    }
}

#[test]
fn plain_output_has_a_table_and_ends_with_the_verdict() {
    let run = pd_handoff(&["--tokens", "5", "--steps", "2"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert_eq!(run.last_line(), "verdict: bit-identical (640 logits)");
    let header = run.stdout.lines().next().unwrap();
    for word in [
        "layer",
        "swa_latent",
        "index_k",
        "c128_state",
        "landed",
        "waited",
    ] {
        assert!(header.contains(word), "{header}");
    }
    assert_eq!(run.stdout.matches("bit-identical").count(), 1);
}

#[test]
fn the_report_is_one_static_page() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report.html");
    identical(&[
        "--tokens",
        "257",
        "--steps",
        "2",
        "--report",
        path.to_str().unwrap(),
    ]);
    let page = std::fs::read_to_string(path).unwrap();
    assert!(
        page.starts_with("<!DOCTYPE html>") && page.contains("<svg") && page.contains("</html>")
    );
    assert!(!page.contains("http") && !page.contains("<script") && !page.contains("src="));
    assert!(page.contains("request 0 layer 5"));
}

#[test]
fn out_holds_prompt_output_and_logits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.safetensors");
    let json = identical(&[
        "--tokens",
        "9",
        "--steps",
        "3",
        "--out",
        path.to_str().unwrap(),
    ]);
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("prompt_ids").unwrap().shape(), [9]);
    assert_eq!(file.tensor("output_ids").unwrap().shape(), [3]);
    let logits = file.tensor("decode_logits").unwrap();
    assert_eq!(logits.shape(), [3, 320]);
    let sha: String = sha2::Sha256::digest(logits.data())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(json["logits"]["sha256_handoff"], sha);
}

#[test]
fn a_prompt_file_is_bytes_without_bos() {
    let dir = tempfile::tempdir().unwrap();
    let (text, out) = (
        dir.path().join("prompt.txt"),
        dir.path().join("out.safetensors"),
    );
    std::fs::write(&text, "ab").unwrap();
    let (text, path) = (text.to_str().unwrap(), out.to_str().unwrap());
    identical(&[
        "--prompt-file",
        text,
        "--tokens",
        "5",
        "--steps",
        "1",
        "--out",
        path,
    ]);
    let bytes = std::fs::read(&out).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(
        file.tensor("prompt_ids").unwrap().data(),
        [100_i64, 101, 100, 101, 100].map(i64::to_le_bytes).concat()
    );
}

#[test]
fn a_dumped_model_is_the_built_in_one() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().to_str().unwrap();
    let dump = pd_handoff(&["--dump-model", model, "--seed", "7"]);
    assert_eq!(dump.code, Some(0), "{}", dump.stderr);
    let common = ["--tokens", "9", "--steps", "2", "--seed", "7"];
    let built_in = identical(&common);
    let loaded = identical(&[&common[..], &["--model", model]].concat());
    assert_eq!(
        built_in["logits"]["sha256_handoff"],
        loaded["logits"]["sha256_handoff"]
    );
    let other = identical(&["--tokens", "9", "--steps", "2", "--seed", "8"]);
    assert_ne!(
        built_in["logits"]["sha256_handoff"],
        other["logits"]["sha256_handoff"]
    );
}
