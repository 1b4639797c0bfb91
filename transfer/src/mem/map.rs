//! A mapping with an owner: made populated, not inherited by children, unmapped on drop.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::place::no_node;
use crate::error::{Error, ErrorKind};

/// Owner of `mapped_bytes` bytes of address space, readable and writable.
pub(super) struct Mapping {
    base: NonNull<u8>,
    mapped_bytes: usize,
}

// SAFETY: I-21: the mapping has no thread affinity; `base` (a raw pointer, which forbids the
// automatic impl) is only an address, and every access through it is an unsafe act of the caller.
unsafe impl Send for Mapping {}
// SAFETY: I-21: as above; `&Mapping` offers no access to the bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Zeroed private memory, populated.
    pub(super) fn anonymous(mapped_bytes: usize) -> Result<Self, Error> {
        // SAFETY: I-21: a null hint without MAP_FIXED never replaces an existing mapping.
        let base = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                mapped_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let mapping = Self::adopt(base, mapped_bytes)?;
        // Large pages make copies of scattered cache pages about a quarter faster where the kernel
        // has them; the advice may be refused without harm.
        let _ = mapping.advise(Advice::LinuxHugepage);
        mapping.finish()
    }

    /// Private memory that takes room when it is touched.
    #[cfg(all(feature = "bare", not(kv_loom)))]
    pub(super) fn unpopulated(mapped_bytes: usize) -> Result<Self, Error> {
        // SAFETY: I-21: as in `anonymous`.
        let base = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                mapped_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        Self::adopt(base, mapped_bytes)
    }

    /// A shared mapping of the first `mapped_bytes` bytes of `file`, populated.
    pub(super) fn shared(file: BorrowedFd<'_>, mapped_bytes: usize) -> Result<Self, Error> {
        Self::of_file(file, mapped_bytes)?.finish()
    }

    /// [`Mapping::shared`], with every page from `node`.
    pub(super) fn shared_on(
        file: BorrowedFd<'_>,
        mapped_bytes: usize,
        node: u32,
    ) -> Result<Self, Error> {
        let mapping = Self::of_file(file, mapped_bytes)?;
        mapping.bind(node)?;
        mapping.finish()
    }

    /// As [`Mapping::shared`], and nothing is populated yet.
    fn of_file(file: BorrowedFd<'_>, mapped_bytes: usize) -> Result<Self, Error> {
        // SAFETY: I-21: as in `anonymous`; the callers have checked that the file is sealed against
        // shrinking and at least this long, so no access can raise SIGBUS.
        let base = unsafe {
            mmap(
                ptr::null_mut(),
                mapped_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )
        };
        Self::adopt(base, mapped_bytes)
    }

    pub(super) fn base_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(super) fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes as u64
    }

    fn adopt(base: Result<*mut c_void, Errno>, mapped_bytes: usize) -> Result<Self, Error> {
        let base = base.map_err(|errno| refusal("mmap", errno, mapped_bytes))?;
        let base =
            NonNull::new(base.cast()).ok_or_else(|| refusal("mmap", Errno::FAULT, mapped_bytes))?;
        Ok(Self { base, mapped_bytes })
    }

    /// No inheritance, then every page: a later access can then neither fault for lack of memory
    /// nor pay for the first touch inside a request.
    fn finish(self) -> Result<Self, Error> {
        self.advise(Advice::LinuxDontFork)
            .map_err(|errno| refusal("madvise(DONTFORK)", errno, self.mapped_bytes))?;
        match self.advise(Advice::LinuxPopulateWrite) {
            Ok(()) => {}
            Err(Errno::INVAL) => self.touch_all(), // kernel before 5.14
            Err(errno) => return Err(refusal("madvise(POPULATE_WRITE)", errno, self.mapped_bytes)),
        }
        Ok(self)
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: I-21: the range is exactly this mapping; none of the advices used here drops or
        // changes bytes.
        unsafe { madvise(self.base.as_ptr().cast(), self.mapped_bytes, advice) }
    }

    /// Every page that is made from now on comes from `node`.
    fn bind(&self, node: u32) -> Result<(), Error> {
        const MASK_BITS: u32 = 1024;
        let mut mask = [0_u64; MASK_BITS as usize / 64];
        if node >= MASK_BITS {
            return Err(no_node(node, Errno::INVAL));
        }
        mask[node as usize / 64] = 1 << (node % 64);
        // SAFETY: I-21: the range is exactly this mapping, and no byte changes; I-16: the kernel reads `MASK_BITS`
        // bits of `mask`, whose count it takes one too high.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.mapped_bytes,
                libc::MPOL_BIND,
                mask.as_ptr(),
                MASK_BITS as usize + 1,
                0_usize,
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(no_node(node, last_errno())),
        }
    }

    /// The node of the first page; `None` where the kernel does not say.
    pub(super) fn node(&self) -> Option<u32> {
        /// `MPOL_F_NODE | MPOL_F_ADDR` of the kernel.
        const NODE_OF_ADDRESS: libc::c_int = 1 | 2;
        let mut node: libc::c_int = -1;
        // SAFETY: I-16: the kernel writes one `c_int`; I-21: the address lies in this mapping.
        let result = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut node,
                std::ptr::null_mut::<u64>(),
                0_usize,
                self.base.as_ptr(),
                NODE_OF_ADDRESS,
            )
        };
        (result == 0).then(|| u32::try_from(node).ok()).flatten()
    }

    fn touch_all(&self) {
        for offset in (0..self.mapped_bytes).step_by(rustix::param::page_size()) {
            let byte = self.base.as_ptr().wrapping_add(offset);
            // SAFETY: I-16: `offset < mapped_bytes`. Reading and writing back the same byte of a
            // mapping that nobody else has seen yet changes nothing.
            unsafe { byte.write_volatile(byte.read_volatile()) };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: I-21: the last owner is gone, so no region, lease or operation refers to it.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

fn last_errno() -> Errno {
    let code = std::io::Error::last_os_error().raw_os_error();
    Errno::from_raw_os_error(code.unwrap_or(libc::EIO))
}

fn refusal(call: &'static str, errno: Errno, mapped_bytes: usize) -> Error {
    if errno == Errno::NOMEM {
        return ErrorKind::OutOfMemory {
            asked_bytes: mapped_bytes as u64,
            available_bytes: super::available::available_bytes(),
        }
        .into();
    }
    Error::system(call, errno)
}
