//! The loops that a benchmark puts beside the engine, over the same bytes: plain copies, socket vectors and
//! copies by the kernel of scattered slots, fills, comparisons, and words that two processes share.
//!
//! Behind the feature `bare`, for `transfer-bench`: nothing here asks a lease, a flight or a region. Safe code
//! cannot make it touch what it should not:
//! - The memory is made here and goes to nobody but an agent, so no reference into it exists elsewhere.
//! - Slots are checked against it once, so no call leaves it.
//! - A call borrows the [`View`], for writing if it writes: no two of them meet in one process.
//! - The atomic words lie behind the last slot.
//!
//! Transfers of the engine, and another process, move the same bytes without asking. Keeping them apart is up
//! to the caller; nothing here interprets what it moves, so a mistake gives wrong bytes and wrong figures.

use std::mem::size_of;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::process::Child;

use rustix::io::Errno;

use super::{
    Memory, MemoryKind, PeerMapping, Placement, PoolGeometry, map::Mapping, span::PoolSpan,
};
use crate::agent::{Agent, MemoryRegion};
use crate::error::{Error, ErrorKind};
use crate::sync::{Arc, AtomicU32};

/// Vectors of one call. More gain nothing.
const VECTORS: usize = 512;
/// The words begin at a multiple of this.
const WORDS_ALIGN_BYTES: u64 = 4096;

/// A memory as this process sees it: slots, and words behind them.
pub struct View {
    mapped: Arc<Mapped>,
    base: *mut u8,
    slots_bytes: u64,
    words: Words,
}

enum Mapped {
    Own(Arc<Memory>),
    Peer { _mapping: PeerMapping },
}

// SAFETY: I-21: an address that `mapped` keeps good. What it points to is read with `&View` and written with
// `&mut View` only, but for the words, which are atomic.
unsafe impl Send for View {}
// SAFETY: I-21: as above.
unsafe impl Sync for View {}

impl View {
    /// A new shared memory of this process: room for slots, then for words.
    ///
    /// # Errors
    /// As [`Memory::shared`].
    pub fn shared(name: &str, slots_bytes: u64, words_bytes: u64) -> Result<Self, Error> {
        let (words_at, len_bytes) = lengths(slots_bytes, words_bytes)?;
        let memory = Arc::new(Memory::shared(name, len_bytes)?);
        let base = memory.base_ptr();
        let mapped = Arc::new(Mapped::Own(memory));
        Ok(Self::new(mapped, base, slots_bytes, words_at..len_bytes))
    }

    /// The [`View::shared`] memory of another process, by its file.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] unless it is a sealed memfd of that length.
    pub fn peer(file: &OwnedFd, slots_bytes: u64, words_bytes: u64) -> Result<Self, Error> {
        let (words_at, len_bytes) = lengths(slots_bytes, words_bytes)?;
        let mapping = PeerMapping::map(file, len_bytes)
            .map_err(|value| invalid("memory of a peer", value))?;
        let base = mapping.base_ptr();
        let mapped = Arc::new(Mapped::Peer { _mapping: mapping });
        Ok(Self::new(mapped, base, slots_bytes, words_at..len_bytes))
    }

    fn new(mapped: Arc<Mapped>, base: *mut u8, slots_bytes: u64, words: Range<u64>) -> Self {
        let words = Words {
            base,
            range: words,
            _mapped: mapped.clone(),
        };
        Self {
            mapped,
            base,
            slots_bytes,
            words,
        }
    }

    /// Makes the slots available to transfers.
    ///
    /// # Errors
    /// As [`Agent::register`]; [`ErrorKind::InvalidArgument`] for a pool that reaches into the words, and for
    /// the memory of a peer.
    pub fn register(&self, agent: &Agent, pools: &[PoolGeometry]) -> Result<MemoryRegion, Error> {
        let Mapped::Own(memory) = &*self.mapped else {
            return Err(invalid("owner of the memory", "the peer".to_owned()));
        };
        let reaches_out = |pool: &&PoolGeometry| pool.end_bytes() > Some(self.slots_bytes);
        if let Some(pool) = pools.iter().find(reaches_out) {
            return Err(invalid("pool geometry", format!("{pool:?}")));
        }
        agent.register(memory.clone(), pools)
    }

    /// The number of its file in this process, for [`View::peer`] in another one.
    #[must_use]
    pub fn descriptor(&self) -> Option<RawFd> {
        match &*self.mapped {
            Mapped::Own(memory) => memory.file().map(|file| file.as_raw_fd()),
            Mapped::Peer { .. } => None,
        }
    }

    /// Where it begins in this process, for [`AwaySlots`] in another one.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.base.addr() as u64
    }

    /// The words behind the slots.
    #[must_use]
    pub fn words(&self) -> Words {
        self.words.clone()
    }
}

/// First byte behind the slots that a word may have, and the end of the words.
fn lengths(slots_bytes: u64, words_bytes: u64) -> Result<(u64, u64), Error> {
    slots_bytes
        .checked_next_multiple_of(WORDS_ALIGN_BYTES)
        .and_then(|words_at| Some((words_at, words_at.checked_add(words_bytes)?)))
        .ok_or_else(|| invalid("memory length in bytes", slots_bytes.to_string()))
}

fn invalid(what: &'static str, value: String) -> Error {
    ErrorKind::InvalidArgument { what, value }.into()
}

/// Words for wake-ups between processes.
#[derive(Clone)]
pub struct Words {
    base: *mut u8,
    /// In the memory.
    range: Range<u64>,
    _mapped: Arc<Mapped>,
}

// SAFETY: I-21: an address that `_mapped` keeps good; what it points to is reached through atomics only.
unsafe impl Send for Words {}
// SAFETY: I-21: as above.
unsafe impl Sync for Words {}

impl Words {
    /// A word; `None` behind the last one or across a word's border.
    #[must_use]
    pub fn at(&self, offset_bytes: u64) -> Option<&AtomicU32> {
        let word_bytes = size_of::<AtomicU32>() as u64;
        let first = self.range.start.checked_add(offset_bytes)?;
        let is_inside = first.checked_add(word_bytes)? <= self.range.end;
        if !is_inside || !first.is_multiple_of(word_bytes) {
            return None;
        }
        let at = self.base.wrapping_add(first as usize).cast::<AtomicU32>();
        // SAFETY: I-16: inside the memory and aligned (a mapping starts at a host page); I-21: `_mapped` lives
        // as long as `self`. No slot lies here, so every access to the word goes through an atomic.
        Some(unsafe { &*at })
    }
}

/// Memory that takes room only where it is touched: for counting what lists cost, apart from the pools.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] when the address space has no such hole, [`ErrorKind::InvalidArgument`].
pub fn unpopulated(len_bytes: u64) -> Result<Memory, Error> {
    let mapped_bytes = usize::try_from(len_bytes)
        .map_err(|_| invalid("memory length in bytes", len_bytes.to_string()))?;
    Ok(Memory {
        mapping: Mapping::unpopulated(mapped_bytes)?,
        len_bytes,
        kind: MemoryKind::Host,
        file: None,
        placement: Placement {
            granule_bytes: rustix::param::page_size() as u64,
            not_huge: None,
            numa_node: None,
        },
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

/// Slots of some pools of one memory, in order. Two of them with the same lengths make a transfer.
pub struct Slots {
    groups: Vec<Group>,
    mapped: Arc<Mapped>,
}

/// Slots of some pools of a memory of another process, as that one sees it: numbers for the kernel.
pub struct AwaySlots {
    groups: Vec<Group>,
}

struct Group {
    base: *mut u8,
    stride_bytes: usize,
    slot_bytes: usize,
    slots: Vec<u32>,
}

// SAFETY: I-21: addresses of checked slots, used only together with the view that they were checked against.
// Those of another process are used by the kernel only.
unsafe impl Send for Group {}
// SAFETY: I-21: as above.
unsafe impl Sync for Group {}

impl Slots {
    /// Checks that every slot lies in its pool and every pool in front of the words.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] with the pool or the slot.
    pub fn new(view: &View, lists: Vec<(PoolGeometry, Vec<u32>)>) -> Result<Self, Error> {
        Ok(Self {
            groups: groups(view.base, view.slots_bytes, lists)?,
            mapped: view.mapped.clone(),
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
    /// When the two do not have the same shape, or the views are not theirs.
    pub fn copy_to(&self, view: &View, target: &Self, target_view: &mut View) {
        self.check_owner(view);
        target.check_owner(target_view);
        assert!(
            have_one_shape(&self.groups, &target.groups),
            "slots of another shape"
        );
        for (from, to) in self.groups.iter().zip(&target.groups) {
            for (&source, &slot) in from.slots.iter().zip(&to.slots) {
                // SAFETY: I-16: both slots were checked and have one length; I-21: both views are borrowed, the
                // target alone for this call, so the two are different mappings.
                unsafe {
                    to.at(slot)
                        .copy_from_nonoverlapping(from.at(source), from.slot_bytes)
                }
            }
        }
    }

    /// Writes bytes that depend on `seed` and on the place in the list.
    ///
    /// # Panics
    /// When the view is not theirs.
    pub fn fill(&self, view: &mut View, seed: u64) {
        self.check_owner(view);
        self.each(|ordinal, at, len| {
            let first = mix(seed ^ (ordinal << 32));
            for (index, chunk_bytes) in words(len) {
                let word = (first ^ (index as u64).wrapping_mul(STEP)).to_le_bytes();
                // SAFETY: I-16: `index * 8 + chunk_bytes <= len` of a checked slot; I-21: the view is borrowed
                // for this call alone.
                unsafe {
                    at.wrapping_add(index * 8)
                        .copy_from_nonoverlapping(word.as_ptr(), chunk_bytes)
                };
            }
        });
    }

    /// How many slots do not hold what [`Slots::fill`] with this seed has written.
    ///
    /// # Panics
    /// When the view is not theirs.
    pub fn differing(&self, view: &View, seed: u64) -> u64 {
        self.check_owner(view);
        let mut count = 0;
        self.each(|ordinal, at, len| {
            let first = mix(seed ^ (ordinal << 32));
            let mut difference = 0;
            for (index, chunk_bytes) in words(len) {
                let word = (first ^ (index as u64).wrapping_mul(STEP)).to_le_bytes();
                let (mut expected, mut found) = ([0; 8], [0; 8]);
                expected[..chunk_bytes].copy_from_slice(&word[..chunk_bytes]);
                // SAFETY: I-16: as in `fill`; I-21: the view is borrowed.
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
    ///
    /// # Panics
    /// When the view is not theirs.
    pub fn send(&self, view: &View, socket: impl AsFd) -> Result<(), Errno> {
        self.check_owner(view);
        let fd = socket.as_fd().as_raw_fd();
        self.stream(|open| {
            // SAFETY: I-16: vectors of checked slots; I-21: the view is borrowed.
            unsafe { libc::writev(fd, open.as_ptr(), open.len() as libc::c_int) }
        })
    }

    /// Receives every slot, in order, with `readv` on a blocking socket.
    ///
    /// # Errors
    /// As [`Slots::send`].
    ///
    /// # Panics
    /// When the view is not theirs.
    pub fn receive(&self, view: &mut View, socket: impl AsFd) -> Result<(), Errno> {
        self.check_owner(view);
        let fd = socket.as_fd().as_raw_fd();
        self.stream(|open| {
            // SAFETY: I-16, I-21: as in `send`, and the view is borrowed for this call alone; the kernel
            // writes at most the named lengths.
            unsafe { libc::readv(fd, open.as_ptr(), open.len() as libc::c_int) }
        })
    }

    /// Has the kernel copy every slot to its partner in `process`, which is not reaped: its number would be
    /// another one's then.
    ///
    /// # Errors
    /// What the system says.
    ///
    /// # Panics
    /// When the two do not have the same shape, or the view is not theirs.
    pub fn write_away(&self, view: &View, away: &AwaySlots, process: &Child) -> Result<(), Errno> {
        self.check_owner(view);
        let pid = process.id() as libc::pid_t;
        self.cross(away, |(here, here_count), (there, there_count)| {
            // SAFETY: I-16: vectors of checked slots, all of one length; I-21: the view is borrowed. A child is
            // not this process, and the kernel refuses what is not mapped there.
            unsafe { libc::process_vm_writev(pid, here, here_count, there, there_count, 0) }
        })
    }

    /// The same in the other direction.
    ///
    /// # Errors
    /// As [`Slots::write_away`].
    ///
    /// # Panics
    /// As [`Slots::write_away`].
    pub fn read_away(
        &self,
        view: &mut View,
        away: &AwaySlots,
        process: &Child,
    ) -> Result<(), Errno> {
        self.check_owner(view);
        let pid = process.id() as libc::pid_t;
        self.cross(away, |(here, here_count), (there, there_count)| {
            // SAFETY: I-16, I-21: as in `write_away`, and the view is borrowed for this call alone.
            unsafe { libc::process_vm_readv(pid, here, here_count, there, there_count, 0) }
        })
    }

    fn check_owner(&self, view: &View) {
        assert!(
            Arc::ptr_eq(&self.mapped, &view.mapped),
            "slots of another view"
        );
    }

    fn stream(&self, call: impl Fn(&[libc::iovec]) -> isize) -> Result<(), Errno> {
        let mut vectors = Vectors::default();
        for group in &self.groups {
            for slots in group.slots.chunks(VECTORS) {
                vectors.load(group, slots);
                while !vectors.open().is_empty() {
                    match count(call(vectors.open()))? {
                        Some(0) => return Err(Errno::PIPE),
                        moved => vectors.advance(moved.unwrap_or(0)),
                    }
                }
            }
        }
        Ok(())
    }

    fn cross(
        &self,
        away: &AwaySlots,
        call: impl Fn(RawList, RawList) -> isize,
    ) -> Result<(), Errno> {
        assert!(
            have_one_shape(&self.groups, &away.groups),
            "slots of another shape"
        );
        let (mut near, mut far) = (Vectors::default(), Vectors::default());
        for (here, there) in self.groups.iter().zip(&away.groups) {
            let there_chunks = there.slots.chunks(VECTORS);
            for (near_slots, far_slots) in here.slots.chunks(VECTORS).zip(there_chunks) {
                near.load(here, near_slots);
                far.load(there, far_slots);
                while !near.open().is_empty() {
                    match count(call(near.raw(), far.raw()))? {
                        Some(0) => return Err(Errno::FAULT),
                        moved => {
                            near.advance(moved.unwrap_or(0));
                            far.advance(moved.unwrap_or(0));
                        }
                    }
                }
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
}

impl AwaySlots {
    /// As [`Slots::new`], of the [`View`] that begins at `address` in the other process.
    ///
    /// # Errors
    /// As [`Slots::new`].
    pub fn new(
        address: u64,
        slots_bytes: u64,
        lists: Vec<(PoolGeometry, Vec<u32>)>,
    ) -> Result<Self, Error> {
        let end = usize::try_from(address)
            .ok()
            .filter(|_| address.checked_add(slots_bytes).is_some());
        let first = end.ok_or_else(|| invalid("address", address.to_string()))?;
        let base = std::ptr::without_provenance_mut(first);
        Ok(Self {
            groups: groups(base, slots_bytes, lists)?,
        })
    }
}

fn groups(
    base: *mut u8,
    len_bytes: u64,
    lists: Vec<(PoolGeometry, Vec<u32>)>,
) -> Result<Vec<Group>, Error> {
    let mut groups = Vec::with_capacity(lists.len());
    for (geometry, slots) in lists {
        let span = PoolSpan::new(base, len_bytes, geometry)
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
    Ok(groups)
}

fn have_one_shape(one: &[Group], other: &[Group]) -> bool {
    let shape = |group: &Group| (group.slots.len(), group.slot_bytes);
    one.iter().map(shape).eq(other.iter().map(shape))
}

impl Group {
    fn at(&self, slot: u32) -> *mut u8 {
        self.base.wrapping_add(slot as usize * self.stride_bytes)
    }
}

type RawList = (*const libc::iovec, libc::c_ulong);

/// Vectors that are worked off over as many calls as it takes.
#[derive(Default)]
struct Vectors {
    list: Vec<libc::iovec>,
    next: usize,
}

impl Vectors {
    fn load(&mut self, group: &Group, slots: &[u32]) {
        self.next = 0;
        self.list.clear();
        self.list.extend(slots.iter().map(|&slot| libc::iovec {
            iov_base: group.at(slot).cast(),
            iov_len: group.slot_bytes,
        }));
    }

    fn open(&self) -> &[libc::iovec] {
        &self.list[self.next..]
    }

    fn raw(&self) -> RawList {
        (self.open().as_ptr(), self.open().len() as libc::c_ulong)
    }

    fn advance(&mut self, mut moved_bytes: usize) {
        while let Some(vector) = self.list.get_mut(self.next) {
            if moved_bytes < vector.iov_len {
                vector.iov_base = vector.iov_base.wrapping_byte_add(moved_bytes);
                vector.iov_len -= moved_bytes;
                break;
            }
            moved_bytes -= vector.iov_len;
            self.next += 1;
        }
    }
}

/// What a call has moved; `None` when a signal came first.
fn count(result: isize) -> Result<Option<usize>, Errno> {
    if let Ok(moved) = usize::try_from(result) {
        return Ok(Some(moved));
    }
    let code = std::io::Error::last_os_error().raw_os_error();
    match Errno::from_raw_os_error(code.unwrap_or(libc::EIO)) {
        Errno::INTR => Ok(None),
        errno => Err(errno),
    }
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

#[cfg(feature = "one-sided")]
mod library;
#[cfg(test)]
mod tests;
