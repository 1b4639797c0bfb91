//! Cuts an operation of a stream into the shares of single frames.

use std::ops::Range;

use super::{RemoteRun, RunCursor, RunPairs};
use crate::agent::wire::RUN_LIMIT;
use crate::mem::span::SlotRun;
use crate::sync::Arc;

/// Payload of one frame, unless a single slot is longer.
pub(super) const PART_BYTES: u64 = 4 << 20;

/// One frame's share of an operation.
pub(super) struct Part<'p> {
    pub(super) local: &'p [SlotRun],
    pub(super) remote: &'p [RemoteRun],
    pub(super) payload_bytes: u64,
    /// Which slots of the operation.
    pub(super) slots: Range<u64>,
    pub(super) is_last: bool,
}

/// Cuts an operation at slot borders. The two buffers are reused from part to part.
pub(super) struct Parts {
    pairs: Arc<RunPairs>,
    cursor: RunCursor,
    open: Option<(SlotRun, RemoteRun)>,
    local: Vec<SlotRun>,
    remote: Vec<RemoteRun>,
    /// Slots of the parts so far.
    slot_count: u64,
}

impl Parts {
    pub(super) fn new(pairs: Arc<RunPairs>) -> Self {
        let mut parts = Self {
            pairs,
            cursor: RunCursor::default(),
            open: None,
            local: Vec::new(),
            remote: Vec::new(),
            slot_count: 0,
        };
        parts.open = parts.next_pair();
        parts
    }

    fn next_pair(&mut self) -> Option<(SlotRun, RemoteRun)> {
        self.pairs.next(&mut self.cursor)
    }

    /// The next part; `None` behind the last one.
    pub(super) fn next(&mut self) -> Option<Part<'_>> {
        self.local.clear();
        self.remote.clear();
        let mut payload_bytes = 0;
        let first_slot = self.slot_count;
        while let Some((local, remote)) = self.open {
            let slot_bytes = local.slot_bytes as u64;
            let mut room = PART_BYTES.saturating_sub(payload_bytes) / slot_bytes.max(1);
            if self.local.is_empty() {
                room = room.max(1); // the first slot of a part always fits, however long it is
            }
            if room == 0 || self.local.len() == RUN_LIMIT {
                break;
            }
            let count = u32::try_from(room)
                .unwrap_or(u32::MAX)
                .min(remote.slot_count);
            self.local.push(local.section(0, count));
            self.remote.push(RemoteRun {
                slot_count: count,
                ..remote
            });
            payload_bytes += slot_bytes * u64::from(count);
            self.slot_count += u64::from(count);
            self.open = match remote.slot_count - count {
                0 => self.next_pair(),
                slot_count => Some((
                    local.section(count, slot_count),
                    RemoteRun {
                        slot: remote.slot + count,
                        slot_count,
                        ..remote
                    },
                )),
            };
        }
        (!self.local.is_empty()).then_some(Part {
            local: &self.local,
            remote: &self.remote,
            payload_bytes,
            slots: first_slot..self.slot_count,
            is_last: self.open.is_none(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PoolId;
    use crate::mem::{PoolGeometry, span::PoolSpan};

    fn runs(shapes: &[(u64, u32)]) -> (Vec<SlotRun>, Vec<RemoteRun>) {
        let pair = |&(slot_bytes, slot_count): &(u64, u32)| {
            let geometry = PoolGeometry {
                offset_bytes: 0,
                stride_bytes: slot_bytes,
                slot_bytes,
                slot_count,
            };
            let base = std::ptr::without_provenance_mut(4096);
            let span = PoolSpan::new(base, u64::from(slot_count) * slot_bytes, geometry).unwrap();
            let remote = RemoteRun {
                pool: PoolId(3),
                generation: 1,
                slot: 7,
                slot_count,
            };
            (span.run(0, slot_count).unwrap(), remote)
        };
        shapes.iter().map(pair).unzip()
    }

    /// Slots, payload and whether it is the last one.
    type Shape = (Vec<(u32, u32)>, u64, bool);

    fn cut(shapes: &[(u64, u32)]) -> Vec<Shape> {
        let (local, remote) = runs(shapes);
        let mut parts = Parts::new(Arc::new(RunPairs::of(local.into_iter().zip(remote))));
        let (mut seen, mut slot_count) = (Vec::new(), 0);
        while let Some(part) = parts.next() {
            let in_part = |run: &RemoteRun| u64::from(run.slot_count);
            let end = slot_count + part.remote.iter().map(in_part).sum::<u64>();
            assert_eq!(part.slots, slot_count..end);
            slot_count = end;
            assert_eq!(part.local.len(), part.remote.len());
            let bytes: u64 = part.local.iter().map(SlotRun::payload_bytes).sum();
            assert_eq!(bytes, part.payload_bytes);
            let slots = part.remote.iter().map(|run| (run.slot, run.slot_count));
            seen.push((slots.collect(), part.payload_bytes, part.is_last));
        }
        seen
    }

    #[test]
    fn a_short_operation_is_one_part() {
        assert_eq!(
            cut(&[(100, 3), (10, 1)]),
            [(vec![(7, 3), (7, 1)], 310, true)]
        );
        assert!(cut(&[]).is_empty());
    }

    #[test]
    fn long_operations_are_cut_at_slot_borders() {
        let mib = 1 << 20;
        assert_eq!(
            cut(&[(mib, 6), (100, 2)]),
            [
                (vec![(7, 4)], 4 * mib, false),
                (vec![(11, 2), (7, 2)], 2 * mib + 200, true)
            ]
        );
        let long = PART_BYTES + 1;
        assert_eq!(
            cut(&[(long, 2)]),
            [(vec![(7, 1)], long, false), (vec![(8, 1)], long, true)]
        );
    }

    #[test]
    fn a_frame_holds_a_bounded_number_of_runs() {
        let shapes = vec![(1, 1); RUN_LIMIT + 1];
        let parts = cut(&shapes);
        assert_eq!(parts.len(), 2);
        assert_eq!((parts[0].1, parts[0].2), (RUN_LIMIT as u64, false));
        assert_eq!((parts[1].1, parts[1].2), (1, true));
    }
}
