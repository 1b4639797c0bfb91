//! Every instruction set gives the same bits.
#![allow(clippy::unwrap_used)]

use kvgate_kernels::Isa;
use kvgate_kernels::cpu::attention::{KeyRows, attend};
use kvgate_kernels::cpu::gemm::{PackedMatrix, matmul};
use kvgate_kernels::cpu::indexer::index_scores;
use proptest::prelude::*;

fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / 8_388_608.0 - 1.0
        })
        .collect()
}

fn rows(count: usize, channels: usize, seed: u64) -> KeyRows {
    let values = noise(count * channels, seed);
    let mut rows = KeyRows::zeroed(count, channels);
    for i in 0..count {
        rows.row_mut(i)
            .copy_from_slice(&values[i * channels..(i + 1) * channels]);
    }
    rows
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn gemm(tokens in 1usize..14, outputs in 1usize..150, inputs in 1usize..90, seed in any::<u64>()) {
        let x = noise(tokens * inputs, seed);
        let w = PackedMatrix::pack(&noise(outputs * inputs, seed ^ 5), outputs, inputs).unwrap();
        let want = bits(&matmul(Isa::Scalar, &x, &w).unwrap());
        for isa in Isa::usable() {
            prop_assert_eq!(&bits(&matmul(isa, &x, &w).unwrap()), &want, "{}", isa.name());
        }
    }

    #[test]
    fn attention(heads in 1usize..9, keys in 1usize..40, channels in 1usize..140, seed in any::<u64>()) {
        let (q, k) = (rows(heads, channels, seed), rows(keys, channels, seed ^ 9));
        let picks: Vec<u32> = (0..keys as u32).rev().step_by(2).collect();
        let sinks = noise(heads, seed ^ 3);
        let run = |isa| {
            let mut out = KeyRows::zeroed(heads, channels);
            attend(isa, &q, &k, &picks, &sinks, 0.3, &mut out).unwrap();
            (0..heads).flat_map(|h| bits(out.row(h))).collect::<Vec<_>>()
        };
        let want = run(Isa::Scalar);
        for isa in Isa::usable() {
            prop_assert_eq!(&run(isa), &want, "{}", isa.name());
        }
    }

    #[test]
    fn indexer(tokens in 1usize..6, heads in 1usize..9, entries in 1usize..70, seed in any::<u64>()) {
        let q = noise(tokens * heads * 32, seed);
        let weights = noise(tokens * heads, seed ^ 1);
        let keys = PackedMatrix::pack(&noise(entries * 32, seed ^ 2), entries, 32).unwrap();
        let want = bits(&index_scores(Isa::Scalar, &q, &weights, heads, &keys, entries).unwrap());
        for isa in Isa::usable() {
            let got = index_scores(isa, &q, &weights, heads, &keys, entries).unwrap();
            prop_assert_eq!(&bits(&got), &want, "{}", isa.name());
        }
    }
}

#[test]
fn the_detected_path_is_one_of_the_usable_ones() {
    assert!(Isa::usable().contains(&Isa::detect()));
    assert!(
        Isa::detect().name().contains('-')
            || cfg!(not(any(target_arch = "x86_64", target_arch = "aarch64")))
    );
}
