//! Memory for reads that go past the page cache.

use kvgate_transfer::sync::Mutex;

use crate::record::PAGE_BYTES;

/// Most bytes that such a read takes at once.
pub(super) const DIRECT_BYTES: usize = 2 << 20;
/// Buffers that are kept for the next reads.
const KEPT_LIMIT: usize = 8;

/// Bytes that begin at a multiple of [`PAGE_BYTES`] in memory: a device that writes there by itself wants that.
#[derive(Debug)]
pub(super) struct PageBuffer {
    bytes: Vec<u8>,
    start: usize,
}

impl PageBuffer {
    fn new(len_bytes: usize) -> PageBuffer {
        let page_bytes = PAGE_BYTES as usize;
        let bytes = vec![0; len_bytes + page_bytes];
        // Where no place can be told, the device refuses the read, and it is made in another way.
        let start = bytes.as_ptr().align_offset(page_bytes).min(page_bytes);
        PageBuffer { bytes, start }
    }

    fn len_bytes(&self) -> usize {
        self.bytes.len() - PAGE_BYTES as usize
    }

    /// The first so many bytes.
    ///
    /// # Panics
    /// If it has fewer.
    pub(super) fn first(&mut self, len_bytes: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + len_bytes]
    }
}

/// Buffers that were used before. A new one costs a page fault for every page of it.
///
/// **Lock order.** The mutex is a leaf.
#[derive(Debug, Default)]
pub(super) struct PageBuffers(Mutex<Vec<PageBuffer>>);

impl PageBuffers {
    /// Calls `work` with a buffer of at least so many bytes, whatever they hold.
    pub(super) fn with<R>(&self, len_bytes: usize, work: impl FnOnce(&mut PageBuffer) -> R) -> R {
        let kept = self.0.lock().pop();
        let mut buffer = kept
            .filter(|kept| kept.len_bytes() >= len_bytes)
            .unwrap_or_else(|| PageBuffer::new(len_bytes.next_power_of_two()));
        let result = work(&mut buffer);
        let mut kept = self.0.lock();
        if kept.len() < KEPT_LIMIT {
            kept.push(buffer);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_begin_at_a_page_and_come_again() {
        let buffers = PageBuffers::default();
        let place = |buffer: &mut PageBuffer| {
            let bytes = buffer.first(5_000);
            bytes.fill(1);
            bytes.as_ptr().addr()
        };
        let first = buffers.with(5_000, place);
        assert_eq!(first % PAGE_BYTES as usize, 0);
        assert_eq!(buffers.with(4_096, place), first);
        buffers.with(5_000, |outer| {
            let inner = buffers.with(5_000, place);
            assert_ne!(inner, place(outer), "one each at a time");
        });
    }
}
