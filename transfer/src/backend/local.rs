//! Two agents of one process: the worker of whoever posts copies, and calls the other engine itself.
//!
//! **What is protected by what.** `Pair::state` says which ends have started, whether the pair is closed, and
//! counts the copies under way. `close` waits until no copy is under way, so nothing writes afterwards: that
//! is the proof of quiescence. Copies run no foreign code and end by themselves; calls into an engine are
//! not waited for, since they may close the pair themselves.
//! **Lock order.** The mutex is a leaf; calls into an engine and copies run with it free.

use bytes::Bytes;

use crate::{
    Arrival, arc_dyn,
    backend::{
        Access, BackendKind, Caps, Link, LinkEvents, PoolPair, Posted, PostedOp, Quiesce,
        Readiness, RemoteRun,
    },
    barrier::waiters::Waiters,
    engine::{Engine, Op},
    error::{Cause, Error, ErrorKind},
    ids::PeerId,
    mem::copy::copy_pairs,
    stall::StallCause,
    sync::Arc,
    visibility::Visibility,
};

/// What an end needs to call the engine on the other side.
#[derive(Clone)]
struct Receiver {
    /// The number of the sender in that engine.
    peer: PeerId,
    events: Arc<dyn LinkEvents>,
}

#[derive(Default)]
struct State {
    /// Per side, the engine of that side.
    receivers: [Option<Receiver>; 2],
    is_closed: bool,
    /// Copies under way.
    copy_count: usize,
}

struct Pair {
    state: Waiters<State>,
}

struct LocalLink {
    pair: Arc<Pair>,
    /// 0 or 1: the side whose engine owns this link.
    side: usize,
}

/// Connects two engines of this process.
pub(crate) fn connect(a: &Arc<Engine>, b: &Arc<Engine>) -> Result<(PeerId, PeerId), Error> {
    let pair = Arc::new(Pair {
        state: Waiters::new(State::default()),
    });
    let (told_a, told_b) = (a.describe(), b.describe());
    let link = |side| arc_dyn!(LocalLink { pair: pair.clone(), side } => dyn Link);
    let b_as_seen_by_a = Engine::attach(a, link(0), told_b.metadata.clone(), &told_a)?;
    let a_as_seen_by_b = Engine::attach(b, link(1), told_a.metadata.clone(), &told_b)
        .inspect_err(|error| a.drop_peer(b_as_seen_by_a, Cause::lost(error)))?;
    Ok((b_as_seen_by_a, a_as_seen_by_b))
}

impl LocalLink {
    /// The engine on the other side; waits until that side has started. With `copies`, the pair is not
    /// closed before the guard is dropped.
    fn receiver(&self, copies: bool) -> Result<(Receiver, Option<Copying<'_>>), Error> {
        let receiver = self.pair.state.wait_owned(|state| {
            if state.is_closed {
                return Some(None);
            }
            let receiver = state.receivers[1 - self.side].clone()?;
            state.copy_count += usize::from(copies);
            Some(Some(receiver))
        });
        match receiver {
            Some(receiver) => Ok((receiver, copies.then(|| Copying(&self.pair)))),
            None => Err(ErrorKind::PeerLost {
                reason: "closed".to_owned(),
            }
            .into()),
        }
    }

    fn copy(&self, op: &PostedOp) -> Result<(), Error> {
        let (receiver, _copying) = self.receiver(true)?;
        let mut done = 0;
        for group in &op.runs.groups {
            // Slots from the first to the last one that is moved: checked there, and held while it is copied.
            let wanted = |pool: &PoolPair| RemoteRun {
                pool: pool.remote,
                generation: pool.generation,
                slot: 0,
                slot_count: group.remote_last + 1,
            };
            let wanted: Vec<RemoteRun> = group.pools.iter().map(wanted).collect();
            let theirs = receiver.events.resolve(receiver.peer, &wanted)?;
            for (pool, there) in group.pools.iter().zip(&theirs.runs) {
                copy_pairs(&pool.local, there, &group.slots, op.op == Op::Read);
                let begin = done;
                done += group.slots.len() as u64;
                op.landing
                    .moved((group.slots.len() * there.slot_bytes) as u64);
                op.landing.landed(begin..done);
            }
        }
        Ok(())
    }

    /// Runs `call` with the engine on the other side.
    fn call<R>(&self, call: impl FnOnce(&Receiver) -> R) -> Result<R, Error> {
        let (receiver, _) = self.receiver(false)?;
        Ok(call(&receiver))
    }
}

/// A copy under way.
struct Copying<'a>(&'a Pair);

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        self.0.state.update(|state| state.copy_count -= 1);
    }
}

impl Link for LocalLink {
    fn start(&self, peer: PeerId, events: Arc<dyn LinkEvents>) -> Result<(), Error> {
        self.pair.state.update(|state| {
            if state.is_closed {
                return Err(ErrorKind::PeerLost {
                    reason: "closed".to_owned(),
                }
                .into());
            }
            state.receivers[self.side] = Some(Receiver { peer, events });
            Ok(())
        })
    }

    fn kind(&self) -> BackendKind {
        BackendKind::Local
    }

    fn caps(&self) -> Caps {
        Caps {
            completion: Visibility::RemoteVisible,
            max_descriptors: u64::MAX,
            arrival_in_band: false,
            access: Access::Checked,
        }
    }

    fn readiness(&self, _op: &PostedOp) -> Readiness {
        Readiness::Calls
    }

    fn post(&self, op: &PostedOp) -> Result<Posted, Error> {
        let copied = self.copy(op);
        if copied.is_err() {
            op.landing.settle(); // this thread has copied, or nobody
        }
        copied.map(|()| Posted::Done(Visibility::RemoteVisible))
    }

    fn announce(&self, arrival: &Arrival, level: Visibility) -> Result<(), Error> {
        self.call(|receiver| {
            receiver
                .events
                .arrived(receiver.peer, arrival.clone(), level)
        })
    }

    fn send(&self, message: &[u8]) -> Result<(), Error> {
        let bytes = Bytes::copy_from_slice(message);
        self.call(|receiver| receiver.events.message(receiver.peer, bytes))
    }

    fn send_progress(&self, counter: u64) -> Result<(), Error> {
        self.call(|receiver| receiver.events.progress(receiver.peer, counter))
    }

    fn stalled_on(&self, _op: &PostedOp) -> StallCause {
        StallCause::Copy
    }

    fn quiesce(&self) -> Quiesce {
        self.close();
        Quiesce::Proven
    }

    fn close(&self) {
        let other = self.pair.state.update(|state| {
            let first = !std::mem::replace(&mut state.is_closed, true);
            let receivers = std::mem::take(&mut state.receivers);
            let [zero, one] = receivers;
            let other = if self.side == 0 { one } else { zero };
            other.filter(|_| first)
        });
        self.pair
            .state
            .wait_owned(|state| (state.copy_count == 0).then_some(()));
        if let Some(receiver) = other {
            let cause = Cause::PeerLost {
                reason: "the other agent closed the connection".to_owned(),
            };
            receiver.events.down(receiver.peer, cause, Quiesce::Proven);
        }
    }
}
