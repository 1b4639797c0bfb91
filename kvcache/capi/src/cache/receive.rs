//! The receiving side: a write lease that others fill, and the leases that read it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvgate_kvcache::InFlight;
use kvgate_kvcache::canary::{ProvenanceTable, VerifyMode};
use kvgate_transfer::{Agent, ArrivalSink, Deadline, Epoch};

use crate::agent::kv_agent;
use crate::arg::{self, Versioned};
use crate::cache::layer::{ReadObject, kv_access, kv_read_lease};
use crate::cache::offer;
use crate::cache::plan::{PlanObject, kv_plan};
use crate::cache::pools::PoolsObject;
use crate::cache::schema::layer_of;
use crate::cache::write::kv_write_lease;
use crate::flight::{kv_flight, kv_writer};
use crate::handle::Handle;
use crate::receiving::{FlightObject, Open};
use crate::status::{Failure, Outcome, guard, kv_status};

/// How much of what arrives is verified.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_verify {
    /// Nothing.
    Off = 0,
    /// Whom each page is for, and the checksum of its live rows; the writers send both along.
    Canary = 1,
    /// The checksum only.
    Checksum = 2,
}

/// How a cache is received.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kv_expect_options {
    /// `sizeof(struct kv_expect_options)`.
    pub struct_bytes: u32,
    /// An `enum kv_verify`.
    pub verify: u32,
    /// The number of the flight, given out by this process and never used twice.
    pub epoch: u64,
    /// The writers of the plan, each once.
    pub writers: *const kv_writer,
    /// How many.
    pub writer_count: usize,
}

// SAFETY: `repr(C)`, numbers and a pointer, `struct_bytes` first.
unsafe impl Versioned for kv_expect_options {
    const NAME: &'static str = "kv_expect_options";
}

/// What a flight has for its cache.
pub(crate) struct CacheSide {
    pub(crate) pools: Arc<PoolsObject>,
    pub(crate) plan: Arc<PlanObject>,
    pub(crate) agent: Agent,
    canary: Option<(Arc<ProvenanceTable>, VerifyMode)>,
    is_armed: AtomicBool,
}

impl CacheSide {
    pub(crate) fn arm(&self, flight: &mut InFlight) -> Outcome<()> {
        let sink = self.canary.as_ref().map(|(table, _)| {
            let sink: Arc<dyn ArrivalSink> = table.clone();
            sink
        });
        flight.arm(&self.agent, sink)?;
        self.is_armed.store(true, Ordering::Release);
        Ok(())
    }

    pub(crate) fn is_armed(&self) -> bool {
        self.is_armed.load(Ordering::Acquire)
    }

    pub(crate) fn is_verified(&self) -> bool {
        self.canary.is_some()
    }
}

/// Turns reserved slots into a flight that `plan` describes, with one gate per layer. Arm it with
/// `kv_flight_arm`, tell the writers with `kv_flight_offer`, read it with `kv_flight_lease`; it ends as every
/// flight does, and its slots are free when it is quiet and its leases are released.
///
/// The write lease is used up; its handle is still to be released. If the call fails, it is as before.
///
/// `KV_STATUS_BUSY` while a layer of the lease is given out; `KV_STATUS_INVALID_ARGUMENT` when the plan needs more
/// slots than were reserved.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_write_lease_expect(
    lease: *const kv_write_lease,
    plan: *const kv_plan,
    agent: *const kv_agent,
    options: *const kv_expect_options,
    flight: *mut *mut kv_flight,
) -> kv_status {
    guard(|| {
        let (lease, plan) = (kv_write_lease::open(lease)?, kv_plan::open(plan)?);
        let agent = kv_agent::open(agent)?;
        // SAFETY: the contract of the header.
        let (options, out) = unsafe {
            let options: kv_expect_options = arg::versioned(options)?;
            (options, arg::out(flight, "flight")?)
        };
        // SAFETY: as above.
        let writers = unsafe {
            let (writers, count) = (options.writers, options.writer_count);
            arg::slice(writers, count, "kv_expect_options.writers")?
        };
        let writers: Vec<_> = writers
            .iter()
            .map(kv_writer::parse)
            .collect::<Outcome<_>>()?;
        let mode = verify_of(options.verify)?;
        plan.check_schema(lease.pools.set.schema())?;
        let flight = lease.become_flight(|lease| {
            lease
                .into_inflight(&plan.plan, Epoch(options.epoch), &writers)
                .map_err(|refused| (refused.0, Failure::from(refused.1)))
        })?;
        let canary = mode.map(|mode| (Arc::new(ProvenanceTable::new(flight.room())), mode));
        let barrier = flight.barrier().clone();
        let mut object = FlightObject::new(Open::Cache(flight), barrier, agent.waker());
        object.cache = Some(CacheSide {
            pools: Arc::clone(&lease.pools),
            plan: Arc::clone(&plan),
            agent: agent.agent.clone(),
            canary,
            is_armed: AtomicBool::new(false),
        });
        out.set(kv_flight::create(object));
        Ok(())
    })
}

fn verify_of(verify: u32) -> Outcome<Option<VerifyMode>> {
    match verify {
        0 => Ok(None),
        1 => Ok(Some(VerifyMode::Canary)),
        2 => Ok(Some(VerifyMode::Checksum)),
        other => Err(Failure::argument(format!(
            "kv_expect_options.verify: {other} is no kv_verify"
        ))),
    }
}

/// What a writer has to know: where the rows of this flight go, and what the cache here looks like. The bytes
/// are for `kv_offer_parse` on the other side; send them as a message. `length` gets their number, also when
/// `capacity` is smaller and the call fails.
///
/// `KV_STATUS_INVALID_STATE` before the flight is armed: until then nobody may write. Also when the pools are not
/// registered any more; `KV_STATUS_BUSY` when the end of their registration has begun, `KV_STATUS_INVALID_ARGUMENT`
/// when they are registered with another agent meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_flight_offer(
    flight: *const kv_flight,
    buffer: *mut u8,
    capacity: usize,
    length: *mut usize,
) -> kv_status {
    guard(|| {
        let flight = kv_flight::open(flight)?;
        let bytes = flight.with_cache(offer::encode)?;
        // SAFETY: the contract of the header.
        unsafe { arg::copy_out(&bytes, buffer, capacity, length) }
    })
}

/// A lease of a flight of a cache. `access` is an `enum kv_access`.
///
/// `KV_STATUS_BUSY` when another lease has the right to append; `KV_STATUS_INVALID_STATE` when the flight has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_flight_lease(
    flight: *const kv_flight,
    access: u32,
    lease: *mut *mut kv_read_lease,
) -> kv_status {
    guard(|| {
        let flight = kv_flight::open(flight)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::out(lease, "lease")? };
        let may_append = match access {
            1 => false,
            2 => true,
            other => return Err(Failure::argument(format!("{other} is no kv_access"))),
        };
        debug_assert!(kv_access::Read as u32 == 1 && kv_access::Append as u32 == 2);
        let lease = flight.with_cache(|_, cache| {
            let append = match may_append {
                true => Some(cache.append_lease()?),
                false => None,
            };
            Ok(ReadObject::new(
                cache.lease()?,
                append,
                flight.waker.clone(),
            ))
        })?;
        out.set(kv_read_lease::create(lease));
        Ok(())
    })
}

/// Compares a layer whose gate is open with what its writers have said about it (`kv_expect_options.verify`),
/// before the first row of it is read or written. `violation_count`, unless NULL, gets the pages that are not
/// what they should be.
///
/// `KV_STATUS_FAILED` when there is one; the message describes the first. `KV_STATUS_TIMED_OUT` while the gate is
/// closed. `KV_STATUS_INVALID_STATE` when the flight is not verified.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_flight_verify(
    flight: *const kv_flight,
    layer: u32,
    violation_count: *mut u32,
) -> kv_status {
    guard(|| {
        let flight = kv_flight::open(flight)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::optional_out(violation_count, "violation_count")? };
        let layer = layer_of(layer)?;
        let stage = flight.stage(u32::from(layer.0))?;
        let lease = flight.with_cache(|_, cache| Ok(cache.lease()?))?;
        let Some((cache, (canary, mode))) = flight
            .cache
            .as_ref()
            .and_then(|cache| Some((cache, cache.canary.as_ref()?)))
        else {
            return Err(Failure::state("kv_expect_options.verify was KV_VERIFY_OFF"));
        };
        // Asked so that the descriptor tells when the gate opens.
        flight.wait(stage, 0)?;
        let _ready = lease.layer(layer, Deadline::now())?;
        let (pools, tokens) = (&cache.pools.set, cache.plan.plan.prompt_tokens());
        let found = canary.verify_layer(pools, lease.block_table(), tokens, layer, *mode);
        if let Some(out) = out {
            out.set(u32::try_from(found.len()).unwrap_or(u32::MAX));
        }
        match found.first() {
            None => Ok(()),
            Some(violation) => Err(Failure::new(kv_status::Failed, violation.to_string())),
        }
    })
}
