//! How much of a mapping the kernel backs with huge pages, as `/proc/self/smaps` says.

/// The mappings of this process and their huge parts, read once.
#[derive(Debug, Default)]
pub(crate) struct HugeMap {
    /// First byte, end, huge bytes. `None` where the kernel does not say.
    mappings: Option<Vec<(u64, u64, u64)>>,
}

impl HugeMap {
    pub(crate) fn read() -> Self {
        let smaps = std::fs::read_to_string("/proc/self/smaps");
        Self {
            mappings: smaps.ok().map(|text| parse(&text)),
        }
    }

    /// Huge bytes in these `len_bytes`. A mapping that the kernel has merged with its neighbours counts
    /// with as much as may lie here.
    pub(crate) fn bytes_in(&self, base: u64, len_bytes: u64) -> Option<u64> {
        let end = base.saturating_add(len_bytes);
        let overlap = |&(from, to, huge): &(u64, u64, u64)| {
            huge.min(to.min(end).saturating_sub(from.max(base)))
        };
        Some(self.mappings.as_ref()?.iter().map(overlap).sum())
    }
}

fn parse(smaps: &str) -> Vec<(u64, u64, u64)> {
    let mut mappings: Vec<(u64, u64, u64)> = Vec::new();
    for line in smaps.lines() {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        if let Some((from, to)) = word.split_once('-')
            && let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16))
        {
            mappings.push((from, to, 0));
        } else if matches!(
            word,
            "AnonHugePages:"
                | "ShmemPmdMapped:"
                | "FilePmdMapped:"
                | "Shared_Hugetlb:"
                | "Private_Hugetlb:"
        ) && let Some(mapping) = mappings.last_mut()
        {
            let kib = rest.trim().strip_suffix(" kB").and_then(|n| n.parse().ok());
            mapping.2 += kib.unwrap_or(0u64).saturating_mul(1024);
        }
    }
    mappings
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0000800000 rw-p 00000000 00:00 0
Size:               8192 kB
AnonHugePages:      4096 kB
ShmemPmdMapped:        0 kB
VmFlags: rd wr mr mw me ac sd hg
7f0000800000-7f0000a00000 rw-s 00000000 00:01 12   /memfd:x (deleted)
Shared_Hugetlb:     2048 kB
Private_Hugetlb:       0 kB
";

    #[test]
    fn huge_parts_are_found_by_address() {
        let map = HugeMap {
            mappings: Some(parse(SMAPS)),
        };
        let mib = 1 << 20;
        assert_eq!(map.bytes_in(0x7f00_0000_0000, 8 * mib), Some(4 * mib));
        assert_eq!(map.bytes_in(0x7f00_0000_0000, mib), Some(mib));
        assert_eq!(map.bytes_in(0x7f00_0080_0000, 2 * mib), Some(2 * mib));
        assert_eq!(map.bytes_in(0x7f00_0000_0000, 16 * mib), Some(6 * mib));
        assert_eq!(map.bytes_in(0x1000, 4096), Some(0));
        assert_eq!(HugeMap::default().bytes_in(0x1000, 4096), None);
    }

    #[test]
    fn this_process_has_mappings() {
        let memory = crate::Memory::host(4 << 20).unwrap();
        let huge_bytes = HugeMap::read().bytes_in(memory.base_ptr() as u64, 4 << 20);
        assert!(
            huge_bytes.is_some_and(|bytes| bytes <= 4 << 20),
            "{huge_bytes:?}"
        );
    }
}
