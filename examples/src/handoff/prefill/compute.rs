//! The compute thread of the prefill side: one prompt after the other, chunk by chunk.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use kvgate_kvcache::{Room, WriteLease};
use kvgate_model::Logits;

use super::Side;
use super::caches::PrefillCaches;
use super::flight::Flight;
use super::turn;
use crate::handoff::failure::Failure;
use crate::handoff::link::transfer_failure;
use crate::handoff::model::{cache_failure, model_failure};
use crate::handoff::observer::Phase;
use crate::handoff::plan;
use crate::handoff::sampling::arg_max;

/// What the main thread hears of the compute thread.
pub(super) enum Computed {
    /// So many prompt tokens more.
    Tokens(u64),
    /// The flight reached the moment at which this side gives it up.
    Abort(Arc<Flight>),
    /// The thread cannot go on.
    Failed(Failure),
}

/// Starts the thread; it ends with its work channel.
pub(super) fn start(
    side: Arc<Side>,
    work: Receiver<Arc<Flight>>,
    tell: Sender<Computed>,
) -> Result<(), Failure> {
    let body = move || {
        for flight in work {
            let told = match compute(&side, &flight, &tell) {
                Ok(Some(said)) => tell.send(said),
                Ok(None) => Ok(()),
                Err(failure) => tell.send(Computed::Failed(failure)),
            };
            if told.is_err() {
                return;
            }
        }
    };
    thread::Builder::new()
        .name("compute".to_owned())
        .spawn(body)
        .map(drop)
        .map_err(|error| Failure::internal(format!("cannot start a thread: {error}")))
}

/// Computes one prompt. `None` when the flight was given up by somebody else.
fn compute(
    side: &Arc<Side>,
    flight: &Arc<Flight>,
    tell: &Sender<Computed>,
) -> Result<Option<Computed>, Failure> {
    if !flight.begin() {
        return Ok(None);
    }
    if let Some(tiers) = &side.tiers {
        return turn::compute(side, tiers, flight, tell);
    }
    let Some(lease) = reserve(side, flight)? else {
        flight.keep_nothing();
        return Ok(None);
    };
    side.markers.enter(Phase::Prefill);
    let mut caches = PrefillCaches::new(side, flight, lease)?;
    let chunk = side.plan.chunk as usize;
    let total = flight.prompt_ids.len();
    let mut last = Vec::new();
    let mut start = 0;
    while start < total {
        let end = (start + chunk).min(total);
        let want = if end == total {
            Logits::Last
        } else {
            Logits::None
        };
        let ids = flight.prompt_ids.get(start..end).unwrap_or_default();
        let busy = side.activity.busy();
        let forward = side
            .host
            .model
            .forward(ids, start as u32, &mut caches, want, None);
        drop(busy);
        match forward {
            Ok(logits) => last = logits,
            Err(error) => {
                let ended = caches.take_ended();
                caches.keep();
                return ended.unwrap_or_else(|| Err(model_failure(&error)));
            }
        }
        // The main thread may have ended already.
        drop(tell.send(Computed::Tokens((end - start) as u64)));
        start = end;
    }
    conclude(side, flight, caches, &last)?;
    Ok(None)
}

/// The prompt is computed: its first token goes to the decode side, its pages stay until they have arrived.
pub(super) fn conclude(
    side: &Side,
    flight: &Flight,
    caches: PrefillCaches,
    last: &[f32],
) -> Result<(), Failure> {
    let total = flight.prompt_ids.len() as u32;
    if side.plan.fed_ids.is_some() {
        let bits = last.iter().map(|logit| logit.to_bits()).collect();
        side.note(|summary| summary.last_logits = Some(bits));
    }
    let is_wanted = !flight.is_aborted();
    caches.keep();
    if is_wanted {
        let aux = side.speaker.aux(flight.offer.id, total, arg_max(last));
        side.agent
            .send(side.watch.peer(), plan::wrap(&aux))
            .map_err(|error| transfer_failure(&error))?;
    }
    Ok(())
}

/// Waits for pages: other requests of this side give them back. `None` when the flight was given up.
fn reserve(side: &Side, flight: &Flight) -> Result<Option<WriteLease>, Failure> {
    let since = Instant::now();
    let tokens = flight.prompt_ids.len() as u32;
    while !flight.is_aborted() {
        match side
            .pools
            .reserve(tokens, Room(u64::from(flight.request())))
        {
            Ok(lease) => return Ok(Some(lease)),
            Err(error) if error.is_retryable() => side
                .watch
                .check(since, "a wait for pages of the prefill side")?,
            Err(error) => return Err(cache_failure(&error)),
        }
        // Pages come back when the decode side says Done; there is nothing to be woken by.
        thread::sleep(Duration::from_millis(1));
    }
    Ok(None)
}
