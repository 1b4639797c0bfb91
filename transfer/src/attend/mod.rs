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
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::{
    deadline::Deadline,
    sync::{Arc, AtomicU32, Ordering},
};

/// Frames that lie there already when a thread leaves before its deadline are handled up to so many of each ring;
/// the rest is left to the owner.
const LAST_FRAMES: usize = 16;

/// How long a sleeper looks that was woken before anything was there: its writer is about to put a frame
/// (`Link::rouse`). No longer than a wake takes, so that one that does not come costs no more than another wake.
pub(crate) const ROUSED: Duration = match cfg!(kv_loom) {
    true => Duration::ZERO,
    false => Duration::from_micros(25),
};
/// Looks of a thread that spins between two looks at the clock, which takes longer than one of them.
const LOOKS: u32 = 32;

/// A thread that waits, with the seats that it has taken.
pub struct Attendant {
    bell: Arc<Bell>,
    /// The ring that has not been looked at for longest comes first.
    duties: VecDeque<Box<dyn Attended>>,
    /// How long it looks before it sleeps.
    spin: Duration,
    /// When it has to leave; `None` before it has dozed.
    until: Option<Deadline>,
    #[cfg(not(kv_loom))]
    rings: Arc<Attendance>,
    #[cfg(not(kv_loom))]
    whose: Whose,
}

impl Attendant {
    /// Sleeps until the bell has rung or the deadline has passed, and attends to its rings meanwhile. The bell was
    /// reset before the caller looked at what it waits for. Frames that keep coming do not keep it (I-24): it is
    /// late by the handling of one frame at most.
    pub fn doze(&mut self, deadline: Deadline) {
        self.until = Some(deadline);
        let spin = match self.take_what_is_free() {
            true => self.spin,
            false => Duration::ZERO,
        };
        let (mut quiet_since, mut looks) = (None, 0_u32);
        let mut roused: Option<Instant> = None;
        while !self.bell.is_rung() {
            let has_worked = self.attend(deadline);
            looks = looks.wrapping_add(1);
            let looks_on = !spin.is_zero() || roused.is_some();
            if !has_worked && looks_on && !looks.is_multiple_of(LOOKS) {
                std::hint::spin_loop();
                continue;
            }
            if self.bell.is_rung() || deadline.has_passed() {
                return;
            }
            if has_worked {
                (quiet_since, roused) = (None, None);
                continue;
            }
            if roused.take_if(|since| since.elapsed() >= ROUSED).is_none() && roused.is_some() {
                continue;
            }
            if !spin.is_zero() {
                let since = *quiet_since.get_or_insert_with(Instant::now);
                if since.elapsed() < spin {
                    std::hint::spin_loop();
                    continue;
                }
            }
            roused = self.sleep(deadline).then(Instant::now);
        }
    }

    /// Handles one frame of each ring at most, until the bell rings or the deadline has passed; `false` when there
    /// was none.
    fn attend(&mut self, deadline: Deadline) -> bool {
        let mut has_worked = false;
        for _ in 0..self.duties.len() {
            let Some(mut duty) = self.duties.pop_front() else {
                break;
            };
            if duty.is_called() {
                continue;
            }
            let found = duty.step();
            if found == Found::NotMine {
                continue;
            }
            // Behind the others, also when the bell rings: a ring whose every frame rings it starves nobody.
            self.duties.push_back(duty);
            if found == Found::Frame {
                has_worked = true;
                if self.bell.is_rung() || deadline.has_passed() {
                    break;
                }
            }
        }
        has_worked
    }

    /// Whether one of its rings has woken it.
    fn sleep(&self, deadline: Deadline) -> bool {
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
        let has_changed = |(word, seen): &(&AtomicU32, u32)| word.load(Ordering::Acquire) != *seen;
        !ROUSED.is_zero() && words.iter().any(has_changed)
    }
}

impl Drop for Attendant {
    fn drop(&mut self) {
        #[cfg(not(kv_loom))]
        self.rings.forget(&self.bell);
        if !crate::sync::thread::panicking() {
            for duty in &mut self.duties {
                for _ in 0..LAST_FRAMES {
                    let is_late = self.until.is_some_and(|until| until.has_passed());
                    if is_late || duty.is_called() || duty.step() != Found::Frame {
                        break;
                    }
                }
            }
        }
    }
}

#[cfg(not(kv_loom))]
pub(crate) use listed::{Attendance, Station, Whose};

#[cfg(not(kv_loom))]
mod listed {
    use std::collections::VecDeque;
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

    /// The rings that one waiting thread may attend to. Those of other peers stay with their receive threads, so
    /// that what such a peer sends does not wait until this thread is through with a frame.
    #[derive(Clone, Debug)]
    pub(crate) enum Whose {
        /// For whoever waits for something of any peer.
        All,
        /// For whoever waits for what these peers write.
        Of(Arc<[PeerId]>),
    }

    impl Whose {
        fn has(&self, peer: PeerId) -> bool {
            match self {
                Self::All => true,
                Self::Of(peers) => peers.contains(&peer),
            }
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
        pub(crate) fn begin(this: &Arc<Self>, whose: Whose) -> Option<Attendant> {
            if this.next(0, &whose).is_none() || !bell::can_sleep_on_many() {
                return None;
            }
            Some(Attendant {
                bell: Arc::new(Bell::new()),
                duties: VecDeque::new(),
                spin: this.spin,
                until: None,
                rings: this.clone(),
                whose,
            })
        }

        pub(super) fn forget(&self, bell: &Arc<Bell>) {
            for (_, station) in &*self.stations.lock() {
                station.forget(bell);
            }
        }

        /// The first one of these peers at `index` or behind it, with its place.
        fn next(&self, index: usize, whose: &Whose) -> Option<(usize, Arc<dyn Station>)> {
            let stations = self.stations.lock();
            let mut behind = stations.iter().enumerate().skip(index);
            let (place, (_, station)) = behind.find(|(_, (peer, _))| whose.has(*peer))?;
            Some((place, station.clone()))
        }
    }

    impl Attendant {
        /// `false` when there is no ring any more that it could ever take.
        pub(crate) fn take_what_is_free(&mut self) -> bool {
            let mut index = 0;
            // Asked one by one: no lock is held while a seat is taken.
            while let Some((place, station)) = self.rings.next(index, &self.whose) {
                index = place + 1;
                if self.duties.len() == WORDS_AT_ONCE {
                    break;
                }
                self.duties.extend(station.try_take(&self.bell));
            }
            index > 0
        }

        /// Does not sleep while there is a ring that it has or could have.
        pub(crate) fn wide_awake(mut self) -> Self {
            self.spin = Duration::MAX;
            self
        }

        /// Waits until `poll` has an answer; `None` when the deadline passes first. However it ends, `forget` is
        /// told the waker that `poll` may have kept: it is of this wait alone, and no change may ever come that
        /// would take it out.
        pub(crate) fn wait<R>(
            mut self,
            deadline: Deadline,
            mut poll: impl FnMut(&mut Context<'_>) -> Poll<R>,
            forget: impl Fn(&Waker),
        ) -> Option<R> {
            let kept = Kept {
                waker: Waker::from(self.bell.clone()),
                forget,
            };
            let mut cx = Context::from_waker(&kept.waker);
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

    /// A waker that may be kept until this is dropped.
    struct Kept<F: Fn(&Waker)> {
        waker: Waker,
        forget: F,
    }

    impl<F: Fn(&Waker)> Drop for Kept<F> {
        fn drop(&mut self) {
            (self.forget)(&self.waker);
        }
    }
}

/// For the models.
#[cfg(kv_loom)]
impl Attendant {
    /// A thread that attends to these seats.
    pub fn new(bell: Arc<Bell>, duties: Vec<Box<dyn Attended>>) -> Self {
        Self {
            bell,
            duties: duties.into(),
            spin: Duration::ZERO,
            until: None,
        }
    }

    /// It has its seats from the beginning.
    fn take_what_is_free(&mut self) -> bool {
        true
    }
}
