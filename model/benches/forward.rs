//! Tokens per second of tiny-v4 on one core: `cargo bench -p kvgate-model --bench forward [-- TOKENS]`.

use std::time::Instant;

use kvgate_kvcache::{CacheSchema, Formats, IndexKFormat, LatentFormat, WindowPage};
use kvgate_model::{Logits, Model, ModelError, MonoCaches};

const CHUNK_TOKENS: usize = 256;
const STEPS: u32 = 64;

fn measure(model: &Model, formats: &Formats, prompt_tokens: usize) -> Result<(), ModelError> {
    let geometry = model.config().geometry(model.weights().digest());
    let schema = CacheSchema::deepseek_v4(&geometry, formats)?;
    let mut caches = MonoCaches::new(&schema, prompt_tokens as u32 + STEPS)?;
    let ids: Vec<u32> = (0..prompt_tokens as u32)
        .map(|i| (i.wrapping_mul(7919) ^ (i >> 3)) % 256)
        .collect();
    let start = Instant::now();
    for (i, chunk) in ids.chunks(CHUNK_TOKENS).enumerate() {
        model.forward(
            chunk,
            (i * CHUNK_TOKENS) as u32,
            &mut caches,
            Logits::Last,
            None,
        )?;
    }
    let prefill_s = start.elapsed().as_secs_f64();
    let start = Instant::now();
    for i in 0..STEPS {
        model.forward(
            &[i],
            prompt_tokens as u32 + i,
            &mut caches,
            Logits::Last,
            None,
        )?;
    }
    let decode_s = start.elapsed().as_secs_f64();
    println!(
        "{:?}/{:?}: prefill {prefill_s:.2} s = {:.0} tokens/s, decode {:.2} ms/token",
        formats.latent,
        formats.index_k,
        prompt_tokens as f64 / prefill_s,
        1e3 * decode_s / f64::from(STEPS)
    );
    Ok(())
}

fn main() -> Result<(), ModelError> {
    let tokens = std::env::args()
        .find_map(|a| a.parse().ok())
        .unwrap_or(2100);
    let start = Instant::now();
    let model = Model::tiny_v4(1)?;
    println!(
        "tiny-v4 made in {:.0} ms, isa {}",
        start.elapsed().as_secs_f64() * 1e3,
        model.isa().name()
    );
    for (latent, index_k) in [
        (LatentFormat::PackedFp8, IndexKFormat::Bf16),
        (LatentFormat::F32, IndexKFormat::F32),
    ] {
        measure(
            &model,
            &Formats {
                latent,
                index_k,
                window_page: WindowPage::P64,
            },
            tokens,
        )?;
    }
    Ok(())
}
