//! What the thread of a [`super::mover::Mover`] does: commands, one transfer at a time, and sleep.

use std::collections::{BTreeMap, VecDeque};
use std::mem::ManuallyDrop;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::mover::{Answer, Command, End, LocalKey, Shared, Transfer};
use super::requests::{Cursor, Targets};
use super::{Fabric, Failure};
use crate::backend::socket::timespec;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind};
use crate::ids::RegionId;
use crate::mem::Memory;
use crate::sync::Arc;

/// Requests under way at once.
const WINDOW: usize = 512;
/// Longest time that requests get to end when the connection is closed.
const DRAIN: Duration = Duration::from_millis(250);
/// Longest sleep while anything is under way: not every provider tells every event.
const NAP: Duration = Duration::from_millis(1);

struct Registration {
    handle: usize,
    /// Mapped as long as it is registered: given back by [`Registration::release`] only.
    memory: ManuallyDrop<Arc<Memory>>,
}

impl Registration {
    /// The library does not know it any more.
    fn release(self) {
        drop(ManuallyDrop::into_inner(self.memory));
    }
}

enum Phase {
    Posting,
    /// Everything is posted.
    Draining,
    /// Everything is done on this side.
    Flushing,
}

struct Running {
    transfer: Transfer,
    cursor: Cursor,
    phase: Phase,
    answer: Answer<()>,
}

pub(super) struct Worker<'a, F> {
    /// A panic leaves it as it is, and the memory with it.
    fabric: ManuallyDrop<F>,
    shared: &'a Shared,
    regions: BTreeMap<RegionId, Registration>,
    targets: Option<Arc<Targets>>,
    /// Told once the peer's endpoint has answered.
    connecting: Option<Answer<()>>,
    waiting: VecDeque<(Transfer, Answer<()>)>,
    running: Option<Running>,
    /// Regions to be forgotten once no transfer uses them.
    forgetting: Vec<(RegionId, Answer<bool>)>,
}

impl<'a, F: Fabric> Worker<'a, F> {
    pub(super) fn new(fabric: F, shared: &'a Shared) -> Self {
        Self {
            fabric: ManuallyDrop::new(fabric),
            shared,
            regions: BTreeMap::new(),
            targets: None,
            connecting: None,
            waiting: VecDeque::new(),
            running: None,
            forgetting: Vec::new(),
        }
    }

    /// Until it is told to stop, or the provider fails.
    pub(super) fn run(mut self) {
        let failed = loop {
            let (commands, is_stopping) = self.shared.take();
            if is_stopping {
                break None;
            }
            for command in commands {
                self.execute(command);
            }
            let turned = self.turn().and_then(|has_moved| match has_moved {
                true => Ok(()),
                false => self.sleep(),
            });
            if let Err(failure) = turned {
                break Some(failure);
            }
        };
        self.end(failed);
    }

    /// Lets requests that are under way end, as long as the peer takes part: what is cut off in the middle
    /// is what libraries bear worst.
    fn drain(&mut self) {
        let deadline = Deadline::after(DRAIN);
        while self.fabric.pending() > 0 && !deadline.has_passed() {
            let turned = self
                .fabric
                .progress()
                .and_then(|has_moved| match has_moved {
                    true => Ok(()),
                    false => self.sleep(),
                });
            if turned.is_err() {
                return;
            }
        }
    }

    /// Takes the provider apart, and only then says how the transfer ended.
    fn end(mut self, failed: Option<Failure>) {
        if failed.is_none() {
            self.drain();
        }
        let has_running = self.running.is_some();
        let has_requests = self.fabric.pending() > 0;
        let is_gone = ManuallyDrop::into_inner(self.fabric).end();
        if is_gone {
            let regions = std::mem::take(&mut self.regions);
            regions.into_values().for_each(Registration::release);
        }
        self.shared.set_end(End {
            is_clean: is_gone && !has_running && !has_requests,
            is_left: !is_gone,
            is_cut_off: !is_gone && has_running,
            failure: failed.clone(),
        });
        let answers = self.running.take().map(|running| running.answer);
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        let answers: Vec<_> = (self.connecting.take().into_iter())
            .chain(answers)
            .chain(waiting.map(|(_, answer)| answer))
            .collect();
        for answer in answers {
            answer.give(Err(match &failed {
                Some(failure) => failure.clone().lost(),
                None => ErrorKind::Closed.into(),
            }));
        }
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Connect(address, keys, targets, answer) => {
                self.targets = Some(targets);
                match self.fabric.connect(&address, &keys) {
                    Ok(()) => self.connecting = Some(answer),
                    Err(failure) => answer.give(Err(failure.into())),
                }
            }
            Command::Register(id, memory, answer) => answer.give(self.register(id, memory)),
            Command::Forget(id, answer) => {
                self.forgetting.push((id, answer));
                self.forget_unused();
            }
            Command::Move(transfer, answer) => self.waiting.push_back((transfer, answer)),
        }
    }

    /// Forgets what no transfer uses any more.
    fn forget_unused(&mut self) {
        for (id, answer) in std::mem::take(&mut self.forgetting) {
            match self.is_used(id) {
                true => self.forgetting.push((id, answer)),
                false => answer.give(Ok(self.forget(id))),
            }
        }
    }

    fn is_used(&self, id: RegionId) -> bool {
        let running = self.running.iter().map(|running| &running.transfer);
        let waiting = self.waiting.iter().map(|(transfer, _)| transfer);
        let mut used = running
            .chain(waiting)
            .flat_map(|transfer| transfer.runs.local_regions());
        used.any(|used| used == id)
    }

    /// Whether the library has let go of it. If not, it is kept until the end, and so is its memory.
    fn forget(&mut self, id: RegionId) -> bool {
        let Some(known) = self.regions.get(&id) else {
            return true;
        };
        let has_let_go = self.fabric.unregister(known.handle).is_ok();
        if has_let_go && let Some(known) = self.regions.remove(&id) {
            known.release();
        }
        has_let_go
    }

    fn register(&mut self, id: RegionId, memory: Arc<Memory>) -> Result<LocalKey, Error> {
        if self.regions.contains_key(&id) {
            return Err(Failure::inside(F::KIND, "the region is registered already").into());
        }
        let handle = self.fabric.register(&memory)?;
        let key = self.fabric.key(handle, &memory);
        let memory = ManuallyDrop::new(memory);
        self.regions.insert(id, Registration { handle, memory });
        if key.is_err() {
            // Nobody will ask for it. What the library keeps all the same is kept here, too.
            self.forget(id);
        }
        Ok(key?)
    }

    /// One round; whether anything has moved.
    fn turn(&mut self) -> Result<bool, Failure> {
        let mut has_moved = self.fabric.progress()?;
        if self.fabric.pending() == 0
            && let Some(answer) = self.connecting.take()
        {
            answer.give(Ok(()));
        }
        if self.running.is_none()
            && let Some((transfer, answer)) = self.waiting.pop_front()
        {
            let cursor = Cursor::new(transfer.is_read, self.fabric.largest_bytes());
            self.running = Some(Running {
                transfer,
                cursor,
                phase: Phase::Posting,
                answer,
            });
        }
        let Some(running) = &mut self.running else {
            return Ok(has_moved);
        };
        if matches!(running.phase, Phase::Posting) {
            let Some(targets) = &self.targets else {
                return Err(Failure::inside(F::KIND, "transfer before the connection"));
            };
            has_moved |= post(
                &mut *self.fabric,
                &self.regions,
                targets,
                &running.transfer,
                &mut running.cursor,
            )?;
            if running.cursor.is_at_end() {
                running.phase = Phase::Draining;
            }
        }
        self.finish(has_moved)
    }

    /// The steps after the last request was posted.
    fn finish(&mut self, mut has_moved: bool) -> Result<bool, Failure> {
        let Some(running) = &mut self.running else {
            return Ok(has_moved);
        };
        if matches!(running.phase, Phase::Draining) && self.fabric.pending() == 0 {
            has_moved = true;
            running.phase = Phase::Flushing;
            if !running.transfer.is_read {
                self.fabric.flush()?;
            }
        }
        let is_over = matches!(running.phase, Phase::Flushing) && self.fabric.pending() == 0;
        if is_over && let Some(running) = self.running.take() {
            running.answer.give(Ok(()));
            self.forget_unused();
            return Ok(true);
        }
        Ok(has_moved)
    }

    /// Until the provider or a command wakes it.
    fn sleep(&mut self) -> Result<(), Failure> {
        if !self.fabric.arm()? {
            return Ok(());
        }
        // A transfer that waits for room has nothing under way that would wake it.
        let is_busy =
            self.fabric.pending() > 0 || self.running.is_some() || self.connecting.is_some();
        let nap = is_busy.then(|| timespec(NAP));
        let (event, wake) = (self.fabric.event_fd(), self.shared.wake());
        let mut fds = [
            PollFd::new(&event, PollFlags::IN),
            PollFd::new(&wake, PollFlags::IN),
        ];
        match poll(&mut fds, nap.as_ref()) {
            // An error of poll leads back to the queue and the provider, too.
            Ok(_) | Err(Errno::INTR) | Err(_) => {}
        }
        if !fds[1].revents().is_empty() {
            self.shared.clear_wake();
        }
        Ok(())
    }
}

/// Posts what the window and the provider take.
fn post<F: Fabric>(
    fabric: &mut F,
    regions: &BTreeMap<RegionId, Registration>,
    targets: &Targets,
    transfer: &Transfer,
    cursor: &mut Cursor,
) -> Result<bool, Failure> {
    let mut has_moved = false;
    let mut home: Option<(RegionId, usize)> = None;
    while fabric.pending() < WINDOW {
        let next = cursor.next(&transfer.runs, targets);
        let next = next.map_err(|error| Failure::inside(F::KIND, error.to_string()))?;
        let Some(request) = next else { break };
        let handle = match home {
            Some((region, handle)) if region == request.region => handle,
            _ => {
                let found = regions.get(&request.region).map(|known| known.handle);
                found.ok_or_else(|| Failure::inside(F::KIND, "local memory is not registered"))?
            }
        };
        home = Some((request.region, handle));
        if !fabric.post(&request, handle)? {
            cursor.put_back(request);
            break;
        }
        transfer.landing.moved(request.bytes as u64);
        has_moved = true;
    }
    Ok(has_moved)
}
