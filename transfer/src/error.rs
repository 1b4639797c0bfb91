//! What went wrong, as types: [`Error`] for a call that was refused, [`Cause`] for a flight or a peer that
//! ended.

use std::fmt;

use crate::{
    backend::BackendKind,
    ids::{Epoch, Incarnation, PeerId, PoolId, RegionId, StageId, WriterRank},
    op::Op,
    sync::{SharedError, shared_error},
};

/// The error of this crate: a closed [`ErrorKind`] with its values, and the system's error behind it if
/// there was one.
#[derive(Clone, Debug)]
pub struct Error {
    inner: Box<Inner>,
}

#[derive(Clone, Debug)]
struct Inner {
    kind: ErrorKind,
    source: Option<SharedError>,
}

/// Why a call was refused. The fields carry the offending value and what was expected.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are the values that Display prints.
pub enum ErrorKind {
    /// A configuration value or an argument that cannot work.
    InvalidArgument { what: &'static str, value: String },
    /// The chunks of a barrier plan do not form a plan.
    InvalidPlan(PlanFault),
    /// No such pool on that side.
    UnknownPool { pool: PoolId },
    /// A slot beyond the end of its pool.
    SlotOutOfRange {
        pool: PoolId,
        slot: u32,
        slot_count: u32,
    },
    /// The two lists of a transfer have different lengths.
    LengthMismatch { local_count: u64, remote_count: u64 },
    /// A transfer of nothing.
    EmptyTransfer,
    /// A pair of slots of different size.
    SlotBytesMismatch {
        local: PoolId,
        local_bytes: u64,
        remote: PoolId,
        remote_bytes: u64,
    },
    /// A destination slot that stands twice in one transfer.
    DuplicateDestination { pool: PoolId, slot: u32 },
    /// A witness for another source: a write needs one of this side's own bytes, a read the word of the
    /// peer that it reads from.
    SourceMismatch {
        op: Op,
        peer: PeerId,
        announced_by: Option<PeerId>,
    },
    /// More descriptors than the backend takes in one operation.
    TooManyDescriptors { count: u64, limit: u64 },
    /// The region of this pool is being closed, or belongs to another registration.
    PoolRevoked { pool: PoolId },
    /// A pool that does not fit into its memory.
    InvalidGeometry {
        pool_index: usize,
        end_bytes: Option<u64>,
        len_bytes: u64,
    },
    /// The region is being closed, or was.
    RegionClosed { region: RegionId },
    /// Operations still use the region.
    RegionBusy {
        region: RegionId,
        outstanding: u64,
        unheard_peers: u64,
    },
    /// No connection with this id.
    UnknownPeer { peer: PeerId },
    /// The connection has ended.
    PeerDown { peer: PeerId, cause: Cause },
    /// The list names slots of another life of the peer.
    IncarnationMismatch {
        expected: Incarnation,
        found: Incarnation,
    },
    /// A remote list that does not say whose slots it names.
    IncarnationMissing,
    /// The bounded queue towards the peer has no room now.
    QueueFull { peer: PeerId, capacity: usize },
    /// The operation was taken back before it was started.
    Cancelled,
    /// A flight with this epoch exists and is not quiet yet.
    EpochInUse { epoch: Epoch },
    /// The flight takes no further operations.
    FlightClosed { epoch: Epoch },
    /// The writers named for a flight are not the writers of its plan.
    WriterMismatch {
        writer: WriterRank,
        fault: WriterFault,
    },
    /// More bytes than the host or its control group has to give; nothing was touched.
    OutOfMemory {
        asked_bytes: u64,
        available_bytes: u64,
    },
    /// A system call failed.
    System { call: &'static str, errno: i32 },
    /// The kernel stopped copying between the two processes.
    CopyFailed {
        call: &'static str,
        errno: i32,
        moved_bytes: u64,
        bytes: u64,
    },
    /// The memory of the process at that address is out of reach. Without an errno another process
    /// answered to its number; without a scope the kernel has no Yama.
    ProbeFailed {
        address: String,
        pid: i32,
        errno: Option<i32>,
        ptrace_scope: Option<u32>,
    },
    /// Another socket is bound there.
    AddressInUse { address: String },
    /// An address beyond this host needs an authentication token.
    AuthRequired { address: String },
    /// The library behind a backend cannot be used; what was tried, with the reasons.
    BackendUnavailable {
        backend: BackendKind,
        tried: Vec<String>,
    },
    /// A call into the library behind a backend failed, with its code and its words.
    Provider {
        backend: BackendKind,
        call: &'static str,
        code: i64,
        words: String,
    },
    /// The other side of a handshake said no, or made no sense.
    HandshakeRefused { address: String, reason: String },
    /// The other side speaks another version of the link protocol.
    VersionMismatch {
        address: String,
        ours: u16,
        theirs: u16,
    },
    /// Nobody answers there.
    Unreachable { address: String, reason: String },
    /// None of the ways to an agent does; each with its reason.
    NoPath { name: String, tried: Vec<String> },
    /// A directory of agents did not do what was asked.
    Directory { endpoint: String, reason: String },
    /// The time for a wait is over. Nothing but the waiter has changed.
    DeadlineExceeded {
        what: &'static str,
        deadline_ms: u64,
    },
    /// The connection broke.
    PeerLost { reason: String },
    /// The peer did not take part in the operation.
    Refused { reason: String },
    /// A message, note or list longer than the protocol allows.
    TooLong {
        what: &'static str,
        bytes: u64,
        limit_bytes: u64,
    },
    /// The agent or the link is closed.
    Closed,
}

/// What is wrong with a list of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum PlanFault {
    /// No chunk at all: use [`crate::Barrier::ready`] when there is nothing to wait for.
    Empty,
    /// Stage ids must be 0, 1, 2, … without a gap.
    MissingStage { stage: StageId },
    /// Chunk ids of a stage must be 0, 1, 2, … without a gap.
    MissingChunk { stage: StageId, chunk: u32 },
    /// The same chunk stands in the list twice.
    DuplicateChunk { stage: StageId, chunk: u32 },
    /// A chunk that stands for no descriptor would land without a byte.
    NoDescriptors { stage: StageId, chunk: u32 },
}

/// Why a writer list does not fit a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WriterFault {
    /// The plan has chunks of this writer, the list does not name it.
    NotListed,
    /// The list names it, the plan has no chunk of it.
    NothingToWrite,
    /// It stands in the list twice.
    ListedTwice,
}

impl Error {
    pub(crate) fn with_source(
        kind: ErrorKind,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self {
            inner: Box::new(Inner {
                kind,
                source: Some(shared_error(source)),
            }),
        }
    }

    pub(crate) fn system(call: &'static str, errno: rustix::io::Errno) -> Self {
        let kind = ErrorKind::System {
            call,
            errno: errno.raw_os_error(),
        };
        Self::with_source(kind, std::io::Error::from(errno))
    }

    /// The reason and its values.
    pub fn kind(&self) -> &ErrorKind {
        &self.inner.kind
    }

    /// Whether the same call may succeed later without anybody repairing anything.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self.inner.kind,
            ErrorKind::QueueFull { .. }
                | ErrorKind::DeadlineExceeded { .. }
                | ErrorKind::RegionBusy { .. }
                | ErrorKind::Unreachable { .. }
                | ErrorKind::NoPath { .. }
                | ErrorKind::Directory { .. }
        )
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self {
            inner: Box::new(Inner { kind, source: None }),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.kind.fmt(f)?;
        match &self.inner.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.inner.source.as_deref().map(|e| e as _)
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidArgument { what, value } => write!(f, "{what} cannot be {value}"),
            Self::InvalidPlan(fault) => write!(f, "invalid barrier plan: {fault}"),
            Self::UnknownPool { pool } => write!(f, "{pool:?} does not exist"),
            Self::SlotOutOfRange {
                pool,
                slot,
                slot_count,
            } => {
                write!(f, "slot {slot} of {pool:?}, which has {slot_count} slots")
            }
            Self::LengthMismatch {
                local_count,
                remote_count,
            } => {
                write!(
                    f,
                    "{local_count} local descriptors against {remote_count} remote ones"
                )
            }
            Self::EmptyTransfer => f.write_str("a transfer without a descriptor"),
            Self::SlotBytesMismatch {
                local,
                local_bytes,
                remote,
                remote_bytes,
            } => write!(
                f,
                "slots of local {local:?} have {local_bytes} bytes, those of remote {remote:?} {remote_bytes}"
            ),
            Self::DuplicateDestination { pool, slot } => {
                write!(
                    f,
                    "slot {slot} of {pool:?} stands in the transfer twice as destination"
                )
            }
            Self::SourceMismatch {
                op,
                peer,
                announced_by,
            } => match announced_by {
                Some(by) => write!(
                    f,
                    "the source of a {op} with {peer:?} was announced by {by:?}"
                ),
                None => write!(
                    f,
                    "the source of a {op} with {peer:?} was not announced by it"
                ),
            },
            Self::TooManyDescriptors { count, limit } => {
                write!(
                    f,
                    "{count} descriptors in one transfer, the backend takes {limit}"
                )
            }
            Self::PoolRevoked { pool } => {
                write!(f, "the registration of {pool:?} has been revoked")
            }
            Self::InvalidGeometry {
                pool_index,
                end_bytes,
                len_bytes,
            } => match end_bytes {
                Some(end) => write!(f, "pool {pool_index} ends at byte {end} of {len_bytes}"),
                None => write!(
                    f,
                    "pool {pool_index} has no slot, an empty slot or overlapping slots"
                ),
            },
            Self::RegionBusy {
                region,
                outstanding,
                unheard_peers,
            } => write!(
                f,
                "{region:?} is used by {outstanding} operations, and {unheard_peers} peers have not let go of it"
            ),
            Self::RegionClosed { region } => write!(f, "{region:?} is closed"),
            Self::UnknownPeer { peer } => write!(f, "{peer:?} does not exist"),
            Self::PeerDown { peer, cause } => write!(f, "{peer:?} is gone: {cause}"),
            Self::IncarnationMismatch { expected, found } => {
                write!(f, "the list is for {expected:?}, the peer is {found:?}")
            }
            Self::IncarnationMissing => {
                f.write_str("the remote list does not say which incarnation it is for")
            }
            Self::QueueFull { peer, capacity } => {
                write!(f, "the queue towards {peer:?} is full ({capacity} entries)")
            }
            Self::Cancelled => f.write_str("cancelled before it was started"),
            Self::EpochInUse { epoch } => write!(f, "{epoch:?} is in use"),
            Self::FlightClosed { epoch } => {
                write!(f, "the flight of {epoch:?} takes no operations")
            }
            Self::WriterMismatch { writer, fault } => write!(f, "{writer:?} {fault}"),
            Self::OutOfMemory {
                asked_bytes,
                available_bytes,
            } => {
                write!(f, "{asked_bytes} bytes asked, {available_bytes} available")
            }
            Self::System { call, errno } => write!(f, "{call} failed with errno {errno}"),
            Self::CopyFailed {
                call,
                errno,
                moved_bytes,
                bytes,
            } => {
                let text = std::io::Error::from_raw_os_error(*errno);
                write!(
                    f,
                    "{call} failed after {moved_bytes} of {bytes} bytes: {text}"
                )
            }
            Self::ProbeFailed {
                address,
                pid,
                errno,
                ptrace_scope,
            } => {
                write!(
                    f,
                    "the memory of process {pid} behind {address} cannot be read"
                )?;
                match errno {
                    Some(errno) => {
                        let text = std::io::Error::from_raw_os_error(*errno);
                        write!(f, ": process_vm_readv: {text}")?;
                    }
                    None => f.write_str(": another process has its number here")?,
                }
                match ptrace_scope {
                    Some(scope) => write!(f, "; kernel.yama.ptrace_scope is {scope}"),
                    None => f.write_str("; the kernel has no Yama"),
                }
            }
            Self::AddressInUse { address } => write!(f, "address {address} is in use"),
            Self::AuthRequired { address } => {
                write!(
                    f,
                    "address {address} is not on this host: an authentication token is needed"
                )
            }
            Self::BackendUnavailable { backend, tried } => {
                write!(
                    f,
                    "the backend {backend} is not there; tried {}",
                    tried.join(", ")
                )
            }
            Self::Provider {
                backend,
                call,
                code,
                words,
            } => write!(f, "{backend}: {call} failed with {code}: {words}"),
            Self::HandshakeRefused { address, reason } => {
                write!(f, "handshake with {address} refused: {reason}")
            }
            Self::VersionMismatch {
                address,
                ours,
                theirs,
            } => {
                write!(
                    f,
                    "{address} speaks link version {theirs}, this build speaks {ours}"
                )
            }
            Self::Unreachable { address, reason } => write!(f, "cannot reach {address}: {reason}"),
            Self::NoPath { name, tried } if tried.is_empty() => {
                write!(f, "no path to agent {name}: it listens nowhere")
            }
            Self::NoPath { name, tried } => {
                write!(f, "no path to agent {name}: {}", tried.join("; "))
            }
            Self::Directory { endpoint, reason } => write!(f, "directory {endpoint}: {reason}"),
            Self::DeadlineExceeded { what, deadline_ms } => {
                write!(f, "{what} not done within {deadline_ms} ms")
            }
            Self::PeerLost { reason } => write!(f, "peer lost: {reason}"),
            Self::Refused { reason } => write!(f, "refused by the peer: {reason}"),
            Self::TooLong {
                what,
                bytes,
                limit_bytes,
            } => {
                write!(f, "{what} of {bytes} bytes, at most {limit_bytes} allowed")
            }
            Self::Closed => f.write_str("closed"),
        }
    }
}

impl fmt::Display for PlanFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("no chunks"),
            Self::MissingStage { stage } => write!(f, "{stage:?} has no chunks"),
            Self::MissingChunk { stage, chunk } => {
                write!(f, "chunk {chunk} of {stage:?} is missing")
            }
            Self::DuplicateChunk { stage, chunk } => {
                write!(f, "chunk {chunk} of {stage:?} stands twice")
            }
            Self::NoDescriptors { stage, chunk } => {
                write!(f, "chunk {chunk} of {stage:?} has no descriptor")
            }
        }
    }
}

impl fmt::Display for WriterFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotListed => "has chunks in the plan and is not listed",
            Self::NothingToWrite => "is listed and has no chunk in the plan",
            Self::ListedTwice => "is listed twice",
        })
    }
}

/// Which side ended something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// This process.
    Local,
    /// The peer.
    Remote,
}

/// Why a flight, a wait or a connection ended. It travels to everybody who waits.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Cause {
    /// Somebody decided to stop.
    Aborted { by: Side, reason: String },
    /// The connection or the process behind it is gone.
    PeerLost { reason: String },
    /// The peer at that address is another incarnation now.
    PeerRestarted,
    /// A wait was over before the thing happened.
    DeadlineExceeded { what: String, deadline_ms: u64 },
    /// The agent was shut down.
    Shutdown,
    /// The peer said no.
    Refused { reason: String },
    /// An operation failed.
    Transfer(String),
    /// The plan has no such stage.
    UnknownStage(StageId),
}

impl Cause {
    /// The connection is of no use because of `error`.
    pub(crate) fn lost(error: &Error) -> Self {
        Self::PeerLost {
            reason: error.to_string(),
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Aborted {
                by: Side::Local,
                reason,
            } => write!(f, "aborted here: {reason}"),
            Self::Aborted {
                by: Side::Remote,
                reason,
            } => write!(f, "aborted by the peer: {reason}"),
            Self::PeerLost { reason } => write!(f, "peer lost: {reason}"),
            Self::PeerRestarted => f.write_str("the peer has restarted"),
            Self::DeadlineExceeded { what, deadline_ms } => {
                write!(f, "{what} not done within {deadline_ms} ms")
            }
            Self::Shutdown => f.write_str("shut down"),
            Self::Refused { reason } => write!(f, "refused: {reason}"),
            Self::Transfer(reason) => write!(f, "transfer failed: {reason}"),
            Self::UnknownStage(stage) => write!(f, "the plan has no {stage:?}"),
        }
    }
}

impl std::error::Error for Cause {}
