//! Why a read gave no data. Everything that is not a verified record is one of these; none is a hit.

use std::fmt;
use std::io;

use kvgate_kvcache::LayerId;
use kvgate_kvcache::schema::Component;

/// The cause of a miss.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Miss {
    /// The tier does not have the record.
    Absent,
    /// The stored bytes are fewer or more than the record has.
    Length {
        /// Bytes of the record.
        expected_bytes: u64,
        /// Bytes found.
        found_bytes: u64,
    },
    /// The header is not one: wrong magic, wrong checksum, impossible numbers.
    Header {
        /// What does not fit.
        reason: &'static str,
    },
    /// A format version that this build does not read. Such a record is not guessed at.
    Version {
        /// The version found.
        found: u32,
    },
    /// A record, but another one.
    Identity {
        /// The field that differs: namespace, kind, key, parent or position.
        field: &'static str,
    },
    /// The component table is not that of the schema.
    Layout {
        /// What differs.
        reason: String,
    },
    /// Bytes of a component do not match their checksum.
    Checksum {
        /// The component.
        component: Component,
        /// Its layer.
        layer: LayerId,
    },
    /// Padding that is not zero.
    Padding {
        /// Where, from the start of the record, in bytes.
        offset_bytes: u64,
    },
    /// The commit mark is missing or belongs to another record.
    Commit,
    /// The device or the file system answered with an error.
    Io {
        /// Its kind.
        kind: io::ErrorKind,
    },
    /// The store could not be asked.
    Unavailable {
        /// Why.
        reason: String,
    },
    /// The answer did not come in time.
    Late {
        /// Time that was allowed, in milliseconds.
        deadline_ms: u64,
    },
}

impl Miss {
    /// Name of the cause as the value of a metric's label.
    pub fn label(&self) -> &'static str {
        match self {
            Miss::Absent => "absent",
            Miss::Length { .. } => "length",
            Miss::Header { .. } => "header",
            Miss::Version { .. } => "version",
            Miss::Identity { .. } => "identity",
            Miss::Layout { .. } => "layout",
            Miss::Checksum { .. } => "checksum",
            Miss::Padding { .. } => "padding",
            Miss::Commit => "commit",
            Miss::Io { .. } => "io",
            Miss::Unavailable { .. } => "unavailable",
            Miss::Late { .. } => "late",
        }
    }

    /// Whether stored bytes were found and are not what they should be.
    pub fn is_damage(&self) -> bool {
        !matches!(
            self,
            Miss::Absent | Miss::Io { .. } | Miss::Unavailable { .. } | Miss::Late { .. }
        )
    }
}

impl From<io::Error> for Miss {
    fn from(error: io::Error) -> Miss {
        Miss::Io { kind: error.kind() }
    }
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Miss::Absent => f.write_str("not there"),
            Miss::Length {
                expected_bytes,
                found_bytes,
            } => write!(f, "{found_bytes} bytes, expected {expected_bytes}"),
            Miss::Header { reason } => write!(f, "header: {reason}"),
            Miss::Version { found } => write!(f, "format version {found} is not known"),
            Miss::Identity { field } => write!(f, "another record: its {field} differs"),
            Miss::Layout { reason } => write!(f, "component table: {reason}"),
            Miss::Checksum { component, layer } => {
                write!(f, "checksum of {component} of layer {layer}")
            }
            Miss::Padding { offset_bytes } => {
                write!(f, "padding at byte {offset_bytes} is not zero")
            }
            Miss::Commit => f.write_str("no commit mark"),
            Miss::Io { kind } => write!(f, "input or output: {kind}"),
            Miss::Unavailable { reason } => write!(f, "unavailable: {reason}"),
            Miss::Late { deadline_ms } => write!(f, "no answer within {deadline_ms} ms"),
        }
    }
}
