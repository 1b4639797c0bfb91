use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Wake, Waker};

use super::*;
use crate::error::Side;

fn plan(chunk_counts: &[u16]) -> BarrierPlan {
    let mut chunks = Vec::new();
    for (stage, &count) in chunk_counts.iter().enumerate() {
        chunks.extend((0..count).map(|chunk| ChunkSpec {
            stage: StageId(stage as u16),
            chunk: ChunkId(chunk),
            writer: WriterRank(chunk % 2),
            descriptor_count: 1,
        }));
    }
    BarrierPlan::from_chunks(chunks).unwrap()
}

fn armed(chunk_counts: &[u16]) -> Arc<Barrier> {
    let barrier = Barrier::new(plan(chunk_counts), Epoch(5));
    barrier.arm().unwrap();
    barrier
}

fn ticket(epoch: u64, stage: u16, chunk: u16) -> TicketId {
    TicketId {
        epoch: Epoch(epoch),
        stage: StageId(stage),
        chunk: ChunkId(chunk),
    }
}

fn land(barrier: &Barrier, stage: u16, chunk: u16) -> Redeemed {
    barrier
        .redeem(ticket(5, stage, chunk), Visibility::RemoteVisible)
        .unwrap()
}

fn stop() -> Cause {
    Cause::Aborted {
        by: Side::Local,
        reason: "test".into(),
    }
}

#[test]
fn a_fresh_barrier_is_closed_and_redeems_nothing() {
    let barrier = Barrier::new(plan(&[1]), Epoch(5));
    assert_eq!(barrier.check(StageId(0)), StageState::NotArmed);
    assert_eq!(
        barrier.wait(StageId(0), Deadline::after_ms(60_000)),
        Err(BarrierError::NotArmed)
    );
    let early = barrier.redeem(ticket(5, 0, 0), Visibility::RemoteVisible);
    assert_eq!(early, Err(BarrierError::NotArmed));
    assert!(!barrier.all_landed());
    barrier.arm().unwrap();
    assert_eq!(barrier.arm(), Err(BarrierError::AlreadyArmed));
    assert_eq!(
        barrier.missing(StageId(0)),
        1,
        "the early ticket has not been counted"
    );
    assert_eq!(barrier.late_counts().unknown, 1);
}

#[test]
fn a_stage_opens_with_its_last_chunk_and_only_that_stage() {
    let barrier = armed(&[2, 1]);
    assert_eq!(land(&barrier, 0, 1), Redeemed::First);
    assert_eq!(
        barrier.check(StageId(0)),
        StageState::Pending { missing: 1 }
    );
    assert_eq!(barrier.landed(StageId(0)), [0b10]);
    assert!(barrier.landed_at(StageId(0)).is_none());
    assert_eq!(land(&barrier, 0, 0), Redeemed::Last);
    assert_eq!(barrier.check(StageId(0)), StageState::Ready);
    assert!(barrier.landed_at(StageId(0)).is_some());
    assert_eq!(
        barrier.check(StageId(1)),
        StageState::Pending { missing: 1 }
    );
    assert!(!barrier.all_landed());
    assert_eq!(land(&barrier, 1, 0), Redeemed::Last);
    assert!(barrier.all_landed());
    barrier.wait_all(Deadline::now()).unwrap();
}

#[test]
fn stale_duplicate_unknown_and_weak_tickets_are_counted_and_change_nothing() {
    let barrier = armed(&[2]);
    assert_eq!(land(&barrier, 0, 0), Redeemed::First);
    // Chunk 1 is completed by nothing else in this test.
    let stale = barrier.redeem(ticket(4, 0, 1), Visibility::RemoteVisible);
    assert_eq!(
        stale,
        Err(BarrierError::Stale {
            found: Epoch(4),
            expected: Epoch(5)
        })
    );
    assert_eq!(land(&barrier, 0, 0), Redeemed::Duplicate);
    for outside in [ticket(5, 0, 2), ticket(5, 1, 0), ticket(5, 0, 66)] {
        let unknown = barrier.redeem(outside, Visibility::RemoteVisible);
        assert_eq!(unknown, Err(BarrierError::UnknownChunk(outside)));
    }
    for weak in [Visibility::LocalDone, Visibility::RemoteDelivered] {
        assert_eq!(
            barrier.redeem(ticket(5, 0, 1), weak),
            Err(BarrierError::NotVisible(weak))
        );
    }
    assert_eq!(
        barrier.check(StageId(0)),
        StageState::Pending { missing: 1 }
    );
    assert_eq!(
        barrier.late_counts(),
        LateCounts {
            stale: 1,
            duplicate: 1,
            unknown: 5
        }
    );
}

#[test]
fn a_failure_is_for_good_and_landing_goes_on_being_counted() {
    let barrier = armed(&[1, 1]);
    barrier.fail(StageSel::One(StageId(0)), stop());
    barrier.fail(StageSel::All, Cause::Shutdown);
    assert_eq!(
        barrier.check(StageId(0)),
        StageState::Failed(stop()),
        "the first cause stays"
    );
    assert_eq!(
        barrier.check(StageId(1)),
        StageState::Failed(Cause::Shutdown)
    );
    assert_eq!(land(&barrier, 0, 0), Redeemed::Last);
    assert_eq!(barrier.check(StageId(0)), StageState::Failed(stop()));
    assert!(
        barrier.writer_landed(WriterRank(1)),
        "a rank without chunks has nothing to land"
    );
    assert!(!barrier.writer_landed(WriterRank(0)));
    let _ = land(&barrier, 1, 0);
    assert!(barrier.writer_landed(WriterRank(0)) && barrier.all_landed());
    assert_eq!(
        barrier.check(StageId(1)),
        StageState::Failed(Cause::Shutdown)
    );
}

#[test]
fn a_timeout_changes_nothing() {
    let barrier = armed(&[1]);
    let timed_out = barrier.wait(StageId(0), Deadline::after_ms(2));
    assert_eq!(timed_out, Err(BarrierError::TimedOut { deadline_ms: 2 }));
    assert_eq!(
        barrier.check(StageId(0)),
        StageState::Pending { missing: 1 }
    );
    assert_eq!(land(&barrier, 0, 0), Redeemed::Last);
    barrier.wait(StageId(0), Deadline::now()).unwrap();
}

#[test]
fn a_stage_outside_the_plan_never_opens() {
    let barrier = armed(&[1]);
    assert_eq!(
        barrier.check(StageId(1)),
        StageState::Failed(Cause::UnknownStage(StageId(1)))
    );
    let waited = barrier.wait(StageId(1), Deadline::after_ms(60_000));
    assert_eq!(waited, Err(BarrierError::UnknownStage(StageId(1))));
}

#[test]
fn ready_is_ready_for_every_stage_and_takes_no_ticket() {
    let barrier = Barrier::ready();
    assert_eq!(barrier.check(StageId(900)), StageState::Ready);
    barrier.fail(StageSel::All, stop());
    barrier.wait(StageId(3), Deadline::now()).unwrap();
    assert_eq!(barrier.arm(), Err(BarrierError::AlreadyArmed));
    assert!(
        barrier
            .redeem(ticket(0, 0, 0), Visibility::RemoteVisible)
            .is_err()
    );
}

struct CountingWaker(AtomicU32);

impl Wake for CountingWaker {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn tasks_are_woken_once_per_change_and_registered_once() {
    let barrier = armed(&[1, 1]);
    let count = std::sync::Arc::new(CountingWaker(AtomicU32::new(0)));
    let waker = Waker::from(count.clone());
    let mut cx = Context::from_waker(&waker);
    assert!(barrier.poll(StageId(1), &mut cx).is_pending());
    assert!(barrier.poll(StageId(1), &mut cx).is_pending());
    let _ = land(&barrier, 1, 0);
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
    assert_eq!(barrier.poll(StageId(1), &mut cx), Poll::Ready(Ok(())));
    assert!(barrier.poll(StageId(0), &mut cx).is_pending());
    barrier.fail(StageSel::All, stop());
    assert_eq!(count.0.load(Ordering::SeqCst), 2);
    let failed = Poll::Ready(Err(BarrierError::Failed(stop())));
    assert_eq!(barrier.poll(StageId(0), &mut cx), failed);
}

#[test]
fn threads_are_woken_by_the_last_chunk_and_by_a_failure() {
    let barrier = armed(&[2, 1]);
    std::thread::scope(|scope| {
        let lands = scope.spawn(|| barrier.wait(StageId(0), Deadline::after_ms(60_000)));
        let fails = scope.spawn(|| barrier.wait(StageId(1), Deadline::after_ms(60_000)));
        let _ = land(&barrier, 0, 0);
        let _ = land(&barrier, 0, 1);
        barrier.fail(StageSel::One(StageId(1)), stop());
        assert_eq!(lands.join().unwrap(), Ok(()));
        assert_eq!(fails.join().unwrap(), Err(BarrierError::Failed(stop())));
    });
}

#[test]
fn a_million_tokens_need_several_words() {
    let barrier = armed(&[259]);
    for chunk in 0..259 {
        assert_ne!(barrier.check(StageId(0)), StageState::Ready);
        let _ = land(&barrier, 0, chunk);
    }
    assert_eq!(barrier.check(StageId(0)), StageState::Ready);
}
