//! Memory and its registration.

use std::ffi::{c_char, c_void};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvgate_transfer::{Deadline, Error, Memory, MemoryRegion, PoolGeometry};

use crate::agent::kv_agent;
use crate::arg;
use crate::handle::{Handle, handle};
use crate::status::{Failure, Outcome, guard, kv_status};

/// Where memory lives.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_memory_kind {
    /// Anonymous memory of this process.
    Host = 1,
    /// A sealed memfd that a peer on the same host can map: what the shm transport writes into. Nothing
    /// appears in a file system.
    Shared = 2,
}

/// A pool: equal slots in registered memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct kv_pool_geometry {
    /// First byte of slot 0 in the memory.
    pub offset_bytes: u64,
    /// Distance between two slots.
    pub stride_bytes: u64,
    /// Length of a slot: what a transfer moves.
    pub slot_bytes: u64,
    /// Number of slots.
    pub slot_count: u32,
    /// Zero.
    pub reserved: u32,
}

impl From<PoolGeometry> for kv_pool_geometry {
    fn from(geometry: PoolGeometry) -> Self {
        Self {
            offset_bytes: geometry.offset_bytes,
            stride_bytes: geometry.stride_bytes,
            slot_bytes: geometry.slot_bytes,
            slot_count: geometry.slot_count,
            reserved: 0,
        }
    }
}

impl kv_pool_geometry {
    fn parse(&self) -> Outcome<PoolGeometry> {
        arg::zero(self.reserved, "kv_pool_geometry.reserved")?;
        Ok(PoolGeometry {
            offset_bytes: self.offset_bytes,
            stride_bytes: self.stride_bytes,
            slot_bytes: self.slot_bytes,
            slot_count: self.slot_count,
        })
    }
}

/// A stretch of zeroed memory that never moves. A child made by `fork` does not inherit it.
pub struct kv_memory {
    _opaque: (),
}

handle!(kv_memory => Arc<Memory>, "memory");

/// The registration of memory with an agent: what transfers may touch.
pub struct kv_region {
    _opaque: (),
}

pub(crate) struct RegionObject {
    /// Held across no wait.
    phase: Mutex<Phase>,
    pools: Vec<u32>,
}

enum Phase {
    Open(MemoryRegion),
    /// A thread waits for its end.
    Closing,
    Closed,
}

type Closed = Result<(), (MemoryRegion, Error)>;

impl RegionObject {
    fn new(region: MemoryRegion) -> Self {
        let pools = region.pools().iter().map(|pool| pool.0).collect();
        let phase = Mutex::new(Phase::Open(region));
        Self { phase, pools }
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close_by(&self, close: impl FnOnce(MemoryRegion) -> Closed) -> Outcome<()> {
        let region = self.take()?;
        let (phase, outcome) = match close(region) {
            Ok(()) => (Phase::Closed, Ok(())),
            Err((region, error)) => (Phase::Open(region), Err(Failure::from(error))),
        };
        *self.phase() = phase;
        outcome
    }

    /// The region, for the one thread that closes it.
    fn take(&self) -> Outcome<MemoryRegion> {
        let mut phase = self.phase();
        let (status, message) = match mem::replace(&mut *phase, Phase::Closing) {
            Phase::Open(region) => return Ok(region),
            Phase::Closing => (kv_status::Busy, "another thread is closing the region"),
            Phase::Closed => {
                *phase = Phase::Closed;
                (kv_status::Closed, "the region is closed")
            }
        };
        Err(Failure::new(status, message))
    }
}

handle!(kv_region => RegionObject, "region");

/// Allocates `length_bytes` bytes, zeroed and populated. `kind` is an `enum kv_memory_kind`. `name` shows
/// in `/proc/self/maps` for shared memory; NULL for none.
///
/// `KV_STATUS_OUT_OF_MEMORY` when the host or its control group has less to give; nothing was touched then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_memory_create(
    kind: u32,
    length_bytes: u64,
    name: *const c_char,
    memory: *mut *mut kv_memory,
) -> kv_status {
    guard(|| {
        // SAFETY: the contract of the header.
        let memory = unsafe { arg::out(memory, "memory")? };
        let name = match name.is_null() {
            true => "kvgate",
            // SAFETY: as above.
            false => unsafe { arg::text(name, "name")? },
        };
        let kind = memory_kind(kind)?;
        let made = match kind {
            kv_memory_kind::Host => Memory::host(length_bytes)?,
            kv_memory_kind::Shared => Memory::shared(name, length_bytes)?,
        };
        memory.set(kv_memory::create(Arc::new(made)));
        Ok(())
    })
}

pub(crate) fn memory_kind(kind: u32) -> Outcome<kv_memory_kind> {
    [kv_memory_kind::Host, kv_memory_kind::Shared]
        .into_iter()
        .find(|known| *known as u32 == kind)
        .ok_or_else(|| Failure::argument(format!("{kind} is no kv_memory_kind")))
}

/// The first byte of the memory and, unless NULL, its length. The address is good until the handle and
/// every registration of the memory are gone.
///
/// Slots that a flight fills are to be read only after `kv_flight_wait` for their stage has answered
/// `KV_STATUS_OK`; slots that a transfer reads are not to be written before it has ended. For the cache of a
/// model, use pools, which give out addresses through their gates only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_memory_address(
    memory: *const kv_memory,
    address: *mut *mut c_void,
    length_bytes: *mut u64,
) -> kv_status {
    guard(|| {
        let memory = kv_memory::open(memory)?;
        // SAFETY: the contract of the header.
        let (address, length) = unsafe {
            let address = arg::out(address, "address")?;
            (address, arg::optional_out(length_bytes, "length_bytes")?)
        };
        address.set(memory.base_ptr().cast());
        if let Some(length) = length {
            length.set(memory.len_bytes());
        }
        Ok(())
    })
}

/// Ends the handle; NULL is allowed. The memory stays mapped as long as it is registered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_memory_release(memory: *mut kv_memory) -> kv_status {
    guard(|| kv_memory::release(memory))
}

/// Registers memory as `pool_count` pools. Peers that connect later learn of it, so register before
/// connecting.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_register(
    agent: *const kv_agent,
    memory: *const kv_memory,
    pools: *const kv_pool_geometry,
    pool_count: usize,
    region: *mut *mut kv_region,
) -> kv_status {
    guard(|| {
        let (agent, memory) = (kv_agent::open(agent)?, kv_memory::open(memory)?);
        // SAFETY: the contract of the header.
        let (pools, out) = unsafe {
            let pools = arg::slice(pools, pool_count, "pools")?;
            (pools, arg::out(region, "region")?)
        };
        let pools: Vec<PoolGeometry> = pools
            .iter()
            .map(kv_pool_geometry::parse)
            .collect::<Outcome<_>>()?;
        let region = agent.agent.register(Arc::clone(&memory), &pools)?;
        out.set(kv_region::create(RegionObject::new(region)));
        Ok(())
    })
}

/// The number of a pool, for local descriptor lists. `index` is its place in the registration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_region_pool(
    region: *const kv_region,
    index: u32,
    pool: *mut u32,
) -> kv_status {
    guard(|| {
        let region = kv_region::open(region)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::out(pool, "pool")? };
        let Some(pool) = region.pools.get(index as usize) else {
            let message = format!(
                "the region has {} pools, no pool {index}",
                region.pools.len()
            );
            return Err(Failure::argument(message));
        };
        out.set(*pool);
        Ok(())
    })
}

/// Ends a registration. Blocks until no operation uses the memory and every peer that writes by itself
/// has let go of it or is proven dead.
///
/// `KV_STATUS_BUSY` when that is not so within `timeout_ms`: the region takes no new operation, its memory
/// stays mapped, and closing it can be tried again. `KV_STATUS_BUSY` also, at once, while another thread waits
/// in this call. `KV_STATUS_CLOSED` when it is closed already, and in no other case.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_region_close(region: *const kv_region, timeout_ms: u64) -> kv_status {
    guard(|| {
        let region = kv_region::open(region)?;
        region.close_by(|open| open.close(Deadline::after_ms(timeout_ms)))
    })
}

/// Ends the handle; NULL is allowed. If the region is not closed, this begins to close it and does not
/// wait: the memory stays mapped until it is quiet, or for good.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_region_release(region: *mut kv_region) -> kv_status {
    guard(|| kv_region::release(region))
}

#[cfg(test)]
mod tests {
    use kvgate_transfer::{Agent, ErrorKind};

    use super::*;

    fn close(region: &RegionObject) -> Option<kv_status> {
        let within = Deadline::after_ms(5_000);
        let closed = region.close_by(|open| open.close(within));
        closed.err().map(|failure| failure.status())
    }

    /// What a second thread finds while the first one waits in its close, which then runs out of time.
    #[test]
    fn a_region_is_closed_when_its_close_has_succeeded() {
        let agent = Agent::builder("owner").build().unwrap();
        let memory = Arc::new(Memory::host(64).unwrap());
        let pool = PoolGeometry {
            offset_bytes: 0,
            stride_bytes: 64,
            slot_bytes: 64,
            slot_count: 1,
        };
        let region = RegionObject::new(agent.register(memory, &[pool]).unwrap());
        let refused = region.close_by(|open| {
            let second = std::thread::scope(|scope| scope.spawn(|| close(&region)).join());
            assert_eq!(second.unwrap(), Some(kv_status::Busy));
            Err((open, ErrorKind::Closed.into()))
        });
        assert!(refused.is_err());
        assert_eq!(close(&region), None, "once more, with success");
        assert_eq!(close(&region), Some(kv_status::Closed));
    }
}
