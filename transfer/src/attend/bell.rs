//! What one waiting thread sleeps on, beside the words of the rings that it attends to.

#[cfg(not(kv_loom))]
use crate::deadline::Deadline;
use crate::sync::{AtomicU32, Ordering};

const QUIET: u32 = 0;
const RUNG: u32 = 1;
const ASLEEP: u32 = 2;

/// Most words that a thread sleeps on at once, its own apart.
pub(super) const WORDS_AT_ONCE: usize = 8;

/// The bell of one thread. Whoever has news for it rings; ringing an awake thread costs no system call.
#[derive(Debug)]
pub struct Bell {
    state: AtomicU32,
    /// The queue of sleepers that the kernel has for a futex.
    #[cfg(kv_loom)]
    futex: (crate::sync::Mutex<()>, crate::sync::Condvar),
}

/// A word of a ring, and its value when the thread said that it would sleep.
pub(super) type Watched<'a> = (&'a AtomicU32, u32);

impl Default for Bell {
    fn default() -> Self {
        Self::new()
    }
}

impl Bell {
    /// A bell that is quiet.
    pub fn new() -> Self {
        Self {
            state: AtomicU32::new(QUIET),
            #[cfg(kv_loom)]
            futex: (crate::sync::Mutex::new(()), crate::sync::Condvar::new()),
        }
    }

    /// Wakes its thread, or keeps it from falling asleep.
    pub fn ring(&self) {
        if self.state.swap(RUNG, Ordering::AcqRel) == ASLEEP {
            self.wake_sleeper();
        }
    }

    /// Whether it was rung since [`Bell::reset`].
    pub fn is_rung(&self) -> bool {
        self.state.load(Ordering::Acquire) == RUNG
    }

    /// Its thread looks at everything after this.
    pub fn reset(&self) {
        // A read-modify-write: what the ringer did before is seen by whoever resets.
        self.state.swap(QUIET, Ordering::AcqRel);
    }

    /// Says that the thread sleeps; `false` when it was rung.
    fn fall_asleep(&self) -> bool {
        let (from, to) = (QUIET, ASLEEP);
        let order = (Ordering::AcqRel, Ordering::Acquire);
        let asleep = self.state.compare_exchange(from, to, order.0, order.1);
        asleep.is_ok()
    }

    /// Awake for another reason than a ring, which stays.
    fn wake_up(&self) {
        let (from, to) = (ASLEEP, QUIET);
        let order = (Ordering::AcqRel, Ordering::Acquire);
        let _ = self.state.compare_exchange(from, to, order.0, order.1);
    }
}

#[cfg(not(kv_loom))]
mod kernel {
    use rustix::io::Errno;
    use rustix::thread::futex::{self, Wait, WaitFlags, WaitPtr, WaitvFlags};
    use rustix::time::{ClockId, Timespec, clock_gettime};

    use super::{ASLEEP, AtomicU32, Bell, Deadline, Ordering, WORDS_AT_ONCE, Watched};
    use crate::sync::Arc;

    impl std::task::Wake for Bell {
        fn wake(self: Arc<Self>) {
            self.ring();
        }

        fn wake_by_ref(self: &Arc<Self>) {
            self.ring();
        }
    }

    impl Bell {
        pub(super) fn wake_sleeper(&self) {
            // Fails for no word of this process.
            let _ = futex::wake(&self.state, futex::Flags::PRIVATE, 1);
        }

        /// Sleeps until it is rung, one of `words` has changed, or the deadline passes; may wake without any.
        pub(in super::super) fn sleep(&self, words: &[Watched<'_>], deadline: Deadline) {
            if !self.fall_asleep() {
                return;
            }
            let mut waits = [Wait::new(); WORDS_AT_ONCE + 1];
            waits[0] = wait(&self.state, ASLEEP, WaitFlags::PRIVATE);
            let used = words.len().min(WORDS_AT_ONCE);
            for (place, (word, value)) in waits[1..].iter_mut().zip(words) {
                *place = wait(word, *value, WaitFlags::empty());
            }
            // An interruption or a value that has changed leads the caller back to its own checks.
            let _ = futex::waitv(
                &waits[..=used],
                WaitvFlags::empty(),
                Some(&moment(deadline)),
                ClockId::Monotonic,
            );
            self.wake_up();
        }
    }

    /// On the kernel's clock.
    fn moment(deadline: Deadline) -> Timespec {
        let now = clock_gettime(ClockId::Monotonic);
        let left = deadline.remaining();
        let nanoseconds = now.tv_nsec + i64::from(left.subsec_nanos());
        let seconds = i64::try_from(left.as_secs()).unwrap_or(i64::MAX / 2);
        Timespec {
            tv_sec: now.tv_sec + seconds + nanoseconds / 1_000_000_000,
            tv_nsec: nanoseconds % 1_000_000_000,
        }
    }

    fn wait(word: &AtomicU32, value: u32, whose: WaitFlags) -> Wait {
        let mut wait = Wait::new();
        wait.val = u64::from(value);
        wait.uaddr = WaitPtr::new(word.as_ptr().cast());
        wait.flags = WaitFlags::SIZE_U32 | whose;
        wait
    }

    /// Whether this kernel lets a thread sleep on several words (Linux 5.16, and no filter against it).
    pub(in super::super) fn can_sleep_on_many() -> bool {
        const UNKNOWN: u32 = 0;
        const YES: u32 = 1;
        const NO: u32 = 2;
        static ANSWER: AtomicU32 = AtomicU32::new(UNKNOWN);
        let known = ANSWER.load(Ordering::Relaxed);
        if known != UNKNOWN {
            return known == YES;
        }
        let word = AtomicU32::new(0);
        let waits = [wait(&word, 1, WaitFlags::PRIVATE)];
        let asked = futex::waitv(&waits, WaitvFlags::empty(), None, ClockId::Monotonic);
        let can = asked == Err(Errno::AGAIN);
        ANSWER.store(if can { YES } else { NO }, Ordering::Relaxed);
        can
    }
}

#[cfg(not(kv_loom))]
pub(super) use kernel::can_sleep_on_many;
/// The model checker has no system calls: what the kernel does for the words of a futex is done by a mutex, with
/// which a sleeper looks at them once more.
#[cfg(kv_loom)]
impl Bell {
    pub(super) fn sleep(&self, words: &[Watched<'_>], _: crate::deadline::Deadline) {
        if !self.fall_asleep() {
            return;
        }
        let is_quiet = |(word, value): &Watched<'_>| word.load(Ordering::Acquire) == *value;
        let mut queue = self.futex.0.lock();
        while self.state.load(Ordering::Acquire) == ASLEEP && words.iter().all(is_quiet) {
            self.futex.1.wait(&mut queue);
        }
        drop(queue);
        self.wake_up();
    }

    /// Who has changed a word calls it, as it would call the kernel.
    pub fn wake_sleeper(&self) {
        let _queue = self.futex.0.lock();
        self.futex.1.notify_all();
    }
}
