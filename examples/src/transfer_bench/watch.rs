//! The reader of the latency runs: sees events come in the peer process and notes when.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use std::os::fd::OwnedFd;

use kvgate_transfer::bare::{self, Slots, View};
use kvgate_transfer::{Arrival, ArrivalSink, Barrier, Deadline, PeerId, StageId};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use rustix::thread::futex;
use rustix::time::Timespec;

use super::activity::monotonic_ns;
use super::control::Watch;
use crate::handoff::failure::{Failure, FailureKind};

/// Bytes behind the pools for words that both processes use.
pub const WORD_BYTES: u64 = 4096;
/// The word that a bare wake changes, from the end of the pools.
pub const BELL: u64 = 0;
/// The word in which the reader says which event it waits for, from 1.
pub const READY: u64 = 128;
/// Looks between two looks at the clock.
const LOOKS: u32 = 4096;

/// An eventfd and the epoll that waits for it.
pub struct Bell {
    /// The eventfd.
    pub event: OwnedFd,
    epoll: OwnedFd,
}

impl Bell {
    /// A new pair.
    pub fn new() -> Result<Self, Failure> {
        let failed = |errno| Failure::internal(format!("eventfd and epoll: {errno}"));
        let event = eventfd(0, EventfdFlags::CLOEXEC).map_err(failed)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&epoll, &event, data, epoll::EventFlags::IN).map_err(failed)?;
        Ok(Self { event, epoll })
    }

    fn wait(&self, deadline: Deadline) -> Result<(), Failure> {
        let failed = |errno| Failure::internal(format!("epoll: {errno}"));
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }];
        loop {
            match epoll::wait(&self.epoll, &mut events, Some(&left(deadline)?)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => break,
                Err(errno) => return Err(failed(errno)),
            }
        }
        rustix::io::read(&self.event, &mut [0_u8; 8]).map_err(failed)?;
        Ok(())
    }
}

/// The two words of a run.
pub struct Words {
    space: bare::Words,
}

impl Words {
    /// Behind the pools of this view.
    #[must_use]
    pub fn new(view: &View) -> Self {
        Self {
            space: view.words(),
        }
    }

    /// The word at `offset`.
    pub fn at(&self, offset: u64) -> Result<&AtomicU32, Failure> {
        self.space
            .at(offset)
            .ok_or_else(|| Failure::internal("no room for words behind the pools"))
    }
}

/// Waits for every stage of `barrier`, or for the bell; `pages` are compared after the clock was read.
/// `next_deadline` gives the bound of the wait for one event, and is asked anew for each; `seen` is told of each.
pub fn run(
    watch: Watch,
    (view, pages): (&View, &[(Slots, u64)]),
    barrier: Option<&Barrier>,
    (words, bell, notes): (&Words, &Bell, &Notes),
    mut next_deadline: impl FnMut() -> Deadline,
    mut seen: impl FnMut() -> Result<(), Failure>,
) -> Result<(Vec<u64>, u64), Failure> {
    let (ready, word) = (words.at(READY)?, words.at(BELL)?);
    let mut at_ns = Vec::with_capacity(pages.len());
    let mut bad_pages = 0;
    let no_flight = || Failure::internal("no flight is open");
    if watch == Watch::Note {
        ready.store(1, Ordering::Release);
        at_ns = notes.wait(pages.len(), next_deadline, seen)?;
        bad_pages = pages
            .iter()
            .map(|(slots, seed)| slots.differing(view, *seed))
            .sum();
        return Ok((at_ns, bad_pages));
    }
    for (number, (slots, seed)) in (1..).zip(pages) {
        let stage = StageId(number as u16 - 1);
        let deadline = next_deadline();
        ready.store(number, Ordering::Release);
        match watch {
            Watch::GateParked => barrier
                .ok_or_else(no_flight)?
                .wait(stage, deadline)
                .map_err(|error| Failure::new(FailureKind::PeerLost, error.to_string()))?,
            Watch::GateSpinning => barrier
                .ok_or_else(no_flight)?
                .wait_spinning(stage, deadline)
                .map_err(|error| Failure::new(FailureKind::PeerLost, error.to_string()))?,
            Watch::WordParked => park_on(word, number, deadline)?,
            Watch::WordSpinning => spin(deadline, || Ok(word.load(Ordering::Acquire) >= number))?,
            Watch::Eventfd | Watch::Note => bell.wait(deadline)?,
        }
        at_ns.push(monotonic_ns());
        seen()?;
        if matches!(watch, Watch::GateParked | Watch::GateSpinning) {
            bad_pages += slots.differing(view, *seed);
        }
    }
    ready.store(0, Ordering::Release);
    Ok((at_ns, bad_pages))
}

/// Looks all the time. The clock is asked seldom: that takes longer than a look.
fn spin(deadline: Deadline, is_there: impl Fn() -> Result<bool, Failure>) -> Result<(), Failure> {
    loop {
        for _ in 0..LOOKS {
            if is_there()? {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        left(deadline)?;
    }
}

fn park_on(word: &AtomicU32, number: u32, deadline: Deadline) -> Result<(), Failure> {
    loop {
        let seen = word.load(Ordering::Acquire);
        if seen >= number {
            return Ok(());
        }
        match futex::wait(word, futex::Flags::empty(), seen, Some(&left(deadline)?)) {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
            Err(errno) => return Err(Failure::internal(format!("futex: {errno}"))),
        }
    }
}

/// The time to the deadline, for the kernel.
fn left(deadline: Deadline) -> Result<Timespec, Failure> {
    let left = deadline.remaining();
    if left.is_zero() {
        return Err(too_late("an event did not come".to_owned()));
    }
    Timespec::try_from(left).map_err(|error| Failure::internal(error.to_string()))
}

fn too_late(message: String) -> Failure {
    Failure::new(FailureKind::DeadlineExceeded, message)
}

/// When the notes of a flight came. The thread of the engine that brings them calls it.
#[derive(Default)]
pub struct Notes {
    at_ns: Mutex<Vec<u64>>,
    came: Condvar,
    words: Option<bare::Words>,
    count: AtomicU64,
}

impl Notes {
    /// Notes that also move the ready word on.
    #[must_use]
    pub fn new(words: &Words) -> Self {
        Self {
            words: Some(words.space.clone()),
            ..Self::default()
        }
    }

    fn wait(
        &self,
        count: usize,
        mut next_deadline: impl FnMut() -> Deadline,
        mut tell: impl FnMut() -> Result<(), Failure>,
    ) -> Result<Vec<u64>, Failure> {
        let mut at_ns = self.at_ns.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut seen, mut deadline) = (0, next_deadline());
        loop {
            let came = at_ns.len();
            if came > seen {
                // The thread that brings notes is not held up by what follows from them.
                drop(at_ns);
                for _ in seen..came {
                    tell()?;
                }
                seen = came;
                if came < count {
                    deadline = next_deadline();
                }
                at_ns = self.at_ns.lock().unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if came >= count {
                break;
            }
            let left = deadline.remaining();
            if left.is_zero() {
                return Err(too_late(format!("{seen} of {count} notes came")));
            }
            let woken = self.came.wait_timeout(at_ns, left);
            at_ns = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(std::mem::take(&mut at_ns))
    }
}

impl ArrivalSink for Notes {
    fn arrived(&self, _peer: PeerId, _arrival: &Arrival) {
        let now = monotonic_ns();
        let mut at_ns = self.at_ns.lock().unwrap_or_else(PoisonError::into_inner);
        at_ns.push(now);
        self.came.notify_all();
        let number = self.count.fetch_add(1, Ordering::Relaxed) as u32 + 2;
        if let Some(words) = &self.words
            && let Some(ready) = words.at(READY)
        {
            ready.store(number, Ordering::Release);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use kvgate_transfer::PoolGeometry;

    use super::*;

    struct Rig {
        words: Words,
        bell: Bell,
        notes: Notes,
        pages: Vec<(Slots, u64)>,
        view: View,
    }

    const POOL: PoolGeometry = PoolGeometry {
        offset_bytes: 0,
        stride_bytes: 64,
        slot_bytes: 64,
        slot_count: 4,
    };
    const BARE: [Watch; 4] = [
        Watch::WordSpinning,
        Watch::WordParked,
        Watch::Eventfd,
        Watch::Note,
    ];

    impl Rig {
        fn new() -> Self {
            let view = View::shared("watch", WORD_BYTES, WORD_BYTES).unwrap();
            let page = |slot| (Slots::new(&view, vec![(POOL, vec![slot])]).unwrap(), 0);
            Self {
                words: Words::new(&view),
                bell: Bell::new().unwrap(),
                notes: Notes::default(),
                pages: (0..3).map(page).collect(),
                view,
            }
        }

        fn run(
            &self,
            watch: Watch,
            next_deadline: impl FnMut() -> Deadline,
        ) -> Result<Vec<u64>, Failure> {
            let parts = (&self.words, &self.bell, &self.notes);
            let pages = (&self.view, self.pages.as_slice());
            let seen = run(watch, pages, None, parts, next_deadline, || Ok(()));
            seen.map(|(at_ns, _)| at_ns)
        }

        /// As the measuring side does it; a note comes from the engine.
        fn make_event(&self, watch: Watch, number: u32) {
            let word = self.words.at(BELL).unwrap();
            match watch {
                Watch::Eventfd => {
                    rustix::io::write(&self.bell.event, &1_u64.to_ne_bytes()).unwrap();
                }
                Watch::Note => self.notes.at_ns.lock().unwrap().push(monotonic_ns()),
                _ => word.store(number, Ordering::Release),
            }
            self.notes.came.notify_all();
            futex::wake(word, futex::Flags::empty(), 1).unwrap();
        }
    }

    #[test]
    fn an_event_that_does_not_come_ends_the_wait() {
        for watch in BARE {
            let failure = Rig::new()
                .run(watch, || Deadline::after(Duration::from_millis(20)))
                .unwrap_err();
            assert_eq!(failure.kind, FailureKind::DeadlineExceeded, "{watch:?}");
        }
    }

    #[test]
    fn every_event_has_a_deadline_of_its_own() {
        for watch in BARE {
            let rig = Rig::new();
            thread::scope(|scope| {
                let events = || {
                    let ready = rig.words.at(READY).unwrap();
                    for number in 1..=3 {
                        // The notes of a flight come while the reader waits for all of them.
                        while watch != Watch::Note && ready.load(Ordering::Acquire) < number {
                            thread::yield_now();
                        }
                        rig.make_event(watch, number);
                    }
                };
                scope.spawn(events);
                let mut asked = 0;
                let next_deadline = || {
                    asked += 1;
                    Deadline::after(Duration::from_secs(20))
                };
                let at_ns = rig.run(watch, next_deadline).unwrap();
                assert_eq!(at_ns.len(), 3, "{watch:?}");
                // Notes that came together are seen together.
                let expected = if watch == Watch::Note { 1..=3 } else { 3..=3 };
                assert!(expected.contains(&asked), "{watch:?}: {asked}");
            });
        }
    }
}
