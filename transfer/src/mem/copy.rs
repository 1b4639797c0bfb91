//! The plain copy of the mapped backends.

use super::span::SlotRun;
use crate::desc::{SlotPair, run_at};

/// Copies `src` to `dst`: equal counts and slot lengths were checked when the operation was prepared.
///
/// # Safety
/// Both runs are mapped and stay so (I-21), hold the same number of slots of the same length, and do
/// not overlap. The source is not written meanwhile (I-7); the destination has no reader that was
/// told it may read (I-2) and no other owner (I-9).
#[cfg(any(feature = "sim", all(test, not(kv_loom))))]
unsafe fn copy_run(src: &SlotRun, dst: &SlotRun) {
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

/// Slots, and bytes, that are copied between two looks at what may stop a copy: whichever comes first.
pub(crate) const SLOTS_AT_ONCE: usize = 512;
pub(crate) const BYTES_AT_ONCE: usize = 4 << 20;

/// Copies slots from one pool to another; neighbours on both sides as one stretch. `is_read` says that the
/// remote slots are the source.
///
/// # Safety
/// `local` and `remote` begin at slot 0 of their pools and do not overlap, their slots have one length, and
/// every slot of `slots` lies in both (I-16). They are mapped and stay so (I-21). The source is not written
/// meanwhile (I-7); the destination has no reader that was told it may read (I-2) and no other owner (I-9).
pub(crate) unsafe fn copy_slots(
    local: &SlotRun,
    remote: &SlotRun,
    slots: &[SlotPair],
    is_read: bool,
) {
    debug_assert!(local.slot_bytes == remote.slot_bytes);
    let bytes = local.slot_bytes;
    let is_dense = local.stride_bytes == bytes && remote.stride_bytes == bytes;
    let mut index = 0;
    while let Some((first, joined)) = run_at(slots, index) {
        index += joined as usize;
        let (times, len) = match is_dense {
            true => (1, bytes * joined as usize),
            false => (joined as usize, bytes),
        };
        for number in 0..times {
            let at = |pool: &SlotRun, slot: u32| {
                pool.base
                    .wrapping_add((slot as usize + number) * pool.stride_bytes)
            };
            let (here, there) = (at(local, first.local), at(remote, first.remote));
            let (from, to) = match is_read {
                true => (there, here),
                false => (here, there),
            };
            // SAFETY: I-16: the caller has checked every slot; I-21, I-9: the caller's contract.
            unsafe { to.copy_from_nonoverlapping(from, len) };
        }
    }
}

/// [`copy_slots`] between two pools of this process.
///
/// Safe to call with what the engine made: pools whose regions the caller holds, and slots that were checked
/// when the transfer was prepared and when it was resolved.
#[cfg(not(kv_loom))]
pub(crate) fn copy_pairs(local: &SlotRun, remote: &SlotRun, slots: &[SlotPair], is_read: bool) {
    // What the peer has registered was told in the handshake; never copy past a slot.
    let last = slots.iter().map(|pair| pair.remote as usize).max();
    let fits = local.slot_bytes == remote.slot_bytes && last < Some(remote.slot_count);
    assert!(fits, "I-16: paired pools have the same shape");
    // SAFETY: I-16: both sides are checked and of one shape; I-21: the operation holds the regions of this
    // side, `Resolved` those of the other; I-7: the post carried a source witness; I-2, I-9: the target
    // has neither readers nor another owner before the arrival is redeemed.
    unsafe { copy_slots(local, remote, slots, is_read) };
}

/// [`copy_run`] between two runs that the engine made: checked when the transfer was prepared and when it was
/// resolved, in regions that the caller holds.
#[cfg(any(feature = "sim", all(test, not(kv_loom))))]
pub(crate) fn copy_pair(from: &SlotRun, to: &SlotRun) {
    let fits = from.slot_bytes == to.slot_bytes && from.slot_count == to.slot_count;
    assert!(fits, "I-16: paired runs have the same shape");
    // SAFETY: I-16: both runs are checked and of one shape; I-21, I-7, I-2, I-9: as in `copy_pairs`.
    unsafe { copy_run(from, to) };
}

/// The bytes of a run, for a simulated write that outlives its process. Safe as [`copy_pair`] is.
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

/// Writes the bytes of [`snapshot`] to a run of the same shape. Safe as [`copy_pair`] is.
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
