//! Records: one block of compressed rows, or one boundary to go on from, as bytes.
//!
//! ```text
//! header   magic, version, identity, how far its segment had been synced, component table with a
//!          CRC-32C per part, zeros, CRC-32C of the header; a multiple of 4,096 bytes
//! payload  the parts, each at a multiple of 64 bytes, zeros between them
//! zeros    up to the commit mark
//! footer   the commit mark, the last 64 bytes of the record: its header's checksum, its sequence
//!          number and length, and a CRC-32C of its own
//! ```
//! A record is a multiple of 4,096 bytes, its payload begins at one. Integers are little-endian. Every
//! byte is under a checksum or is a zero that is checked.
//!
//! A reader gets at a payload only through [`Intake`], which verifies all of it: that it is the record
//! asked for, that its component table is the schema's, every checksum, every zero and the commit mark
//! (I-17, I-18). [`Verified`] cannot be had in another way.

pub mod crc;
mod footer;
mod head;
mod intake;
#[cfg(not(kv_loom))]
mod packed;
mod shape;

use std::fmt;

use kvgate_kvcache::identity::{BlockKey, NamespaceDigest};

pub(crate) use footer::{check_footer, write_footer};
pub use head::{Head, HeadPart};
// The log reads its own files with them; a model has no files.
#[cfg(not(kv_loom))]
pub(crate) use head::{PayloadCheck, array_at, set_synced, u32_at, u64_at};
pub use intake::{Intake, Verified, Wanted};
#[cfg(not(kv_loom))]
pub(crate) use packed::Packed;
pub use shape::{PART_ALIGN_BYTES, Part, RecordShape, format_code};

use crate::record::head::write_head;

/// Records begin and end at multiples of this, and so do their payloads begin.
pub const PAGE_BYTES: u64 = 4096;
/// Bytes of the commit mark.
pub const FOOTER_BYTES: u64 = 64;
/// Version of the record format.
pub const FORMAT_VERSION: u32 = 2;
/// Bytes of a header before its component table.
pub(crate) const HEAD_FIXED_BYTES: u64 = 160;
/// Bytes of one entry of the component table.
pub(crate) const HEAD_PART_BYTES: u64 = 32;
/// Longest record that is believed in.
pub(crate) const RECORD_LIMIT_BYTES: u64 = 1 << 30;

/// What a record holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum RecordKind {
    /// The compressed rows of one block, all layers.
    Block = 1,
    /// Window and overlap rows behind a block, all layers: what is needed to go on there.
    Checkpoint = 2,
}

impl RecordKind {
    pub(crate) fn from_code(code: u8) -> Option<RecordKind> {
        match code {
            1 => Some(RecordKind::Block),
            2 => Some(RecordKind::Checkpoint),
            _ => None,
        }
    }
}

impl fmt::Display for RecordKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RecordKind::Block => "block",
            RecordKind::Checkpoint => "checkpoint",
        })
    }
}

/// The name of a record in every tier: the key of the block that it holds, or that ends where it goes
/// on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordId {
    /// What it holds.
    pub kind: RecordKind,
    /// The key of the block.
    pub key: BlockKey,
}

impl fmt::Display for RecordId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.kind, self.key)
    }
}

/// A record to be stored.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// Its namespace.
    pub namespace: NamespaceDigest,
    /// Its name.
    pub id: RecordId,
    /// The key of the block before the block that `id` names.
    pub parent: BlockKey,
    /// Tokens before the block, or before the boundary of a checkpoint.
    pub position: u64,
    /// Its parts.
    pub shape: &'a RecordShape,
    /// The parts, laid out as the shape says. What lies between them is not looked at.
    pub payload: &'a [u8],
}

impl Record<'_> {
    /// What a reader asks for to get this record.
    pub fn wanted(&self) -> Wanted<'_> {
        Wanted {
            namespace: self.namespace,
            id: self.id,
            parent: self.parent,
            position: self.position,
            shape: self.shape,
        }
    }

    /// Writes the record over `out`, checksums included, in one pass over the payload.
    ///
    /// # Panics
    /// If `out` has not [`RecordShape::record_bytes`] bytes, or the payload not
    /// [`RecordShape::payload_bytes`].
    pub fn encode(&self, sequence: u64, out: &mut [u8]) {
        let shape = self.shape;
        assert_eq!(
            out.len() as u64,
            shape.record_bytes(),
            "bytes of the record"
        );
        assert_eq!(
            self.payload.len() as u64,
            shape.payload_bytes(),
            "bytes of the payload"
        );
        let (header, rest) = out.split_at_mut(shape.header_bytes() as usize);
        let (payload, tail) = rest.split_at_mut(self.payload.len());
        let crcs = self.copy_payload(payload);
        let header_crc = write_head(self, sequence, &crcs, header);
        tail.fill(0);
        let record_bytes = shape.record_bytes();
        write_footer(&self.id, sequence, record_bytes, header_crc, tail);
    }

    /// Copies the payload over `out`, zeros between the parts. Answers the checksums of the parts.
    fn copy_payload(&self, out: &mut [u8]) -> Vec<u32> {
        let mut end = 0;
        let mut crcs = Vec::with_capacity(self.shape.parts().len());
        for part in self.shape.parts() {
            let range = part.range();
            out[end..range.start].fill(0);
            end = range.end;
            crcs.push(crc::copy_crc32c(
                &mut out[range.clone()],
                &self.payload[range],
            ));
        }
        out[end..].fill(0);
        crcs
    }

    /// The bytes of the record as one vector.
    pub fn to_bytes(&self, sequence: u64) -> Vec<u8> {
        let mut out = vec![0; self.shape.record_bytes() as usize];
        self.encode(sequence, &mut out);
        out
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
