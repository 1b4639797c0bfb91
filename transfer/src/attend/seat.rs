//! [`Seat`]: who takes frames out of one ring at the moment.
//!
//! The receive thread of the connection owns the seat. While it sleeps, a thread that waits for something of the
//! agent may take the seat, handle what comes exactly as the owner would, and sleep on the word of the ring: then
//! one wake stands between a frame and its reader. The owner calls the seat back whenever it wakes.
//!
//! **Nothing is handled twice**: what reads the ring ([`Mail`]) lies in the seat and is moved out by whoever
//! takes it. **Nothing is left unattended (I-6)**: whoever leaves first says where the next frame has to wake
//! (the owner), and looks once more; what came meanwhile is handled, or the owner is nudged. An attendant that
//! panics leaves in the same way.
//!
//! **Lock order.** The mutex is a leaf.

use crate::sync::{Arc, AtomicU32, Condvar, Mutex};

use super::bell::Bell;

/// What was found in a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Found {
    /// A frame, which was handled.
    Frame,
    /// Nothing.
    Nothing,
    /// Something that is the owner's business: the order goes on elsewhere, or the connection ends.
    NotMine,
}

/// Where a frame has to wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sleeper {
    /// The receive thread, in its poll.
    Owner,
    /// An attendant, on the word of the ring.
    Attendant,
}

/// What reads one ring and handles its frames.
pub trait Mail: Send {
    /// Handles one frame, if there is one. Waits for nothing.
    fn step(&mut self) -> Found;
    /// Says who is about to sleep; `false` when there is something to take.
    fn park(&self, sleeper: Sleeper) -> bool;
    /// Nobody sleeps.
    fn unpark(&self);
    /// What the peer changes when it wakes an attendant. `None` where it cannot.
    fn word(&self) -> Option<&AtomicU32>;
    /// Wakes the owner out of its poll.
    fn nudge(&self);
    /// The calling thread has the seat from now on, or has it no more.
    fn taken(&self, is_taken: bool);
}

/// Who reads a ring.
pub struct Seat<M: Mail> {
    state: Mutex<State<M>>,
    is_back: Condvar,
}

struct State<M> {
    /// `None` while somebody has it.
    mail: Option<M>,
    /// The attendant that has it.
    attendant: Option<Arc<Bell>>,
    /// The owner wants it back.
    is_called: bool,
    /// A thread that wanted it and did not get it.
    next: Option<Arc<Bell>>,
    /// The owner handles the end.
    is_over: bool,
}

/// The seat, as its owner has it; given back on drop.
pub struct Owned<M: Mail> {
    seat: Arc<Seat<M>>,
    mail: Option<M>,
}

/// The seat, as an attendant has it; given back on drop.
pub struct Duty<M: Mail> {
    seat: Arc<Seat<M>>,
    mail: Option<M>,
}

impl<M: Mail> Seat<M> {
    /// A seat that the owner has, who has not slept yet.
    pub fn open(mail: M) -> Owned<M> {
        let seat = Arc::new(Self {
            state: Mutex::new(State {
                mail: None,
                attendant: None,
                is_called: false,
                next: None,
                is_over: false,
            }),
            is_back: Condvar::new(),
        });
        Owned {
            seat,
            mail: Some(mail),
        }
    }

    /// For the owner: waits until an attendant, if there is one, has let go.
    pub fn call_back(this: &Arc<Self>) -> Owned<M> {
        let mut state = this.state.lock();
        let mail = loop {
            if let Some(mail) = state.mail.take() {
                break mail;
            }
            state.is_called = true;
            if let Some(bell) = &state.attendant {
                bell.ring();
            }
            this.is_back.wait(&mut state);
        };
        state.is_called = false;
        Owned {
            seat: this.clone(),
            mail: Some(mail),
        }
    }

    /// For a thread that waits: the seat, if the owner sleeps and nobody else has it. Otherwise `bell` rings when
    /// it is free.
    pub fn try_take(this: &Arc<Self>, bell: &Arc<Bell>) -> Option<Duty<M>> {
        let mut state = this.state.lock();
        let is_own = |own: &Arc<Bell>| Arc::ptr_eq(own, bell);
        if state.is_over || state.attendant.as_ref().is_some_and(is_own) {
            return None;
        }
        let mail = match state.is_called {
            true => None,
            false => state.mail.take(),
        };
        let Some(mail) = mail else {
            state.next = Some(bell.clone());
            return None;
        };
        state.attendant = Some(bell.clone());
        drop(state);
        mail.taken(true);
        // From here on a frame wakes nobody: this thread looks for itself.
        mail.unpark();
        Some(Duty {
            seat: this.clone(),
            mail: Some(mail),
        })
    }

    /// This thread does not wait any more.
    #[cfg_attr(kv_loom, allow(dead_code))]
    pub(super) fn forget(&self, bell: &Arc<Bell>) {
        let mut state = self.state.lock();
        if state
            .next
            .as_ref()
            .is_some_and(|next| Arc::ptr_eq(next, bell))
        {
            state.next = None;
        }
    }

    fn put_back(&self, mail: M) {
        let mut state = self.state.lock();
        state.mail = Some(mail);
        state.attendant = None;
        if state.is_called {
            return self.is_back.notify_all();
        }
        let next = state.next.take();
        drop(state);
        if let Some(next) = next {
            next.ring();
        }
    }
}

impl<M: Mail> Owned<M> {
    /// The seat.
    pub fn seat(&self) -> &Arc<Seat<M>> {
        &self.seat
    }

    /// What reads the ring.
    pub fn mail(&mut self) -> &mut M {
        self.mail.as_mut().expect("it leaves in drop only")
    }

    /// Nobody else gets it from now on.
    pub fn keep(mut self) -> M {
        self.seat.state.lock().is_over = true;
        self.mail.take().expect("it leaves in drop only")
    }
}

impl<M: Mail> Drop for Owned<M> {
    fn drop(&mut self) {
        if let Some(mail) = self.mail.take() {
            self.seat.put_back(mail);
        }
    }
}

impl<M: Mail> Duty<M> {
    fn mail(&self) -> &M {
        self.mail.as_ref().expect("it leaves in drop only")
    }
}

/// A seat that an attendant has.
pub trait Attended {
    /// Handles one frame, if there is one.
    fn step(&mut self) -> Found;
    /// Whether the owner wants it back.
    fn is_called(&self) -> bool;
    /// As [`Mail::park`], for the attendant.
    fn park(&self) -> bool;
    /// As [`Mail::unpark`].
    fn unpark(&self);
    /// As [`Mail::word`].
    fn word(&self) -> Option<&AtomicU32>;
}

impl<M: Mail> Attended for Duty<M> {
    fn step(&mut self) -> Found {
        self.mail
            .as_mut()
            .map_or(Found::NotMine, |mail| mail.step())
    }

    fn is_called(&self) -> bool {
        self.seat.state.lock().is_called
    }

    fn park(&self) -> bool {
        self.mail().park(Sleeper::Attendant)
    }

    fn unpark(&self) {
        self.mail().unpark();
    }

    fn word(&self) -> Option<&AtomicU32> {
        self.mail().word()
    }
}

impl<M: Mail> Drop for Duty<M> {
    fn drop(&mut self) {
        let Some(mail) = self.mail.take() else { return };
        mail.taken(false);
        // The owner sleeps, or waits for the seat and looks for itself.
        if !mail.park(Sleeper::Owner) {
            mail.nudge();
        }
        self.seat.put_back(mail);
    }
}
