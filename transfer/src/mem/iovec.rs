//! Vectors of raw memory to and from a socket, and between two processes.
//!
//! The standard and rustix forms take slices; a slice over pages that another thread or process may
//! write would be a lie. These calls take addresses of checked runs only.

use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;

use super::span::SlotRun;
use crate::backend::{PostedOp, Resolved};

/// Keeps the memory of runs registered and mapped while it is borrowed (I-21).
pub(crate) trait Held {}

impl Held for PostedOp {}
impl Held for Resolved {}

/// Most vectors of one call (`UIO_MAXIOV`).
const VECTOR_LIMIT: usize = 1024;

/// A list of stretches that is worked off in order, over as many calls as it takes. Empty between
/// two uses; only its allocations are kept.
pub(crate) struct RawVectors {
    head: Vec<u8>,
    vectors: Vec<libc::iovec>,
    next: usize,
    left_bytes: u64,
}

// SAFETY: I-21: addresses and lengths; the pointers (which forbid the automatic impl) are used
// only through a `Gather` or `Scatter`, which borrow what keeps them good.
unsafe impl Send for RawVectors {}

/// A list that is being sent: its own head, then slots of an operation.
pub(crate) struct Gather<'a> {
    list: &'a mut RawVectors,
    _memory: PhantomData<&'a dyn Held>,
}

/// A list that is being received into.
pub(crate) struct Scatter<'a> {
    list: &'a mut RawVectors,
    _memory: PhantomData<&'a dyn Held>,
}

impl RawVectors {
    /// An empty list.
    pub(crate) fn new() -> Self {
        Self {
            head: Vec::new(),
            vectors: Vec::new(),
            next: 0,
            left_bytes: 0,
        }
    }

    /// What `head` writes, then `runs`, which are the holder's or sections of them.
    pub(crate) fn gather<'a, H: Held>(
        &'a mut self,
        _held_by: &'a H,
        head: impl FnOnce(&mut Vec<u8>),
        runs: &[SlotRun],
    ) -> Gather<'a> {
        self.clear();
        head(&mut self.head);
        if !self.head.is_empty() {
            self.left_bytes = self.head.len() as u64;
            self.vectors.push(libc::iovec {
                iov_base: self.head.as_mut_ptr().cast(),
                iov_len: self.head.len(),
            });
        }
        self.add(runs);
        Gather {
            list: self,
            _memory: PhantomData,
        }
    }

    /// Into `runs`, which are the holder's or sections of them.
    pub(crate) fn scatter<'a, H: Held>(
        &'a mut self,
        _held_by: &'a H,
        runs: &[SlotRun],
    ) -> Scatter<'a> {
        self.clear();
        self.add(runs);
        Scatter {
            list: self,
            _memory: PhantomData,
        }
    }

    fn clear(&mut self) {
        self.vectors.clear();
        self.head.clear();
        self.next = 0;
        self.left_bytes = 0;
    }

    /// Stretches that touch are joined.
    fn add(&mut self, runs: &[SlotRun]) {
        for run in runs {
            self.left_bytes += run.payload_bytes();
            for (at, bytes) in run.stretches() {
                match self.vectors.last_mut() {
                    Some(last) if last.iov_base.wrapping_byte_add(last.iov_len) == at.cast() => {
                        last.iov_len += bytes;
                    }
                    _ => self.vectors.push(libc::iovec {
                        iov_base: at.cast(),
                        iov_len: bytes,
                    }),
                }
            }
        }
    }

    fn header(&mut self) -> libc::msghdr {
        let open = &mut self.vectors[self.next..];
        // SAFETY: I-16: `msghdr` is plain data for which all zeros is the empty header.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = open.as_mut_ptr();
        header.msg_iovlen = open.len().min(VECTOR_LIMIT) as _;
        header
    }

    fn moved(&mut self, result: isize) -> Result<usize, Errno> {
        let count = count_of(result)?;
        self.advance(count);
        Ok(count)
    }

    fn window(&self) -> &[libc::iovec] {
        let open = &self.vectors[self.next..];
        &open[..open.len().min(VECTOR_LIMIT)]
    }

    fn advance(&mut self, mut count: usize) {
        self.left_bytes -= count as u64;
        while let Some(vector) = self.vectors.get_mut(self.next) {
            if count < vector.iov_len {
                vector.iov_base = vector.iov_base.wrapping_byte_add(count);
                vector.iov_len -= count;
                return;
            }
            count -= vector.iov_len;
            self.next += 1;
        }
    }
}

/// The count of a call, or the errno that it has just set.
fn count_of(result: isize) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| {
        let code = std::io::Error::last_os_error().raw_os_error();
        Errno::from_raw_os_error(code.unwrap_or(libc::EIO))
    })
}

/// Two lists of as many bytes: of this process, and of another one that is named by its number.
pub(crate) struct CrossVectors {
    here: RawVectors,
    there: RawVectors,
}

/// Two lists that are being copied between.
pub(crate) struct Cross<'a> {
    lists: &'a mut CrossVectors,
    _memory: PhantomData<&'a dyn Held>,
}

impl CrossVectors {
    /// Two empty lists.
    pub(crate) fn new() -> Self {
        Self {
            here: RawVectors::new(),
            there: RawVectors::new(),
        }
    }

    /// `here` are the holder's runs or sections of them, `there` the runs of the other process.
    pub(crate) fn pair<'a, H: Held>(
        &'a mut self,
        _held_by: &'a H,
        here: &[SlotRun],
        there: &[SlotRun],
    ) -> Cross<'a> {
        self.here.clear();
        self.here.add(here);
        self.there.clear();
        self.there.add(there);
        Cross {
            lists: self,
            _memory: PhantomData,
        }
    }
}

impl Cross<'_> {
    /// Bytes that are still to be copied.
    pub(crate) fn left_bytes(&self) -> u64 {
        self.lists.here.left_bytes
    }

    /// The vectors of the next call, ours first. They may hold different numbers of bytes: the shorter one
    /// ends the call.
    pub(crate) fn windows(&self) -> (&[libc::iovec], &[libc::iovec]) {
        (self.lists.here.window(), self.lists.there.window())
    }

    /// What a call over the windows has returned.
    pub(crate) fn moved(&mut self, result: isize) -> Result<usize, Errno> {
        let count = count_of(result)?;
        self.lists.here.advance(count);
        self.lists.there.advance(count);
        Ok(count)
    }
}

impl Drop for Cross<'_> {
    fn drop(&mut self) {
        self.lists.here.clear();
        self.lists.there.clear();
    }
}

impl Gather<'_> {
    /// Bytes that are still to be sent.
    pub(crate) fn left_bytes(&self) -> u64 {
        self.list.left_bytes
    }

    /// One `sendmsg`. Never raises SIGPIPE.
    pub(crate) fn send(&mut self, socket: impl AsFd) -> Result<usize, Errno> {
        let header = self.list.header();
        let fd = socket.as_fd().as_raw_fd();
        // SAFETY: I-16: the vectors name checked slots; I-21: mapped as long as `_memory` is borrowed;
        // I-7: the engine posts only what is written. The header lives on this stack.
        let sent = unsafe {
            libc::sendmsg(
                fd,
                &raw const header,
                libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
            )
        };
        self.list.moved(sent)
    }
}

impl Scatter<'_> {
    /// Bytes that are still to be received.
    pub(crate) fn left_bytes(&self) -> u64 {
        self.list.left_bytes
    }

    /// One `recvmsg`; `Ok(0)` is the end of the stream.
    pub(crate) fn receive(&mut self, socket: impl AsFd) -> Result<usize, Errno> {
        let mut header = self.list.header();
        let fd = socket.as_fd().as_raw_fd();
        // SAFETY: I-16, I-21: as in `send`; I-2, I-9: the slots are in flight for this peer, nobody
        // may read them yet. The kernel writes at most the named lengths.
        let received = unsafe { libc::recvmsg(fd, &raw mut header, libc::MSG_DONTWAIT) };
        self.list.moved(received)
    }

    /// Takes over bytes that were read ahead; returns how many fitted.
    pub(crate) fn copy_from(&mut self, mut ahead: &[u8]) -> usize {
        let total = ahead.len();
        while let Some(vector) = self.list.vectors.get(self.list.next) {
            let count = ahead.len().min(vector.iov_len);
            if count == 0 {
                break;
            }
            // SAFETY: I-16: `count <= iov_len` of a checked stretch; I-21, I-9: as in `receive`.
            unsafe {
                vector
                    .iov_base
                    .cast::<u8>()
                    .copy_from_nonoverlapping(ahead.as_ptr(), count)
            };
            ahead = &ahead[count..];
            self.list.advance(count);
        }
        total - ahead.len()
    }
}

impl Drop for Gather<'_> {
    fn drop(&mut self) {
        self.list.clear();
    }
}

impl Drop for Scatter<'_> {
    fn drop(&mut self) {
        self.list.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::backend::RunPairs;
    use crate::ids::OpId;
    use crate::mem::{Memory, PoolGeometry, span::PoolSpan};
    use crate::sync::Arc;

    fn pool(memory: &Memory, stride_bytes: u64, slot_count: u32) -> SlotRun {
        let geometry = PoolGeometry {
            offset_bytes: 0,
            stride_bytes,
            slot_bytes: 100,
            slot_count,
        };
        let span = PoolSpan::new(memory.base_ptr(), memory.len_bytes(), geometry).unwrap();
        span.run(0, slot_count).unwrap()
    }

    fn op(run: SlotRun) -> PostedOp {
        PostedOp {
            priority: crate::Priority::Foreground,
            id: OpId(1),
            op: crate::Op::Write,
            runs: Arc::new(RunPairs::default()),
            bytes: run.payload_bytes(),
            arrival: None,
            landing: Arc::new(crate::landed::Landing::new(run.slot_count as u64)),
        }
    }

    fn resolved(run: SlotRun) -> Resolved {
        Resolved {
            runs: vec![run],
            _holds: Vec::new(),
        }
    }

    #[test]
    fn more_stretches_than_one_call_takes_arrive_in_order() {
        let slot_count = 3000;
        let mut from = Memory::host(u64::from(slot_count) * 128).unwrap();
        let mut to = Memory::host(u64::from(slot_count) * 100).unwrap();
        for slot in 0..slot_count {
            from.write_at(u64::from(slot) * 128, &[slot as u8; 100])
                .unwrap();
        }
        let (here, there) = UnixStream::pair().unwrap();
        let run = pool(&from, 128, slot_count);
        let source = op(run);
        let target = resolved(pool(&to, 100, slot_count));
        let (mut from_list, mut to_list) = (RawVectors::new(), RawVectors::new());
        let mut sending = from_list.gather(&source, |head| head.extend(b"head"), &[run]);
        let mut receiving = to_list.scatter(&target, &target.runs);
        assert_eq!(receiving.list.vectors.len(), 1);
        let mut ahead = [0u8; 154];
        while sending.left_bytes() > 0 || receiving.left_bytes() > 0 {
            match sending.send(&here) {
                Ok(_) | Err(Errno::AGAIN) => {}
                Err(errno) => panic!("{errno}"),
            }
            if ahead[0] == 0 {
                std::io::Read::read_exact(&mut &there, &mut ahead).unwrap();
                assert_eq!(&ahead[..4], b"head");
                assert_eq!(receiving.copy_from(&ahead[4..]), 150);
            }
            match receiving.receive(&there) {
                Ok(count) => assert!(count > 0),
                Err(errno) => assert_eq!(errno, Errno::AGAIN),
            }
        }
        drop((sending, receiving));
        let mut seen = [0u8; 100];
        for slot in 0..slot_count {
            to.read_at(u64::from(slot) * 100, &mut seen).unwrap();
            assert_eq!(seen, [slot as u8; 100], "slot {slot}");
        }
    }

    #[test]
    fn a_closed_peer_is_an_error_and_no_signal() {
        let memory = Memory::host(4096).unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        drop(there);
        let run = pool(&memory, 100, 2);
        let source = op(run);
        let mut list = RawVectors::new();
        let mut sending = list.gather(&source, |_| {}, &[run]);
        assert_eq!(sending.send(&here), Err(Errno::PIPE));
        assert_eq!(sending.left_bytes(), 200);
    }

    #[test]
    fn bytes_read_ahead_beyond_the_list_stay_with_the_caller() {
        let memory = Memory::host(4096).unwrap();
        let target = resolved(pool(&memory, 100, 1));
        let mut list = RawVectors::new();
        let mut receiving = list.scatter(&target, &target.runs);
        assert_eq!(receiving.copy_from(&[1; 130]), 100);
        assert_eq!(receiving.left_bytes(), 0);
        assert_eq!(receiving.copy_from(&[1; 130]), 0);
    }
}
