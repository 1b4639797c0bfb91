//! Pools as addresses: from a slot number to a checked stretch of memory (I-16).

use super::Memory;
use crate::error::{Error, ErrorKind};

/// Equal slots at equal distances inside one memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PoolGeometry {
    /// First byte of slot 0, from the start of the memory.
    pub offset_bytes: u64,
    /// Distance between the first bytes of two neighbours, at least `slot_bytes`.
    pub stride_bytes: u64,
    /// Bytes of a slot that are moved.
    pub slot_bytes: u64,
    /// Number of slots.
    pub slot_count: u32,
}

impl PoolGeometry {
    /// First byte behind the last slot; `None` when there is no slot, a slot is empty, slots overlap,
    /// or the end lies beyond 64 bits.
    pub fn end_bytes(&self) -> Option<u64> {
        if self.slot_bytes == 0 || self.slot_count == 0 || self.stride_bytes < self.slot_bytes {
            return None;
        }
        let last = u64::from(self.slot_count - 1).checked_mul(self.stride_bytes)?;
        self.offset_bytes
            .checked_add(last)?
            .checked_add(self.slot_bytes)
    }
}

/// A pool whose slots were checked against the length of its memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolSpan {
    base: *mut u8,
    geometry: PoolGeometry,
}

// SAFETY: I-16: an address and numbers; no method dereferences `base` (the field that forbids the
// automatic impl). Whoever copies through a `SlotRun` answers for I-21.
unsafe impl Send for PoolSpan {}
// SAFETY: I-16: as above.
unsafe impl Sync for PoolSpan {}

/// A run of neighbouring slots of a checked pool. The address is good while the memory is mapped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotRun {
    /// First byte of the first slot.
    pub(crate) base: *mut u8,
    pub(crate) stride_bytes: usize,
    pub(crate) slot_bytes: usize,
    pub(crate) slot_count: usize,
}

// SAFETY: I-21: as for `PoolSpan`; the holder keeps the region's guard beside the run.
unsafe impl Send for SlotRun {}
// SAFETY: I-21: as above.
unsafe impl Sync for SlotRun {}

impl PoolSpan {
    /// A pool in the memory of `len_bytes` bytes at `base`; `None` when it does not fit in there.
    pub(crate) fn new(base: *mut u8, len_bytes: u64, geometry: PoolGeometry) -> Option<Self> {
        let end_bytes = geometry.end_bytes()?;
        let fits = end_bytes <= len_bytes && usize::try_from(len_bytes).is_ok() && !base.is_null();
        fits.then_some(Self { base, geometry })
    }

    /// The geometry it was made with.
    pub(crate) fn geometry(&self) -> &PoolGeometry {
        &self.geometry
    }

    /// Slots `slot..slot + slot_count`; `None` when one of them is not in the pool, or for no slot.
    pub(crate) fn run(&self, slot: u32, slot_count: u32) -> Option<SlotRun> {
        let end = slot.checked_add(slot_count)?;
        if slot_count == 0 || end > self.geometry.slot_count {
            return None;
        }
        // No product can overflow: the last slot's end was computed in `end_bytes` and fits a usize.
        let offset_bytes =
            self.geometry.offset_bytes + u64::from(slot) * self.geometry.stride_bytes;
        Some(SlotRun {
            base: self.base.wrapping_add(offset_bytes as usize),
            stride_bytes: self.geometry.stride_bytes as usize,
            slot_bytes: self.geometry.slot_bytes as usize,
            slot_count: slot_count as usize,
        })
    }
}

impl SlotRun {
    /// Bytes that are moved.
    pub(crate) fn payload_bytes(&self) -> u64 {
        self.slot_bytes as u64 * self.slot_count as u64
    }

    /// `slot_count` slots of this run, from its slot `first` on; cut to what the run holds.
    pub(crate) fn section(&self, first: u32, slot_count: u32) -> Self {
        let first = (first as usize).min(self.slot_count);
        Self {
            base: self.base.wrapping_add(first * self.stride_bytes),
            slot_count: (slot_count as usize).min(self.slot_count - first),
            ..*self
        }
    }

    /// No gaps: the run is one stretch of `payload_bytes`.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.stride_bytes == self.slot_bytes || self.slot_count == 1
    }

    /// The run as stretches without gaps, in order.
    pub(crate) fn stretches(&self) -> impl Iterator<Item = (*mut u8, usize)> + use<> {
        let run = *self;
        let (count, bytes) = if run.is_contiguous() {
            (1, run.slot_bytes * run.slot_count)
        } else {
            (run.slot_count, run.slot_bytes)
        };
        (0..count).map(move |index| (run.base.wrapping_add(index * run.stride_bytes), bytes))
    }
}

impl Memory {
    /// Copies `bytes` to `offset_bytes`. It needs `&mut self`, so the memory is not registered: an
    /// agent holds an `Arc` of what it may move.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] when the range is not inside the memory.
    pub fn write_at(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<(), Error> {
        let at = self.checked(offset_bytes, bytes.len())?;
        // SAFETY: I-16: `checked`; I-21: `self` is mapped; `bytes` cannot overlap memory that is
        // borrowed exclusively.
        unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies from `offset_bytes` into `bytes`; see [`Memory::write_at`].
    ///
    /// # Errors
    /// As [`Memory::write_at`].
    pub fn read_at(&mut self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let at = self.checked(offset_bytes, bytes.len())?;
        // SAFETY: I-16, I-21: as in `write_at`.
        unsafe { at.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn checked(&self, offset_bytes: u64, len: usize) -> Result<*mut u8, Error> {
        match offset_bytes.checked_add(len as u64) {
            Some(end_bytes) if end_bytes <= self.len_bytes() => {
                Ok(self.base_ptr().wrapping_add(offset_bytes as usize))
            }
            _ => Err(ErrorKind::InvalidArgument {
                what: "byte range of a memory",
                value: format!("{len} bytes at {offset_bytes} of {}", self.len_bytes()),
            }
            .into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn geometry(
        offset_bytes: u64,
        stride_bytes: u64,
        slot_bytes: u64,
        slot_count: u32,
    ) -> PoolGeometry {
        PoolGeometry {
            offset_bytes,
            stride_bytes,
            slot_bytes,
            slot_count,
        }
    }

    #[test]
    fn geometries_that_make_no_sense_have_no_end() {
        assert_eq!(geometry(0, 8, 8, 0).end_bytes(), None);
        assert_eq!(geometry(0, 8, 0, 1).end_bytes(), None);
        assert_eq!(geometry(0, 7, 8, 2).end_bytes(), None);
        assert_eq!(geometry(u64::MAX, 8, 8, 1).end_bytes(), None);
        assert_eq!(geometry(0, u64::MAX, 8, u32::MAX).end_bytes(), None);
        assert_eq!(geometry(16, 10, 8, 3).end_bytes(), Some(16 + 20 + 8));
    }

    #[test]
    fn a_pool_must_fit() {
        let base = std::ptr::without_provenance_mut(4096);
        assert!(PoolSpan::new(base, 43, geometry(16, 10, 8, 3)).is_none());
        let span = PoolSpan::new(base, 44, geometry(16, 10, 8, 3)).unwrap();
        assert!(span.run(0, 0).is_none());
        assert!(span.run(3, 1).is_none());
        assert!(span.run(1, 3).is_none());
        assert!(span.run(u32::MAX, 2).is_none());
        let run = span.run(1, 2).unwrap();
        assert_eq!(run.base.addr(), 4096 + 26);
        assert_eq!(run.payload_bytes(), 16);
        let stretches: Vec<_> = run
            .stretches()
            .map(|(at, bytes)| (at.addr(), bytes))
            .collect();
        assert_eq!(stretches, [(4096 + 26, 8), (4096 + 36, 8)]);
    }

    #[test]
    fn writing_outside_is_refused() {
        let mut memory = Memory::host(100).unwrap();
        memory.write_at(90, &[7; 10]).unwrap();
        let mut back = [0; 10];
        memory.read_at(90, &mut back).unwrap();
        assert_eq!(back, [7; 10]);
        assert!(memory.write_at(91, &[7; 10]).is_err());
        assert!(memory.read_at(u64::MAX, &mut back).is_err());
    }

    proptest! {
        #[test]
        fn every_run_lies_inside_its_memory(
            offset in 0u64..1000, gap in 0u64..50, slot_bytes in 1u64..100, count in 1u32..50,
            slot in 0u32..60, slot_count in 0u32..60, len in 1u64..8000,
        ) {
            let base: *mut u8 = std::ptr::without_provenance_mut(1 << 20);
            let Some(span) = PoolSpan::new(base, len, geometry(offset, slot_bytes + gap, slot_bytes, count)) else {
                return Ok(());
            };
            if let Some(run) = span.run(slot, slot_count) {
                let mut total = 0;
                for (at, bytes) in run.stretches() {
                    let start = at.addr() as u64 - (1 << 20);
                    prop_assert!(start >= offset && start + bytes as u64 <= len);
                    total += bytes as u64;
                }
                prop_assert_eq!(total, run.payload_bytes());
            } else {
                prop_assert!(slot_count == 0 || u64::from(slot) + u64::from(slot_count) > u64::from(count));
            }
        }
    }
}
