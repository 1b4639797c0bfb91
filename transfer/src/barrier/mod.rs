//! [`Barrier`]: the one completion object of a flight.
//!
//! **What is protected by what.** The count of each stage is in the atomics of `stage.rs`, which carry the
//! memory order. `waiters` guards the causes of failures and the sleepers. A change is made in the
//! atomics first and then announced under the mutex, so that nobody can look, miss it and sleep (I-6).
//! **Lock order.** `waiters` is a leaf.
//! **Landed is not terminal.** A failed stage goes on counting what lands: the ledger of the flight asks
//! for it before memory is reused, and a poisoned gate stays shut whatever lands (I-3).

#[cfg(not(kv_loom))]
mod cost;
mod plan;
mod stage;
mod ticket;
pub(crate) mod waiters;

use std::task::{Context, Poll};
use std::time::Instant;

#[cfg(not(kv_loom))]
pub use cost::{BarrierCost, barrier_cost};
pub use plan::{BarrierPlan, ChunkSpec};
pub use ticket::{BarrierError, LateCounts, Redeemed, StageState};

use self::{
    stage::{Counted, Gate, Stage},
    waiters::Waiters,
};
#[cfg(not(kv_loom))]
use crate::attend::{Attendance, Whose};
use crate::{
    deadline::Deadline,
    error::Cause,
    ids::{ChunkId, Epoch, StageId, TicketId, WriterRank},
    stopwatch::Stopwatch,
    sync::{Arc, AtomicBool, AtomicU32, AtomicU64, Ordering},
    visibility::Visibility,
};

/// Which gates a failure shuts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageSel {
    /// One stage.
    One(StageId),
    /// Every stage.
    All,
}

/// The gates of one flight, one per stage. A gate opens when every chunk that the plan lists for it has
/// been reported visible, and in no other case.
///
/// A fresh barrier is closed until [`Barrier::arm`]; a failed one is closed for good; a wait that times
/// out changes nothing. Tickets are redeemed by the transfer engine only:
///
/// ```
/// # use kvgate_transfer::*;
/// let chunk = ChunkSpec { stage: StageId(0), chunk: ChunkId(0), writer: WriterRank(0), descriptor_count: 1 };
/// let barrier = Barrier::new(BarrierPlan::from_chunks(vec![chunk])?, Epoch(1));
/// assert_eq!(barrier.check(StageId(0)), StageState::NotArmed);
/// barrier.arm()?;
/// assert_eq!(barrier.check(StageId(0)), StageState::Pending { missing: 1 });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
/// ```compile_fail,E0624
/// # use kvgate_transfer::*;
/// let chunk = ChunkSpec { stage: StageId(0), chunk: ChunkId(0), writer: WriterRank(0), descriptor_count: 1 };
/// let barrier = Barrier::new(BarrierPlan::from_chunks(vec![chunk])?, Epoch(1));
/// let ticket = TicketId { epoch: Epoch(1), stage: StageId(0), chunk: ChunkId(0) };
/// let _ = barrier.redeem(ticket, Visibility::RemoteVisible); // error: the method is private
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Barrier {
    epoch: Epoch,
    /// `None`: the constant that is ready for every stage.
    flight: Option<Flight>,
}

#[derive(Debug)]
struct Flight {
    plan: BarrierPlan,
    stages: Vec<Stage>,
    /// Set once every stage counts. Apart from the stages' words, so that a redemption touches its stage
    /// with read-modify-writes only: the model checker remembers just the last access of each word, and a
    /// load right before the decrement would hide the readers it races with.
    is_armed: AtomicBool,
    /// Chunks that have not landed, per writer of the plan.
    writers: Vec<AtomicU32>,
    /// The first cause per failed stage.
    waiters: Waiters<Vec<Option<Cause>>>,
    late: [AtomicU64; 3],
    /// Nanoseconds from `made_at` to the last redemption of each stage, 0 before.
    landed_after_ns: Vec<AtomicU64>,
    made_at: Instant,
    /// The rings of the agent, and whose arrivals may be of this flight.
    #[cfg(not(kv_loom))]
    attendance: crate::sync::Mutex<Option<(Arc<Attendance>, Whose)>>,
    /// Who measures how long threads sleep at a gate.
    #[cfg(all(feature = "metrics", not(kv_loom)))]
    waits: crate::sync::Mutex<Option<prometheus_client::metrics::histogram::Histogram>>,
}

const STALE: usize = 0;
const DUPLICATE: usize = 1;
const UNKNOWN: usize = 2;

impl Barrier {
    /// A closed barrier for one attempt. Every stage answers [`StageState::NotArmed`] until it is armed.
    pub fn new(plan: BarrierPlan, epoch: Epoch) -> Arc<Self> {
        let count = |stage| plan.chunk_count(StageId(stage as u16));
        let flight = Flight {
            stages: (0..plan.stages.len())
                .map(|s| Stage::new(count(s)))
                .collect(),
            is_armed: AtomicBool::new(false),
            writers: plan
                .writers
                .iter()
                .map(|(_, chunks)| AtomicU32::new(*chunks))
                .collect(),
            waiters: Waiters::new(vec![None; plan.stages.len()]),
            late: std::array::from_fn(|_| AtomicU64::new(0)),
            landed_after_ns: match cfg!(kv_loom) {
                true => Vec::new(),
                false => plan.stages.iter().map(|_| AtomicU64::new(0)).collect(),
            },
            made_at: Instant::now(),
            #[cfg(not(kv_loom))]
            attendance: crate::sync::Mutex::new(None),
            #[cfg(all(feature = "metrics", not(kv_loom)))]
            waits: crate::sync::Mutex::new(None),
            plan,
        };
        Arc::new(Self {
            epoch,
            flight: Some(flight),
        })
    }

    /// The explicit "nothing to wait for": ready for every stage, cannot be armed, cannot fail.
    pub fn ready() -> Arc<Self> {
        Arc::new(Self {
            epoch: Epoch(0),
            flight: None,
        })
    }

    /// Starts to count. Call it once, before a writer is told where to write.
    ///
    /// # Errors
    /// [`BarrierError::AlreadyArmed`].
    pub fn arm(&self) -> Result<(), BarrierError> {
        let flight = self.flight.as_ref().ok_or(BarrierError::AlreadyArmed)?;
        // Every stage, whatever the first one says: two racing calls end with one error and all armed.
        let fresh = flight.stages.iter().filter(|stage| stage.arm()).count();
        flight.is_armed.store(true, Ordering::Release);
        flight.waiters.notify();
        if fresh == flight.stages.len() {
            Ok(())
        } else {
            Err(BarrierError::AlreadyArmed)
        }
    }

    /// The state of one gate now. One Acquire load when it is ready; never blocks.
    pub fn check(&self, stage: StageId) -> StageState {
        let Some(flight) = &self.flight else {
            return StageState::Ready;
        };
        let Some(gates) = flight.stages.get(usize::from(stage.0)) else {
            return StageState::Failed(Cause::UnknownStage(stage));
        };
        match gates.gate() {
            Gate::Open => StageState::Ready,
            Gate::Missing(missing) => StageState::Pending { missing },
            Gate::Unarmed => StageState::NotArmed,
            Gate::Poisoned => {
                StageState::Failed(flight.waiters.with(|causes| cause_of(causes, stage)))
            }
        }
    }

    /// Blocks until the stage is ready or has failed.
    ///
    /// While a receiver waits, its thread takes what up to eight writers of the flight that are on this host send to
    /// the agent, so that one wake stands between an arrival and its reader: it may call the
    /// [`crate::ArrivalSink`]s and the [`crate::Recorder`] of that agent. Whoever holds a lock that these take waits
    /// for ever. While one of them runs, what the other writers have sent meanwhile waits, and the wait ends late by
    /// one such call at most.
    ///
    /// # Errors
    /// [`BarrierError::NotArmed`] and [`BarrierError::UnknownStage`] at once, [`BarrierError::Failed`]
    /// when it fails, [`BarrierError::TimedOut`] at the deadline, after which everything is as before.
    pub fn wait(&self, stage: StageId, deadline: Deadline) -> Result<(), BarrierError> {
        self.wait_as(stage, deadline, false)
    }

    /// [`Barrier::wait`] for a thread that has a core to itself: as long as a writer of the flight is connected
    /// over `shm` or `cma`, it looks all the time and does not sleep, and nobody needs to wake it. Otherwise, and
    /// where the kernel has no `futex_waitv` (before Linux 5.16), it sleeps like any other.
    ///
    /// # Errors
    /// As [`Barrier::wait`].
    #[cfg(not(kv_loom))]
    pub fn wait_spinning(&self, stage: StageId, deadline: Deadline) -> Result<(), BarrierError> {
        self.wait_as(stage, deadline, true)
    }

    fn wait_as(&self, stage: StageId, deadline: Deadline, spins: bool) -> Result<(), BarrierError> {
        let Some(flight) = &self.flight else {
            return Ok(());
        };
        let gates = flight.stage(stage)?;
        if gates.gate() == Gate::Open {
            return Ok(());
        }
        let timed_out = BarrierError::TimedOut {
            deadline_ms: deadline.allowed_ms(),
        };
        let stopwatch = Stopwatch::start();
        let answer = flight.wait((deadline, spins), |causes| answer(gates, stage, causes));
        flight.slept(stopwatch);
        answer.unwrap_or(Err(timed_out))
    }

    /// [`Barrier::wait`] for every stage in turn, under one deadline.
    ///
    /// # Errors
    /// That of the first stage that does not open.
    pub fn wait_all(&self, deadline: Deadline) -> Result<(), BarrierError> {
        (0..self.stage_count()).try_for_each(|s| self.wait(StageId(s as u16), deadline))
    }

    /// [`Barrier::wait`] for a task: the waker is called when the stage may have changed.
    pub fn poll(&self, stage: StageId, cx: &mut Context<'_>) -> Poll<Result<(), BarrierError>> {
        let Some(flight) = &self.flight else {
            return Poll::Ready(Ok(()));
        };
        match flight.stage(stage) {
            Ok(gates) => flight
                .waiters
                .poll(cx, |causes| answer(gates, stage, causes)),
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    /// Arrivals come out of the rings of these writers: who waits attends to them.
    #[cfg(not(kv_loom))]
    pub(crate) fn attend(
        &self,
        to: &Arc<Attendance>,
        writers: impl Iterator<Item = crate::ids::PeerId>,
    ) {
        if let Some(flight) = &self.flight {
            *flight.attendance.lock() = Some((to.clone(), Whose::Of(writers.collect())));
        }
    }

    /// Sleeps of [`Barrier::wait`] are measured by this from now on.
    #[cfg(all(feature = "metrics", not(kv_loom)))]
    pub(crate) fn observe_waits(&self, by: prometheus_client::metrics::histogram::Histogram) {
        if let Some(flight) = &self.flight {
            *flight.waits.lock() = Some(by);
        }
    }

    /// Shuts gates for good and wakes whoever waits for them. The first cause of a stage stays.
    pub fn fail(&self, stages: StageSel, cause: Cause) {
        let Some(flight) = &self.flight else { return };
        let range = match stages {
            StageSel::All => 0..flight.stages.len(),
            StageSel::One(stage) if flight.stage(stage).is_ok() => {
                usize::from(stage.0)..usize::from(stage.0) + 1
            }
            StageSel::One(_) => return,
        };
        flight.waiters.update(|causes| {
            for index in range {
                causes[index].get_or_insert_with(|| cause.clone());
                flight.stages[index].poison();
            }
        });
    }

    /// The attempt this barrier belongs to.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Number of stages; 0 for [`Barrier::ready`].
    pub fn stage_count(&self) -> u32 {
        self.flight
            .as_ref()
            .map_or(0, |flight| flight.stages.len() as u32)
    }

    /// Chunks of a stage that have not landed; also for a stage that has failed.
    pub fn missing(&self, stage: StageId) -> u32 {
        self.stage(stage).map_or(0, Stage::missing)
    }

    /// The bitmap of a stage: bit c % 64 of word c / 64 for chunk c.
    pub fn landed(&self, stage: StageId) -> Vec<u64> {
        self.stage(stage).map_or_else(Vec::new, Stage::landed)
    }

    /// Whether every chunk of every stage has landed. Says nothing about gates: a failed flight may have
    /// landed completely.
    pub fn all_landed(&self) -> bool {
        self.flight
            .as_ref()
            .is_none_or(|f| f.stages.iter().all(|s| s.is_armed() && s.missing() == 0))
    }

    /// When the last chunk of a stage landed. `None` before, and always in a loom model.
    pub fn landed_at(&self, stage: StageId) -> Option<Instant> {
        let flight = self.flight.as_ref()?;
        match flight
            .landed_after_ns
            .get(usize::from(stage.0))?
            .load(Ordering::Acquire)
        {
            0 => None,
            nanoseconds => Some(flight.made_at + std::time::Duration::from_nanos(nanoseconds)),
        }
    }

    /// What was reported and not applied.
    pub fn late_counts(&self) -> LateCounts {
        let Some(flight) = &self.flight else {
            return LateCounts::default();
        };
        let count = |which: usize| flight.late[which].load(Ordering::Relaxed);
        LateCounts {
            stale: count(STALE),
            duplicate: count(DUPLICATE),
            unknown: count(UNKNOWN),
        }
    }

    /// Whether every chunk of this writer has landed. A writer outside the plan has nothing to land.
    pub(crate) fn writer_landed(&self, writer: WriterRank) -> bool {
        let Some(flight) = &self.flight else {
            return true;
        };
        match flight
            .plan
            .writers
            .iter()
            .position(|(rank, _)| *rank == writer)
        {
            Some(index) => flight.writers[index].load(Ordering::Acquire) == 0,
            None => true,
        }
    }

    /// The writer that the plan expects a chunk from.
    pub(crate) fn writer_of(&self, stage: StageId, chunk: ChunkId) -> Option<WriterRank> {
        let plan = &self.flight.as_ref()?.plan;
        let index = *plan
            .stages
            .get(usize::from(stage.0))?
            .get(usize::from(chunk.0))?;
        Some(plan.writers[usize::from(index)].0)
    }

    /// The writers of the plan with the number of their chunks.
    pub(crate) fn writers(&self) -> &[(WriterRank, u32)] {
        self.flight
            .as_ref()
            .map_or(&[], |flight| flight.plan.writers())
    }

    fn stage(&self, stage: StageId) -> Option<&Stage> {
        self.flight.as_ref()?.stages.get(usize::from(stage.0))
    }

    /// Counts one chunk whose bytes are visible here (I-2, I-5).
    ///
    /// # Errors
    /// `Stale`, `UnknownChunk`, `NotVisible`, `NotArmed`: counted, never applied.
    #[cfg(not(kv_loom))]
    pub(crate) fn redeem(
        &self,
        ticket: TicketId,
        level: Visibility,
    ) -> Result<Redeemed, BarrierError> {
        self.redeem_ticket(ticket, level)
    }

    /// Counts one chunk whose bytes are visible here (I-2, I-5). Open to the models only.
    ///
    /// # Errors
    /// `Stale`, `UnknownChunk`, `NotVisible`, `NotArmed`: counted, never applied.
    #[cfg(kv_loom)]
    pub fn redeem(&self, ticket: TicketId, level: Visibility) -> Result<Redeemed, BarrierError> {
        self.redeem_ticket(ticket, level)
    }

    /// Weighs a ticket without counting it as landed: its writer, if it may be redeemed.
    ///
    /// # Errors
    /// As [`Barrier::redeem`]; the refusal is counted.
    pub(crate) fn admit(
        &self,
        ticket: TicketId,
        level: Visibility,
    ) -> Result<WriterRank, BarrierError> {
        let Some(flight) = &self.flight else {
            return Err(BarrierError::UnknownChunk(ticket));
        };
        if ticket.epoch != self.epoch && !crate::fault::no_epoch_check() {
            flight.count_late(STALE);
            return Err(BarrierError::Stale {
                found: ticket.epoch,
                expected: self.epoch,
            });
        }
        let Some(writer) = self.writer_of(ticket.stage, ticket.chunk) else {
            flight.count_late(UNKNOWN);
            return Err(BarrierError::UnknownChunk(ticket));
        };
        if level < Visibility::RemoteVisible && !crate::fault::no_level_check() {
            flight.count_late(UNKNOWN);
            return Err(BarrierError::NotVisible(level));
        }
        if !flight.is_armed.load(Ordering::Acquire) {
            flight.count_late(UNKNOWN);
            return Err(BarrierError::NotArmed);
        }
        Ok(writer)
    }

    fn redeem_ticket(&self, ticket: TicketId, level: Visibility) -> Result<Redeemed, BarrierError> {
        self.admit(ticket, level)?;
        let Some(flight) = &self.flight else {
            return Err(BarrierError::UnknownChunk(ticket));
        };
        let (stage, chunk) = (usize::from(ticket.stage.0), usize::from(ticket.chunk.0));
        let writer = flight.plan.stages[stage][chunk];
        let counted = flight.stages[stage].count(ticket.chunk.0);
        if counted == Counted::Repeat {
            flight.count_late(DUPLICATE);
            return Ok(Redeemed::Duplicate);
        }
        flight.writers[usize::from(writer)].fetch_sub(1, Ordering::AcqRel);
        if counted == Counted::First {
            return Ok(Redeemed::First);
        }
        if let Some(landed) = flight.landed_after_ns.get(stage) {
            let nanoseconds =
                u64::try_from(flight.made_at.elapsed().as_nanos()).unwrap_or(u64::MAX);
            landed.store(nanoseconds.max(1), Ordering::Release);
        }
        flight.waiters.notify();
        Ok(Redeemed::Last)
    }
}

impl Flight {
    fn stage(&self, stage: StageId) -> Result<&Stage, BarrierError> {
        self.stages
            .get(usize::from(stage.0))
            .ok_or(BarrierError::UnknownStage(stage))
    }

    #[cfg(not(kv_loom))]
    fn wait<R>(
        &self,
        (deadline, spins): (Deadline, bool),
        check: impl FnMut(&mut Vec<Option<Cause>>) -> Option<R>,
    ) -> Option<R> {
        let attendance = self.attendance.lock().clone();
        match attendance.and_then(|(rings, whose)| Attendance::begin(&rings, whose)) {
            Some(attendant) => {
                let attendant = match spins {
                    true => attendant.wide_awake(),
                    false => attendant,
                };
                self.waiters.wait_attending(attendant, deadline, check)
            }
            None => self.waiters.wait(deadline, check),
        }
    }

    #[cfg(kv_loom)]
    fn wait<R>(
        &self,
        (deadline, _): (Deadline, bool),
        check: impl FnMut(&mut Vec<Option<Cause>>) -> Option<R>,
    ) -> Option<R> {
        self.waiters.wait(deadline, check)
    }

    #[cfg(all(feature = "metrics", not(kv_loom)))]
    fn slept(&self, stopwatch: Stopwatch) {
        if let Some(by) = &*self.waits.lock() {
            by.observe(stopwatch.seconds());
        }
    }

    #[cfg(not(all(feature = "metrics", not(kv_loom))))]
    fn slept(&self, _: Stopwatch) {}

    fn count_late(&self, which: usize) {
        self.late[which].fetch_add(1, Ordering::Relaxed);
    }
}

fn answer(
    gates: &Stage,
    stage: StageId,
    causes: &[Option<Cause>],
) -> Option<Result<(), BarrierError>> {
    match gates.gate() {
        Gate::Open => Some(Ok(())),
        Gate::Missing(_) => None,
        Gate::Unarmed => Some(Err(BarrierError::NotArmed)),
        Gate::Poisoned => Some(Err(BarrierError::Failed(cause_of(causes, stage)))),
    }
}

/// The cause is stored, under the same lock, before a stage is poisoned.
fn cause_of(causes: &[Option<Cause>], stage: StageId) -> Cause {
    causes
        .get(usize::from(stage.0))
        .cloned()
        .flatten()
        .unwrap_or(Cause::UnknownStage(stage))
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod attended_tests;
#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests;
