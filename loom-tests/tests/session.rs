//! I-26, I-27: what a session was given is handled once and in order over a break, whoever is in the middle of
//! what; its memory is let go only when nobody sends it any more.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_loom_tests::{Cell, deadline, model};
use kvgate_transfer::session_model::{Handover, Parked, Received, Session, Take, Unclaimed};
use kvgate_transfer::sync::{Arc, Mutex, thread};

/// A connection: what it took, until it breaks.
struct Wire {
    taken: Mutex<(Vec<u64>, bool)>,
}

impl Wire {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            taken: Mutex::new((Vec::new(), false)),
        })
    }

    fn take(&self, number: u64) -> bool {
        let mut taken = self.taken.lock();
        if !taken.1 {
            taken.0.push(number);
        }
        !taken.1
    }

    /// Nothing is taken from here on; what was is given back.
    fn seal(&self) -> Vec<u64> {
        let mut taken = self.taken.lock();
        taken.1 = true;
        taken.0.clone()
    }

    fn seen(&self) -> usize {
        self.taken.lock().0.len()
    }
}

type Line = Session<Arc<Wire>, u64, ()>;

fn pump(line: &Line, told: &Mutex<Vec<u64>>) {
    let send = |(_, wire): (u64, &Arc<Wire>), number: u64, item: &u64, _: bool| {
        assert_eq!(number, *item);
        wire.take(number)
    };
    line.pump(send, |item, _| told.lock().push(item));
}

/// Two items and a connection that breaks at any moment; of what it took a part is lost on the way.
#[test]
fn each_item_is_handled_once_over_a_break() {
    for lost in 0..2 {
        model("each_item_is_handled_once_over_a_break", move || {
            let (first, second) = (Wire::new(), Wire::new());
            let line: Arc<Line> = Arc::new(Session::new(first.clone()));
            let told = Arc::new(Mutex::new(Vec::new()));
            let breaking = {
                let (line, told, first, second) =
                    (line.clone(), told.clone(), first.clone(), second.clone());
                thread::spawn(move || {
                    let mut handled = Vec::new();
                    let mut received = Received::new(1, 0);
                    let mut came = first.seal();
                    came.truncate(came.len().saturating_sub(lost));
                    for number in came {
                        assert_eq!(received.take(number), Take::Fresh);
                        handled.push(number);
                        let _ = received.handled(0);
                    }
                    line.suspend();
                    let number = line.resume(second, received.through()).unwrap().unwrap();
                    let through = received.tell();
                    line.answered(number, through, None, |item, _| told.lock().push(item))
                        .unwrap();
                    (handled, received)
                })
            };
            for item in 1..3 {
                assert_eq!(line.push(item), Some(item));
                pump(&line, &told);
            }
            let (mut handled, mut received) = breaking.join().unwrap();
            pump(&line, &told); // as the queue is asked to, behind the resumption
            for number in second.seal() {
                assert_eq!(received.take(number), Take::Fresh, "nothing comes twice");
                handled.push(number);
                let _ = received.handled(0);
            }
            assert_eq!(handled, [1, 2]);
            let tell = |item, _| told.lock().push(item);
            line.answered(2, 2, None, tell).unwrap();
            assert_eq!(*told.lock(), [1, 2], "and each is let go once");
        });
    }
}

/// The peer answers an item as soon as it has it, while its sender still reads the memory.
#[test]
fn memory_is_let_go_behind_its_sender() {
    model("memory_is_let_go_behind_its_sender", || {
        let wire = Wire::new();
        let line: Arc<Line> = Arc::new(Session::new(wire.clone()));
        let slot = Arc::new(Cell::new());
        slot.write(7);
        line.push(1);
        let answering = {
            let (line, wire, slot) = (line.clone(), wire.clone(), slot.clone());
            thread::spawn(move || {
                if wire.seen() == 1 {
                    // The next owner writes.
                    line.answered(1, 1, None, |_, _| slot.write(8)).unwrap();
                }
                wire.seen() == 1
            })
        };
        let send = |(_, wire): (u64, &Arc<Wire>), number: u64, _: &u64, _: bool| {
            let is_taken = wire.take(number);
            assert_eq!(slot.read(), 7);
            is_taken
        };
        line.pump(send, |_, _| slot.write(8));
        answering.join().unwrap();
    });
}

/// A connector comes again while the receive thread finds the end of its connection, or the link is closed.
#[test]
fn a_claim_is_granted_past_the_old_connection_or_not_at_all() {
    model(
        "a_claim_is_granted_past_the_old_connection_or_not_at_all",
        || {
            let handover: Arc<Handover<Arc<u8>>> = Arc::new(Handover::new());
            let next = Arc::new(2);
            let old = Arc::new(Cell::new());
            let receiving = {
                let (handover, old) = (handover.clone(), old.clone());
                thread::spawn(move || {
                    old.write(1); // the last bytes of the old connection
                    handover.park(1, deadline())
                })
            };
            let closing = {
                let handover = handover.clone();
                thread::spawn(move || handover.close())
            };
            match handover.claim(|| {}, deadline()) {
                Ok(received) => {
                    assert_eq!(received, 1);
                    assert_eq!(old.read(), 1, "nobody is at the old one any more");
                    drop(handover.give(next.clone()));
                }
                Err(why) => assert_eq!(why, Unclaimed::Over),
            }
            let parked = receiving.join().unwrap();
            assert!(matches!(parked, Parked::Given(_) | Parked::Closed));
            closing.join().unwrap();
            drop(parked);
            assert_eq!(
                Arc::strong_count(&next),
                1,
                "nobody keeps what came too late"
            );
        },
    );
}
