//! What the log needs of a disk: named files with positional reads and writes. [`Directory`] is a
//! directory of the file system; tests put a disk of their own in its place.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use kvgate_transfer::sync::{Arc, Mutex};
use rustix::fs::{Advice, OFlags, fadvise};
use rustix::io::{ReadWriteFlags, preadv2};

/// Name of the file that is locked while a log is open.
pub const LOCK_NAME: &str = "LOCK";

/// One file of a [`Medium`].
pub trait MediumFile: Send + Sync {
    /// Reads at a place; fewer bytes than asked for are normal, 0 is the end of the file.
    ///
    /// # Errors
    /// What the device answers.
    fn read_at(&self, into: &mut [u8], offset_bytes: u64) -> io::Result<usize>;

    /// Whether what lies at a place comes without a wait for the device. A guess: it changes how a place is read, not
    /// what is read there.
    fn is_at_hand(&self, offset_bytes: u64) -> bool {
        let _everything_is = offset_bytes;
        true
    }

    /// Reads at a place straight into `into`, and leaves nothing of it in the memory of the system: what is read once
    /// and kept elsewhere needs no second place there. The place, the length and the address of `into` are multiples
    /// of 4,096. Fewer bytes than asked for are normal.
    ///
    /// # Errors
    /// `Unsupported`, and what the device answers; [`MediumFile::read_at`] may read the place all the same.
    fn read_direct(&self, into: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        let _not_read = (into, offset_bytes);
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }

    /// Says that so many bytes from there on are about to be read, in order, so that they can be on their way before
    /// they are asked for. Changes nothing else.
    fn will_read(&self, offset_bytes: u64, bytes: u64) {
        let _nothing_to_prepare = (offset_bytes, bytes);
    }

    /// Writes at a place; fewer bytes than given may be taken.
    ///
    /// # Errors
    /// What the device answers.
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> io::Result<usize>;

    /// Waits until what was written, and the length, will be there after a crash.
    ///
    /// # Errors
    /// What the device answers. What was written since the last success is lost or not, then.
    fn sync_data(&self) -> io::Result<()>;

    /// Length of the file.
    ///
    /// # Errors
    /// What the device answers.
    fn len_bytes(&self) -> io::Result<u64>;

    /// Cuts the file, or makes it longer with zeros.
    ///
    /// # Errors
    /// What the device answers.
    fn set_len(&self, bytes: u64) -> io::Result<()>;
}

/// Keeps everybody else out until it is dropped.
pub trait MediumLock: Send + Sync {}

/// The lock file of a directory.
///
/// It is unlocked and not only closed: a child that this process starts at that moment has the open file too until it
/// is another program, and would keep the lock.
struct HeldLock(File);

impl MediumLock for HeldLock {}

impl Drop for HeldLock {
    fn drop(&mut self) {
        // Closing it does the same a little later.
        let _is_unlocked = self.0.unlock();
    }
}

/// A flat directory.
pub trait Medium: Send + Sync {
    /// Where it is, for messages.
    fn path(&self) -> PathBuf;

    /// Names and lengths of everything in it, in any order.
    ///
    /// # Errors
    /// What the device answers.
    fn list(&self) -> io::Result<Vec<(String, u64)>>;

    /// Makes a new file.
    ///
    /// # Errors
    /// What the device answers; a file of that name is one.
    fn create(&self, name: &str) -> io::Result<Box<dyn MediumFile>>;

    /// Opens a file for reading, and for writing if asked.
    ///
    /// # Errors
    /// What the device answers.
    fn open(&self, name: &str, is_writable: bool) -> io::Result<Box<dyn MediumFile>>;

    /// Removes a file. Who has it open may read on.
    ///
    /// # Errors
    /// What the device answers.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Gives a file another name, in place of whatever had it.
    ///
    /// # Errors
    /// What the device answers.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Waits until files made, removed and renamed so far will be so after a crash.
    ///
    /// # Errors
    /// What the device answers.
    fn sync_names(&self) -> io::Result<()>;

    /// Keeps others out; `None` when another one has it. A reader of a directory without a lock file,
    /// where it may not make one, needs none.
    ///
    /// # Errors
    /// What the device answers.
    fn lock(&self, may_create: bool) -> io::Result<Option<Box<dyn MediumLock>>>;
}

/// A directory of the file system.
#[derive(Clone, Debug)]
pub struct Directory {
    path: PathBuf,
}

impl Directory {
    /// An existing directory.
    ///
    /// # Errors
    /// What the file system answers.
    pub fn open(path: &Path) -> io::Result<Directory> {
        if !std::fs::metadata(path)?.is_dir() {
            return Err(io::Error::from(io::ErrorKind::NotADirectory));
        }
        Ok(Directory {
            path: path.to_owned(),
        })
    }

    /// A directory, made if it does not exist.
    ///
    /// # Errors
    /// What the file system answers.
    pub fn create(path: &Path) -> io::Result<Directory> {
        std::fs::create_dir_all(path)?;
        Directory::open(path)
    }
}

/// A file of a [`Directory`].
struct DirectoryFile {
    file: File,
    path: PathBuf,
    direct: Mutex<Direct>,
}

/// The same file, opened to be read past the page cache.
enum Direct {
    /// When that is done for the first time.
    NotYet,
    Open(Arc<File>),
    /// The file system does not do it.
    Refused,
}

impl DirectoryFile {
    /// Records are read in any order, and it is known how long each is: the kernel reads nothing ahead but what
    /// [`MediumFile::will_read`] says.
    fn open(options: &OpenOptions, path: PathBuf) -> io::Result<DirectoryFile> {
        let file = options.open(&path)?;
        // A hint: without it more is read than is needed.
        let _is_taken = fadvise(&file, 0, None, Advice::Random);
        Ok(DirectoryFile {
            file,
            path,
            direct: Mutex::new(Direct::NotYet),
        })
    }

    fn direct(&self) -> Option<Arc<File>> {
        let mut direct = self.direct.lock();
        if let Direct::NotYet = *direct {
            let mut options = OpenOptions::new();
            options.read(true);
            options.custom_flags(OFlags::DIRECT.bits() as i32);
            let opened = options.open(&self.path);
            *direct = opened.map_or(Direct::Refused, |file| Direct::Open(Arc::new(file)));
        }
        match &*direct {
            Direct::Open(file) => Some(Arc::clone(file)),
            Direct::NotYet | Direct::Refused => None,
        }
    }
}

impl MediumFile for DirectoryFile {
    fn read_at(&self, into: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        FileExt::read_at(&self.file, into, offset_bytes)
    }

    fn is_at_hand(&self, offset_bytes: u64) -> bool {
        let mut first = [0];
        let into = &mut [io::IoSliceMut::new(&mut first)];
        let looked = preadv2(&self.file, into, offset_bytes, ReadWriteFlags::NOWAIT);
        matches!(looked, Ok(1))
    }

    fn read_direct(&self, into: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        match self.direct() {
            Some(file) => FileExt::read_at(&*file, into, offset_bytes),
            None => Err(io::Error::from(io::ErrorKind::Unsupported)),
        }
    }

    fn will_read(&self, offset_bytes: u64, bytes: u64) {
        // A hint: without it the read only takes longer.
        let _is_taken = fadvise(
            &self.file,
            offset_bytes,
            NonZeroU64::new(bytes),
            Advice::WillNeed,
        );
    }

    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> io::Result<usize> {
        FileExt::write_at(&self.file, bytes, offset_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)
    }
}

impl Medium for Directory {
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            files.push((name, entry.metadata()?.len()));
        }
        Ok(files)
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn MediumFile>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        let file = DirectoryFile::open(&options, self.path.join(name))?;
        Ok(Box::new(file))
    }

    fn open(&self, name: &str, is_writable: bool) -> io::Result<Box<dyn MediumFile>> {
        let mut options = OpenOptions::new();
        options.read(true).write(is_writable);
        let file = DirectoryFile::open(&options, self.path.join(name))?;
        Ok(Box::new(file))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.path.join(name))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.path.join(from), self.path.join(to))
    }

    fn sync_names(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    fn lock(&self, may_create: bool) -> io::Result<Option<Box<dyn MediumLock>>> {
        let mut options = OpenOptions::new();
        options.read(true).write(may_create).create(may_create);
        let file = match options.open(self.path.join(LOCK_NAME)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && !may_create => {
                return Ok(Some(Box::new(NoLock)));
            }
            opened => opened?,
        };
        match file.try_lock() {
            Ok(()) => Ok(Some(Box::new(HeldLock(file)))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

/// A reader of a directory in which nobody can lock anything.
struct NoLock;

impl MediumLock for NoLock {}

/// Reads exactly `into.len()` bytes.
///
/// # Errors
/// What the device answers; `UnexpectedEof` at the end of the file.
pub(crate) fn read_exact_at(
    file: &dyn MediumFile,
    mut into: &mut [u8],
    mut offset_bytes: u64,
) -> io::Result<()> {
    while !into.is_empty() {
        match file.read_at(into, offset_bytes) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            Ok(count) => {
                into = &mut into[count..];
                offset_bytes += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all of `bytes`.
///
/// # Errors
/// What the device answers; some of the bytes may be there then.
pub(crate) fn write_all_at(
    file: &dyn MediumFile,
    mut bytes: &[u8],
    mut offset_bytes: u64,
) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write_at(bytes, offset_bytes) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero)),
            Ok(count) => {
                bytes = &bytes[count..];
                offset_bytes += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
