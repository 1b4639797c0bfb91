//! The name that programs linked against the shared library record, so that a later version with
//! another binary interface is not loaded in its place.

/// As `KV_ABI_VERSION` in `src/lib.rs`.
const ABI_VERSION: u32 = 1;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libkvgate.so.{ABI_VERSION}");
}
