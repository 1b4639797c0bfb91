//! One operation from admission to its end, and [`TransferHandle`], which watches it.
//!
//! `Queued → Running → Ending → Done | Failed`, `Queued → Ending → Failed` by cancel or a lost peer, and
//! `Running → Unknown` when the peer is lost and nobody can tell what it still does.
//! Whoever moves an operation to `Ending` owns its resources and releases them; the others find it moved
//! and do nothing, so every race has one winner and one release (I-10). Time moves nothing (I-11).
//!
//! **What is protected by what.** One mutex per operation guards phase and resources.
//! **Lock order.** The mutex is a leaf: resources are dropped with it free, since their drops take the
//! locks of regions, queue and ledger.

use std::{
    any::Any,
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Instant,
};

use crate::{
    backend::PostedOp,
    barrier::waiters::Waiters,
    deadline::Deadline,
    engine::{Engine, Op, peer::RemoteHold, queue::OpSlot, quiesce::Outstanding, stalls::Watch},
    error::{Cause, Error, ErrorKind},
    ids::{OpId, PeerId},
    landed::{Landed, SlotState},
    mem::region::RegionHolds,
    status::TransferState,
    sync::Arc,
    visibility::Visibility,
};

/// Where an operation stands.
#[derive(Clone, Debug)]
#[must_use]
pub enum Status {
    /// Queued or under way.
    InFlight,
    /// It ended, and its bytes have come this far.
    Done(Visibility),
    /// It ended without landing completely.
    Failed(Error),
    /// The peer was lost and may still touch the memory. Never becomes anything else.
    Unknown(Cause),
}

/// What an operation holds until it is terminal. Fields are dropped in this order: the ledger hears of
/// the end last.
pub(crate) struct Resources {
    pub(crate) _regions: RegionHolds,
    pub(crate) _remote: RemoteHold,
    pub(crate) _keepalive: Option<Box<dyn Any + Send>>,
    pub(crate) _slot: OpSlot,
    pub(crate) _outstanding: Option<Outstanding>,
}

enum Phase {
    Queued(Resources),
    Running(Resources),
    /// The winner releases the resources.
    Ending,
    Done(Visibility),
    Failed(Error),
    /// The resources stay for good.
    Unknown(Cause, #[allow(dead_code)] Resources),
    /// Only inside `Operation::step`.
    Moving,
}

/// One operation of one peer.
pub(crate) struct Operation {
    pub(crate) peer: PeerId,
    pub(crate) posted: PostedOp,
    pub(crate) descriptor_count: u64,
    pub(crate) posted_at: Instant,
    pub(crate) watch: Watch,
    phase: Waiters<Phase>,
    #[cfg(all(feature = "fault-injection", not(kv_loom)))]
    pub(crate) hold: Option<Arc<crate::fault::HoldGate>>,
}

impl Operation {
    pub(crate) fn new(
        peer: PeerId,
        posted: PostedOp,
        descriptor_count: u64,
        resources: Resources,
        #[cfg(all(feature = "fault-injection", not(kv_loom)))] hold: Option<
            Arc<crate::fault::HoldGate>,
        >,
    ) -> Self {
        // A held operation counts as handed to hardware: a cancel comes too late for it.
        #[cfg(all(feature = "fault-injection", not(kv_loom)))]
        let is_held = hold.is_some();
        #[cfg(not(all(feature = "fault-injection", not(kv_loom))))]
        let is_held = false;
        let phase = if is_held {
            Phase::Running(resources)
        } else {
            Phase::Queued(resources)
        };
        Self {
            peer,
            posted,
            descriptor_count,
            posted_at: Instant::now(),
            watch: Watch::default(),
            phase: Waiters::new(phase),
            #[cfg(all(feature = "fault-injection", not(kv_loom)))]
            hold,
        }
    }

    /// Bytes that the transport has taken or brought, without what it puts around them.
    pub(crate) fn bytes_moved(&self) -> u64 {
        self.posted.landing.moved_bytes().min(self.posted.bytes)
    }

    /// Whether the peer is told of its end: by a write with an arrival.
    pub(crate) fn is_announced(&self) -> bool {
        self.posted.op == Op::Write && self.posted.arrival.is_some()
    }

    /// Takes the operation for execution; `false` when it has ended in the queue.
    pub(crate) fn start(&self) -> bool {
        self.phase
            .with(|phase| match std::mem::replace(phase, Phase::Moving) {
                Phase::Queued(resources) | Phase::Running(resources) => {
                    *phase = Phase::Running(resources);
                    true
                }
                other => {
                    *phase = other;
                    false
                }
            })
    }

    /// Ends it, unless it has ended. `count` runs for the caller that did, before anybody sees the end.
    pub(crate) fn end(&self, result: Result<Visibility, Error>, count: impl FnOnce()) {
        self.end_if(result, |_| true, count);
    }

    /// Ends it if nobody has started it.
    pub(crate) fn cancel(&self, count: impl FnOnce()) {
        let is_queued = |phase: &Phase| matches!(phase, Phase::Queued(_));
        self.end_if(Err(ErrorKind::Cancelled.into()), is_queued, count);
    }

    fn end_if(
        &self,
        result: Result<Visibility, Error>,
        may: impl FnOnce(&Phase) -> bool,
        count: impl FnOnce(),
    ) {
        let resources = self.phase.with(|phase| {
            if !may(phase) {
                return None;
            }
            match std::mem::replace(phase, Phase::Ending) {
                Phase::Queued(resources) | Phase::Running(resources) => Some(resources),
                other => {
                    *phase = other;
                    None
                }
            }
        });
        let Some(resources) = resources else { return };
        count();
        drop(resources);
        self.phase.update(|phase| {
            *phase = match result {
                Ok(level) => Phase::Done(level),
                Err(error) => Phase::Failed(error),
            }
        });
    }

    /// Nobody can tell how it ended: the memory stays in flight. `count` runs for the caller that said so,
    /// before anybody sees it and with the mutex held: a counter, nothing more.
    pub(crate) fn lose(&self, cause: Cause, count: impl FnOnce()) -> bool {
        self.phase
            .update(|phase| match std::mem::replace(phase, Phase::Moving) {
                Phase::Queued(resources) | Phase::Running(resources) => {
                    count();
                    *phase = Phase::Unknown(cause, resources);
                    true
                }
                other => {
                    *phase = other;
                    false
                }
            })
    }

    /// Where it stands, and why its end is unknown; `None` once it has ended.
    pub(crate) fn standing(&self) -> Option<(TransferState, Option<Cause>)> {
        self.phase.with(|phase| match phase {
            Phase::Queued(_) => Some((TransferState::Queued, None)),
            Phase::Running(_) => Some((TransferState::Running, None)),
            Phase::Ending | Phase::Moving => Some((TransferState::Ending, None)),
            Phase::Unknown(cause, _) => Some((TransferState::Unknown, Some(cause.clone()))),
            Phase::Done(_) | Phase::Failed(_) => None,
        })
    }

    /// Whether nobody has started it.
    pub(super) fn is_queued(&self) -> bool {
        self.phase.with(|phase| matches!(phase, Phase::Queued(_)))
    }

    fn status(&self) -> Status {
        self.phase
            .with(|phase| phase.ended().unwrap_or(Status::InFlight))
    }
}

impl Phase {
    fn ended(&self) -> Option<Status> {
        match self {
            Self::Queued(_) | Self::Running(_) | Self::Ending | Self::Moving => None,
            Self::Done(level) => Some(Status::Done(*level)),
            Self::Failed(error) => Some(Status::Failed(error.clone())),
            Self::Unknown(cause, _) => Some(Status::Unknown(cause.clone())),
        }
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation")
            .field("id", &self.posted.id)
            .field("bytes", &self.posted.bytes)
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

/// Watches one posted operation: a future without a runtime, or a blocking wait.
///
/// Dropping it changes nothing: the engine owns the operation until it is terminal, and the ledger given
/// at the post tells when memory may be reused.
#[must_use = "a transfer has ended only when its handle says so; drop it on purpose when a ledger watches"]
pub struct TransferHandle {
    operation: Arc<Operation>,
    engine: Arc<Engine>,
}

impl TransferHandle {
    pub(crate) fn new(operation: Arc<Operation>, engine: Arc<Engine>) -> Self {
        Self { operation, engine }
    }

    /// The name of the operation in events.
    pub fn id(&self) -> OpId {
        self.operation.posted.id
    }

    /// Where it stands now. Never blocks.
    pub fn status(&self) -> Status {
        self.operation.status()
    }

    /// Blocks until it has ended, or the deadline passes: then the answer is [`Status::InFlight`], and
    /// the operation goes on. A thread that waits may do the copying itself.
    pub fn wait(&self, deadline: Deadline) -> Status {
        match self.status() {
            Status::InFlight => self.engine.help_along(&self.operation, deadline),
            ended => return ended,
        }
        self.operation
            .phase
            .wait(deadline, |phase| phase.ended())
            .unwrap_or(Status::InFlight)
    }

    /// What is known of each slot, now. After a success every one has landed. After a failure, a cancel or
    /// the loss of the peer this tells what can be taken over and what has to be moved again; of what is
    /// [`SlotState::Unknown`] either may be true. Never blocks.
    pub fn landed(&self) -> Landed {
        let slot_count = self.operation.descriptor_count;
        match self.status() {
            Status::Done(Visibility::RemoteVisible) => Landed::whole(slot_count, SlotState::Landed),
            Status::Done(_) => Landed::whole(slot_count, SlotState::Unknown),
            Status::InFlight | Status::Failed(_) | Status::Unknown(_) => {
                self.operation.posted.landing.now()
            }
        }
    }

    /// Takes the operation back if nobody has started it; otherwise does nothing. Best effort, and no
    /// statement about memory: look at [`TransferHandle::status`].
    pub fn cancel(&self) {
        self.operation
            .cancel(|| self.engine.count_failed(&self.operation));
    }
}

/// Ready when the operation has ended; the output is never [`Status::InFlight`].
impl Future for TransferHandle {
    type Output = Status;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Status> {
        self.operation.phase.poll(cx, |phase| phase.ended())
    }
}

impl fmt::Debug for TransferHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TransferHandle")
            .field(&self.operation)
            .finish()
    }
}
