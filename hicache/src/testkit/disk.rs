//! A disk in memory that remembers every step, so that a crash can happen after any of them, and that
//! fails when it is told to.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use kvgate_transfer::sync::{Arc, Mutex};

use crate::log::{Medium, MediumFile, MediumLock};

/// The unit in which a write can be torn, in bytes.
const SECTOR_BYTES: usize = 512;

/// What a crash leaves of what was not synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Nothing.
    Nothing,
    /// Everything.
    Everything,
    /// Of every write any sectors, of the names an earlier state, by seed.
    Some(u64),
}

#[derive(Clone, Debug)]
enum Step {
    Create {
        name: String,
        file: usize,
    },
    Write {
        file: usize,
        at: usize,
        bytes: Vec<u8>,
    },
    SetLen {
        file: usize,
        bytes: usize,
    },
    Sync {
        file: usize,
    },
    Remove {
        name: String,
    },
    Rename {
        from: String,
        to: String,
    },
    SyncNames,
}

#[derive(Debug, Default)]
struct Inner {
    names: BTreeMap<String, usize>,
    contents: Vec<Vec<u8>>,
    /// What the disk held when it was made.
    first_names: BTreeMap<String, usize>,
    first_contents: Vec<Vec<u8>>,
    journal: Vec<Step>,
    is_locked: bool,
    capacity_bytes: Option<usize>,
    failing_writes: u32,
    failing_syncs: u32,
    failing_reads: u32,
    failing_cuts: u32,
    /// Writes, syncs and reads that are good before one fails.
    countdown: [Option<u32>; 3],
    unreadable: Option<(String, usize)>,
    short_io: bool,
    undeletable: Option<String>,
    unopenable: Option<String>,
    is_gone: bool,
    is_read_only: bool,
}

impl Inner {
    fn check_writable(&self) -> io::Result<()> {
        match self.is_read_only {
            true => Err(error(io::ErrorKind::ReadOnlyFilesystem)),
            false => Ok(()),
        }
    }
}

/// A disk in memory. Clones are the same disk.
#[derive(Clone, Debug, Default)]
pub struct SimDisk(Arc<Mutex<Inner>>);

impl SimDisk {
    /// An empty disk.
    pub fn new() -> SimDisk {
        SimDisk::default()
    }

    fn with(names: BTreeMap<String, usize>, contents: Vec<Vec<u8>>) -> SimDisk {
        SimDisk(Arc::new(Mutex::new(Inner {
            first_names: names.clone(),
            first_contents: contents.clone(),
            names,
            contents,
            ..Inner::default()
        })))
    }

    /// A disk with the same files; nothing that happens to one happens to the other.
    pub fn copy(&self) -> SimDisk {
        let inner = self.0.lock();
        SimDisk::with(inner.names.clone(), inner.contents.clone())
    }

    /// Steps so far.
    pub fn step_count(&self) -> usize {
        self.0.lock().journal.len()
    }

    /// The disk as a crash right behind the first `step_count` steps leaves it.
    pub fn crash(&self, step_count: usize, kept: Kept) -> SimDisk {
        let inner = self.0.lock();
        let journal = &inner.journal[..step_count];
        let mut random = Random::new(kept, step_count);
        // Names: everything up to the last sync, and an earlier or later state of what follows.
        let is_name = |step: &Step| {
            matches!(
                step,
                Step::Create { .. } | Step::Remove { .. } | Step::Rename { .. }
            )
        };
        let synced = journal
            .iter()
            .rposition(|step| matches!(step, Step::SyncNames))
            .map_or(0, |at| at + 1);
        let open: Vec<usize> = (synced..step_count)
            .filter(|&at| is_name(&journal[at]))
            .collect();
        let kept_count = random.up_to(open.len());
        let names_end = open.get(kept_count).copied().unwrap_or(step_count);
        let mut names = inner.first_names.clone();
        for step in &journal[..names_end] {
            apply_name(&mut names, step);
        }
        // Bytes: each file as it was at its last sync, and any sectors of what was written since.
        let mut contents = inner.first_contents.clone();
        contents.resize(inner.contents.len(), Vec::new());
        for (file, content) in contents.iter_mut().enumerate() {
            let synced = journal
                .iter()
                .rposition(|step| matches!(step, Step::Sync { file: f } if *f == file))
                .map_or(0, |at| at + 1);
            for step in &journal[..synced] {
                apply_bytes(content, file, step);
            }
            for step in &journal[synced..] {
                random.apply_some(content, file, step);
            }
        }
        SimDisk::with(names, contents)
    }

    /// Names of the files.
    pub fn names(&self) -> Vec<String> {
        self.0.lock().names.keys().cloned().collect()
    }

    /// The bytes of a file.
    ///
    /// # Panics
    /// If there is none of that name.
    pub fn bytes(&self, name: &str) -> Vec<u8> {
        let inner = self.0.lock();
        inner.contents[inner.names[name]].clone()
    }

    /// Bytes of all files.
    pub fn file_bytes(&self) -> u64 {
        let inner = self.0.lock();
        let bytes = |file: &usize| inner.contents[*file].len() as u64;
        inner.names.values().map(bytes).sum()
    }

    /// Changes the bytes of a file behind the back of whoever has it open.
    ///
    /// # Panics
    /// If there is none of that name.
    pub fn damage(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut inner = self.0.lock();
        let file = inner.names[name];
        change(&mut inner.contents[file]);
    }

    /// Puts a file there.
    pub fn put(&self, name: &str, bytes: &[u8]) {
        let mut inner = self.0.lock();
        let file = inner.contents.len();
        inner.contents.push(bytes.to_vec());
        inner.names.insert(name.to_owned(), file);
    }

    /// How many bytes fit from now on.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.0.lock().capacity_bytes = bytes.map(|bytes| bytes as usize);
    }

    /// The next writes, syncs and reads that fail.
    pub fn fail(&self, writes: u32, syncs: u32, reads: u32) {
        let mut inner = self.0.lock();
        (inner.failing_writes, inner.failing_syncs) = (writes, syncs);
        inner.failing_reads = reads;
    }

    /// One write, one sync and one read that fail, each behind so many good ones.
    pub fn fail_behind(&self, writes: Option<u32>, syncs: Option<u32>, reads: Option<u32>) {
        self.0.lock().countdown = [writes, syncs, reads];
    }

    /// The next changes of a length that fail.
    pub fn fail_cuts(&self, cuts: u32) {
        self.0.lock().failing_cuts = cuts;
    }

    /// A byte of a file whose sector cannot be read.
    pub fn set_unreadable(&self, place: Option<(&str, usize)>) {
        self.0.lock().unreadable = place.map(|(name, at)| (name.to_owned(), at));
    }

    /// Whether reads and writes take fewer bytes than they are given.
    pub fn set_short_io(&self, is_short: bool) {
        self.0.lock().short_io = is_short;
    }

    /// Which file can not be removed.
    pub fn set_undeletable(&self, name: Option<&str>) {
        self.0.lock().undeletable = name.map(str::to_owned);
    }

    /// Which file can not be opened: the process has too many open already.
    pub fn set_unopenable(&self, name: Option<&str>) {
        self.0.lock().unopenable = name.map(str::to_owned);
    }

    /// Whether the directory is gone: nothing can be made, opened or listed.
    pub fn set_gone(&self, is_gone: bool) {
        self.0.lock().is_gone = is_gone;
    }

    /// Whether the file system takes no change.
    pub fn set_read_only(&self, is_read_only: bool) {
        self.0.lock().is_read_only = is_read_only;
    }
}

fn apply_name(names: &mut BTreeMap<String, usize>, step: &Step) {
    match step {
        Step::Create { name, file } => {
            names.insert(name.clone(), *file);
        }
        Step::Remove { name } => {
            names.remove(name);
        }
        Step::Rename { from, to } => {
            if let Some(file) = names.remove(from) {
                names.insert(to.clone(), file);
            }
        }
        Step::Write { .. } | Step::SetLen { .. } | Step::Sync { .. } | Step::SyncNames => {}
    }
}

fn apply_bytes(content: &mut Vec<u8>, of_file: usize, step: &Step) {
    match step {
        Step::Write { file, at, bytes } if *file == of_file => {
            if content.len() < at + bytes.len() {
                content.resize(at + bytes.len(), 0);
            }
            content[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        Step::SetLen { file, bytes } if *file == of_file => content.resize(*bytes, 0),
        _ => {}
    }
}

/// Decides what is left of what was not synced.
struct Random {
    kept: Kept,
    state: u64,
}

impl Random {
    fn new(kept: Kept, step_count: usize) -> Random {
        let seed = match kept {
            Kept::Some(seed) => seed,
            Kept::Nothing | Kept::Everything => 0,
        };
        let state = (seed << 20 ^ step_count as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        Random { kept, state }
    }

    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    fn up_to(&mut self, most: usize) -> usize {
        match self.kept {
            Kept::Nothing => 0,
            Kept::Everything => most,
            Kept::Some(_) => (self.next() % (most as u64 + 1)) as usize,
        }
    }

    fn apply_some(&mut self, content: &mut Vec<u8>, of_file: usize, step: &Step) {
        match (self.kept, step) {
            (Kept::Nothing, _) => {}
            (Kept::Everything, _) => apply_bytes(content, of_file, step),
            (Kept::Some(_), Step::Write { file, at, bytes }) if *file == of_file => {
                // The length can be there without the bytes, and the other way round it cannot.
                if self.next().is_multiple_of(2) && content.len() < at + bytes.len() {
                    content.resize(at + bytes.len(), 0);
                }
                for (index, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                    if self.next().is_multiple_of(2) {
                        let at = at + index * SECTOR_BYTES;
                        let bytes = sector.to_vec();
                        let file = of_file;
                        apply_bytes(content, of_file, &Step::Write { file, at, bytes });
                    }
                }
            }
            (Kept::Some(_), _) => {
                if self.next().is_multiple_of(2) {
                    apply_bytes(content, of_file, step);
                }
            }
        }
    }
}

struct SimFile {
    disk: SimDisk,
    file: usize,
}

fn error(kind: io::ErrorKind) -> io::Error {
    io::Error::from(kind)
}

/// `EIO`: what a device answers that is broken.
fn broken() -> io::Error {
    io::Error::from_raw_os_error(5)
}

fn spend(count: &mut u32) -> io::Result<()> {
    match *count {
        0 => Ok(()),
        left => {
            *count = left - 1;
            Err(broken())
        }
    }
}

fn count_down(left: &mut Option<u32>) -> io::Result<()> {
    match *left {
        None => Ok(()),
        Some(0) => {
            *left = None;
            Err(broken())
        }
        Some(count) => {
            *left = Some(count - 1);
            Ok(())
        }
    }
}

impl MediumFile for SimFile {
    fn read_at(&self, into: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        let mut inner = self.disk.0.lock();
        spend(&mut inner.failing_reads)?;
        count_down(&mut inner.countdown[2])?;
        let sector = inner.unreadable.as_ref().and_then(|(name, at)| {
            let is_here = inner.names.get(name) == Some(&self.file);
            is_here.then_some(at - at % SECTOR_BYTES)
        });
        let end = offset_bytes as usize + into.len();
        if sector.is_some_and(|at| at < end && (offset_bytes as usize) < at + SECTOR_BYTES) {
            return Err(broken());
        }
        let content = &inner.contents[self.file];
        let start = content.len().min(offset_bytes as usize);
        let mut count = into.len().min(content.len() - start);
        if inner.short_io {
            count = count.min(count / 2 + 1);
        }
        into[..count].copy_from_slice(&content[start..start + count]);
        Ok(count)
    }

    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> io::Result<usize> {
        let mut inner = self.disk.0.lock();
        inner.check_writable()?;
        spend(&mut inner.failing_writes)?;
        count_down(&mut inner.countdown[0])?;
        let at = offset_bytes as usize;
        let mut count = bytes.len();
        if inner.short_io {
            count = count.min(count / 2 + 1);
        }
        if let Some(capacity) = inner.capacity_bytes {
            let used: usize = inner.names.values().map(|f| inner.contents[*f].len()).sum();
            let grown = (at + count).saturating_sub(inner.contents[self.file].len());
            let left = capacity.saturating_sub(used);
            if grown > left {
                count = count.saturating_sub(grown - left);
            }
            if count == 0 {
                return Err(error(io::ErrorKind::StorageFull));
            }
        }
        let step = Step::Write {
            file: self.file,
            at,
            bytes: bytes[..count].to_vec(),
        };
        apply_bytes(&mut inner.contents[self.file], self.file, &step);
        inner.journal.push(step);
        Ok(count)
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut inner = self.disk.0.lock();
        spend(&mut inner.failing_syncs)?;
        count_down(&mut inner.countdown[1])?;
        inner.journal.push(Step::Sync { file: self.file });
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.disk.0.lock().contents[self.file].len() as u64)
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        let mut inner = self.disk.0.lock();
        inner.check_writable()?;
        spend(&mut inner.failing_cuts)?;
        let bytes = bytes as usize;
        inner.contents[self.file].resize(bytes, 0);
        let file = self.file;
        inner.journal.push(Step::SetLen { file, bytes });
        Ok(())
    }
}

struct SimLock(SimDisk);

impl MediumLock for SimLock {}

impl Drop for SimLock {
    fn drop(&mut self) {
        self.0.0.lock().is_locked = false;
    }
}

impl Medium for SimDisk {
    fn path(&self) -> PathBuf {
        PathBuf::from("(simulated disk)")
    }

    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        let inner = self.0.lock();
        if inner.is_gone {
            return Err(error(io::ErrorKind::NotFound));
        }
        let entry =
            |(name, file): (&String, &usize)| (name.clone(), inner.contents[*file].len() as u64);
        Ok(inner.names.iter().map(entry).collect())
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn MediumFile>> {
        let mut inner = self.0.lock();
        if inner.is_gone {
            return Err(error(io::ErrorKind::NotFound));
        }
        inner.check_writable()?;
        if inner.names.contains_key(name) {
            return Err(error(io::ErrorKind::AlreadyExists));
        }
        let file = inner.contents.len();
        inner.contents.push(Vec::new());
        let step = Step::Create {
            name: name.to_owned(),
            file,
        };
        apply_name(&mut inner.names, &step);
        inner.journal.push(step);
        let disk = self.clone();
        Ok(Box::new(SimFile { disk, file }))
    }

    fn open(&self, name: &str, _is_writable: bool) -> io::Result<Box<dyn MediumFile>> {
        let inner = self.0.lock();
        if inner.unopenable.as_deref() == Some(name) {
            // `EMFILE`.
            return Err(io::Error::from_raw_os_error(24));
        }
        let found = inner.names.get(name).filter(|_| !inner.is_gone);
        let file = *found.ok_or_else(|| error(io::ErrorKind::NotFound))?;
        let disk = self.clone();
        Ok(Box::new(SimFile { disk, file }))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut inner = self.0.lock();
        inner.check_writable()?;
        if !inner.names.contains_key(name) || inner.is_gone {
            return Err(error(io::ErrorKind::NotFound));
        }
        if inner.undeletable.as_deref() == Some(name) {
            return Err(error(io::ErrorKind::PermissionDenied));
        }
        let name = name.to_owned();
        let step = Step::Remove { name };
        apply_name(&mut inner.names, &step);
        inner.journal.push(step);
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut inner = self.0.lock();
        inner.check_writable()?;
        if !inner.names.contains_key(from) {
            return Err(error(io::ErrorKind::NotFound));
        }
        let (from, to) = (from.to_owned(), to.to_owned());
        let step = Step::Rename { from, to };
        apply_name(&mut inner.names, &step);
        inner.journal.push(step);
        Ok(())
    }

    fn sync_names(&self) -> io::Result<()> {
        let mut inner = self.0.lock();
        spend(&mut inner.failing_syncs)?;
        inner.journal.push(Step::SyncNames);
        Ok(())
    }

    fn lock(&self, _may_create: bool) -> io::Result<Option<Box<dyn MediumLock>>> {
        let mut inner = self.0.lock();
        if inner.is_locked {
            return Ok(None);
        }
        inner.is_locked = true;
        drop(inner);
        Ok(Some(Box::new(SimLock(self.clone()))))
    }
}
