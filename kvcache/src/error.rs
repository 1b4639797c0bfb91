//! The one error type of this crate.

use std::fmt;
use std::ops::Range;

use kvgate_transfer::{BarrierError, Incarnation};

use crate::ids::{LayerId, Room};
use crate::page::SlotFault;
use crate::schema::{Component, Space};

/// What went wrong, with the values that say where.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The geometry forbids this storage format.
    FormatNotAllowed {
        /// Field of the configuration that forbids it.
        field: String,
        /// The field's value.
        value: String,
        /// The value that the format needs.
        expected: String,
    },
    /// A field of the geometry has a value for which no cache can be laid out.
    ImpossibleGeometry {
        /// Field of the configuration.
        field: String,
        /// The field's value.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// The pools cannot be built as asked.
    ImpossiblePool {
        /// What was asked.
        field: &'static str,
        /// The value.
        value: u64,
        /// What would be accepted.
        expected: String,
    },
    /// The memory that the pools need is not there.
    OutOfMemory {
        /// Bytes the pools need.
        asked_bytes: u64,
        /// Bytes that could be had.
        available_bytes: u64,
    },
    /// Not enough free slots now; nothing was taken. Retry when a request has ended.
    Exhausted {
        /// The space that is short.
        space: Space,
        /// Slots asked for.
        asked: u32,
        /// Slots free at that moment.
        free: u32,
        /// Usable slots of the space.
        capacity: u32,
    },
    /// More slots than the space will ever have.
    NeverFits {
        /// The space that is too small.
        space: Space,
        /// Slots asked for.
        asked: u32,
        /// Usable slots of the space, without retired ones.
        capacity: u32,
    },
    /// A layer that the schema does not have.
    UnknownLayer {
        /// The layer asked for.
        layer: LayerId,
        /// Layers of the schema.
        layer_count: u16,
    },
    /// A slot was not in the state that the step needs.
    Slot {
        /// The space of the slot.
        space: Space,
        /// Its number.
        index: u32,
        /// What did not fit.
        fault: SlotFault,
    },
    /// The pools are registered with an agent already.
    AlreadyRegistered,
    /// The pools have no memory (models only).
    NoMemory,
    /// A commit that leaves tokens out or does not fit the reservation.
    CommitGap {
        /// The layer.
        layer: LayerId,
        /// Tokens committed before.
        committed: u32,
        /// The tokens of this commit.
        tokens: Range<u32>,
        /// Tokens reserved.
        limit: u32,
    },
    /// A write through a lease that only reads.
    ReadOnly {
        /// The component.
        component: Component,
        /// The layer.
        layer: LayerId,
    },
    /// The gate of a layer did not open.
    Gate {
        /// The layer.
        layer: LayerId,
        /// What the barrier says.
        error: BarrierError,
    },
    /// A request that starts behind a prefix has not taken over the prefix's end in this layer.
    NotAttached {
        /// The layer.
        layer: LayerId,
        /// Tokens of the prefix.
        prefix_tokens: u32,
    },
    /// A prefix whose window and states were not kept at its end: its pages can be read, and no
    /// request can go on from there.
    NoCheckpoint {
        /// Tokens of the prefix.
        prefix_tokens: u32,
    },
    /// The append right of a flight is taken.
    AppendTaken {
        /// The request.
        room: Room,
    },
    /// A witness of another flight was shown.
    OtherFlight {
        /// The request of the flight that was asked.
        room: Room,
    },
    /// A written layer does not cover what is to be sent.
    NotWritten {
        /// The layer of the witness.
        layer: LayerId,
        /// Tokens that must be written.
        needed_tokens: u32,
        /// Tokens that it proves.
        written_tokens: u32,
    },
    /// The pools are not registered with an agent.
    NotRegistered,
    /// The registration of the pools is being ended, by another thread or by a call that ran out of time:
    /// nothing new begins with them.
    Unregistering,
    /// The pools are registered with another agent: their names mean nothing to this one.
    OtherAgent {
        /// The one that they are registered with.
        registered: Incarnation,
        /// The one that was given.
        found: Incarnation,
    },
    /// The flight is armed already.
    AlreadyArmed,
    /// The transfer crate refused; the source says why.
    Transfer,
    /// The salt of a namespace is too long.
    SaltTooLong {
        /// Bytes of the salt.
        salt_bytes: u64,
        /// Bytes that are allowed.
        limit_bytes: u64,
    },
    /// A value of a request that cannot be served.
    InvalidRequest {
        /// What was asked.
        field: &'static str,
        /// The value.
        value: u64,
        /// What would be accepted.
        expected: String,
    },
}

/// An error of the cache: what happened, and the error below it if there is one.
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    source: Option<kvgate_transfer::Error>,
}

impl Error {
    /// An error without a cause below it.
    pub fn new(kind: ErrorKind) -> Error {
        Error { kind, source: None }
    }

    /// What happened.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// Whether the same call can succeed later without any change by the caller.
    pub fn is_retryable(&self) -> bool {
        match (&self.kind, &self.source) {
            (ErrorKind::Exhausted { .. }, _) => true,
            (_, Some(source)) => source.is_retryable(),
            _ => false,
        }
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Error {
        Error::new(kind)
    }
}

impl From<kvgate_transfer::Error> for Error {
    /// An out-of-memory error keeps its figures; everything else is `Transfer` with its source.
    fn from(source: kvgate_transfer::Error) -> Error {
        let kind = match *source.kind() {
            kvgate_transfer::ErrorKind::OutOfMemory {
                asked_bytes,
                available_bytes,
            } => ErrorKind::OutOfMemory {
                asked_bytes,
                available_bytes,
            },
            _ => ErrorKind::Transfer,
        };
        Error {
            kind,
            source: Some(source),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ErrorKind::FormatNotAllowed {
                field,
                value,
                expected,
            } => {
                write!(
                    f,
                    "format not allowed: {field} is {value}, expected {expected}"
                )
            }
            ErrorKind::ImpossibleGeometry {
                field,
                value,
                expected,
            } => {
                write!(
                    f,
                    "impossible geometry: {field} is {value}, expected {expected}"
                )
            }
            ErrorKind::ImpossiblePool {
                field,
                value,
                expected,
            } => {
                write!(
                    f,
                    "impossible pool: {field} is {value}, expected {expected}"
                )
            }
            ErrorKind::OutOfMemory {
                asked_bytes,
                available_bytes,
            } => {
                write!(
                    f,
                    "pools of {asked_bytes} bytes do not fit, {available_bytes} available"
                )
            }
            ErrorKind::Exhausted {
                space,
                asked,
                free,
                capacity,
            } => write!(
                f,
                "no room now: {asked} {space} slots asked, {free} of {capacity} free"
            ),
            ErrorKind::NeverFits {
                space,
                asked,
                capacity,
            } => write!(
                f,
                "never fits: {asked} {space} slots asked, the pools have {capacity}"
            ),
            ErrorKind::UnknownLayer { layer, layer_count } => {
                write!(
                    f,
                    "layer {layer} does not exist, the schema has {layer_count}"
                )
            }
            ErrorKind::Slot {
                space,
                index,
                fault,
            } => write!(f, "{space} slot {index}: {fault}"),
            ErrorKind::AlreadyRegistered => f.write_str("the pools are registered already"),
            ErrorKind::NoMemory => f.write_str("the pools have no memory"),
            ErrorKind::CommitGap {
                layer,
                committed,
                tokens,
                limit,
            } => write!(
                f,
                "layer {layer}: commit of tokens {tokens:?} after {committed}, {limit} are reserved"
            ),
            ErrorKind::ReadOnly { component, layer } => {
                write!(f, "{component} of layer {layer} is leased for reading only")
            }
            ErrorKind::Gate { layer, error } => write!(f, "gate of layer {layer}: {error}"),
            ErrorKind::NotAttached {
                layer,
                prefix_tokens,
            } => write!(
                f,
                "layer {layer} is not attached to its prefix of {prefix_tokens} tokens"
            ),
            ErrorKind::NoCheckpoint { prefix_tokens } => write!(
                f,
                "no window and states are kept at the end of the prefix of {prefix_tokens} tokens"
            ),
            ErrorKind::AppendTaken { room } => write!(f, "somebody else appends to request {room}"),
            ErrorKind::OtherFlight { room } => {
                write!(f, "the witness is not of the flight of request {room}")
            }
            ErrorKind::NotWritten {
                layer,
                needed_tokens,
                written_tokens,
            } => write!(
                f,
                "layer {layer} needs {needed_tokens} written tokens, the witness proves {written_tokens}"
            ),
            ErrorKind::NotRegistered => f.write_str("the pools are not registered with an agent"),
            ErrorKind::Unregistering => f.write_str("the registration of the pools is being ended"),
            ErrorKind::OtherAgent { registered, found } => write!(
                f,
                "the pools are registered with another agent: {registered}, not {found}"
            ),
            ErrorKind::AlreadyArmed => f.write_str("the flight is armed already"),
            ErrorKind::Transfer => f.write_str("transfer"),
            ErrorKind::SaltTooLong {
                salt_bytes,
                limit_bytes,
            } => write!(
                f,
                "the salt has {salt_bytes} bytes, at most {limit_bytes} are allowed"
            ),
            ErrorKind::InvalidRequest {
                field,
                value,
                expected,
            } => {
                write!(f, "{field} is {value}, expected {expected}")
            }
        }
    }
}
