//! Status codes, the message of the last failure, and the guard around every call.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvgate_kvcache::{Error as CacheError, ErrorKind as CacheErrorKind};
use kvgate_transfer::{BarrierError, Error, ErrorKind};

/// What every call returns. `KV_STATUS_OK` is 0. A call that returns anything else has changed nothing,
/// unless its documentation says so; `kv_last_error_message` says what was wrong, with the values.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_status {
    /// Done.
    Ok = 0,
    /// An argument that cannot work: NULL where a pointer is needed, a handle that does not exist or is
    /// of another kind, a wrong `struct_bytes`, an enum value that is not one, text that is not UTF-8,
    /// numbers that do not fit together.
    InvalidArgument = 1,
    /// Good arguments at the wrong moment, such as arming a flight twice.
    InvalidState = 2,
    /// The time is over and the answer is not there yet. Nothing else has changed; ask again, or, where
    /// `kv_agent_event_fd` names the call, poll the event descriptor of the agent.
    TimedOut = 3,
    /// The flight is not armed: every gate of it is closed.
    NotArmed = 4,
    /// The flight or the operation has failed, and stays so; the message names the cause.
    Failed = 5,
    /// The peer was lost and nobody can tell how the operation ended; its memory stays in use.
    Unknown = 6,
    /// The operation was taken back before it was started.
    Cancelled = 7,
    /// No room now, neither in a queue nor in a pool; try again later.
    Full = 8,
    /// Somebody else uses it: a region with operations, an address, an epoch, a layer that is held.
    Busy = 9,
    /// The host or its control group has less memory than was asked for; nothing was touched.
    OutOfMemory = 10,
    /// The connection to the peer has ended.
    PeerDown = 11,
    /// Nobody answers at that address. Trying again may help.
    Unreachable = 12,
    /// The other side, or a check on its behalf, said no: secret, version, fingerprint.
    Refused = 13,
    /// It names something of another life: a former incarnation of a peer, a revoked registration.
    Stale = 14,
    /// The agent, the region or the flight is closed.
    Closed = 15,
    /// A system call failed; the message holds its name and errno.
    System = 16,
    /// A defect of this library. The call was given up; the handles it was given should be released.
    Internal = 17,
    /// What a transport needs is not there: a library, a right; the message lists what was tried.
    Unavailable = 18,
}

impl kv_status {
    /// Every status, by value.
    const ALL: [(kv_status, &'static std::ffi::CStr); 19] = [
        (kv_status::Ok, c"ok"),
        (kv_status::InvalidArgument, c"invalid argument"),
        (kv_status::InvalidState, c"invalid state"),
        (kv_status::TimedOut, c"timed out"),
        (kv_status::NotArmed, c"not armed"),
        (kv_status::Failed, c"failed"),
        (kv_status::Unknown, c"unknown"),
        (kv_status::Cancelled, c"cancelled"),
        (kv_status::Full, c"full"),
        (kv_status::Busy, c"busy"),
        (kv_status::OutOfMemory, c"out of memory"),
        (kv_status::PeerDown, c"peer down"),
        (kv_status::Unreachable, c"unreachable"),
        (kv_status::Refused, c"refused"),
        (kv_status::Stale, c"stale"),
        (kv_status::Closed, c"closed"),
        (kv_status::System, c"system"),
        (kv_status::Internal, c"internal"),
        (kv_status::Unavailable, c"unavailable"),
    ];
}

/// A call that did not succeed.
#[derive(Debug)]
pub(crate) struct Failure {
    status: kv_status,
    message: String,
}

pub(crate) type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(status: kv_status, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    /// [`kv_status::InvalidArgument`].
    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new(kv_status::InvalidArgument, message)
    }

    /// [`kv_status::InvalidState`].
    pub(crate) fn state(message: impl Into<String>) -> Self {
        Self::new(kv_status::InvalidState, message)
    }

    /// [`kv_status::TimedOut`]: `what` was not there within the caller's time.
    pub(crate) fn timed_out(what: &str, timeout_ms: u64) -> Self {
        let message = format!("{what} not within {timeout_ms} ms");
        Self::new(kv_status::TimedOut, message)
    }

    #[cfg(test)]
    pub(crate) fn status(&self) -> kv_status {
        self.status
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(status_of(error.kind()), error.to_string())
    }
}

impl From<BarrierError> for Failure {
    fn from(error: BarrierError) -> Self {
        Self::new(barrier_status(&error), error.to_string())
    }
}

impl From<CacheError> for Failure {
    fn from(error: CacheError) -> Self {
        let below = std::error::Error::source(&error).and_then(|source| source.downcast_ref());
        let status = match (error.kind(), below) {
            (CacheErrorKind::Transfer, Some(source)) => status_of(Error::kind(source)),
            (CacheErrorKind::Gate { error, .. }, _) => barrier_status(error),
            (CacheErrorKind::OutOfMemory { .. }, _) => kv_status::OutOfMemory,
            (CacheErrorKind::Exhausted { .. }, _) => kv_status::Full,
            (
                CacheErrorKind::AppendTaken { .. }
                | CacheErrorKind::Slot { .. }
                | CacheErrorKind::Unregistering,
                _,
            ) => kv_status::Busy,
            (
                CacheErrorKind::AlreadyRegistered
                | CacheErrorKind::NotRegistered
                | CacheErrorKind::AlreadyArmed
                | CacheErrorKind::NotWritten { .. }
                | CacheErrorKind::CommitGap { .. },
                _,
            ) => kv_status::InvalidState,
            _ => kv_status::InvalidArgument,
        };
        Self::new(status, error.to_string())
    }
}

fn status_of(kind: &ErrorKind) -> kv_status {
    match kind {
        ErrorKind::InvalidArgument { .. }
        | ErrorKind::InvalidPlan(_)
        | ErrorKind::UnknownPool { .. }
        | ErrorKind::SlotOutOfRange { .. }
        | ErrorKind::LengthMismatch { .. }
        | ErrorKind::EmptyTransfer
        | ErrorKind::SlotBytesMismatch { .. }
        | ErrorKind::DuplicateDestination { .. }
        | ErrorKind::TooManyDescriptors { .. }
        | ErrorKind::InvalidGeometry { .. }
        | ErrorKind::UnknownPeer { .. }
        | ErrorKind::IncarnationMissing
        | ErrorKind::SourceMismatch { .. }
        | ErrorKind::WriterMismatch { .. }
        | ErrorKind::TooLong { .. } => kv_status::InvalidArgument,
        ErrorKind::IncarnationMismatch { .. } | ErrorKind::PoolRevoked { .. } => kv_status::Stale,
        ErrorKind::RegionClosed { .. } | ErrorKind::FlightClosed { .. } | ErrorKind::Closed => {
            kv_status::Closed
        }
        ErrorKind::RegionBusy { .. }
        | ErrorKind::EpochInUse { .. }
        | ErrorKind::AddressInUse { .. } => kv_status::Busy,
        ErrorKind::QueueFull { .. } => kv_status::Full,
        ErrorKind::Cancelled => kv_status::Cancelled,
        ErrorKind::OutOfMemory { .. } => kv_status::OutOfMemory,
        ErrorKind::System { .. } => kv_status::System,
        ErrorKind::AuthRequired { .. }
        | ErrorKind::HandshakeRefused { .. }
        | ErrorKind::VersionMismatch { .. }
        | ErrorKind::Refused { .. } => kv_status::Refused,
        ErrorKind::BackendUnavailable { .. } | ErrorKind::ProbeFailed { .. } => {
            kv_status::Unavailable
        }
        ErrorKind::Unreachable { .. } | ErrorKind::NoPath { .. } | ErrorKind::Directory { .. } => {
            kv_status::Unreachable
        }
        ErrorKind::DeadlineExceeded { .. } => kv_status::TimedOut,
        ErrorKind::PeerDown { .. } | ErrorKind::PeerLost { .. } => kv_status::PeerDown,
        // A kind that this interface does not know yet is at least not a success.
        _ => kv_status::Failed,
    }
}

fn barrier_status(error: &BarrierError) -> kv_status {
    match error {
        BarrierError::NotArmed => kv_status::NotArmed,
        BarrierError::AlreadyArmed => kv_status::InvalidState,
        BarrierError::UnknownChunk(_) | BarrierError::UnknownStage(_) => kv_status::InvalidArgument,
        BarrierError::TimedOut { .. } => kv_status::TimedOut,
        BarrierError::Stale { .. } => kv_status::Stale,
        _ => kv_status::Failed,
    }
}

thread_local! {
    static LAST_MESSAGE: RefCell<CString> = RefCell::default();
}

/// Keeps the message of a failure for this thread.
fn remember(message: String) {
    let mut bytes = message.into_bytes();
    bytes.retain(|byte| *byte != 0);
    let message = CString::new(bytes).unwrap_or_default();
    // A thread that is being taken down has nobody left to ask.
    let _ = LAST_MESSAGE.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = message;
        }
    });
}

/// Runs the body of a call. A panic ends here and becomes [`kv_status::Internal`].
pub(crate) fn guard(body: impl FnOnce() -> Outcome<()>) -> kv_status {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return kv_status::Ok,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::new(kv_status::Internal, panic_message(panic)),
    };
    remember(failure.message);
    failure.status
}

fn panic_message(panic: Box<dyn Any + Send>) -> String {
    let text = match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => match panic.downcast::<&'static str>() {
            Ok(text) => (*text).to_owned(),
            Err(other) => {
                // The drop of an unknown payload may panic as well.
                std::mem::forget(other);
                "a panic without a message".to_owned()
            }
        },
    };
    format!("internal error: {text}")
}

/// The message of the last call of this thread that did not return `KV_STATUS_OK`: one line of UTF-8, never
/// NULL, empty before the first failure. The text belongs to the thread: the pointer is good until the next
/// failing call of the same thread or the end of that thread, so copy it to keep it or to hand it to another.
#[unsafe(no_mangle)]
pub extern "C" fn kv_last_error_message() -> *const c_char {
    LAST_MESSAGE
        .try_with(|last| match last.try_borrow() {
            Ok(last) => last.as_ptr(),
            Err(_) => c"".as_ptr(),
        })
        .unwrap_or(c"".as_ptr())
}

/// The name of a status in words, such as "timed out"; "no such status" for a value that is none. A
/// constant: never NULL, never to be freed.
#[unsafe(no_mangle)]
pub extern "C" fn kv_status_name(status: u32) -> *const c_char {
    let known = kv_status::ALL
        .iter()
        .find(|(known, _)| *known as u32 == status);
    known.map_or(c"no such status", |(_, name)| name).as_ptr()
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn last() -> String {
        // SAFETY: the pointer is to the string of this thread, which nothing replaces meanwhile.
        let text = unsafe { CStr::from_ptr(kv_last_error_message()) };
        text.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_status_and_its_message() {
        let status = guard(|| panic!("seven is not {}", 8));
        assert_eq!(status, kv_status::Internal);
        assert_eq!(last(), "internal error: seven is not 8");
        let status = guard(|| std::panic::panic_any(17_u8));
        assert_eq!(status, kv_status::Internal);
        assert_eq!(last(), "internal error: a panic without a message");
    }

    #[test]
    fn messages_belong_to_their_thread_and_survive_successes() {
        let failed = guard(|| Err(Failure::argument("one\0two")));
        assert_eq!(failed, kv_status::InvalidArgument);
        assert_eq!(guard(|| Ok(())), kv_status::Ok);
        let other = std::thread::spawn(last).join().unwrap();
        assert_eq!((last().as_str(), other.as_str()), ("onetwo", ""));
    }

    #[test]
    fn every_status_has_its_place_and_its_name() {
        for (value, (status, name)) in kv_status::ALL.iter().enumerate() {
            assert_eq!(*status as usize, value);
            // SAFETY: a constant string.
            let found = unsafe { CStr::from_ptr(kv_status_name(value as u32)) };
            assert_eq!(found, *name);
        }
        // SAFETY: as above.
        let found = unsafe { CStr::from_ptr(kv_status_name(19)) };
        assert_eq!(found, c"no such status");
    }
}
