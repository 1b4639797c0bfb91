//! What an agent tells a peer about itself: who it is, and which slots it may be asked to write.
//!
//! The blob is versioned on its own, since it may also travel by other carriers than a link. It is
//! parsed once into checked values: after [`AgentMetadata::decode`] every pool lies inside its region.

use bytes::Bytes;

use super::fields::Fields;
use super::wire::WireError;
use crate::ids::{Incarnation, PoolId, RegionId};
use crate::mem::{MemoryKind, PoolGeometry};

/// Version of the blob.
const VERSION: u16 = 1;
/// Longest name of an agent.
pub(crate) const NAME_LIMIT_BYTES: usize = 255;
/// Longest blob of the application.
pub(crate) const APP_LIMIT_BYTES: usize = 1 << 20;
/// Most regions and most pools an agent may announce.
pub(crate) const REGION_LIMIT: usize = 16_384;
/// As [`REGION_LIMIT`], for pools.
pub(crate) const POOL_LIMIT: usize = 65_536;

const REGION_BYTES: usize = 17;
const POOL_BYTES: usize = 36;

/// One registered region of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegionInfo {
    pub(crate) id: RegionId,
    /// Registration generation; a receiver refuses writes that carry another one.
    pub(crate) generation: u32,
    pub(crate) len_bytes: u64,
    pub(crate) kind: MemoryKind,
}

/// One pool of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PoolInfo {
    pub(crate) id: PoolId,
    pub(crate) region: RegionId,
    pub(crate) geometry: PoolGeometry,
}

/// An agent as its peers see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AgentMetadata {
    pub(crate) incarnation: Incarnation,
    pub(crate) name: String,
    /// Ascending by id.
    pub(crate) regions: Vec<RegionInfo>,
    /// Ascending by id.
    pub(crate) pools: Vec<PoolInfo>,
    /// Opaque to this crate.
    pub(crate) app: Bytes,
}

impl AgentMetadata {
    /// The blob.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(
            64 + self.name.len()
                + self.app.len()
                + REGION_BYTES * self.regions.len()
                + POOL_BYTES * self.pools.len(),
        );
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&self.incarnation.0.to_le_bytes());
        put_length(&mut out, self.name.len());
        out.extend_from_slice(self.name.as_bytes());
        put_length(&mut out, self.regions.len());
        for region in &self.regions {
            out.extend_from_slice(&region.id.0.to_le_bytes());
            out.extend_from_slice(&region.generation.to_le_bytes());
            out.extend_from_slice(&region.len_bytes.to_le_bytes());
            out.push(match region.kind {
                MemoryKind::Host => 0,
                MemoryKind::Shared => 1,
            });
        }
        put_length(&mut out, self.pools.len());
        for pool in &self.pools {
            out.extend_from_slice(&pool.id.0.to_le_bytes());
            out.extend_from_slice(&pool.region.0.to_le_bytes());
            out.extend_from_slice(&pool.geometry.offset_bytes.to_le_bytes());
            out.extend_from_slice(&pool.geometry.stride_bytes.to_le_bytes());
            out.extend_from_slice(&pool.geometry.slot_bytes.to_le_bytes());
            out.extend_from_slice(&pool.geometry.slot_count.to_le_bytes());
        }
        put_length(&mut out, self.app.len());
        out.extend_from_slice(&self.app);
        out
    }

    /// Parses and checks a blob: counts within limits, ids ascending, every pool inside its region.
    ///
    /// # Errors
    /// The field that is wrong, with its value.
    pub(crate) fn decode(blob: Bytes) -> Result<Self, WireError> {
        let mut fields = Fields::new(blob);
        let theirs = fields.u16("metadata.version")?;
        if theirs != VERSION {
            return Err(WireError::Version {
                ours: VERSION,
                theirs,
            });
        }
        let incarnation = Incarnation(fields.u128("incarnation")?);
        let name_bytes = fields.count(NAME_LIMIT_BYTES, 1, "name_bytes")?;
        let name = fields.text(name_bytes, "name")?;
        let regions = decode_regions(&mut fields)?;
        let pools = decode_pools(&mut fields, &regions)?;
        let app_bytes = fields.count(APP_LIMIT_BYTES, 1, "app_bytes")?;
        let app = fields.take(app_bytes, "app")?;
        fields.finish()?;
        Ok(Self {
            incarnation,
            name,
            regions,
            pools,
            app,
        })
    }

    /// The region with this id.
    pub(crate) fn region(&self, id: RegionId) -> Option<&RegionInfo> {
        find(&self.regions, id)
    }

    /// The pool with this id.
    pub(crate) fn pool(&self, id: PoolId) -> Option<&PoolInfo> {
        let index = self.pools.binary_search_by_key(&id, |pool| pool.id).ok()?;
        self.pools.get(index)
    }
}

fn find(regions: &[RegionInfo], id: RegionId) -> Option<&RegionInfo> {
    let index = regions.binary_search_by_key(&id, |region| region.id).ok()?;
    regions.get(index)
}

fn decode_regions(fields: &mut Fields) -> Result<Vec<RegionInfo>, WireError> {
    let count = fields.count(REGION_LIMIT, REGION_BYTES, "region_count")?;
    let mut regions: Vec<RegionInfo> = Vec::with_capacity(count);
    for _ in 0..count {
        let id = RegionId(fields.u32("region.id")?);
        if regions.last().is_some_and(|last| last.id >= id) {
            return Err(bad("region.id", u64::from(id.0)));
        }
        let generation = fields.u32("region.generation")?;
        let len_bytes = fields.u64("region.len_bytes")?;
        let kind = match fields.u8("region.kind")? {
            0 => MemoryKind::Host,
            1 => MemoryKind::Shared,
            other => return Err(bad("region.kind", u64::from(other))),
        };
        regions.push(RegionInfo {
            id,
            generation,
            len_bytes,
            kind,
        });
    }
    Ok(regions)
}

fn decode_pools(fields: &mut Fields, regions: &[RegionInfo]) -> Result<Vec<PoolInfo>, WireError> {
    let count = fields.count(POOL_LIMIT, POOL_BYTES, "pool_count")?;
    let mut pools: Vec<PoolInfo> = Vec::with_capacity(count);
    for _ in 0..count {
        let id = PoolId(fields.u32("pool.id")?);
        if pools.last().is_some_and(|last| last.id >= id) {
            return Err(bad("pool.id", u64::from(id.0)));
        }
        let region_id = RegionId(fields.u32("pool.region")?);
        let region =
            find(regions, region_id).ok_or_else(|| bad("pool.region", u64::from(region_id.0)))?;
        let geometry = PoolGeometry {
            offset_bytes: fields.u64("pool.offset_bytes")?,
            stride_bytes: fields.u64("pool.stride_bytes")?,
            slot_bytes: fields.u64("pool.slot_bytes")?,
            slot_count: fields.u32("pool.slot_count")?,
        };
        match geometry.end_bytes() {
            Some(end_bytes) if end_bytes <= region.len_bytes => {}
            _ => return Err(bad("pool.slot_count", u64::from(geometry.slot_count))),
        }
        pools.push(PoolInfo {
            id,
            region: region_id,
            geometry,
        });
    }
    Ok(pools)
}

fn bad(field: &'static str, value: u64) -> WireError {
    WireError::BadValue { field, value }
}

fn put_length(out: &mut Vec<u8>, length: usize) {
    out.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
}
