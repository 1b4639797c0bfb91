//! The local disk as a log of segments.
//!
//! Records are appended to the newest segment, in groups: whoever comes first writes for all who wait,
//! one record behind the other, and one `fdatasync` acknowledges them together. A full segment is sealed
//! with an index. A clean close seals the last one and writes a manifest with the length of each.
//!
//! After a crash, sealed segments are read by their index and the others record by record, every byte; the
//! first place that holds no committed record is the end, since nothing behind it was ever acknowledged.
//! Each record says how far its segment had been synced when it was written: a bad place before that, with
//! the record behind it, is damage and not what a crash has left of a group.
//!
//! Room is made by the whole oldest segment. Its records leave the index first; the file goes, and its
//! bytes when the last reader has let go of it. Removals are records too, in a segment that is younger
//! than what they remove, so they last as long as they are needed.
//!
//! **What is protected by what.** One mutex guards the index, the list of segments and the queue; no input
//! or output happens under it. The right to append is a value (`Writer`) that the leader of a group
//! takes out. **Lock order.** The only other lock, that of the buffers for direct reads, is a leaf.

mod append;
mod direct;
mod list;
mod manifest;
mod medium;
mod open;
mod reclaim;
mod scan;
mod segment;
mod state;
mod verify;
mod writer;

use std::fmt;
use std::ops::Range;
use std::path::Path;

use kvgate_transfer::sync::{Arc, AtomicU64, Condvar, Mutex};

pub use append::Stored;
pub use list::{Exported, Listed, Listing, export, import};
pub use manifest::{MANIFEST_DRAFT_NAME, MANIFEST_NAME, Manifest, ManifestSegment};
pub use medium::{Directory, LOCK_NAME, Medium, MediumFile, MediumLock};
pub use open::{Mode, Recovery};
pub use reclaim::{Candidate, Oldest, Reclaim, SecondChance};
pub use segment::{Entry, SEGMENT_VERSION, SegmentId};
pub use state::LogStats;
pub use verify::{Finding, VerifyReport, verify};

use crate::error::{Error, ErrorKind};
use crate::miss::Miss;
use crate::record::{Intake, PAGE_BYTES, RecordId, Verified, Wanted};
use direct::{DIRECT_BYTES, PageBuffers};
use state::State;

/// Bytes that are read at once.
const READ_BYTES: usize = 256 << 10;

/// When a record counts as stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// When it is written. A crash of the machine may lose it, and everything behind it in its segment.
    None,
    /// When the `fdatasync` of its group is over. New segments are synced by name as well.
    #[default]
    Batch,
    /// As `Batch`, and every record is a group of its own with a sync of the directory.
    Strict,
}

/// How a log is kept.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// Most bytes that the files take together.
    pub capacity_bytes: u64,
    /// Most bytes of one segment.
    pub segment_bytes: u64,
    /// When a record counts as stored.
    pub durability: Durability,
    /// Most bytes that are written before a sync.
    pub group_bytes: u64,
}

impl Default for LogConfig {
    /// 16 GiB in segments of 128 MiB, groups of at most 64 MiB.
    fn default() -> LogConfig {
        LogConfig {
            capacity_bytes: 16 << 30,
            segment_bytes: 128 << 20,
            durability: Durability::Batch,
            group_bytes: 64 << 20,
        }
    }
}

impl LogConfig {
    /// Checks that a log can be kept so.
    ///
    /// # Errors
    /// `InvalidConfig` naming the field.
    fn check(&self) -> Result<(), Error> {
        let refuse = |field, value, expected: String| {
            Err(Error::new(ErrorKind::InvalidConfig {
                field,
                value,
                expected,
            }))
        };
        let least = 4 * PAGE_BYTES;
        if self.segment_bytes < least || self.segment_bytes > 1 << 36 {
            let expected = format!("{least} to 2^36");
            return refuse("segment_bytes", self.segment_bytes, expected);
        }
        if self.capacity_bytes < 2 * self.segment_bytes {
            let expected = format!("at least two segments, {} bytes", 2 * self.segment_bytes);
            return refuse("capacity_bytes", self.capacity_bytes, expected);
        }
        if self.group_bytes == 0 {
            return refuse("group_bytes", 0, "1 and more".to_owned());
        }
        Ok(())
    }
}

/// A log of records on a disk. See the head of the module.
pub struct SegmentLog {
    medium: Arc<dyn Medium>,
    config: LogConfig,
    policy: Box<dyn Reclaim>,
    recovery: Recovery,
    state: Mutex<State>,
    /// Told when a group is over.
    turn: Condvar,
    next_sequence: AtomicU64,
    /// Bytes of files that are gone by name and still read by somebody.
    held_bytes: Arc<AtomicU64>,
    buffers: PageBuffers,
    _lock: Option<Box<dyn MediumLock>>,
}

impl SegmentLog {
    /// Opens the log in a directory of the file system, making the directory if it does not exist, with
    /// the default policy of reclaim.
    ///
    /// # Errors
    /// `InvalidConfig`, `Locked`, `Io`.
    pub fn open_directory(path: &Path, config: LogConfig) -> Result<SegmentLog, Error> {
        let directory = Directory::create(path).map_err(|source| {
            Error::new(ErrorKind::Io {
                action: "open",
                path: path.to_owned(),
                source,
            })
        })?;
        SegmentLog::open(
            Arc::new(directory),
            config,
            Box::new(SecondChance::default()),
            Mode::ReadWrite,
        )
    }

    /// Which of these records are there. Asking renews nothing.
    pub fn contains(&self, ids: &[RecordId]) -> Vec<bool> {
        let state = self.state.lock();
        ids.iter().map(|id| state.index.contains(id)).collect()
    }

    /// Reads a record; its payload goes into `into`.
    ///
    /// # Errors
    /// Why there is no verified record. What is damaged leaves the index.
    ///
    /// # Panics
    /// If `into` has not the payload's length.
    pub fn read<'b>(&self, wanted: Wanted<'_>, into: &'b mut [u8]) -> Result<Verified<'b>, Miss> {
        let found = {
            let mut state = self.state.lock();
            let found = state.find(&wanted.id);
            if found.is_none() {
                state.stats.count_miss(&Miss::Absent);
            }
            found
        };
        let (segment, place) = found.ok_or(Miss::Absent)?;
        let outcome = read_record(
            &segment,
            &self.buffers,
            place.offset_bytes(),
            place.record_bytes(),
            wanted,
            into,
        );
        let mut state = self.state.lock();
        match &outcome {
            Ok(verified) => {
                state.stats.hit_count += 1;
                state.stats.read_bytes += verified.payload_bytes();
            }
            Err(miss) => {
                state.stats.count_miss(miss);
                if miss.is_damage()
                    && !matches!(miss, Miss::Layout { .. })
                    && state.index.remove_at(&wanted.id, &place)
                {
                    state.evicted.push(wanted.id);
                }
            }
        }
        outcome
    }

    /// The figures of the log.
    pub fn stats(&self) -> LogStats {
        let state = self.state.lock();
        let held = self
            .held_bytes
            .load(kvgate_transfer::sync::Ordering::Relaxed);
        state.figures(held, &self.config)
    }

    /// What opening found.
    pub fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    /// Records that have left since the last call, by eviction or as damaged; the newest 65,536 of them.
    pub fn drain_evicted(&self) -> Vec<RecordId> {
        self.state.lock().evicted.take()
    }

    /// The longest record that fits into a segment, in bytes.
    pub fn longest_record_bytes(&self) -> u64 {
        self.config.segment_bytes - PAGE_BYTES - segment::index_bytes(1)
    }

    /// How it is kept.
    pub fn config(&self) -> &LogConfig {
        &self.config
    }
}

/// The read itself, without any lock.
fn read_record<'b>(
    segment: &state::Segment,
    buffers: &PageBuffers,
    offset_bytes: u64,
    record_bytes: u64,
    wanted: Wanted<'_>,
    into: &'b mut [u8],
) -> Result<Verified<'b>, Miss> {
    let mut intake = Intake::new(wanted, into);
    // Another length is another layout, unless the header says more.
    if intake.check_length(record_bytes).is_err() {
        return Err(Miss::Layout {
            reason: format!("{record_bytes} bytes, expected {}", intake.record_bytes()),
        });
    }
    let end_bytes = offset_bytes + record_bytes;
    let mut at = offset_bytes;
    if !segment.file.is_at_hand(at) {
        at = read_past_cache(&*segment.file, buffers, at..end_bytes, &mut intake)?;
        if at < end_bytes {
            segment.file.will_read(at, end_bytes - at);
        }
    }
    loop {
        let space = intake.space(READ_BYTES);
        if space.is_empty() {
            return intake.finish();
        }
        let count = segment.file.read_at(space, at)?;
        if count == 0 {
            return Err(Miss::Length {
                expected_bytes: record_bytes,
                found_bytes: at - offset_bytes,
            });
        }
        intake.filled(count)?;
        at += count as u64;
    }
}

/// Reads a record, or its beginning, past the page cache. Answers up to where that went; the rest of it is to be read in
/// the other way, and an error of the device is told there.
fn read_past_cache(
    file: &dyn MediumFile,
    buffers: &PageBuffers,
    range: Range<u64>,
    intake: &mut Intake<'_, '_>,
) -> Result<u64, Miss> {
    let mut at = range.start;
    let most = (range.end - at).min(DIRECT_BYTES as u64) as usize;
    buffers.with(most, |buffer| {
        while at < range.end {
            let into = buffer.first(most.min((range.end - at) as usize));
            if file.read_direct(into, at).ok() != Some(into.len()) {
                break;
            }
            intake.feed(into)?;
            at += into.len() as u64;
        }
        Ok(at)
    })
}

impl fmt::Debug for SegmentLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SegmentLog")
            .field("path", &self.medium.path())
            .field("stats", &self.stats())
            .finish()
    }
}
