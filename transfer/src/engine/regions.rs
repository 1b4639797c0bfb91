//! The registrations of an agent. Ids and generations are never given out twice in a process, so that what
//! was made with one agent means nothing to another one.
//!
//! **Lock order.** The table's mutex is a leaf; the words of the regions are atomics.

use std::collections::BTreeMap;

use crate::{
    error::{Error, ErrorKind},
    ids::{PoolId, RegionId},
    mem::{
        Memory, PoolGeometry,
        region::{RegionCore, RegionHolds},
    },
    sync::{Arc, Mutex, ProcessNumbers},
};

static REGIONS: ProcessNumbers = ProcessNumbers::new();
static POOLS: ProcessNumbers = ProcessNumbers::new();

#[derive(Debug, Default)]
pub(crate) struct RegionTable {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    regions: BTreeMap<RegionId, Arc<RegionCore>>,
    by_pool: BTreeMap<PoolId, RegionId>,
    /// First and number of the pools of every registration, closed ones too.
    issued: BTreeMap<u32, u32>,
}

impl Table {
    fn has_issued(&self, pool: PoolId) -> bool {
        let mut before = self.issued.range(..=pool.0);
        let last = before.next_back();
        last.is_some_and(|(first, count)| pool.0 - first < *count)
    }
}

impl RegionTable {
    pub(crate) fn register(
        &self,
        memory: Arc<Memory>,
        pools: &[PoolGeometry],
    ) -> Result<Arc<RegionCore>, Error> {
        let refused = || ErrorKind::InvalidArgument {
            what: "number of pools",
            value: pools.len().to_string(),
        };
        let count = u32::try_from(pools.len()).ok().filter(|count| *count > 0);
        let count = count.ok_or_else(refused)?;
        let first_pool = POOLS.take(count).ok_or_else(refused)?;
        let number = REGIONS.take(1).ok_or_else(refused)?;
        let id = RegionId(number);
        // The number of registrations so far tells one life of an address from the next.
        let generation = number.checked_add(1).ok_or_else(refused)?;
        let region = RegionCore::new(id, generation, memory, first_pool, pools)?;
        let region = Arc::new(region);
        let mut table = self.table.lock();
        table.issued.insert(first_pool, count);
        table
            .by_pool
            .extend(region.pools.iter().map(|(pool, _)| (*pool, id)));
        table.regions.insert(id, region.clone());
        Ok(region)
    }

    /// The live region of a pool.
    pub(crate) fn find(&self, pool: PoolId) -> Result<Arc<RegionCore>, Error> {
        let table = self.table.lock();
        let region = table
            .by_pool
            .get(&pool)
            .and_then(|id| table.regions.get(id));
        match region {
            None if table.has_issued(pool) => Err(ErrorKind::PoolRevoked { pool }.into()),
            None => Err(ErrorKind::UnknownPool { pool }.into()),
            Some(region) if region.is_revoked() => Err(ErrorKind::PoolRevoked { pool }.into()),
            Some(region) => Ok(region.clone()),
        }
    }

    /// Holds every one of these regions, or none.
    pub(crate) fn hold_all(&self, ids: &[RegionId]) -> Result<RegionHolds, Error> {
        let table = self.table.lock();
        let hold = |id: &RegionId| {
            table
                .regions
                .get(id)
                .and_then(RegionCore::hold)
                .ok_or(ErrorKind::RegionClosed { region: *id })
        };
        Ok(ids.iter().map(hold).collect::<Result<_, _>>()?)
    }

    pub(crate) fn get(&self, id: RegionId) -> Option<Arc<RegionCore>> {
        self.table.lock().regions.get(&id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<RegionCore>> {
        self.table.lock().regions.values().cloned().collect()
    }

    /// Forgets a closed region. Whether it was there.
    pub(crate) fn remove(&self, id: RegionId) -> bool {
        let removed = {
            let mut table = self.table.lock();
            table.by_pool.retain(|_, region| *region != id);
            table.regions.remove(&id)
        };
        removed.is_some()
    }

    /// Closes the regions that nobody else closes, where they are quiet; returns which.
    pub(crate) fn sweep(&self) -> Vec<RegionId> {
        let is_over = |region: &Arc<RegionCore>| region.is_orphan() && region.is_quiet();
        let over = self.all().into_iter().filter(is_over);
        // One that is kept is asked for again the next time; one that is gone, another caller has closed.
        let closed = over.filter(|region| region.release().is_ok() && self.remove(region.id));
        closed.map(|region| region.id).collect()
    }
}
