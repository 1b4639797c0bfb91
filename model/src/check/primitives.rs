//! Gate on building blocks (G10): number formats, packed pages, Hadamard, rope, mHC, sink attention,
//! the running softmax.

use kvgate_kernels::cpu::attention::{KeyRows, attend};
use kvgate_kernels::cpu::compress::{OnlinePool, Source, pool};
use kvgate_kernels::cpu::gemm::{PackedMatrix, matmul};
use kvgate_kernels::cpu::hadamard::hadamard;
use kvgate_kernels::cpu::mhc::{self, MhcParams, Mix};
use kvgate_kernels::cpu::norm::rms;
use kvgate_kernels::cpu::rope::{RopeTable, frequencies};
use kvgate_kernels::{Isa, RowEncoding, number};

use super::{CheckReport, Tensors, floats, get, max_error, token_ids, unknown};
use crate::dsv4::flash_rope;
use crate::error::ModelError;

/// Tensors that are only inputs of others.
const INPUTS: [&str; 20] = [
    "latent.in",
    "index.in",
    "e2m1.in",
    "pow2ceil.in",
    "rope.pos",
    "rope.in",
    "hc.X",
    "hc.fn",
    "hc.scale",
    "hc.base",
    "hc.y",
    "hc.head_fn",
    "hc.head_scale",
    "hc.head_base",
    "attn.q",
    "attn.k",
    "attn.sink",
    "attn.mask",
    "c128.kv",
    "c128.gate",
];

/// Compares every output tensor of `primitives.safetensors`.
pub(super) fn check(t: &Tensors, report: &mut CheckReport) -> Result<(), ModelError> {
    for name in t.keys() {
        if INPUTS.contains(&name.as_str()) || name == "c128.ape" {
            continue;
        }
        let (error, bound) = match name.split_once('.') {
            Some(("latent" | "act", _)) => latent(t, name)?,
            Some(("index", _)) => index(t, name)?,
            Some(("e2m1" | "pow2ceil", _)) => scalar(t, name)?,
            Some(("rope", _)) => rope(t, name)?,
            Some(("hc", _)) => streams(t, name)?,
            Some(("attn", "o")) => (sink_attention(t)?, 1e-5),
            Some(("c128", _)) => running_softmax(t, name)?,
            _ => return Err(unknown(name)),
        };
        report.push("G10", name, "", error, bound);
    }
    Ok(())
}

/// Compares a page byte for byte.
fn page_error(
    t: &Tensors,
    name: &str,
    encoding: RowEncoding,
    rows: &[f32],
) -> Result<f64, ModelError> {
    let stored = get(t, name)?;
    let mut page = vec![0u8; stored.bytes.len()];
    encoding.encode_page(rows, &mut page, 64)?;
    let differing = page
        .iter()
        .zip(&stored.bytes)
        .filter(|(a, b)| a != b)
        .count();
    Ok(differing as f64)
}

fn latent(t: &Tensors, name: &str) -> Result<(f64, f64), ModelError> {
    let input = floats(t, "latent.in")?;
    let mut rounded = input.clone();
    let error = match name {
        "latent.fake_fp8_64" => {
            for row in rounded.chunks_exact_mut(512) {
                number::fake_fp8(&mut row[..448], 64);
            }
            max_error(name, &rounded, &floats(t, name)?)?
        }
        "act.fake_fp8_128" => {
            number::fake_fp8(&mut rounded, 128);
            max_error(name, &rounded, &floats(t, name)?)?
        }
        "latent.page_v4" => page_error(t, name, RowEncoding::LatentV4, &input)?,
        _ => return Err(unknown(name)),
    };
    Ok((error, 0.0))
}

fn index(t: &Tensors, name: &str) -> Result<(f64, f64), ModelError> {
    let stored = floats(t, "index.bf16_hadamard")?;
    let mut rows = floats(t, "index.in")?;
    for row in rows.chunks_exact_mut(128) {
        let _is_transformed = hadamard(row);
    }
    Ok(match name {
        "index.hadamard" => (relative_error(name, &rows, &floats(t, name)?)?, 1e-5),
        "index.bf16_hadamard" => {
            let ulps = |(a, b): (&f32, &f32)| {
                let order = |v: f32| {
                    let bits = i32::from(number::bf16_bits(v + 0.0) as i16);
                    if bits < 0 { -(bits & 0x7FFF) } else { bits }
                };
                f64::from((order(*a) - order(*b)).abs())
            };
            (rows.iter().zip(&stored).map(ulps).fold(0.0, f64::max), 1.0)
        }
        "index.fake_fp4_32_of_bf16_hadamard" => {
            let mut rounded = stored;
            number::fake_fp4(&mut rounded, 32);
            (max_error(name, &rounded, &floats(t, name)?)?, 0.0)
        }
        "index.page_fp8_of_bf16_hadamard" => (
            page_error(t, name, RowEncoding::Fp8 { channels: 128 }, &stored)?,
            0.0,
        ),
        "index.page_fp4_rne_of_bf16_hadamard" => (
            page_error(t, name, RowEncoding::Fp4 { channels: 128 }, &stored)?,
            0.0,
        ),
        _ => return Err(unknown(name)),
    })
}

/// Largest deviation relative to the largest value of its row of 128.
fn relative_error(name: &str, got: &[f32], expected: &[f32]) -> Result<f64, ModelError> {
    let mut top: f64 = 0.0;
    for (g, e) in got.chunks(128).zip(expected.chunks(128)) {
        let scale = f64::from(number::abs_max(e)).max(f64::MIN_POSITIVE);
        top = top.max(max_error(name, g, e)? / scale);
    }
    Ok(top)
}

fn scalar(t: &Tensors, name: &str) -> Result<(f64, f64), ModelError> {
    let got: Vec<f32> = match name {
        "e2m1.rne" => floats(t, "e2m1.in")?
            .iter()
            .map(|v| number::e2m1_value(number::e2m1_code(*v)))
            .collect(),
        "pow2ceil.out" => floats(t, "pow2ceil.in")?
            .iter()
            .map(|v| number::ue8m0_value(number::ue8m0_ceil(*v)))
            .collect(),
        _ => return Err(unknown(name)),
    };
    Ok((max_error(name, &got, &floats(t, name)?)?, 0.0))
}

fn rope(t: &Tensors, name: &str) -> Result<(f64, f64), ModelError> {
    let (main_base, compress_base, yarn) = flash_rope();
    let (main, compress) = (
        frequencies(64, main_base, None),
        frequencies(64, compress_base, Some(&yarn)),
    );
    let expected = floats(t, name)?;
    let (frequencies, is_inverse) = match name {
        "rope.freq_main" => return Ok((max_error(name, &main, &expected)?, 0.0)),
        "rope.freq_compress" => return Ok((max_error(name, &compress, &expected)?, 0.0)),
        "rope.main" => (main, false),
        "rope.compress" => (compress, false),
        "rope.compress_inverse" => (compress, true),
        _ => return Err(unknown(name)),
    };
    let table = RopeTable::new(&frequencies, token_ids(t, "rope.pos")?.into_iter());
    let mut rows = floats(t, "rope.in")?;
    for (i, row) in rows.chunks_exact_mut(512).enumerate() {
        if is_inverse {
            table.rotate_back(row, i)
        } else {
            table.rotate(row, i)
        }
    }
    Ok((max_error(name, &rows, &expected)?, 1e-5))
}

fn streams(t: &Tensors, name: &str) -> Result<(f64, f64), ModelError> {
    const N: usize = 4;
    const D: usize = 32;
    let params = MhcParams {
        streams: N,
        sinkhorn_iterations: 20,
        eps: 1e-6,
    };
    let streams = floats(t, "hc.X")?;
    let mut normed = streams.clone();
    for row in normed.chunks_exact_mut(N * D) {
        rms(row, 1e-6);
    }
    let project = |fn_name: &str, rows: usize| -> Result<Vec<f32>, ModelError> {
        let w = PackedMatrix::pack(&floats(t, fn_name)?, rows, N * D)?;
        Ok(matmul(Isa::detect(), &normed, &w)?)
    };
    let (scale, base) = (floats(t, "hc.scale")?, floats(t, "hc.base")?);
    let v = project("hc.fn", 24)?;
    let mixes: Vec<Mix> = v
        .chunks_exact(24)
        .map(|v| mhc::mix(&params, v, &scale, &base))
        .collect();
    let tokens = streams.chunks_exact(N * D).zip(&mixes);
    let mut got = Vec::new();
    let bound = match name {
        "hc.comb" => {
            got.extend(mixes.iter().flat_map(|m| m.comb.iter().copied()));
            1e-6
        }
        "hc.post" => {
            got.extend(mixes.iter().flat_map(|m| m.post.iter().copied()));
            1e-6
        }
        "hc.x" => {
            for (x, mix) in tokens {
                let mut row = [0.0f32; D];
                mhc::collapse(&mix.pre, x, &mut row);
                got.extend(row);
            }
            5e-6
        }
        "hc.out" => {
            for ((x, mix), y) in tokens.zip(floats(t, "hc.y")?.chunks_exact(D)) {
                let mut row = x.to_vec();
                mhc::expand(mix, y, &mut row);
                got.extend(row);
            }
            5e-6
        }
        "hc.head_out" => {
            let (scale, base) = (floats(t, "hc.head_scale")?, floats(t, "hc.head_base")?);
            let v = project("hc.head_fn", N)?;
            for (x, v) in streams.chunks_exact(N * D).zip(v.chunks_exact(N)) {
                let mut row = [0.0f32; D];
                mhc::collapse(&mhc::head_weights(&params, v, scale[0], &base), x, &mut row);
                got.extend(row);
            }
            5e-6
        }
        _ => return Err(unknown(name)),
    };
    Ok((max_error(name, &got, &floats(t, name)?)?, bound))
}

fn sink_attention(t: &Tensors) -> Result<f64, ModelError> {
    const D: usize = 64;
    let rows = |values: &[f32]| {
        let mut rows = KeyRows::zeroed(values.len() / D, D);
        for (i, row) in values.chunks_exact(D).enumerate() {
            rows.row_mut(i).copy_from_slice(row);
        }
        rows
    };
    let sinks = floats(t, "attn.sink")?;
    let keys = rows(&floats(t, "attn.k")?);
    let mask = token_ids(t, "attn.mask")?;
    let mut got = Vec::new();
    for (q, mask) in floats(t, "attn.q")?
        .chunks_exact(sinks.len() * D)
        .zip(mask.chunks_exact(keys.rows()))
    {
        let picks: Vec<u32> = (0..keys.rows() as u32)
            .filter(|k| mask[*k as usize] != 0)
            .collect();
        let mut out = KeyRows::zeroed(sinks.len(), D);
        attend(
            Isa::detect(),
            &rows(q),
            &keys,
            &picks,
            &sinks,
            0.125,
            &mut out,
        )?;
        (0..sinks.len()).for_each(|h| got.extend_from_slice(out.row(h)));
    }
    max_error("attn.o", &got, &floats(t, "attn.o")?)
}

fn running_softmax(t: &Tensors, name: &str) -> Result<(f64, f64), ModelError> {
    const D: usize = 16;
    let (kv, gate, ape) = (
        floats(t, "c128.kv")?,
        floats(t, "c128.gate")?,
        floats(t, "c128.ape")?,
    );
    let sources: Vec<Source<'_>> = kv
        .chunks_exact(D)
        .zip(gate.chunks_exact(D))
        .zip(ape.chunks_exact(D))
        .map(|((kv, gate), ape)| Source { kv, gate, ape })
        .collect();
    let expected = floats(t, name)?;
    if name == "c128.pooled" {
        let mut pooled = [0.0f32; D];
        pool(&sources, &mut pooled);
        return Ok((max_error(name, &pooled, &expected)?, 1e-5));
    }
    let count = name
        .strip_prefix("c128.online")
        .and_then(|n| n.parse::<usize>().ok());
    let Some([first, rest @ ..]) = count.and_then(|n| sources.get(..n)) else {
        return Err(unknown(name));
    };
    let mut state = [0.0f32; 3 * D];
    let mut online = OnlinePool::new(&mut state);
    online.start(*first);
    rest.iter().for_each(|s| online.push(*s));
    Ok((max_error(name, &state, &expected)?, 1e-5))
}
