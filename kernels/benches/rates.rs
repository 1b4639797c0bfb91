//! Rates of the vector loops on one core: `cargo bench -p kvgate-kernels --bench rates`.

use std::hint::black_box;
use std::time::Instant;

use kvgate_kernels::Isa;
use kvgate_kernels::cpu::attention::{KeyRows, attend};
use kvgate_kernels::cpu::gemm::{PackedMatrix, matmul};

fn gflops(flops: usize, mut body: impl FnMut()) -> f64 {
    body();
    let mut best = f64::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        let mut runs = 0;
        while start.elapsed().as_millis() < 40 {
            body();
            runs += 1;
        }
        best = best.min(start.elapsed().as_secs_f64() / runs as f64);
    }
    flops as f64 / best / 1e9
}

fn main() {
    for isa in Isa::usable() {
        for (tokens, outputs, inputs) in [
            (256, 2048, 64),
            (256, 1024, 128),
            (64, 128, 64),
            (256, 24, 512),
            (1, 2048, 64),
        ] {
            let x = vec![0.5f32; tokens * inputs];
            let w = PackedMatrix::zeroed(outputs, inputs);
            let rate = gflops(2 * tokens * outputs * inputs, || {
                black_box(matmul(isa, black_box(&x), &w).ok());
            });
            println!(
                "{:16} gemm {tokens:4} x {outputs:4} x {inputs:4}: {rate:6.1} GFLOP/s",
                isa.name()
            );
        }
        let (heads, channels, count) = (4, 512, 160);
        let (q, keys) = (
            KeyRows::zeroed(heads, channels),
            KeyRows::zeroed(count, channels),
        );
        let picks: Vec<u32> = (0..count as u32).collect();
        let mut out = KeyRows::zeroed(heads, channels);
        let rate = gflops(4 * heads * channels * count, || {
            black_box(attend(isa, &q, &keys, &picks, &[0.0; 4], 0.04, &mut out).ok());
        });
        println!(
            "{:16} attention {heads} heads x {count} keys: {rate:6.1} GFLOP/s",
            isa.name()
        );
    }
}
