//! I-6: a thread that waits takes frames out of the ring by itself. No frame is handled twice, none is left
//! unattended when it leaves, and the owner of the ring gets its seat back from a thread that sleeps.
#![cfg(kv_loom)]

use kvgate_loom_tests::{deadline, model};
use kvgate_transfer::attend::{Attendant, Attended, Bell, Found, Mail, Owned, Seat, Sleeper};
use kvgate_transfer::ring_model::{RingReader, RingWriter, ring};
use kvgate_transfer::sync::{Arc, AtomicU32, Condvar, Mutex, thread};

/// What the poll of the owner hears.
#[derive(Default)]
struct Poll {
    is_ready: bool,
    is_stopped: bool,
}

#[derive(Default)]
struct Shared {
    poll: Mutex<Poll>,
    woken: Condvar,
    handled: Mutex<Vec<u8>>,
    came: Condvar,
}

impl Shared {
    fn wake_owner(&self, is_stopped: bool) {
        let mut poll = self.poll.lock();
        poll.is_ready = true;
        poll.is_stopped |= is_stopped;
        self.woken.notify_all();
    }
}

/// The ring; whoever handles `awaited` tells the thread that waits for it.
struct ModelMail {
    reader: RingReader,
    shared: Arc<Shared>,
    bell: Arc<Bell>,
    awaited: u8,
}

impl Mail for ModelMail {
    fn step(&mut self) -> Found {
        let Some(frame) = self.reader.take() else {
            return Found::Nothing;
        };
        self.shared.handled.lock().push(frame[0]);
        let _handled = self.shared.handled.lock();
        self.shared.came.notify_all();
        if frame[0] == self.awaited {
            self.bell.ring();
        }
        Found::Frame
    }

    fn park(&self, sleeper: Sleeper) -> bool {
        self.reader.park(sleeper)
    }

    fn unpark(&self) {
        self.reader.unpark();
    }

    fn word(&self) -> Option<&AtomicU32> {
        Some(self.reader.bell())
    }

    fn nudge(&self) {
        self.shared.wake_owner(false);
    }

    fn taken(&self, _: bool) {}
}

/// As the receive thread of a connection.
fn own(mut owned: Owned<ModelMail>, shared: &Shared) {
    let seat = owned.seat().clone();
    loop {
        while owned.mail().step() == Found::Frame {}
        if !owned.mail().park(Sleeper::Owner) {
            continue;
        }
        drop(owned);
        let is_stopped = {
            let mut poll = shared.poll.lock();
            while !poll.is_ready {
                shared.woken.wait(&mut poll);
            }
            poll.is_ready = false;
            poll.is_stopped
        };
        owned = Seat::call_back(&seat);
        owned.mail().unpark();
        if is_stopped {
            while owned.mail().step() == Found::Frame {}
            drop(owned.keep());
            return;
        }
    }
}

fn send(mut writer: RingWriter, shared: &Shared, bell: &Bell, count: u8) {
    for number in 1..=count {
        let (is_in, sleeper) = writer.put(&[number]);
        assert!(is_in);
        match sleeper {
            Some(Sleeper::Owner) => shared.wake_owner(false),
            Some(Sleeper::Attendant) => bell.wake_sleeper(),
            None => {}
        }
    }
}

struct Rig {
    writer: RingWriter,
    shared: Arc<Shared>,
    bell: Arc<Bell>,
    seat: Arc<Seat<ModelMail>>,
    owner: thread::JoinHandle<()>,
}

fn rig(awaited: u8) -> Rig {
    let (writer, reader) = ring(8);
    let (shared, bell) = (Arc::new(Shared::default()), Arc::new(Bell::new()));
    let owned = Seat::open(ModelMail {
        reader,
        shared: shared.clone(),
        bell: bell.clone(),
        awaited,
    });
    let seat = owned.seat().clone();
    let for_owner = shared.clone();
    let owner = thread::spawn(move || own(owned, &for_owner));
    Rig {
        writer,
        shared,
        bell,
        seat,
        owner,
    }
}

/// The seat, if it is free.
fn take(seat: &Arc<Seat<ModelMail>>, bell: &Arc<Bell>) -> Vec<Box<dyn Attended>> {
    let duty = Seat::try_take(seat, bell);
    duty.into_iter()
        .map(|duty| -> Box<dyn Attended> { Box::new(duty) })
        .collect()
}

/// The waiting thread leaves with its frame, while another one comes.
#[test]
fn every_frame_is_handled_once_and_none_is_left_when_a_waiter_goes() {
    model(
        "every_frame_is_handled_once_and_none_is_left_when_a_waiter_goes",
        || {
            let rig = rig(1);
            let (writer, shared, bell) = (rig.writer, rig.shared.clone(), rig.bell.clone());
            let sender = thread::spawn(move || send(writer, &shared, &bell, 2));
            let duties = take(&rig.seat, &rig.bell);
            if !duties.is_empty() {
                Attendant::new(rig.bell.clone(), duties).doze(deadline());
                assert!(rig.bell.is_rung());
            }
            sender.join().unwrap();
            // Somebody attends to what came last, without any further event.
            let mut handled = rig.shared.handled.lock();
            while handled.len() < 2 {
                rig.shared.came.wait(&mut handled);
            }
            drop(handled);
            rig.shared.wake_owner(true);
            rig.owner.join().unwrap();
            assert_eq!(*rig.shared.handled.lock(), [1, 2]);
        },
    );
}

/// The link ends while a thread waits for what will not come.
#[test]
fn an_owner_gets_its_seat_from_a_waiter_that_sleeps() {
    model("an_owner_gets_its_seat_from_a_waiter_that_sleeps", || {
        let rig = rig(0);
        let (seat, bell) = (rig.seat.clone(), rig.bell.clone());
        let waiter = thread::spawn(move || {
            let duties = take(&seat, &bell);
            if !duties.is_empty() {
                Attendant::new(bell.clone(), duties).doze(deadline());
            }
        });
        rig.shared.wake_owner(true);
        rig.owner.join().unwrap();
        waiter.join().unwrap();
    });
}
