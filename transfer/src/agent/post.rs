//! Posting: from a prepared transfer and a source witness to an operation in the queue (I-7, I-24).

use std::{any::Any, fmt};

use crate::{
    agent::{Agent, Arrival},
    backend::PostedOp,
    deadline::Deadline,
    engine::{
        Engine, FlightLedger, Op, PreparedTransfer, TransferHandle,
        handle::{Operation, Resources},
        peer::Peer,
        queue::{OpSlot, Queue},
    },
    error::{Error, ErrorKind},
    landed::Landing,
    obs::{Event, add},
    priority::Priority,
    source::SourceReady,
    stopwatch::Stopwatch,
    sync::Arc,
};

/// A write of at most so many bytes is copied while its reader wakes up.
const ROUSE_BYTES: u64 = 32 * 1024;

/// What goes along with an operation.
#[derive(Default)]
pub struct PostOptions {
    /// Of a write: told to the receiver when every byte is visible there. Of a read: redeemed here when
    /// every byte is visible here.
    pub arrival: Option<Arrival>,
    /// Dropped when the operation is terminal: what keeps the local memory as it is.
    pub keepalive: Option<Box<dyn Any + Send>>,
    /// Counts the operation until it is terminal.
    pub ledger: Option<Arc<FlightLedger>>,
    /// Which operations of this peer go first.
    pub priority: Priority,
    /// The operation is not executed until this gate opens.
    #[cfg(all(feature = "fault-injection", not(kv_loom)))]
    pub hold: Option<Arc<crate::fault::HoldGate>>,
}

/// A post that was not admitted: nothing has happened, and everything comes back.
#[derive(Debug)]
pub struct PostError {
    /// Why. [`ErrorKind::QueueFull`] is back-pressure: post again later.
    pub error: Error,
    /// The witness, still good.
    pub source: SourceReady,
    /// The options, as they were.
    pub options: PostOptions,
}

impl Agent {
    /// Queues an operation. `source` proves that the bytes to be moved have been written. Never blocks.
    ///
    /// # Errors
    /// Everything comes back in [`PostError`]: [`ErrorKind::QueueFull`] when there is no room now
    /// (retryable), [`ErrorKind::SourceMismatch`] when `source` is no witness for this operation, [`ErrorKind::PeerDown`], [`ErrorKind::RegionClosed`] or [`ErrorKind::PoolRevoked`]
    /// when a registration was revoked since the transfer was prepared, [`ErrorKind::FlightClosed`] when
    /// the ledger is closed.
    pub fn post(
        &self,
        transfer: &PreparedTransfer,
        source: SourceReady,
        options: PostOptions,
    ) -> Result<TransferHandle, PostError> {
        self.post_with(transfer, source, options, Queue::reserve)
    }

    /// [`Agent::post`] that waits for room until the deadline.
    ///
    /// # Errors
    /// As [`Agent::post`]; [`ErrorKind::QueueFull`] after the deadline.
    pub fn post_within(
        &self,
        transfer: &PreparedTransfer,
        source: SourceReady,
        options: PostOptions,
        deadline: Deadline,
    ) -> Result<TransferHandle, PostError> {
        self.post_with(transfer, source, options, |queue, priority| {
            Queue::reserve_within(queue, priority, deadline)
        })
    }

    fn post_with(
        &self,
        transfer: &PreparedTransfer,
        source: SourceReady,
        mut options: PostOptions,
        reserve: impl FnOnce(&Arc<Queue>, Priority) -> Result<OpSlot, Error>,
    ) -> Result<TransferHandle, PostError> {
        let stopwatch = Stopwatch::start();
        let checked = self.check_source(&source, transfer);
        match checked.and_then(|()| self.admit(transfer, &mut options, reserve)) {
            Ok(handle) => {
                self.engine()
                    .post_took(transfer.peer, transfer.op, stopwatch);
                Ok(handle)
            }
            Err(error) => {
                if matches!(error.kind(), ErrorKind::QueueFull { .. }) {
                    add(&self.engine().counters.back_pressure, 1);
                    self.engine().record(|| Event::BackPressure {
                        peer: transfer.peer,
                    });
                }
                Err(PostError {
                    error,
                    source,
                    options,
                })
            }
        }
    }

    /// Takes every resource, or none.
    fn admit(
        &self,
        transfer: &PreparedTransfer,
        options: &mut PostOptions,
        reserve: impl FnOnce(&Arc<Queue>, Priority) -> Result<OpSlot, Error>,
    ) -> Result<TransferHandle, Error> {
        let engine = self.engine();
        if engine.is_stopping() {
            return Err(ErrorKind::Closed.into());
        }
        let peer: Arc<Peer> = engine.peer(transfer.peer)?;
        let mut slot = reserve(&peer.queue, options.priority)?;
        let regions = engine.regions.hold_all(&transfer.local_regions)?;
        let remote = peer.hold_regions(&transfer.remote_regions)?;
        let outstanding = match &options.ledger {
            Some(ledger) => Some(FlightLedger::begin(ledger)?),
            None => None,
        };
        // Nothing refuses it from here on.
        let is_awaited = options.arrival.is_some() && options.priority == Priority::Foreground;
        if is_awaited && transfer.op == Op::Write && transfer.bytes() <= ROUSE_BYTES {
            peer.link.rouse();
        }
        let posted = PostedOp {
            id: engine.next_op(),
            op: transfer.op,
            priority: options.priority,
            runs: transfer.runs.clone(),
            bytes: transfer.bytes(),
            arrival: options.arrival.take(),
            landing: Arc::new(Landing::new(transfer.descriptor_count())),
        };
        let op = posted.id;
        slot.take_by(op);
        let resources = Resources {
            _regions: regions,
            _remote: remote,
            _keepalive: options.keepalive.take(),
            _slot: slot,
            _outstanding: outstanding,
        };
        let operation = Arc::new(Operation::new(
            peer.id,
            posted,
            transfer.descriptor_count(),
            resources,
            #[cfg(all(feature = "fault-injection", not(kv_loom)))]
            options.hold.clone(),
        ));
        engine.record(|| Event::Posted {
            peer: peer.id,
            op,
            kind: transfer.op,
            bytes: transfer.bytes(),
            descriptor_count: transfer.descriptor_count(),
        });
        let is_over =
            options.priority == Priority::Foreground && Engine::run_here(engine, &peer, &operation);
        if !is_over {
            let queued = peer
                .queue
                .push_operation(operation.clone(), options.priority);
            if let Err(error) = queued {
                // The connection ended between the reservation and here: the operation was admitted and has
                // failed, which the handle tells.
                engine.end(&operation, Err(error));
            }
            Engine::watch_over(engine);
        }
        Ok(TransferHandle::new(operation, engine.clone()))
    }

    fn check_source(&self, source: &SourceReady, transfer: &PreparedTransfer) -> Result<(), Error> {
        check_source(source, transfer).inspect_err(|_| {
            self.engine().record(|| Event::SourceRefused {
                peer: transfer.peer,
                kind: transfer.op,
                announced_by: source.announced_by(),
            });
        })
    }

    /// Announces an arrival that no operation stands behind.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownPeer`], [`ErrorKind::PeerDown`].
    #[cfg(all(feature = "fault-injection", not(kv_loom)))]
    pub fn forge_arrival(
        &self,
        peer: crate::ids::PeerId,
        arrival: Arrival,
        level: crate::Visibility,
    ) -> Result<(), Error> {
        self.engine().peer(peer)?.queue.push_forged(arrival, level)
    }
}

/// Whether it is a witness for this operation (I-7): own bytes are sent, a peer's bytes are read on its word.
fn check_source(source: &SourceReady, transfer: &PreparedTransfer) -> Result<(), Error> {
    let (op, peer) = (transfer.op, transfer.peer);
    let announced_by = source.announced_by();
    let expected = match op {
        Op::Write => None,
        Op::Read => Some(peer),
    };
    if announced_by == expected {
        return Ok(());
    }
    Err(ErrorKind::SourceMismatch {
        op,
        peer,
        announced_by,
    }
    .into())
}

impl fmt::Debug for PostOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostOptions")
            .field("arrival", &self.arrival)
            .field("has_keepalive", &self.keepalive.is_some())
            .field("ledger", &self.ledger)
            .field("priority", &self.priority)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for PostError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}
