//! Memory shared between processes of one host: sealed memfds, ours and the peer's.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use rustix::io::Errno;

use super::map::Mapping;
use super::place::{HUGE_BYTES, Huge, MemoryOptions, Placement, refusal};
use crate::error::{Error, ErrorKind};

/// Seals that fix the length for good.
const LENGTH_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A populated memfd whose length nobody can change any more, and how it lies.
pub(super) fn create(
    name: &str,
    len_bytes: usize,
    options: MemoryOptions,
) -> Result<(OwnedFd, Mapping, Placement), Error> {
    let mut not_huge = None;
    if options.huge != Huge::Never {
        match create_huge(name, len_bytes, options.numa_node) {
            Ok((file, mapping)) => {
                let placement = Placement {
                    granule_bytes: HUGE_BYTES as u64,
                    not_huge: None,
                    numa_node: mapping.node(),
                };
                return Ok((file, mapping, placement));
            }
            Err(refused) if options.huge == Huge::Required => return Err(refused),
            Err(refused) => not_huge = Some(why_not_huge(&refused)),
        }
    }
    let (file, mapping) = create_sealed(name, len_bytes, MemfdFlags::empty(), options.numa_node)?;
    let placement = Placement {
        granule_bytes: rustix::param::page_size() as u64,
        not_huge,
        numa_node: mapping.node(),
    };
    Ok((file, mapping, placement))
}

fn create_huge(
    name: &str,
    len_bytes: usize,
    node: Option<u32>,
) -> Result<(OwnedFd, Mapping), Error> {
    let rounded = len_bytes
        .checked_next_multiple_of(HUGE_BYTES)
        .ok_or_else(|| Error::system("mmap(MFD_HUGETLB)", Errno::NOMEM))?;
    create_sealed(
        name,
        rounded,
        MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        node,
    )
}

fn create_sealed(
    name: &str,
    mapped_bytes: usize,
    kind: MemfdFlags,
    node: Option<u32>,
) -> Result<(OwnedFd, Mapping), Error> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | kind;
    let file = memfd_create(name, flags).map_err(|errno| Error::system("memfd_create", errno))?;
    ftruncate(&file, mapped_bytes as u64).map_err(|errno| Error::system("ftruncate", errno))?;
    fcntl_add_seals(&file, LENGTH_SEALS | SealFlags::SEAL)
        .map_err(|errno| Error::system("fcntl(ADD_SEALS)", errno))?;
    let mapping = match node {
        Some(node) => Mapping::shared_on(file.as_fd(), mapped_bytes, node)?,
        None => Mapping::shared(file.as_fd(), mapped_bytes)?,
    };
    Ok((file, mapping))
}

/// What is said of memory that was to have huge pages and has none.
fn why_not_huge(refused: &Error) -> String {
    let (call, errno) = match refused.kind() {
        ErrorKind::System { call, errno } => (*call, Errno::from_raw_os_error(*errno)),
        // What the kernel answers when too few are free.
        ErrorKind::OutOfMemory { .. } => ("mmap", Errno::NOMEM),
        _ => return refused.to_string(),
    };
    refusal(call, errno)
}

/// A peer's memfd, mapped here. The peer's process may write it at any time; this side only ever
/// copies plain bytes in and never interprets what stands there.
#[cfg(not(kv_loom))]
pub(crate) struct PeerMapping {
    mapping: Mapping,
    len_bytes: u64,
    granule_bytes: u64,
}

#[cfg(not(kv_loom))]
impl PeerMapping {
    /// Maps `file`, which a peer sent, after checking that it is a memfd of at least `len_bytes`
    /// bytes that nobody can shrink.
    ///
    /// # Errors
    /// A sentence that names what is wrong with the file; the caller refuses the peer with it.
    pub(crate) fn map(file: &OwnedFd, len_bytes: u64) -> Result<Self, String> {
        use rustix::fs::{fcntl_get_seals, fstat};
        let seals =
            fcntl_get_seals(file).map_err(|errno| format!("memory is not a memfd: {errno}"))?;
        if !seals.contains(LENGTH_SEALS) {
            return Err(format!("memory is not sealed against resizing: {seals:?}"));
        }
        let stat = fstat(file).map_err(|errno| format!("fstat: {errno}"))?;
        let file_bytes = stat.st_size;
        let file_bytes = u64::try_from(file_bytes).unwrap_or(0);
        if len_bytes == 0 || file_bytes < len_bytes {
            return Err(format!(
                "memory holds {file_bytes} bytes, {len_bytes} announced"
            ));
        }
        // A file of huge pages is mapped in whole ones; it has no other length.
        let block_bytes = u64::try_from(stat.st_blksize).unwrap_or(0).max(1);
        let whole = len_bytes.checked_next_multiple_of(block_bytes);
        let whole = whole.filter(|whole| *whole <= file_bytes);
        let mapped_bytes = usize::try_from(whole.unwrap_or(len_bytes))
            .map_err(|_| format!("memory of {len_bytes} bytes"))?;
        let mapping =
            Mapping::shared(file.as_fd(), mapped_bytes).map_err(|error| error.to_string())?;
        Ok(Self {
            mapping,
            len_bytes,
            granule_bytes: whole.map_or(rustix::param::page_size() as u64, |_| block_bytes),
        })
    }

    /// First byte of the peer's memory in this process.
    pub(crate) fn base_ptr(&self) -> *mut u8 {
        self.mapping.base_ptr()
    }

    /// Usable length.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Length of its pages.
    pub(crate) fn granule_bytes(&self) -> u64 {
        self.granule_bytes
    }
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::mem::Memory;

    #[test]
    fn a_peer_mapping_sees_the_same_bytes() {
        let mut memory = Memory::shared("pair", 4096).unwrap();
        let file = memory.file().unwrap().try_clone_to_owned().unwrap();
        let peer = PeerMapping::map(&file, 4096).unwrap();
        memory.write_at(100, b"kvgate").unwrap();
        let mut seen = [0u8; 6];
        // SAFETY: I-16: bytes 100..106 of a mapping of 4096; no other thread writes them.
        unsafe {
            peer.base_ptr()
                .add(100)
                .copy_to_nonoverlapping(seen.as_mut_ptr(), 6)
        };
        assert_eq!(&seen, b"kvgate");
        assert_eq!(peer.len_bytes(), 4096);
    }

    #[test]
    fn files_that_a_peer_could_shrink_are_refused() {
        let file = memfd_create("soft", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, 4096).unwrap();
        let refusal = PeerMapping::map(&file, 4096).err().unwrap();
        assert!(refusal.contains("not sealed"), "{refusal}");

        let plain = OwnedFd::from(tempfile::tempfile().unwrap());
        assert!(PeerMapping::map(&plain, 4096).is_err());

        let memory = Memory::shared("short", 4096).unwrap();
        let file = memory.file().unwrap().try_clone_to_owned().unwrap();
        let refusal = PeerMapping::map(&file, 4097).err().unwrap();
        assert!(refusal.contains("4097 announced"), "{refusal}");
        assert!(PeerMapping::map(&file, 0).is_err());
    }

    /// Whatever this host has: huge pages that a peer sees as such, or the reason.
    #[test]
    fn huge_granules_are_obtained_or_the_reason_is_said() {
        let options = MemoryOptions {
            huge: Huge::IfPossible,
            numa_node: None,
        };
        let memory = Memory::shared_with("huge", 3 << 20, options).unwrap();
        let file = memory.file().unwrap().try_clone_to_owned().unwrap();
        let peer = PeerMapping::map(&file, memory.len_bytes()).unwrap();
        let placement = memory.placement();
        let required = MemoryOptions {
            huge: Huge::Required,
            ..options
        };
        match &placement.not_huge {
            None => {
                assert_eq!(placement.granule_bytes, 2 << 20);
                assert_eq!(
                    (peer.granule_bytes(), memory.mapped_bytes()),
                    (2 << 20, 4 << 20)
                );
            }
            Some(reason) => {
                assert_eq!(placement.granule_bytes, rustix::param::page_size() as u64);
                assert!(reason.contains("huge pages of 2 MiB are free"), "{reason}");
                // More than any host has set aside.
                assert!(Memory::shared_with("huge", 1 << 30, required).is_err());
            }
        }
        let plain = Memory::shared("plain", 3 << 20).unwrap();
        assert_eq!(plain.placement().not_huge, None, "nobody asked");
    }

    #[test]
    fn memory_lies_on_its_node_and_a_node_that_is_not_there_is_an_argument_error() {
        let on = |node| MemoryOptions {
            numa_node: Some(node),
            ..MemoryOptions::default()
        };
        for node in [1023, 1024, u32::MAX] {
            let error = Memory::shared_with("nowhere", 4096, on(node)).unwrap_err();
            let is_named = matches!(
                error.kind(),
                ErrorKind::InvalidArgument { what: "NUMA node", value } if *value == node.to_string()
            );
            assert!(is_named || is_not_permitted(&error), "{error}");
        }
        match Memory::shared_with("here", 4096, on(0)) {
            Ok(memory) => assert!(matches!(memory.placement().numa_node, None | Some(0))),
            Err(error) => assert!(is_not_permitted(&error), "{error}"),
        }
    }

    /// Containers may forbid the call.
    fn is_not_permitted(error: &Error) -> bool {
        let refusals = [libc::EPERM, libc::ENOSYS];
        matches!(error.kind(), ErrorKind::System { call: "mbind", errno } if refusals.contains(errno))
    }
}
