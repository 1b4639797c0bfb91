//! The loops that a benchmark puts beside the engine, over the same bytes: plain copies and socket vectors
//! of scattered slots, fills, comparisons, and a word that two processes share.
//!
//! Behind the feature `bare`, for `transfer-bench`: nothing here asks a lease, a flight or a region. Slots
//! are checked against their memory once, so no call leaves it; that nobody else uses the bytes meanwhile is
//! the caller's promise, and breaking it gives wrong bytes and wrong figures.

use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use super::{Memory, MemoryKind, PeerMapping, PoolGeometry, map::Mapping, span::PoolSpan};
use crate::agent::Agent;
use crate::error::{Error, ErrorKind};
use crate::sync::{Arc, AtomicU32};

/// Vectors of one call. More gain nothing on a socket.
const VECTORS: usize = 512;

/// A memory as this process sees it.
pub struct View {
    base: *mut u8,
    len_bytes: u64,
    _mapped: Mapped,
}

enum Mapped {
    Own { _memory: Arc<Memory> },
    Peer { _mapping: PeerMapping },
}

// SAFETY: I-21: an address that `_mapped` keeps good; `Memory` and `PeerMapping` can be shared.
unsafe impl Send for View {}
// SAFETY: I-21: as above.
unsafe impl Sync for View {}

impl View {
    /// A memory of this process.
    pub fn own(memory: Arc<Memory>) -> Arc<Self> {
        let (base, len_bytes) = (memory.base_ptr(), memory.len_bytes());
        let mapped = Mapped::Own { _memory: memory };
        Arc::new(Self {
            base,
            len_bytes,
            _mapped: mapped,
        })
    }

    /// A shared memory of another process, by its file.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] unless it is a sealed memfd of that length.
    pub fn peer(file: &OwnedFd, len_bytes: u64) -> Result<Arc<Self>, Error> {
        let mapping =
            PeerMapping::map(file, len_bytes).map_err(|value| ErrorKind::InvalidArgument {
                what: "memory of a peer",
                value,
            })?;
        Ok(Arc::new(Self {
            base: mapping.base_ptr(),
            len_bytes,
            _mapped: Mapped::Peer { _mapping: mapping },
        }))
    }

    /// A word for wake-ups between processes; `None` outside the memory or across a word's border.
    pub fn word(&self, offset_bytes: u64) -> Option<&AtomicU32> {
        let word_bytes = size_of::<AtomicU32>() as u64;
        let end_bytes = offset_bytes.checked_add(word_bytes)?;
        if end_bytes > self.len_bytes || !offset_bytes.is_multiple_of(word_bytes) {
            return None;
        }
        let at = self
            .base
            .wrapping_add(offset_bytes as usize)
            .cast::<AtomicU32>();
        // SAFETY: I-16: inside the memory and aligned (a mapping starts at a host page); I-21: mapped as
        // long as `self`. Every access to the word goes through an atomic.
        Some(unsafe { &*at })
    }
}

/// Memory that takes room only where it is touched: for counting what lists cost, apart from the pools.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] when the address space has no such hole, [`ErrorKind::InvalidArgument`].
pub fn unpopulated(len_bytes: u64) -> Result<Memory, Error> {
    let mapped_bytes = usize::try_from(len_bytes).map_err(|_| ErrorKind::InvalidArgument {
        what: "memory length in bytes",
        value: len_bytes.to_string(),
    })?;
    Ok(Memory {
        mapping: Mapping::unpopulated(mapped_bytes)?,
        len_bytes,
        kind: MemoryKind::Host,
        file: None,
    })
}

/// Two connected agents of this process whose queues nobody runs: a post stays a post.
///
/// # Errors
/// As [`Agent::connect_local`] and [`crate::AgentBuilder::build`].
pub fn agents_without_workers() -> Result<(Agent, Agent), Error> {
    let build = |name| Agent::builder(name).without_workers().build();
    Ok((build("posting")?, build("receiving")?))
}

/// The file of a shared memory, for [`View::peer`] in another process.
pub fn file(memory: &Memory) -> Option<BorrowedFd<'_>> {
    memory.file()
}

/// Slots of some pools of one memory, in order. Two of them with the same lengths make a transfer.
pub struct Slots {
    groups: Vec<Group>,
    _view: Arc<View>,
}

struct Group {
    base: *mut u8,
    stride_bytes: usize,
    slot_bytes: usize,
    slots: Vec<u32>,
}

// SAFETY: I-21: addresses of checked slots of a view, which is held with them.
unsafe impl Send for Slots {}
// SAFETY: I-21: as above.
unsafe impl Sync for Slots {}

impl Slots {
    /// Checks that every slot lies in its pool and every pool in the memory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] with the pool or the slot.
    pub fn new(view: &Arc<View>, lists: Vec<(PoolGeometry, Vec<u32>)>) -> Result<Self, Error> {
        let invalid = |what, value: String| Error::from(ErrorKind::InvalidArgument { what, value });
        let mut groups = Vec::with_capacity(lists.len());
        for (geometry, slots) in lists {
            let span = PoolSpan::new(view.base, view.len_bytes, geometry)
                .ok_or_else(|| invalid("pool geometry", format!("{geometry:?}")))?;
            if let Some(slot) = slots.iter().find(|slot| **slot >= geometry.slot_count) {
                return Err(invalid("slot", slot.to_string()));
            }
            let Some(first) = span.run(0, 1) else {
                continue;
            };
            groups.push(Group {
                base: first.base,
                stride_bytes: first.stride_bytes,
                slot_bytes: first.slot_bytes,
                slots,
            });
        }
        Ok(Self {
            groups,
            _view: view.clone(),
        })
    }

    /// Number of slots.
    pub fn count(&self) -> u64 {
        self.groups
            .iter()
            .map(|group| group.slots.len() as u64)
            .sum()
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        let bytes = |group: &Group| group.slots.len() as u64 * group.slot_bytes as u64;
        self.groups.iter().map(bytes).sum()
    }

    /// Copies slot after slot to its partner: one thread, no checks.
    ///
    /// # Panics
    /// When the two do not have the same shape.
    pub fn copy_to(&self, target: &Self) {
        assert!(self.fits(target), "slots of another shape");
        for (from, to) in self.groups.iter().zip(&target.groups) {
            for (&source, &slot) in from.slots.iter().zip(&to.slots) {
                // SAFETY: I-16: both slots were checked and have one length; I-21: both views are held;
                // two memories, or two mappings of which the caller keeps others away.
                unsafe {
                    to.at(slot)
                        .copy_from_nonoverlapping(from.at(source), from.slot_bytes)
                }
            }
        }
    }

    /// Writes bytes that depend on `seed` and on the place in the list.
    pub fn fill(&self, seed: u64) {
        self.each(|ordinal, at, len| {
            let first = mix(seed ^ (ordinal << 32));
            for (index, chunk_bytes) in words(len) {
                let word = (first ^ (index as u64).wrapping_mul(STEP)).to_le_bytes();
                // SAFETY: I-16: `index * 8 + chunk_bytes <= len` of a checked slot; I-21: the view is held.
                unsafe {
                    at.wrapping_add(index * 8)
                        .copy_from_nonoverlapping(word.as_ptr(), chunk_bytes)
                };
            }
        });
    }

    /// How many slots do not hold what [`Slots::fill`] with this seed has written.
    pub fn differing(&self, seed: u64) -> u64 {
        let mut count = 0;
        self.each(|ordinal, at, len| {
            let first = mix(seed ^ (ordinal << 32));
            let mut difference = 0;
            for (index, chunk_bytes) in words(len) {
                let word = (first ^ (index as u64).wrapping_mul(STEP)).to_le_bytes();
                let (mut expected, mut found) = ([0; 8], [0; 8]);
                expected[..chunk_bytes].copy_from_slice(&word[..chunk_bytes]);
                // SAFETY: I-16, I-21: as in `fill`.
                unsafe {
                    at.wrapping_add(index * 8)
                        .copy_to_nonoverlapping(found.as_mut_ptr(), chunk_bytes)
                };
                difference |= u64::from_le_bytes(expected) ^ u64::from_le_bytes(found);
            }
            count += u64::from(difference != 0);
        });
        count
    }

    /// Sends every slot, in order, with `writev` on a blocking socket.
    ///
    /// # Errors
    /// What the system says; [`Errno::PIPE`] when the stream has ended.
    pub fn send(&self, socket: impl AsFd) -> Result<(), Errno> {
        let fd = socket.as_fd().as_raw_fd();
        // SAFETY: I-16, I-21: `stream` passes vectors of checked slots that are held.
        self.stream(|list, count| unsafe { libc::writev(fd, list, count) })
    }

    /// Receives every slot, in order, with `readv` on a blocking socket.
    ///
    /// # Errors
    /// As [`Slots::send`].
    pub fn receive(&self, socket: impl AsFd) -> Result<(), Errno> {
        let fd = socket.as_fd().as_raw_fd();
        // SAFETY: I-16, I-21: as in `send`; the kernel writes at most the named lengths.
        self.stream(|list, count| unsafe { libc::readv(fd, list, count) })
    }

    fn stream(&self, call: impl Fn(*const libc::iovec, libc::c_int) -> isize) -> Result<(), Errno> {
        let mut vectors = Vec::with_capacity(VECTORS);
        for group in &self.groups {
            for slots in group.slots.chunks(VECTORS) {
                vectors.clear();
                vectors.extend(slots.iter().map(|&slot| libc::iovec {
                    iov_base: group.at(slot).cast(),
                    iov_len: group.slot_bytes,
                }));
                move_all(&mut vectors, &call)?;
            }
        }
        Ok(())
    }

    fn each(&self, mut visit: impl FnMut(u64, *mut u8, usize)) {
        let mut ordinal = 0;
        for group in &self.groups {
            for &slot in &group.slots {
                visit(ordinal, group.at(slot), group.slot_bytes);
                ordinal += 1;
            }
        }
    }

    fn fits(&self, other: &Self) -> bool {
        let shape = |group: &Group| (group.slots.len(), group.slot_bytes);
        self.groups
            .iter()
            .map(shape)
            .eq(other.groups.iter().map(shape))
    }
}

impl Group {
    fn at(&self, slot: u32) -> *mut u8 {
        self.base.wrapping_add(slot as usize * self.stride_bytes)
    }
}

/// Repeats `call` until every vector is worked off.
fn move_all(
    vectors: &mut [libc::iovec],
    call: &impl Fn(*const libc::iovec, libc::c_int) -> isize,
) -> Result<(), Errno> {
    let mut next = 0;
    while next < vectors.len() {
        let open = &vectors[next..];
        let moved = call(open.as_ptr(), open.len() as libc::c_int);
        let Ok(mut moved) = usize::try_from(moved) else {
            let code = std::io::Error::last_os_error().raw_os_error();
            match Errno::from_raw_os_error(code.unwrap_or(libc::EIO)) {
                Errno::INTR => continue,
                errno => return Err(errno),
            }
        };
        if moved == 0 {
            return Err(Errno::PIPE);
        }
        while let Some(vector) = vectors.get_mut(next) {
            if moved < vector.iov_len {
                vector.iov_base = vector.iov_base.wrapping_byte_add(moved);
                vector.iov_len -= moved;
                break;
            }
            moved -= vector.iov_len;
            next += 1;
        }
    }
    Ok(())
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The words of a slot: number and length; the last one may be short.
fn words(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len.div_ceil(8)).map(move |index| (index, (len - index * 8).min(8)))
}

/// The finaliser of splitmix64.
fn mix(seed: u64) -> u64 {
    let mut mixed = seed.wrapping_add(STEP);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::sync::Ordering;

    const POOL: PoolGeometry = PoolGeometry {
        offset_bytes: 8,
        stride_bytes: 40,
        slot_bytes: 37,
        slot_count: 2000,
    };

    fn view() -> Arc<View> {
        View::own(Arc::new(Memory::host(100_000).unwrap()))
    }

    fn slots(view: &Arc<View>, step: u32) -> Slots {
        let list = (0..1999).map(|index| index * step % 1999).collect();
        Slots::new(view, vec![(POOL, list)]).unwrap()
    }

    #[test]
    fn copies_and_streams_are_seen_and_a_stale_or_damaged_slot_too() {
        let (from, to) = (view(), view());
        let (source, target) = (slots(&from, 7), slots(&to, 11));
        source.fill(1);
        assert_eq!((source.differing(1), source.differing(2)), (0, 1999));
        source.copy_to(&target);
        assert_eq!(target.differing(1), 0);
        source.fill(2);
        assert_eq!(target.differing(2), 1999);
        let (here, there) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| source.send(&here).unwrap());
            target.receive(&there).unwrap();
        });
        assert_eq!(target.differing(2), 0);
        // The last byte of one slot.
        let last = POOL.offset_bytes + 3 * POOL.stride_bytes + 36;
        let word = to.word(last - last % 4).unwrap();
        word.fetch_xor(1 << (8 * (last % 4)), Ordering::Relaxed);
        assert_eq!(target.differing(2), 1);
    }

    #[test]
    fn slots_outside_are_refused() {
        let view = view();
        assert!(Slots::new(&view, vec![(POOL, vec![1999, 2000])]).is_err());
        let long = PoolGeometry {
            slot_count: 3000,
            ..POOL
        };
        assert!(Slots::new(&view, vec![(long, vec![0])]).is_err());
        assert!(view.word(99_998).is_none() && view.word(2).is_none());
        assert!(view.word(99_996).is_some());
    }

    #[test]
    fn another_process_sees_a_shared_memory_by_its_file() {
        let memory = Arc::new(Memory::shared("bare", 100_000).unwrap());
        let file = file(&memory).unwrap().try_clone_to_owned().unwrap();
        let (own, peer) = (
            View::own(memory.clone()),
            View::peer(&file, 100_000).unwrap(),
        );
        slots(&own, 7).fill(3);
        assert_eq!(slots(&peer, 7).differing(3), 0);
        assert!(View::peer(&file, 1 << 30).is_err());
    }
}
