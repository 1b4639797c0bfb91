//! A cursor over received bytes: every read is checked, no count is believed before it fits.

use std::fmt;

use bytes::{Buf, Bytes};

use super::wire::Kind;

/// Why bytes are not a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WireError {
    /// The first bytes are not a kvgate link.
    BadMagic([u8; 4]),
    /// The peer speaks another version.
    Version { ours: u16, theirs: u16 },
    /// No such kind in this version.
    UnknownKind(u16),
    /// The body is longer than its kind allows.
    TooLong {
        kind: Kind,
        body_bytes: u32,
        limit_bytes: usize,
    },
    /// The check sum does not fit.
    Crc { expected: u32, found: u32 },
    /// The body ends inside a field.
    Truncated { field: &'static str },
    /// Bytes are left behind the last field.
    Trailing { extra_bytes: usize },
    /// A field holds a value that it cannot have.
    BadValue { field: &'static str, value: u64 },
    /// A frame of this kind has no meaning here.
    Misplaced(Kind),
    /// The peer's numbers in a shared ring cannot be, or its socket contradicts them.
    Ring,
}

impl WireError {
    /// Whether bytes that went wrong on their way look like this: it was found before a check sum was right.
    #[cfg_attr(kv_loom, allow(dead_code))] // For backends.
    pub(crate) fn may_be_noise(&self) -> bool {
        match self {
            Self::BadMagic(_) | Self::UnknownKind(_) | Self::TooLong { .. } | Self::Crc { .. } => {
                true
            }
            Self::Version { .. }
            | Self::Truncated { .. }
            | Self::Trailing { .. }
            | Self::BadValue { .. }
            | Self::Misplaced(_)
            | Self::Ring => false,
        }
    }
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadMagic(found) => write!(f, "not a kvgate link: first bytes {found:02x?}"),
            Self::Version { ours, theirs } => {
                write!(
                    f,
                    "link version {theirs} of the peer, this build speaks {ours}"
                )
            }
            Self::UnknownKind(kind) => write!(f, "unknown frame kind {kind}"),
            Self::TooLong {
                kind,
                body_bytes,
                limit_bytes,
            } => write!(
                f,
                "{kind:?} frame of {body_bytes} bytes, at most {limit_bytes} allowed"
            ),
            Self::Crc { expected, found } => {
                write!(
                    f,
                    "frame check sum {found:#010x}, computed {expected:#010x}"
                )
            }
            Self::Truncated { field } => write!(f, "frame ends inside field {field}"),
            Self::Trailing { extra_bytes } => {
                write!(f, "{extra_bytes} bytes behind the last field of a frame")
            }
            Self::BadValue { field, value } => write!(f, "field {field} holds {value}"),
            Self::Ring => f.write_str("the ring of the connection holds what no peer writes"),
            Self::Misplaced(kind) => write!(f, "{kind:?} frame out of place"),
        }
    }
}

impl std::error::Error for WireError {}

/// Cursor over a body whose check sum was right; hostile values are still possible.
pub(crate) struct Fields {
    bytes: Bytes,
}

impl Fields {
    pub(crate) fn new(bytes: Bytes) -> Self {
        Self { bytes }
    }

    /// Bytes that were not read.
    pub(crate) fn left_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// All that is left, without a copy.
    pub(crate) fn remaining(&mut self) -> Bytes {
        std::mem::take(&mut self.bytes)
    }

    /// The next `count` bytes, without a copy.
    pub(crate) fn take(&mut self, count: usize, field: &'static str) -> Result<Bytes, WireError> {
        if count > self.bytes.len() {
            return Err(WireError::Truncated { field });
        }
        Ok(self.bytes.split_to(count))
    }

    pub(crate) fn array<const N: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<[u8; N], WireError> {
        let taken = self.bytes.first_chunk().copied();
        let taken = taken.ok_or(WireError::Truncated { field })?;
        // A part of its own would be counted, and there are thousands of fields in a long frame.
        self.bytes.advance(N);
        Ok(taken)
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, WireError> {
        Ok(u8::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u128(&mut self, field: &'static str) -> Result<u128, WireError> {
        Ok(u128::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn bool(&mut self, field: &'static str) -> Result<bool, WireError> {
        match self.u8(field)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(WireError::BadValue {
                field,
                value: u64::from(other),
            }),
        }
    }

    /// A count of elements of `element_bytes` bytes each: at most `limit`, and no more than the
    /// bytes that are really there, so that it may size an allocation.
    pub(crate) fn count(
        &mut self,
        limit: usize,
        element_bytes: usize,
        field: &'static str,
    ) -> Result<usize, WireError> {
        let count = self.u32(field)? as usize;
        if count > limit {
            return Err(WireError::BadValue {
                field,
                value: count as u64,
            });
        }
        if count.saturating_mul(element_bytes) > self.bytes.len() {
            return Err(WireError::Truncated { field });
        }
        Ok(count)
    }

    /// UTF-8 text of `count` bytes.
    pub(crate) fn text(&mut self, count: usize, field: &'static str) -> Result<String, WireError> {
        let bytes = self.take(count, field)?;
        String::from_utf8(bytes.to_vec()).map_err(|error| WireError::BadValue {
            field,
            value: error.utf8_error().valid_up_to() as u64,
        })
    }

    pub(crate) fn finish(&self) -> Result<(), WireError> {
        match self.bytes.len() {
            0 => Ok(()),
            extra_bytes => Err(WireError::Trailing { extra_bytes }),
        }
    }
}
