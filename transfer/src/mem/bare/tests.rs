#![allow(clippy::unwrap_used)]

use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use super::*;
use crate::sync::Ordering;

const POOL: PoolGeometry = PoolGeometry {
    offset_bytes: 8,
    stride_bytes: 40,
    slot_bytes: 37,
    slot_count: 2000,
};
const SLOTS_BYTES: u64 = 100_000;

fn view() -> View {
    View::shared("bare", SLOTS_BYTES, 64).unwrap()
}

fn slots(view: &View, step: u32) -> Slots {
    Slots::new(view, vec![(POOL, list(step))]).unwrap()
}

fn list(step: u32) -> Vec<u32> {
    (0..1999).map(|index| index * step % 1999).collect()
}

fn peer_of(view: &View) -> View {
    let Mapped::Own(memory) = &*view.mapped else {
        panic!("a view of its own");
    };
    let file = memory.file().unwrap().try_clone_to_owned().unwrap();
    View::peer(&file, SLOTS_BYTES, 64).unwrap()
}

#[test]
fn copies_and_streams_are_seen_and_a_stale_or_damaged_slot_too() {
    let (mut from, mut to) = (view(), view());
    let (source, target) = (slots(&from, 7), slots(&to, 11));
    source.fill(&mut from, 1);
    let seen = [1, 2].map(|seed| source.differing(&from, seed));
    assert_eq!(seen, [0, 1999]);
    source.copy_to(&from, &target, &mut to);
    assert_eq!(target.differing(&to, 1), 0);
    source.fill(&mut from, 2);
    assert_eq!(target.differing(&to, 2), 1999);
    let (here, there) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| source.send(&from, &here).unwrap());
        target.receive(&mut to, &there).unwrap();
    });
    assert_eq!(target.differing(&to, 2), 0);
    // The last byte of one slot.
    let last = POOL.offset_bytes + 3 * POOL.stride_bytes + 36;
    // SAFETY: I-16: a byte of a slot; this thread has the view.
    unsafe { *to.base.wrapping_add(last as usize) ^= 1 };
    assert_eq!(target.differing(&to, 2), 1);
}

#[test]
fn slots_and_words_outside_are_refused() {
    let view = view();
    assert!(Slots::new(&view, vec![(POOL, vec![1999, 2000])]).is_err());
    let long = PoolGeometry {
        slot_count: 2501,
        ..POOL
    };
    // It would end in the room for words.
    assert!(Slots::new(&view, vec![(long, vec![0])]).is_err());
    let agent = Agent::builder("bare").build().unwrap();
    assert!(view.register(&agent, &[long]).is_err());
    assert!(peer_of(&view).register(&agent, &[POOL]).is_err());
    assert!(AwaySlots::new(u64::MAX, SLOTS_BYTES, Vec::new()).is_err());
    let words = view.words();
    assert!(words.at(62).is_none() && words.at(64).is_none() && words.at(u64::MAX).is_none());
    assert!(words.at(60).is_some());
}

#[test]
#[should_panic(expected = "slots of another view")]
fn a_view_opens_its_own_slots_only() {
    let (one, mut other) = (view(), view());
    slots(&one, 7).fill(&mut other, 1);
}

#[test]
fn another_process_sees_a_shared_memory_by_its_file() {
    let mut own = view();
    let peer = peer_of(&own);
    slots(&own, 7).fill(&mut own, 3);
    assert_eq!(slots(&peer, 7).differing(&peer, 3), 0);
    own.words().at(4).unwrap().store(9, Ordering::Release);
    assert_eq!(peer.words().at(4).unwrap().load(Ordering::Acquire), 9);
    let file = OwnedFd::from(std::fs::File::open("/proc/self/exe").unwrap());
    assert!(View::peer(&file, SLOTS_BYTES, 64).is_err());
}

/// A child that has none of our memory: the kernel says so, and nothing is moved.
#[test]
fn the_kernel_refuses_what_another_process_has_not_mapped() {
    let mut own = view();
    let slots = slots(&own, 7);
    slots.fill(&mut own, 4);
    let away = AwaySlots::new(4096, SLOTS_BYTES, vec![(POOL, list(11))]).unwrap();
    let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let written = slots.write_away(&own, &away, &child);
    let read = slots.read_away(&mut own, &away, &child);
    drop(child.stdin.take());
    child.wait().unwrap();
    assert!(written.is_err() && read.is_err(), "{written:?} {read:?}");
    assert_eq!(slots.differing(&own, 4), 0);
}
