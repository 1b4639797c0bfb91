//! Memory shared between processes of one host: sealed memfds, ours and the peer's.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::map::Mapping;
use crate::error::Error;

/// Seals that fix the length for good.
const LENGTH_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A populated memfd whose length nobody can change any more.
pub(super) fn create(name: &str, mapped_bytes: usize) -> Result<(OwnedFd, Mapping), Error> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(|errno| Error::system("memfd_create", errno))?;
    ftruncate(&file, mapped_bytes as u64).map_err(|errno| Error::system("ftruncate", errno))?;
    fcntl_add_seals(&file, LENGTH_SEALS | SealFlags::SEAL)
        .map_err(|errno| Error::system("fcntl(ADD_SEALS)", errno))?;
    let mapping = Mapping::shared(file.as_fd(), mapped_bytes)?;
    Ok((file, mapping))
}

/// A peer's memfd, mapped here. The peer's process may write it at any time; this side only ever
/// copies plain bytes in and never interprets what stands there.
#[cfg(not(kv_loom))]
pub(crate) struct PeerMapping {
    mapping: Mapping,
    len_bytes: u64,
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
        let file_bytes = fstat(file)
            .map_err(|errno| format!("fstat: {errno}"))?
            .st_size;
        let file_bytes = u64::try_from(file_bytes).unwrap_or(0);
        if len_bytes == 0 || file_bytes < len_bytes {
            return Err(format!(
                "memory holds {file_bytes} bytes, {len_bytes} announced"
            ));
        }
        let mapped_bytes =
            usize::try_from(len_bytes).map_err(|_| format!("memory of {len_bytes} bytes"))?;
        let mapping =
            Mapping::shared(file.as_fd(), mapped_bytes).map_err(|error| error.to_string())?;
        Ok(Self { mapping, len_bytes })
    }

    /// First byte of the peer's memory in this process.
    pub(crate) fn base_ptr(&self) -> *mut u8 {
        self.mapping.base_ptr()
    }

    /// Usable length.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
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
}
