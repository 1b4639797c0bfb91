//! The plain copy of the mapped backends.

use super::span::SlotRun;

/// Copies `src` to `dst`: equal counts and slot lengths were checked when the operation was prepared.
///
/// # Safety
/// Both runs are mapped and stay so (I-21), hold the same number of slots of the same length, and do
/// not overlap. The source is not written meanwhile (I-7); the destination has no reader that was
/// told it may read (I-2) and no other owner (I-9).
pub(crate) unsafe fn copy_run(src: &SlotRun, dst: &SlotRun) {
    debug_assert!(src.slot_bytes == dst.slot_bytes && src.slot_count == dst.slot_count);
    if src.is_contiguous() && dst.is_contiguous() {
        let bytes = src.slot_bytes * src.slot_count;
        // SAFETY: I-16: both runs are inside their pools; I-21, I-9: the caller's contract.
        unsafe { dst.base.copy_from_nonoverlapping(src.base, bytes) };
        return;
    }
    for index in 0..src.slot_count {
        let from = src.base.wrapping_add(index * src.stride_bytes);
        let to = dst.base.wrapping_add(index * dst.stride_bytes);
        // SAFETY: I-16: `index < slot_count` of both runs; I-21, I-9: the caller's contract.
        unsafe { to.copy_from_nonoverlapping(from, src.slot_bytes) };
    }
}

/// Copies every run of `src` to its partner in `dst`.
///
/// Safe to call with runs that the engine made: they lie in registered pools whose regions the caller
/// holds, and pairs were checked to match when the transfer was prepared and resolved.
pub(crate) fn copy_runs(src: &[SlotRun], dst: &[SlotRun]) {
    for (from, to) in src.iter().zip(dst) {
        let fits = from.slot_bytes == to.slot_bytes && from.slot_count == to.slot_count;
        // The sender's view of the receiver's geometry is fixed by the handshake; never copy past a slot.
        assert!(fits, "I-16: paired runs have the same shape");
        // SAFETY: I-16: both runs are checked and of one shape; I-21: the operation holds the source
        // regions, `Resolved` the target ones; I-7: the post carried a source witness; I-2, I-9: the
        // target has neither readers nor another owner before the arrival is redeemed.
        unsafe { copy_run(from, to) };
    }
}

/// The bytes of a run, for a simulated write that outlives its process. Safe as [`copy_runs`] is.
#[cfg(feature = "sim")]
pub(crate) fn snapshot(run: &SlotRun) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (from, len) in run.stretches() {
        let start = bytes.len();
        bytes.resize(start + len, 0);
        // SAFETY: I-16: a stretch of a checked run; I-21: the operation holds the source regions.
        unsafe { from.copy_to_nonoverlapping(bytes[start..].as_mut_ptr(), len) };
    }
    bytes
}

/// Writes the bytes of [`snapshot`] to a run of the same shape. Safe as [`copy_runs`] is.
#[cfg(feature = "sim")]
pub(crate) fn restore(bytes: &[u8], run: &SlotRun) {
    let mut rest = bytes;
    for (to, len) in run.stretches() {
        let (now, later) = rest.split_at(len);
        // SAFETY: I-16: a stretch of a checked run; I-21: the simulation holds the target regions.
        unsafe { to.copy_from_nonoverlapping(now.as_ptr(), len) };
        rest = later;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::{Memory, PoolGeometry, span::PoolSpan};

    #[test]
    fn strides_may_differ_and_padding_is_left_alone() {
        let mut from = Memory::host(4096).unwrap();
        let mut to = Memory::host(4096).unwrap();
        from.write_at(0, b"aaaabbbbccccdddd").unwrap();
        to.write_at(0, &[b'.'; 64]).unwrap();
        let span = |memory: &Memory, stride_bytes| {
            let geometry = PoolGeometry {
                offset_bytes: 0,
                stride_bytes,
                slot_bytes: 4,
                slot_count: 4,
            };
            PoolSpan::new(memory.base_ptr(), 4096, geometry).unwrap()
        };
        let src = span(&from, 4).run(1, 3).unwrap();
        let dst = span(&to, 10).run(0, 3).unwrap();
        // SAFETY: I-21: both memories live to the end of the test; nobody else has them.
        unsafe { copy_run(&src, &dst) };
        let mut seen = [0; 30];
        to.read_at(0, &mut seen).unwrap();
        assert_eq!(&seen, b"bbbb......cccc......dddd......");
    }
}
