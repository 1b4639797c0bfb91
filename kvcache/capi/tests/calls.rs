//! Programs of calls that a fuzzer has written, and random ones: see `calls_fuzz`.
#![allow(clippy::unwrap_used)]

mod calls_fuzz;

use std::path::PathBuf;

use proptest::prelude::*;

/// The programs in `tests/seeds/calls`: at least so many, and at least so many calls that work.
#[test]
fn the_programs_of_the_fuzzer_find_no_defect() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/seeds/calls");
    let (mut count, mut calls, mut good) = (0, 0, 0);
    for file in std::fs::read_dir(folder).unwrap() {
        let (all, worked) = calls_fuzz::calls(&std::fs::read(file.unwrap().path()).unwrap());
        (count, calls, good) = (count + 1, calls + all, good + worked);
    }
    assert!(count >= 20 && good >= 100, "{good} of {calls} in {count}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn no_program_finds_a_defect(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let (calls, good) = calls_fuzz::calls(&bytes);
        prop_assert!(good <= calls);
    }
}
