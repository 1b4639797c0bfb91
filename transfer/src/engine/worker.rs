//! The worker of a peer: takes the queue item by item. Whoever posts or waits does the same for an operation,
//! with the same turn, when the worker is not at it.

use crate::{
    backend::{Access, Posted, Readiness},
    deadline::Deadline,
    engine::{
        Engine, Op,
        handle::Operation,
        peer::{AfterPost, Peer},
        queue::Item,
    },
    error::{Cause, Error, ErrorKind},
    fault,
    obs::{Event, add},
    sync::{Arc, thread},
    visibility::Visibility,
};

/// A running worker. However it ends, it is counted as ended.
struct Worker {
    engine: Arc<Engine>,
    peer: Arc<Peer>,
}

impl Worker {
    fn run(self) {
        while let Some((item, _turn)) = self.peer.queue.next() {
            self.engine.execute(&self.peer, item);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if thread::panicking() {
            let reason = "its worker panicked".to_owned();
            self.engine
                .fail_peer(&self.peer, Cause::PeerLost { reason });
        }
        self.engine.workers.update(|workers| workers.running -= 1);
    }
}

impl Engine {
    pub(super) fn spawn_worker(this: &Arc<Self>, peer: &Arc<Peer>) -> Result<(), Error> {
        if !this.has_workers {
            return Ok(());
        }
        this.workers.with(|workers| workers.running += 1);
        let worker = Worker {
            engine: this.clone(),
            peer: peer.clone(),
        };
        let work = move || worker.run();
        let name = format!("kvgate-peer-{}", peer.id);
        match thread::Builder::new().name(name).spawn(work) {
            Ok(handle) => {
                this.workers.with(|workers| workers.handles.push(handle));
                Ok(())
            }
            // The closure was dropped, and the worker with it.
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(0);
                Err(Error::with_source(
                    ErrorKind::System {
                        call: "thread spawn",
                        errno,
                    },
                    error,
                ))
            }
        }
    }

    /// Executes one item. Errors of a broken link end the connection.
    pub(super) fn execute(&self, peer: &Arc<Peer>, item: Item) {
        self.note_step(peer);
        let result = match item {
            Item::Operation(operation) => match self.run_operation(peer, &operation) {
                Some(cause) => return self.fail_peer(peer, cause),
                None => return,
            },
            Item::Broken(cause) => return self.fail_peer(peer, cause),
            Item::Frame(frame) => {
                add(&self.counters.notes_sent, 1);
                peer.link.send(&frame)
            }
            Item::Progress(counter) => peer.link.send_progress(counter),
            Item::GoOn => {
                peer.link.go_on();
                Ok(())
            }
            // Checked now, not when it was asked: a revocation does not wait for what is queued.
            Item::Request(request) => {
                let source = self.resolve(&request.runs);
                peer.link.serve(&request, source)
            }
            #[cfg(all(feature = "fault-injection", not(kv_loom)))]
            Item::Forged(arrival, level) => peer.link.announce(&arrival, level),
        };
        if let Err(error) = result {
            self.fail_peer(peer, Cause::lost(&error));
        }
    }

    /// Executes an operation on the thread that posts it, if that takes no longer than the copy and no other
    /// operation is before it. Otherwise it is for the queue.
    pub(crate) fn run_here(this: &Arc<Self>, peer: &Arc<Peer>, operation: &Arc<Operation>) -> bool {
        let posted = &operation.posted;
        let may_be_short = posted.bytes <= this.config.inline_bytes
            && this.has_workers
            && peer.caps().access == Access::Direct;
        if !may_be_short {
            return false;
        }
        let Some(_turn) = peer.queue.try_turn_for(operation) else {
            return false;
        };
        if peer.link.readiness(posted) != Readiness::Copies {
            return false;
        }
        // This thread may be held up like any other.
        Self::watch_over(this);
        if let Some(cause) = this.run_operation(peer, operation) {
            peer.queue.push_broken(cause);
        }
        true
    }

    /// Executes what is queued before the end of `operation`, on a thread that would only wait for it.
    pub(super) fn help_along(&self, operation: &Operation, deadline: Deadline) {
        if !self.has_workers || !operation.is_queued() {
            return;
        }
        let Ok(peer) = self.peer(operation.peer) else {
            return;
        };
        let may = |next: &Operation| {
            // About a byte per nanosecond: the wait must not last much longer than its deadline.
            let has_time = deadline.remaining().as_nanos() > u128::from(next.posted.bytes);
            has_time && peer.link.readiness(&next.posted) != Readiness::Waits
        };
        while operation.is_queued()
            && let Some((next, _turn)) = peer.queue.next_operation(may)
        {
            if let Some(cause) = self.run_operation(&peer, &next) {
                peer.queue.push_broken(cause);
            }
        }
    }

    /// Gives back why the link is broken, if it was found to be.
    fn run_operation(&self, peer: &Arc<Peer>, operation: &Arc<Operation>) -> Option<Cause> {
        if Self::is_held(peer, operation) || !operation.start() {
            return None;
        }
        if let Err(cause) = peer.begin_execution(operation) {
            self.end(operation, Err(peer.down_error(cause)));
            return None;
        }
        let posted = &operation.posted;
        posted.landing.begun();
        add(
            &self.counters.notes_sent,
            u64::from(operation.is_announced()),
        );
        let result = match peer.link.post(posted) {
            Ok(Posted::Pending) => self.announce(peer, operation, None).err().map(Err),
            Ok(Posted::Done(level)) => {
                Some(self.announce(peer, operation, Some(level)).map(|()| level))
            }
            Err(error) => Some(Err(error)),
        };
        let broken = match &result {
            Some(Err(error)) if matches!(error.kind(), ErrorKind::PeerLost { .. }) => {
                Some(Cause::lost(error))
            }
            _ => None,
        };
        match peer.end_execution(posted.id, result) {
            AfterPost::Wait => {}
            AfterPost::End(result) => self.end(operation, result),
            AfterPost::Lose(cause) => self.lose(peer, operation.clone(), cause),
        }
        broken
    }

    /// Tells the receiver of an operation that has ended with `level`, unless the link does that itself.
    fn announce(
        &self,
        peer: &Peer,
        operation: &Operation,
        level: Option<Visibility>,
    ) -> Result<(), Error> {
        let Some(arrival) = &operation.posted.arrival else {
            return Ok(());
        };
        if operation.posted.op == Op::Read {
            return Ok(());
        }
        let in_band = peer.caps().arrival_in_band;
        if let Some(level) = level.filter(|_| !in_band) {
            peer.link.announce(arrival, level)?;
        }
        if fault::duplicate_arrivals() && (in_band || level.is_some()) {
            peer.link
                .announce(arrival, level.unwrap_or(peer.caps().completion))?;
        }
        Ok(())
    }

    /// Records the end of an operation that this caller owns.
    pub(crate) fn end(&self, operation: &Operation, result: Result<Visibility, Error>) {
        let (peer, op) = (operation.peer, operation.posted.id);
        let level = result.as_ref().ok().copied();
        if let Some(level) = level {
            self.tell_here(operation, level);
        }
        operation.end(result, || {
            self.end_watch(operation, level.is_some());
            let Some(level) = level else {
                return self.count_failed(operation);
            };
            let counters = &self.counters;
            let (bytes, descriptors) = match operation.posted.op {
                Op::Write => (&counters.bytes_written, &counters.descriptors_written),
                Op::Read => (&counters.bytes_read, &counters.descriptors_read),
            };
            add(&counters.transfers, 1);
            add(bytes, operation.posted.bytes);
            add(descriptors, operation.descriptor_count);
            self.record(|| Event::Completed {
                peer,
                op,
                kind: operation.posted.op,
                level,
                bytes: operation.posted.bytes,
                descriptor_count: operation.descriptor_count,
                is_announced: operation.is_announced(),
                elapsed: operation.posted_at.elapsed(),
            });
        });
    }

    /// The arrival of a read that has landed here, weighed as if the peer had written. The operation still
    /// holds its memory and counts in its ledger.
    fn tell_here(&self, operation: &Operation, level: Visibility) {
        let posted = &operation.posted;
        let Some(arrival) = posted.arrival.as_ref().filter(|_| posted.op == Op::Read) else {
            return;
        };
        self.dispatch(operation.peer, arrival, level);
        if fault::duplicate_arrivals() {
            self.dispatch(operation.peer, arrival, level);
        }
    }

    pub(super) fn count_failed(&self, operation: &Operation) {
        add(&self.counters.failed_transfers, 1);
        self.record(|| Event::OperationFailed {
            peer: operation.peer,
            op: operation.posted.id,
            kind: operation.posted.op,
        });
    }

    /// Records that nobody can tell the end of an operation; its memory stays in flight for good.
    pub(super) fn lose(&self, peer: &Peer, operation: Arc<Operation>, cause: Cause) {
        let (op, kind) = (operation.posted.id, operation.posted.op);
        if operation.lose(cause, || add(&self.counters.unknown_transfers, 1)) {
            self.end_watch(&operation, false);
            self.record(|| Event::OperationUnknown {
                peer: peer.id,
                op,
                kind,
            });
            self.keep_for_good(operation);
        }
    }

    /// Whether a fault gate keeps the operation; it comes back by itself when the gate opens.
    #[cfg(all(feature = "fault-injection", not(kv_loom)))]
    fn is_held(peer: &Arc<Peer>, operation: &Arc<Operation>) -> bool {
        let Some(gate) = operation.hold.as_ref().filter(|gate| !gate.is_open()) else {
            return false;
        };
        let (queue, operation) = (peer.queue.clone(), operation.clone());
        gate.hold(move || {
            if let Err(error) = queue.push_operation(operation.clone(), crate::Priority::Foreground)
            {
                operation.end(Err(error), || {});
            }
        })
    }

    #[cfg(not(all(feature = "fault-injection", not(kv_loom))))]
    fn is_held(_: &Arc<Peer>, _: &Arc<Operation>) -> bool {
        false
    }
}
