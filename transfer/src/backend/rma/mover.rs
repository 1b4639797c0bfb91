//! The thread that owns one connection's half of a provider: everything of it is made, used and torn down
//! here, since a provider's objects belong to one thread.
//!
//! It takes commands from a queue, moves one transfer at a time, and makes the provider progress for the
//! peer, too: emulated one-sided transports copy in the thread of the passive side. When there is nothing
//! to do it sleeps on the provider's descriptor and on its own.
//!
//! **What is protected by what.** `queue`, `end` and `known` by their mutexes; each answer by its own. **Lock
//! order.** All are leaves, and none is held over a call into a provider.
//!
//! Every command is answered: one that is dropped, by the end of the thread or before it, says so.

use std::collections::{BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::Bytes;
use rustix::event::{EventfdFlags, eventfd};

use super::requests::Targets;
use super::worker::Worker;
use super::{Fabric, Failure};
use crate::backend::RunPairs;
use crate::backend::socket::StopSignal;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind};
use crate::ids::RegionId;
use crate::landed::Landing;
use crate::mem::Memory;
use crate::mem::region::Registrar;
use crate::sync::{Arc, Condvar, Mutex, thread};

/// What a registration is to a peer: base and key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LocalKey {
    pub(crate) base: u64,
    pub(crate) key: Bytes,
}

/// A checked operation without its arrival.
pub(crate) struct Transfer {
    pub(crate) is_read: bool,
    pub(crate) runs: Arc<RunPairs>,
    pub(crate) landing: Arc<Landing>,
}

/// How far a transfer has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Moved {
    /// All of it.
    All,
    /// It was cut off, and nobody knows whether the library goes on with it.
    CutOff,
}

/// How the thread has ended.
#[derive(Debug, Clone, Default)]
pub(super) struct End {
    /// Every transfer was over, and the provider is gone.
    pub(super) is_clean: bool,
    /// The provider was left as it is, and may still touch memory.
    pub(super) is_left: bool,
    /// It was left with a transfer of this side under way.
    pub(super) is_cut_off: bool,
    /// Why the thread has ended by itself.
    pub(super) failure: Option<Failure>,
}

pub(super) enum Command {
    Connect(Bytes, Vec<Bytes>, Arc<Targets>, Answer<()>),
    Register(RegionId, Arc<Memory>, Answer<LocalKey>),
    /// The answer says whether the library has let go of it.
    Forget(RegionId, Answer<bool>),
    Move(Transfer, Answer<()>),
}

/// A handle of the thread.
pub(crate) struct Mover {
    shared: Arc<Shared>,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
}

/// What other threads see of it.
pub(crate) struct Shared {
    queue: Mutex<Queue>,
    ended: Condvar,
    wake: OwnedFd,
    /// Readable once the thread has ended, whoever wanted that.
    death: StopSignal,
    end: Mutex<End>,
    /// What is registered, for those who ask.
    known: Mutex<BTreeSet<RegionId>>,
}

#[derive(Default)]
struct Queue {
    commands: VecDeque<Command>,
    is_stopping: bool,
    has_ended: bool,
}

struct Slot<T> {
    result: Mutex<Option<Result<T, Error>>>,
    changed: Condvar,
}

/// The duty to answer one command.
pub(super) struct Answer<T>(Arc<Slot<T>>);

/// The other end of an [`Answer`].
struct Promise<T>(Arc<Slot<T>>);

fn promise<T>() -> (Answer<T>, Promise<T>) {
    let slot = Arc::new(Slot {
        result: Mutex::new(None),
        changed: Condvar::new(),
    });
    (Answer(Arc::clone(&slot)), Promise(slot))
}

impl<T> Answer<T> {
    pub(super) fn give(self, result: Result<T, Error>) {
        self.settle(result);
    }

    /// The first one counts.
    fn settle(&self, result: Result<T, Error>) {
        let mut slot = self.0.result.lock();
        slot.get_or_insert(result);
        self.0.changed.notify_all();
    }
}

impl<T> Drop for Answer<T> {
    fn drop(&mut self) {
        self.settle(Err(ErrorKind::Closed.into()));
    }
}

impl<T> Promise<T> {
    /// Waits for the answer, which the end of the thread gives at the latest.
    fn wait(self) -> Result<T, Error> {
        let mut result = self.0.result.lock();
        loop {
            if let Some(result) = result.take() {
                return result;
            }
            self.0.changed.wait(&mut result);
        }
    }

    /// As [`Promise::wait`], until the deadline.
    fn wait_within(self, what: &'static str, deadline: Deadline) -> Result<T, Error> {
        let mut result = self.0.result.lock();
        loop {
            if let Some(result) = result.take() {
                return result;
            }
            if deadline.has_passed() {
                let deadline_ms = deadline.allowed_ms();
                return Err(ErrorKind::DeadlineExceeded { what, deadline_ms }.into());
            }
            let until = deadline.instant();
            self.0.changed.wait_until(&mut result, until);
        }
    }
}

impl Mover {
    /// Starts the thread and opens the provider in it; gives back the address of the endpoint.
    pub(crate) fn start<F: Fabric>(
        name: &str,
        open: impl FnOnce() -> Result<F, Error> + Send + 'static,
    ) -> Result<(Self, Bytes), Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::system("eventfd", errno))?;
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue::default()),
            ended: Condvar::new(),
            wake,
            death: StopSignal::new()?,
            end: Mutex::new(End {
                is_clean: true,
                ..End::default()
            }),
            known: Mutex::new(BTreeSet::new()),
        });
        let (answer, address) = promise();
        let inside = Arc::clone(&shared);
        let body = move || {
            let end = AtEnd(Arc::clone(&inside));
            let opened = open().and_then(|mut fabric| {
                let address = fabric.address()?;
                Ok((fabric, address))
            });
            match opened {
                Ok((fabric, address)) => {
                    answer.give(Ok(address));
                    Worker::new(fabric, &inside).run();
                }
                Err(error) => answer.give(Err(error)),
            }
            drop(end);
        };
        let spawned = thread::Builder::new().name(name.into()).spawn(body);
        let thread = spawned.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
            Error::from(ErrorKind::System {
                call: "clone",
                errno,
            })
        })?;
        let mover = Self {
            shared,
            thread: Mutex::new(Some(thread)),
        };
        let address = address.wait()?;
        Ok((mover, address))
    }

    /// What other threads see.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Ends the thread and waits for that: nothing of the provider is used here afterwards.
    pub(crate) fn stop(&self) {
        self.shared.queue.lock().is_stopping = true;
        self.shared.raise();
        self.shared.wait_for_end();
        let taken = self.thread.lock().take();
        if let Some(handle) = taken {
            // A panic of the thread was reported by its own hook.
            let _ = handle.join();
        }
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    /// What has been asked since the last time, and whether the thread is to end.
    pub(super) fn take(&self) -> (VecDeque<Command>, bool) {
        let mut queue = self.queue.lock();
        (std::mem::take(&mut queue.commands), queue.is_stopping)
    }

    /// The thread ends now.
    pub(super) fn set_end(&self, end: End) {
        *self.end.lock() = end;
    }

    fn wait_for_end(&self) {
        let mut queue = self.queue.lock();
        while !queue.has_ended {
            self.ended.wait(&mut queue);
        }
    }

    /// Readable when something was asked.
    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Takes what made [`Shared::wake`] readable.
    pub(super) fn clear_wake(&self) {
        let mut counter = [0u8; 8];
        // Nothing to read: another round.
        let _ = rustix::io::read(&self.wake, &mut counter);
    }

    fn raise(&self) {
        // Fails only when the counter is full, and then it is readable already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn ask<T>(&self, command: impl FnOnce(Answer<T>) -> Command) -> Result<T, Error> {
        self.submit(command)?.wait()
    }

    fn submit<T>(&self, command: impl FnOnce(Answer<T>) -> Command) -> Result<Promise<T>, Error> {
        let (answer, promise) = promise();
        let command = command(answer);
        {
            let mut queue = self.queue.lock();
            if queue.is_stopping || queue.has_ended {
                // Dropped outside of the lock, and answered by that.
                drop(queue);
                drop(command);
                return self.closed().map(|()| promise);
            }
            queue.commands.push_back(command);
        }
        self.raise();
        Ok(promise)
    }

    /// An error, if the provider has failed.
    fn closed(&self) -> Result<(), Error> {
        match &self.end.lock().failure {
            Some(failure) => Err(failure.clone().lost()),
            None => Ok(()),
        }
    }

    /// Makes the endpoint of the peer known, with the keys of its regions, and waits until it answers.
    pub(crate) fn connect(
        &self,
        address: Bytes,
        keys: Vec<Bytes>,
        targets: Arc<Targets>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        self.submit(|answer| Command::Connect(address, keys, targets, answer))?
            .wait_within("connection of the endpoint", deadline)
    }

    /// Registers memory, and keeps it until the library lets go of it: after [`Registrar::forget`], or at the
    /// end of the thread.
    pub(crate) fn register(&self, id: RegionId, memory: Arc<Memory>) -> Result<LocalKey, Error> {
        let key = self.ask(|answer| Command::Register(id, memory, answer))?;
        self.known.lock().insert(id);
        Ok(key)
    }

    /// Those of these regions that are not registered, each once.
    pub(crate) fn unknown(&self, regions: impl Iterator<Item = RegionId>) -> BTreeSet<RegionId> {
        let known = self.known.lock();
        regions.filter(|region| !known.contains(region)).collect()
    }

    /// Moves all of it; the peer has it in its memory, or this side in its own, when this returns
    /// [`Moved::All`]. On an error nothing of it is moved any more by this side. One caller at a time.
    pub(crate) fn transfer(&self, transfer: Transfer) -> Result<Moved, Error> {
        let Err(error) = self.ask(|answer| Command::Move(transfer, answer)) else {
            return Ok(Moved::All);
        };
        // No other answer than the end of the thread is an error.
        self.wait_for_end();
        match self.end.lock().is_cut_off {
            true => Ok(Moved::CutOff),
            false => Err(error),
        }
    }

    /// Why the thread has ended by itself.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.end.lock().failure.clone()
    }

    /// Readable once the thread has ended.
    pub(crate) fn death(&self) -> BorrowedFd<'_> {
        self.death.as_fd()
    }

    /// Whether the thread has ended. The provider's objects are gone then, unless [`Shared::is_left`].
    pub(crate) fn has_ended(&self) -> bool {
        self.queue.lock().has_ended
    }

    /// Whether every transfer was over when the thread ended, and the provider is gone.
    pub(crate) fn is_clean(&self) -> bool {
        self.end.lock().is_clean
    }

    /// Whether the provider was left as it is, and may still touch memory.
    pub(crate) fn is_left(&self) -> bool {
        self.end.lock().is_left
    }
}

impl Registrar for Shared {
    fn forget(&self, region: RegionId) -> bool {
        self.known.lock().remove(&region);
        match self.ask(|answer| Command::Forget(region, answer)) {
            Ok(has_let_go) => has_let_go,
            // The thread ends, and everything is forgotten only when it has, if it is at all.
            Err(_) => {
                self.wait_for_end();
                !self.is_left()
            }
        }
    }

    fn is_over(&self) -> bool {
        self.has_ended() && !self.is_left()
    }
}

/// However the thread ends, it is known.
struct AtEnd(Arc<Shared>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        let shared = &self.0;
        if thread::panicking() {
            // Whatever it was doing, nobody has ended that.
            shared.set_end(End {
                is_left: true,
                is_cut_off: true,
                ..End::default()
            });
        }
        let left = {
            let mut queue = shared.queue.lock();
            queue.has_ended = true;
            shared.ended.notify_all();
            std::mem::take(&mut queue.commands)
        };
        drop(left);
        shared.death.raise();
    }
}
