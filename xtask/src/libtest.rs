//! Reading what Rust's test harness prints.

/// Counts added up over all `test result:` lines of an output.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) ignored: u64,
}

/// Adds up every `test result: …` line.
pub(crate) fn counts(output: &str) -> Counts {
    let mut sum = Counts::default();
    for line in output.lines() {
        let Some(rest) = line.trim().strip_prefix("test result: ") else {
            continue;
        };
        let Some((_, rest)) = rest.split_once(". ") else {
            continue;
        };
        for part in rest.split(';') {
            let mut words = part.split_whitespace();
            let number = words.next().and_then(|word| word.parse::<u64>().ok());
            match (number, words.next()) {
                (Some(n), Some("passed")) => sum.passed += n,
                (Some(n), Some("failed")) => sum.failed += n,
                (Some(n), Some("ignored")) => sum.ignored += n,
                _ => {}
            }
        }
    }
    sum
}

/// Names of the tests that failed.
pub(crate) fn failed_names(output: &str) -> Vec<&str> {
    output
        .lines()
        .filter_map(|line| line.strip_prefix("test ")?.strip_suffix(" ... FAILED"))
        .collect()
}

/// What the failed tests printed: of each test program the part between its two lines `failures:`.
pub(crate) fn failure_reports(output: &str) -> Vec<&str> {
    let mut is_inside = false;
    output
        .lines()
        .filter(|line| {
            let is_border = *line == "failures:";
            is_inside ^= is_border;
            is_inside && !is_border && !line.trim().is_empty()
        })
        .collect()
}

/// The lines `contract BACKEND: N cases`; the harness may have begun a line of its own before one.
pub(crate) fn contracts(output: &str) -> Vec<&str> {
    output
        .lines()
        .filter_map(|line| Some(&line[line.find("contract ")?..]))
        .filter(|line| line.ends_with(" cases"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = "\
running 2 tests
test barrier::tests::closed ... ok
test barrier::tests::open ... FAILED

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
   Doc-tests kvgate_transfer
test result: ok. 7 passed; 0 failed; 2 ignored; 0 measured; 3 filtered out; finished in 0.30s
";

    #[test]
    fn counts_add_up_over_binaries() {
        assert_eq!(
            counts(SAMPLE),
            Counts {
                passed: 8,
                failed: 1,
                ignored: 2
            }
        );
        assert_eq!(counts("error: could not compile"), Counts::default());
    }

    #[test]
    fn failed_tests_are_named() {
        assert_eq!(failed_names(SAMPLE), ["barrier::tests::open"]);
    }

    #[test]
    fn what_failed_tests_printed_is_found_in_each_program() {
        let one = "failures:\n\n---- a stdout ----\nthread 'a' panicked at x.rs:1:2:\nboom\n\n\nfailures:\n    a\n\n";
        let output = format!("test a ... FAILED\n\n{one}test result: FAILED. 0 passed\n{one}");
        let report = [
            "---- a stdout ----",
            "thread 'a' panicked at x.rs:1:2:",
            "boom",
        ];
        assert_eq!(failure_reports(&output), [report, report].concat());
        assert!(failure_reports(SAMPLE).is_empty());
    }

    #[test]
    fn backends_are_found_inside_other_lines() {
        let output = "test tcp::moves ... contract tcp: 25 cases\nok\ntest the_contract ... ok\ncontract shm: 25 cases\n";
        assert_eq!(
            contracts(output),
            ["contract tcp: 25 cases", "contract shm: 25 cases"]
        );
    }
}
