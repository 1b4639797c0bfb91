//! The reader of the latency runs: sees events come in the peer process and notes when.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use std::os::fd::OwnedFd;

use kvgate_transfer::bare::{Slots, View};
use kvgate_transfer::sync::Arc;
use kvgate_transfer::{Arrival, ArrivalSink, Barrier, Deadline, PeerId, StageId, StageState};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::thread::futex;

use super::activity::monotonic_ns;
use super::control::Watch;
use crate::handoff::failure::{Failure, FailureKind};

/// Bytes behind the pools for words that both processes use.
pub const WORD_BYTES: u64 = 4096;
/// The word that a bare wake changes, from the end of the pools.
pub const BELL: u64 = 0;
/// The word in which the reader says which event it waits for, from 1.
pub const READY: u64 = 128;

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

    fn wait(&self) -> Result<(), Failure> {
        let failed = |errno| Failure::internal(format!("epoll: {errno}"));
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }];
        while epoll::wait(&self.epoll, &mut events, None).map_err(failed)? == 0 {}
        rustix::io::read(&self.event, &mut [0_u8; 8]).map_err(failed)?;
        Ok(())
    }
}

/// The two words of a run.
pub struct Words {
    view: Arc<View>,
    first: u64,
}

impl Words {
    /// Behind pools that end at `pools_end`.
    #[must_use]
    pub fn new(view: &Arc<View>, pools_end: u64) -> Self {
        Self {
            view: view.clone(),
            first: pools_end.next_multiple_of(WORD_BYTES),
        }
    }

    /// The word at `offset`.
    pub fn at(&self, offset: u64) -> Result<&AtomicU32, Failure> {
        self.view
            .word(self.first + offset)
            .ok_or_else(|| Failure::internal("no room for words behind the pools"))
    }
}

/// Waits for every stage of `barrier`, or for the bell; `pages` are compared after the clock was read.
pub fn run(
    watch: Watch,
    pages: &[(Slots, u64)],
    barrier: Option<&Barrier>,
    (words, bell, notes): (&Words, &Bell, &Notes),
    deadline: Deadline,
) -> Result<(Vec<u64>, u64), Failure> {
    let (ready, word) = (words.at(READY)?, words.at(BELL)?);
    let mut at_ns = Vec::with_capacity(pages.len());
    let mut bad_pages = 0;
    let no_flight = || Failure::internal("no flight is open");
    if watch == Watch::Note {
        ready.store(1, Ordering::Release);
        at_ns = notes.wait(pages.len(), deadline)?;
        bad_pages = pages
            .iter()
            .map(|(slots, seed)| slots.differing(*seed))
            .sum();
        return Ok((at_ns, bad_pages));
    }
    for (number, (slots, seed)) in (1..).zip(pages) {
        let stage = StageId(number as u16 - 1);
        ready.store(number, Ordering::Release);
        match watch {
            Watch::GateParked => barrier
                .ok_or_else(no_flight)?
                .wait(stage, deadline)
                .map_err(|error| Failure::new(FailureKind::PeerLost, error.to_string()))?,
            Watch::GateSpinning => spin_gate(barrier.ok_or_else(no_flight)?, stage)?,
            Watch::WordParked => park_on(word, number)?,
            Watch::WordSpinning => {
                while word.load(Ordering::Acquire) < number {
                    std::hint::spin_loop();
                }
            }
            Watch::Eventfd | Watch::Note => bell.wait()?,
        }
        at_ns.push(monotonic_ns());
        if matches!(watch, Watch::GateParked | Watch::GateSpinning) {
            bad_pages += slots.differing(*seed);
        }
    }
    ready.store(0, Ordering::Release);
    Ok((at_ns, bad_pages))
}

fn spin_gate(barrier: &Barrier, stage: StageId) -> Result<(), Failure> {
    loop {
        match barrier.check(stage) {
            StageState::Ready => return Ok(()),
            StageState::Pending { .. } => std::hint::spin_loop(),
            other => return Err(Failure::new(FailureKind::PeerLost, format!("{other:?}"))),
        }
    }
}

fn park_on(word: &AtomicU32, number: u32) -> Result<(), Failure> {
    loop {
        let seen = word.load(Ordering::Acquire);
        if seen >= number {
            return Ok(());
        }
        match futex::wait(word, futex::Flags::empty(), seen, None) {
            Ok(()) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Failure::internal(format!("futex: {errno}"))),
        }
    }
}

/// When the notes of a flight came. The thread of the engine that brings them calls it.
#[derive(Default)]
pub struct Notes {
    at_ns: Mutex<Vec<u64>>,
    came: Condvar,
    words: Option<(Arc<View>, u64)>,
    count: AtomicU64,
}

impl Notes {
    /// Notes that also move the ready word on.
    #[must_use]
    pub fn new(words: &Words) -> Self {
        Self {
            words: Some((words.view.clone(), words.first)),
            ..Self::default()
        }
    }

    fn wait(&self, count: usize, deadline: Deadline) -> Result<Vec<u64>, Failure> {
        let mut at_ns = self.at_ns.lock().unwrap_or_else(PoisonError::into_inner);
        while at_ns.len() < count {
            let left = deadline.remaining();
            if left.is_zero() {
                return Err(Failure::new(
                    FailureKind::DeadlineExceeded,
                    format!("{} of {count} notes came", at_ns.len()),
                ));
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
        if let Some((view, first)) = &self.words
            && let Some(ready) = view.word(first + READY)
        {
            ready.store(number, Ordering::Release);
        }
    }
}
