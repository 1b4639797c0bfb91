//! The files of the working tree, and a copy of them to break on purpose.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::exec::{Failure, Workspace};

/// Paths, below the root, of every file that git tracks or would add, in order.
pub(crate) fn files(workspace: &Workspace) -> Result<Vec<String>, Failure> {
    let args = [
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ];
    let (code, text) = workspace.program("git", "git").args(args).stdout()?;
    if code != Some(0) {
        return Err(Failure::new(
            "git ls-files failed: the workspace must be a git checkout",
        ));
    }
    let paths: BTreeSet<&str> = text.split_terminator('\0').collect();
    Ok(paths
        .into_iter()
        .filter(|path| workspace.has(path))
        .map(str::to_owned)
        .collect())
}

/// A copy of the working tree that patches are applied to.
pub(crate) struct Copy {
    pub(crate) folder: PathBuf,
    source: PathBuf,
    files: Vec<String>,
}

impl Copy {
    /// Makes the copy, or refreshes one that an earlier run left behind.
    pub(crate) fn new(workspace: &Workspace, folder: PathBuf) -> Result<Self, Failure> {
        let copy = Self {
            folder,
            source: workspace.root.clone(),
            files: files(workspace)?,
        };
        copy.reset()?;
        Ok(copy)
    }

    /// Brings the copy back to the state of the working tree.
    ///
    /// Files that are equal already stay untouched, so that cargo rebuilds only what changed.
    pub(crate) fn reset(&self) -> Result<(), Failure> {
        for path in &self.files {
            let (from, to) = (self.source.join(path), self.folder.join(path));
            let wanted = fs::read(&from).map_err(|error| Failure::io(&from, &error))?;
            if fs::read(&to).ok().as_deref() == Some(wanted.as_slice()) {
                continue;
            }
            if let Some(parent) = to.parent() {
                fs::create_dir_all(parent).map_err(|error| Failure::io(parent, &error))?;
            }
            fs::write(&to, wanted).map_err(|error| Failure::io(&to, &error))?;
        }
        let keep: BTreeSet<&Path> = self.files.iter().map(Path::new).collect();
        remove_others(&self.folder, &self.folder, &keep)
    }

    /// Applies a patch; the answer is git's complaint when it does not fit.
    pub(crate) fn apply(
        &self,
        workspace: &Workspace,
        patch: &Path,
    ) -> Result<Option<String>, Failure> {
        // The copy lies inside the checkout's target folder: git must not find that checkout,
        // or it would silently skip every file of the patch.
        let ceiling = self.folder.parent().unwrap_or(&self.folder);
        let done = workspace
            .program("git-apply", "git")
            .args(["apply", "-p1", "--verbose", "--whitespace=nowarn"])
            .args([patch])
            .folder(&self.folder)
            .env("GIT_CEILING_DIRECTORIES", ceiling)
            .run()?;
        if !done.succeeded() {
            return Ok(Some(done.output.trim().to_owned()));
        }
        let skipped = done.output.contains("Skipped patch");
        Ok(skipped.then(|| "git skipped the patch".to_owned()))
    }
}

/// Deletes what is not in `keep`: files that a patch created or that the tree has lost.
fn remove_others(top: &Path, folder: &Path, keep: &BTreeSet<&Path>) -> Result<(), Failure> {
    let entries = fs::read_dir(folder).map_err(|error| Failure::io(folder, &error))?;
    for entry in entries {
        let path = entry.map_err(|error| Failure::io(folder, &error))?.path();
        if path.is_dir() {
            remove_others(top, &path, keep)?;
            continue;
        }
        let below = path.strip_prefix(top).unwrap_or(&path);
        if !keep.contains(below) {
            fs::remove_file(&path).map_err(|error| Failure::io(&path, &error))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkout() -> (tempfile::TempDir, Workspace) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_path_buf();
        let workspace = Workspace {
            target: root.join("target"),
            root,
        };
        fs::write(folder.path().join(".gitignore"), "/target\n").unwrap();
        fs::write(folder.path().join("a.txt"), "one\ntwo\n").unwrap();
        let (code, _) = workspace
            .program("git", "git")
            .args(["init", "--quiet"])
            .stdout()
            .unwrap();
        assert_eq!(code, Some(0));
        (folder, workspace)
    }

    #[test]
    fn a_patch_changes_the_copy_and_reset_takes_it_back() {
        let (folder, workspace) = checkout();
        let copy = Copy::new(&workspace, folder.path().join("target/copy")).unwrap();
        let patch = folder.path().join("target/p.patch");
        let text = "# why\n--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n";
        fs::write(&patch, text).unwrap();
        assert_eq!(copy.apply(&workspace, &patch).unwrap(), None);
        let changed = fs::read_to_string(copy.folder.join("a.txt")).unwrap();
        assert_eq!(changed, "one\nthree\n");
        assert_eq!(
            fs::read_to_string(folder.path().join("a.txt")).unwrap(),
            "one\ntwo\n"
        );
        fs::write(copy.folder.join("stray.txt"), "x").unwrap();
        copy.reset().unwrap();
        assert_eq!(
            fs::read_to_string(copy.folder.join("a.txt")).unwrap(),
            "one\ntwo\n"
        );
        assert!(!copy.folder.join("stray.txt").exists());
    }

    #[test]
    fn a_patch_that_does_not_fit_is_reported() {
        let (folder, workspace) = checkout();
        let copy = Copy::new(&workspace, folder.path().join("target/copy")).unwrap();
        let patch = folder.path().join("target/p.patch");
        let text = "--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,2 @@\n one\n-zwei\n+three\n";
        fs::write(&patch, text).unwrap();
        assert!(copy.apply(&workspace, &patch).unwrap().is_some());
    }
}
