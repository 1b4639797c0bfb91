//! Opening a log, whatever state its directory is in, and closing it.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::io;

use kvgate_transfer::Deadline;
use kvgate_transfer::sync::{Arc, AtomicU64, Condvar, Mutex};

use super::direct::PageBuffers;
use super::manifest::{
    MANIFEST_DRAFT_NAME, MANIFEST_NAME, Manifest, ManifestSegment, remove_if_there,
};
use super::medium::{LOCK_NAME, Medium, MediumFile, MediumLock, read_exact_at, write_all_at};
use super::reclaim::Reclaim;
use super::segment::{
    Entry, Sealed, SegmentId, check_header_page, entries_crc, index_block, index_bytes, is_blank,
    is_gapless, read_index,
};
use super::state::{Index, LogStats, Place, Segment, State};
use super::verify::sealed_segments;
use super::writer::{Writer, entries_of};
use super::{LogConfig, SegmentLog, scan};
use crate::error::{Error, ErrorKind};
use crate::evicted::Evicted;
use crate::miss::Miss;
use crate::record::PAGE_BYTES;

/// What a log may do with its directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Anything. Where the directory forbids it the log is read-only and says so in its figures.
    ReadWrite,
    /// Read.
    ReadOnly,
}

/// What was found when a log was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Whether it had been closed.
    pub was_closed: bool,
    /// Segments whose records were looked at one by one.
    pub scanned_segments: u64,
    /// Bytes of these.
    pub scanned_bytes: u64,
    /// Bytes behind the last committed record of a segment, cut off.
    pub cut_bytes: u64,
    /// Files of this log that have something wrong, by name; their good records are used.
    pub damaged: Vec<String>,
    /// Files that are not of this log, or of a version that this build does not know. They are left
    /// alone.
    pub foreign: Vec<String>,
}

/// How the files of a directory sort.
pub(super) struct Files {
    pub(super) segments: BTreeMap<SegmentId, u64>,
    pub(super) foreign: Vec<String>,
    pub(super) draft_bytes: Option<u64>,
    pub(super) lock_bytes: Option<u64>,
}

pub(super) fn files_of(medium: &dyn Medium) -> io::Result<Files> {
    let mut files = Files {
        segments: BTreeMap::new(),
        foreign: Vec::new(),
        draft_bytes: None,
        lock_bytes: None,
    };
    for (name, bytes) in medium.list()? {
        match SegmentId::from_file_name(&name) {
            Some(id) => {
                files.segments.insert(id, bytes);
            }
            None if name == MANIFEST_NAME => {}
            None if name == MANIFEST_DRAFT_NAME => files.draft_bytes = Some(bytes),
            None if name == LOCK_NAME => files.lock_bytes = Some(bytes),
            None => files.foreign.push(name),
        }
    }
    files.foreign.sort();
    Ok(files)
}

/// The lock, and why nothing may be written if that is so.
type Locked = (Option<Box<dyn MediumLock>>, Option<String>);

/// Locks a directory for one owner.
pub(super) fn lock(medium: &dyn Medium, mode: Mode) -> Result<Locked, Error> {
    let locked = |found: Option<Box<dyn MediumLock>>| match found {
        Some(lock) => Ok(Some(lock)),
        None => Err(Error::new(ErrorKind::Locked {
            path: medium.path(),
        })),
    };
    let read_only = |reason: String| -> Result<_, Error> {
        let found = medium
            .lock(false)
            .map_err(|e| io_error(medium, "lock", e))?;
        Ok((locked(found)?, Some(reason)))
    };
    if mode == Mode::ReadOnly {
        return read_only("opened for reading".to_owned());
    }
    match medium.lock(true) {
        Ok(found) => Ok((locked(found)?, None)),
        Err(error) if is_forbidden(&error) => read_only(format!("the directory: {error}")),
        Err(error) => Err(io_error(medium, "lock", error)),
    }
}

fn is_forbidden(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
    )
}

pub(super) fn io_error(medium: &dyn Medium, action: &'static str, source: io::Error) -> Error {
    Error::new(ErrorKind::Io {
        action,
        path: medium.path(),
        source,
    })
}

impl SegmentLog {
    /// Opens the log of a medium: what was closed by its manifest, what was not as a crash has left it.
    ///
    /// # Errors
    /// `InvalidConfig`; `Locked` when another one has it open; `Io`, which names the file when there is a segment
    /// that cannot be opened: every file is left as it is then.
    pub fn open(
        medium: Arc<dyn Medium>,
        config: LogConfig,
        policy: Box<dyn Reclaim>,
        mode: Mode,
    ) -> Result<SegmentLog, Error> {
        config.check()?;
        let (lock, mut read_only) = lock(&*medium, mode)?;
        let fail = |action, source| io_error(&*medium, action, source);
        let files = files_of(&*medium).map_err(|error| fail("list", error))?;
        let manifest = match Manifest::load(&*medium) {
            Ok(manifest) => manifest,
            Err(error) if error.kind() == io::ErrorKind::InvalidData => None,
            Err(error) => return Err(fail("read the manifest of", error)),
        };
        if read_only.is_none()
            && let Err(error) = forget_manifest(&*medium)
        {
            if !is_forbidden(&error) {
                return Err(fail("remove the manifest of", error));
            }
            read_only = Some(format!("the directory: {error}"));
        }
        let mut loader = Loader {
            medium: &*medium,
            is_writable: read_only.is_none(),
            recovery: Recovery {
                was_closed: manifest.is_some(),
                foreign: files.foreign.clone(),
                ..Recovery::default()
            },
            index: Index::default(),
            segments: BTreeMap::new(),
            stuck: Vec::new(),
            unsealed: BTreeMap::new(),
            sealed: sealed_segments(&*medium, &files),
            held_bytes: Arc::new(AtomicU64::new(0)),
            next_sequence: manifest.as_ref().map_or(0, |m| m.next_sequence),
        };
        for (&id, &len_bytes) in &files.segments {
            let expected = manifest.as_ref().and_then(|manifest| {
                let segments = &manifest.segments;
                segments.iter().find(|segment| segment.id == id).copied()
            });
            match loader.load(id, len_bytes, expected) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    loader.recovery.damaged.push(id.file_name());
                }
                // Nobody knows what it holds: records that are to be kept, or removals of older ones that would
                // be back without it. The file is none that may go for want of room, either.
                Err(source) => {
                    return Err(Error::new(ErrorKind::Io {
                        action: "open",
                        path: medium.path().join(id.file_name()),
                        source,
                    }));
                }
            }
        }
        let last = files.segments.keys().next_back();
        let next_segment = SegmentId(last.map_or(1, |id| id.0.saturating_add(1)));
        let is_writable = read_only.is_none();
        let log = loader.finish(&medium, config, policy, lock, next_segment, read_only);
        if is_writable {
            log.shrink();
        }
        Ok(log)
    }

    /// Files whose removal a crash has undone go again, and so does what a smaller capacity has no
    /// room for.
    fn shrink(&self) {
        loop {
            let state = self.state.lock();
            let is_over = state.file_bytes() > self.config.capacity_bytes;
            let oldest = state.segments.values().next().cloned();
            drop(state);
            match oldest {
                Some(segment) if is_over => drop(self.drop_segment(&segment, &[])),
                _ => return,
            }
        }
    }

    /// Seals the last segment, writes the manifest and lets go of the directory. Waits for a group that
    /// is being written.
    ///
    /// # Errors
    /// `Late` when a group is still being written at the deadline; `Io`; `ReadOnly` when a writer has panicked: the log
    /// is as after a crash then.
    pub fn close(self, deadline: Deadline) -> Result<(), Error> {
        let mut state = self.state.lock();
        if let Some(reason) = &state.read_only {
            let reason = reason.clone();
            return match state.writer {
                Some(_) => Ok(()),
                // It panicked.
                None => Err(Error::new(ErrorKind::ReadOnly { reason })),
            };
        }
        state.read_only = Some("closed".to_owned());
        let mut writer = loop {
            if let Some(writer) = state.writer.take() {
                break writer;
            }
            if self.turn.wait_until(&mut state, deadline.instant()) {
                return Err(Error::new(ErrorKind::Late {
                    deadline_ms: deadline.allowed_ms(),
                }));
            }
        };
        drop(state);
        self.seal(&mut writer);
        let segments: Vec<Arc<Segment>> = self.state.lock().segments.values().cloned().collect();
        for segment in &segments {
            let is_damaged = self.recovery.damaged.contains(&segment.id.file_name());
            // What cannot be read stays as it is.
            seal_late(segment)
                .or_else(|error| if is_damaged { Ok(()) } else { Err(error) })
                .map_err(|error| io_error(&*self.medium, "seal", error))?;
        }
        let listed = segments.iter().map(|segment| {
            // With fewer than there are, the next open takes the segment for damaged and looks at each record.
            let (entries, _) = entries_of(segment);
            ManifestSegment {
                id: segment.id,
                len_bytes: segment.len_bytes(),
                entry_count: entries.len() as u32,
                index_crc32c: entries_crc(&entries),
            }
        });
        let manifest = Manifest {
            next_sequence: self
                .next_sequence
                .load(kvgate_transfer::sync::Ordering::Relaxed),
            segments: listed.collect(),
        };
        manifest
            .store(&*self.medium)
            .map_err(|error| io_error(&*self.medium, "write the manifest of", error))
    }
}

/// Cuts a segment behind its last record and writes its index there. Answers its length.
fn seal_at(
    id: SegmentId,
    file: &dyn MediumFile,
    end_bytes: u64,
    entries: &[Entry],
) -> io::Result<u64> {
    file.set_len(end_bytes)?;
    let block = index_block(id, end_bytes, entries);
    write_all_at(file, &block, end_bytes)?;
    file.sync_data()?;
    Ok(end_bytes + block.len() as u64)
}

/// Seals a segment that a failed write has left without an index.
fn seal_late(segment: &Segment) -> io::Result<()> {
    let (file, len_bytes) = (&*segment.file, segment.len_bytes());
    if read_index(segment.id, file, len_bytes)?.is_some() {
        return Ok(());
    }
    let (entries, bad) = scan::records(file, PAGE_BYTES, len_bytes)?;
    let end_bytes = entries.last().map_or(PAGE_BYTES, Entry::end_bytes);
    if let Some(bad) = bad
        && scan::is_damage(file, end_bytes, len_bytes, &bad)?
    {
        return Ok(());
    }
    segment.set_len_bytes(seal_at(segment.id, file, end_bytes, &entries)?);
    Ok(())
}

/// The log is open from here on: a crash finds no manifest.
fn forget_manifest(medium: &dyn Medium) -> io::Result<()> {
    let had_draft = remove_if_there(medium, MANIFEST_DRAFT_NAME)?;
    if remove_if_there(medium, MANIFEST_NAME)? || had_draft {
        medium.sync_names()?;
    }
    Ok(())
}

/// Whether a segment was begun and its first page never reached the disk: there was nothing in it.
pub(super) fn was_never_synced(
    page: &[u8],
    len_bytes: u64,
    header: &Result<Option<Sealed>, Miss>,
) -> bool {
    let is_first_page = len_bytes <= PAGE_BYTES && !matches!(header, Err(Miss::Version { .. }));
    header.is_err() && (is_first_page || is_blank(page))
}

/// Builds the index out of the files.
struct Loader<'a> {
    medium: &'a dyn Medium,
    is_writable: bool,
    recovery: Recovery,
    index: Index,
    segments: BTreeMap<SegmentId, Arc<Segment>>,
    /// Segments without an index, and the bytes that it will have.
    unsealed: BTreeMap<SegmentId, u64>,
    /// Segments that were sealed, as the one behind each says.
    sealed: BTreeMap<SegmentId, u64>,
    /// Files of the log that are of no use and have kept their name, with their bytes.
    stuck: Vec<(String, u64)>,
    held_bytes: Arc<AtomicU64>,
    next_sequence: u64,
}

impl Loader<'_> {
    fn load(
        &mut self,
        id: SegmentId,
        len_bytes: u64,
        expected: Option<ManifestSegment>,
    ) -> io::Result<()> {
        let name = id.file_name();
        let file = self.medium.open(&name, self.is_writable)?;
        let mut page = vec![0; len_bytes.min(PAGE_BYTES) as usize];
        let header = match read_exact_at(&*file, &mut page, 0) {
            Ok(()) => check_header_page(id, &page),
            Err(error) => Err(error.into()),
        };
        // Whether it had an index: then nothing of it can be the rest of a crash.
        let was_sealed = expected.is_some() || self.sealed.contains_key(&id);
        let is_nothing = !was_sealed
            && !matches!(header, Err(Miss::Io { .. }))
            && was_never_synced(&page, len_bytes, &header)
            && !scan::any_record_behind(&*file, 0, len_bytes).unwrap_or(true);
        if is_nothing {
            drop(file);
            return self.discard(&name, len_bytes);
        }
        match header {
            Ok(_) => {}
            Err(Miss::Version { .. }) => {
                self.recovery.foreign.push(name);
                return Ok(());
            }
            Err(_) => self.recovery.damaged.push(name.clone()),
        }
        let index = read_index(id, &*file, len_bytes);
        let is_unreadable = index.is_err();
        let (entries, len_bytes, is_readable) = match index.ok().flatten() {
            Some((entries, end_bytes)) if is_gapless(&entries, end_bytes) => {
                let is_as_told = expected.is_none_or(|told| {
                    told.len_bytes == len_bytes && told.index_crc32c == entries_crc(&entries)
                });
                if !is_as_told {
                    self.recovery.damaged.push(name.clone());
                }
                (entries, len_bytes, true)
            }
            _ => self.scan(id, &*file, len_bytes, was_sealed || is_unreadable),
        };
        if entries.is_empty() && is_readable {
            drop(file);
            return self.discard(&name, len_bytes);
        }
        let segment = Segment::new(id, file, len_bytes, &self.held_bytes);
        self.segments.insert(id, segment);
        for entry in &entries {
            self.next_sequence = self.next_sequence.max(entry.sequence.saturating_add(1));
            match entry.is_removal {
                true => drop(self.index.remove(&entry.id)),
                false => self.index.insert(entry.id, Place::of(id, entry)),
            }
        }
        Ok(())
    }

    /// A segment without an index: record by record, up to the first place that holds none. What lies
    /// behind is cut off, and the segment sealed, unless that place had been synced: then the segment is
    /// damaged, and left as it is. So is one that cannot be read to its end; what lies before that place
    /// is used. Answers the records, the length, and whether every byte could be read.
    fn scan(
        &mut self,
        id: SegmentId,
        file: &dyn MediumFile,
        len_bytes: u64,
        was_sealed: bool,
    ) -> (Vec<Entry>, u64, bool) {
        self.recovery.scanned_segments += 1;
        self.recovery.scanned_bytes += len_bytes;
        file.will_read(PAGE_BYTES, len_bytes.saturating_sub(PAGE_BYTES));
        let found = scan::records(file, PAGE_BYTES, len_bytes).and_then(|(entries, bad)| {
            let end_bytes = entries.last().map_or(PAGE_BYTES, Entry::end_bytes);
            let is_damaged = match bad {
                Some(bad) if !was_sealed => scan::is_damage(file, end_bytes, len_bytes, &bad)?,
                _ => was_sealed,
            };
            Ok((!is_damaged).then_some((entries, end_bytes)))
        });
        let Ok(Some((entries, end_bytes))) = found else {
            self.recovery.damaged.push(id.file_name());
            let (entries, error) = scan::readable_records(file, len_bytes);
            return (entries, len_bytes, error.is_none());
        };
        self.recovery.cut_bytes += len_bytes - end_bytes;
        if !self.is_writable || entries.is_empty() {
            return (entries, len_bytes, true);
        }
        match seal_at(id, file, end_bytes, &entries) {
            Ok(len_bytes) => (entries, len_bytes, true),
            // On a full disk there is no room for an index: it gets one at the close.
            Err(_) => {
                self.unsealed.insert(id, index_bytes(entries.len()));
                (entries, file.len_bytes().unwrap_or(len_bytes), true)
            }
        }
    }

    fn discard(&mut self, name: &str, len_bytes: u64) -> io::Result<()> {
        self.recovery.cut_bytes += len_bytes;
        // What cannot be removed holds no record; it counts until it can.
        if self.is_writable && self.medium.remove(name).is_err() {
            self.stuck.push((name.to_owned(), len_bytes));
        }
        Ok(())
    }

    fn finish(
        self,
        medium: &Arc<dyn Medium>,
        config: LogConfig,
        policy: Box<dyn Reclaim>,
        lock: Option<Box<dyn MediumLock>>,
        next_segment: SegmentId,
        read_only: Option<String>,
    ) -> SegmentLog {
        for (id, owed_bytes) in &self.unsealed {
            if let Some(segment) = self.segments.get(id) {
                segment.owe_bytes(*owed_bytes);
            }
        }
        let newest = self.segments.values().next_back();
        let is_whole = |s: &&Arc<Segment>| {
            let is_damaged = self.recovery.damaged.contains(&s.id.file_name());
            !is_damaged && !self.unsealed.contains_key(&s.id)
        };
        let sealed = newest.filter(is_whole).map(|s| (s.id, s.len_bytes()));
        let state = State {
            index: self.index,
            segments: self.segments,
            stuck: self.stuck,
            queue: VecDeque::new(),
            writing: HashMap::new(),
            writer: Some(Writer {
                next_segment,
                active: None,
                sealed,
                sync_time: std::time::Duration::ZERO,
                lost: Vec::new(),
                kept: Vec::new(),
            }),
            gathering: super::state::Gathering::default(),
            results: HashMap::new(),
            abandoned: HashSet::new(),
            next_ticket: 0,
            owed_removals: HashMap::new(),
            survivors: HashSet::new(),
            evicted: Evicted::default(),
            read_only,
            stats: LogStats::default(),
        };
        SegmentLog {
            medium: medium.clone(),
            config,
            policy,
            recovery: self.recovery,
            state: Mutex::new(state),
            turn: Condvar::new(),
            next_sequence: AtomicU64::new(self.next_sequence),
            held_bytes: self.held_bytes,
            buffers: PageBuffers::default(),
            _lock: lock,
        }
    }
}
