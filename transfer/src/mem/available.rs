//! How many bytes may be populated now: the smaller of `MemAvailable` and what the control groups of
//! this process still allow. An unreadable source gives no limit: the kernel's own refusal remains.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that may be populated now.
pub(super) fn available_bytes() -> u64 {
    let host = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| meminfo_available_bytes(&text))
        .unwrap_or(u64::MAX);
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = cgroup_memory(&groups)
        .into_iter()
        .filter_map(|place| place.headroom_bytes())
        .min()
        .unwrap_or(u64::MAX);
    host.min(group)
}

fn meminfo_available_bytes(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// One control group directory and the names of its files.
struct GroupPlace {
    directory: PathBuf,
    limit: &'static str,
    usage: &'static str,
    reclaimable: &'static str,
}

impl GroupPlace {
    /// Limit minus use, page cache that can be dropped not counted as use. `None`: no limit here.
    fn headroom_bytes(&self) -> Option<u64> {
        let number = |name: &str| -> Option<u64> {
            let text = fs::read_to_string(self.directory.join(name)).ok()?;
            text.trim().parse().ok()
        };
        let limit_bytes = number(self.limit)?; // the word "max" does not parse: no limit
        let usage_bytes = number(self.usage)?;
        let stat = fs::read_to_string(self.directory.join("memory.stat")).unwrap_or_default();
        let reclaimable_bytes = stat
            .lines()
            .find_map(|line| line.strip_prefix(self.reclaimable)?.trim().parse().ok())
            .unwrap_or(0u64);
        Some(limit_bytes.saturating_sub(usage_bytes.saturating_sub(reclaimable_bytes)))
    }
}

/// The groups of this process and all their parents, for both versions of the interface.
fn cgroup_memory(proc_self_cgroup: &str) -> Vec<GroupPlace> {
    let mut places = Vec::new();
    for line in proc_self_cgroup.lines() {
        let mut fields = line.splitn(3, ':');
        let (_, Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let (root, limit, usage, reclaimable) = if controllers.is_empty() {
            (
                "/sys/fs/cgroup",
                "memory.max",
                "memory.current",
                "inactive_file ",
            )
        } else if controllers.split(',').any(|name| name == "memory") {
            (
                "/sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file ",
            )
        } else {
            continue;
        };
        let mut relative = Some(Path::new(path.trim_start_matches('/')));
        while let Some(step) = relative {
            places.push(GroupPlace {
                directory: Path::new(root).join(step),
                limit,
                usage,
                reclaimable,
            });
            relative = step.parent();
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_line_is_read_in_kib() {
        let text = "MemTotal:       16 kB\nMemAvailable:   12345 kB\n";
        assert_eq!(meminfo_available_bytes(text), Some(12345 * 1024));
        assert_eq!(meminfo_available_bytes("MemFree: 1 kB\n"), None);
        assert_eq!(meminfo_available_bytes("MemAvailable: x kB\n"), None);
    }

    #[test]
    fn both_cgroup_versions_and_all_parents_are_asked() {
        let v2: Vec<_> = cgroup_memory("0::/a/b\n")
            .into_iter()
            .map(|place| place.directory)
            .collect();
        assert_eq!(
            v2,
            ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup/"].map(PathBuf::from)
        );
        let v1 = cgroup_memory("5:cpu,cpuacct:/x\n4:memory:/x\n");
        assert_eq!(v1.len(), 2);
        assert_eq!(v1[0].directory, Path::new("/sys/fs/cgroup/memory/x"));
    }

    #[test]
    fn headroom_counts_reclaimable_cache_as_free() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
        write("memory.max", "1000\n");
        write("memory.current", "900\n");
        write("memory.stat", "anon 1\ninactive_file 300\n");
        let place = GroupPlace {
            directory: directory.path().into(),
            limit: "memory.max",
            usage: "memory.current",
            reclaimable: "inactive_file ",
        };
        assert_eq!(place.headroom_bytes(), Some(400));
        write("memory.max", "max\n");
        assert_eq!(place.headroom_bytes(), None);
    }

    #[test]
    fn this_host_has_something_to_give() {
        let bytes = available_bytes();
        assert!(bytes > 0 && bytes < u64::MAX);
    }
}
