//! The metadata of an agent.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvgate_transfer::fuzz::metadata(bytes);
});
