use super::*;
use crate::priority::TURNS;

#[test]
fn a_full_queue_is_retryable_and_a_freed_place_is_taken() {
    let queue = Queue::new(PeerId(1), 1, 1);
    let slot = Queue::reserve(&queue, Priority::Foreground).unwrap();
    let error = Queue::reserve(&queue, Priority::Foreground).unwrap_err();
    assert!(error.is_retryable(), "{error}");
    assert!(Queue::reserve_within(&queue, Priority::Foreground, Deadline::after_ms(1)).is_err());
    drop(slot);
    let _slot = Queue::reserve(&queue, Priority::Foreground).unwrap();
}

#[test]
fn closing_wakes_whoever_waits_for_room_and_the_worker() {
    let queue = Queue::new(PeerId(1), 1, 1);
    let _slot = Queue::reserve(&queue, Priority::Foreground).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            Queue::reserve_within(&queue, Priority::Foreground, Deadline::after_ms(60_000)).err()
        });
        let worker = scope.spawn(|| queue.next().is_none());
        queue.close(Cause::Shutdown);
        let error = waiter.join().unwrap().unwrap();
        assert_eq!(
            *error.kind(),
            ErrorKind::PeerDown {
                peer: PeerId(1),
                cause: Cause::Shutdown
            }
        );
        assert!(worker.join().unwrap());
    });
}

#[test]
fn the_background_waits_for_the_foreground_but_not_for_ever() {
    let queue = Queue::new(PeerId(1), 4, 64);
    let background = Item::Frame(vec![0]);
    queue.state.with(|state| {
        state.frame_count += 1;
        state.items.push(background, Priority::Background);
    });
    for number in 1..=TURNS + 2 {
        queue.push_frame(vec![number as u8]).unwrap();
    }
    let order: Vec<u8> = std::iter::from_fn(|| queue.try_next())
        .map(|item| match item {
            Item::Frame(bytes) => bytes[0],
            other => panic!("{other:?}"),
        })
        .collect();
    let turns = TURNS as u8;
    let expected: Vec<u8> = (1..=turns).chain([0, turns + 1, turns + 2]).collect();
    assert_eq!(order, expected);
}

#[test]
fn the_background_takes_half_of_the_places_at_most() {
    let queue = Queue::new(PeerId(1), 4, 1);
    let reserve = |priority| Queue::reserve(&queue, priority);
    let held: Vec<_> = (0..2)
        .map(|_| reserve(Priority::Background).unwrap())
        .collect();
    assert!(reserve(Priority::Background).unwrap_err().is_retryable());
    let _others: Vec<_> = (0..2)
        .map(|_| reserve(Priority::Foreground).unwrap())
        .collect();
    assert!(reserve(Priority::Foreground).is_err());
    drop(held);
    let _again = reserve(Priority::Background).unwrap();
}

#[test]
fn frames_are_bounded_and_progress_overtakes_them() {
    let queue = Queue::new(PeerId(1), 1, 1);
    queue.push_frame(vec![1]).unwrap();
    assert!(queue.push_frame(vec![2]).unwrap_err().is_retryable());
    queue.push_progress(1);
    queue.push_progress(2);
    assert!(matches!(queue.try_next(), Some(Item::Progress(2))));
    assert!(matches!(queue.try_next(), Some(Item::Frame(f)) if f == [1]));
    assert!(queue.try_next().is_none());
}

#[test]
fn the_turn_is_for_one_and_what_was_queued_first_goes_first() {
    let queue = Queue::new(PeerId(1), 4, 4);
    let turn = queue.try_turn().unwrap();
    assert!(queue.try_turn().is_none(), "somebody has it");
    queue.push_frame(vec![1]).unwrap();
    std::thread::scope(|scope| {
        // It sleeps while somebody has the turn, and is woken when it is given back.
        let worker = scope.spawn(|| {
            let (item, _turn) = queue.next().unwrap();
            matches!(item, Item::Frame(frame) if frame == [1])
        });
        assert!(queue.try_turn().is_none());
        drop(turn);
        assert!(worker.join().unwrap());
    });
    drop(queue.try_turn().unwrap());
    queue.push_frame(vec![2]).unwrap();
    assert!(queue.try_turn().is_none(), "a frame is queued");
    assert!(
        queue.next_operation(|_| true).is_none(),
        "a frame is for the worker"
    );
    queue.push_broken(Cause::Shutdown);
    assert!(matches!(queue.try_next(), Some(Item::Broken(_))));
    queue.close(Cause::Shutdown);
    assert!(queue.try_turn().is_none());
}

#[test]
fn what_is_being_sent_has_not_been_sent() {
    let queue = Queue::new(PeerId(1), 1, 1);
    queue.push_frame(vec![1]).unwrap();
    let (_, turn) = queue.next().unwrap();
    assert!(!queue.wait_drained(Deadline::now()));
    drop(turn);
    assert!(queue.wait_drained(Deadline::now()));
}

#[test]
fn whoever_waits_for_the_end_of_everything_hears_of_the_last_frame() {
    let queue = Queue::new(PeerId(1), 1, 1);
    queue.push_frame(vec![1]).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| queue.wait_drained(Deadline::after_ms(60_000)));
        let (_, turn) = queue.next().unwrap();
        drop(turn);
        assert!(waiter.join().unwrap());
    });
}

#[test]
fn a_frame_counts_as_unsent_until_it_was_sent_and_beyond_the_end() {
    let queue = Queue::new(PeerId(1), 1, 4);
    queue.push_frame(vec![1]).unwrap();
    queue.push_frame(vec![2]).unwrap();
    let (_first, turn) = queue.next().unwrap();
    // Nobody knows whether the link has it already: it counts once.
    assert_eq!(queue.unsent_frames(0), 2, "one queued, one in hand");
    assert_eq!(queue.unsent_frames(1), 2);
    drop(turn);
    assert_eq!(queue.unsent_frames(0), 1);
    let (_second, turn) = queue.next().unwrap();
    queue.close(Cause::Shutdown);
    drop(turn);
    queue.close(Cause::PeerRestarted);
    assert_eq!(queue.unsent_frames(0), 1, "the end came while it was sent");
}

#[test]
fn frames_that_are_kept_for_a_connection_that_does_not_come_are_lost() {
    let limits = FrameLimits {
        capacity: 4,
        bytes: u64::MAX,
        are_kept: true,
    };
    for (is_away, lost) in [(true, 2), (false, 1)] {
        let queue = Queue::with_frames(PeerId(1), 1, limits);
        queue.push_frame(vec![1]).unwrap();
        queue.push_frame(vec![2]).unwrap();
        drop(queue.next().unwrap());
        if is_away {
            queue.suspend();
        }
        queue.close(Cause::Shutdown);
        assert_eq!(queue.unsent_frames(0), lost);
    }
}
