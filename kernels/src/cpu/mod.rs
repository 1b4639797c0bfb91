//! The operations, one file each. All are plain Rust except the three vector loops in [`mod@simd`].

pub mod attention;
pub mod compress;
pub mod gemm;
pub mod hadamard;
pub mod indexer;
pub mod mhc;
pub mod moe;
pub mod norm;
pub mod rope;
#[allow(unsafe_code)]
pub mod simd;
pub mod topk;
