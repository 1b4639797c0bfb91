//! [`PreparedTransfer`]: a transfer that was checked once and may be posted many times (I-16).

use std::collections::BTreeSet;

use smallvec::SmallVec;

use crate::{
    backend::{PairGroup, PoolPair, RunPairs},
    desc::{self, DescriptorList, PairedGroup, SlotPair},
    engine::{Engine, peer::Peer},
    error::{Error, ErrorKind},
    ids::{PeerId, PoolId, RegionId},
    mem::region::RegionCore,
    op::Op,
    sync::Arc,
};

/// A checked transfer towards one connection of one incarnation of a peer. Post it with
/// [`crate::Agent::post`], as often as needed.
#[derive(Clone, Debug)]
pub struct PreparedTransfer {
    pub(crate) op: Op,
    pub(crate) peer: PeerId,
    pub(crate) runs: Arc<RunPairs>,
    pub(crate) local_regions: SmallVec<[RegionId; 2]>,
    pub(crate) remote_regions: SmallVec<[RegionId; 2]>,
    bytes: u64,
    descriptor_count: u64,
}

impl PreparedTransfer {
    /// Which way the bytes go.
    pub fn op(&self) -> Op {
        self.op
    }

    /// The connection it goes over.
    pub fn peer(&self) -> PeerId {
        self.peer
    }

    /// Bytes that are moved.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Slots that are moved.
    pub fn descriptor_count(&self) -> u64 {
        self.descriptor_count
    }

    /// Stretches of neighbouring slots on both sides that were joined to this many runs.
    pub fn run_count(&self) -> usize {
        self.runs.iter().count()
    }

    pub(crate) fn check(
        engine: &Engine,
        peer: &Peer,
        op: Op,
        local: &DescriptorList,
        remote: &DescriptorList,
    ) -> Result<Self, Error> {
        match remote.incarnation() {
            None => return Err(ErrorKind::IncarnationMissing.into()),
            Some(expected) if expected != peer.incarnation() => {
                let found = peer.incarnation();
                return Err(ErrorKind::IncarnationMismatch { expected, found }.into());
            }
            Some(_) => {}
        }
        let limit = peer.caps().max_descriptors;
        if local.descriptor_count() > limit {
            let count = local.descriptor_count();
            return Err(ErrorKind::TooManyDescriptors { count, limit }.into());
        }
        let groups = desc::pair(local, remote)?;
        let mut resolving = Resolving::new(engine, peer);
        for group in groups {
            resolving.add(group)?;
        }
        let Resolving {
            runs,
            local_regions,
            remote_regions,
            bytes,
            ..
        } = resolving;
        if let Some((pool, slot)) = repeated(op, &runs) {
            return Err(ErrorKind::DuplicateDestination { pool, slot }.into());
        }
        Ok(Self {
            op,
            peer: peer.id,
            runs: Arc::new(runs),
            local_regions,
            remote_regions,
            bytes,
            descriptor_count: local.descriptor_count(),
        })
    }
}

/// Checks both sides of every group and turns pools into addresses.
struct Resolving<'a> {
    engine: &'a Engine,
    peer: &'a Peer,
    /// Of the last local pool: the next one is of the same region as a rule.
    region: Option<Arc<RegionCore>>,
    runs: RunPairs,
    local_regions: SmallVec<[RegionId; 2]>,
    remote_regions: SmallVec<[RegionId; 2]>,
    bytes: u64,
}

impl<'a> Resolving<'a> {
    fn new(engine: &'a Engine, peer: &'a Peer) -> Self {
        Self {
            engine,
            peer,
            region: None,
            runs: RunPairs::default(),
            local_regions: SmallVec::new(),
            remote_regions: SmallVec::new(),
            bytes: 0,
        }
    }

    fn add(&mut self, group: PairedGroup) -> Result<(), Error> {
        let PairedGroup { pools, slots } = group;
        // A list is not empty.
        let (mut local_last, mut remote_last) = (0, 0);
        for pair in &slots {
            local_last = local_last.max(pair.local);
            remote_last = remote_last.max(pair.remote);
        }
        let mut pairs = SmallVec::with_capacity(pools.len());
        for &(here, there) in &pools {
            let pair = self.pools(here, there, (local_last, remote_last))?;
            self.bytes += pair.local.slot_bytes as u64 * slots.len() as u64;
            pairs.push(pair);
        }
        self.runs.groups.push(PairGroup {
            pools: pairs,
            slots,
            remote_last,
        });
        Ok(())
    }

    /// A pool here and one there, whose slots up to the given ones are moved.
    fn pools(
        &mut self,
        here: PoolId,
        there: PoolId,
        (local_last, remote_last): (u32, u32),
    ) -> Result<PoolPair, Error> {
        let outside = |pool, slot, slot_count| {
            Err(ErrorKind::SlotOutOfRange {
                pool,
                slot,
                slot_count,
            }
            .into())
        };
        let region = self.region_of(here)?;
        let span = *region
            .span(here)
            .ok_or(ErrorKind::UnknownPool { pool: here })?;
        let region = region.id;
        let slot_count = span.geometry().slot_count;
        let local = match span.run(0, slot_count) {
            Some(all) if local_last < slot_count => all,
            _ => return outside(here, local_last, slot_count),
        };
        let target = self.peer.pool(there)?;
        if remote_last >= target.geometry.slot_count {
            return outside(there, remote_last, target.geometry.slot_count);
        }
        if local.slot_bytes as u64 != target.geometry.slot_bytes {
            return Err(ErrorKind::SlotBytesMismatch {
                local: here,
                local_bytes: local.slot_bytes as u64,
                remote: there,
                remote_bytes: target.geometry.slot_bytes,
            }
            .into());
        }
        if !self.remote_regions.contains(&target.region) {
            self.remote_regions.push(target.region);
        }
        Ok(PoolPair {
            local,
            pool: here,
            region,
            remote: there,
            generation: target.generation,
        })
    }

    fn region_of(&mut self, pool: PoolId) -> Result<&RegionCore, Error> {
        let known = self
            .region
            .take()
            .filter(|region| region.span(pool).is_some());
        let region = match known {
            Some(region) => region,
            None => {
                let region = self.engine.regions.find(pool)?;
                if !self.local_regions.contains(&region.id) {
                    self.local_regions.push(region.id);
                }
                region
            }
        };
        Ok(self.region.insert(region))
    }
}

/// A destination that stands in the transfer twice.
fn repeated(op: Op, runs: &RunPairs) -> Option<(PoolId, u32)> {
    let slot = |pair: &SlotPair| match op {
        Op::Write => pair.remote,
        Op::Read => pair.local,
    };
    let name = |pool: &PoolPair| match op {
        Op::Write => pool.remote,
        Op::Read => pool.pool,
    };
    for group in &runs.groups {
        // The list of a group is looked at once, however many pools share it.
        if let Some(slot) = desc::duplicate(group.slots.iter().map(slot)) {
            return Some((name(group.pools.first()?), slot));
        }
    }
    let pools = || runs.groups.iter().flat_map(|group| &group.pools);
    // A single pool was looked at above.
    pools().nth(1)?;
    let mut all: Vec<PoolId> = pools().map(name).collect();
    all.sort_unstable();
    let again: BTreeSet<PoolId> = all
        .windows(2)
        .filter(|two| two[0] == two[1])
        .map(|two| two[0])
        .collect();
    for pool in again {
        let with_pool = runs.groups.iter().flat_map(|group| {
            let times = group.pools.iter().filter(|other| name(other) == pool);
            (0..times.count()).flat_map(|_| group.slots.iter().map(slot))
        });
        let slots: Vec<u32> = with_pool.collect();
        if let Some(slot) = desc::duplicate(slots.into_iter()) {
            return Some((pool, slot));
        }
    }
    None
}
