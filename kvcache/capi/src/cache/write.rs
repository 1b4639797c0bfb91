//! The producing side: reserved slots, layers that are written, committed and sent.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use kvgate_kvcache::canary::VerifyMode;
use kvgate_kvcache::{DrainingFlight, LayerId, LayerMut, PostTarget, WriteLease, WrittenLayer};
use kvgate_transfer::sync::Arc as TransferArc;
use kvgate_transfer::{Deadline, FlightLedger, Op, PeerId, PostOptions};

use crate::agent::kv_agent;
use crate::arg;
use crate::cache::layer::{LayerObject, kv_layer};
use crate::cache::offer::kv_offer;
use crate::cache::plan::kv_plan;
use crate::cache::pools::PoolsObject;
use crate::cache::schema::layer_of;
use crate::handle::{Handle, handle};
use crate::status::{Failure, Outcome, guard, kv_status};
use crate::transfer::{TransferObject, kv_transfer};
use crate::wake::wait_for;

/// Reserved slots of all components and the only right to write them. It is written here, or becomes a flight
/// that others write (`kv_write_lease_expect`).
pub struct kv_write_lease {
    _opaque: (),
}

pub(crate) struct WriteObject {
    phase: Mutex<Phase>,
    pub(crate) pools: Arc<PoolsObject>,
}

handle!(kv_write_lease => WriteObject, "write lease");

enum Phase {
    Open {
        lease: WriteLease,
        /// Layers that are given out, and how often.
        held: BTreeMap<LayerId, u32>,
    },
    Ending(DrainingFlight),
    Free,
    /// It became a flight.
    Gone,
}

/// Witness that the rows of one layer are written: what a layer is sent with. It keeps the slots.
pub struct kv_written {
    _opaque: (),
}

pub(crate) struct WrittenObject {
    written: WrittenLayer,
    ledger: TransferArc<FlightLedger>,
    pools: Arc<PoolsObject>,
}

handle!(kv_written => WrittenObject, "written layer");

/// Gives a layer out for writing and for reading what was written. Release it with `kv_layer_release` before
/// it is committed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_write_lease_layer(
    lease: *const kv_write_lease,
    layer: u32,
    answer: *mut *mut kv_layer,
) -> kv_status {
    guard(|| {
        let lease = kv_write_lease::open(lease)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::out(answer, "answer")? };
        let layer = layer_of(layer)?;
        lease.hold(layer)?;
        out.set(LayerObject::of_writer(lease, layer));
        Ok(())
    })
}

/// States that the rows of a layer for tokens `first_token` up to, not including, `end_token` are written, by
/// this thread or by threads that it has synchronised with. The witness covers everything committed so far.
///
/// `KV_STATUS_BUSY` while the layer is given out: who commits has let go of its addresses.
/// `KV_STATUS_INVALID_STATE` when tokens between the last commit and this one are missing, or there are more than
/// were reserved.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_write_lease_commit(
    lease: *const kv_write_lease,
    layer: u32,
    first_token: u32,
    end_token: u32,
    written: *mut *mut kv_written,
) -> kv_status {
    guard(|| {
        let object = kv_write_lease::open(lease)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::out(written, "written")? };
        let layer = layer_of(layer)?;
        let (written, ledger) = object.with_open(|lease, held| {
            if held.contains_key(&layer) {
                let message = format!("layer {layer} is given out; release it first");
                return Err(Failure::new(kv_status::Busy, message));
            }
            let written = lease.commit_layer(layer, first_token..end_token)?;
            Ok((written, lease.ledger().clone()))
        })?;
        let pools = Arc::clone(&object.pools);
        out.set(kv_written::create(WrittenObject {
            written,
            ledger,
            pools,
        }));
        Ok(())
    })
}

/// Ends a write lease: its slots are free once every operation that reads them has ended and every
/// `kv_written` of it is released. Waits for that at most `timeout_ms`; 0 only looks.
///
/// `KV_STATUS_TIMED_OUT`: the lease has ended and its slots are still read; ask again. The event descriptor of the
/// agent that the pools are registered with tells when; for pools without an agent nothing does.
/// `KV_STATUS_BUSY` while a layer is given out, `KV_STATUS_INVALID_STATE` when it became a flight: then nothing has
/// changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_write_lease_close(
    lease: *const kv_write_lease,
    timeout_ms: u64,
) -> kv_status {
    guard(|| {
        let object = kv_write_lease::open(lease)?;
        object.begin_to_close()?;
        let waker = object.pools.waker();
        match wait_for(timeout_ms, &waker, |cx| object.poll_free(cx)) {
            Some(()) => Ok(()),
            None => Err(Failure::timed_out("the quiet of the slots", timeout_ms)),
        }
    })
}

/// Ends the handle; NULL is allowed. If the lease is not closed, this closes it and does not wait: the pools
/// free its slots when nobody uses them any more. Layers that it gave out keep it until they are released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_write_lease_release(lease: *mut kv_write_lease) -> kv_status {
    guard(|| kv_write_lease::release(lease))
}

/// Sends what one segment adds to a written layer to the peer that made the offer. `plan` is the one that
/// `kv_offer_plan` has made from it. Waits at most `timeout_ms` for room in the queue.
///
/// `transfer` gets the operation, or NULL when the segment adds nothing to this layer. The operation keeps what
/// it reads; its handle may be released at once, and `kv_write_lease_close` waits for its end.
///
/// `KV_STATUS_INVALID_STATE` when the witness proves too little, or, for the last segment, too much;
/// `KV_STATUS_REFUSED` when the offer is for a cache of another fingerprint, `KV_STATUS_STALE` when it is of another
/// life of the peer, `KV_STATUS_FULL`, `KV_STATUS_PEER_DOWN`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_written_post(
    written: *const kv_written,
    plan: *const kv_plan,
    segment: u32,
    agent: *const kv_agent,
    peer: u32,
    offer: *const kv_offer,
    timeout_ms: u64,
    transfer: *mut *mut kv_transfer,
) -> kv_status {
    guard(|| {
        let (written, plan) = (kv_written::open(written)?, kv_plan::open(plan)?);
        let (agent, offer) = (kv_agent::open(agent)?, kv_offer::open(offer)?);
        // SAFETY: the contract of the header.
        let out = unsafe { arg::out(transfer, "transfer")? };
        let schema = written.pools.set.schema();
        plan.check_schema(schema)?;
        offer.check(schema, &plan.plan)?;
        let target = PostTarget {
            incarnation: offer.incarnation,
            pools: &offer.pools,
            table: &offer.table,
            epoch: offer.epoch,
            room: offer.room,
            verify: match offer.is_verified {
                true => VerifyMode::Canary,
                false => VerifyMode::Off,
            },
        };
        let post = plan
            .plan
            .post(&written.pools.set, segment, &written.written, &target)?;
        if post.is_empty() {
            out.set(std::ptr::null_mut());
            return Ok(());
        }
        let (here, there) = post.descriptors();
        let prepared = agent
            .agent
            .prepare(Op::Write, &here, &there, PeerId(peer))?;
        #[allow(
            clippy::needless_update,
            reason = "the feature fault-injection adds a field"
        )]
        let options = PostOptions {
            arrival: Some(post.arrival),
            keepalive: Some(Box::new(post.keepalive)),
            ledger: Some(written.ledger.clone()),
            ..PostOptions::default()
        };
        let within = Deadline::after_ms(timeout_ms);
        let posted = agent
            .agent
            .post_within(&prepared, post.source, options, within);
        let posted = posted.map_err(|refused| Failure::from(refused.error))?;
        out.set(TransferObject::create(posted, agent.waker()));
        Ok(())
    })
}

/// Ends the handle; NULL is allowed. What was posted goes on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_written_release(written: *mut kv_written) -> kv_status {
    guard(|| kv_written::release(written))
}

impl WriteObject {
    pub(crate) fn new(lease: WriteLease, pools: Arc<PoolsObject>) -> Self {
        let held = BTreeMap::new();
        Self {
            phase: Mutex::new(Phase::Open { lease, held }),
            pools,
        }
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with_open<T>(
        &self,
        act: impl FnOnce(&mut WriteLease, &mut BTreeMap<LayerId, u32>) -> Outcome<T>,
    ) -> Outcome<T> {
        match &mut *self.phase() {
            Phase::Open { lease, held } => act(lease, held),
            other => Err(other.is_over()),
        }
    }

    /// Looks at a layer that is given out.
    pub(crate) fn with_layer<T>(
        &self,
        layer: LayerId,
        look: impl FnOnce(&LayerMut<'_>) -> Outcome<T>,
    ) -> Outcome<T> {
        self.with_open(|lease, _| look(&lease.layer_mut(layer)?))
    }

    fn hold(&self, layer: LayerId) -> Outcome<()> {
        self.with_open(|lease, held| {
            let _exists = lease.layer_mut(layer)?;
            *held.entry(layer).or_default() += 1;
            Ok(())
        })
    }

    /// A layer that was given out has come back.
    pub(crate) fn give_back(&self, layer: LayerId) {
        if let Phase::Open { held, .. } = &mut *self.phase()
            && let Some(count) = held.get_mut(&layer)
        {
            *count -= 1;
            if *count == 0 {
                held.remove(&layer);
            }
        }
    }

    /// Takes the lease out for a flight; `act` gives it back when that does not come about.
    pub(crate) fn become_flight<T>(
        &self,
        act: impl FnOnce(WriteLease) -> Result<T, (WriteLease, Failure)>,
    ) -> Outcome<T> {
        let mut phase = self.phase();
        let lease = phase.take_unheld()?;
        act(lease).map_err(|(lease, failure)| {
            let held = BTreeMap::new();
            *phase = Phase::Open { lease, held };
            failure
        })
    }

    fn begin_to_close(&self) -> Outcome<()> {
        let mut phase = self.phase();
        if matches!(*phase, Phase::Ending(_) | Phase::Free) {
            return Ok(());
        }
        let lease = phase.take_unheld()?;
        *phase = Phase::Ending(lease.close());
        Ok(())
    }

    fn poll_free(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut phase = self.phase();
        let answer = match &mut *phase {
            Phase::Ending(draining) => draining.poll_free(cx),
            _ => Poll::Ready(()),
        };
        if answer.is_ready() {
            *phase = Phase::Free;
        }
        answer
    }
}

impl Phase {
    fn is_over(&self) -> Failure {
        Failure::state(match self {
            Phase::Gone => "the write lease became a flight",
            _ => "the write lease is closed",
        })
    }

    /// The lease, leaving `Gone`; an error, and nothing changed, while a layer is given out.
    fn take_unheld(&mut self) -> Outcome<WriteLease> {
        match std::mem::replace(self, Phase::Gone) {
            Phase::Open { lease, held } => match held.first_key_value() {
                None => Ok(lease),
                Some((layer, _)) => {
                    let message = format!("layer {layer} is given out; release it first");
                    *self = Phase::Open { lease, held };
                    Err(Failure::new(kv_status::Busy, message))
                }
            },
            other => {
                *self = other;
                Err(self.is_over())
            }
        }
    }
}
