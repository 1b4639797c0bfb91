//! Frames of a link.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvgate_transfer::fuzz::frame(bytes);
});
