//! What a waiting thread owes to others: it leaves in time, it leaves nothing behind, and it looks at every ring.

use std::panic::{AssertUnwindSafe, catch_unwind};

use std::time::Duration;

use super::*;
use crate::attend::{Attendance, Attendant, Found, Mail, Seat, Sleeper, Whose};
use crate::ids::PeerId;

/// A ring whose frames a test makes up.
struct Made<S> {
    step: S,
    word: AtomicU32,
}

impl<S: FnMut() -> Found + Send> Mail for Made<S> {
    fn step(&mut self) -> Found {
        (self.step)()
    }

    fn park(&self, _: Sleeper) -> bool {
        true
    }

    fn unpark(&self) {}

    fn word(&self) -> Option<&AtomicU32> {
        Some(&self.word)
    }

    fn nudge(&self) {}

    fn taken(&self, _: bool) {}
}

/// Lists a ring whose owner sleeps.
fn list(rings: &Attendance, peer: u32, step: impl FnMut() -> Found + Send + 'static) {
    let word = AtomicU32::new(0);
    let owned = Seat::open(Made { step, word });
    rings.list(PeerId(peer), owned.seat().clone());
}

fn rings() -> Arc<Attendance> {
    Arc::new(Attendance::new(Duration::ZERO))
}

fn begin(rings: &Arc<Attendance>) -> Attendant {
    Attendance::begin(rings, Whose::All).expect("a ring is listed, and this kernel has futex_waitv")
}

fn never(_: &mut ()) -> Option<()> {
    None
}

#[test]
fn waits_that_run_out_leave_nothing_behind() {
    let (rings, waiters) = (rings(), Waiters::new(()));
    list(&rings, 1, || Found::Nothing);
    for _ in 0..3_000 {
        assert_eq!(
            waiters.wait_attending(begin(&rings), Deadline::now(), never),
            None
        );
    }
    let deadline = Deadline::after_ms(2);
    assert_eq!(waiters.wait_attending(begin(&rings), deadline, never), None);
    assert_eq!(waiters.kept(), 0);

    let ended = catch_unwind(AssertUnwindSafe(|| {
        let mut looks = 0;
        waiters.wait_attending(begin(&rings), Deadline::after_ms(2), |()| -> Option<()> {
            looks += 1;
            assert!(looks < 2, "on purpose: when it looks again");
            None
        })
    }));
    assert!(ended.is_err());
    assert_eq!(waiters.kept(), 0);
}

/// What others send stays with their receive threads, and without a ring of a writer a thread sleeps as any other.
#[test]
fn a_thread_at_a_gate_has_the_rings_of_its_writers_only() {
    let (rings, writer, other) = (rings(), PeerId(1), PeerId(2));
    let steps: [Arc<AtomicU32>; 2] = Default::default();
    for (peer, steps) in [writer, other].into_iter().zip(&steps) {
        let steps = steps.clone();
        list(&rings, peer.0, move || {
            steps.fetch_add(1, Ordering::Relaxed);
            Found::Nothing
        });
    }
    let chunk = ChunkSpec {
        stage: StageId(0),
        chunk: ChunkId(0),
        writer: WriterRank(0),
        descriptor_count: 1,
    };
    let barrier = Barrier::new(BarrierPlan::from_chunks(vec![chunk]).unwrap(), Epoch(1));
    barrier.arm().unwrap();
    barrier.attend(&rings, [writer].into_iter());
    for _ in 0..3 {
        let timed_out = BarrierError::TimedOut { deadline_ms: 1 };
        let ended = barrier.wait(StageId(0), Deadline::after_ms(1));
        assert_eq!(ended, Err(timed_out));
    }
    let count = |index: usize| steps[index].load(Ordering::Relaxed);
    assert!(count(0) >= 3 && count(1) == 0, "{} {}", count(0), count(1));

    let of = |peer| Attendance::begin(&rings, Whose::Of([peer].into()));
    assert!(of(PeerId(3)).is_none());
    let mut attendant = of(writer).unwrap().wide_awake();
    assert!(attendant.take_what_is_free());
    rings.strike(writer);
    assert!(!attendant.take_what_is_free(), "it would look for ever");
}

/// Keeps giving frames, much longer than anybody waits for them.
fn busy(mut on_frame: impl FnMut() + Send) -> impl FnMut() -> Found + Send {
    let until = Deadline::after_ms(20_000);
    move || match until.has_passed() {
        true => Found::Nothing,
        false => {
            on_frame();
            Found::Frame
        }
    }
}

/// I-24.
#[test]
fn frames_that_keep_coming_do_not_keep_a_thread_beyond_its_deadline() {
    let (rings, waiters) = (rings(), Waiters::new(()));
    let deadline = Deadline::after_ms(20);
    let late = Arc::new(AtomicU32::new(0));
    let counter = late.clone();
    list(
        &rings,
        1,
        busy(move || {
            counter.fetch_add(deadline.has_passed().into(), Ordering::Relaxed);
        }),
    );
    assert_eq!(waiters.wait_attending(begin(&rings), deadline, never), None);
    assert!(late.load(Ordering::Relaxed) <= 1, "{late:?} after the end");
}

/// The other ring has what the thread waits for; the busy one has nothing for it, or rings with every frame.
#[test]
fn a_busy_ring_does_not_keep_a_thread_from_another_one() {
    for rings_too in [false, true] {
        let (rings, has_come) = (rings(), Arc::new(Waiters::new(false)));
        let busy_with = has_come.clone();
        list(
            &rings,
            1,
            busy(move || {
                if rings_too {
                    busy_with.notify();
                }
            }),
        );
        let (brings, mut is_brought) = (has_come.clone(), false);
        list(&rings, 2, move || {
            if std::mem::replace(&mut is_brought, true) {
                return Found::Nothing;
            }
            brings.update(|has_come| *has_come = true);
            Found::Frame
        });
        let deadline = Deadline::after_ms(10_000);
        let check = |has_come: &mut bool| has_come.then_some(());
        let answer = has_come.wait_attending(begin(&rings), deadline, check);
        assert_eq!(answer, Some(()), "rings_too: {rings_too}");
        assert!(!deadline.has_passed(), "rings_too: {rings_too}");
        assert_eq!(has_come.kept(), 0);
    }
}
