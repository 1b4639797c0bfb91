//! The C interface of kvgate.
//!
//! `include/kvgate.h` is made from this crate by `cargo xtask header`; what is written here for the reader
//! of Rust and there for the reader of C is the same text. The contract that holds for all functions
//! stands at the head of the header; see `cbindgen.toml`.
//!
//! There is nothing to decide here: each function checks its arguments, looks its handles up and calls
//! `kvgate-transfer` or `kvgate-kvcache`. From Rust, use those.
#![allow(
    non_camel_case_types,
    reason = "types have the names that they have in C"
)]
#![allow(
    clippy::missing_safety_doc,
    reason = "one contract for all functions, at the head of the header"
)]

mod arg;
mod handle;
mod receiving;
mod wake;

// The order of the header is the order of these.
mod status;

mod agent;

mod event;

mod memory;

mod transfer;

mod flight;

mod cache;

pub use agent::*;
pub use arg::kv_incarnation;
pub use cache::layer::*;
pub use cache::offer::*;
pub use cache::plan::*;
pub use cache::pools::*;
pub use cache::receive::*;
pub use cache::schema::*;
pub use cache::write::*;
pub use event::*;
pub use flight::*;
pub use memory::*;
pub use status::{kv_last_error_message, kv_status, kv_status_name};
pub use transfer::*;

/// Version of the binary interface. It grows when something is taken away or changed; what is only added
/// keeps it.
pub const KV_ABI_VERSION: u32 = 1;

/// The version of the library that was loaded: compare it with `KV_ABI_VERSION` of the header.
#[unsafe(no_mangle)]
pub extern "C" fn kv_abi_version() -> u32 {
    KV_ABI_VERSION
}
