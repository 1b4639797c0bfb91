//! What an agent tells its owner, and the descriptor that says when.

use std::cell::RefCell;

use bytes::Bytes;
use kvgate_transfer::AgentEvent;

use crate::agent::kv_agent;
use crate::arg::{self, Versioned};
use crate::handle::Handle;
use crate::status::{Failure, guard, kv_status};
use crate::wake::wait_for;

/// What has happened.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_event_kind {
    /// A control message: `bytes` is what the peer sent. Messages of one peer come in order.
    Message = 1,
    /// A connection was made. Comes before any other event of that peer.
    PeerUp = 2,
    /// A connection has ended; `bytes` is the cause as text. Comes after every other event of that peer,
    /// once.
    PeerDown = 3,
    /// Somebody connected and was refused; `bytes` says who and why, as text.
    Refused = 4,
    /// The connection has broken, and another one may take its place in time; `bytes` is the cause as text. What is
    /// under way stays under way. `PeerResumed` follows, or `PeerDown`.
    PeerSuspended = 5,
    /// There is a connection to the same life of the peer again.
    PeerResumed = 6,
}

/// One event.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_event {
    /// `sizeof(struct kv_event)`; set it before the call.
    pub struct_bytes: u32,
    /// An `enum kv_event_kind`.
    pub kind: u32,
    /// The connection; 0 for `KV_EVENT_KIND_REFUSED`, which has none.
    pub peer: u32,
    /// For `KV_EVENT_KIND_PEER_DOWN`: 1 when the peer is proven not to write here any more. If 0, memory
    /// that it was told about stays in use for good.
    pub is_proven: u32,
    /// What comes with the event; never NULL. It belongs to the library and is good until the same
    /// thread asks for another event or ends. Text ends with a zero byte that `length_bytes` does not count.
    pub bytes: *const u8,
    /// How many bytes.
    pub length_bytes: usize,
}

// SAFETY: `repr(C)`, numbers and a pointer, `struct_bytes` first.
unsafe impl Versioned for kv_event {
    const NAME: &'static str = "kv_event";
}

thread_local! {
    /// The bytes of the last event that this thread was given.
    static LAST_EVENT: RefCell<Bytes> = const { RefCell::new(Bytes::new()) };
}

/// Takes the next event. Waits for one at most `timeout_ms`; 0 only looks.
///
/// `KV_STATUS_TIMED_OUT` when there is none: the descriptor of `kv_agent_event_fd` then becomes readable
/// with the next one. `KV_STATUS_CLOSED` after a shutdown, when all were taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_next_event(
    agent: *const kv_agent,
    timeout_ms: u64,
    event: *mut kv_event,
) -> kv_status {
    guard(|| {
        let agent = kv_agent::open(agent)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::versioned_out(event)? };
        let taken = wait_for(timeout_ms, &agent.waker(), |cx| agent.agent.poll_event(cx));
        let event = match taken {
            None => return Err(Failure::timed_out("an event", timeout_ms)),
            Some(None) => return Err(Failure::new(kv_status::Closed, "the agent is closed")),
            Some(Some(event)) => event,
        };
        let (kind, peer, is_proven, bytes, length_bytes) = describe(event)?;
        let pointer = LAST_EVENT.with_borrow_mut(|last| {
            *last = bytes;
            last.as_ptr()
        });
        out.set(kv_event {
            struct_bytes: size_of::<kv_event>() as u32,
            kind: kind as u32,
            peer,
            is_proven: u32::from(is_proven),
            bytes: pointer,
            length_bytes,
        });
        Ok(())
    })
}

type Described = (kv_event_kind, u32, bool, Bytes, usize);

fn describe(event: AgentEvent) -> Result<Described, Failure> {
    let text = |text: String| {
        let length_bytes = text.len();
        let mut bytes = text.into_bytes();
        bytes.push(0);
        (Bytes::from(bytes), length_bytes)
    };
    Ok(match event {
        AgentEvent::Message { peer, bytes } => {
            let length_bytes = bytes.len();
            (kv_event_kind::Message, peer.0, false, bytes, length_bytes)
        }
        AgentEvent::PeerUp { peer } => {
            let (bytes, length_bytes) = text(String::new());
            (kv_event_kind::PeerUp, peer.0, false, bytes, length_bytes)
        }
        AgentEvent::PeerDown {
            peer,
            cause,
            is_proven,
        } => {
            let (bytes, length_bytes) = text(cause.to_string());
            (
                kv_event_kind::PeerDown,
                peer.0,
                is_proven,
                bytes,
                length_bytes,
            )
        }
        AgentEvent::PeerSuspended { peer, cause } => {
            let (bytes, length_bytes) = text(cause.to_string());
            (
                kv_event_kind::PeerSuspended,
                peer.0,
                false,
                bytes,
                length_bytes,
            )
        }
        AgentEvent::PeerResumed { peer } => {
            let (bytes, length_bytes) = text(String::new());
            (
                kv_event_kind::PeerResumed,
                peer.0,
                false,
                bytes,
                length_bytes,
            )
        }
        AgentEvent::Refused { address, reason } => {
            let (bytes, length_bytes) = text(format!("{address}: {reason}"));
            (kv_event_kind::Refused, 0, false, bytes, length_bytes)
        }
        other => {
            let message = format!("an event that this interface does not know: {other:?}");
            return Err(Failure::new(kv_status::Internal, message));
        }
    })
}

/// A descriptor for `poll` or `epoll` (an eventfd). It becomes readable when something may have changed
/// that a call for this agent has answered with `KV_STATUS_TIMED_OUT`, or with a state that is not final:
/// an event (`kv_agent_next_event`), the end of a transfer (`kv_transfer_wait`, `kv_transfer_status`), the gate
/// of a flight (`kv_flight_wait`, `kv_flight_check`, `kv_flight_verify`, `kv_read_lease_layer`), the quiet of a
/// flight (`kv_flight_wait_quiet`), the quiet of the slots of a writer (`kv_write_lease_close`, if its pools were
/// registered with this agent at that time). Whoever was told that a flight is not armed is woken when it is
/// armed or ended. No other call leaves anything with the descriptor: not `kv_agent_connect`, and none that
/// answers `KV_STATUS_BUSY` or `KV_STATUS_FULL`.
///
/// Read eight bytes from it to clear it, *then* ask again for everything that is awaited. It is readable
/// at first, so a loop of poll, read and ask needs no special beginning. Do not write to it and do not
/// close it; it goes with the agent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_event_fd(agent: *const kv_agent, fd: *mut i32) -> kv_status {
    guard(|| {
        let agent = kv_agent::open(agent)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::out(fd, "fd")? };
        agent.fd.signal();
        out.set(agent.fd.number());
        Ok(())
    })
}
