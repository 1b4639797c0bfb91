//! One connection to one incarnation of a peer.
//!
//! It may be a row of connections, one after the other, to the same life of the peer (`session.rs`). A peer that is
//! connected anew, or restarted, is another `Peer` with another number; the old one can only drain (I-14).
//!
//! **What is protected by what.** `in_flight` guards the operations that the link has, and whether the
//! connection has ended; `regions` guards the peer's registrations and how many of our operations touch
//! each. The queue has its own lock.
//! **Lock order.** All three are leaves; none is held over a call into the link.

use std::{collections::BTreeMap, time::Instant};

use smallvec::SmallVec;

use crate::{
    agent::metadata::AgentMetadata,
    backend::{Access, Caps, Link, Quiesce},
    deadline::Deadline,
    engine::{handle::Operation, notify, queue::Queue},
    error::{Cause, Error, ErrorKind},
    ids::{Incarnation, OpId, PeerId, PoolId, RegionId},
    mem::PoolGeometry,
    sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering},
    visibility::Visibility,
};

/// A pool of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemotePool {
    pub(crate) region: RegionId,
    pub(crate) generation: u32,
    pub(crate) geometry: PoolGeometry,
}

pub(crate) struct Peer {
    pub(crate) id: PeerId,
    pub(crate) metadata: AgentMetadata,
    pub(crate) link: Arc<dyn Link>,
    pub(crate) queue: Arc<Queue>,
    caps: Caps,
    in_flight: Mutex<InFlight>,
    regions: Arc<RemoteRegions>,
    last_progress: Mutex<Instant>,
    /// Why the connection has broken, while there is no other one.
    suspended: Mutex<Option<Cause>>,
    /// Items that the worker has taken.
    steps: AtomicU64,
    /// Set with `in_flight.down`, for whoever holds another lock.
    is_down: AtomicBool,
}

#[derive(Debug, Default)]
struct InFlight {
    operations: BTreeMap<OpId, Entry>,
    down: Option<(Cause, Quiesce)>,
}

#[derive(Debug)]
struct Entry {
    operation: Arc<Operation>,
    /// `Link::post` has not returned: the worker owns the end.
    is_executing: bool,
    /// The completion came before `Link::post` returned.
    early: Option<Result<Visibility, Error>>,
}

/// How many operations of ours touch each region of the peer.
#[derive(Debug)]
pub(crate) struct RemoteRegions {
    queue: Arc<Queue>,
    regions: Mutex<BTreeMap<RegionId, RemoteRegion>>,
}

#[derive(Debug, Default)]
struct RemoteRegion {
    outstanding: u64,
    is_revoked: bool,
}

/// Keeps count of an operation in the regions of the peer; the last one of a revoked region answers the
/// revocation.
#[derive(Debug)]
pub(crate) struct RemoteHold {
    regions: Arc<RemoteRegions>,
    held: SmallVec<[RegionId; 2]>,
}

/// What the worker does with an operation after `Link::post` has returned.
pub(crate) enum AfterPost {
    /// Wait for the completion.
    Wait,
    End(Result<Visibility, Error>),
    Lose(Cause),
}

impl Peer {
    pub(crate) fn new(
        id: PeerId,
        metadata: AgentMetadata,
        link: Arc<dyn Link>,
        queue: Arc<Queue>,
    ) -> Self {
        let regions = metadata
            .regions
            .iter()
            .map(|r| (r.id, RemoteRegion::default()))
            .collect();
        Self {
            id,
            caps: link.caps(),
            link,
            in_flight: Mutex::new(InFlight::default()),
            regions: Arc::new(RemoteRegions {
                queue: queue.clone(),
                regions: Mutex::new(regions),
            }),
            queue,
            metadata,
            last_progress: Mutex::new(Instant::now()),
            suspended: Mutex::new(None),
            steps: AtomicU64::new(0),
            is_down: AtomicBool::new(false),
        }
    }

    pub(crate) fn incarnation(&self) -> Incarnation {
        self.metadata.incarnation
    }

    pub(crate) fn caps(&self) -> Caps {
        self.caps
    }

    /// One of the peer's pools.
    pub(crate) fn pool(&self, pool: PoolId) -> Result<RemotePool, Error> {
        let info = self
            .metadata
            .pool(pool)
            .ok_or(ErrorKind::UnknownPool { pool })?;
        let region = self
            .metadata
            .region(info.region)
            .ok_or(ErrorKind::UnknownPool { pool })?;
        let is_revoked = self
            .regions
            .regions
            .lock()
            .get(&region.id)
            .is_none_or(|r| r.is_revoked);
        if is_revoked {
            return Err(ErrorKind::PoolRevoked { pool }.into());
        }
        Ok(RemotePool {
            region: region.id,
            generation: region.generation,
            geometry: info.geometry,
        })
    }

    /// Ends the connection. Answers whether its receive thread has ended, and what is proven of the peer: nothing
    /// (I-11) while that thread is inside of an event and may bring more.
    pub(crate) fn close_within(&self, deadline: Deadline) -> (bool, Quiesce) {
        match self.link.close_within(deadline) {
            true => (true, self.link.quiesce()),
            false => {
                let reason = "a thread is inside of an event of the connection".to_owned();
                (false, Quiesce::Unprovable(Cause::Transfer(reason)))
            }
        }
    }

    pub(crate) fn touch(&self) {
        *self.last_progress.lock() = Instant::now();
    }

    pub(crate) fn last_progress(&self) -> Instant {
        *self.last_progress.lock()
    }

    /// The connection has broken, or there is one again.
    pub(crate) fn suspend(&self, cause: Option<Cause>) {
        *self.suspended.lock() = cause;
    }

    /// Messages that did not go, or of which nobody can tell; of a connection that has ended, those at its end.
    pub(crate) fn unsent_messages(&self) -> u64 {
        self.queue.unsent_frames(self.link.unsent_messages()) as u64
    }

    /// Why there is no connection, while another one may come.
    pub(crate) fn suspended(&self) -> Option<Cause> {
        self.suspended.lock().clone()
    }

    /// The worker has taken an item.
    pub(crate) fn step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Why the connection has ended, and whether the peer may still write.
    pub(crate) fn down(&self) -> Option<(Cause, Quiesce)> {
        self.in_flight.lock().down.clone()
    }

    /// Whether the connection has ended and nothing that the peer has begun can land any more. Asked again
    /// each time: the proof may come after the end.
    pub(crate) fn is_proven_quiet(&self) -> bool {
        match self.down() {
            None => false,
            Some((_, Quiesce::Proven)) => true,
            Some(_) => self.link.quiesce() == Quiesce::Proven,
        }
    }

    /// Whether the peer writes by itself, and may go on to (I-21).
    pub(crate) fn may_still_write(&self) -> bool {
        self.caps.access == Access::Direct && !self.is_proven_quiet()
    }

    /// [`Peer::down`] without its lock.
    pub(crate) fn is_down(&self) -> bool {
        self.is_down.load(Ordering::Acquire)
    }

    /// The worker is about to call `Link::post`. Refused once the connection has ended.
    pub(crate) fn begin_execution(&self, operation: &Arc<Operation>) -> Result<(), Cause> {
        let mut in_flight = self.in_flight.lock();
        if let Some((cause, _)) = &in_flight.down {
            return Err(cause.clone());
        }
        let entry = Entry {
            operation: operation.clone(),
            is_executing: true,
            early: None,
        };
        in_flight.operations.insert(operation.posted.id, entry);
        Ok(())
    }

    /// `Link::post` has returned; `result` is `None` while the link has the operation.
    pub(crate) fn end_execution(
        &self,
        op: OpId,
        result: Option<Result<Visibility, Error>>,
    ) -> AfterPost {
        let mut in_flight = self.in_flight.lock();
        let down = in_flight.down.clone();
        let Some(entry) = in_flight.operations.get_mut(&op) else {
            return AfterPost::Wait;
        };
        let after = match (result.or_else(|| entry.early.take()), down) {
            (Some(result), _) => AfterPost::End(result),
            (None, Some((cause, Quiesce::Proven))) => AfterPost::End(Err(self.down_error(cause))),
            (None, Some((cause, Quiesce::Unprovable(_)))) => AfterPost::Lose(cause),
            (None, None) => {
                entry.is_executing = false;
                return AfterPost::Wait;
            }
        };
        in_flight.operations.remove(&op);
        after
    }

    /// An operation that the link has.
    pub(crate) fn in_flight(&self, op: OpId) -> Option<Arc<Operation>> {
        let in_flight = self.in_flight.lock();
        Some(in_flight.operations.get(&op)?.operation.clone())
    }

    /// The link reports an end. Gives the operation back if the end is the caller's to record.
    pub(crate) fn complete(
        &self,
        op: OpId,
        result: Result<Visibility, Error>,
    ) -> Option<(Arc<Operation>, Result<Visibility, Error>)> {
        let mut in_flight = self.in_flight.lock();
        let entry = in_flight.operations.get_mut(&op)?;
        if entry.is_executing {
            entry.early = Some(result);
            return None;
        }
        in_flight
            .operations
            .remove(&op)
            .map(|entry| (entry.operation, result))
    }

    /// Records the end of the connection; the first report wins. Gives back the operations whose end is
    /// the caller's to record: all but the one that the worker has in `Link::post`.
    pub(crate) fn mark_down(&self, cause: Cause, quiesce: Quiesce) -> Option<Vec<Arc<Operation>>> {
        let mut in_flight = self.in_flight.lock();
        if in_flight.down.is_some() {
            return None;
        }
        in_flight.down = Some((cause, quiesce));
        self.is_down.store(true, Ordering::Release);
        *self.suspended.lock() = None;
        let all = std::mem::take(&mut in_flight.operations);
        let (executing, waiting): (BTreeMap<_, _>, BTreeMap<_, _>) =
            all.into_iter().partition(|(_, entry)| entry.is_executing);
        in_flight.operations = executing;
        Some(waiting.into_values().map(|entry| entry.operation).collect())
    }

    pub(crate) fn down_error(&self, cause: Cause) -> Error {
        ErrorKind::PeerDown {
            peer: self.id,
            cause,
        }
        .into()
    }

    /// Counts an operation in these regions of the peer: in all of them or, if one is revoked, in none.
    pub(crate) fn hold_regions(&self, regions: &[RegionId]) -> Result<RemoteHold, Error> {
        let mut table = self.regions.regions.lock();
        let revoked = regions
            .iter()
            .find(|id| table.get(id).is_none_or(|r| r.is_revoked));
        if let Some(region) = revoked {
            let pools = &self.metadata.pools;
            let pool = pools
                .iter()
                .find(|p| p.region == *region)
                .map_or(PoolId(0), |p| p.id);
            return Err(ErrorKind::PoolRevoked { pool }.into());
        }
        for id in regions {
            table.entry(*id).or_default().outstanding += 1;
        }
        Ok(RemoteHold {
            regions: self.regions.clone(),
            held: SmallVec::from_slice(regions),
        })
    }

    /// The peer closes a region: no further operation, and an answer once none is left.
    pub(crate) fn revoke(&self, region: RegionId) {
        let is_quiet = {
            let mut table = self.regions.regions.lock();
            let entry = table.entry(region).or_default();
            entry.is_revoked = true;
            entry.outstanding == 0
        };
        if is_quiet {
            self.regions.answer(region);
        }
    }
}

impl RemoteRegions {
    fn answer(&self, region: RegionId) {
        // Behind everything posted before. A closed queue means a lost peer, which counts as an answer.
        let _ = self
            .queue
            .push_engine_frame(notify::encode_revoke_ack(region));
    }
}

impl Drop for RemoteHold {
    fn drop(&mut self) {
        let mut quiet = Vec::new();
        {
            let mut table = self.regions.regions.lock();
            for id in &self.held {
                let Some(region) = table.get_mut(id) else {
                    continue;
                };
                region.outstanding -= 1;
                if region.is_revoked && region.outstanding == 0 {
                    quiet.push(*id);
                }
            }
        }
        for region in quiet {
            self.regions.answer(region);
        }
    }
}
