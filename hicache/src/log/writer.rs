//! The right to append, and what it does: groups, seals, eviction.

use std::collections::HashSet;
use std::io;
use std::time::{Duration, Instant};

use kvgate_transfer::sync::Arc;

use super::append::{GroupError, Pending};
use super::medium::{read_exact_at, write_all_at};
use super::reclaim::Candidate;
use super::segment::{Entry, Sealed, SegmentId, header_page, index_block, index_bytes, read_index};
use super::state::{Place, Segment};
use super::{Durability, SegmentLog, scan};
use crate::record::{PAGE_BYTES, RecordId, RecordKind, set_synced};

/// The end of the log. There is one, and whoever has it is the only one who writes.
pub(crate) struct Writer {
    pub(crate) next_segment: SegmentId,
    pub(crate) active: Option<Active>,
    /// The newest segment, if it is sealed.
    pub(crate) sealed: Option<Sealed>,
    /// How long the last sync of a group took.
    pub(crate) sync_time: Duration,
    /// Segments of this group whose records could not be synced, or will not be.
    pub(crate) lost: Vec<(SegmentId, GroupError)>,
    /// Records that this group has kept over an eviction, and where.
    pub(crate) kept: Vec<(RecordId, Place)>,
}

/// The segment that grows.
pub(crate) struct Active {
    pub(crate) segment: Arc<Segment>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) end_bytes: u64,
    /// Up to where it has been synced. Each record says so when it is written.
    pub(crate) synced_bytes: u64,
}

impl Writer {
    /// Writes nothing more to the active segment, and neither syncs nor seals it now: what this group
    /// has written there is not acknowledged.
    pub(crate) fn abandon(&mut self, error: GroupError) {
        if let Some(active) = self.active.take() {
            let owed_bytes = index_bytes(active.entries.len());
            active.segment.owe_bytes(owed_bytes);
            self.lost.push((active.segment.id, error));
        }
    }
}

/// Ticket, entry with its place, and the segment that has it.
pub(crate) type Outcome = (u64, Entry, Result<SegmentId, GroupError>);

impl SegmentLog {
    /// Writes the records of a group one behind the other and syncs them together. A record that fails
    /// leaves nothing behind it in the segment, so that a scan reaches what comes after.
    pub(crate) fn write_group(&self, writer: &mut Writer, group: Vec<Pending>) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(group.len());
        for mut pending in group {
            let mut entry = pending.entry;
            let outcome = self.write_record(writer, &mut pending.bytes, &mut entry);
            outcomes.push((pending.ticket, entry, outcome));
        }
        if let Err(error) = self.sync_active(writer) {
            // What was written since the last sync is there or not; nobody can tell, so none of it is
            // acknowledged, and nothing is written behind it.
            writer.abandon(GroupError::io("sync", &error));
        }
        self.forget_lost(writer);
        for (id, error) in std::mem::take(&mut writer.lost) {
            for (_, _, outcome) in &mut outcomes {
                if outcome.as_ref().ok() == Some(&id) {
                    *outcome = Err(error.clone());
                }
            }
        }
        outcomes
    }

    pub(crate) fn write_record(
        &self,
        writer: &mut Writer,
        bytes: &mut [u8],
        entry: &mut Entry,
    ) -> Result<SegmentId, GroupError> {
        let least = PAGE_BYTES + bytes.len() as u64 + index_bytes(1);
        if least > self.config.segment_bytes {
            return Err(GroupError::Full {
                needed_bytes: least,
                capacity_bytes: self.config.segment_bytes,
            });
        }
        loop {
            self.make_room(writer, bytes.len() as u64)?;
            match self.write_at_end(writer, bytes, entry) {
                Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                    if !self.evict_oldest(writer) {
                        return Err(GroupError::io("write", &error));
                    }
                }
                done => return done.map_err(|error| GroupError::io("write", &error)),
            }
        }
    }

    /// Seals the active segment if the record does not fit, and evicts until it does.
    fn make_room(&self, writer: &mut Writer, record_bytes: u64) -> Result<(), GroupError> {
        loop {
            self.seal_if_full(writer, record_bytes);
            let more_bytes = more_bytes(writer, record_bytes);
            let file_bytes = self.state.lock().reserved_bytes();
            if file_bytes + more_bytes <= self.config.capacity_bytes {
                return Ok(());
            }
            if self.evict_oldest(writer) {
                continue;
            }
            // Only the active segment is left.
            if writer.active.is_none() {
                return Err(GroupError::Full {
                    needed_bytes: file_bytes + more_bytes,
                    capacity_bytes: self.config.capacity_bytes,
                });
            }
            self.seal(writer);
        }
    }

    /// Seals the active segment if a record of that length does not fit any more.
    fn seal_if_full(&self, writer: &mut Writer, record_bytes: u64) {
        if let Some(active) = &writer.active {
            let index = index_bytes(active.entries.len() + 1);
            if active.end_bytes + record_bytes + index > self.config.segment_bytes {
                self.seal(writer);
            }
        }
    }

    fn write_at_end(
        &self,
        writer: &mut Writer,
        bytes: &mut [u8],
        entry: &mut Entry,
    ) -> io::Result<SegmentId> {
        let mut active = match writer.active.take() {
            Some(active) => active,
            None => self.begin_segment(writer)?,
        };
        let file = &*active.segment.file;
        entry.header_crc32c = set_synced(&entry.id, active.synced_bytes, bytes);
        if let Err(error) = write_all_at(file, bytes, active.end_bytes) {
            // Take back what was written of it; a segment that cannot be cut gets nothing more.
            let is_cut = file.set_len(active.end_bytes).is_ok();
            writer.active = Some(active);
            if !is_cut {
                writer.abandon(GroupError::io("write", &error));
            }
            return Err(error);
        }
        entry.offset_bytes = active.end_bytes;
        active.end_bytes = entry.end_bytes();
        active.segment.set_len_bytes(active.end_bytes);
        active.entries.push(entry.clone());
        let id = active.segment.id;
        writer.active = Some(active);
        self.state.lock().stats.written_bytes += bytes.len() as u64;
        Ok(id)
    }

    fn begin_segment(&self, writer: &mut Writer) -> io::Result<Active> {
        let id = writer.next_segment;
        let name = id.file_name();
        let file = self.medium.create(&name)?;
        let begun =
            write_all_at(&*file, &header_page(id, writer.sealed.take()), 0).and_then(|()| {
                if self.config.durability == Durability::None {
                    return Ok(());
                }
                file.sync_data()?;
                self.medium.sync_names()
            });
        // The number is used up: a file of that name may be there.
        writer.next_segment = SegmentId(id.0 + 1);
        if let Err(error) = begun {
            drop(file);
            if self.medium.remove(&name).is_err() {
                self.state.lock().stuck.push((name, PAGE_BYTES));
            }
            return Err(error);
        }
        let segment = Segment::new(id, file, PAGE_BYTES, &self.held_bytes);
        let mut state = self.state.lock();
        state.segments.insert(id, segment.clone());
        state.stats.written_bytes += PAGE_BYTES;
        Ok(Active {
            segment,
            entries: Vec::new(),
            end_bytes: PAGE_BYTES,
            synced_bytes: match self.config.durability {
                Durability::None => 0,
                Durability::Batch | Durability::Strict => PAGE_BYTES,
            },
        })
    }

    pub(crate) fn sync_active(&self, writer: &mut Writer) -> io::Result<()> {
        let Some(active) = &mut writer.active else {
            return Ok(());
        };
        if self.config.durability == Durability::None {
            return Ok(());
        }
        let begun = Instant::now();
        active.segment.file.sync_data()?;
        writer.sync_time = begun.elapsed();
        active.synced_bytes = active.end_bytes;
        self.state.lock().stats.sync_count += 1;
        if self.config.durability == Durability::Strict {
            self.medium.sync_names()?;
        }
        Ok(())
    }

    /// Writes the index behind the records. A segment that cannot be sealed is scanned when the log is
    /// opened again; nothing more is written to it either way.
    pub(crate) fn seal(&self, writer: &mut Writer) {
        let Some(active) = writer.active.take() else {
            return;
        };
        let id = active.segment.id;
        let file = &*active.segment.file;
        let block = index_block(id, active.end_bytes, &active.entries);
        // Records before the index that speaks for them.
        let synced = match self.config.durability {
            Durability::None => Ok(()),
            Durability::Batch | Durability::Strict => file.sync_data(),
        };
        let is_synced = synced.is_ok();
        let lost = synced.err().map(|error| GroupError::io("sync", &error));
        writer.lost.extend(lost.map(|error| (id, error)));
        let sealed = match is_synced {
            true => write_all_at(file, &block, active.end_bytes).and_then(|()| file.sync_data()),
            false => Err(io::Error::from(io::ErrorKind::Other)),
        };
        let is_sealed = sealed.is_ok();
        let end_bytes = match sealed {
            Ok(()) => active.end_bytes + block.len() as u64,
            Err(_) if file.set_len(active.end_bytes).is_ok() => active.end_bytes,
            Err(_) => file.len_bytes().unwrap_or(active.end_bytes),
        };
        active.segment.set_len_bytes(end_bytes);
        writer.sealed = is_sealed.then_some((id, end_bytes));
        if !is_sealed {
            active.segment.owe_bytes(block.len() as u64);
        }
        let mut state = self.state.lock();
        state.stats.written_bytes += block.len() as u64;
        state.stats.sync_count += 1;
    }

    /// Lets the oldest segment go that is not being written. Answers whether there was one.
    pub(crate) fn evict_oldest(&self, writer: &mut Writer) -> bool {
        self.retry_stuck();
        let active = writer.active.as_ref().map(|active| active.segment.id);
        let oldest = {
            let state = self.state.lock();
            let mut sealed = state.segments.values();
            sealed.find(|segment| Some(segment.id) != active).cloned()
        };
        let Some(segment) = oldest else {
            return false;
        };
        let survivors = self.survivors(&segment);
        self.drop_segment(&segment, &survivors);
        self.write_again(writer, survivors);
        true
    }

    /// What the policy keeps of a segment, half of it at most.
    fn survivors(&self, segment: &Segment) -> Vec<Survivor> {
        let mut left_bytes = segment.len_bytes() / 2;
        let mut survivors = Vec::new();
        // It goes either way: what cannot be found in it does not survive.
        for entry in entries_of(segment).0 {
            let place = Place::of(segment.id, &entry);
            let is_kept = entry.record_bytes <= left_bytes
                && self
                    .candidate(&entry, &place)
                    .is_some_and(|candidate| self.policy.keeps(&candidate));
            if !is_kept {
                continue;
            }
            if let Ok(Some(bytes)) = verified_bytes(segment, &entry) {
                left_bytes -= entry.record_bytes;
                survivors.push(Survivor { entry, bytes });
            }
        }
        survivors
    }

    /// Writes the survivors into the room that their segment has left. The sync of the group that
    /// made the room covers them.
    fn write_again(&self, writer: &mut Writer, survivors: Vec<Survivor>) {
        for Survivor {
            mut entry,
            mut bytes,
        } in survivors
        {
            self.seal_if_full(writer, entry.record_bytes);
            let file_bytes = self.state.lock().reserved_bytes();
            let is_room =
                file_bytes + more_bytes(writer, entry.record_bytes) <= self.config.capacity_bytes;
            let written = is_room
                .then(|| self.write_at_end(writer, &mut bytes, &mut entry))
                .and_then(io::Result::ok);
            let mut state = self.state.lock();
            // Nobody has removed or stored it meanwhile: the copy counts.
            let is_wanted = state.survivors.remove(&entry.id) && !state.index.contains(&entry.id);
            match written {
                Some(id) if is_wanted => {
                    let place = Place::of(id, &entry);
                    state.index.insert(entry.id, place);
                    state.stats.kept_count += 1;
                    writer.kept.push((entry.id, place));
                }
                Some(_) => {}
                None if !is_wanted => {}
                None => {
                    state.evicted.push(entry.id);
                    state.stats.evicted_count += 1;
                }
            }
        }
    }

    /// What was kept and may be lost in a crash leaves with the segment that it was kept from.
    pub(crate) fn forget_lost(&self, writer: &mut Writer) {
        let mut state = self.state.lock();
        for (id, place) in std::mem::take(&mut writer.kept) {
            let is_lost = writer.lost.iter().any(|(at, _)| *at == place.segment);
            if is_lost && state.index.remove_at(&id, &place) {
                state.stats.evicted_count += 1;
                state.evicted.push(id);
            }
        }
    }

    fn candidate(&self, entry: &Entry, place: &Place) -> Option<Candidate> {
        let state = self.state.lock();
        let found = state.index.place(&entry.id)?;
        let parent = RecordId {
            kind: RecordKind::Block,
            key: entry.parent,
        };
        let is_first = entry.parent.0 == entry.namespace.0;
        (!entry.is_removal && found.is_at(place)).then(|| Candidate {
            id: entry.id,
            record_bytes: entry.record_bytes,
            hits: found.hits,
            is_reachable: is_first || state.index.contains(&parent),
        })
    }

    /// The index first, then the name; the bytes go when the last reader lets go of the file. Survivors
    /// leave the index too, and are not told as gone. A file that keeps its name is emptied: the removals
    /// of its records may leave before it does, and nothing of it may come back then. Answers how many
    /// records have left.
    pub(crate) fn drop_segment(&self, segment: &Arc<Segment>, survivors: &[Survivor]) -> u64 {
        let name = segment.id.file_name();
        let kept: HashSet<RecordId> = survivors.iter().map(|s| s.entry.id).collect();
        let mut state = self.state.lock();
        let mut left = state.index.remove_segment(segment.id);
        state
            .survivors
            .extend(left.iter().filter(|id| kept.contains(id)));
        left.retain(|id| !kept.contains(id));
        let left_count = left.len() as u64;
        state.stats.evicted_count += left_count;
        state.evicted.extend(left);
        state.segments.remove(&segment.id);
        state.owed_removals.retain(|_, at| *at != segment.id);
        state.stats.evicted_segments += 1;
        drop(state);
        match self.medium.remove(&name) {
            Ok(()) => segment.gone(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => segment.gone(),
            Err(_) => {
                let file = &*segment.file;
                let emptied = file.set_len(0).and_then(|()| file.sync_data());
                let bytes = match emptied {
                    Ok(()) => 0,
                    Err(_) => file.len_bytes().unwrap_or(segment.len_bytes()),
                };
                self.state.lock().stuck.push((name, bytes));
            }
        }
        left_count
    }

    /// Tries once more to remove what could not be removed.
    fn retry_stuck(&self) {
        let stuck = std::mem::take(&mut self.state.lock().stuck);
        let left: Vec<(String, u64)> = stuck
            .into_iter()
            .filter(|(name, _)| match self.medium.remove(name) {
                Ok(()) => false,
                Err(error) => error.kind() != io::ErrorKind::NotFound,
            })
            .collect();
        self.state.lock().stuck.extend(left);
    }
}

/// A record that is written again when its segment goes.
pub(crate) struct Survivor {
    entry: Entry,
    bytes: Vec<u8>,
}

/// Bytes that the files grow by with a record of that length, the index that is to come included.
fn more_bytes(writer: &Writer, record_bytes: u64) -> u64 {
    match &writer.active {
        Some(active) => record_bytes + index_bytes(active.entries.len() + 1),
        None => PAGE_BYTES + record_bytes + index_bytes(1),
    }
}

/// The bytes of a record, if every one of them is right.
fn verified_bytes(segment: &Segment, entry: &Entry) -> io::Result<Option<Vec<u8>>> {
    let file = &*segment.file;
    match scan::step(file, entry.offset_bytes, segment.len_bytes())? {
        scan::Step::Record(found, _) if found == *entry => {
            let mut bytes = vec![0; entry.record_bytes as usize];
            read_exact_at(file, &mut bytes, entry.offset_bytes)?;
            Ok(Some(bytes))
        }
        _ => Ok(None),
    }
}

/// Every record of a segment that is not written any more, by its index or by a look at each; with an error, those
/// before the place that the device cannot read.
pub(crate) fn entries_of(segment: &Segment) -> (Vec<Entry>, Option<io::Error>) {
    let (file, len_bytes) = (&*segment.file, segment.len_bytes());
    if let Ok(Some((entries, _))) = read_index(segment.id, file, len_bytes) {
        return (entries, None);
    }
    scan::readable_records(file, len_bytes)
}
