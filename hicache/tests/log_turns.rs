//! The right to append while it is out: a panic of whoever has it, and removals of what is being written.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used)]

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use kvgate_hicache::log::{
    LogConfig, Medium, MediumFile, MediumLock, Mode, Oldest, SegmentLog, Stored,
};
use kvgate_hicache::record::RecordKind::Block;
use kvgate_hicache::testkit::{Sample, SimDisk};
use kvgate_hicache::{Error, ErrorKind, Miss};
use kvgate_transfer::Deadline;

fn soon() -> Deadline {
    Deadline::after_ms(20_000)
}

/// What happens in the next sync.
type Hook = Box<dyn FnOnce() + Send>;

/// A disk whose next sync runs something of the test's.
#[derive(Clone, Default)]
struct Hooked {
    disk: SimDisk,
    hook: Arc<Mutex<Option<Hook>>>,
}

struct HookedFile {
    file: Box<dyn MediumFile>,
    hook: Arc<Mutex<Option<Hook>>>,
}

impl Hooked {
    fn open_log(&self) -> SegmentLog {
        let medium = Arc::new(self.clone());
        let (config, policy) = (LogConfig::default(), Box::new(Oldest));
        SegmentLog::open(medium, config, policy, Mode::ReadWrite).unwrap()
    }

    fn in_next_sync(&self, hook: impl FnOnce() + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(hook));
    }

    /// The next sync says that it has begun and goes on when it is told to.
    fn hold_next_sync(&self) -> (Receiver<()>, Sender<()>) {
        let (begun, told) = channel();
        let (go, may_go) = channel();
        self.in_next_sync(move || {
            begun.send(()).unwrap();
            may_go.recv().unwrap();
        });
        (told, go)
    }

    fn wrap(&self, file: Box<dyn MediumFile>) -> Box<dyn MediumFile> {
        let hook = self.hook.clone();
        Box::new(HookedFile { file, hook })
    }
}

impl MediumFile for HookedFile {
    fn read_at(&self, into: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        self.file.read_at(into, offset_bytes)
    }
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> io::Result<usize> {
        self.file.write_at(bytes, offset_bytes)
    }
    fn sync_data(&self) -> io::Result<()> {
        let hook = self.hook.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
        self.file.sync_data()
    }
    fn len_bytes(&self) -> io::Result<u64> {
        self.file.len_bytes()
    }
    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)
    }
}

impl Medium for Hooked {
    fn path(&self) -> PathBuf {
        self.disk.path()
    }
    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        self.disk.list()
    }
    fn create(&self, name: &str) -> io::Result<Box<dyn MediumFile>> {
        Ok(self.wrap(self.disk.create(name)?))
    }
    fn open(&self, name: &str, is_writable: bool) -> io::Result<Box<dyn MediumFile>> {
        Ok(self.wrap(self.disk.open(name, is_writable)?))
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.disk.remove(name)
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.rename(from, to)
    }
    fn sync_names(&self) -> io::Result<()> {
        self.disk.sync_names()
    }
    fn lock(&self, may_create: bool) -> io::Result<Option<Box<dyn MediumLock>>> {
        self.disk.lock(may_create)
    }
}

fn put(log: &SegmentLog, sample: &Sample, k: u32, deadline: Deadline) -> Result<Stored, Error> {
    sample.with_record(Block, k, |record| log.append(record, deadline))
}

fn read(log: &SegmentLog, sample: &Sample, k: u32) -> Result<(), Miss> {
    sample.check_read(Block, k, |wanted, into| log.read(wanted, into))
}

/// Whoever waits hears at once that nothing is written any more, and what was acknowledged is read now and later.
#[test]
fn a_writer_that_panics_makes_the_log_read_only() {
    let (sample, hooked) = (Sample::small(4), Hooked::default());
    let log = hooked.open_log();
    put(&log, &sample, 0, soon()).unwrap();
    hooked.in_next_sync(|| panic!("a planted panic"));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| put(&log, &sample, 1, soon()));
        writer.join().unwrap_err();
    });
    for outcome in [
        put(&log, &sample, 2, soon()).map(drop),
        log.prune(0, soon()),
        log.remove(sample.namespace().digest(), sample.id(Block, 0), soon())
            .map(drop),
    ] {
        let error = outcome.unwrap_err();
        let ErrorKind::ReadOnly { reason } = error.kind() else {
            panic!("{error}");
        };
        assert!(reason.contains("panicked"), "{reason}");
    }
    assert!(log.stats().is_read_only);
    assert_eq!(read(&log, &sample, 0), Ok(()));
    assert!(log.close(soon()).is_err(), "it is not sealed");
    let log = hooked.open_log();
    assert_eq!(read(&log, &sample, 0), Ok(()));
    put(&log, &sample, 2, soon()).unwrap();
}

/// One that comes while the group is being written.
#[test]
fn who_waits_for_a_writer_that_panics_is_told() {
    let (sample, hooked) = (Sample::small(4), Hooked::default());
    let log = hooked.open_log();
    put(&log, &sample, 0, soon()).unwrap();
    let (begun, told) = channel();
    let (go, may_go) = channel::<()>();
    hooked.in_next_sync(move || {
        begun.send(()).unwrap();
        may_go.recv().unwrap();
        panic!("a planted panic");
    });
    std::thread::scope(|scope| {
        let leader = scope.spawn(|| put(&log, &sample, 1, soon()));
        told.recv().unwrap();
        let waiter = scope.spawn(|| {
            go.send(()).unwrap();
            put(&log, &sample, 2, soon())
        });
        let error = waiter.join().unwrap().unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::ReadOnly { .. }),
            "{error}"
        );
        leader.join().unwrap_err();
    });
}

/// It was asked to go before it had come.
#[test]
fn a_record_that_is_removed_while_it_is_written_is_not_found() {
    let (sample, hooked) = (Sample::small(4), Hooked::default());
    let log = hooked.open_log();
    put(&log, &sample, 0, soon()).unwrap();
    let (told, go) = hooked.hold_next_sync();
    let (namespace, id) = (sample.namespace().digest(), sample.id(Block, 1));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| put(&log, &sample, 1, soon()));
        told.recv().unwrap();
        // Nobody can write the removal before the group is over.
        let removed = log.remove(namespace, id, Deadline::after_ms(0));
        go.send(()).unwrap();
        assert_eq!(writer.join().unwrap().unwrap(), Stored::Written);
        let error = removed.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Late { .. }), "{error}");
    });
    assert_eq!(read(&log, &sample, 1), Err(Miss::Absent));
    assert!(log.remove(namespace, id, soon()).unwrap(), "it is owed");
    assert!(!log.remove(namespace, id, soon()).unwrap(), "it is gone");
    assert_eq!(read(&log, &sample, 0), Ok(()));
    drop(log);
    let log = hooked.open_log();
    assert_eq!(read(&log, &sample, 1), Err(Miss::Absent));
    put(&log, &sample, 1, soon()).unwrap();
    assert_eq!(read(&log, &sample, 1), Ok(()));
}
