//! Transfers between processes of one host whose memory is in no memfd: the kernel copies from one
//! process to the other (`process_vm_writev` for a write, `process_vm_readv` for a read).
//!
//! Control is as for every neighbour (`neighbour.rs`). The handshake says where the memories lie, and each
//! side reads a nonce from the other one before it says that it is ready: what forbids these calls (Yama,
//! another pid namespace, a sandbox) is found there and not at the first transfer.
//!
//! Nothing at the peer checks a copy. Bounds and registration are checked here, and a revocation waits
//! for this side's answer ([`super::Access::Direct`]).
//!
//! **A number is not a process.** The calls take a pid, which may be given to another process once the
//! peer is reaped. The pidfd is asked before and after each call: while it is silent the peer has not
//! ended, so the number was its own. A result behind its end is void. A process that replaces its program
//! (`execve`) keeps number and pidfd: until its socket is seen closed, a copy may reach the new program.
//!
//! **Yama.** Under `ptrace_scope` 1 a process is reached only by whom it has named. It can name one process,
//! or all of its user: with one peer this side names that one, with several it names all, and with none
//! nobody again. Only a peer that has proven the secret, if there is one, is named. The names are kept per process, in [`VISITORS`].
//!
//! **Lock order.** The mutex of the names is a leaf.

use std::collections::BTreeMap;
use std::fmt;

use rustix::io::Errno;
use rustix::process::{PTracer, Pid, getpid, set_ptracer};

use super::neighbour::{Copying, PeerPools, Reach};
use super::parts::Parts;
use super::process::PeerProcess;
use super::{BackendKind, PostedOp};
use crate::agent::metadata::AgentMetadata;
use crate::deadline::Deadline;
use crate::engine::Op;
use crate::error::{Error, ErrorKind};
use crate::ids::RegionId;
use crate::mem::iovec::{Cross, CrossVectors};
use crate::mem::span::SlotRun;
use crate::sync::Mutex;

/// Bytes that each side lets the other one read in the handshake.
pub(super) const NONCE_BYTES: usize = 32;

/// A peer whose memory is reached through the kernel.
pub(crate) struct Visited {
    pools: PeerPools,
    _permission: Option<Permission>,
}

impl Visited {
    /// `places` are the first bytes of the peer's regions, in its own address space.
    pub(crate) fn new(
        peer: &AgentMetadata,
        places: &BTreeMap<RegionId, u64>,
        permission: Option<Permission>,
    ) -> Self {
        let place = |region| {
            let address = usize::try_from(*places.get(&region)?).ok()?;
            let len_bytes = peer.region(region)?.len_bytes;
            // A number for the kernel. The end must be an address too.
            let end = u64::try_from(address).ok()?.checked_add(len_bytes)?;
            usize::try_from(end).ok()?;
            Some((std::ptr::without_provenance_mut(address), len_bytes))
        };
        Self {
            pools: PeerPools::new(peer, place),
            _permission: permission,
        }
    }
}

impl Reach for Visited {
    const KIND: BackendKind = BackendKind::Cma;

    fn copy(&self, op: &PostedOp, copying: &Copying<'_>) -> Result<(), Error> {
        let mut parts = Parts::new(op.runs.clone());
        let mut lists = CrossVectors::new();
        let mut moved_bytes = 0;
        op.landing.begun_to(0);
        while let Some(part) = parts.next() {
            let before_bytes = moved_bytes;
            let note = |moved_bytes| {
                let end = part.slots.start + slots_in(part.local, moved_bytes - before_bytes);
                op.landing.landed(part.slots.start..end);
            };
            op.landing.begun_to(part.slots.end);
            let pairs = part.local.iter().zip(part.remote);
            let there = pairs.map(|(local, remote)| self.pools.find(local, remote));
            let there = there.collect::<Result<Vec<SlotRun>, Error>>()?;
            let mut cross = lists.pair(op, part.local, &there);
            while cross.left_bytes() > 0 {
                copying.go_on()?;
                check_alive(copying.process)?;
                let result = call(op.op, copying.process.pid(), &mut cross);
                check_alive(copying.process)?;
                match result {
                    Ok(count) if count > 0 => {
                        moved_bytes += count as u64;
                        op.landing.moved(count as u64);
                        note(moved_bytes);
                    }
                    Ok(_) => return Err(failed(op, Errno::FAULT, moved_bytes)),
                    Err(errno) => return Err(failed(op, errno, moved_bytes)),
                }
            }
        }
        Ok(())
    }
}

/// How many slots the first bytes of these runs fill.
fn slots_in(runs: &[SlotRun], mut bytes: u64) -> u64 {
    let mut slots = 0;
    for run in runs {
        let whole = run.payload_bytes().min(bytes);
        slots += whole / (run.slot_bytes as u64).max(1);
        bytes -= whole;
    }
    slots
}

fn check_alive(process: &PeerProcess) -> Result<(), Error> {
    if process.has_ended(Deadline::now()) {
        return Err(ended());
    }
    Ok(())
}

fn ended() -> Error {
    ErrorKind::PeerLost {
        reason: "process of the peer has ended".into(),
    }
    .into()
}

fn failed(op: &PostedOp, errno: Errno, moved_bytes: u64) -> Error {
    if errno == Errno::SRCH {
        return ended();
    }
    ErrorKind::CopyFailed {
        call: name_of(op.op),
        errno: errno.raw_os_error(),
        moved_bytes,
        bytes: op.bytes,
    }
    .into()
}

fn name_of(op: Op) -> &'static str {
    match op {
        Op::Write => "process_vm_writev",
        Op::Read => "process_vm_readv",
    }
}

/// One call over the next vectors; how many bytes it moved. It may move fewer than there are, and stops
/// in front of the first address that is not mapped.
fn call(op: Op, pid: Pid, cross: &mut Cross<'_>) -> Result<usize, Errno> {
    let pid = pid.as_raw_nonzero().get();
    let (here, there) = cross.windows();
    let (here, here_count) = (here.as_ptr(), here.len() as libc::c_ulong);
    let (there, there_count) = (there.as_ptr(), there.len() as libc::c_ulong);
    // SAFETY: I-16: the lists name checked slots of both sides; I-21: our memory is mapped as long as
    // `cross` lives, and the kernel refuses what is not mapped there; I-7, I-9: the engine posts only what
    // was committed or announced, to slots that are in flight.
    let moved = unsafe {
        match op {
            Op::Write => libc::process_vm_writev(pid, here, here_count, there, there_count, 0),
            Op::Read => libc::process_vm_readv(pid, here, here_count, there, there_count, 0),
        }
    };
    cross.moved(moved)
}

/// Why the memory of a peer is out of reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProbeFailure {
    pub(crate) pid: i32,
    /// `None`: something was read, and it was not what the peer had said.
    pub(crate) errno: Option<i32>,
    /// `kernel.yama.ptrace_scope`; `None` in a kernel without Yama.
    pub(crate) ptrace_scope: Option<u32>,
}

impl fmt::Display for ProbeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the memory of process {} cannot be read: ", self.pid)?;
        match self.errno {
            Some(errno) => {
                let text = std::io::Error::from_raw_os_error(errno);
                write!(f, "process_vm_readv: {text}")?;
            }
            None => f.write_str("another process has this number here (pid namespaces?)")?,
        }
        match self.ptrace_scope {
            Some(scope) => write!(f, "; kernel.yama.ptrace_scope is {scope}"),
            None => f.write_str("; the kernel has no Yama"),
        }
    }
}

/// Reads what the peer says it has at `address`.
pub(super) fn probe(
    process: &PeerProcess,
    address: u64,
    nonce: &[u8; NONCE_BYTES],
) -> Result<(), ProbeFailure> {
    let mut found = [0; NONCE_BYTES];
    let errno = match read_there(process.pid(), address, &mut found) {
        Ok(NONCE_BYTES) if found == *nonce => return Ok(()),
        Ok(_) => None,
        Err(errno) => Some(errno.raw_os_error()),
    };
    Err(ProbeFailure {
        pid: process.pid().as_raw_nonzero().get(),
        errno,
        ptrace_scope: ptrace_scope(),
    })
}

fn read_there(pid: Pid, address: u64, into: &mut [u8]) -> Result<usize, Errno> {
    let address = usize::try_from(address).map_err(|_| Errno::FAULT)?;
    let here = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: into.len(),
    };
    let there = libc::iovec {
        iov_base: std::ptr::without_provenance_mut(address),
        iov_len: into.len(),
    };
    let pid = pid.as_raw_nonzero().get();
    // SAFETY: I-16: the kernel writes at most the length of `into`, which is borrowed exclusively; the
    // other address is a number for the kernel, which refuses what is not mapped there.
    let read = unsafe { libc::process_vm_readv(pid, &raw const here, 1, &raw const there, 1, 0) };
    usize::try_from(read).map_err(|_| {
        let code = std::io::Error::last_os_error().raw_os_error();
        Errno::from_raw_os_error(code.unwrap_or(libc::EIO))
    })
}

fn ptrace_scope() -> Option<u32> {
    let text = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?;
    text.trim().parse().ok()
}

/// Who may reach the memory of this process, one entry per connection.
static VISITORS: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// The peer's right to reach this process, until it is dropped.
pub(crate) struct Permission(Pid);

impl Permission {
    /// Grants it. Where there is no Yama nothing has to be granted.
    pub(crate) fn grant(process: &PeerProcess) -> Self {
        let pid = process.pid();
        let mut visitors = VISITORS.lock();
        visitors.push(pid);
        tell(&visitors);
        Self(pid)
    }
}

impl Drop for Permission {
    fn drop(&mut self) {
        let mut visitors = VISITORS.lock();
        if let Some(at) = visitors.iter().position(|pid| *pid == self.0) {
            visitors.swap_remove(at);
        }
        tell(&visitors);
    }
}

/// Tells the kernel.
fn tell(visitors: &[Pid]) {
    // Refused (EINVAL) by a kernel without Yama, which then forbids nothing; by others the probe fails.
    let _ = set_ptracer(tracer(visitors, getpid()));
}

/// The one name that covers all visitors but this process itself.
fn tracer(visitors: &[Pid], own: Pid) -> PTracer {
    let mut others = visitors.iter().filter(|pid| **pid != own);
    match others.next() {
        None => PTracer::None,
        Some(first) if others.all(|other| other == first) => PTracer::ProcessID(*first),
        Some(_) => PTracer::Any,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::agent::metadata::{PoolInfo, RegionInfo};
    use crate::backend::{RemoteRun, RunPairs};
    use crate::ids::{Incarnation, OpId, PoolId};
    use crate::landed::{Landed, Landing, SlotState};
    use crate::mem::{Memory, MemoryKind, PoolGeometry, span::PoolSpan};
    use crate::sync::{Arc, AtomicBool};

    #[test]
    fn one_name_covers_all_visitors() {
        let pid = |raw| Pid::from_raw(raw).unwrap();
        let named = |visitors: &[i32]| {
            let visitors: Vec<Pid> = visitors.iter().map(|raw| pid(*raw)).collect();
            tracer(&visitors, pid(1))
        };
        assert!(matches!(named(&[]), PTracer::None));
        assert!(matches!(named(&[1, 1]), PTracer::None));
        assert!(matches!(named(&[1, 7, 7]), PTracer::ProcessID(found) if found == pid(7)));
        assert!(matches!(named(&[7, 8]), PTracer::Any));
    }

    #[test]
    fn a_failed_probe_names_errno_and_yama() {
        let failure = |errno, ptrace_scope| ProbeFailure {
            pid: 42,
            errno,
            ptrace_scope,
        };
        let text = failure(Some(libc::EPERM), Some(2)).to_string();
        for part in ["process 42", "os error 1", "ptrace_scope is 2"] {
            assert!(text.contains(part), "{text}");
        }
        let text = failure(None, None).to_string();
        assert!(
            text.contains("namespaces") && text.contains("no Yama"),
            "{text}"
        );
    }

    const SLOT_BYTES: usize = 4096;
    const SLOT_COUNT: u32 = 3_000;

    /// Two memories of this process, of which one is taken for another process's.
    struct Rig {
        here: Memory,
        there: Memory,
        process: PeerProcess,
        visited: Visited,
        _socket: UnixStream,
    }

    fn geometry(stride_bytes: u64) -> PoolGeometry {
        PoolGeometry {
            offset_bytes: 0,
            stride_bytes,
            slot_bytes: SLOT_BYTES as u64,
            slot_count: SLOT_COUNT,
        }
    }

    impl Rig {
        fn new() -> Self {
            let bytes = 2 * SLOT_BYTES as u64 * u64::from(SLOT_COUNT);
            let (here, there) = (Memory::host(bytes).unwrap(), Memory::host(bytes).unwrap());
            let (ours, theirs) = UnixStream::pair().unwrap();
            let process = PeerProcess::of(&theirs).unwrap();
            let id = RegionId(4);
            let region = RegionInfo {
                id,
                generation: 1,
                len_bytes: bytes,
                kind: MemoryKind::Host,
            };
            // Every other host page there, all of them here: many vectors against few.
            let pool = PoolInfo {
                id: PoolId(9),
                region: id,
                geometry: geometry(2 * SLOT_BYTES as u64),
            };
            let metadata = AgentMetadata {
                incarnation: Incarnation(1),
                name: "there".into(),
                regions: vec![region],
                pools: vec![pool],
                app: bytes::Bytes::new(),
            };
            let places = [(id, there.base_ptr().expose_provenance() as u64)];
            let permission = Permission::grant(&process);
            let visited = Visited::new(&metadata, &places.into(), Some(permission));
            Self {
                here,
                there,
                process,
                visited,
                _socket: ours,
            }
        }

        /// Slots `0..slot_count` of both sides.
        fn copy(&self, op: Op, slot_count: u32) -> Result<(), Error> {
            self.copy_noting(op, slot_count).0
        }

        /// [`Rig::copy`], and what is known of the slots afterwards.
        fn copy_noting(&self, op: Op, slot_count: u32) -> (Result<(), Error>, Landed) {
            let landing = Arc::new(Landing::new(u64::from(slot_count)));
            let span = PoolSpan::new(
                self.here.base_ptr(),
                self.here.len_bytes(),
                geometry(SLOT_BYTES as u64),
            );
            let local = span.unwrap().run(0, slot_count).unwrap();
            let remote = RemoteRun {
                pool: PoolId(9),
                generation: 1,
                slot: 0,
                slot_count,
            };
            let posted = PostedOp {
                id: OpId(1),
                op,
                priority: crate::Priority::Foreground,
                bytes: local.payload_bytes(),
                runs: Arc::new(RunPairs::of([(local, remote)])),
                arrival: None,
                landing: landing.clone(),
            };
            posted.landing.begun();
            let is_closing = AtomicBool::new(false);
            let copying = Copying::new(&self.process, &is_closing);
            (self.visited.copy(&posted, &copying), landing.now())
        }
    }

    fn fill(memory: &mut Memory, stride_bytes: u64) {
        for slot in 0..SLOT_COUNT {
            let at = u64::from(slot) * stride_bytes;
            let value = slot.to_le_bytes().repeat(SLOT_BYTES / 4);
            memory.write_at(at, &value).unwrap();
        }
    }

    fn check(memory: &mut Memory, stride_bytes: u64) {
        let mut found = vec![0; SLOT_BYTES];
        for slot in 0..SLOT_COUNT {
            let at = u64::from(slot) * stride_bytes;
            memory.read_at(at, &mut found).unwrap();
            assert_eq!(
                found,
                slot.to_le_bytes().repeat(SLOT_BYTES / 4),
                "slot {slot}"
            );
        }
    }

    #[test]
    fn more_vectors_than_one_call_takes_keep_their_order_both_ways() {
        let (dense, sparse) = (SLOT_BYTES as u64, 2 * SLOT_BYTES as u64);
        let mut rig = Rig::new();
        fill(&mut rig.here, dense);
        rig.copy(Op::Write, SLOT_COUNT).unwrap();
        check(&mut rig.there, sparse);
        let mut gap = vec![1; SLOT_BYTES];
        rig.there.read_at(dense, &mut gap).unwrap();
        assert_eq!(gap, vec![0; SLOT_BYTES], "between the slots");

        let mut rig = Rig::new();
        fill(&mut rig.there, sparse);
        rig.copy(Op::Read, SLOT_COUNT).unwrap();
        check(&mut rig.here, dense);
    }

    #[test]
    fn a_copy_that_stops_half_way_says_where() {
        use rustix::mm::{MprotectFlags, mprotect};
        let rig = Rig::new();
        let protect = |flags| {
            let slot = rig.there.base_ptr().wrapping_add(2 * SLOT_BYTES * 1_500);
            // SAFETY: I-21: a slot of a mapped memory that nobody else uses; nothing is unmapped.
            unsafe { mprotect(slot.cast(), SLOT_BYTES, flags).unwrap() };
        };
        protect(MprotectFlags::empty());
        for (op, call) in [
            (Op::Write, "process_vm_writev"),
            (Op::Read, "process_vm_readv"),
        ] {
            let (result, landed) = rig.copy_noting(op, SLOT_COUNT);
            let error = result.unwrap_err();
            assert_eq!(landed.count(SlotState::Landed), 1_500);
            assert_eq!(landed.slot(1_499), Some(SlotState::Landed));
            let expected = ErrorKind::CopyFailed {
                call,
                errno: libc::EFAULT,
                moved_bytes: 1_500 * SLOT_BYTES as u64,
                bytes: u64::from(SLOT_COUNT) * SLOT_BYTES as u64,
            };
            assert_eq!(*error.kind(), expected);
            rig.copy(op, 1_500).unwrap();
        }
        protect(MprotectFlags::READ | MprotectFlags::WRITE);
        rig.copy(Op::Write, SLOT_COUNT).unwrap();
    }

    #[test]
    fn slots_outside_are_refused_before_a_call() {
        let mut rig = Rig::new();
        let slot_count = 100;
        let metadata = AgentMetadata {
            incarnation: Incarnation(1),
            name: "there".into(),
            regions: vec![RegionInfo {
                id: RegionId(4),
                generation: 1,
                len_bytes: rig.there.len_bytes(),
                kind: MemoryKind::Host,
            }],
            pools: vec![PoolInfo {
                id: PoolId(9),
                region: RegionId(4),
                geometry: PoolGeometry {
                    slot_count,
                    ..geometry(SLOT_BYTES as u64)
                },
            }],
            app: bytes::Bytes::new(),
        };
        let permission = Permission::grant(&rig.process);
        let places = [(RegionId(4), rig.there.base_ptr().expose_provenance() as u64)];
        rig.visited = Visited::new(&metadata, &places.into(), Some(permission));
        fill(&mut rig.here, SLOT_BYTES as u64);
        let error = rig.copy(Op::Write, slot_count + 1).unwrap_err();
        let expected = ErrorKind::SlotOutOfRange {
            pool: PoolId(9),
            slot: 0,
            slot_count,
        };
        assert_eq!(*error.kind(), expected);
        let mut first = [1; 4];
        rig.there.read_at(SLOT_BYTES as u64, &mut first).unwrap();
        assert_eq!(first, [0; 4], "nothing was copied");
        // An address whose memory would end beyond the last one places nothing.
        let permission = Permission::grant(&rig.process);
        rig.visited = Visited::new(
            &metadata,
            &[(RegionId(4), u64::MAX - 5)].into(),
            Some(permission),
        );
        let error = rig.copy(Op::Write, 1).unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::UnknownPool { pool: PoolId(9) });
    }

    #[test]
    fn a_probe_reads_what_stands_there_or_says_why_not() {
        let (_ours, theirs) = UnixStream::pair().unwrap();
        let process = PeerProcess::of(&theirs).unwrap();
        let nonce = Box::new([7; NONCE_BYTES]);
        let address = nonce.as_ptr().expose_provenance() as u64;
        assert_eq!(probe(&process, address, &nonce), Ok(()));
        let other = probe(&process, address, &[8; NONCE_BYTES]).unwrap_err();
        assert_eq!(other.errno, None);
        let unmapped = probe(&process, 8, &nonce).unwrap_err();
        assert_eq!(unmapped.errno, Some(libc::EFAULT));
        assert_eq!(unmapped.pid, getpid().as_raw_nonzero().get());
    }
}
