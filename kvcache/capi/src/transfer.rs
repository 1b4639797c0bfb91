//! Transfers: two lists of slots, checked once, posted as often as needed.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use kvgate_transfer::{
    AgentEvent, Arrival, ChunkId, Deadline, DescriptorList, Epoch, ErrorKind, Incarnation, Op,
    PeerId, PoolId, PostOptions, PreparedTransfer, Priority, SourceReady, StageId, Status,
    TransferHandle, Visibility,
};

use crate::agent::kv_agent;
use crate::arg::{self, Versioned, kv_incarnation};
use crate::handle::{Handle, handle};
use crate::status::{Failure, Outcome, guard, kv_status};
use crate::wake::wait_for;

/// A list of slots. Two of them make a transfer: the n-th local slot goes to the n-th remote slot.
pub struct kv_descriptors {
    _opaque: (),
}

handle!(kv_descriptors => Mutex<DescriptorList>, "descriptor list");

/// A transfer that was checked and can be posted.
pub struct kv_prepared {
    _opaque: (),
}

pub(crate) struct PreparedObject {
    prepared: PreparedTransfer,
    peer: PeerId,
}

handle!(kv_prepared => PreparedObject, "prepared transfer");

/// One posted operation.
pub struct kv_transfer {
    _opaque: (),
}

pub(crate) struct TransferObject {
    handle: Mutex<TransferHandle>,
    waker: Waker,
}

handle!(kv_transfer => TransferObject, "transfer");

/// Which way a transfer goes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_op {
    /// Local slots are copied into slots of the peer.
    Write = 1,
    /// Slots of the peer are copied into local slots. The peer has to keep them as they are until it is told
    /// that the read has ended; the transfer itself tells it nothing.
    Read = 2,
}

/// What orders the writing of the source before the transfer.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_source {
    /// For a write: the calling thread has written the bytes, or has synchronised with the thread that did.
    HostWritten = 1,
    /// For a read: the peer has said in a message that its slots are complete and stay as they are, and the
    /// calling thread has taken that message, or has synchronised with the thread that did.
    Announced = 2,
}

/// Which operations of one peer go first.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_priority {
    /// Somebody waits for the bytes.
    Foreground = 0,
    /// Nobody waits: it goes when nothing of the foreground is queued, at the latest after 16 of those, and
    /// is not in order with messages.
    Background = 1,
}

/// How far the bytes of an operation have come.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_visibility {
    /// The source may be reused. Nothing is said about the destination.
    LocalDone = 1,
    /// The destination memory holds the bytes; a reader may still see old ones.
    RemoteDelivered = 2,
    /// A reader that is ordered after this sees the bytes.
    RemoteVisible = 3,
}

/// Where an operation stands.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_transfer_state {
    /// Queued or under way.
    InFlight = 1,
    /// It has ended, and its bytes are as visible as was answered beside it.
    Done = 2,
    /// It has ended without landing completely.
    Failed = 3,
    /// The peer was lost and may still touch the memory. Never becomes anything else.
    Unknown = 4,
}

/// A chunk of a stage, as an arrival reports it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct kv_ticket {
    /// The stage, below 65536.
    pub stage: u32,
    /// The chunk of that stage, below 65536.
    pub chunk: u32,
}

/// How an operation is posted.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kv_post_options {
    /// `sizeof(struct kv_post_options)`.
    pub struct_bytes: u32,
    /// An `enum kv_source`. There is no usual value: say it.
    pub source: u32,
    /// The flight that the arrival counts for: of the peer for a write, of this agent for a read.
    pub epoch: u64,
    /// The chunks that this operation completes there. With none, nobody is told.
    pub tickets: *const kv_ticket,
    /// How many.
    pub ticket_count: usize,
    /// How long to wait for room in the queue; 0 only tries.
    pub timeout_ms: u64,
    /// An `enum kv_priority`.
    pub priority: u32,
    /// Zero.
    pub reserved: u32,
}

// SAFETY: `repr(C)`, numbers and a pointer, `struct_bytes` first.
unsafe impl Versioned for kv_post_options {
    const NAME: &'static str = "kv_post_options";
}

/// Makes an empty list: of slots of this agent when `remote` is NULL, otherwise of slots of the peer in
/// that life of it. A transfer towards another life is refused, since its numbers name other memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_descriptors_create(
    remote: *const kv_incarnation,
    list: *mut *mut kv_descriptors,
) -> kv_status {
    guard(|| {
        // SAFETY: the contract of the header.
        let (remote, out) = unsafe {
            let remote = arg::slice(remote, usize::from(!remote.is_null()), "remote")?;
            (remote.first().copied(), arg::out(list, "list")?)
        };
        let list = match remote.map(Incarnation::from) {
            None => DescriptorList::new(),
            Some(incarnation) => DescriptorList::remote(incarnation),
        };
        out.set(kv_descriptors::create(Mutex::new(list)));
        Ok(())
    })
}

/// Appends slots of one pool, in this order. `pool` is a number from `kv_region_pool` for a local list and
/// from `kv_agent_peer_pool` for a remote one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_descriptors_push(
    list: *const kv_descriptors,
    pool: u32,
    slots: *const u32,
    slot_count: usize,
) -> kv_status {
    guard(|| {
        let list = kv_descriptors::open(list)?;
        // SAFETY: the contract of the header.
        let slots = unsafe { arg::slice(slots, slot_count, "slots")? };
        locked(&list).push(PoolId(pool), slots);
        Ok(())
    })
}

/// Ends the handle; NULL is allowed. Transfers that were prepared from the list keep what they need.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_descriptors_release(list: *mut kv_descriptors) -> kv_status {
    guard(|| kv_descriptors::release(list))
}

/// Checks a transfer once, so that it can be posted many times: both lists name existing slots of equal
/// size, pair by pair, no destination twice, and the remote list is for this life of the peer. The message
/// names the pair that does not fit. `op` is an `enum kv_op`.
///
/// `KV_STATUS_STALE` for a list of another incarnation, `KV_STATUS_PEER_DOWN`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_prepare(
    agent: *const kv_agent,
    op: u32,
    local: *const kv_descriptors,
    remote: *const kv_descriptors,
    peer: u32,
    prepared: *mut *mut kv_prepared,
) -> kv_status {
    guard(|| {
        let agent = kv_agent::open(agent)?;
        let (local, remote) = (kv_descriptors::open(local)?, kv_descriptors::open(remote)?);
        // SAFETY: the contract of the header.
        let out = unsafe { arg::out(prepared, "prepared")? };
        let op = match op {
            1 => Op::Write,
            2 => Op::Read,
            other => return Err(Failure::argument(format!("{other} is no kv_op"))),
        };
        // One after the other: the same list may be given twice.
        let local = locked(&local).clone();
        let remote = locked(&remote).clone();
        let peer = PeerId(peer);
        let prepared = agent.agent.prepare(op, &local, &remote, peer)?;
        out.set(kv_prepared::create(PreparedObject { prepared, peer }));
        Ok(())
    })
}

/// Ends the handle; NULL is allowed. Operations that were posted go on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_prepared_release(prepared: *mut kv_prepared) -> kv_status {
    guard(|| kv_prepared::release(prepared))
}

/// Queues an operation. The source slots must not be written before it has ended.
///
/// `KV_STATUS_FULL` when there is no room within `options->timeout_ms`: nothing was posted, post again later.
/// `KV_STATUS_PEER_DOWN`, `KV_STATUS_STALE` when a registration was revoked since the transfer was prepared.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_post(
    agent: *const kv_agent,
    prepared: *const kv_prepared,
    options: *const kv_post_options,
    transfer: *mut *mut kv_transfer,
) -> kv_status {
    guard(|| {
        let (agent, prepared) = (kv_agent::open(agent)?, kv_prepared::open(prepared)?);
        // SAFETY: the contract of the header.
        let (options, out) = unsafe {
            let options: kv_post_options = arg::versioned(options)?;
            (options, arg::out(transfer, "transfer")?)
        };
        // SAFETY: as above.
        let tickets = unsafe {
            let (tickets, count) = (options.tickets, options.ticket_count);
            arg::slice(tickets, count, "kv_post_options.tickets")?
        };
        let source = source_of(options.source, prepared.peer)?;
        let arrival = arrival_of(options.epoch, tickets)?;
        let priority = priority_of(options.priority)?;
        arg::zero(options.reserved, "kv_post_options.reserved")?;
        let within = Deadline::after_ms(options.timeout_ms);
        let options = PostOptions {
            arrival,
            priority,
            ..PostOptions::default()
        };
        let posted = agent
            .agent
            .post_within(&prepared.prepared, source, options, within);
        let posted = posted.map_err(|refused| Failure::from(refused.error))?;
        out.set(TransferObject::create(posted, agent.waker()));
        Ok(())
    })
}

fn priority_of(priority: u32) -> Outcome<Priority> {
    match priority {
        0 => Ok(Priority::Foreground),
        1 => Ok(Priority::Background),
        other => Err(Failure::argument(format!(
            "kv_post_options.priority: {other} is no kv_priority"
        ))),
    }
}

/// The witness that a caller vouches for.
fn source_of(source: u32, peer: PeerId) -> Outcome<SourceReady> {
    let announcement = AgentEvent::Message {
        peer,
        bytes: bytes::Bytes::new(),
    };
    let witness = match source {
        1 => Some(SourceReady::host_written()),
        2 => SourceReady::announced(&announcement),
        _ => None,
    };
    witness.ok_or_else(|| {
        let message = format!("kv_post_options.source: {source} is no kv_source");
        Failure::argument(message)
    })
}

fn arrival_of(epoch: u64, tickets: &[kv_ticket]) -> Outcome<Option<Arrival>> {
    if tickets.is_empty() {
        return Ok(None);
    }
    let ticket = |ticket: &kv_ticket| {
        let stage = StageId(arg::small(ticket.stage, "kv_ticket.stage")?);
        Ok((stage, ChunkId(arg::small(ticket.chunk, "kv_ticket.chunk")?)))
    };
    Ok(Some(Arrival {
        epoch: Epoch(epoch),
        tickets: tickets.iter().map(ticket).collect::<Outcome<_>>()?,
        note: bytes::Bytes::new(),
    }))
}

/// Where an operation stands now: `state` gets an `enum kv_transfer_state` and `visibility`, unless NULL, an
/// `enum kv_visibility` when it is done and 0 otherwise. Never blocks. When the answer is
/// `KV_TRANSFER_STATE_IN_FLIGHT`, the agent's event descriptor becomes readable at the end of the operation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_transfer_status(
    transfer: *const kv_transfer,
    state: *mut u32,
    visibility: *mut u32,
) -> kv_status {
    guard(|| {
        let transfer = kv_transfer::open(transfer)?;
        // SAFETY: the contract of the header.
        let (state, visibility) = unsafe {
            let state = arg::out(state, "state")?;
            (state, arg::optional_out(visibility, "visibility")?)
        };
        let (found, level) = match transfer.wait(0) {
            None | Some(Status::InFlight) => (kv_transfer_state::InFlight, 0),
            Some(Status::Done(level)) => (kv_transfer_state::Done, level_of(level) as u32),
            Some(Status::Failed(_)) => (kv_transfer_state::Failed, 0),
            Some(Status::Unknown(_)) => (kv_transfer_state::Unknown, 0),
        };
        state.set(found as u32);
        if let Some(visibility) = visibility {
            visibility.set(level);
        }
        Ok(())
    })
}

/// Waits for the end of an operation, at most `timeout_ms`; 0 only looks.
///
/// `KV_STATUS_OK` when it has ended well; `visibility`, unless NULL, then gets an `enum kv_visibility`.
/// `KV_STATUS_TIMED_OUT`: it goes on. `KV_STATUS_CANCELLED`: it was taken back. `KV_STATUS_FAILED`,
/// `KV_STATUS_PEER_DOWN` and others say how it failed. `KV_STATUS_UNKNOWN`: nobody can tell, for good.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_transfer_wait(
    transfer: *const kv_transfer,
    timeout_ms: u64,
    visibility: *mut u32,
) -> kv_status {
    guard(|| {
        let transfer = kv_transfer::open(transfer)?;
        // SAFETY: the contract of the header.
        let visibility = unsafe { arg::optional_out(visibility, "visibility")? };
        match transfer.wait(timeout_ms) {
            None | Some(Status::InFlight) => {
                Err(Failure::timed_out("the end of the transfer", timeout_ms))
            }
            Some(Status::Done(level)) => {
                if let Some(visibility) = visibility {
                    visibility.set(level_of(level) as u32);
                }
                Ok(())
            }
            Some(Status::Failed(error)) => Err(ended_badly(&error)),
            Some(Status::Unknown(cause)) => {
                Err(Failure::new(kv_status::Unknown, cause.to_string()))
            }
        }
    })
}

/// The failure of an operation: never a status that would say that the call itself was wrong.
fn ended_badly(error: &kvgate_transfer::Error) -> Failure {
    let status = match error.kind() {
        ErrorKind::Cancelled => kv_status::Cancelled,
        ErrorKind::PeerDown { .. } | ErrorKind::PeerLost { .. } => kv_status::PeerDown,
        ErrorKind::Refused { .. } => kv_status::Refused,
        _ => kv_status::Failed,
    };
    Failure::new(status, error.to_string())
}

/// Takes the operation back if nobody has started it; otherwise does nothing. Says nothing about memory:
/// ask for the state.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_transfer_cancel(transfer: *const kv_transfer) -> kv_status {
    guard(|| {
        locked(&kv_transfer::open(transfer)?.handle).cancel();
        Ok(())
    })
}

/// Ends the handle; NULL is allowed. The operation goes on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_transfer_release(transfer: *mut kv_transfer) -> kv_status {
    guard(|| kv_transfer::release(transfer))
}

impl TransferObject {
    pub(crate) fn create(handle: TransferHandle, waker: Waker) -> *mut kv_transfer {
        let handle = Mutex::new(handle);
        kv_transfer::create(TransferObject { handle, waker })
    }

    fn wait(&self, timeout_ms: u64) -> Option<Status> {
        let ask = |cx: &mut Context<'_>| -> Poll<Status> {
            Pin::new(&mut *locked(&self.handle)).poll(cx)
        };
        wait_for(timeout_ms, &self.waker, ask)
    }
}

fn level_of(level: Visibility) -> kv_visibility {
    match level {
        Visibility::LocalDone => kv_visibility::LocalDone,
        Visibility::RemoteDelivered => kv_visibility::RemoteDelivered,
        Visibility::RemoteVisible => kv_visibility::RemoteVisible,
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
