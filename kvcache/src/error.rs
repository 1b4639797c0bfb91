//! The one error type of this crate.

use std::fmt;

use crate::ids::LayerId;
use crate::schema::Space;

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
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
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
        matches!(self.kind, ErrorKind::Exhausted { .. })
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Error {
        Error::new(kind)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
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
