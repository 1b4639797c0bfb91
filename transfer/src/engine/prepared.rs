//! [`PreparedTransfer`]: a transfer that was checked once and may be posted many times (I-16).

use std::collections::{BTreeMap, btree_map::Entry};

use crate::{
    backend::{RemoteRun, RunPairs},
    desc::{self, DescriptorList, RangePair},
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
    pub(crate) local_regions: Vec<RegionId>,
    pub(crate) remote_regions: Vec<RegionId>,
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
        self.runs.remote.len()
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
        let pairs = desc::pair(local, remote)?;
        let resolved = resolve_pairs(engine, peer, op, &pairs)?;
        let destination = |pair: &RangePair| match op {
            Op::Write => pair.remote,
            Op::Read => pair.local,
        };
        if let Some((pool, slot)) = desc::duplicate(pairs.iter().map(destination)) {
            return Err(ErrorKind::DuplicateDestination { pool, slot }.into());
        }
        Ok(Self {
            descriptor_count: local.descriptor_count(),
            ..resolved
        })
    }
}

/// Checks both sides of every pair and turns slots into addresses.
fn resolve_pairs(
    engine: &Engine,
    peer: &Peer,
    op: Op,
    pairs: &[RangePair],
) -> Result<PreparedTransfer, Error> {
    let mut locals: BTreeMap<PoolId, Arc<RegionCore>> = BTreeMap::new();
    let mut remote_regions = Vec::new();
    let mut runs = RunPairs {
        local: Vec::with_capacity(pairs.len()),
        remote: Vec::with_capacity(pairs.len()),
    };
    let mut bytes = 0u64;
    for RangePair { local, remote } in pairs {
        let region = match locals.entry(local.pool) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(engine.regions.find(local.pool)?),
        };
        let run = region.run(local.pool, local.slot, local.slot_count)?;
        let target = peer.pool(remote.pool)?;
        let slot_count = target.geometry.slot_count;
        if remote
            .slot
            .checked_add(remote.slot_count)
            .is_none_or(|end| end > slot_count)
        {
            let slot = remote.slot.saturating_add(remote.slot_count - 1);
            return Err(ErrorKind::SlotOutOfRange {
                pool: remote.pool,
                slot,
                slot_count,
            }
            .into());
        }
        if run.slot_bytes as u64 != target.geometry.slot_bytes {
            return Err(ErrorKind::SlotBytesMismatch {
                local: local.pool,
                local_bytes: run.slot_bytes as u64,
                remote: remote.pool,
                remote_bytes: target.geometry.slot_bytes,
            }
            .into());
        }
        bytes += run.payload_bytes();
        runs.local.push(run);
        runs.remote.push(RemoteRun {
            pool: remote.pool,
            generation: target.generation,
            slot: remote.slot,
            slot_count: remote.slot_count,
        });
        remote_regions.push(target.region);
    }
    remote_regions.sort_unstable();
    remote_regions.dedup();
    let mut local_regions: Vec<_> = locals.values().map(|region| region.id).collect();
    local_regions.sort_unstable();
    local_regions.dedup();
    Ok(PreparedTransfer {
        op,
        peer: peer.id,
        runs: Arc::new(runs),
        local_regions,
        remote_regions,
        bytes,
        descriptor_count: 0,
    })
}
