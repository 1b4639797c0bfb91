//! What an operation moves: pools of both sides with pairs of slots, eight bytes a pair however many pools
//! share them. Neighbours are joined to runs while a backend walks over them.

use smallvec::SmallVec;

use super::RemoteRun;
use crate::desc::{PairedSlots, SlotPair, run_at};
use crate::ids::{PoolId, RegionId};
use crate::mem::span::SlotRun;

/// A pool here and its partner there; their slots have one length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolPair {
    /// Every slot of the pool of this side.
    pub(crate) local: SlotRun,
    /// That pool.
    pub(crate) pool: PoolId,
    /// Its region, which every operation of the transfer holds.
    #[cfg_attr(any(kv_loom, not(feature = "one-sided")), allow(dead_code))]
    pub(crate) region: RegionId,
    /// The peer's pool.
    pub(crate) remote: PoolId,
    /// Registration generation of its region that this side knows.
    pub(crate) generation: u32,
}

/// Pools that move the same slots, one pool after the other.
#[derive(Clone, Debug)]
pub(crate) struct PairGroup {
    /// The pools.
    pub(crate) pools: SmallVec<[PoolPair; 1]>,
    /// The slots, the same of each pool.
    pub(crate) slots: PairedSlots,
    /// The highest slot of the peer; the local ones were checked when the group was made.
    #[cfg_attr(kv_loom, allow(dead_code))]
    pub(crate) remote_last: u32,
}

/// The runs of a prepared transfer.
#[derive(Debug, Default)]
pub struct RunPairs {
    /// In the order in which they were listed.
    pub(crate) groups: SmallVec<[PairGroup; 1]>,
}

/// A place in [`RunPairs`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RunCursor {
    group: usize,
    pool: usize,
    slot: usize,
}

impl RunPairs {
    /// The pair of runs at `cursor`, which moves on; `None` behind the last one.
    pub(crate) fn next(&self, cursor: &mut RunCursor) -> Option<(SlotRun, RemoteRun)> {
        let (pool, first, count) = self.next_slots(cursor)?;
        let remote = RemoteRun {
            pool: pool.remote,
            generation: pool.generation,
            slot: first.remote,
            slot_count: count,
        };
        Some((pool.local.section(first.local, count), remote))
    }

    /// As [`RunPairs::next`]: the pools, the first slots, and how many neighbours they are.
    pub(crate) fn next_slots(&self, cursor: &mut RunCursor) -> Option<(&PoolPair, SlotPair, u32)> {
        loop {
            let group = self.groups.get(cursor.group)?;
            let Some(pool) = group.pools.get(cursor.pool) else {
                *cursor = RunCursor {
                    group: cursor.group + 1,
                    ..RunCursor::default()
                };
                continue;
            };
            let Some((first, count)) = run_at(&group.slots, cursor.slot) else {
                cursor.pool += 1;
                cursor.slot = 0;
                continue;
            };
            cursor.slot += count as usize;
            return Some((pool, first, count));
        }
    }

    /// Every pair of runs.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (SlotRun, RemoteRun)> + '_ {
        let mut cursor = RunCursor::default();
        std::iter::from_fn(move || self.next(&mut cursor))
    }

    /// The regions of this side, once for each pool.
    #[cfg(all(feature = "one-sided", not(kv_loom)))]
    pub(crate) fn local_regions(&self) -> impl Iterator<Item = RegionId> {
        let pools = self.groups.iter().flat_map(|group| &group.pools);
        pools.map(|pool| pool.region)
    }

    /// The runs of the peer.
    #[cfg(any(kv_loom, feature = "sim"))]
    pub fn remote(&self) -> Vec<RemoteRun> {
        self.iter().map(|(_, remote)| remote).collect()
    }

    /// Pairs of runs that stand for themselves, all of the first region. For tests of the backends.
    #[cfg(all(test, not(kv_loom)))]
    pub(crate) fn of(runs: impl IntoIterator<Item = (SlotRun, RemoteRun)>) -> Self {
        let group = |(local, remote): (SlotRun, RemoteRun)| PairGroup {
            pools: smallvec::smallvec![PoolPair {
                local,
                pool: remote.pool,
                region: RegionId(1),
                remote: remote.pool,
                generation: remote.generation,
            }],
            slots: (0..remote.slot_count)
                .map(|index| SlotPair {
                    local: index,
                    remote: remote.slot + index,
                })
                .collect(),
            remote_last: remote.slot + remote.slot_count - 1,
        };
        Self {
            groups: runs.into_iter().map(group).collect(),
        }
    }
}
