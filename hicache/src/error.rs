//! The one error type of this crate.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// What went wrong, with the values that say where.
#[derive(Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A configuration value that cannot be used.
    InvalidConfig {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What would be accepted.
        expected: String,
    },
    /// The cache refused; the text says why.
    Cache(kvgate_kvcache::Error),
    /// Another process, or another part of this one, has the directory.
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// The file system refused.
    Io {
        /// What was being done.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// There is no room for a record, and evicting made none.
    Full {
        /// Bytes that the record needs.
        needed_bytes: u64,
        /// Bytes that the tier may use.
        capacity_bytes: u64,
    },
    /// A tier cannot hold one of the components of the schema.
    ComponentRefused {
        /// Name of the component.
        component: &'static str,
        /// Why.
        reason: String,
    },
    /// The store could not be asked.
    Unavailable {
        /// Which.
        store: String,
        /// Why.
        reason: String,
    },
    /// The deadline passed. What was asked for may still happen.
    Late {
        /// Time that was allowed, in milliseconds.
        deadline_ms: u64,
    },
    /// A file that should hold records does not.
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The tier takes nothing more: it was closed, or an error of the device made it read-only.
    ReadOnly {
        /// Why.
        reason: String,
    },
}

/// An error of a tier.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
}

impl Error {
    /// An error of that kind.
    pub fn new(kind: ErrorKind) -> Error {
        Error { kind }
    }

    /// What happened.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// Whether the same call can succeed later without any change by the caller.
    pub fn is_retryable(&self) -> bool {
        match &self.kind {
            ErrorKind::Cache(error) => error.is_retryable(),
            ErrorKind::Locked { .. }
            | ErrorKind::Full { .. }
            | ErrorKind::Late { .. }
            | ErrorKind::Unavailable { .. } => true,
            ErrorKind::Io { source, .. } => source.kind() == io::ErrorKind::StorageFull,
            _ => false,
        }
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Error {
        Error::new(kind)
    }
}

impl From<kvgate_kvcache::Error> for Error {
    fn from(error: kvgate_kvcache::Error) -> Error {
        Error::new(ErrorKind::Cache(error))
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.kind {
            ErrorKind::Cache(error) => Some(error),
            ErrorKind::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            ErrorKind::InvalidConfig {
                field,
                value,
                expected,
            } => write!(f, "{field} is {value}, expected {expected}"),
            ErrorKind::Cache(error) => write!(f, "cache: {error}"),
            ErrorKind::Locked { path } => {
                write!(f, "{} is in use by another process", path.display())
            }
            ErrorKind::Io {
                action,
                path,
                source,
            } => write!(f, "{action} {}: {source}", path.display()),
            ErrorKind::Full {
                needed_bytes,
                capacity_bytes,
            } => write!(
                f,
                "no room for {needed_bytes} bytes in a tier of {capacity_bytes}"
            ),
            ErrorKind::ComponentRefused { component, reason } => {
                write!(f, "the tier cannot hold {component}: {reason}")
            }
            ErrorKind::Unavailable { store, reason } => {
                write!(f, "{store} is unavailable: {reason}")
            }
            ErrorKind::Late { deadline_ms } => write!(f, "not done within {deadline_ms} ms"),
            ErrorKind::Damaged { path, reason } => write!(f, "{}: {reason}", path.display()),
            ErrorKind::ReadOnly { reason } => write!(f, "the tier is read-only: {reason}"),
        }
    }
}
