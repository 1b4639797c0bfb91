//! Bytes of a page, as loom sees them.

#![allow(unsafe_code)]

use kvgate_transfer::sync::UnsafeCell;

/// The bytes of one page of one component. Two accesses of which one writes and that nothing orders are
/// reported by loom itself, whatever the values.
#[derive(Debug, Default)]
pub struct Cell(UnsafeCell<u64>);

// SAFETY: the whole point: loom checks that every pair of accesses is ordered, and fails the model if not.
unsafe impl Send for Cell {}
// SAFETY: as above.
unsafe impl Sync for Cell {}

impl Cell {
    /// A page that holds 0.
    pub fn new() -> Cell {
        Cell(UnsafeCell::new(0))
    }

    /// Reads the bytes.
    pub fn read(&self) -> u64 {
        // SAFETY: I-1: loom reports this read if it is not ordered after the last write.
        self.0.with(|bytes| unsafe { *bytes })
    }

    /// Writes the bytes.
    pub fn write(&self, value: u64) {
        // SAFETY: I-9: loom reports this write if it is not ordered after every other access.
        self.0.with_mut(|bytes| unsafe { *bytes = value });
    }
}
