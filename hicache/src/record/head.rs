//! The header of a record: writing, parsing, and the check of the payload that it describes.

use kvgate_kvcache::LayerId;
use kvgate_kvcache::identity::{BlockKey, NamespaceDigest};
use kvgate_kvcache::schema::Component;

use super::crc::{Crc32c, crc32c, first_nonzero};
use super::shape::{header_bytes, record_bytes};
#[cfg(not(kv_loom))]
use super::write_footer;
use super::{
    FORMAT_VERSION, HEAD_FIXED_BYTES, HEAD_PART_BYTES, PAGE_BYTES, PART_ALIGN_BYTES, Part,
    RECORD_LIMIT_BYTES, Record, RecordId, RecordKind, Wanted,
};
use crate::miss::Miss;

const MAGIC: [u8; 8] = *b"kvgrecrd";
// Where the header has what is needed to change it in place, in bytes.
const HEADER_BYTES_AT: usize = 12;
const RECORD_BYTES_AT: usize = 136;
const SEQUENCE_AT: usize = 144;
const SYNCED_AT: usize = 152;
/// Most parts that are believed in: far above any model.
const PART_LIMIT: u32 = 1 << 13;

/// One entry of the component table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadPart {
    /// The part.
    pub part: Part,
    /// CRC-32C of its bytes.
    pub crc32c: u32,
}

/// What the header of a record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Its namespace.
    pub namespace: NamespaceDigest,
    /// Its name.
    pub id: RecordId,
    /// The key of the block before.
    pub parent: BlockKey,
    /// Tokens before the block or the boundary.
    pub position: u64,
    /// Its number in its log.
    pub sequence: u64,
    /// How much of its segment had been synced when it was written, in bytes from the start of the file: what a
    /// crash has torn lies behind that. 0 outside of a log.
    pub synced_bytes: u64,
    /// Whether it stands for the removal of the record of that name. It has no parts then.
    pub is_removal: bool,
    /// The component table.
    pub parts: Vec<HeadPart>,
    /// Bytes of the header.
    pub header_bytes: u64,
    /// Bytes of the payload.
    pub payload_bytes: u64,
    /// Bytes of the record.
    pub record_bytes: u64,
    /// Checksum of the header.
    pub header_crc32c: u32,
}

/// Writes the header of `record` over `out` and answers its checksum.
pub(super) fn write_head(record: &Record<'_>, sequence: u64, crcs: &[u32], out: &mut [u8]) -> u32 {
    head_of(record, sequence, crcs).write(out)
}

/// Writes the used part of the header of `record` over `out`. Answers the checksum that the whole header has.
#[cfg(not(kv_loom))]
pub(super) fn write_used_head(record: &Record<'_>, crcs: &[u32], out: &mut [u8]) -> u32 {
    out.fill(0);
    head_of(record, 0, crcs).write_fields(out);
    used_crc32c(out, record.shape.header_bytes())
}

/// The checksum of a header of `header_bytes` bytes of which `used` are not zeros.
#[cfg(not(kv_loom))]
pub(super) fn used_crc32c(used: &[u8], header_bytes: u64) -> u32 {
    const ZEROS: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];
    let mut crc = Crc32c::new();
    crc.update(used);
    let mut left = (header_bytes as usize).saturating_sub(4 + used.len());
    while left > 0 {
        let count = left.min(ZEROS.len());
        crc.update(&ZEROS[..count]);
        left -= count;
    }
    crc.value()
}

fn head_of(record: &Record<'_>, sequence: u64, crcs: &[u32]) -> Head {
    let parts = record.shape.parts();
    Head {
        namespace: record.namespace,
        id: record.id,
        parent: record.parent,
        position: record.position,
        sequence,
        synced_bytes: 0,
        is_removal: false,
        parts: std::iter::zip(parts, crcs)
            .map(|(&part, &crc32c)| HeadPart { part, crc32c })
            .collect(),
        header_bytes: record.shape.header_bytes(),
        payload_bytes: record.shape.payload_bytes(),
        record_bytes: record.shape.record_bytes(),
        header_crc32c: 0,
    }
}

impl Head {
    /// The header that says that a record is gone.
    #[cfg(not(kv_loom))]
    pub(crate) fn removal(namespace: NamespaceDigest, id: RecordId, sequence: u64) -> Head {
        let header_bytes = header_bytes(0, 0);
        Head {
            namespace,
            id,
            parent: BlockKey([0; 32]),
            position: 0,
            sequence,
            synced_bytes: 0,
            is_removal: true,
            parts: Vec::new(),
            header_bytes,
            payload_bytes: 0,
            record_bytes: record_bytes(header_bytes, 0),
            header_crc32c: 0,
        }
    }

    /// Writes the header over `out`, which has `header_bytes` bytes, and answers its checksum.
    pub(crate) fn write(&self, out: &mut [u8]) -> u32 {
        out.fill(0);
        self.write_fields(out);
        write_checksum(out)
    }

    /// Writes everything that is not zero, but for the checksum.
    fn write_fields(&self, out: &mut [u8]) {
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(8, &FORMAT_VERSION.to_le_bytes());
        put(HEADER_BYTES_AT, &(self.header_bytes as u32).to_le_bytes());
        put(16, &[self.id.kind as u8, u8::from(self.is_removal)]);
        put(20, &(self.parts.len() as u32).to_le_bytes());
        put(24, &self.position.to_le_bytes());
        put(32, &self.namespace.0);
        put(64, &self.id.key.0);
        put(96, &self.parent.0);
        put(128, &self.payload_bytes.to_le_bytes());
        put(RECORD_BYTES_AT, &self.record_bytes.to_le_bytes());
        put(SEQUENCE_AT, &self.sequence.to_le_bytes());
        put(SYNCED_AT, &self.synced_bytes.to_le_bytes());
        for (index, HeadPart { part, crc32c }) in self.parts.iter().enumerate() {
            let at = (HEAD_FIXED_BYTES + HEAD_PART_BYTES * index as u64) as usize;
            let code = part.format | u8::from(part.is_half) << 7;
            put(at, &[part.component.index() as u8, code]);
            put(at + 2, &part.layer.0.to_le_bytes());
            put(at + 4, &part.row_bytes.to_le_bytes());
            put(at + 8, &part.row_count.to_le_bytes());
            put(at + 12, &crc32c.to_le_bytes());
            put(at + 16, &part.offset_bytes.to_le_bytes());
            put(at + 24, &part.length_bytes().to_le_bytes());
        }
    }

    /// Bytes of the header that begins with `page`, the first bytes of a record.
    ///
    /// # Errors
    /// `Header` and `Version`.
    pub(crate) fn length_of(page: &[u8]) -> Result<u64, Miss> {
        let refuse = |reason| Err(Miss::Header { reason });
        if page.len() < HEAD_FIXED_BYTES as usize {
            return refuse("too short");
        }
        if page[..8] != MAGIC {
            return refuse("no record begins here");
        }
        match u32_at(page, 8) {
            FORMAT_VERSION => {}
            found => return Err(Miss::Version { found }),
        }
        let (length, part_count) = (u64::from(u32_at(page, HEADER_BYTES_AT)), u32_at(page, 20));
        if part_count > PART_LIMIT {
            return refuse("too many parts");
        }
        if length != header_bytes(part_count as usize, u64_at(page, 128)) {
            return refuse("its length does not fit its table");
        }
        Ok(length)
    }

    /// Parses a whole header. Nothing of it is believed before its checksum is right.
    ///
    /// # Errors
    /// `Header` and `Version`.
    pub fn parse(bytes: &[u8]) -> Result<Head, Miss> {
        let refuse = |reason| Miss::Header { reason };
        if Head::length_of(bytes)? != bytes.len() as u64 {
            return Err(refuse("its length is not that of the bytes"));
        }
        let end = bytes.len() - 4;
        let header_crc32c = u32_at(bytes, end);
        if crc32c(&bytes[..end]) != header_crc32c {
            return Err(refuse("checksum"));
        }
        Head::parse_fields(bytes, bytes.len() as u64, header_crc32c)
    }

    /// Parses a header of which only the used part is there.
    ///
    /// # Errors
    /// As [`Head::parse`].
    #[cfg(not(kv_loom))]
    pub(super) fn parse_used(
        used: &[u8],
        header_bytes: u64,
        header_crc32c: u32,
    ) -> Result<Head, Miss> {
        let refuse = |reason| Err(Miss::Header { reason });
        let is_whole = |length: u64| {
            let part_bytes = HEAD_PART_BYTES * u64::from(u32_at(used, 20));
            length == header_bytes && HEAD_FIXED_BYTES + part_bytes == used.len() as u64
        };
        if !is_whole(Head::length_of(used)?) {
            return refuse("its length is not that of the bytes");
        }
        if used_crc32c(used, header_bytes) != header_crc32c {
            return refuse("checksum");
        }
        Head::parse_fields(used, header_bytes, header_crc32c)
    }

    /// What a header says whose length and checksum are right.
    fn parse_fields(bytes: &[u8], header_bytes: u64, header_crc32c: u32) -> Result<Head, Miss> {
        let refuse = |reason| Miss::Header { reason };
        let kind = RecordKind::from_code(bytes[16]).ok_or(refuse("unknown kind"))?;
        let is_removal = match bytes[17] {
            0 => false,
            1 => true,
            _ => return Err(refuse("unknown flag")),
        };
        let part_count = u32_at(bytes, 20) as usize;
        let mut parts = Vec::with_capacity(part_count);
        let mut end_bytes = 0;
        for index in 0..part_count {
            let at = HEAD_FIXED_BYTES as usize + HEAD_PART_BYTES as usize * index;
            let part = part_at(bytes, at, end_bytes).ok_or(refuse("impossible part"))?;
            end_bytes = part.part.offset_bytes + part.part.length_bytes();
            parts.push(part);
        }
        let head = Head {
            namespace: NamespaceDigest(array_at(bytes, 32)),
            id: RecordId {
                kind,
                key: BlockKey(array_at(bytes, 64)),
            },
            parent: BlockKey(array_at(bytes, 96)),
            position: u64_at(bytes, 24),
            sequence: u64_at(bytes, SEQUENCE_AT),
            synced_bytes: u64_at(bytes, SYNCED_AT),
            is_removal,
            parts,
            header_bytes,
            payload_bytes: u64_at(bytes, 128),
            record_bytes: u64_at(bytes, RECORD_BYTES_AT),
            header_crc32c,
        };
        let fits = head.payload_bytes == end_bytes.next_multiple_of(PART_ALIGN_BYTES)
            && head.record_bytes == record_bytes(head.header_bytes, head.payload_bytes)
            && head.record_bytes <= RECORD_LIMIT_BYTES
            && head.is_removal == (head.payload_bytes == 0);
        match fits {
            true => Ok(head),
            false => Err(refuse("its lengths contradict each other")),
        }
    }

    /// Whether this is the record that `wanted` describes: its identity, and the schema's parts.
    ///
    /// # Errors
    /// `Identity` and `Layout`; a removal is `Absent`.
    pub fn matches(&self, wanted: &Wanted<'_>) -> Result<(), Miss> {
        let identity = [
            ("namespace", self.namespace == wanted.namespace),
            ("kind", self.id.kind == wanted.id.kind),
            ("key", self.id.key == wanted.id.key),
        ];
        let behind = [
            ("parent", self.parent == wanted.parent),
            ("position", self.position == wanted.position),
        ];
        let differs = |fields: &[(&'static str, bool)]| {
            let first = fields.iter().find(|(_, is_equal)| !is_equal);
            first.map_or(Ok(()), |(field, _)| Err(Miss::Identity { field }))
        };
        differs(&identity)?;
        if self.is_removal {
            return Err(Miss::Absent);
        }
        differs(&behind)?;
        let expected = wanted.shape.parts();
        if self.parts.len() != expected.len() {
            let reason = format!("{} parts, expected {}", self.parts.len(), expected.len());
            return Err(Miss::Layout { reason });
        }
        for (found, expected) in self.parts.iter().zip(expected) {
            if found.part != *expected {
                let reason = format!("{} of layer {} differs", expected.component, expected.layer);
                return Err(Miss::Layout { reason });
            }
        }
        Ok(())
    }
}

/// Says in a whole record how much of its segment has been synced, in its header and so in its commit mark.
/// Answers the header's checksum.
#[cfg(not(kv_loom))]
pub(crate) fn set_synced(id: &RecordId, synced_bytes: u64, record: &mut [u8]) -> u32 {
    let (sequence, record_bytes) = (u64_at(record, SEQUENCE_AT), u64_at(record, RECORD_BYTES_AT));
    let (header, behind) = record.split_at_mut(u32_at(record, HEADER_BYTES_AT) as usize);
    header[SYNCED_AT..SYNCED_AT + 8].copy_from_slice(&synced_bytes.to_le_bytes());
    let header_crc32c = write_checksum(header);
    write_footer(id, sequence, record_bytes, header_crc32c, behind);
    header_crc32c
}

/// Writes the checksum of a header over its end, and answers it.
fn write_checksum(header: &mut [u8]) -> u32 {
    let end = header.len() - 4;
    let crc = crc32c(&header[..end]);
    header[end..].copy_from_slice(&crc.to_le_bytes());
    crc
}

/// The table entry at `at`; `None` unless it lies right behind `end_bytes`.
fn part_at(bytes: &[u8], at: usize, end_bytes: u64) -> Option<HeadPart> {
    let part = Part {
        component: Component::from_index(usize::from(bytes[at]))?,
        format: bytes[at + 1] & 0x7f,
        is_half: bytes[at + 1] >> 7 == 1,
        layer: LayerId(u16::from_le_bytes([bytes[at + 2], bytes[at + 3]])),
        row_bytes: u32_at(bytes, at + 4),
        row_count: u32_at(bytes, at + 8),
        offset_bytes: u64_at(bytes, at + 16),
    };
    let fits = part.offset_bytes == end_bytes.next_multiple_of(PART_ALIGN_BYTES)
        && part.length_bytes() == u64_at(bytes, at + 24)
        && part.length_bytes() > 0
        && part.length_bytes() <= RECORD_LIMIT_BYTES
        && part.offset_bytes <= RECORD_LIMIT_BYTES;
    let crc32c = u32_at(bytes, at + 12);
    fits.then_some(HeadPart { part, crc32c })
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// `N` bytes at a place that the caller has checked.
pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

/// The check of a payload that comes piece by piece: every checksum of the table, every zero between.
#[derive(Debug)]
pub(crate) struct PayloadCheck {
    parts: Vec<HeadPart>,
    header_bytes: u64,
    payload_bytes: u64,
    /// The part that the next byte belongs to, or that it lies before.
    part_index: usize,
    at: u64,
    crc: Crc32c,
}

impl PayloadCheck {
    pub(crate) fn new(head: &Head) -> PayloadCheck {
        PayloadCheck {
            parts: head.parts.clone(),
            header_bytes: head.header_bytes,
            payload_bytes: head.payload_bytes,
            part_index: 0,
            at: 0,
            crc: Crc32c::new(),
        }
    }

    /// Takes the next bytes of the payload.
    ///
    /// # Errors
    /// `Checksum` and `Padding`.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) -> Result<(), Miss> {
        while !bytes.is_empty() {
            let next = self.parts.get(self.part_index).copied();
            let start = next.map_or(self.payload_bytes, |next| next.part.offset_bytes);
            if self.at < start {
                let gap = bytes.len().min((start - self.at) as usize);
                self.gap(&bytes[..gap])?;
                bytes = &bytes[gap..];
                continue;
            }
            let Some(HeadPart { part, crc32c }) = next else {
                return Err(Miss::Header {
                    reason: "more payload than its table has",
                });
            };
            let end = start + part.length_bytes();
            let (mine, rest) = bytes.split_at(bytes.len().min((end - self.at) as usize));
            self.crc.update(mine);
            self.at += mine.len() as u64;
            bytes = rest;
            if self.at == end {
                if self.crc.value() != crc32c {
                    let (component, layer) = (part.component, part.layer);
                    return Err(Miss::Checksum { component, layer });
                }
                self.crc = Crc32c::new();
                self.part_index += 1;
            }
        }
        Ok(())
    }

    fn gap(&mut self, bytes: &[u8]) -> Result<(), Miss> {
        if let Some(index) = first_nonzero(bytes) {
            let offset_bytes = self.header_bytes + self.at + index as u64;
            return Err(Miss::Padding { offset_bytes });
        }
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Whether every byte of the payload has been seen and was right.
    pub(crate) fn is_complete(&self) -> bool {
        self.at == self.payload_bytes && self.part_index == self.parts.len()
    }
}

const _: () = assert!(HEAD_FIXED_BYTES + 4 < PAGE_BYTES);
