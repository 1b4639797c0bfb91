//! [`DescriptorList`]: what a transfer moves, as page numbers.

use smallvec::{SmallVec, smallvec};

use crate::{
    error::{Error, ErrorKind},
    ids::{Incarnation, PoolId},
};

/// A list of slots. Two of them make a transfer: the n-th local slot goes to the n-th remote slot.
///
/// A slot is four bytes, however many pools share the list ([`DescriptorList::push_group`]); pools that are
/// pushed one after the other with the same slots share them too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DescriptorList {
    groups: SmallVec<[SlotGroup; 1]>,
    descriptor_count: u64,
    incarnation: Option<Incarnation>,
}

/// Slots of pools: all of the first one, then all of the next.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SlotGroup {
    pools: SmallVec<[PoolId; 4]>,
    slots: SmallVec<[u32; 4]>,
}

/// A slot here and its partner there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotPair {
    /// Of the pool of this side.
    pub(crate) local: u32,
    /// Of the peer's pool.
    pub(crate) remote: u32,
}

/// Pairs of slots; a few of them need no memory of their own, so that a small request costs none.
pub(crate) type PairedSlots = SmallVec<[SlotPair; 2]>;

/// Pools here and there whose slots are paired in the same way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PairedGroup {
    /// Here and there.
    pub(crate) pools: SmallVec<[(PoolId, PoolId); 2]>,
    pub(crate) slots: PairedSlots,
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
        self.push_group(&[pool], slots);
    }

    /// Appends the same slots of each of `pools`, pool by pool.
    pub fn push_group(&mut self, pools: &[PoolId], slots: &[u32]) {
        if pools.is_empty() || slots.is_empty() {
            return;
        }
        self.descriptor_count += pools.len() as u64 * slots.len() as u64;
        match self.groups.last_mut() {
            Some(last) if pools.len() == 1 && last.pools.as_slice() == pools => {
                last.slots.extend_from_slice(slots);
            }
            Some(last)
                if last.slots.as_slice() == slots
                    && !pools.iter().any(|pool| last.pools.contains(pool)) =>
            {
                last.pools.extend_from_slice(pools);
            }
            _ => self.groups.push(SlotGroup {
                pools: SmallVec::from_slice(pools),
                slots: SmallVec::from_slice(slots),
            }),
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
}

/// A place in a list.
#[derive(Clone, Copy)]
struct Place<'a> {
    groups: &'a [SlotGroup],
    /// In the first group.
    pool: usize,
    slot: usize,
}

impl<'a> Place<'a> {
    fn new(list: &'a DescriptorList) -> Self {
        Self {
            groups: &list.groups,
            pool: 0,
            slot: 0,
        }
    }

    /// The whole group that begins here.
    fn whole(&self) -> Option<&'a SlotGroup> {
        let group = self.groups.first()?;
        (self.pool == 0 && self.slot == 0).then_some(group)
    }

    /// What is left of one pool.
    fn rest(&self) -> Option<(PoolId, &'a [u32])> {
        let group = self.groups.first()?;
        Some((*group.pools.get(self.pool)?, group.slots.get(self.slot..)?))
    }

    fn skip_group(&mut self) {
        *self = Self {
            groups: self.groups.get(1..).unwrap_or_default(),
            pool: 0,
            slot: 0,
        };
    }

    /// Moves on by slots of one pool.
    fn skip(&mut self, count: usize) {
        self.slot += count;
        let Some(group) = self.groups.first() else {
            return;
        };
        if self.slot == group.slots.len() {
            self.slot = 0;
            self.pool += 1;
        }
        if self.pool == group.pools.len() {
            self.skip_group();
        }
    }
}

/// Pairs two lists slot by slot, group by group where their groups have the same shape.
///
/// # Errors
/// [`ErrorKind::EmptyTransfer`], [`ErrorKind::LengthMismatch`].
pub(crate) fn pair(
    local: &DescriptorList,
    remote: &DescriptorList,
) -> Result<SmallVec<[PairedGroup; 1]>, Error> {
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
    let mut groups = SmallVec::with_capacity(local.groups.len().max(remote.groups.len()));
    let (mut here, mut there) = (Place::new(local), Place::new(remote));
    while let (Some((pool, slots)), Some((other, others))) = (here.rest(), there.rest()) {
        let whole = here.whole().zip(there.whole()).filter(|(one, two)| {
            one.pools.len() == two.pools.len() && one.slots.len() == two.slots.len()
        });
        if let Some((one, two)) = whole {
            groups.push(PairedGroup {
                pools: one
                    .pools
                    .iter()
                    .copied()
                    .zip(two.pools.iter().copied())
                    .collect(),
                slots: paired(&one.slots, &two.slots),
            });
            here.skip_group();
            there.skip_group();
            continue;
        }
        let count = slots.len().min(others.len());
        groups.push(PairedGroup {
            pools: smallvec![(pool, other)],
            slots: paired(&slots[..count], &others[..count]),
        });
        here.skip(count);
        there.skip(count);
    }
    Ok(groups)
}

fn paired(local: &[u32], remote: &[u32]) -> PairedSlots {
    let pair = |(local, remote): (&u32, &u32)| SlotPair {
        local: *local,
        remote: *remote,
    };
    local.iter().zip(remote).map(pair).collect()
}

/// The first pair of the run that begins at `index`, and its length.
#[inline]
pub(crate) fn run_at(slots: &[SlotPair], index: usize) -> Option<(SlotPair, u32)> {
    let rest = slots.get(index..)?;
    let first = *rest.first()?;
    // A slot number that wraps is in no pool.
    let is_next = |two: &&[SlotPair]| {
        two[1].local == two[0].local.wrapping_add(1)
            && two[1].remote == two[0].remote.wrapping_add(1)
    };
    let joined = rest.windows(2).take_while(is_next).count();
    Some((first, joined as u32 + 1))
}

/// A slot that stands in the list twice.
pub(crate) fn duplicate(slots: impl Iterator<Item = u32> + Clone) -> Option<u32> {
    /// Up to here sorting is quicker than a bitmap.
    const FEW: usize = 48;
    let (count, end) = slots
        .clone()
        .fold((0, 0), |(count, end), slot| (count + 1, slot.max(end)));
    if count <= 1 {
        return None;
    }
    // A bitmap far longer than the list would cost more than the list.
    if count <= FEW || end as usize / 64 > 16 * count {
        let mut sorted: Vec<u32> = slots.collect();
        sorted.sort_unstable();
        return sorted
            .windows(2)
            .find(|two| two[0] == two[1])
            .map(|two| two[0]);
    }
    let mut seen = vec![0u64; end as usize / 64 + 1];
    let mut repeat = None;
    for slot in slots {
        let word = &mut seen[slot as usize / 64];
        let bit = 1 << (slot % 64);
        if *word & bit != 0 {
            repeat.get_or_insert(slot);
        }
        *word |= bit;
    }
    repeat
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

    type Named = (u32, u32);

    fn expand(groups: &[PairedGroup]) -> Vec<(Named, Named)> {
        let of_pool = |group: &PairedGroup, (here, there): (PoolId, PoolId)| -> Vec<_> {
            let pair = |pair: &SlotPair| ((here.0, pair.local), (there.0, pair.remote));
            group.slots.iter().map(pair).collect()
        };
        let of_group = |group: &PairedGroup| -> Vec<_> {
            let pools = group.pools.iter();
            pools.flat_map(|pools| of_pool(group, *pools)).collect()
        };
        groups.iter().flat_map(of_group).collect()
    }

    #[test]
    fn pools_with_the_same_slots_share_them() {
        let mut a = DescriptorList::new();
        a.push_group(&[PoolId(1), PoolId(2)], &[4, 5, 6, 9]);
        a.push(PoolId(3), &[4, 5, 6, 9]);
        assert_eq!(a.groups.len(), 1);
        assert_eq!(a.descriptor_count(), 12);
        a.push(PoolId(3), &[4, 5, 6, 9]);
        assert_eq!(a.groups.len(), 2, "a pool does not share with itself");
        a.push(PoolId(3), &[]);
        a.push_group(&[], &[1]);
        assert_eq!((a.groups.len(), a.descriptor_count()), (2, 16));
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

    #[test]
    fn groups_of_one_shape_stay_groups() {
        let (mut a, mut b) = (DescriptorList::new(), DescriptorList::new());
        a.push_group(&[PoolId(1), PoolId(2)], &[7, 3]);
        b.push_group(&[PoolId(8), PoolId(9)], &[0, 5]);
        let groups = pair(&a, &b).unwrap();
        assert_eq!(groups.len(), 1);
        assert_eq!(groups[0].pools.len(), 2);
        // Another shape on one side: pool by pool.
        let mut c = DescriptorList::new();
        c.push(PoolId(8), &[0, 5, 6, 1]);
        assert_eq!(pair(&a, &c).unwrap().len(), 2);
    }

    #[test]
    fn a_run_ends_where_one_side_jumps() {
        let pair = |local, remote| SlotPair { local, remote };
        let slots = [pair(3, 7), pair(4, 8), pair(5, 9), pair(6, 11), pair(7, 0)];
        assert_eq!(run_at(&slots, 0), Some((pair(3, 7), 3)));
        assert_eq!(run_at(&slots, 2), Some((pair(5, 9), 1)));
        assert_eq!(run_at(&slots, 4), Some((pair(7, 0), 1)));
        assert_eq!(run_at(&slots, 5), None);
    }

    #[test]
    fn repeats_are_found_in_short_long_and_sparse_lists() {
        let ascending = |count: u32, step: u32| (0..count).map(move |index| index * step);
        for (count, step) in [(1, 1), (40, 3), (5000, 1), (5000, 800_000)] {
            assert_eq!(duplicate(ascending(count, step)), None);
            let repeat = (count - 1) * step;
            let list = ascending(count, step).chain([repeat]);
            assert_eq!(duplicate(list), Some(repeat), "{count} by {step}");
        }
        assert_eq!(
            duplicate([u32::MAX, 0, u32::MAX].into_iter()),
            Some(u32::MAX)
        );
        assert_eq!(duplicate([].into_iter()), None);
    }

    proptest! {
        #[test]
        fn pairing_keeps_every_slot_in_its_place(
            left in prop::collection::vec((prop::collection::vec(0u32..4, 1..4), prop::collection::vec(0u32..9, 1..6)), 1..6),
            right in prop::collection::vec((prop::collection::vec(0u32..4, 1..4), prop::collection::vec(0u32..9, 1..6)), 1..6),
        ) {
            let make = |groups: &[(Vec<u32>, Vec<u32>)]| {
                let (mut list, mut named) = (DescriptorList::new(), Vec::new());
                for (pools, slots) in groups {
                    let ids: Vec<PoolId> = pools.iter().map(|pool| PoolId(*pool)).collect();
                    list.push_group(&ids, slots);
                    for pool in pools {
                        named.extend(slots.iter().map(|slot| (*pool, *slot)));
                    }
                }
                (list, named)
            };
            let ((mut a, mut left), (mut b, mut right)) = (make(&left), make(&right));
            // The shorter one is filled up.
            let counts = (left.len(), right.len());
            for (list, named, other) in [(&mut a, &mut left, counts.1), (&mut b, &mut right, counts.0)] {
                let missing: Vec<u32> = (100..).take(other.saturating_sub(named.len())).collect();
                list.push(PoolId(50), &missing);
                named.extend(missing.iter().map(|slot| (50, *slot)));
            }
            let expected: Vec<_> = left.into_iter().zip(right).collect();
            prop_assert_eq!(expand(&pair(&a, &b).unwrap()), expected);
        }

        #[test]
        fn a_repeat_is_found_whatever_the_list(slots in prop::collection::vec(0u32..90, 0..80)) {
            let mut sorted = slots.clone();
            sorted.sort_unstable();
            let repeats: Vec<u32> = sorted.windows(2).filter(|two| two[0] == two[1]).map(|two| two[0]).collect();
            match duplicate(slots.into_iter()) {
                Some(slot) => prop_assert!(repeats.contains(&slot)),
                None => prop_assert!(repeats.is_empty()),
            }
        }
    }
}
