//! Vectors of raw memory to and from a socket.
//!
//! The standard and rustix forms take slices; a slice over pages that another thread or process may
//! write would be a lie. These calls take addresses of checked runs only.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use super::span::SlotRun;

/// Most vectors of one call (`UIO_MAXIOV`).
const VECTOR_LIMIT: usize = 1024;

/// A list of stretches that is worked off in order, over as many calls as it takes.
pub(crate) struct RawVectors {
    vectors: Vec<libc::iovec>,
    next: usize,
    left_bytes: u64,
}

// SAFETY: I-21: addresses and lengths; the pointers (which forbid the automatic impl) are
// dereferenced by the kernel only, under the contract of `new`.
unsafe impl Send for RawVectors {}

impl RawVectors {
    /// An empty list, to be filled by [`RawVectors::refill`].
    pub(crate) fn new() -> Self {
        Self {
            vectors: Vec::new(),
            next: 0,
            left_bytes: 0,
        }
    }

    /// Starts over with `head` (only for sending) and these runs; the allocation is kept. Stretches
    /// that touch are joined.
    ///
    /// # Safety
    /// `head` stays where it is and the runs stay mapped until the list is worked off or refilled
    /// (I-21). For receiving, `head` is empty and nobody else reads or writes the runs meanwhile
    /// (I-2, I-9); for sending, nobody writes them (I-7).
    pub(crate) unsafe fn refill<'a>(
        &mut self,
        head: &[u8],
        runs: impl Iterator<Item = &'a SlotRun>,
    ) {
        self.vectors.clear();
        self.next = 0;
        self.left_bytes = head.len() as u64;
        if !head.is_empty() {
            self.vectors.push(libc::iovec {
                iov_base: head.as_ptr().cast_mut().cast(),
                iov_len: head.len(),
            });
        }
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

    /// Bytes that are still to be moved.
    pub(crate) fn left_bytes(&self) -> u64 {
        self.left_bytes
    }

    /// One `sendmsg`. Never raises SIGPIPE.
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        let mut header = self.header();
        // SAFETY: I-16, I-21: the vectors name checked, mapped memory (`refill`); the header lives
        // on this stack during the call.
        let sent =
            unsafe { libc::sendmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_NOSIGNAL) };
        self.moved(sent)
    }

    /// One `recvmsg`; `Ok(0)` is the end of the stream.
    pub(crate) fn receive(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        let mut header = self.header();
        // SAFETY: I-16, I-21, I-9: as in `send`; the kernel writes at most the named lengths.
        let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, 0) };
        self.moved(received)
    }

    /// Takes over bytes that were read ahead; returns how many fitted.
    pub(crate) fn copy_from(&mut self, mut ahead: &[u8]) -> usize {
        let total = ahead.len();
        while let Some(vector) = self.vectors.get(self.next) {
            let count = ahead.len().min(vector.iov_len);
            if count == 0 {
                break;
            }
            // SAFETY: I-16: `count <= iov_len` of a checked stretch; I-21, I-9: contract of `refill`.
            unsafe {
                vector
                    .iov_base
                    .cast::<u8>()
                    .copy_from_nonoverlapping(ahead.as_ptr(), count)
            };
            ahead = &ahead[count..];
            self.advance(count);
        }
        total - ahead.len()
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
        let Ok(count) = usize::try_from(result) else {
            let code = std::io::Error::last_os_error().raw_os_error();
            return Err(Errno::from_raw_os_error(code.unwrap_or(libc::EIO)));
        };
        self.advance(count);
        Ok(count)
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::mem::{Memory, PoolGeometry, span::PoolSpan};

    fn pool(memory: &Memory, stride_bytes: u64, slot_count: u32) -> PoolSpan {
        let geometry = PoolGeometry {
            offset_bytes: 0,
            stride_bytes,
            slot_bytes: 100,
            slot_count,
        };
        PoolSpan::new(memory.base_ptr(), memory.len_bytes(), geometry).unwrap()
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
        let source = pool(&from, 128, slot_count).run(0, slot_count).unwrap();
        let target = pool(&to, 100, slot_count).run(0, slot_count).unwrap();
        let (mut sending, mut receiving) = (RawVectors::new(), RawVectors::new());
        // SAFETY: I-21: both memories live to the end of the test.
        unsafe {
            sending.refill(&[], [&source].into_iter());
            receiving.refill(&[], [&target].into_iter());
        }
        assert_eq!(receiving.vectors.len(), 1);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while sending.left_bytes() > 0 {
                    sending.send(here.as_fd()).unwrap();
                }
            });
            let mut ahead = [0u8; 150];
            std::io::Read::read_exact(&mut &there, &mut ahead).unwrap();
            assert_eq!(receiving.copy_from(&ahead), 150);
            while receiving.left_bytes() > 0 {
                assert!(receiving.receive(there.as_fd()).unwrap() > 0);
            }
        });
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
        let run = pool(&memory, 100, 2).run(0, 2).unwrap();
        let mut sending = RawVectors::new();
        // SAFETY: I-21: `memory` lives to the end of the test.
        unsafe { sending.refill(&[], [&run].into_iter()) };
        assert_eq!(sending.send(here.as_fd()), Err(Errno::PIPE));
        assert_eq!(sending.left_bytes(), 200);
    }

    #[test]
    fn bytes_read_ahead_beyond_the_list_stay_with_the_caller() {
        let memory = Memory::host(4096).unwrap();
        let run = pool(&memory, 100, 1).run(0, 1).unwrap();
        let mut receiving = RawVectors::new();
        // SAFETY: I-21: `memory` lives to the end of the test.
        unsafe { receiving.refill(&[], [&run].into_iter()) };
        assert_eq!(receiving.copy_from(&[1; 130]), 100);
        assert_eq!(receiving.left_bytes(), 0);
        assert_eq!(receiving.copy_from(&[1; 130]), 0);
    }
}
