//! Listing, repairing, shrinking, exporting and importing the records of a log.

use std::io;

use kvgate_transfer::Deadline;
use kvgate_transfer::sync::Arc;

use super::SegmentLog;
use super::append::{GroupError, Stored, Turn};
use super::medium::{Medium, MediumFile, read_exact_at, write_all_at};
use super::open::io_error;
use super::scan::{self, Step};
use super::segment::{Entry, SegmentId, header_page, index_block, read_index};
use super::state::{Place, Segment};
use super::writer::{Writer, entries_of};
use crate::error::{Error, ErrorKind};
use crate::record::{Head, PAGE_BYTES};

/// Number of the segment that an export is.
const EXPORT_ID: SegmentId = SegmentId(0);

/// A record of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The segment.
    pub segment: SegmentId,
    /// What its index says.
    pub entry: Entry,
}

/// The records of a log.
#[derive(Debug, Default)]
#[must_use = "it may lack records"]
pub struct Listing {
    /// Those that can be found, in the order in which they were written.
    pub records: Vec<Listed>,
    /// `Io`, for each segment that could not be read to its end: it may have more.
    pub unreadable: Vec<Error>,
}

impl SegmentLog {
    /// Every record that can be found.
    pub fn list(&self) -> Listing {
        let segments: Vec<Arc<Segment>> = self.state.lock().segments.values().cloned().collect();
        let mut listing = Listing::default();
        for segment in segments {
            let (entries, error) = self.entries_now(&segment);
            let error = error.map(|source| io_error(&*self.medium, "read", source));
            listing.unreadable.extend(error);
            for entry in entries {
                let place = Place::of(segment.id, &entry);
                let state = self.state.lock();
                let is_live = state
                    .index
                    .place(&entry.id)
                    .is_some_and(|p| p.is_at(&place));
                drop(state);
                if is_live {
                    let segment = segment.id;
                    listing.records.push(Listed { segment, entry });
                }
            }
        }
        listing
    }

    /// The entries of a segment, also of the one that grows.
    fn entries_now(&self, segment: &Segment) -> (Vec<Entry>, Option<io::Error>) {
        let state = self.state.lock();
        let active = state.writer.as_ref().and_then(|w| w.active.as_ref());
        match active.filter(|active| active.segment.id == segment.id) {
            Some(active) => (active.entries.clone(), None),
            None => {
                drop(state);
                entries_of(segment)
            }
        }
    }

    /// The bytes of a record, verified by what its header says, and that header.
    ///
    /// # Errors
    /// `Damaged`, `Io`.
    pub fn record_bytes(&self, listed: &Listed) -> Result<(Head, Vec<u8>), Error> {
        let segment = self.state.lock().segments.get(&listed.segment).cloned();
        let path = self.medium.path().join(listed.segment.file_name());
        let damaged = |reason: String| {
            let path = path.clone();
            Error::new(ErrorKind::Damaged { path, reason })
        };
        let segment = segment.ok_or_else(|| damaged("the segment has left".to_owned()))?;
        read_verified(&segment, &listed.entry)
            .map_err(|source| io_error(&*self.medium, "read", source))?
            .ok_or_else(|| damaged(format!("record {} is damaged", listed.entry.id)))
    }

    /// Lets the oldest segments go until the files take at most `limit_bytes`, or only an unfinished one
    /// is left. What the policy would keep goes too.
    ///
    /// # Errors
    /// `ReadOnly`, `Late`.
    pub fn prune(&self, limit_bytes: u64, deadline: Deadline) -> Result<(), Error> {
        self.with_writer(deadline, |writer| {
            self.seal(writer);
            while self.state.lock().file_bytes() > limit_bytes {
                let oldest = self.state.lock().segments.values().next().cloned();
                match oldest {
                    Some(segment) => drop(self.drop_segment(&segment, &[])),
                    None => break,
                }
            }
        })
    }

    /// Writes the good records of every segment that has a bad place into new segments, the removals too,
    /// and then lets the bad ones go. Records that can be found are copied and no others, so nothing that
    /// was removed comes back. Answers how many records could not be saved.
    ///
    /// # Errors
    /// `ReadOnly`, `Late`, and what reading and writing answers. The segment at hand is left as it is then.
    pub fn repair(&self, deadline: Deadline) -> Result<u64, Error> {
        // Nothing is written any more to the segments that are looked at.
        let segments: Vec<Arc<Segment>> = self.with_writer(deadline, |writer| {
            self.seal(writer);
            self.state.lock().segments.values().cloned().collect()
        })?;
        let mut lost_count = 0;
        for segment in segments {
            let is_sound = self
                .is_sound(&segment)
                .map_err(|error| io_error(&*self.medium, "read", error))?;
            if !is_sound {
                lost_count += self.with_writer(deadline, |w| self.replace(w, &segment))??;
            }
        }
        Ok(lost_count)
    }

    /// Whether a segment is sealed and every record is what its index says.
    fn is_sound(&self, segment: &Segment) -> io::Result<bool> {
        let Some((entries, _)) = read_index(segment.id, &*segment.file, segment.len_bytes())?
        else {
            return Ok(false);
        };
        for entry in &entries {
            let found = read_verified(segment, entry)?;
            if !found.is_some_and(|(head, _)| Entry::of(&head, entry.offset_bytes) == *entry) {
                return Ok(false);
            }
        }
        Ok(!self.recovery.damaged.contains(&segment.id.file_name()))
    }

    /// Copies what is good of a segment to the end of the log, and lets the segment go when that is on
    /// the disk. Answers how many records left with it.
    fn replace(&self, writer: &mut Writer, segment: &Arc<Segment>) -> Result<u64, Error> {
        let read = |error| io_error(&*self.medium, "read", error);
        writer.lost.clear();
        let good = scan::all_records(&*segment.file, segment.len_bytes()).map_err(read)?;
        for entry in good {
            let place = Place::of(segment.id, &entry);
            // A removal is of use as long as no younger record of that name is there.
            let is_wanted = match self.state.lock().index.place(&entry.id) {
                Some(found) => !entry.is_removal && found.is_at(&place),
                None => entry.is_removal,
            };
            if !is_wanted {
                continue;
            }
            let Some((_, mut bytes)) = read_verified(segment, &entry).map_err(read)? else {
                continue;
            };
            let mut moved = entry.clone();
            let to = self
                .write_record(writer, &mut bytes, &mut moved)
                .map_err(|error| error.into_error(self))?;
            let mut state = self.state.lock();
            if !entry.is_removal && state.index.remove_at(&entry.id, &place) {
                state.index.insert(entry.id, Place::of(to, &moved));
            }
        }
        if let Err(error) = self.sync_active(writer) {
            writer.abandon(GroupError::io("sync", &error));
        }
        self.forget_lost(writer);
        match writer.lost.pop() {
            Some((_, error)) => Err(error.into_error(self)),
            None => Ok(self.drop_segment(segment, &[])),
        }
    }

    /// Runs `work` with the right to append.
    fn with_writer<T>(
        &self,
        deadline: Deadline,
        work: impl FnOnce(&mut Writer) -> T,
    ) -> Result<T, Error> {
        let mut state = self.state.lock();
        let mut writer = loop {
            if let Some(reason) = &state.read_only {
                let reason = reason.clone();
                return Err(Error::new(ErrorKind::ReadOnly { reason }));
            }
            if let Some(writer) = state.writer.take() {
                break writer;
            }
            if self.turn.wait_until(&mut state, deadline.instant()) {
                let deadline_ms = deadline.allowed_ms();
                return Err(Error::new(ErrorKind::Late { deadline_ms }));
            }
        };
        let turn = Turn::of(self);
        drop(state);
        let done = work(&mut writer);
        let mut state = self.state.lock();
        state.writer = Some(writer);
        turn.over();
        Ok(done)
    }
}

/// The bytes of a record, if they are one.
fn read_verified(segment: &Segment, entry: &Entry) -> std::io::Result<Option<(Head, Vec<u8>)>> {
    let (file, len_bytes) = (&*segment.file, segment.len_bytes());
    let Step::Record(found, _) = scan::step(file, entry.offset_bytes, len_bytes)? else {
        return Ok(None);
    };
    let mut bytes = vec![0; found.record_bytes as usize];
    read_exact_at(file, &mut bytes, entry.offset_bytes)?;
    let header_bytes = Head::length_of(&bytes).unwrap_or(0) as usize;
    let head = bytes.get(..header_bytes).map(Head::parse);
    Ok(head.and_then(Result::ok).map(|head| (head, bytes)))
}

/// What came of an export.
#[derive(Debug)]
#[must_use = "it may lack records"]
pub struct Exported {
    /// Records in the file.
    pub record_count: u64,
    /// Why the file may lack records: `Damaged` or `Io` for each one that is not in it, `Io` for each segment that could
    /// not be read to its end.
    pub left_out: Vec<Error>,
}

/// Writes every good record of a log into one file, a sealed segment.
///
/// # Errors
/// `Io` of the file; one of that name is one. There is no new file then.
pub fn export(log: &SegmentLog, into: &dyn Medium, name: &str) -> Result<Exported, Error> {
    let fail = |source| io_error(into, "write the export in", source);
    let file = into.create(name).map_err(fail)?;
    let exported = write_export(log, &*file, &fail);
    if exported.is_err() {
        // What it failed of is the answer; half a file is no export for anybody.
        let _ = into.remove(name);
    }
    exported
}

fn write_export(
    log: &SegmentLog,
    file: &dyn MediumFile,
    fail: &dyn Fn(io::Error) -> Error,
) -> Result<Exported, Error> {
    write_all_at(file, &header_page(EXPORT_ID, None), 0).map_err(fail)?;
    let Listing {
        records,
        unreadable: mut left_out,
    } = log.list();
    let mut entries = Vec::new();
    let mut at = PAGE_BYTES;
    for listed in records {
        let bytes = match log.record_bytes(&listed) {
            Ok((_, bytes)) => bytes,
            Err(error) => {
                left_out.push(error);
                continue;
            }
        };
        write_all_at(file, &bytes, at).map_err(fail)?;
        let mut entry = listed.entry;
        entry.offset_bytes = at;
        at = entry.end_bytes();
        entries.push(entry);
    }
    let block = index_block(EXPORT_ID, at, &entries);
    write_all_at(file, &block, at).map_err(fail)?;
    file.sync_data().map_err(fail)?;
    Ok(Exported {
        record_count: entries.len() as u64,
        left_out,
    })
}

/// Stores the records of an export that are not there yet. Answers how many were new.
///
/// # Errors
/// `Damaged` for anything but a whole export, before a record of it is stored; what storing answers.
pub fn import(
    log: &SegmentLog,
    from: &dyn Medium,
    name: &str,
    deadline: Deadline,
) -> Result<u64, Error> {
    let fail = |source| io_error(from, "read the import from", source);
    let damaged = |reason: &str| {
        Error::new(ErrorKind::Damaged {
            path: from.path().join(name),
            reason: reason.to_owned(),
        })
    };
    let file = from.open(name, false).map_err(fail)?;
    let len_bytes = file.len_bytes().map_err(fail)?;
    let index = read_index(EXPORT_ID, &*file, len_bytes).map_err(fail)?;
    let (entries, end_bytes) = index.ok_or_else(|| damaged("not an export"))?;
    let (found, bad) = scan::records(&*file, PAGE_BYTES, end_bytes).map_err(fail)?;
    if bad.is_some() || found != entries {
        return Err(damaged("a record of the export is damaged"));
    }
    let mut new_count = 0;
    for entry in entries {
        let mut bytes = vec![0; entry.record_bytes as usize];
        read_exact_at(&*file, &mut bytes, entry.offset_bytes).map_err(fail)?;
        if log.append_bytes(bytes, entry, deadline)? == Stored::Written {
            new_count += 1;
        }
    }
    Ok(new_count)
}
