//! A segment: one file of the log.
//!
//! ```text
//! 4,096 bytes  magic, version, number, number and length of the sealed segment before, zeros, CRC-32C
//! records      one behind the other
//! index        only in a sealed segment: what each record is and where, zeros, and in the last 64 bytes
//!              of the file a trailer with the checksum of the index
//! ```

use kvgate_kvcache::identity::{BlockKey, NamespaceDigest};

use crate::miss::Miss;
use crate::record::crc::{Crc32c, crc32c, first_nonzero};
use crate::record::{Head, PAGE_BYTES, RecordId, RecordKind, array_at, u32_at, u64_at};

use super::medium::{MediumFile, read_exact_at};

/// Version of the segment format.
pub const SEGMENT_VERSION: u32 = 2;
const HEADER_MAGIC: [u8; 8] = *b"kvgsegmt";
const INDEX_MAGIC: [u8; 8] = *b"kvgindex";
const TRAILER_MAGIC: [u8; 8] = *b"kvgseald";
const TRAILER_BYTES: usize = 64;
const INDEX_FIXED_BYTES: usize = 16;
const ENTRY_BYTES: usize = 144;
/// Most entries that are believed in.
const ENTRY_LIMIT: u32 = 1 << 20;

/// Number of a segment: later ones hold later records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub u32);

impl SegmentId {
    /// The name of its file.
    pub fn file_name(self) -> String {
        format!("segment-{:010}.kvlog", self.0)
    }

    /// The segment whose file has that name.
    pub fn from_file_name(name: &str) -> Option<SegmentId> {
        let digits = name.strip_prefix("segment-")?.strip_suffix(".kvlog")?;
        let id = SegmentId(digits.parse().ok()?);
        (id.file_name() == name).then_some(id)
    }
}

/// What the index of a segment says about one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The record.
    pub id: RecordId,
    /// Whether it says that the record of that name is gone.
    pub is_removal: bool,
    /// Its namespace.
    pub namespace: NamespaceDigest,
    /// The key of the block before.
    pub parent: BlockKey,
    /// Tokens before the block or the boundary.
    pub position: u64,
    /// Where it begins in the file.
    pub offset_bytes: u64,
    /// Its length.
    pub record_bytes: u64,
    /// Its number in the log.
    pub sequence: u64,
    /// Checksum of its header.
    pub header_crc32c: u32,
}

impl Entry {
    pub(crate) fn of(head: &Head, offset_bytes: u64) -> Entry {
        Entry {
            id: head.id,
            is_removal: head.is_removal,
            namespace: head.namespace,
            parent: head.parent,
            position: head.position,
            offset_bytes,
            record_bytes: head.record_bytes,
            sequence: head.sequence,
            header_crc32c: head.header_crc32c,
        }
    }

    /// Where it ends.
    pub fn end_bytes(&self) -> u64 {
        self.offset_bytes + self.record_bytes
    }

    fn write(&self, out: &mut [u8]) {
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &[self.id.kind as u8, u8::from(self.is_removal)]);
        put(4, &self.header_crc32c.to_le_bytes());
        put(8, &self.id.key.0);
        put(40, &self.parent.0);
        put(72, &self.namespace.0);
        put(104, &self.position.to_le_bytes());
        put(112, &self.offset_bytes.to_le_bytes());
        put(120, &self.record_bytes.to_le_bytes());
        put(128, &self.sequence.to_le_bytes());
    }

    fn parse(bytes: &[u8]) -> Option<Entry> {
        Some(Entry {
            id: RecordId {
                kind: RecordKind::from_code(bytes[0])?,
                key: BlockKey(array_at(bytes, 8)),
            },
            is_removal: bytes[1] == 1,
            header_crc32c: u32_at(bytes, 4),
            parent: BlockKey(array_at(bytes, 40)),
            namespace: NamespaceDigest(array_at(bytes, 72)),
            position: u64_at(bytes, 104),
            offset_bytes: u64_at(bytes, 112),
            record_bytes: u64_at(bytes, 120),
            sequence: u64_at(bytes, 128),
        })
    }
}

/// A segment that was sealed, and its length: nothing is written to it any more.
pub(crate) type Sealed = (SegmentId, u64);

/// The first page of a segment. It speaks for the one before, so that a sealed segment that was cut is
/// told from one that a crash left unfinished.
pub(crate) fn header_page(id: SegmentId, before: Option<Sealed>) -> Vec<u8> {
    let mut page = vec![0; PAGE_BYTES as usize];
    page[..8].copy_from_slice(&HEADER_MAGIC);
    page[8..12].copy_from_slice(&SEGMENT_VERSION.to_le_bytes());
    page[12..16].copy_from_slice(&id.0.to_le_bytes());
    if let Some((before, len_bytes)) = before {
        page[16..20].copy_from_slice(&before.0.to_le_bytes());
        page[24..32].copy_from_slice(&len_bytes.to_le_bytes());
    }
    let end = page.len() - 4;
    let crc = crc32c(&page[..end]);
    page[end..].copy_from_slice(&crc.to_le_bytes());
    page
}

/// Whether `page` is the first page of segment `id`, and what it says about the one before.
///
/// # Errors
/// `Header`, `Version` and `Identity`.
pub(crate) fn check_header_page(id: SegmentId, page: &[u8]) -> Result<Option<Sealed>, Miss> {
    let end = PAGE_BYTES as usize - 4;
    if page.len() < PAGE_BYTES as usize || page[..8] != HEADER_MAGIC {
        let reason = "no segment begins here";
        return Err(Miss::Header { reason });
    }
    // Another version may have its checksum elsewhere.
    match u32_at(page, 8) {
        SEGMENT_VERSION => {}
        found => return Err(Miss::Version { found }),
    }
    if crc32c(&page[..end]) != u32_at(page, end) {
        let reason = "checksum of the segment's header";
        return Err(Miss::Header { reason });
    }
    if u32_at(page, 12) != id.0 {
        return Err(Miss::Identity { field: "segment" });
    }
    let before = (SegmentId(u32_at(page, 16)), u64_at(page, 24));
    Ok((before.1 > 0).then_some(before))
}

/// Bytes that the index of so many records takes.
pub(crate) fn index_bytes(entry_count: usize) -> u64 {
    let bytes = INDEX_FIXED_BYTES + ENTRY_BYTES * entry_count + TRAILER_BYTES;
    (bytes as u64).next_multiple_of(PAGE_BYTES)
}

/// The index of a segment whose records end at `offset_bytes`.
pub(crate) fn index_block(id: SegmentId, offset_bytes: u64, entries: &[Entry]) -> Vec<u8> {
    let mut block = vec![0; index_bytes(entries.len()) as usize];
    block[..8].copy_from_slice(&INDEX_MAGIC);
    block[8..12].copy_from_slice(&SEGMENT_VERSION.to_le_bytes());
    block[12..16].copy_from_slice(&(entries.len() as u32).to_le_bytes());
    let slots = block[INDEX_FIXED_BYTES..].chunks_exact_mut(ENTRY_BYTES);
    for (slot, entry) in slots.zip(entries) {
        entry.write(slot);
    }
    let start = block.len() - TRAILER_BYTES;
    let crc = crc32c(&block[..start]);
    let trailer = &mut block[start..];
    trailer[..8].copy_from_slice(&TRAILER_MAGIC);
    trailer[8..12].copy_from_slice(&id.0.to_le_bytes());
    trailer[12..16].copy_from_slice(&(entries.len() as u32).to_le_bytes());
    trailer[16..24].copy_from_slice(&offset_bytes.to_le_bytes());
    trailer[24..28].copy_from_slice(&crc.to_le_bytes());
    let end = TRAILER_BYTES - 4;
    let crc = crc32c(&trailer[..end]);
    trailer[end..].copy_from_slice(&crc.to_le_bytes());
    block
}

/// The index of a sealed segment of `len_bytes` bytes, and where it begins; `None` for one that is not
/// sealed, or whose index is damaged.
///
/// # Errors
/// What the device answers.
pub(crate) fn read_index(
    id: SegmentId,
    file: &dyn MediumFile,
    len_bytes: u64,
) -> std::io::Result<Option<(Vec<Entry>, u64)>> {
    if len_bytes < 2 * PAGE_BYTES || !len_bytes.is_multiple_of(PAGE_BYTES) {
        return Ok(None);
    }
    let mut trailer = [0; TRAILER_BYTES];
    read_exact_at(file, &mut trailer, len_bytes - TRAILER_BYTES as u64)?;
    let end = TRAILER_BYTES - 4;
    let (count, offset_bytes) = (u32_at(&trailer, 12), u64_at(&trailer, 16));
    let is_trailer = trailer[..8] == TRAILER_MAGIC
        && crc32c(&trailer[..end]) == u32_at(&trailer, end)
        && u32_at(&trailer, 8) == id.0
        && count <= ENTRY_LIMIT
        && offset_bytes.checked_add(index_bytes(count as usize)) == Some(len_bytes);
    if !is_trailer {
        return Ok(None);
    }
    let mut block = vec![0; index_bytes(count as usize) as usize];
    read_exact_at(file, &mut block, offset_bytes)?;
    let start = block.len() - TRAILER_BYTES;
    let is_index = crc32c(&block[..start]) == u32_at(&trailer, 24)
        && block[..8] == INDEX_MAGIC
        && u32_at(&block, 8) == SEGMENT_VERSION
        && u32_at(&block, 12) == count;
    if !is_index {
        return Ok(None);
    }
    let slots = block[INDEX_FIXED_BYTES..].chunks_exact(ENTRY_BYTES);
    let entries: Option<Vec<Entry>> = slots.take(count as usize).map(Entry::parse).collect();
    Ok(entries.map(|entries| (entries, offset_bytes)))
}

/// Whether the records that `entries` names lie one behind the other from the first page to `end_bytes`.
pub(crate) fn is_gapless(entries: &[Entry], end_bytes: u64) -> bool {
    let mut at = PAGE_BYTES;
    for entry in entries {
        if entry.offset_bytes != at || entry.record_bytes == 0 {
            return false;
        }
        at = at.saturating_add(entry.record_bytes);
    }
    at == end_bytes
}

/// Checksum of a whole index, as the manifest keeps it.
pub(crate) fn entries_crc(entries: &[Entry]) -> u32 {
    let mut crc = Crc32c::new();
    for entry in entries {
        let mut bytes = [0; ENTRY_BYTES];
        entry.write(&mut bytes);
        crc.update(&bytes);
    }
    crc.value()
}

/// Whether `page` is the first one of an index.
pub(crate) fn begins_index(page: &[u8]) -> bool {
    page.starts_with(&INDEX_MAGIC)
}

/// Whether a page holds nothing.
pub(crate) fn is_blank(page: &[u8]) -> bool {
    first_nonzero(page).is_none()
}
