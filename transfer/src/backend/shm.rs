//! Transfers between processes of one host: both sides map the other's pools, whoever posts copies.
//!
//! The handshake hands sealed memfds over an abstract Unix socket, so nothing is left in any file
//! system. Everything else is as for every neighbour (`neighbour.rs`): here the copy is plain memory.
//!
//! The peer writes only its own arrival frames and into our pools, where wrong bytes are wrong data;
//! all numbers of its frames are checked where they are used.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

use super::neighbour::{Copying, PeerPools, Reach};
use super::{BackendKind, PostedOp};
use crate::agent::metadata::AgentMetadata;
use crate::engine::Op;
use crate::error::Error;
use crate::ids::RegionId;
use crate::mem::PeerMapping;
use crate::mem::copy::{BYTES_AT_ONCE, SLOTS_AT_ONCE, copy_slots};

/// A peer whose pools are mapped here.
pub(crate) struct Mapped {
    pools: PeerPools,
    /// Keeps the spans of `pools` mapped.
    memories: BTreeMap<RegionId, PeerMapping>,
}

impl Mapped {
    pub(crate) fn new(peer: &AgentMetadata, memories: BTreeMap<RegionId, PeerMapping>) -> Self {
        let place = |region| {
            let memory: &PeerMapping = memories.get(&region)?;
            Some((memory.base_ptr(), memory.len_bytes()))
        };
        Self {
            pools: PeerPools::new(peer, place),
            memories,
        }
    }
}

impl Reach for Mapped {
    const KIND: BackendKind = BackendKind::Shm;

    fn granule_bytes(&self, region: RegionId) -> Option<u64> {
        Some(self.memories.get(&region)?.granule_bytes())
    }

    fn copy(&self, op: &PostedOp, copying: &Copying<'_>) -> Result<(), Error> {
        let is_read = op.op == Op::Read;
        let mut done = 0;
        for group in &op.runs.groups {
            for pool in &group.pools {
                let remote = self.pools.whole(pool, group.remote_last)?;
                let at_once = SLOTS_AT_ONCE
                    .min(BYTES_AT_ONCE / remote.slot_bytes.max(1))
                    .max(1);
                for slots in group.slots.chunks(at_once) {
                    copying.go_on()?;
                    // SAFETY: I-16: the local slots were checked when the transfer was prepared, `whole`
                    // has checked the remote ones and the length; I-21: the engine keeps our memory
                    // mapped while the operation is posted, `memories` the peer's, and they are
                    // different mappings; I-7, I-9: the engine posts only what was committed or
                    // announced, to slots that are in flight.
                    unsafe { copy_slots(&pool.local, &remote, slots, is_read) };
                    let begin = done;
                    done += slots.len() as u64;
                    op.landing.moved((slots.len() * remote.slot_bytes) as u64);
                    op.landing.landed(begin..done);
                }
            }
        }
        Ok(())
    }
}

/// The pidfd of the process at the other end of a Unix socket.
pub(super) fn peer_pidfd(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    /// Linux 6.5; not in every libc crate's list of targets.
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut fd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: I-16: the kernel writes at most `len` bytes, the size of `fd`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut len,
        )
    };
    if result != 0 || fd < 0 {
        let code = std::io::Error::last_os_error().raw_os_error();
        return Err(Errno::from_raw_os_error(code.unwrap_or(libc::EIO)));
    }
    // SAFETY: I-21: the call has just made this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
