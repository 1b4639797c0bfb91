//! Programs of calls of the C interface.
#![no_main]

#[path = "../../tests/calls_fuzz/mod.rs"]
mod calls_fuzz;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    calls_fuzz::calls(bytes);
});
