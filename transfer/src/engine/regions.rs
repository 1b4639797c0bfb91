//! The registrations of an agent. Ids and generations are never given out twice.
//!
//! **Lock order.** The table's mutex is a leaf; the words of the regions are atomics.

use std::collections::BTreeMap;

use crate::{
    error::{Error, ErrorKind},
    ids::{PoolId, RegionId},
    mem::{
        Memory, PoolGeometry,
        region::{RegionCore, RegionHold},
    },
    sync::{Arc, Mutex},
};

#[derive(Debug, Default)]
pub(crate) struct RegionTable {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    next_region: u32,
    next_pool: u32,
    regions: BTreeMap<RegionId, Arc<RegionCore>>,
    by_pool: BTreeMap<PoolId, RegionId>,
}

impl RegionTable {
    pub(crate) fn register(
        &self,
        memory: Arc<Memory>,
        pools: &[PoolGeometry],
    ) -> Result<Arc<RegionCore>, Error> {
        let mut table = self.table.lock();
        let pool_count = u32::try_from(pools.len()).ok();
        let next_pool = pool_count.and_then(|count| table.next_pool.checked_add(count));
        let (Some(next_pool), Some(next_region)) = (next_pool, table.next_region.checked_add(1))
        else {
            let value = format!("{} after {}", pools.len(), table.next_pool);
            return Err(ErrorKind::InvalidArgument {
                what: "number of pools",
                value,
            }
            .into());
        };
        if pools.is_empty() {
            let value = "0".to_owned();
            return Err(ErrorKind::InvalidArgument {
                what: "number of pools",
                value,
            }
            .into());
        }
        let id = RegionId(table.next_region);
        // The number of registrations so far tells one life of an address from the next.
        let region = Arc::new(RegionCore::new(
            id,
            next_region,
            memory,
            table.next_pool,
            pools,
        )?);
        table.next_region = next_region;
        table.next_pool = next_pool;
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
            None if pool.0 < table.next_pool => Err(ErrorKind::PoolRevoked { pool }.into()),
            None => Err(ErrorKind::UnknownPool { pool }.into()),
            Some(region) if region.is_revoked() => Err(ErrorKind::PoolRevoked { pool }.into()),
            Some(region) => Ok(region.clone()),
        }
    }

    /// Holds every one of these regions, or none.
    pub(crate) fn hold_all(&self, ids: &[RegionId]) -> Result<Vec<RegionHold>, Error> {
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

    /// Forgets a closed region.
    pub(crate) fn remove(&self, id: RegionId) {
        let removed = {
            let mut table = self.table.lock();
            table.by_pool.retain(|_, region| *region != id);
            table.regions.remove(&id)
        };
        drop(removed);
    }

    /// Closes the regions that nobody else closes, where they are quiet; returns which.
    pub(crate) fn sweep(&self) -> Vec<RegionId> {
        let is_over = |region: &Arc<RegionCore>| region.is_orphan() && region.is_quiet();
        let over: Vec<_> = self.all().into_iter().filter(is_over).collect();
        for region in &over {
            region.release();
            self.remove(region.id);
        }
        over.iter().map(|region| region.id).collect()
    }
}
