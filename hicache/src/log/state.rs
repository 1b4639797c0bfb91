//! What a log knows of itself: the index, the segments, the queue, the figures.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use kvgate_transfer::sync::{Arc, AtomicBool, AtomicU64, Ordering::Relaxed};

use crate::evicted::Evicted;
use crate::miss::Miss;
use crate::record::{PAGE_BYTES, RecordId};

use super::append::{GroupError, Pending};
use super::medium::MediumFile;
use super::segment::{Entry, SegmentId};
use super::writer::Writer;
use super::{Durability, LogConfig};

/// Where a record lies. 16 bytes: the index holds one per record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) segment: SegmentId,
    page: u32,
    page_count: u32,
    pub(crate) hits: u8,
}

impl Place {
    pub(crate) fn of(segment: SegmentId, entry: &Entry) -> Place {
        Place {
            segment,
            page: (entry.offset_bytes / PAGE_BYTES) as u32,
            page_count: (entry.record_bytes / PAGE_BYTES) as u32,
            hits: 0,
        }
    }

    pub(crate) fn offset_bytes(&self) -> u64 {
        u64::from(self.page) * PAGE_BYTES
    }

    pub(crate) fn record_bytes(&self) -> u64 {
        u64::from(self.page_count) * PAGE_BYTES
    }

    /// Whether both are the same bytes.
    pub(crate) fn is_at(&self, other: &Place) -> bool {
        self.segment == other.segment && self.page == other.page
    }
}

/// Which records there are.
#[derive(Debug, Default)]
pub(crate) struct Index {
    places: HashMap<RecordId, Place>,
    live_bytes: u64,
}

impl Index {
    pub(crate) fn contains(&self, id: &RecordId) -> bool {
        self.places.contains_key(id)
    }

    pub(crate) fn place(&self, id: &RecordId) -> Option<&Place> {
        self.places.get(id)
    }

    pub(crate) fn insert(&mut self, id: RecordId, place: Place) {
        self.live_bytes += place.record_bytes();
        if let Some(former) = self.places.insert(id, place) {
            self.live_bytes -= former.record_bytes();
        }
    }

    pub(crate) fn remove(&mut self, id: &RecordId) -> Option<Place> {
        let place = self.places.remove(id)?;
        self.live_bytes -= place.record_bytes();
        Some(place)
    }

    /// Removes the record if it still lies there.
    pub(crate) fn remove_at(&mut self, id: &RecordId, place: &Place) -> bool {
        let is_there = self.places.get(id).is_some_and(|found| found.is_at(place));
        is_there && self.remove(id).is_some()
    }

    /// Removes every record of a segment. Answers which, in the order in which they lie there.
    pub(crate) fn remove_segment(&mut self, segment: SegmentId) -> Vec<RecordId> {
        let is_there = |_: &RecordId, place: &mut Place| place.segment == segment;
        let mut gone: Vec<_> = self.places.extract_if(is_there).collect();
        gone.sort_unstable_by_key(|(_, place)| place.page);
        self.live_bytes -= gone
            .iter()
            .map(|(_, place)| place.record_bytes())
            .sum::<u64>();
        gone.into_iter().map(|(id, _)| id).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }
}

/// An open segment file. It stays open for whoever reads from it.
pub(crate) struct Segment {
    pub(crate) id: SegmentId,
    pub(crate) file: Box<dyn MediumFile>,
    len_bytes: AtomicU64,
    /// Bytes of the index that it lacks because a failure has left it unsealed, and that it gets at the close.
    owed_bytes: AtomicU64,
    is_gone: AtomicBool,
    held_bytes: Arc<AtomicU64>,
}

impl Segment {
    pub(crate) fn new(
        id: SegmentId,
        file: Box<dyn MediumFile>,
        len_bytes: u64,
        held_bytes: &Arc<AtomicU64>,
    ) -> Arc<Segment> {
        Arc::new(Segment {
            id,
            file,
            len_bytes: AtomicU64::new(len_bytes),
            owed_bytes: AtomicU64::new(0),
            is_gone: AtomicBool::new(false),
            held_bytes: held_bytes.clone(),
        })
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Relaxed)
    }

    pub(crate) fn set_len_bytes(&self, bytes: u64) {
        self.len_bytes.store(bytes, Relaxed);
    }

    pub(crate) fn owe_bytes(&self, bytes: u64) {
        self.owed_bytes.store(bytes, Relaxed);
    }

    /// Says that the file has no name any more: its bytes are held until the last reader is done.
    pub(crate) fn gone(&self) {
        if !self.is_gone.swap(true, Relaxed) {
            self.held_bytes.fetch_add(self.len_bytes(), Relaxed);
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if self.is_gone.load(Relaxed) {
            self.held_bytes.fetch_sub(self.len_bytes(), Relaxed);
        }
    }
}

/// Longest time that a group waits for more records.
const GATHER_LIMIT: Duration = Duration::from_millis(1);

/// When the next group is begun. As many records are expected as the last group had: its writers come back, all but
/// the first of them while a sync goes on that they have missed. A wait is no longer than that sync took.
#[derive(Debug, Default)]
pub(crate) struct Gathering {
    /// Records of the last group.
    last_count: usize,
    /// How long its sync took, as far as a wait goes.
    sync_time: Duration,
    /// Until when the records that wait now wait for more.
    until: Option<Instant>,
}

impl Gathering {
    /// A group has ended.
    pub(crate) fn note_group(&mut self, record_count: usize, sync_time: Duration) {
        self.last_count = record_count;
        self.sync_time = sync_time.min(GATHER_LIMIT);
        self.until = None;
    }

    /// How long a group of what waits now is still put off; `None` when it is time.
    pub(crate) fn put_off(&mut self, waiting_count: usize) -> Option<Instant> {
        if waiting_count >= self.last_count || self.sync_time.is_zero() {
            return None;
        }
        let now = Instant::now();
        let until = *self.until.get_or_insert(now + self.sync_time);
        (now < until).then_some(until)
    }

    /// Whether this is the record that those who put their group off wait for.
    pub(crate) fn is_enough(&self, waiting_count: usize) -> bool {
        self.until.is_some() && waiting_count >= self.last_count
    }
}

/// Everything under the lock.
pub(crate) struct State {
    pub(crate) index: Index,
    pub(crate) segments: BTreeMap<SegmentId, Arc<Segment>>,
    /// Files that could not be removed: name and bytes.
    pub(crate) stuck: Vec<(String, u64)>,
    pub(crate) queue: VecDeque<Pending>,
    /// Records of the group that is being written, and whether each was removed since.
    pub(crate) writing: HashMap<RecordId, bool>,
    /// `None` while the leader of a group has it.
    pub(crate) writer: Option<Writer>,
    pub(crate) gathering: Gathering,
    pub(crate) results: HashMap<u64, Result<(), GroupError>>,
    /// Tickets whose owner has stopped waiting.
    pub(crate) abandoned: HashSet<u64>,
    pub(crate) next_ticket: u64,
    /// Records that were removed without a trace on the disk, for a failure, and the segment in which
    /// each lies: they would be back when the log is opened again.
    pub(crate) owed_removals: HashMap<RecordId, SegmentId>,
    /// Records whose segment has gone and that are about to be written again.
    pub(crate) survivors: HashSet<RecordId>,
    pub(crate) evicted: Evicted,
    /// Why nothing is written any more.
    pub(crate) read_only: Option<String>,
    pub(crate) stats: LogStats,
}

impl State {
    /// Lets a record wait to be written. Answers its ticket.
    pub(crate) fn enqueue(&mut self, bytes: Vec<u8>, entry: Entry) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.queue.push_back(Pending {
            ticket,
            bytes,
            entry,
        });
        ticket
    }

    /// Whether the record is being written. It is not found when it is, then: a removal comes behind it.
    pub(crate) fn forget_writing(&mut self, id: &RecordId) -> bool {
        let is_removed = self.writing.get_mut(id);
        is_removed.is_some_and(|is_removed| !std::mem::replace(is_removed, true))
    }

    /// Until when a group of what waits is put off; `None` when it is time.
    pub(crate) fn put_off_group(&mut self, config: &LogConfig) -> Option<Instant> {
        if config.durability != Durability::Batch {
            return None;
        }
        self.gathering.put_off(self.queue.len())
    }

    /// Where a record lies, counted as a use of it.
    pub(crate) fn find(&mut self, id: &RecordId) -> Option<(Arc<Segment>, Place)> {
        let place = self.index.places.get_mut(id)?;
        place.hits = place.hits.saturating_add(1);
        let place = *place;
        let segment = self.segments.get(&place.segment)?.clone();
        Some((segment, place))
    }

    /// Bytes of all files that have a name.
    pub(crate) fn file_bytes(&self) -> u64 {
        let segments: u64 = self.segments.values().map(|s| s.len_bytes()).sum();
        let stuck: u64 = self.stuck.iter().map(|(_, bytes)| bytes).sum();
        segments + stuck
    }

    /// As [`State::file_bytes`], with the indexes that are still to come.
    pub(crate) fn reserved_bytes(&self) -> u64 {
        let owed = self.segments.values().map(|s| s.owed_bytes.load(Relaxed));
        self.file_bytes() + owed.sum::<u64>()
    }

    pub(crate) fn figures(&self, held_bytes: u64, config: &LogConfig) -> LogStats {
        LogStats {
            record_count: self.index.len() as u64,
            live_bytes: self.index.live_bytes,
            file_bytes: self.file_bytes(),
            held_bytes,
            stuck_bytes: self.stuck.iter().map(|(_, bytes)| bytes).sum(),
            capacity_bytes: config.capacity_bytes,
            segment_count: self.segments.len() as u64,
            is_read_only: self.read_only.is_some(),
            ..self.stats.clone()
        }
    }
}

/// Figures of a log. Counts are since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogStats {
    /// Records that can be read.
    pub record_count: u64,
    /// Bytes of these records.
    pub live_bytes: u64,
    /// Bytes of all files that have a name.
    pub file_bytes: u64,
    /// Bytes of files without a name that somebody still reads.
    pub held_bytes: u64,
    /// Bytes of files that could not be removed.
    pub stuck_bytes: u64,
    /// Bytes that the files may take.
    pub capacity_bytes: u64,
    /// Segments.
    pub segment_count: u64,
    /// Whether nothing is written any more.
    pub is_read_only: bool,
    /// Reads that gave a verified record.
    pub hit_count: u64,
    /// Payload bytes of these.
    pub read_bytes: u64,
    /// Reads that gave none, by cause.
    pub misses: BTreeMap<&'static str, u64>,
    /// Records acknowledged.
    pub stored_count: u64,
    /// Records that were there already when they were to be stored.
    pub duplicate_count: u64,
    /// Records that were refused or failed.
    pub failed_count: u64,
    /// Bytes written to the medium: the wear.
    pub written_bytes: u64,
    /// Groups written.
    pub group_count: u64,
    /// Waits for the device.
    pub sync_count: u64,
    /// Records that left to make room.
    pub evicted_count: u64,
    /// Segments that left to make room.
    pub evicted_segments: u64,
    /// Records that were kept when their segment left.
    pub kept_count: u64,
    /// Records removed by their name.
    pub removed_count: u64,
}

impl LogStats {
    pub(crate) fn count_miss(&mut self, miss: &Miss) {
        *self.misses.entry(miss.label()).or_default() += 1;
    }

    /// Misses of one cause.
    pub fn misses_of(&self, label: &str) -> u64 {
        self.misses.get(label).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_waits_for_as_many_as_the_last_one_had_and_no_longer_than_its_sync() {
        let mut gathering = Gathering::default();
        assert_eq!(gathering.put_off(1), None, "nothing is known yet");
        gathering.note_group(16, Duration::from_secs(9));
        let until = gathering.put_off(1).unwrap();
        assert!(until <= Instant::now() + GATHER_LIMIT);
        assert!(gathering.put_off(15).is_none_or(|again| again == until));
        assert!(!gathering.is_enough(15) && gathering.is_enough(16));
        assert_eq!(gathering.put_off(16), None);
        while Instant::now() < until {}
        assert_eq!(gathering.put_off(1), None, "the time is over");
        gathering.note_group(1, Duration::from_secs(9));
        assert_eq!(gathering.put_off(1), None, "one writer waits for nobody");
        gathering.note_group(16, Duration::ZERO);
        assert_eq!(gathering.put_off(1), None, "there is no sync to save");
    }
}
