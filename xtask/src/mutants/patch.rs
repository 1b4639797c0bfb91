//! The header of a mutant.
//!
//! Everything before the first `diff` or `---` line is header. Lines that begin with `#` are
//! read:
//! ```text
//! # I-3: a barrier that was never armed answers Ready
//! # killed-by: loom gate unarmed
//! # killed-by: test -p kvgate-kvcache --test plan_cover
//! # limit-s: 120
//! ```
//! Each `killed-by` line is a claim: that test has to fail.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::exec::Failure;

use super::killer::Killer;

pub(super) const FOLDER: &str = "loom-tests/mutants/";

/// Time limit of one killer when the header names none.
pub(super) const LIMIT: Duration = Duration::from_secs(240);

#[derive(Debug)]
pub(super) struct Mutant {
    /// The two digits that the file name begins with.
    pub(super) id: String,
    pub(super) name: String,
    pub(super) file: PathBuf,
    pub(super) killers: Vec<Killer>,
    /// Time limit of one killer.
    pub(super) limit: Duration,
}

impl Mutant {
    pub(super) fn parse(file: &Path, text: &str) -> Result<Self, Failure> {
        let bad = |what: String| Failure::new(format!("{}: {what}", file.display()));
        let stem = file
            .file_stem()
            .and_then(|stem| stem.to_str())
            .unwrap_or_default();
        let (id, name) = stem
            .split_once('-')
            .filter(|(id, _)| id.len() == 2 && id.bytes().all(|b| b.is_ascii_digit()))
            .ok_or_else(|| bad("the name must be NN-name.patch".to_owned()))?;
        let mut killers = Vec::new();
        let mut limit = LIMIT;
        for line in header(text) {
            if let Some(rest) = line.strip_prefix("killed-by:") {
                killers.push(rest.parse().map_err(bad)?);
            } else if let Some(rest) = line.strip_prefix("limit-s:") {
                let seconds = rest
                    .trim()
                    .parse()
                    .map_err(|_| bad(format!("limit-s: not a number: {rest}")))?;
                limit = Duration::from_secs(seconds);
            }
        }
        if killers.is_empty() {
            return Err(bad(
                "the header names no test: add `# killed-by: …`".to_owned()
            ));
        }
        Ok(Self {
            id: id.to_owned(),
            name: name.to_owned(),
            file: file.to_owned(),
            killers,
            limit,
        })
    }
}

fn header(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .take_while(|line| !line.starts_with("diff ") && !line.starts_with("--- "))
        .filter_map(|line| line.strip_prefix('#'))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_names_killers_and_a_limit() {
        let text = "# I-3: why\n# killed-by: loom gate unarmed\n# killed-by: test -p a --lib\n\
                    # limit-s: 7\ndiff --git a/x b/x\n# killed-by: loom other\n";
        let mutant = Mutant::parse(Path::new("m/05-fail-open.patch"), text).unwrap();
        assert_eq!(
            (mutant.id.as_str(), mutant.name.as_str()),
            ("05", "fail-open")
        );
        let killers: Vec<_> = mutant.killers.iter().map(ToString::to_string).collect();
        assert_eq!(killers, ["loom gate unarmed", "test -p a --lib"]);
        assert_eq!(mutant.limit, Duration::from_secs(7));
    }

    #[test]
    fn a_header_without_a_claim_is_refused() {
        for (name, text) in [
            ("m/05-x.patch", "# why\ndiff --git a/x b/x\n"),
            ("m/x.patch", "# killed-by: loom gate\n"),
            ("m/05-x.patch", "# killed-by: hope\n"),
            ("m/05-x.patch", "# killed-by: loom gate\n# limit-s: soon\n"),
        ] {
            assert!(
                Mutant::parse(Path::new(name), text).is_err(),
                "{name}: {text}"
            );
        }
    }
}
