//! The bytes of all pools: one memory, one window per pool. Together with `lease/view.rs` the only
//! place of this crate that touches them; nothing here is reachable from outside the crate (I-1).

use kvgate_transfer::Memory;
use kvgate_transfer::sync::Arc;

/// Where one pool lies in the memory of a pool set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolSpan {
    /// Start of physical page 0.
    pub(crate) offset_bytes: u64,
    /// Distance between two physical pages.
    pub(crate) stride_bytes: u64,
    /// Physical pages, the null page included.
    pub(crate) page_count: u32,
}

impl PoolSpan {
    /// First byte behind the pool.
    pub(crate) fn end_bytes(&self) -> u64 {
        self.offset_bytes + self.stride_bytes * u64::from(self.page_count)
    }

    /// Start of a page. 64-bit: pages times stride exceeds 2^32 (I-16).
    fn page_offset_bytes(&self, page: u32) -> u64 {
        assert!(
            page < self.page_count,
            "I-16: page {page} of {}",
            self.page_count
        );
        self.offset_bytes + u64::from(page) * self.stride_bytes
    }
}

/// The memory of a pool set.
pub(crate) struct PoolBytes {
    /// Absent in models, whose slots have no bytes.
    memory: Option<Arc<Memory>>,
}

impl PoolBytes {
    #[cfg(not(kv_loom))]
    pub(crate) fn new(memory: Arc<Memory>) -> PoolBytes {
        PoolBytes {
            memory: Some(memory),
        }
    }

    /// Slots without bytes.
    #[cfg(kv_loom)]
    pub(crate) fn absent() -> PoolBytes {
        PoolBytes { memory: None }
    }

    /// The memory itself, for registration.
    pub(crate) fn memory(&self) -> Option<&Arc<Memory>> {
        self.memory.as_ref()
    }

    /// Address of physical page 0 of a pool.
    pub(crate) fn pool_base(&self, span: &PoolSpan) -> *mut u8 {
        if self.memory.is_none() {
            return std::ptr::null_mut();
        }
        self.address(span.offset_bytes, span.end_bytes() - span.offset_bytes)
    }

    /// Copies the bytes `offset_bytes..` of a page out.
    pub(crate) fn read(&self, span: &PoolSpan, page: u32, offset_bytes: u64, into: &mut [u8]) {
        let from = self.page_range(span, page, offset_bytes, into.len() as u64);
        // SAFETY: I-16: `page_range` checked that the range lies inside the page and the mapping.
        // I-1: callers hold a lease of the page, so nobody unmaps or rewrites these rows meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) }
    }

    /// Copies bytes into a page at `offset_bytes`.
    #[cfg(all(feature = "fault-injection", not(kv_loom)))]
    pub(crate) fn write(&self, span: &PoolSpan, page: u32, offset_bytes: u64, from: &[u8]) {
        let into = self.page_range(span, page, offset_bytes, from.len() as u64);
        // SAFETY: I-16: `page_range` checked that the range lies inside the page and the mapping. The
        // only caller damages a page of its own on purpose.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) }
    }

    /// Copies a whole physical page inside one pool.
    pub(crate) fn copy_page(&self, span: &PoolSpan, from_page: u32, to_page: u32) {
        assert_ne!(from_page, to_page, "a page is not copied onto itself");
        if self.memory.is_none() {
            return;
        }
        let from = self.page_range(span, from_page, 0, span.stride_bytes);
        let into = self.page_range(span, to_page, 0, span.stride_bytes);
        // SAFETY: I-16: both ranges are whole pages of the pool; they are different pages, so they do
        // not overlap. I-19: the caller leases the source and owns the destination.
        unsafe { std::ptr::copy_nonoverlapping(from, into, span.stride_bytes as usize) }
    }

    fn page_range(&self, span: &PoolSpan, page: u32, offset_bytes: u64, len_bytes: u64) -> *mut u8 {
        let end = offset_bytes.checked_add(len_bytes);
        assert!(
            end.is_some_and(|end| end <= span.stride_bytes),
            "I-16: bytes beyond the page"
        );
        self.address(span.page_offset_bytes(page) + offset_bytes, len_bytes)
    }

    fn address(&self, offset_bytes: u64, len_bytes: u64) -> *mut u8 {
        let memory = self
            .memory
            .as_ref()
            .expect("I-16: pools without memory have no bytes");
        let end = offset_bytes.checked_add(len_bytes);
        assert!(
            end.is_some_and(|end| end <= memory.len_bytes()),
            "I-16: bytes beyond the memory of the pools"
        );
        // SAFETY: I-16: the offset lies inside the one mapping that `memory` keeps alive.
        unsafe { memory.base_ptr().add(offset_bytes as usize) }
    }
}
