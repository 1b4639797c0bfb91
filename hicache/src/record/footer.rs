//! The commit mark: a record without it does not exist (I-18).

use super::crc::crc32c;
use super::{FOOTER_BYTES, Head, RecordId};

const MAGIC: [u8; 8] = *b"kvgcommt";
/// Bytes of the mark before its checksum.
const CHECKED_BYTES: usize = FOOTER_BYTES as usize - 4;

/// Writes the mark over the end of `tail`.
pub(crate) fn write_footer(
    id: &RecordId,
    sequence: u64,
    record_bytes: u64,
    header_crc: u32,
    tail: &mut [u8],
) {
    let start = tail.len() - FOOTER_BYTES as usize;
    let mark = mark_of(id, sequence, record_bytes, header_crc);
    tail[start..].copy_from_slice(&mark);
}

/// Whether `mark`, the last 64 bytes of a record, commits the record with that header.
pub(crate) fn check_footer(head: &Head, mark: &[u8]) -> bool {
    let expected = mark_of(
        &head.id,
        head.sequence,
        head.record_bytes,
        head.header_crc32c,
    );
    mark == expected
}

fn mark_of(id: &RecordId, sequence: u64, record_bytes: u64, header_crc: u32) -> [u8; 64] {
    let mut mark = [0; FOOTER_BYTES as usize];
    mark[..8].copy_from_slice(&MAGIC);
    mark[8..16].copy_from_slice(&sequence.to_le_bytes());
    mark[16..24].copy_from_slice(&record_bytes.to_le_bytes());
    mark[24..28].copy_from_slice(&header_crc.to_le_bytes());
    mark[28] = id.kind as u8;
    mark[32..48].copy_from_slice(&id.key.0[..16]);
    let crc = crc32c(&mark[..CHECKED_BYTES]);
    mark[CHECKED_BYTES..].copy_from_slice(&crc.to_le_bytes());
    mark
}
