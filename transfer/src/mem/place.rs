//! Where memory is to lie, and where it has come to lie: huge pages and NUMA nodes.

use rustix::io::Errno;

use crate::error::{Error, ErrorKind};

/// Length of a huge page that is asked for.
pub(super) const HUGE_BYTES: usize = 2 << 20;

/// Whether memory is to be made of huge pages, which make copies of scattered slots faster. They come out of what
/// the host has set aside (`vm.nr_hugepages`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Huge {
    /// Pages of the usual length.
    #[default]
    Never,
    /// Of 2 MiB each where the host has enough; otherwise of the usual length, with the reason in
    /// [`crate::AgentStatus`]. The length is rounded up to whole ones.
    IfPossible,
    /// Of 2 MiB each, or an error.
    Required,
}

/// How [`crate::Memory::shared_with`] makes memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryOptions {
    /// Whether the host's huge pages are used.
    pub huge: Huge,
    /// The node that every page has to come from; without one the node of the thread that makes it.
    pub numa_node: Option<u32>,
}

/// How memory has come to lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    /// Length of its pages.
    pub(crate) granule_bytes: u64,
    /// Why they are not huge, if they were to be.
    pub(crate) not_huge: Option<String>,
    /// The node of its first page; `None` where the kernel does not say.
    pub(crate) numa_node: Option<u32>,
}

/// Why there are no huge pages, with what the host has.
pub(super) fn refusal(call: &str, errno: Errno) -> String {
    let free = |name: &str| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
        let text = std::fs::read_to_string(path).unwrap_or_else(|_| "?".to_owned());
        text.trim().to_owned()
    };
    let (free, all) = (free("free_hugepages"), free("nr_hugepages"));
    format!("{call}: {errno}; {free} of {all} huge pages of 2 MiB are free")
}

/// The error of a node that cannot be had.
pub(super) fn no_node(node: u32, errno: Errno) -> Error {
    match errno {
        Errno::INVAL => ErrorKind::InvalidArgument {
            what: "NUMA node",
            value: node.to_string(),
        }
        .into(),
        errno => Error::system("mbind", errno),
    }
}
