//! CPU operations of DeepSeek-V4 over paged KV views.
//!
//! Every operation returns the same bits for every batch size and on every instruction set: each
//! output accumulates in one fixed order, multiplication and addition are rounded separately, and
//! `exp`, `log1p`, `sin` and `cos` come from one implementation that is compiled in. The fast paths
//! of [`mod@cpu::simd`] are chosen at run time ([`Isa::detect`]) and equal the scalar ones bit for bit.
//!
//! The crate knows pages and rows, not leases: [`PagedRef`] and [`PagedMut`] are made from raw parts
//! by the host's bridge, and every access through them is checked against the page table.
//!
//! Formulas: `T` tokens, `D` channels of the latent head, `rd` rope channels (the last of a row).
#![deny(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod cpu;
mod error;
mod isa;
pub mod math;
pub mod number;
#[allow(unsafe_code)]
mod paged;

pub use error::{ErrorKind, KernelError};
pub use isa::Isa;
pub use paged::{PagedMut, PagedRef, Placement, RowEncoding};
