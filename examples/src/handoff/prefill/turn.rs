//! One turn of a conversation: its prompt is computed behind the longest prefix that a tier has, and what is
//! worth going on from is kept.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use kvgate_hicache::cache::Origin;
use kvgate_kvcache::Room;
use kvgate_model::Logits;

use super::Side;
use super::caches::{Ended, PrefillCaches};
use super::compute::{self, Computed};
use super::flight::Flight;
use super::tiers::Tiers;
use crate::handoff::failure::Failure;
use crate::handoff::model::{cache_failure, model_failure};
use crate::handoff::observer::Phase;
use crate::handoff::turns::schedule::next_boundary;

/// How a prompt was computed.
enum Pass {
    /// To its end; the logits of the last token.
    Done(Vec<f32>),
    /// A load failed or came too late: the prefix is a miss.
    Missed,
    /// The flight ended before.
    Ended(Ended),
}

/// Computes the prompt of one turn. `None` when the flight was given up by somebody else.
pub(super) fn compute(
    side: &Arc<Side>,
    tiers: &Tiers,
    flight: &Arc<Flight>,
    tell: &Sender<Computed>,
) -> Result<Option<Computed>, Failure> {
    let looked_up = Instant::now();
    let Some(begun) = tiers.begin(side, flight)? else {
        flight.keep_nothing();
        return Ok(None);
    };
    side.markers.enter(Phase::Prefill);
    let mut hit = begun.hit;
    let start = hit.as_ref().map_or(0, |hit| hit.tokens);
    let mut caches = PrefillCaches::new(side, flight, begun.lease)?;
    let mut begun_at = Instant::now();
    let mut pass = run(side, tiers, flight, tell, &mut caches, start)?;
    if matches!(pass, Pass::Missed) {
        hit = None;
        caches.give_up_prefix();
        let Some(lease) = tiers.begin_cold(side, flight)? else {
            flight.keep_nothing();
            return Ok(None);
        };
        caches.begin_again(lease);
        begun_at = Instant::now();
        pass = run(side, tiers, flight, tell, &mut caches, 0)?;
    }
    let last = match pass {
        Pass::Done(logits) => logits,
        Pass::Missed => return Err(Failure::internal("a prompt without a prefix was a miss")),
        Pass::Ended(ended) => {
            caches.keep();
            return ended;
        }
    };
    // Nothing was waited for: the time is that of the model.
    if hit.as_ref().is_none_or(|hit| hit.origin == Origin::Device) {
        let tokens = flight.prompt_ids.len() as u32 - hit.as_ref().map_or(0, |hit| hit.tokens);
        tiers.cache.note_prefill(tokens, begun_at.elapsed());
    }
    let load = caches
        .attached_at()
        .map(|at| at.saturating_duration_since(looked_up));
    tiers.count(side, flight, hit.as_ref(), load);
    compute::conclude(side, flight, caches, &last)?;
    Ok(None)
}

/// Computes `start..` of the prompt, and publishes the boundaries on the way that are worth going on from.
fn run(
    side: &Arc<Side>,
    tiers: &Tiers,
    flight: &Arc<Flight>,
    tell: &Sender<Computed>,
    caches: &mut PrefillCaches,
    start: u32,
) -> Result<Pass, Failure> {
    let total = flight.prompt_ids.len() as u32;
    // What was found need not be computed; the main thread may have ended already.
    drop(tell.send(Computed::Tokens(u64::from(start))));
    let mut from = start;
    let mut logits = Vec::new();
    while from < total {
        let boundary = next_boundary(from, total);
        let to = boundary
            .unwrap_or(total)
            .min(from.saturating_add(side.plan.chunk))
            .min(total);
        let is_boundary = boundary == Some(to);
        if is_boundary {
            let windows = side.host.schema.boundary_windows(to).len() as u32;
            let room = Room(u64::from(flight.request()));
            let device = tiers.cache.device();
            // Without room for its end the prefix is not published: a miss later, nothing else.
            let _has_room = device.make_room(0, windows);
            caches.set_checkpoint(device.pools().reserve_checkpoint(to, room).ok());
        }
        let want = if to == total {
            Logits::Last
        } else {
            Logits::None
        };
        let ids = flight
            .prompt_ids
            .get(from as usize..to as usize)
            .unwrap_or_default();
        let busy = side.activity.busy();
        let forward = side.host.model.forward(ids, from, caches, want, None);
        drop(busy);
        match forward {
            Ok(last) => logits = last,
            Err(error) => {
                if caches.is_missed() {
                    return Ok(Pass::Missed);
                }
                let ended = caches.take_ended();
                return Ok(Pass::Ended(
                    ended.unwrap_or_else(|| Err(model_failure(&error))),
                ));
            }
        }
        if is_boundary {
            publish(tiers, caches, &flight.prompt_ids[..to as usize])?;
        }
        drop(tell.send(Computed::Tokens(u64::from(to - from))));
        from = to;
    }
    Ok(Pass::Done(logits))
}

/// Enters a prefix into the device pool and begins its backup.
fn publish(tiers: &Tiers, caches: &mut PrefillCaches, prefix: &[u32]) -> Result<(), Failure> {
    let is_published = caches
        .publish(tiers.cache.device().tree(), prefix)
        .map_err(|error| cache_failure(&error))?;
    if is_published {
        // Dropping a backup is always allowed; what it found is counted.
        let begun = tiers.cache.backup(prefix);
        begun.map(drop).map_err(|error| cache_failure(&error))?;
    }
    Ok(())
}
