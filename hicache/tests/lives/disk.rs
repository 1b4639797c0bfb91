//! A directory whose device fails when it is told to, and whose files are damaged behind the back of whoever has
//! them open.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use kvgate_hicache::log::{Directory, Medium, MediumFile, MediumLock};
use kvgate_transfer::sync::Arc;

/// The next calls that fail, of each kind.
#[derive(Debug, Default)]
pub struct Faults {
    /// Reads that give half of what was asked for.
    pub short_reads: AtomicU32,
    /// Reads that answer `EIO`.
    pub broken_reads: AtomicU32,
    /// Writes that answer `EIO`, half of it written.
    pub broken_writes: AtomicU32,
    /// Writes and new files that answer `ENOSPC`.
    pub full_writes: AtomicU32,
}

impl Faults {
    /// The device is well again.
    pub fn clear(&self) {
        for count in [
            &self.short_reads,
            &self.broken_reads,
            &self.broken_writes,
            &self.full_writes,
        ] {
            count.store(0, Relaxed);
        }
    }

    pub fn are_over(&self) -> bool {
        let sum = self.broken_reads.load(Relaxed) + self.broken_writes.load(Relaxed);
        sum + self.full_writes.load(Relaxed) + self.short_reads.load(Relaxed) == 0
    }
}

fn spend(count: &AtomicU32) -> bool {
    count
        .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1))
        .is_ok()
}

fn broken() -> io::Error {
    io::Error::from_raw_os_error(5)
}

fn full() -> io::Error {
    io::Error::from(io::ErrorKind::StorageFull)
}

/// A directory with these faults.
pub struct RoughDisk {
    inner: Directory,
    faults: Arc<Faults>,
}

impl RoughDisk {
    pub fn new(path: &Path, faults: &Arc<Faults>) -> RoughDisk {
        RoughDisk {
            inner: Directory::create(path).unwrap(),
            faults: faults.clone(),
        }
    }

    fn wrap(&self, file: Box<dyn MediumFile>) -> Box<dyn MediumFile> {
        Box::new(RoughFile {
            file,
            faults: self.faults.clone(),
        })
    }
}

struct RoughFile {
    file: Box<dyn MediumFile>,
    faults: Arc<Faults>,
}

impl MediumFile for RoughFile {
    fn read_at(&self, into: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        if spend(&self.faults.broken_reads) {
            return Err(broken());
        }
        let len = match spend(&self.faults.short_reads) {
            true => into.len().div_ceil(2),
            false => into.len(),
        };
        self.file.read_at(&mut into[..len], offset_bytes)
    }

    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> io::Result<usize> {
        if spend(&self.faults.full_writes) {
            return Err(full());
        }
        if spend(&self.faults.broken_writes) {
            // What a device leaves that fails in the middle.
            self.file
                .write_at(&bytes[..bytes.len() / 2], offset_bytes)?;
            return Err(broken());
        }
        self.file.write_at(bytes, offset_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.file.len_bytes()
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)
    }
}

impl Medium for RoughDisk {
    fn path(&self) -> PathBuf {
        self.inner.path()
    }

    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        self.inner.list()
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn MediumFile>> {
        if spend(&self.faults.full_writes) {
            return Err(full());
        }
        self.inner.create(name).map(|file| self.wrap(file))
    }

    fn open(&self, name: &str, is_writable: bool) -> io::Result<Box<dyn MediumFile>> {
        let file = self.inner.open(name, is_writable)?;
        Ok(self.wrap(file))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.inner.remove(name)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.inner.rename(from, to)
    }

    fn sync_names(&self) -> io::Result<()> {
        self.inner.sync_names()
    }

    fn lock(&self, may_create: bool) -> io::Result<Option<Box<dyn MediumLock>>> {
        self.inner.lock(may_create)
    }
}

/// The segments of a directory, oldest first.
pub fn segments(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = paths
        .filter(|path| {
            path.file_name()
                .unwrap()
                .to_string_lossy()
                .starts_with("segment-")
        })
        .collect();
    paths.sort();
    paths
}

fn writable(path: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap()
}

/// One bit of one byte.
pub fn flip(path: &Path, at: u64) {
    let file = writable(path);
    let len_bytes = file.metadata().unwrap().len();
    let mut byte = [0];
    if len_bytes > 0 && FileExt::read_at(&file, &mut byte, at % len_bytes).unwrap() == 1 {
        byte[0] ^= 1 << (at % 8);
        file.write_all_at(&byte, at % len_bytes).unwrap();
    }
}

/// A page that was never written.
pub fn tear(path: &Path, at: u64) {
    let file = writable(path);
    let pages = file.metadata().unwrap().len() / 4_096;
    if pages > 0 {
        file.write_all_at(&[0; 4_096], at % pages * 4_096).unwrap();
    }
}

/// The file is that many bytes shorter.
pub fn cut(path: &Path, bytes: u64) {
    let file = writable(path);
    let len_bytes = file.metadata().unwrap().len();
    file.set_len(len_bytes.saturating_sub(bytes)).unwrap();
}

/// The clock of the machine has jumped: every file is of another time.
pub fn jump(folder: &Path, is_forward: bool) {
    let century = Duration::from_secs(100 * 365 * 86_400);
    let time = match is_forward {
        true => SystemTime::now() + century,
        false => SystemTime::UNIX_EPOCH,
    };
    for path in segments(folder) {
        writable(&path).set_modified(time).unwrap();
    }
}
