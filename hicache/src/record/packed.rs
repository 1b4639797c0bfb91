//! A record as memory keeps it: without the zeros by which its format fills pages. What is not kept needs no check; what
//! is goes through the same [`Intake`] as every other record.

use super::head::{u32_at, write_used_head};
use super::{
    FOOTER_BYTES, HEAD_FIXED_BYTES, HEAD_PART_BYTES, Intake, PART_ALIGN_BYTES, Record, RecordShape,
    Verified, Wanted, write_footer,
};
use crate::miss::Miss;

/// Bytes of a header's checksum.
const CHECKSUM_BYTES: usize = 4;
/// Bytes of the commit mark.
const FOOTER: usize = FOOTER_BYTES as usize;

/// The used part of the header, its checksum, the payload, the commit mark.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    bytes: Vec<u8>,
    /// Bytes of the header that are used, its checksum not counted.
    used_bytes: usize,
    header_bytes: u64,
    record_bytes: u64,
}

/// What is kept of a record, in its order.
pub(super) struct Sections<'a> {
    pub(super) used: &'a [u8],
    pub(super) header_crc32c: u32,
    /// Of the whole header.
    pub(super) header_bytes: u64,
    /// Of the whole record.
    pub(super) record_bytes: u64,
    pub(super) payload: &'a [u8],
    pub(super) mark: &'a [u8],
}

/// Bytes of the header before its zeros.
fn used_bytes(shape: &RecordShape) -> usize {
    (HEAD_FIXED_BYTES + HEAD_PART_BYTES * shape.parts().len() as u64) as usize
}

/// Where the payload begins.
fn payload_at(used_bytes: usize) -> usize {
    (used_bytes + CHECKSUM_BYTES).next_multiple_of(PART_ALIGN_BYTES as usize)
}

impl Packed {
    /// Bytes that a record of that shape takes.
    pub(crate) fn bytes_of(shape: &RecordShape) -> usize {
        payload_at(used_bytes(shape)) + shape.payload_bytes() as usize + FOOTER
    }

    /// Writes a record over `buffer`, checksums included, in one pass over the payload.
    ///
    /// # Panics
    /// If `buffer` has not [`Packed::bytes_of`] bytes, or the payload not those of the shape.
    pub(crate) fn encode(record: &Record<'_>, mut buffer: Vec<u8>) -> Packed {
        let shape = record.shape;
        assert_eq!(buffer.len(), Packed::bytes_of(shape), "bytes of the record");
        let (head, rest) = buffer.split_at_mut(payload_at(used_bytes(shape)));
        let (payload, mark) = rest.split_at_mut(shape.payload_bytes() as usize);
        let crcs = record.copy_payload(payload);
        let used = used_bytes(shape);
        let header_crc32c = write_used_head(record, &crcs, &mut head[..used]);
        head[used..used + CHECKSUM_BYTES].copy_from_slice(&header_crc32c.to_le_bytes());
        write_footer(&record.id, 0, shape.record_bytes(), header_crc32c, mark);
        Packed {
            bytes: buffer,
            used_bytes: used,
            header_bytes: shape.header_bytes(),
            record_bytes: shape.record_bytes(),
        }
    }

    /// Verifies the record, copying its payload.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn read<'b>(
        &self,
        wanted: Wanted<'_>,
        into: &'b mut [u8],
    ) -> Result<Verified<'b>, Miss> {
        Intake::of_packed(wanted, &self.sections(), into)
    }

    fn sections(&self) -> Sections<'_> {
        let (head, rest) = self.bytes.split_at(payload_at(self.used_bytes));
        let (payload, mark) = rest.split_at(rest.len() - FOOTER);
        Sections {
            used: &head[..self.used_bytes],
            header_crc32c: u32_at(head, self.used_bytes),
            header_bytes: self.header_bytes,
            record_bytes: self.record_bytes,
            payload,
            mark,
        }
    }

    /// Bytes that the record has in every other place.
    pub(crate) fn record_bytes(&self) -> u64 {
        self.record_bytes
    }

    /// The buffer, to be used again.
    pub(crate) fn into_buffer(self) -> Vec<u8> {
        self.bytes
    }

    /// The record as it is in every other place.
    #[cfg(feature = "testkit")]
    pub(crate) fn unpacked(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.record_bytes as usize];
        let Sections {
            used,
            header_crc32c,
            payload,
            mark,
            ..
        } = self.sections();
        bytes[..used.len()].copy_from_slice(used);
        let header_end = self.header_bytes as usize;
        bytes[header_end - CHECKSUM_BYTES..header_end]
            .copy_from_slice(&header_crc32c.to_le_bytes());
        bytes[header_end..header_end + payload.len()].copy_from_slice(payload);
        let mark_at = bytes.len() - FOOTER;
        bytes[mark_at..].copy_from_slice(mark);
        bytes
    }

    /// Takes over changed bytes of the record; `false` where they cannot be kept without their zeros.
    #[cfg(feature = "testkit")]
    pub(crate) fn change(&mut self, changed: &[u8]) -> bool {
        if changed.len() as u64 != self.record_bytes {
            return false;
        }
        let (used, header_end) = (self.used_bytes, self.header_bytes as usize);
        let at = payload_at(used);
        let payload_bytes = self.bytes.len() - at - FOOTER;
        let sections = [
            (0..used, 0),
            (header_end - CHECKSUM_BYTES..header_end, used),
            (header_end..header_end + payload_bytes, at),
            (changed.len() - FOOTER..changed.len(), at + payload_bytes),
        ];
        for (from, to) in sections {
            self.bytes[to..to + from.len()].copy_from_slice(&changed[from]);
        }
        self.unpacked() == changed
    }
}
