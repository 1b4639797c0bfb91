use super::*;

/// A direction whose connections are the numbers of the items that went over them.
struct Direction {
    session: Session<u64, u64, &'static str>,
    sent: Vec<(u64, u64, bool)>,
    told: Vec<(u64, Option<&'static str>)>,
}

impl Direction {
    fn new() -> Self {
        Self {
            session: Session::new(1),
            sent: Vec::new(),
            told: Vec::new(),
        }
    }

    /// Takes up to `most` items, then breaks.
    fn pump(&mut self, most: usize) {
        let mut left = most;
        let (sent, told) = (&mut self.sent, &mut self.told);
        self.session.pump(
            |(connection, _), number, _, is_again| {
                let takes = left > 0;
                left = left.saturating_sub(1);
                if takes {
                    sent.push((connection, number, is_again));
                }
                takes
            },
            |item, refusal| told.push((item, refusal)),
        );
    }

    fn answer(&mut self, connection: u64, through: u64) -> Result<(), OutOfRange> {
        let told = &mut self.told;
        self.session
            .answered(connection, through, None, |item, refusal| {
                told.push((item, refusal));
            })
    }
}

#[test]
fn what_was_not_handled_is_sent_again_in_order_and_under_its_number() {
    let mut direction = Direction::new();
    for item in 10..15 {
        assert_eq!(direction.session.push(item), Some(item - 9));
    }
    direction.pump(3); // the fourth breaks the connection half sent
    direction.answer(1, 1).unwrap();
    direction.session.suspend();
    assert_eq!(direction.session.push(15), Some(6));
    direction.pump(9);
    assert_eq!(direction.session.resume(2, 2), Ok(Some(2)));
    direction.pump(9);
    let again = [(2, 3, true), (2, 4, true), (2, 5, false), (2, 6, false)];
    assert_eq!(direction.sent[3..], again);
    assert_eq!(direction.told, [(10, None)]);
    direction.answer(2, 6).unwrap();
    let told: Vec<u64> = direction.told.iter().map(|(item, _)| *item).collect();
    assert_eq!(told, [10, 11, 12, 13, 14, 15], "each is let go once");
    assert_eq!(direction.session.unanswered_count(), 0);
}

#[test]
fn numbers_that_were_never_sent_are_refused_and_change_nothing() {
    let mut direction = Direction::new();
    direction.session.push(10);
    assert_eq!(direction.answer(1, 1), Err(OutOfRange(1)));
    direction.pump(1);
    direction.answer(1, 1).unwrap();
    assert_eq!(
        direction.answer(1, 1),
        Ok(()),
        "an acknowledgement may come twice"
    );
    assert_eq!(direction.answer(1, 2), Err(OutOfRange(2)));
    direction.session.push(11);
    direction.pump(1);
    direction.session.suspend();
    for wrong in [0, 3, u64::MAX - 1] {
        assert_eq!(
            direction.session.resume(2, wrong),
            Err(OutOfRange(wrong)),
            "{wrong}"
        );
    }
    assert_eq!(direction.session.connection(), None);
    assert_eq!(direction.session.resume(2, 1), Ok(Some(2)));
    assert_eq!(
        direction.answer(1, 2),
        Ok(()),
        "an answer over the old connection says nothing"
    );
    assert_eq!(direction.session.unanswered_count(), 1);
}

#[test]
fn an_answer_that_overtakes_the_return_of_its_sender_waits_for_it() {
    let session: Session<(), u64, &str> = Session::new(());
    session.push(10);
    session.push(11);
    let told = std::cell::RefCell::new(Vec::new());
    let tell = |item, refusal| told.borrow_mut().push((item, refusal));
    session.pump(
        |_, number, _, _| {
            if number == 2 {
                session.answered(1, 2, Some("no"), tell).unwrap();
                assert_eq!(*told.borrow(), [(10, None)], "only what is sent whole");
            }
            true
        },
        tell,
    );
    assert_eq!(*told.borrow(), [(10, None), (11, Some("no"))]);
}

#[test]
fn a_receiver_takes_each_number_once_and_in_order() {
    let mut received = Received::new(3, 100);
    assert_eq!(received.take(2), Take::Gap);
    assert_eq!(received.take(1), Take::Fresh);
    assert!(!received.handled(10));
    assert_eq!(received.take(1), Take::Duplicate);
    assert!(received.handled(91), "for the bytes");
    assert_eq!(received.tell(), 2);
    assert!(!received.handled(0) && !received.handled(0));
    assert!(received.handled(0), "for the items");
    assert_eq!(received.through(), 5);
}

#[test]
fn a_claim_needs_a_parked_thread_and_a_session_that_is_not_over() {
    let handover: Handover<u8> = Handover::new();
    let soon = || Deadline::after_ms(1);
    assert_eq!(handover.claim(|| {}, soon()), Err(Unclaimed::Busy));
    std::thread::scope(|scope| {
        let parked = scope.spawn(|| handover.park(7, Deadline::after_ms(20_000)));
        assert_eq!(handover.claim(|| {}, Deadline::after_ms(20_000)), Ok(7));
        assert_eq!(handover.claim(|| {}, soon()), Err(Unclaimed::Busy));
        handover.give(3);
        assert_eq!(parked.join().unwrap(), Parked::Given(3));
    });
    assert_eq!(handover.park(8, soon()), Parked::TimedOut);
    assert_eq!(handover.claim(|| {}, soon()), Err(Unclaimed::Over));
    assert_eq!(handover.park(8, soon()), Parked::Closed);
}

#[test]
fn a_closed_session_keeps_and_sends_nothing() {
    let mut direction = Direction::new();
    direction.session.push(10);
    assert_eq!(direction.session.close(), Some(1));
    assert_eq!(direction.session.push(11), None);
    direction.pump(9);
    assert_eq!(direction.session.resume(2, 0), Ok(None));
    direction.pump(9);
    assert!(direction.sent.is_empty() && direction.told.is_empty());
}

/// splitmix64
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

/// One direction over connections that lose whatever is on its way when they break.
struct World {
    session: Session<(), u64, ()>,
    received: Received,
    on_their_way: VecDeque<u64>,
    /// Number, and whether it is a refusal.
    answers: VecDeque<(u64, bool)>,
    refused: Vec<u64>,
    handled: Vec<u64>,
    told: Vec<(u64, bool)>,
    connection: u64,
}

impl World {
    fn new(every_items: u64) -> Self {
        Self {
            session: Session::new(()),
            received: Received::new(every_items, u64::MAX),
            on_their_way: VecDeque::new(),
            answers: VecDeque::new(),
            refused: Vec::new(),
            handled: Vec::new(),
            told: Vec::new(),
            connection: 1,
        }
    }

    /// Sends until the connection has taken so many.
    fn pump(&mut self, most: u64) {
        let mut left = most;
        let (way, told) = (&mut self.on_their_way, &mut self.told);
        let send = |_: (u64, &()), number, _: &u64, _| {
            let takes = left > 0;
            left = left.saturating_sub(1);
            if takes {
                way.push_back(number);
            }
            takes
        };
        self.session
            .pump(send, |item, refusal| told.push((item, refusal.is_some())));
    }

    fn receive(&mut self) {
        let Some(number) = self.on_their_way.pop_front() else {
            return;
        };
        assert_eq!(
            self.received.take(number),
            Take::Fresh,
            "no number twice, and none missing"
        );
        self.handled.push(number);
        let is_due = self.received.handled(0);
        let is_refused = number % 7 == 0;
        if is_refused {
            self.refused.push(number);
        }
        if is_due || is_refused {
            self.answers.push_back((self.received.tell(), is_refused));
        }
    }

    fn hear(&mut self) {
        if let Some((through, is_refused)) = self.answers.pop_front() {
            let told = &mut self.told;
            let tell = |item, refusal: Option<()>| told.push((item, refusal.is_some()));
            let refusal = is_refused.then_some(());
            self.session
                .answered(self.connection, through, refusal, tell)
                .unwrap();
        }
    }

    fn break_and_go_on(&mut self) {
        self.on_their_way.clear();
        self.answers.clear();
        self.session.suspend();
        let resumed = self.session.resume((), self.received.through());
        self.connection = resumed.unwrap().unwrap();
        self.answers
            .extend(self.refused.iter().map(|number| (*number, true)));
        self.answers.push_back((self.received.tell(), false));
    }
}

#[test]
fn seeded_breaks_lose_nothing_repeat_nothing_and_forget_no_refusal() {
    const ITEMS: u64 = 60;
    let mut break_count = 0;
    for seed in 0..3_000 {
        let mut random = Random(seed);
        let mut world = World::new(1 + random.below(5));
        let (mut pushed, mut budget) = (0, 1 + random.below(12));
        while pushed < ITEMS {
            match random.below(10) {
                0..=2 => {
                    pushed += 1;
                    assert_eq!(world.session.push(pushed), Some(pushed), "seed {seed}");
                }
                3..=5 => world.pump(random.below(4)),
                6 | 7 => world.receive(),
                8 => world.hear(),
                _ if budget > 0 => {
                    budget -= 1;
                    break_count += 1;
                    world.break_and_go_on();
                }
                _ => {}
            }
        }
        world.break_and_go_on();
        world.pump(ITEMS + 1);
        while !world.on_their_way.is_empty() {
            world.receive();
        }
        world.answers.push_back((world.received.tell(), false));
        while !world.answers.is_empty() {
            world.hear();
        }
        let all: Vec<u64> = (1..=ITEMS).collect();
        assert_eq!(world.handled, all, "seed {seed}");
        let told: Vec<(u64, bool)> = all.iter().map(|n| (*n, n % 7 == 0)).collect();
        assert_eq!(world.told, told, "seed {seed}");
        assert_eq!(world.session.unanswered_count(), 0, "seed {seed}");
    }
    assert!(break_count > 10_000, "{break_count}");
}
