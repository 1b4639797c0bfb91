//! Rules over packages: dependency directions and the reach of fault injection.

use crate::metadata::Package;

/// For each package of the workspace, the workspace packages it may name.
const DIRECTIONS: [(&str, &[&str]); 11] = [
    ("kvgate-ucx-sys", &[]),
    ("kvgate-libfabric-sys", &[]),
    (
        "kvgate-transfer",
        &["kvgate-ucx-sys", "kvgate-libfabric-sys"],
    ),
    ("kvgate-kernels", &[]),
    ("kvgate-kvcache", &["kvgate-transfer"]),
    ("kvgate-hicache", &["kvgate-transfer", "kvgate-kvcache"]),
    (
        "kvgate-model",
        &["kvgate-kvcache", "kvgate-kernels", "kvgate-transfer"],
    ),
    ("kvgate-capi", &["kvgate-transfer", "kvgate-kvcache"]),
    (
        "kvgate-loom-tests",
        &["kvgate-transfer", "kvgate-kvcache", "kvgate-hicache"],
    ),
    (
        "kvgate-examples",
        &[
            "kvgate-transfer",
            "kvgate-kvcache",
            "kvgate-hicache",
            "kvgate-kernels",
            "kvgate-model",
        ],
    ),
    ("xtask", &[]),
];

const FAULT_INJECTION: &str = "fault-injection";

/// Packages that no library may depend on: each brings a runtime or hides the kind of an error.
const UNWANTED: [&str; 3] = ["tokio", "async-std", "anyhow"];

/// Who may all the same, behind a feature: the client of object stores needs a runtime, and has a private one on a
/// thread of its own.
const BEHIND_A_FEATURE: [(&str, &str); 1] = [("kvgate-hicache", "tokio")];

/// A package may depend on the packages below it only, in every kind of dependency.
pub(super) fn directions(members: &[&Package]) -> Vec<String> {
    let mut complaints = Vec::new();
    for package in members {
        let Some((_, allowed)) = DIRECTIONS.iter().find(|(name, _)| *name == package.name) else {
            complaints.push(format!(
                "{}: not in the table of crate directions",
                package.name
            ));
            continue;
        };
        for dependency in &package.dependencies {
            let name = dependency.name.as_str();
            let inside = members.iter().any(|member| member.name == name);
            if inside && name != package.name && !allowed.contains(&name) {
                complaints.push(format!("{} must not depend on {name}", package.name));
            }
            let is_excepted =
                dependency.optional && BEHIND_A_FEATURE.contains(&(package.name.as_str(), name));
            if UNWANTED.contains(&name) && !is_excepted {
                complaints.push(format!("{} must not depend on {name}", package.name));
            }
        }
    }
    complaints
}

/// No default feature set, and no dependency entry of any kind, may reach fault injection.
///
/// A dev-dependency counts too: cargo unifies features over a test build.
pub(super) fn fault_features(members: &[&Package]) -> Vec<String> {
    let mut complaints = Vec::new();
    for package in members {
        for reached in package.closure("default") {
            if names_fault_injection(&reached) {
                complaints.push(format!(
                    "{}: default features reach {reached}",
                    package.name
                ));
            }
        }
        for (feature, enabled) in &package.features {
            let reaches = enabled.iter().any(|word| names_fault_injection(word));
            if reaches && feature != FAULT_INJECTION {
                complaints.push(format!(
                    "{}: feature {feature} reaches fault injection under another name",
                    package.name
                ));
            }
        }
        for dependency in &package.dependencies {
            if dependency
                .features
                .iter()
                .any(|feature| names_fault_injection(feature))
            {
                let kind = dependency.kind.as_deref().unwrap_or("normal");
                complaints.push(format!(
                    "{}: its {kind} dependency on {} always enables {FAULT_INJECTION}",
                    package.name, dependency.name
                ));
            }
        }
    }
    complaints
}

fn names_fault_injection(word: &str) -> bool {
    word == FAULT_INJECTION || word.rsplit('/').next() == Some(FAULT_INJECTION)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::samples::package;

    #[test]
    fn an_upward_dependency_is_a_complaint() {
        let (transfer, kvcache) = (
            package("kvgate-transfer", &["kvgate-kvcache"]),
            package("kvgate-kvcache", &[]),
        );
        let found = directions(&[&transfer, &kvcache]);
        assert_eq!(found, ["kvgate-transfer must not depend on kvgate-kvcache"]);
        let right = package("kvgate-kvcache", &["kvgate-transfer", "bytes"]);
        assert!(directions(&[&package("kvgate-transfer", &[]), &right]).is_empty());
    }

    #[test]
    fn a_package_outside_the_table_is_a_complaint() {
        assert_eq!(directions(&[&package("kvgate-extra", &[])]).len(), 1);
    }

    #[test]
    fn a_runtime_below_is_a_complaint() {
        let found = directions(&[&package("kvgate-transfer", &["tokio"])]);
        assert_eq!(found, ["kvgate-transfer must not depend on tokio"]);
        let mut tiers = package("kvgate-hicache", &["tokio"]);
        let found = directions(&[&tiers]);
        assert_eq!(found, ["kvgate-hicache must not depend on tokio"]);
        tiers.dependencies[0].optional = true;
        assert!(directions(&[&tiers]).is_empty());
    }

    #[test]
    fn fault_injection_in_a_default_set_is_a_complaint() {
        let mut sample = package("kvgate-kvcache", &[]);
        sample.features.insert(
            FAULT_INJECTION.into(),
            vec!["kvgate-transfer/fault-injection".into()],
        );
        sample.features.insert("default".into(), vec![]);
        assert!(fault_features(&[&sample]).is_empty());
        sample
            .features
            .insert("default".into(), vec!["tools".into()]);
        sample.features.insert(
            "tools".into(),
            vec!["kvgate-transfer/fault-injection".into()],
        );
        let found = fault_features(&[&sample]);
        assert_eq!(found.len(), 2, "{found:?}");
    }

    #[test]
    fn fault_injection_by_a_dev_dependency_is_a_complaint() {
        let mut sample = package("kvgate-kvcache", &["kvgate-transfer"]);
        sample.dependencies[0].kind = Some("dev".into());
        sample.dependencies[0].features.push(FAULT_INJECTION.into());
        assert_eq!(fault_features(&[&sample]).len(), 1);
    }
}
