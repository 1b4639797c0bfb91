//! Messages of the hand-off.
#![no_main]

#[path = "../../tests/handoff_fuzz/mod.rs"]
mod handoff_fuzz;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    handoff_fuzz::message(bytes);
});
