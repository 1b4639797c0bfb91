//! [`FlightLedger`]: who may still touch the memory of a flight, and [`Quiesced`], the proof that nobody does.
//!
//! *Landed* opens gates and is counted by the barrier. *Terminal* allows reuse and is counted here: an
//! operation that failed is terminal and has not landed. A page is reused only against `Quiesced` (I-9).
//!
//! **What is protected by what.** One mutex guards everything; its condition variable wakes whoever waits
//! for quiet.
//! **Lock order.** The mutex is a leaf: nothing is called with it held.
//! **Memory order.** Every end of an access (guard dropped, dispatch over, fence passed, writer heard of)
//! takes the mutex, and so does the poll that makes the witness: the holder of the witness is ordered after
//! all of them.

use std::task::{Context, Poll};

use crate::{
    barrier::waiters::Waiters,
    deadline::Deadline,
    error::{Error, ErrorKind},
    fault,
    ids::{Epoch, PeerId, WriterRank},
    stream::{StepClock, StepId},
    sync::Arc,
};

/// Everything that may touch the memory of one flight: operations posted from here, writers elsewhere,
/// steps that read.
///
/// A sender makes one per flight and passes it with its posts; an [`crate::Expectation`] has its own.
#[derive(Debug)]
pub struct FlightLedger {
    epoch: Epoch,
    state: Waiters<State>,
}

#[derive(Debug, Default)]
struct State {
    is_closed: bool,
    is_taken: bool,
    posted_count: u64,
    terminal_count: u64,
    open_fences: u64,
    dispatching: u64,
    writers: Vec<Writer>,
}

#[derive(Debug)]
struct Writer {
    rank: WriterRank,
    peer: PeerId,
    state: WriterState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriterState {
    /// It may still write.
    Expected,
    /// It is gone, and nobody can prove that it does not write.
    Unprovable,
    /// It does not write any more.
    Quiet,
}

/// An access that has begun. It ends when this is dropped; a forgotten one keeps the memory for good.
#[derive(Debug)]
#[must_use = "dropping it says that the access is over"]
pub struct Outstanding(Arc<FlightLedger>);

/// What a ledger still waits for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unquiet {
    /// Operations that are not terminal.
    pub operations: u64,
    /// Reading steps that have not passed.
    pub fences: u64,
    /// Writers that have not been heard of.
    pub writers: Vec<WriterRank>,
    /// Writers that are gone without a proof: the memory is quarantined.
    pub unprovable_writers: Vec<WriterRank>,
}

impl Unquiet {
    /// Whether it waits for nothing.
    pub fn is_quiet(&self) -> bool {
        *self == Self::default()
    }
}

/// Proof that no posted operation, no writer and no reader touches the memory of one flight any more.
///
/// It comes from [`FlightLedger::poll`] or [`crate::Draining`] only, once per ledger; an allocator asks
/// [`Quiesced::is_for`] before it takes pages back.
/// ```
/// # use kvgate_transfer::*;
/// let ledger = FlightLedger::new(Epoch(1));
/// ledger.close();
/// let proof: Quiesced = FlightLedger::poll(&ledger).expect("nothing was posted");
/// assert!(proof.is_for(&ledger));
/// ```
/// It cannot be built:
/// ```compile_fail,E0451
/// # use kvgate_transfer::*;
/// let ledger = FlightLedger::new(Epoch(1));
/// ledger.close();
/// let proof: Quiesced = Quiesced { ledger: ledger.clone() };
/// assert!(proof.is_for(&ledger));
/// ```
/// nor doubled:
/// ```compile_fail,E0599
/// # use kvgate_transfer::*;
/// let ledger = FlightLedger::new(Epoch(1));
/// ledger.close();
/// let proof: Quiesced = FlightLedger::poll(&ledger).expect("nothing was posted").clone();
/// assert!(proof.is_for(&ledger));
/// ```
#[derive(Debug)]
#[must_use = "this is the right to reuse the memory"]
pub struct Quiesced {
    ledger: Arc<FlightLedger>,
}

impl Quiesced {
    /// The flight that is over.
    pub fn epoch(&self) -> Epoch {
        self.ledger.epoch
    }

    /// Whether this is the proof of that very ledger, not just of one with the same number.
    pub fn is_for(&self, ledger: &Arc<FlightLedger>) -> bool {
        Arc::ptr_eq(&self.ledger, ledger)
    }
}

impl FlightLedger {
    /// An open ledger that waits for nothing yet.
    pub fn new(epoch: Epoch) -> Arc<Self> {
        Arc::new(Self {
            epoch,
            state: Waiters::new(State::default()),
        })
    }

    /// A ledger of a receiver: it also waits for each of these writers.
    pub(crate) fn expecting(epoch: Epoch, writers: &[(PeerId, WriterRank)]) -> Arc<Self> {
        let expected = |&(peer, rank)| Writer {
            rank,
            peer,
            state: WriterState::Expected,
        };
        let writers = writers.iter().map(expected).collect();
        Arc::new(Self {
            epoch,
            state: Waiters::new(State {
                writers,
                ..State::default()
            }),
        })
    }

    /// The flight it belongs to.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Counts an access until the guard is dropped: an operation, a copy, a queued kernel.
    ///
    /// # Errors
    /// [`ErrorKind::FlightClosed`].
    pub fn begin(this: &Arc<Self>) -> Result<Outstanding, Error> {
        this.state.with(|state| {
            if state.is_closed {
                return Err(ErrorKind::FlightClosed { epoch: this.epoch }.into());
            }
            state.posted_count += 1;
            Ok(Outstanding(this.clone()))
        })
    }

    /// Waits for a reading step too. Allowed after [`FlightLedger::close`], until the witness was made.
    ///
    /// # Errors
    /// [`ErrorKind::FlightClosed`] once the witness exists: the step reads memory that is not its own.
    pub fn fence(this: &Arc<Self>, clock: &StepClock, step: StepId) -> Result<(), Error> {
        this.state.with(|state| {
            if state.is_taken {
                return Err(Error::from(ErrorKind::FlightClosed { epoch: this.epoch }));
            }
            state.open_fences += 1;
            Ok(())
        })?;
        // Counted before it is asked for, so that a step cannot pass in between unnoticed.
        if !clock.subscribe(step, this) {
            this.fence_passed();
        }
        Ok(())
    }

    /// No access begins from now on. Needed before there can be a witness.
    pub fn close(&self) {
        self.state.update(|state| state.is_closed = true);
    }

    /// The witness, if the ledger is closed and everything it waits for is over; once.
    pub fn poll(this: &Arc<Self>) -> Option<Quiesced> {
        this.state.with(State::take).then(|| Quiesced {
            ledger: this.clone(),
        })
    }

    /// [`FlightLedger::poll`] for a task: without a witness, the waker is called when there may be one.
    pub fn poll_quiet(this: &Arc<Self>, cx: &mut Context<'_>) -> Poll<Quiesced> {
        let taken = this.state.poll(cx, |state| state.take().then_some(()));
        taken.map(|()| Quiesced {
            ledger: this.clone(),
        })
    }

    /// Blocks until there is a witness; `None` at the deadline (which changes nothing), or when it was
    /// given out before.
    pub fn wait(this: &Arc<Self>, deadline: Deadline) -> Option<Quiesced> {
        let taken = this.state.wait(deadline, |state| match state.is_taken {
            true => Some(false),
            false => state.take().then_some(true),
        });
        (taken == Some(true)).then(|| Quiesced {
            ledger: this.clone(),
        })
    }

    /// Whether it takes no more accesses.
    pub fn is_closed(&self) -> bool {
        self.state.with(|state| state.is_closed)
    }

    /// What it waits for now.
    pub fn unquiet(&self) -> Unquiet {
        self.state.with(|state| Unquiet {
            operations: state.posted_count - state.terminal_count,
            fences: state.open_fences,
            writers: state.ranks(WriterState::Expected),
            unprovable_writers: state.ranks(WriterState::Unprovable),
        })
    }

    pub(crate) fn fence_passed(&self) {
        self.state.update(|state| state.open_fences -= 1);
    }

    /// A completion of this flight is being handled; memory is not quiet meanwhile. `false` when the
    /// witness exists already.
    pub(crate) fn begin_dispatch(&self) -> bool {
        self.state.with(|state| {
            let allowed = !state.is_taken;
            state.dispatching += u64::from(allowed);
            allowed
        })
    }

    pub(crate) fn end_dispatch(&self) {
        self.state.update(|state| state.dispatching -= 1);
    }

    /// The writer does not write any more.
    pub(crate) fn writer_quiet(&self, rank: WriterRank) {
        self.state.update(|state| {
            for writer in state.writers.iter_mut().filter(|w| w.rank == rank) {
                writer.state = WriterState::Quiet;
            }
        });
    }

    /// The peer is gone. Returns how many writers are unprovable now.
    pub(crate) fn peer_gone(&self, peer: PeerId, is_proven: bool) -> u64 {
        let mut unprovable = 0;
        self.state.update(|state| {
            let open = |w: &&mut Writer| w.peer == peer && w.state == WriterState::Expected;
            for writer in state.writers.iter_mut().filter(open) {
                writer.state = match is_proven {
                    true => WriterState::Quiet,
                    false => WriterState::Unprovable,
                };
                unprovable += u64::from(!is_proven);
            }
        });
        unprovable
    }
}

impl State {
    fn ranks(&self, wanted: WriterState) -> Vec<WriterRank> {
        self.writers
            .iter()
            .filter(|w| w.state == wanted)
            .map(|w| w.rank)
            .collect()
    }

    /// Whether the witness may be made now; it then counts as made.
    fn take(&mut self) -> bool {
        let is_quiet = self.posted_count == self.terminal_count
            && self.open_fences == 0
            && self.dispatching == 0
            && self.writers.iter().all(|w| w.state == WriterState::Quiet);
        let take = self.is_closed && !self.is_taken && (is_quiet || fault::no_quiesce_check());
        self.is_taken |= take;
        take
    }
}

impl Drop for Outstanding {
    fn drop(&mut self) {
        self.0.state.update(|state| state.terminal_count += 1);
    }
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn quiet_needs_closing_and_every_access_over() {
        let ledger = FlightLedger::new(Epoch(3));
        assert!(
            FlightLedger::poll(&ledger).is_none(),
            "an open ledger may get new accesses"
        );
        let access = FlightLedger::begin(&ledger).unwrap();
        ledger.close();
        let error = FlightLedger::begin(&ledger).unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::FlightClosed { epoch: Epoch(3) });
        assert!(FlightLedger::wait(&ledger, Deadline::after_ms(1)).is_none());
        assert_eq!(ledger.unquiet().operations, 1);
        drop(access);
        let proof = FlightLedger::wait(&ledger, Deadline::after_ms(1)).unwrap();
        assert_eq!(proof.epoch(), Epoch(3));
        assert!(FlightLedger::poll(&ledger).is_none(), "one witness");
        assert!(
            FlightLedger::wait(&ledger, Deadline::after_ms(60_000)).is_none(),
            "and no wait for another"
        );
    }

    #[test]
    fn the_witness_is_of_one_ledger() {
        let (one, other) = (FlightLedger::new(Epoch(1)), FlightLedger::new(Epoch(1)));
        one.close();
        let proof = FlightLedger::poll(&one).unwrap();
        assert!(proof.is_for(&one) && !proof.is_for(&other));
    }

    #[test]
    fn every_writer_must_be_heard_of_and_an_unprovable_one_never_is() {
        let writers = [
            (PeerId(0), WriterRank(0)),
            (PeerId(1), WriterRank(1)),
            (PeerId(1), WriterRank(2)),
        ];
        let ledger = FlightLedger::expecting(Epoch(1), &writers);
        ledger.close();
        ledger.writer_quiet(WriterRank(0));
        ledger.writer_quiet(WriterRank(1));
        assert_eq!(
            ledger.peer_gone(PeerId(1), false),
            1,
            "the quiet one stays quiet"
        );
        assert!(FlightLedger::poll(&ledger).is_none());
        assert_eq!(ledger.unquiet().unprovable_writers, [WriterRank(2)]);
        ledger.writer_quiet(WriterRank(2));
        assert!(FlightLedger::poll(&ledger).is_some());
    }

    #[test]
    fn a_reading_step_keeps_memory_until_it_passes() {
        let clock = StepClock::new();
        let step = clock.begin_step();
        let ledger = FlightLedger::new(Epoch(1));
        FlightLedger::fence(&ledger, &clock, step.id()).unwrap();
        ledger.close();
        assert!(FlightLedger::poll(&ledger).is_none());
        let id = step.id();
        clock.finish(step);
        FlightLedger::fence(&ledger, &clock, id).unwrap();
        assert!(FlightLedger::poll(&ledger).is_some());
        assert!(
            FlightLedger::fence(&ledger, &clock, id).is_err(),
            "too late to read"
        );
    }

    #[test]
    fn a_completion_under_way_counts() {
        let ledger = FlightLedger::new(Epoch(1));
        assert!(ledger.begin_dispatch());
        ledger.close();
        assert!(FlightLedger::poll(&ledger).is_none());
        ledger.end_dispatch();
        assert!(FlightLedger::poll(&ledger).is_some());
        assert!(
            !ledger.begin_dispatch(),
            "nothing of this flight is handled after its end"
        );
    }
}
