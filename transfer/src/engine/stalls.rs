//! Looks whether what is in flight goes on, and says so when it does not. It says so and changes nothing: no
//! operation ends by it and no memory comes back (I-11).
//!
//! One thread per agent, made with the first post. While something is in flight it looks twice in `stall_ms`;
//! otherwise it sleeps without a timer, and the next post wakes it. So a post under steady traffic costs one
//! load, and an agent that is idle is not woken.
//!
//! **Going on.** An operation goes on while its own bytes move, while an older one of its connection goes on or
//! ends, and, when it has not begun, while the worker takes items. No clock is read where bytes move.
//! **What is protected by what.** Each operation has a mutex for what was seen of it; `state` has its own.
//! **Lock order.** All are leaves; none is held while a link or a recorder is called.
//! **No post is overlooked.** The thread says that it will sleep before it looks whether something is in flight;
//! a post puts its operation in the queue before it looks whether the thread sleeps. Both go through the mutex
//! of the queue, so one of them sees the other.

use std::time::{Duration, Instant};

use crate::{
    barrier::waiters::Waiters,
    deadline::Deadline,
    engine::{Engine, handle::Operation, peer::Peer},
    ids::OpId,
    obs::{Event, add},
    stall::StallCause,
    status::TransferState,
    sync::{Arc, AtomicBool, Mutex, Ordering, thread},
};

/// What the thread sleeps on.
pub(crate) struct Stalls {
    /// The thread looks again by itself, or has been woken.
    is_looking: AtomicBool,
    state: Waiters<State>,
}

#[derive(Default)]
struct State {
    is_wanted: bool,
    is_running: bool,
    is_stopping: bool,
}

/// Grows or changes whenever an operation goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Activity {
    state: TransferState,
    own: u64,
    older_count: u64,
    older: u64,
    worker: u64,
}

/// What was seen of one operation.
#[derive(Debug, Default)]
pub(crate) struct Watch(Mutex<Watched>);

#[derive(Debug, Default)]
struct Watched {
    seen: Option<(Activity, Instant)>,
    /// It stands, since when, and why.
    stall: Option<(StallCause, Instant)>,
    /// The recorder has heard of it.
    is_told: bool,
    /// It has ended; `Some(true)` well.
    over: Option<bool>,
}

enum Look {
    GoesOn,
    /// It has not moved since the look before.
    Waits,
    /// It stands, as was said before.
    Stands,
    /// It stands for so long now.
    Stalls(Instant),
    /// It stood since then.
    Resumes(Instant),
}

impl Watch {
    fn look(&self, activity: Activity, now: Instant, limit: Duration) -> Look {
        let mut watched = self.0.lock();
        let since = match watched.seen {
            Some((seen, since)) if seen == activity => since,
            _ => {
                watched.seen = Some((activity, now));
                return match watched.stall.take() {
                    Some((_, since)) => Look::Resumes(since),
                    None => Look::GoesOn,
                };
            }
        };
        match watched.stall {
            Some(_) => Look::Stands,
            None if watched.over.is_none() && now.saturating_duration_since(since) >= limit => {
                Look::Stalls(since)
            }
            None => Look::Waits,
        }
    }

    /// It stands, which is told next; `false` when it has ended meanwhile.
    fn stalls(&self, cause: StallCause, since: Instant) -> bool {
        let mut watched = self.0.lock();
        if watched.over.is_none() {
            watched.stall = Some((cause, since));
            watched.is_told = false;
        }
        watched.over.is_none()
    }

    /// That it stands has been told. Whether it ended well while that was told.
    fn told(&self) -> bool {
        let mut watched = self.0.lock();
        watched.is_told = true;
        watched.over == Some(true)
    }

    /// It has ended. Since when it stood, if that was told and it is good news.
    fn over(&self, is_good: bool) -> Option<Instant> {
        let mut watched = self.0.lock();
        watched.over = Some(is_good);
        let (_, since) = watched.stall.take()?;
        (watched.is_told && is_good).then_some(since)
    }

    /// Why it stands, and since when.
    pub(crate) fn stall(&self) -> Option<(StallCause, Instant)> {
        self.0.lock().stall
    }
}

impl Stalls {
    pub(crate) fn new() -> Self {
        Self {
            is_looking: AtomicBool::new(false),
            state: Waiters::new(State::default()),
        }
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        self.state.update(|state| state.is_stopping = true);
    }

    /// A nap; `false` when the thread is to end.
    fn nap(&self, until: Deadline) -> bool {
        let stopped = |state: &mut State| state.is_stopping.then_some(());
        self.state.wait(until, stopped).is_none()
    }
}

impl Engine {
    /// An operation was queued: somebody looks after it from now on.
    pub(crate) fn watch_over(this: &Arc<Self>) {
        let stalls = &this.stalls;
        if !this.watches() || stalls.is_looking.load(Ordering::Acquire) {
            return;
        }
        if stalls.is_looking.swap(true, Ordering::AcqRel) {
            return;
        }
        let must_start = stalls.state.update(|state| {
            state.is_wanted = true;
            let may_start = this.has_workers && !state.is_stopping;
            may_start && !std::mem::replace(&mut state.is_running, true)
        });
        if must_start && Self::start_watching(this).is_err() {
            // Without the thread everything goes on, and nobody says when it does not; the next post tries again.
            stalls.state.with(|state| state.is_running = false);
            stalls.is_looking.store(false, Ordering::Release);
        }
    }

    fn watches(&self) -> bool {
        self.config.stall_ms > 0
    }

    fn start_watching(this: &Arc<Self>) -> std::io::Result<()> {
        let watcher = Watcher(this.clone());
        this.workers.with(|workers| workers.running += 1);
        let run = move || watcher.run();
        let thread = thread::Builder::new().name("kvgate-stalls".to_owned());
        let handle = thread.spawn(run)?;
        this.workers.with(|workers| workers.handles.push(handle));
        Ok(())
    }

    /// Sleeps while nothing is in flight; `false` when the thread is to end.
    pub(crate) fn await_in_flight(&self) -> bool {
        let stalls = &self.stalls;
        stalls.is_looking.store(false, Ordering::Release);
        if self.has_in_flight() {
            stalls.is_looking.store(true, Ordering::Release);
            stalls.state.with(|state| state.is_wanted = false);
            return true;
        }
        stalls.state.wait_owned(|state| match state.is_stopping {
            true => Some(false),
            false => std::mem::take(&mut state.is_wanted).then_some(true),
        })
    }

    fn has_in_flight(&self) -> bool {
        let peers = self.all_peers();
        let mut standing = peers.iter().filter(|peer| !peer.is_down());
        standing.any(|peer| !peer.queue.operations().is_empty())
    }

    /// One look at everything in flight.
    pub(crate) fn look_for_stalls(&self, now: Instant) {
        let peers = self.all_peers();
        for peer in peers.iter().filter(|peer| !peer.is_down()) {
            self.look_at(peer, now);
        }
    }

    fn look_at(&self, peer: &Peer, now: Instant) {
        let limit = Duration::from_millis(self.config.stall_ms);
        let (mut older_count, mut older) = (0, 0u64);
        let mut first: Option<OpId> = None;
        // Whoever stands for so long asked before, half of the limit ago at least.
        let mut silence = None;
        // In the order in which they were posted.
        for operation in peer.queue.operations() {
            let state = match operation.standing() {
                Some((state @ (TransferState::Queued | TransferState::Running), _)) => state,
                _ => continue,
            };
            let own = operation.posted.landing.activity();
            let worker = match state {
                TransferState::Queued => peer.steps().wrapping_add(peer.link.activity()),
                _ => 0,
            };
            let activity = Activity {
                state,
                own,
                older_count,
                older,
                worker,
            };
            let look = operation.watch.look(activity, now, limit);
            if matches!(look, Look::Waits | Look::Stands | Look::Stalls(_)) && silence.is_none() {
                silence = Some(peer.link.heartbeat().unwrap_or_default());
            }
            match look {
                Look::GoesOn | Look::Waits => {}
                Look::Stands => _ = first.get_or_insert(operation.posted.id),
                Look::Stalls(since) => {
                    let is_silent = silence.is_some_and(|silence| silence >= limit / 2);
                    let cause = cause(peer, &operation, first, is_silent);
                    self.stalled(peer, &operation, cause, (since, now));
                    first.get_or_insert(operation.posted.id);
                }
                Look::Resumes(since) => self.resumed(&operation, since, now),
            }
            older_count += 1;
            older = older.wrapping_add(own);
        }
    }

    fn stalled(
        &self,
        peer: &Peer,
        operation: &Operation,
        cause: StallCause,
        (since, now): (Instant, Instant),
    ) {
        let posted = &operation.posted;
        if !operation.watch.stalls(cause, since) {
            return;
        }
        add(&self.counters.stalls, 1);
        self.record(|| Event::Stalled {
            peer: peer.id,
            op: posted.id,
            age_ms: millis(since, now),
            bytes_moved: operation.bytes_moved(),
            cause,
        });
        if operation.watch.told() {
            self.resumed(operation, since, now);
        }
    }

    fn resumed(&self, operation: &Operation, since: Instant, now: Instant) {
        self.record(|| Event::Resumed {
            peer: operation.peer,
            op: operation.posted.id,
            age_ms: millis(since, now),
        });
    }

    /// The operation has ended, and `is_good` says how.
    pub(super) fn end_watch(&self, operation: &Operation, is_good: bool) {
        if !self.watches() {
            return;
        }
        if let Some(since) = operation.watch.over(is_good) {
            self.resumed(operation, since, Instant::now());
        }
    }

    /// The worker of a peer has taken an item.
    pub(super) fn note_step(&self, peer: &Peer) {
        if self.watches() {
            peer.step();
        }
    }
}

fn cause(peer: &Peer, operation: &Operation, first: Option<OpId>, is_silent: bool) -> StallCause {
    let seen = match peer.link.stalled_on(&operation.posted) {
        // It takes nothing: because it is slow, or because nobody is there to take it.
        StallCause::SocketFull if is_silent => StallCause::PeerSilent,
        seen => seen,
    };
    if peer.in_flight(operation.posted.id).is_some() {
        return seen;
    }
    match (first, seen) {
        (Some(op), _) => StallCause::Behind { op },
        (None, StallCause::PeerStopped | StallCause::PeerSilent | StallCause::SocketFull) => seen,
        (None, _) => StallCause::NotBegun,
    }
}

pub(super) fn millis(since: Instant, now: Instant) -> u64 {
    let elapsed = now.saturating_duration_since(since);
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}

/// The thread. However it ends, it is counted as ended.
struct Watcher(Arc<Engine>);

impl Watcher {
    fn run(self) {
        let engine = &self.0;
        let half_ms = (engine.config.stall_ms / 2).max(1);
        while engine.await_in_flight() {
            engine.look_for_stalls(Instant::now());
            if !engine.stalls.nap(Deadline::after_ms(half_ms)) {
                break;
            }
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.0.workers.update(|workers| workers.running -= 1);
    }
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(100);

    fn activity(own: u64, older: u64) -> Activity {
        Activity {
            state: TransferState::Running,
            own,
            older_count: 1,
            older,
            worker: 0,
        }
    }

    #[test]
    fn a_stall_is_said_once_and_is_over_when_something_moves() {
        let (watch, start) = (Watch::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let look = |own, older, ms| watch.look(activity(own, older), at(ms), LIMIT);
        assert!(matches!(look(1, 1, 0), Look::GoesOn));
        assert!(matches!(look(1, 1, 99), Look::Waits));
        assert!(
            matches!(look(1, 2, 150), Look::GoesOn),
            "an older one moves"
        );
        assert!(matches!(look(2, 2, 240), Look::GoesOn), "it moves");
        let Look::Stalls(since) = look(2, 2, 340) else {
            panic!("100 ms without a byte")
        };
        assert_eq!(since, at(240));
        assert!(watch.stalls(StallCause::SocketFull, since));
        assert!(!watch.told(), "it has not ended");
        assert!(matches!(look(2, 2, 900), Look::Stands));
        assert_eq!(watch.stall(), Some((StallCause::SocketFull, since)));
        assert!(matches!(look(3, 2, 950), Look::Resumes(back) if back == since));
        assert_eq!(watch.stall(), None);
        assert!(watch.over(true).is_none());
        assert!(!watch.stalls(StallCause::SocketFull, since), "it has ended");
        assert!(matches!(look(3, 2, 5_000), Look::Waits));
    }

    /// After the last operation the thread sleeps without a timer, and the next post wakes it.
    #[test]
    fn nobody_looks_at_an_idle_agent() {
        use crate::{Agent, DescriptorList, Memory, Op, PoolGeometry, PostOptions, SourceReady};
        let config = crate::TransferConfig {
            stall_ms: 2,
            ..crate::TransferConfig::default()
        };
        let agent = |name| Agent::builder(name).config(config.clone()).build().unwrap();
        let (a, b) = (agent("a"), agent("b"));
        let geometry = PoolGeometry {
            offset_bytes: 0,
            stride_bytes: 64,
            slot_bytes: 64,
            slot_count: 1,
        };
        let region = |agent: &Agent| {
            let memory = Arc::new(Memory::host(64).unwrap());
            agent.register(memory, &[geometry]).unwrap()
        };
        let (source, target) = (region(&a), region(&b));
        let (to_b, _) = Agent::connect_local(&a, &b).unwrap();
        let mut local = DescriptorList::new();
        let mut remote = DescriptorList::remote(b.incarnation());
        local.push(source.pools()[0], &[0]);
        remote.push(target.pools()[0], &[0]);
        let transfer = a.prepare(Op::Write, &local, &remote, to_b).unwrap();
        let stalls = &a.engine().stalls;
        let is_running = |stalls: &Stalls| stalls.state.with(|state| state.is_running);
        assert!(!is_running(stalls), "no thread before the first post");
        for _ in 0..3 {
            let source = SourceReady::host_written();
            let handle = a.post(&transfer, source, PostOptions::default()).unwrap();
            let _ = handle.wait(Deadline::after_ms(20_000));
            assert!(handle.landed().is_complete());
            let patience = Deadline::after_ms(20_000);
            while stalls.is_looking.load(Ordering::Acquire) {
                assert!(!patience.has_passed(), "the thread goes on looking");
                thread::yield_now();
            }
            assert!(is_running(stalls));
        }
        assert!(!is_running(&b.engine().stalls), "nothing was posted there");
    }
}
