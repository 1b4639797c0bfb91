#![allow(clippy::unwrap_used)]
use kvgate_kvcache::*;
use kvgate_model::safetensors::SafetensorsFile;
use kvgate_model::*;
use std::path::Path;
#[test]
fn g1() {
    for name in ["basic", "realhead"] {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures")
            .join(name);
        let model = Model::load(&dir).unwrap();
        let f = Formats {
            latent: LatentFormat::F32,
            index_k: IndexKFormat::F32,
            window_page: WindowPage::P64,
        };
        let schema =
            CacheSchema::deepseek_v4(&model.config().geometry(model.weights().digest()), &f)
                .unwrap();
        let mut g = SafetensorsFile::open(&dir.join("golden.safetensors")).unwrap();
        for p in ["a", "b"] {
            let ids: Vec<u32> = g
                .read(&format!("{p}.ids"))
                .unwrap()
                .to_i64()
                .unwrap()
                .iter()
                .map(|v| *v as u32)
                .collect();
            let want = g.read(&format!("{p}.logits")).unwrap().to_f32().unwrap();
            let mut c = MonoCaches::new(&schema, ids.len() as u32).unwrap();
            let got = model.forward(&ids, 0, &mut c, Logits::All, None).unwrap();
            let err = got
                .iter()
                .zip(&want)
                .map(|(a, b)| (a - b).abs())
                .fold(0f32, f32::max);
            println!("{name} {p} {err:e}");
            let mut c = MonoCaches::new(&schema, ids.len() as u32).unwrap();
            let mut one = Vec::new();
            for (i, id) in ids.iter().enumerate() {
                one.extend(
                    model
                        .forward(&[*id], i as u32, &mut c, Logits::All, None)
                        .unwrap(),
                );
            }
            assert!(
                one.iter()
                    .zip(&got)
                    .all(|(a, b)| a.to_bits() == b.to_bits())
            );
        }
    }
}
#[test]
fn tiny() {
    let t = std::time::Instant::now();
    let model = Model::tiny_v4(1).unwrap();
    println!("load {:?} isa {}", t.elapsed(), model.isa().name());
    for (latent, index_k) in [
        (LatentFormat::PackedFp8, IndexKFormat::Bf16),
        (LatentFormat::PackedFp8, IndexKFormat::Fp8),
        (LatentFormat::F32, IndexKFormat::F32),
    ] {
        let f = Formats {
            latent,
            index_k,
            window_page: WindowPage::P64,
        };
        let schema =
            CacheSchema::deepseek_v4(&model.config().geometry(model.weights().digest()), &f)
                .unwrap();
        let ids: Vec<u32> = (0..2100u32)
            .map(|i| (i * 7919 + i * i * 31) % 256)
            .collect();
        let mut c = MonoCaches::new(&schema, 2200).unwrap();
        let t = std::time::Instant::now();
        for s in (0..2100).step_by(256) {
            let e = (s + 256).min(2100);
            model
                .forward(&ids[s..e], s as u32, &mut c, Logits::Last, None)
                .unwrap();
        }
        let el = t.elapsed();
        println!("prefill {:?} {:.0} tok/s", el, 2100.0 / el.as_secs_f64());
        let t = std::time::Instant::now();
        let mut last = vec![];
        for i in 0..64 {
            last = model
                .forward(&[i], 2100 + i, &mut c, Logits::Last, None)
                .unwrap();
        }
        println!("decode {:?} per token", t.elapsed() / 64);
        let m = last.iter().sum::<f32>() / last.len() as f32;
        let sd = (last.iter().map(|v| (v - m) * (v - m)).sum::<f32>() / last.len() as f32).sqrt();
        println!(
            "sd {sd} max {}",
            last.iter().cloned().fold(f32::MIN, f32::max)
        );
    }
}
