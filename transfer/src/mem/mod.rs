//! Memory that transfers may touch: allocation, mapping, limits, and the raw vectors of the backends.
//!
//! A [`Memory`] is one mapping, zeroed and populated when it is made. It never moves, never shrinks
//! and is unmapped only when its last owner drops it. Nothing here knows pages, layers or peers: a
//! registered region keeps an `Arc<Memory>` until its operations are terminal (I-21).
//!
//! Locks and atomics: none. The kernel's mapping is the only shared state.

mod available;
#[cfg(all(feature = "bare", not(kv_loom)))]
pub mod bare;
pub(crate) mod copy;
pub(crate) mod huge;
#[cfg(not(kv_loom))]
pub(crate) mod iovec;
mod map;
mod place;
pub(crate) mod region;
pub(crate) mod ring;
mod shared;
pub(crate) mod span;

pub(crate) use place::Placement;
pub use place::{Huge, MemoryOptions};
pub use span::PoolGeometry;

#[cfg(not(kv_loom))]
pub(crate) use shared::PeerMapping;

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::error::{Error, ErrorKind};
use map::Mapping;

/// Where a [`Memory`] lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Anonymous memory of this process.
    Host,
    /// A sealed memfd that a peer on the same host can map.
    Shared,
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Shared => "shared",
        })
    }
}

/// One zeroed, populated mapping. It stays where it is until the last owner drops it.
///
/// A child made by `fork` does not inherit it, so a dead process leaves no writer behind.
pub struct Memory {
    mapping: Mapping,
    len_bytes: u64,
    kind: MemoryKind,
    file: Option<OwnedFd>,
    placement: Placement,
}

impl Memory {
    /// Zeroed anonymous memory of `len_bytes` bytes; every page is populated before this returns.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when the host or the control group has less to give (nothing was
    /// touched then), [`ErrorKind::InvalidArgument`] for zero bytes, [`ErrorKind::System`] when the
    /// kernel refuses the mapping.
    pub fn host(len_bytes: u64) -> Result<Self, Error> {
        let mapped_bytes = admit(len_bytes)?;
        let mapping = Mapping::anonymous(mapped_bytes)?;
        let placement = Placement {
            granule_bytes: rustix::param::page_size() as u64,
            not_huge: None,
            numa_node: mapping.node(),
        };
        Ok(Self {
            mapping,
            len_bytes,
            kind: MemoryKind::Host,
            file: None,
            placement,
        })
    }

    /// As [`Memory::host`], in a memfd that is sealed against shrinking, growing and further seals,
    /// so that a peer which maps it can rely on its length. `name` shows in `/proc/self/maps` only;
    /// nothing appears in the file system.
    ///
    /// # Errors
    /// As [`Memory::host`].
    pub fn shared(name: &str, len_bytes: u64) -> Result<Self, Error> {
        Self::shared_with(name, len_bytes, MemoryOptions::default())
    }

    /// [`Memory::shared`] of huge pages or on a NUMA node, where these can be had. What was obtained, and why not,
    /// stands in [`crate::AgentStatus`] once it is registered.
    ///
    /// # Errors
    /// As [`Memory::host`]; also when huge pages are required and too few are free, and
    /// [`ErrorKind::InvalidArgument`] for a node that this host does not have.
    pub fn shared_with(name: &str, len_bytes: u64, options: MemoryOptions) -> Result<Self, Error> {
        let mapped_bytes = admit(len_bytes)?;
        let (file, mapping, placement) = shared::create(name, mapped_bytes, options)?;
        Ok(Self {
            mapping,
            len_bytes,
            kind: MemoryKind::Shared,
            file: Some(file),
            placement,
        })
    }

    /// How it has come to lie.
    pub(crate) fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Usable length.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Where this memory lives.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// First byte. Getting the address is safe; whoever dereferences it answers for I-1 and I-21.
    #[must_use]
    pub fn base_ptr(&self) -> *mut u8 {
        self.mapping.base_ptr()
    }

    /// The memfd of a [`MemoryKind::Shared`] memory, for the handshake with a peer on this host.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(std::os::fd::AsFd::as_fd)
    }

    /// Length of the mapping: `len_bytes` rounded up to whole pages of the host.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.mapping.mapped_bytes()
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("kind", &self.kind)
            .field("len_bytes", &self.len_bytes)
            .finish_non_exhaustive()
    }
}

/// Checks that `len_bytes` may be allocated and rounds it up to host pages.
fn admit(len_bytes: u64) -> Result<usize, Error> {
    if len_bytes == 0 {
        return Err(ErrorKind::InvalidArgument {
            what: "memory length in bytes",
            value: len_bytes.to_string(),
        }
        .into());
    }
    let available_bytes = available::available_bytes();
    let host_granule_bytes = rustix::param::page_size() as u64;
    let rounded = len_bytes.checked_next_multiple_of(host_granule_bytes);
    match rounded.map(usize::try_from) {
        Some(Ok(mapped_bytes)) if mapped_bytes as u64 <= available_bytes => Ok(mapped_bytes),
        _ => Err(ErrorKind::OutOfMemory {
            asked_bytes: len_bytes,
            available_bytes,
        }
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_is_zeroed_and_long_enough() {
        let mut memory = Memory::host(10_000).unwrap();
        assert_eq!(memory.len_bytes(), 10_000);
        assert_eq!(memory.kind(), MemoryKind::Host);
        assert_eq!(memory.mapped_bytes() % 4096, 0);
        let mut bytes = vec![1u8; 10_000];
        memory.read_at(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn absurd_lengths_are_refused_by_name_and_touch_nothing() {
        let before = available::available_bytes();
        for len_bytes in [u64::MAX, u64::MAX - 4095, 1 << 60, before.saturating_mul(2)] {
            for memory in [Memory::host(len_bytes), Memory::shared("absurd", len_bytes)] {
                match memory.unwrap_err().kind() {
                    ErrorKind::OutOfMemory {
                        asked_bytes,
                        available_bytes,
                    } => {
                        assert_eq!(*asked_bytes, len_bytes);
                        assert!(*available_bytes < len_bytes);
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    #[test]
    fn zero_bytes_is_an_argument_error() {
        let error = Memory::host(0).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::InvalidArgument { .. }));
    }

    #[test]
    fn sealed_memory_cannot_be_truncated_grown_or_unsealed() {
        let memory = Memory::shared("sealed", 8192).unwrap();
        let file = memory.file().unwrap();
        assert_eq!(
            rustix::fs::ftruncate(file, 4096),
            Err(rustix::io::Errno::PERM)
        );
        assert_eq!(
            rustix::fs::ftruncate(file, 16384),
            Err(rustix::io::Errno::PERM)
        );
        assert_eq!(
            rustix::fs::fcntl_add_seals(file, rustix::fs::SealFlags::WRITE),
            Err(rustix::io::Errno::PERM)
        );
        assert_eq!(rustix::fs::fstat(file).unwrap().st_size, 8192);
    }

    #[test]
    fn memory_is_resident_when_it_is_handed_out() {
        let memory = Memory::shared("resident", 1 << 20).unwrap();
        let file = memory.file().unwrap();
        // Blocks of 512 bytes: a memfd counts the pages it really holds.
        assert_eq!(rustix::fs::fstat(file).unwrap().st_blocks * 512, 1 << 20);
    }
}
