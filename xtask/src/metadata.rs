//! What `cargo metadata` says about packages and features.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::exec::{Failure, Workspace};

#[derive(Deserialize)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
    workspace_members: Vec<String>,
}

#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) version: String,
    /// SPDX expression.
    pub(crate) license: Option<String>,
    pub(crate) license_file: Option<String>,
    /// `None`: may be published anywhere; an empty list: never.
    pub(crate) publish: Option<Vec<String>>,
    pub(crate) dependencies: Vec<Dependency>,
    pub(crate) features: BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// `None` for a normal dependency, else `dev` or `build`.
    pub(crate) kind: Option<String>,
    pub(crate) features: Vec<String>,
    /// Whether only a feature brings it.
    pub(crate) optional: bool,
}

impl Metadata {
    /// Asks cargo. With `all`, packages of the registry are included.
    pub(crate) fn load(workspace: &Workspace, all: bool) -> Result<Self, Failure> {
        let mut args = vec!["metadata", "--format-version=1", "--locked"];
        if !all {
            args.push("--no-deps");
        }
        let (code, text) = workspace.cargo("metadata", args).stdout()?;
        if code != Some(0) {
            return Err(Failure::new("cargo metadata failed"));
        }
        serde_json::from_str(&text)
            .map_err(|error| Failure::new(format!("cargo metadata: unexpected answer: {error}")))
    }

    /// The packages of the workspace itself.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Package> {
        self.packages
            .iter()
            .filter(|package| self.workspace_members.contains(&package.id))
    }
}

impl Package {
    /// Whether the package is meant for a registry.
    pub(crate) fn is_published(&self) -> bool {
        self.publish
            .as_ref()
            .is_none_or(|registries| !registries.is_empty())
    }

    /// All features and `dependency/feature` words that `feature` switches on, itself included.
    pub(crate) fn closure(&self, feature: &str) -> BTreeSet<String> {
        let mut reached = BTreeSet::from([feature.to_owned()]);
        let mut todo = vec![feature.to_owned()];
        while let Some(name) = todo.pop() {
            for next in self.features.get(&name).into_iter().flatten() {
                if reached.insert(next.clone()) {
                    todo.push(next.clone());
                }
            }
        }
        reached
    }
}

#[cfg(test)]
pub(crate) mod samples {
    use super::*;

    /// A package with the given normal dependencies, without features.
    pub(crate) fn package(name: &str, dependencies: &[&str]) -> Package {
        Package {
            id: name.to_owned(),
            name: name.to_owned(),
            version: "0.1.0".to_owned(),
            license: Some("Apache-2.0".to_owned()),
            license_file: None,
            publish: None,
            dependencies: dependencies
                .iter()
                .map(|name| Dependency {
                    name: (*name).to_owned(),
                    kind: None,
                    features: Vec::new(),
                    optional: false,
                })
                .collect(),
            features: BTreeMap::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closure_follows_features_to_the_end() {
        let mut package = samples::package("p", &[]);
        package.features.insert("default".into(), vec!["a".into()]);
        package
            .features
            .insert("a".into(), vec!["b".into(), "dep/x".into()]);
        package.features.insert("b".into(), vec!["a".into()]);
        let reached: Vec<_> = package.closure("default").into_iter().collect();
        assert_eq!(reached, ["a", "b", "default", "dep/x"]);
    }
}
