//! The manifest of a log that was closed: which segments it has, how long each is. It is gone while the
//! log is open, so a log without one was not closed.

use crate::record::crc::crc32c;
use crate::record::{u32_at, u64_at};

use super::medium::{Medium, read_exact_at, write_all_at};
use super::segment::SegmentId;

/// Name of the manifest.
pub const MANIFEST_NAME: &str = "MANIFEST";
/// Name under which it is written before it gets its own.
pub const MANIFEST_DRAFT_NAME: &str = "MANIFEST.new";

const MAGIC: [u8; 8] = *b"kvgmanif";
const VERSION: u32 = 1;
const FIXED_BYTES: usize = 24;
const ENTRY_BYTES: usize = 24;
/// Longest manifest that is believed in.
const LIMIT_BYTES: u64 = 64 << 20;

/// One segment of a closed log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManifestSegment {
    /// Which.
    pub id: SegmentId,
    /// Length of its file.
    pub len_bytes: u64,
    /// Records in it, removals included.
    pub entry_count: u32,
    /// Checksum of its index.
    pub index_crc32c: u32,
}

/// All segments of a closed log, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The number that the next record gets.
    pub next_sequence: u64,
    /// The segments.
    pub segments: Vec<ManifestSegment>,
}

impl Manifest {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FIXED_BYTES + ENTRY_BYTES * self.segments.len() + 4);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(self.segments.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&self.next_sequence.to_le_bytes());
        for segment in &self.segments {
            bytes.extend_from_slice(&segment.id.0.to_le_bytes());
            bytes.extend_from_slice(&segment.entry_count.to_le_bytes());
            bytes.extend_from_slice(&segment.len_bytes.to_le_bytes());
            bytes.extend_from_slice(&segment.index_crc32c.to_le_bytes());
            bytes.extend_from_slice(&[0; 4]);
        }
        let crc = crc32c(&bytes);
        bytes.extend_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Manifest, &'static str> {
        if bytes.len() < FIXED_BYTES + 4 || bytes[..8] != MAGIC {
            return Err("no manifest");
        }
        let (body, crc) = bytes.split_at(bytes.len() - 4);
        if crc32c(body) != u32_at(crc, 0) {
            return Err("checksum of the manifest");
        }
        if u32_at(body, 8) != VERSION {
            return Err("unknown version of the manifest");
        }
        let slots = body[FIXED_BYTES..].chunks_exact(ENTRY_BYTES);
        if u32_at(body, 12) as usize != slots.len() || !slots.remainder().is_empty() {
            return Err("length of the manifest");
        }
        let segments = slots.map(|slot| ManifestSegment {
            id: SegmentId(u32_at(slot, 0)),
            entry_count: u32_at(slot, 4),
            len_bytes: u64_at(slot, 8),
            index_crc32c: u32_at(slot, 16),
        });
        Ok(Manifest {
            next_sequence: u64_at(body, 16),
            segments: segments.collect(),
        })
    }

    /// The manifest of a directory; `None` without one.
    ///
    /// # Errors
    /// What the device answers; `InvalidData` for one that is damaged.
    pub(crate) fn load(medium: &dyn Medium) -> std::io::Result<Option<Manifest>> {
        let file = match medium.open(MANIFEST_NAME, false) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let invalid = |reason| std::io::Error::new(std::io::ErrorKind::InvalidData, reason);
        let len_bytes = file.len_bytes()?;
        if len_bytes > LIMIT_BYTES {
            return Err(invalid("a manifest of impossible length"));
        }
        let mut bytes = vec![0; len_bytes as usize];
        read_exact_at(&*file, &mut bytes, 0)?;
        Manifest::parse(&bytes).map(Some).map_err(invalid)
    }

    /// Writes it, so that a crash leaves a whole manifest or none.
    ///
    /// # Errors
    /// What the device answers.
    pub(crate) fn store(&self, medium: &dyn Medium) -> std::io::Result<()> {
        remove_if_there(medium, MANIFEST_DRAFT_NAME)?;
        let file = medium.create(MANIFEST_DRAFT_NAME)?;
        write_all_at(&*file, &self.to_bytes(), 0)?;
        file.sync_data()?;
        medium.rename(MANIFEST_DRAFT_NAME, MANIFEST_NAME)?;
        medium.sync_names()
    }
}

/// Removes a file that may not be there. Answers whether it was.
pub(crate) fn remove_if_there(medium: &dyn Medium, name: &str) -> std::io::Result<bool> {
    match medium.remove(name) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
