//! What the log needs of a disk: named files with positional reads and writes. [`Directory`] is a
//! directory of the file system; tests put a disk of their own in its place.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise};
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

impl MediumLock for File {}

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

impl MediumFile for File {
    fn read_at(&self, into: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        FileExt::read_at(self, into, offset_bytes)
    }

    fn will_read(&self, offset_bytes: u64, bytes: u64) {
        // What is in the page cache already needs nothing, and asking for all of it costs more than a look at its start.
        let mut first = [0];
        let into = &mut [io::IoSliceMut::new(&mut first)];
        let looked = preadv2(self, into, offset_bytes, ReadWriteFlags::NOWAIT);
        if !matches!(looked, Ok(1)) {
            // A hint: without it the read only takes longer.
            let _is_taken = fadvise(self, offset_bytes, NonZeroU64::new(bytes), Advice::WillNeed);
        }
    }

    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> io::Result<usize> {
        FileExt::write_at(self, bytes, offset_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        File::sync_data(self)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        File::set_len(self, bytes)
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
        Ok(Box::new(read_by_record(
            options.open(self.path.join(name))?,
        )))
    }

    fn open(&self, name: &str, is_writable: bool) -> io::Result<Box<dyn MediumFile>> {
        let mut options = OpenOptions::new();
        options.read(true).write(is_writable);
        Ok(Box::new(read_by_record(
            options.open(self.path.join(name))?,
        )))
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
            Ok(()) => Ok(Some(Box::new(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

/// Records are read in any order, and it is known how long each is: the kernel reads nothing ahead but what
/// [`MediumFile::will_read`] says.
fn read_by_record(file: File) -> File {
    // A hint: without it more is read than is needed.
    let _is_taken = fadvise(&file, 0, None, Advice::Random);
    file
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
