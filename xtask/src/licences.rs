//! Every package that is linked must carry a licence from an allow list.

use crate::exec::{Failure, Workspace};
use crate::metadata::{Metadata, Package};

/// SPDX ids that may stand alone.
const ALLOWED: [&str; 12] = [
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    // Of a list of certificates.
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Exceptions that only widen what a licence allows.
const ALLOWED_EXCEPTIONS: [&str; 1] = ["LLVM-exception"];

/// Names each package whose licence is missing or not on the list.
pub(crate) fn check(workspace: &Workspace) -> Result<Vec<String>, Failure> {
    let metadata = Metadata::load(workspace, true)?;
    Ok(metadata.packages.iter().filter_map(complaint).collect())
}

fn complaint(package: &Package) -> Option<String> {
    let named = format!("{} {}", package.name, package.version);
    match (&package.license, &package.license_file) {
        (Some(expression), _) if is_allowed(expression) => None,
        (Some(expression), _) => Some(format!("{named}: licence {expression:?} is not allowed")),
        (None, Some(file)) => Some(format!("{named}: only a licence file, {file}")),
        (None, None) => Some(format!("{named}: no licence given")),
    }
}

/// Whether an SPDX expression can be satisfied by allowed licences alone.
///
/// Anything that cannot be parsed is not allowed.
fn is_allowed(expression: &str) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let mut words: Vec<&str> = spaced.split_whitespace().collect();
    words.reverse();
    let verdict = any_of(&mut words);
    verdict == Some(true) && words.is_empty()
}

// `words` is a stack: the next word is the last element.
fn any_of(words: &mut Vec<&str>) -> Option<bool> {
    let mut verdict = all_of(words)?;
    while words.last() == Some(&"OR") {
        words.pop();
        verdict |= all_of(words)?;
    }
    Some(verdict)
}

fn all_of(words: &mut Vec<&str>) -> Option<bool> {
    let mut verdict = one(words)?;
    while words.last() == Some(&"AND") {
        words.pop();
        verdict &= one(words)?;
    }
    Some(verdict)
}

fn one(words: &mut Vec<&str>) -> Option<bool> {
    match words.pop()? {
        "(" => {
            let verdict = any_of(words)?;
            (words.pop()? == ")").then_some(verdict)
        }
        "OR" | "AND" | "WITH" | ")" => None,
        id => {
            let mut verdict = ALLOWED.contains(&id);
            if words.last() == Some(&"WITH") {
                words.pop();
                verdict &= ALLOWED_EXCEPTIONS.contains(&words.pop()?);
            }
            Some(verdict)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::samples;

    #[test]
    fn expressions_follow_the_rules_of_spdx() {
        for good in [
            "MIT",
            "MIT OR GPL-3.0-only",
            "MIT/Apache-2.0",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT",
        ] {
            assert!(is_allowed(good), "{good}");
        }
        for bad in [
            "GPL-3.0-only",
            "MIT AND GPL-3.0-only",
            "(MIT OR Apache-2.0) AND MPL-2.0",
            "Apache-2.0 WITH Classpath-exception-2.0",
            "MIT OR",
            "(MIT",
            "MIT MIT",
            "",
        ] {
            assert!(!is_allowed(bad), "{bad}");
        }
    }

    #[test]
    fn a_missing_licence_is_a_complaint() {
        let mut package = samples::package("somewhere", &[]);
        assert_eq!(complaint(&package), None);
        package.license = None;
        assert_eq!(
            complaint(&package).unwrap(),
            "somewhere 0.1.0: no licence given"
        );
        package.license = Some("SSPL-1.0".into());
        assert!(complaint(&package).unwrap().contains("SSPL-1.0"));
    }
}
