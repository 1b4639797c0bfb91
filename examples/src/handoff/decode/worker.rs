//! One request on the decode side: waits for its first token, then decodes behind the gates.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use kvgate_kvcache::{AppendLease, LayerId, PageLease};
use kvgate_model::Logits;

use super::caches::DecodeCaches;
use super::detector::Detector;
use super::{Inbox, Side};
use crate::handoff::cancel::CancelMoment;
use crate::handoff::compare::Outcome;
use crate::handoff::failure::Failure;
use crate::handoff::fault::decode::Reader;
use crate::handoff::link::PeerWatch;
use crate::handoff::observer::Phase;
use crate::handoff::sampling::arg_max;

/// What a worker needs.
pub(super) struct Task {
    pub(super) request: u32,
    /// The flight, by the number of its epoch.
    pub(super) flight: u64,
    pub(super) prompt_tokens: u32,
    pub(super) steps: u32,
    /// Fed instead of what the model says.
    pub(super) fed_ids: Option<Vec<u32>>,
    /// The right to read; the request's slots stay while it lives.
    pub(super) lease: PageLease,
    /// The right to append.
    pub(super) append: AppendLease,
    pub(super) detector: Option<Detector>,
    /// The first token, when its message has come.
    pub(super) first_token: Receiver<u32>,
    /// Set when the request is aborted.
    pub(super) stop: Arc<AtomicBool>,
    /// When this side aborts the request.
    pub(super) moment: Option<CancelMoment>,
    pub(super) watch: PeerWatch,
    /// Plants the reading side's part of a fault; does nothing without one.
    pub(super) reader: Reader,
}

impl Task {
    /// Whether the request was aborted.
    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// What a worker says to the main thread.
pub(super) struct Said {
    /// The flight, by the number of its epoch.
    pub(super) flight: u64,
    pub(super) what: What,
}

pub(super) enum What {
    /// Every layer has landed.
    Landed,
    /// The first step has read a layer.
    Read(LayerId),
    /// The end. `None`: it was stopped, or stopped itself at the moment drawn for it.
    Ended(Result<Option<Outcome>, Failure>),
}

/// Starts a worker; its end comes to the inbox.
pub(super) fn start(side: Arc<Side>, task: Task, inbox: Sender<Inbox>) -> Result<(), Failure> {
    let flight = task.flight;
    let builder = thread::Builder::new().name(format!("decode-{}", task.request));
    let body = move || {
        // The main thread may have ended already.
        let say = |what| drop(inbox.send(Inbox::Worker(Said { flight, what })));
        let result = perform(&side, task, &say);
        say(What::Ended(result));
    };
    builder
        .spawn(body)
        .map(drop)
        .map_err(|error| Failure::internal(format!("cannot start a thread: {error}")))
}

/// The lease of the request ends with this function, before the main thread hears of the end.
fn perform(side: &Side, task: Task, say: &dyn Fn(What)) -> Result<Option<Outcome>, Failure> {
    let Some(first_token) = wait_for_first_token(&task)? else {
        return Ok(None);
    };
    let (steps, prompt_tokens, moment, stop) = (
        task.steps,
        task.prompt_tokens,
        task.moment,
        Arc::clone(&task.stop),
    );
    let fed_ids = task.fed_ids.clone();
    let mut caches = DecodeCaches::new(side, task, say);
    if moment == Some(CancelMoment::AfterLanding) {
        caches.wait_for_all()?;
        return Ok(None);
    }
    caches.admit()?;
    side.markers.enter(Phase::Decode);
    let mut outcome = Outcome::default();
    let mut token = first_token;
    for step in 0..steps {
        if stop.load(Ordering::Acquire) || moment == Some(CancelMoment::MidDecode { steps: step }) {
            return Ok(None);
        }
        let fed = fed_ids.as_ref().and_then(|fed| fed.get(step as usize));
        token = fed.copied().unwrap_or(token);
        outcome.output_ids.push(token);
        let forward = side.host.model.forward(
            &[token],
            prompt_tokens + step,
            &mut caches,
            Logits::Last,
            None,
        );
        let logits = match forward {
            Ok(logits) => logits,
            Err(error) => return caches.why_it_ended(&error).map(|()| None),
        };
        caches.end_step();
        token = arg_max(&logits);
        outcome.logits.extend_from_slice(&logits);
        side.count_decoded();
    }
    caches.finish(&mut outcome, prompt_tokens + steps)?;
    Ok(Some(outcome))
}

fn wait_for_first_token(task: &Task) -> Result<Option<u32>, Failure> {
    let since = Instant::now();
    loop {
        match task.first_token.recv_timeout(Duration::from_millis(20)) {
            Ok(token) => return Ok(Some(token)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) if task.is_stopped() => return Ok(None),
            Err(RecvTimeoutError::Timeout) => {
                task.watch.check(since, "the prefill of a request")?
            }
        }
    }
}
