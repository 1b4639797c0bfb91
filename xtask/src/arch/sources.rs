//! The Rust sources that the rules look at.

use crate::exec::{Failure, Workspace};
use crate::tree;

/// One Rust file of the workspace.
pub(super) struct Source {
    /// Path below the workspace root, with `/`.
    pub(super) path: String,
    pub(super) text: String,
}

impl Source {
    /// A rule's sample.
    #[cfg(test)]
    pub(super) fn sample(path: &str, text: &str) -> Self {
        Self {
            path: path.to_owned(),
            text: text.to_owned(),
        }
    }

    /// Whether the file is a module of tests inside a library.
    pub(super) fn holds_tests_only(&self) -> bool {
        let stem = self.path.trim_end_matches(".rs");
        stem.split('/')
            .any(|part| part == "tests" || part.ends_with("_tests"))
    }

    /// Whether the file belongs to the library or binary code of one of these crates.
    pub(super) fn is_in_src_of(&self, folders: &[&str]) -> bool {
        folders.iter().any(|folder| {
            self.path
                .strip_prefix(folder)
                .is_some_and(|rest| rest.starts_with("/src/"))
        })
    }
}

/// Reads all Rust files that git knows or would add.
pub(super) fn load(workspace: &Workspace) -> Result<Vec<Source>, Failure> {
    let files = tree::files(workspace)?;
    files
        .into_iter()
        .filter(|path| path.ends_with(".rs"))
        .map(|path| {
            Ok(Source {
                text: workspace.read(&path)?,
                path,
            })
        })
        .collect()
}
