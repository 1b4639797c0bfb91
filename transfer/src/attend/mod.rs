//! A thread that waits for something of its agent takes the frames that bring it out of the ring by itself.
//!
//! [`Attendance`] lists the rings of an agent, [`Seat`] says who reads one, [`Attendant`] is a thread that waits.
//! Everything that the receive thread of a ring would do with a frame is done by the attendant, on its own
//! stack: the sinks of flights and the recorder are called there too.

mod bell;
mod seat;

pub use bell::Bell;
#[cfg(kv_loom)]
pub use seat::Duty;
pub use seat::{Attended, Found, Mail, Owned, Seat, Sleeper};

use self::bell::WORDS_AT_ONCE;
use std::time::{Duration, Instant};

use crate::{
    deadline::Deadline,
    sync::{Arc, AtomicU32, Ordering},
};

/// Frames that lie there already when a thread leaves are handled up to so many; the rest is left to the owner.
const LAST_FRAMES: usize = 16;

/// A thread that waits, with the seats that it has taken.
pub struct Attendant {
    bell: Arc<Bell>,
    duties: Vec<Box<dyn Attended>>,
    /// How long it looks before it sleeps.
    spin: Duration,
    #[cfg(not(kv_loom))]
    rings: Arc<Attendance>,
}

impl Attendant {
    /// Sleeps until the bell has rung or the deadline has passed, and attends to its rings meanwhile. The bell was
    /// reset before the caller looked at what it waits for.
    pub fn doze(&mut self, deadline: Deadline) {
        #[cfg(not(kv_loom))]
        self.take_what_is_free();
        let mut quiet_since = None;
        while !self.bell.is_rung() {
            if self.attend() {
                quiet_since = None;
                continue;
            }
            if !self.spin.is_zero() {
                let since = *quiet_since.get_or_insert_with(Instant::now);
                if since.elapsed() < self.spin && !deadline.has_passed() {
                    std::hint::spin_loop();
                    continue;
                }
            }
            if self.bell.is_rung() || deadline.has_passed() {
                return;
            }
            self.sleep(deadline);
        }
    }

    /// Handles what lies in the rings, until the bell rings; `false` when there was nothing.
    fn attend(&mut self) -> bool {
        let bell = &self.bell;
        let mut has_worked = false;
        self.duties.retain_mut(|duty| {
            loop {
                if duty.is_called() {
                    return false;
                }
                match duty.step() {
                    Found::Frame => has_worked = true,
                    Found::Nothing => return true,
                    Found::NotMine => return false,
                }
                if bell.is_rung() {
                    return true;
                }
            }
        });
        has_worked
    }

    fn sleep(&self, deadline: Deadline) {
        let mut words = Vec::with_capacity(WORDS_AT_ONCE);
        let mut is_empty = true;
        for duty in &self.duties {
            // Before it says that it sleeps, so that a wake that comes at once is a change.
            let seen = |word: &AtomicU32| word.load(Ordering::Acquire);
            words.extend(duty.word().map(|word| (word, seen(word))));
            is_empty = duty.park();
            if !is_empty {
                break;
            }
        }
        if is_empty {
            self.bell.sleep(&words, deadline);
        }
        self.duties.iter().for_each(|duty| duty.unpark());
    }
}

impl Drop for Attendant {
    fn drop(&mut self) {
        #[cfg(not(kv_loom))]
        self.rings.forget(&self.bell);
        if !crate::sync::thread::panicking() {
            for duty in &mut self.duties {
                let mut left = LAST_FRAMES;
                while left > 0 && !duty.is_called() && duty.step() == Found::Frame {
                    left -= 1;
                }
            }
        }
    }
}

#[cfg(not(kv_loom))]
pub(crate) use listed::{Attendance, Station};

#[cfg(not(kv_loom))]
mod listed {
    use std::task::{Context, Poll, Waker};
    use std::time::Duration;

    use super::{Attendant, Attended, Bell, Mail, Seat, WORDS_AT_ONCE, bell};
    use crate::deadline::Deadline;
    use crate::ids::PeerId;
    use crate::sync::{Arc, Mutex};

    /// A seat, whatever reads its ring.
    pub(crate) trait Station: Send + Sync {
        /// As [`Seat::try_take`].
        fn try_take(self: Arc<Self>, bell: &Arc<Bell>) -> Option<Box<dyn Attended>>;
        /// The thread of this bell does not wait any more.
        fn forget(&self, bell: &Arc<Bell>);
    }

    impl<M: Mail + 'static> Station for Seat<M> {
        fn try_take(self: Arc<Self>, bell: &Arc<Bell>) -> Option<Box<dyn Attended>> {
            let duty = Seat::try_take(&self, bell)?;
            Some(Box::new(duty))
        }

        fn forget(&self, bell: &Arc<Bell>) {
            Seat::forget(self, bell);
        }
    }

    /// The rings of an agent that a waiting thread may attend to.
    pub(crate) struct Attendance {
        spin: Duration,
        stations: Mutex<Vec<(PeerId, Arc<dyn Station>)>>,
    }

    impl std::fmt::Debug for Attendance {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            let count = self.stations.lock().len();
            f.debug_struct("Attendance").field("rings", &count).finish()
        }
    }

    impl Attendance {
        /// No ring yet. Whoever waits looks for `spin` before it sleeps.
        pub(crate) fn new(spin: Duration) -> Self {
            Self {
                spin,
                stations: Mutex::default(),
            }
        }

        /// The ring of this peer may be attended to.
        pub(crate) fn list(&self, peer: PeerId, station: Arc<dyn Station>) {
            self.stations.lock().push((peer, station));
        }

        /// Not any more.
        pub(crate) fn strike(&self, peer: PeerId) {
            self.stations.lock().retain(|(listed, _)| *listed != peer);
        }

        /// For a thread that is about to wait; `None` where it has nothing to attend to.
        pub(crate) fn begin(this: &Arc<Self>) -> Option<Attendant> {
            if this.stations.lock().is_empty() || !bell::can_sleep_on_many() {
                return None;
            }
            Some(Attendant {
                bell: Arc::new(Bell::new()),
                duties: Vec::new(),
                spin: this.spin,
                rings: this.clone(),
            })
        }

        pub(super) fn forget(&self, bell: &Arc<Bell>) {
            for (_, station) in &*self.stations.lock() {
                station.forget(bell);
            }
        }

        fn number(&self, index: usize) -> Option<Arc<dyn Station>> {
            Some(self.stations.lock().get(index)?.1.clone())
        }
    }

    impl Attendant {
        pub(super) fn take_what_is_free(&mut self) {
            let mut index = 0;
            // Asked one by one: no lock is held while a seat is taken.
            while let Some(station) = self.rings.number(index) {
                if self.duties.len() == WORDS_AT_ONCE {
                    return;
                }
                self.duties.extend(station.try_take(&self.bell));
                index += 1;
            }
        }

        /// Does not sleep at all.
        pub(crate) fn wide_awake(mut self) -> Self {
            self.spin = Duration::MAX;
            self
        }

        /// Waits until `poll` has an answer; `None` when the deadline passes first.
        pub(crate) fn wait<R>(
            mut self,
            deadline: Deadline,
            mut poll: impl FnMut(&mut Context<'_>) -> Poll<R>,
        ) -> Option<R> {
            let waker = Waker::from(self.bell.clone());
            let mut cx = Context::from_waker(&waker);
            loop {
                self.bell.reset();
                if let Poll::Ready(answer) = poll(&mut cx) {
                    return Some(answer);
                }
                if deadline.has_passed() {
                    return None;
                }
                self.doze(deadline);
            }
        }
    }
}

/// For the models.
#[cfg(kv_loom)]
impl Attendant {
    /// A thread that attends to these seats.
    pub fn new(bell: Arc<Bell>, duties: Vec<Box<dyn Attended>>) -> Self {
        let spin = Duration::ZERO;
        Self { bell, duties, spin }
    }
}
