//! [`DescriptorList`]: what a transfer moves, as page numbers.

use crate::{
    error::{Error, ErrorKind},
    ids::{Incarnation, PoolId},
};

/// A list of slots. Two of them make a transfer: the n-th local slot goes to the n-th remote slot.
///
/// Neighbouring slots are kept as runs, so a list of consecutive pages costs one entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DescriptorList {
    runs: Vec<SlotRange>,
    descriptor_count: u64,
    incarnation: Option<Incarnation>,
}

/// Slots `slot..slot + slot_count` of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotRange {
    pub(crate) pool: PoolId,
    pub(crate) slot: u32,
    pub(crate) slot_count: u32,
}

/// Two ranges of equal length, paired slot by slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RangePair {
    pub(crate) local: SlotRange,
    pub(crate) remote: SlotRange,
}

impl DescriptorList {
    /// An empty list of slots of this agent.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty list of slots of a peer in one of its lives. A transfer towards another incarnation is
    /// refused, since the same numbers name other memory there.
    pub fn remote(incarnation: Incarnation) -> Self {
        Self {
            incarnation: Some(incarnation),
            ..Self::default()
        }
    }

    /// Appends slots of one pool, in this order.
    pub fn push(&mut self, pool: PoolId, slots: &[u32]) {
        for &slot in slots {
            match self.runs.last_mut() {
                Some(run)
                    if run.pool == pool && run.slot.checked_add(run.slot_count) == Some(slot) =>
                {
                    run.slot_count += 1;
                }
                _ => self.runs.push(SlotRange {
                    pool,
                    slot,
                    slot_count: 1,
                }),
            }
        }
        self.descriptor_count += slots.len() as u64;
    }

    /// Appends the same slots of each of `pools`, pool by pool.
    pub fn push_group(&mut self, pools: &[PoolId], slots: &[u32]) {
        for &pool in pools {
            self.push(pool, slots);
        }
    }

    /// Number of slots.
    pub fn descriptor_count(&self) -> u64 {
        self.descriptor_count
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.descriptor_count == 0
    }

    /// The life of the peer whose slots these are; `None` for slots of this agent.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.incarnation
    }

    #[cfg(all(test, not(kv_loom)))]
    fn runs(&self) -> &[SlotRange] {
        &self.runs
    }
}

/// Pairs two lists slot by slot, in as few pairs of ranges as there are.
///
/// # Errors
/// [`ErrorKind::EmptyTransfer`], [`ErrorKind::LengthMismatch`].
pub(crate) fn pair(
    local: &DescriptorList,
    remote: &DescriptorList,
) -> Result<Vec<RangePair>, Error> {
    if local.descriptor_count != remote.descriptor_count {
        return Err(ErrorKind::LengthMismatch {
            local_count: local.descriptor_count,
            remote_count: remote.descriptor_count,
        }
        .into());
    }
    if local.is_empty() {
        return Err(ErrorKind::EmptyTransfer.into());
    }
    let mut pairs = Vec::with_capacity(local.runs.len().max(remote.runs.len()));
    let (mut locals, mut remotes) = (local.runs.iter().copied(), remote.runs.iter().copied());
    let (mut l, mut r) = (locals.next(), remotes.next());
    while let (Some(mut left), Some(mut right)) = (l, r) {
        let slot_count = left.slot_count.min(right.slot_count);
        pairs.push(RangePair {
            local: SlotRange { slot_count, ..left },
            remote: SlotRange {
                slot_count,
                ..right
            },
        });
        l = if left.advance(slot_count) {
            Some(left)
        } else {
            locals.next()
        };
        r = if right.advance(slot_count) {
            Some(right)
        } else {
            remotes.next()
        };
    }
    Ok(pairs)
}

/// The first slot that stands in `ranges` twice.
pub(crate) fn duplicate(ranges: impl Iterator<Item = SlotRange>) -> Option<(PoolId, u32)> {
    let mut ranges: Vec<SlotRange> = ranges.collect();
    ranges.sort_unstable_by_key(|range| (range.pool, range.slot));
    ranges.windows(2).find_map(|two| {
        let overlap = two[0].pool == two[1].pool && two[0].end() > u64::from(two[1].slot);
        overlap.then_some((two[1].pool, two[1].slot))
    })
}

impl SlotRange {
    fn end(&self) -> u64 {
        u64::from(self.slot) + u64::from(self.slot_count)
    }

    /// Drops the first `count` slots; `false` when nothing is left.
    fn advance(&mut self, count: u32) -> bool {
        self.slot_count -= count;
        self.slot = self.slot.wrapping_add(count);
        self.slot_count > 0
    }
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn list(slots: &[(u32, u32)]) -> DescriptorList {
        let mut list = DescriptorList::new();
        for &(pool, slot) in slots {
            list.push(PoolId(pool), &[slot]);
        }
        list
    }

    fn expand(ranges: impl Iterator<Item = SlotRange>) -> Vec<(u32, u32)> {
        ranges
            .flat_map(|r| (r.slot..r.slot + r.slot_count).map(move |s| (r.pool.0, s)))
            .collect()
    }

    #[test]
    fn consecutive_slots_are_one_run() {
        let mut a = DescriptorList::new();
        a.push_group(&[PoolId(1), PoolId(2)], &[4, 5, 6, 9]);
        assert_eq!(a.runs().len(), 4);
        assert_eq!(a.descriptor_count(), 8);
    }

    #[test]
    fn the_last_slot_number_is_no_neighbour_of_the_first() {
        let a = list(&[(0, u32::MAX), (0, 0)]);
        assert_eq!(a.runs().len(), 2);
    }

    #[test]
    fn lengths_must_match_and_not_be_zero() {
        let error = pair(&list(&[(0, 1)]), &list(&[])).unwrap_err();
        assert_eq!(
            *error.kind(),
            ErrorKind::LengthMismatch {
                local_count: 1,
                remote_count: 0
            }
        );
        let error = pair(&list(&[]), &list(&[])).unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::EmptyTransfer);
    }

    proptest! {
        #[test]
        fn pairing_keeps_every_slot_in_its_place(
            slots in prop::collection::vec(((0u32..3, 0u32..12), (0u32..3, 0u32..12)), 1..60),
        ) {
            let (left, right): (Vec<_>, Vec<_>) = slots.into_iter().unzip();
            let pairs = pair(&list(&left), &list(&right)).unwrap();
            prop_assert_eq!(expand(pairs.iter().map(|p| p.local)), left);
            prop_assert_eq!(expand(pairs.iter().map(|p| p.remote)), right.clone());
            let mut sorted = right.clone();
            sorted.sort_unstable();
            let repeats = sorted.windows(2).any(|w| w[0] == w[1]);
            prop_assert_eq!(duplicate(pairs.iter().map(|p| p.remote)).is_some(), repeats);
        }

        #[test]
        fn neighbours_on_both_sides_become_one_pair(start in 0u32..1000, to in 0u32..1000, n in 1u32..500) {
            let from: Vec<u32> = (start..start + n).collect();
            let into: Vec<u32> = (to..to + n).collect();
            let (mut a, mut b) = (DescriptorList::new(), DescriptorList::new());
            a.push(PoolId(0), &from);
            b.push(PoolId(0), &into);
            prop_assert_eq!(pair(&a, &b).unwrap().len(), 1);
        }
    }
}
