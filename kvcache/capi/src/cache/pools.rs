//! Pools: the memory of a cache and the slots that address it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use kvgate_kvcache::{MemoryKind, PoolConfig, PoolSet, Room, SpaceStats};
use kvgate_transfer::Deadline;

use crate::agent::kv_agent;
use crate::arg::{self, Versioned};
use crate::cache::schema::kv_schema;
use crate::cache::write::{WriteObject, kv_write_lease};
use crate::handle::{Handle, handle};
use crate::memory::{kv_memory_kind, memory_kind};
use crate::status::{guard, kv_status};

/// All pools of one cache: one memory, one pool per component of each layer.
pub struct kv_pools {
    _opaque: (),
}

pub(crate) struct PoolsObject {
    pub(crate) set: PoolSet,
    /// Of the agent that the pools are or were last registered with. Before the locks of the pools.
    waker: Mutex<Waker>,
}

impl PoolsObject {
    pub(crate) fn waker(&self) -> Waker {
        self.locked_waker().clone()
    }

    fn locked_waker(&self) -> MutexGuard<'_, Waker> {
        self.waker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

handle!(kv_pools => PoolsObject, "pool set");

/// How much pools hold. Counts are usable slots; each pool has a null page besides.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_pool_options {
    /// `sizeof(struct kv_pool_options)`.
    pub struct_bytes: u32,
    /// Where the memory lives, an `enum kv_memory_kind`.
    pub memory: u32,
    /// Logical pages of 256 tokens.
    pub pages: u32,
    /// Window slots, see `kv_schema_slots`.
    pub windows: u32,
    /// Requests.
    pub requests: u32,
    /// Zero.
    pub reserved: u32,
}

// SAFETY: `repr(C)`, numbers, `struct_bytes` first.
unsafe impl Versioned for kv_pool_options {
    const NAME: &'static str = "kv_pool_options";
}

/// The slots of one space at one moment: free + owned + draining + retired = capacity.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct kv_space_stats {
    /// Free.
    pub free: u32,
    /// Held by a lease or a flight.
    pub owned: u32,
    /// Ended, and not yet proven quiet.
    pub draining: u32,
    /// Of the draining ones, those whose proof may never come.
    pub quarantined: u32,
    /// Out of generations.
    pub retired: u32,
    /// All usable slots.
    pub capacity: u32,
    /// Reservations of a slot that had an owner before.
    pub reuses: u64,
}

/// The slots of pools by state.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_pool_stats {
    /// `sizeof(struct kv_pool_stats)`; set it before the call.
    pub struct_bytes: u32,
    /// Zero.
    pub reserved: u32,
    /// Bytes of the memory of all pools.
    pub memory_bytes: u64,
    /// Logical pages.
    pub pages: kv_space_stats,
    /// Window slots.
    pub windows: kv_space_stats,
    /// Request slots.
    pub requests: kv_space_stats,
}

// SAFETY: `repr(C)`, numbers, `struct_bytes` first.
unsafe impl Versioned for kv_pool_stats {
    const NAME: &'static str = "kv_pool_stats";
}

/// Allocates zeroed pools for every component of the schema.
///
/// `KV_STATUS_OUT_OF_MEMORY` when the host or its control group has less to give; nothing was touched then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_pools_create(
    schema: *const kv_schema,
    options: *const kv_pool_options,
    pools: *mut *mut kv_pools,
) -> kv_status {
    guard(|| {
        let schema = kv_schema::open(schema)?;
        // SAFETY: the contract of the header.
        let (options, out) = unsafe {
            let options: kv_pool_options = arg::versioned(options)?;
            (options, arg::out(pools, "pools")?)
        };
        arg::zero(options.reserved, "kv_pool_options.reserved")?;
        let config = PoolConfig {
            pages: options.pages,
            windows: options.windows,
            requests: options.requests,
            memory: match memory_kind(options.memory)? {
                kv_memory_kind::Host => MemoryKind::Host,
                kv_memory_kind::Shared => MemoryKind::Shared,
            },
        };
        let set = PoolSet::new((*schema).clone(), config)?;
        let waker = Mutex::new(Waker::noop().clone());
        out.set(kv_pools::create(PoolsObject { set, waker }));
        Ok(())
    })
}

/// Registers the pools with an agent, once. Peers that connect later learn of them, so register before
/// connecting.
///
/// `KV_STATUS_INVALID_STATE` when they are registered already, also while `kv_pools_unregister` waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_pools_register(
    pools: *const kv_pools,
    agent: *const kv_agent,
) -> kv_status {
    guard(|| {
        let (pools, agent) = (kv_pools::open(pools)?, kv_agent::open(agent)?);
        // Held: whoever finds the pools registered also finds the waker.
        let mut waker = pools.locked_waker();
        pools.set.register(&agent.agent)?;
        *waker = agent.waker();
        Ok(())
    })
}

/// Ends the registration once no operation and no peer uses the memory. Blocks at most `timeout_ms`.
///
/// Answers `KV_STATUS_OK` when there is no registration.
///
/// `KV_STATUS_BUSY` when that is not so in time: the pools stay registered, take no new operation and can be asked
/// again. `KV_STATUS_BUSY` also, at once, while another thread waits in this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_pools_unregister(pools: *const kv_pools, timeout_ms: u64) -> kv_status {
    guard(|| {
        let pools = kv_pools::open(pools)?;
        Ok(pools.set.unregister(Deadline::after_ms(timeout_ms))?)
    })
}

/// The slots by state, after freeing what has been proven quiet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_pools_stats(
    pools: *const kv_pools,
    stats: *mut kv_pool_stats,
) -> kv_status {
    guard(|| {
        let pools = kv_pools::open(pools)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::versioned_out(stats)? };
        let found = pools.set.stats();
        out.set(kv_pool_stats {
            struct_bytes: size_of::<kv_pool_stats>() as u32,
            reserved: 0,
            memory_bytes: pools.set.memory_bytes(),
            pages: space(found.pages),
            windows: space(found.windows),
            requests: space(found.requests),
        });
        Ok(())
    })
}

fn space(stats: SpaceStats) -> kv_space_stats {
    kv_space_stats {
        free: stats.free,
        owned: stats.owned,
        draining: stats.draining,
        quarantined: stats.quarantined,
        retired: stats.retired,
        capacity: stats.capacity,
        reuses: stats.reuses,
    }
}

/// Reserves the slots of all components for a request of `total_tokens` tokens, prompt and output, or none.
/// `room` is the caller's number of the request, the same on both sides of a hand-off.
///
/// `KV_STATUS_FULL` when slots are short now, `KV_STATUS_INVALID_ARGUMENT` when they can never suffice.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_pools_reserve(
    pools: *const kv_pools,
    total_tokens: u32,
    room: u64,
    lease: *mut *mut kv_write_lease,
) -> kv_status {
    guard(|| {
        let pools = kv_pools::open(pools)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::out(lease, "lease")? };
        let reserved = pools.set.reserve(total_tokens, Room(room))?;
        out.set(kv_write_lease::create(WriteObject::new(reserved, pools)));
        Ok(())
    })
}

/// Ends the handle; NULL is allowed. The memory stays as long as a lease, a flight or a peer needs it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_pools_release(pools: *mut kv_pools) -> kv_status {
    guard(|| kv_pools::release(pools))
}
