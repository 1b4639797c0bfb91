//! Which slots of an operation have landed: known to have, known not to have, or unknown, and never two of
//! these made one.
//!
//! Whoever moves the bytes notes here how far it has come, in slots by the order of the descriptor lists. What
//! it says nothing about is unknown, so a path that knows less is never wrong, only vaguer (I-25).
//!
//! **Memory.** A prefix and a few ranges behind it: a connection has a bounded number of parts under way, and
//! only those can land out of order.
//! **What is protected by what.** One mutex guards the marks: who is told that a slot has landed sees its bytes,
//! if they are in this process. **Lock order.** It is a leaf.

use std::ops::Range;

use crate::sync::{AtomicU64, Mutex, Ordering};

/// What is known of one slot of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SlotState {
    /// Every byte is visible at the destination.
    Landed,
    /// At that moment not all of its bytes were there; some may have been. Once the operation has ended, none
    /// will come.
    NotLanded,
    /// Nobody here can tell: the slot has been given to the transport, and no answer has come.
    Unknown,
}

/// What was known of each slot of an operation at one moment. Slots are numbered from 0 in the order of the
/// descriptor lists that the transfer was prepared from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Landed {
    /// One behind the other, none empty, neighbours of different states.
    spans: Vec<(Range<u64>, SlotState)>,
}

impl Landed {
    pub(crate) fn whole(slot_count: u64, state: SlotState) -> Self {
        let mut landed = Self { spans: Vec::new() };
        landed.push(slot_count, state);
        landed
    }

    /// Appends slots up to `end`.
    fn push(&mut self, end: u64, state: SlotState) {
        let start = self.slot_count();
        if end <= start {
            return;
        }
        match self.spans.last_mut() {
            Some((range, last)) if *last == state => range.end = end,
            _ => self.spans.push((start..end, state)),
        }
    }

    /// Slots of the operation.
    #[must_use]
    pub fn slot_count(&self) -> u64 {
        self.spans.last().map_or(0, |(range, _)| range.end)
    }

    /// What is known of one slot; `None` behind the last one.
    #[must_use]
    pub fn slot(&self, index: u64) -> Option<SlotState> {
        let (_, state) = self
            .spans
            .iter()
            .find(|(range, _)| range.contains(&index))?;
        Some(*state)
    }

    /// All slots in order, as ranges of one state.
    pub fn spans(&self) -> impl Iterator<Item = (Range<u64>, SlotState)> + '_ {
        self.spans.iter().cloned()
    }

    /// How many slots are in this state.
    #[must_use]
    pub fn count(&self, state: SlotState) -> u64 {
        let of_state = self.spans.iter().filter(|(_, found)| *found == state);
        of_state.map(|(range, _)| range.end - range.start).sum()
    }

    /// Whether every slot has landed.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.count(SlotState::Landed) == self.slot_count()
    }
}

/// How far an operation has come, as its link tells.
#[derive(Debug)]
pub struct Landing {
    slot_count: u64,
    marks: Mutex<Marks>,
    moved_bytes: AtomicU64,
    note_count: AtomicU64,
}

#[derive(Debug, Default)]
struct Marks {
    /// Slots below have landed.
    prefix: u64,
    /// The others that have, in order, apart from each other and from the prefix.
    beyond: Vec<Range<u64>>,
    /// Nobody has begun to move the slots from here on.
    begun: u64,
    /// What has not landed will not.
    is_settled: bool,
    /// It was begun more than once, and nobody tells what the first attempt has left.
    is_repeated: bool,
}

impl Landing {
    /// Nothing has begun.
    pub(crate) fn new(slot_count: u64) -> Self {
        Self {
            slot_count,
            marks: Mutex::new(Marks::default()),
            moved_bytes: AtomicU64::new(0),
            note_count: AtomicU64::new(0),
        }
    }

    /// The slots from `slot` on have not been touched, those before may have been. A link that says so at the
    /// beginning of its post says so again before it goes on; of one that does not every slot counts as begun.
    pub fn begun_to(&self, slot: u64) {
        self.marks.lock().begun = slot.min(self.slot_count);
    }

    /// The slots up to `slot` may have been touched once more; what was known stays known.
    #[cfg_attr(kv_loom, allow(dead_code))] // For backends.
    pub(crate) fn begun_again_to(&self, slot: u64) {
        let mut marks = self.marks.lock();
        marks.begun = marks.begun.max(slot.min(self.slot_count));
    }

    /// Everything is moved once more, after an attempt whose end nobody has told: of what is not known to have landed
    /// [`Landing::settle`] says nothing from here on.
    #[cfg_attr(kv_loom, allow(dead_code))] // For backends.
    pub(crate) fn repeated(&self) {
        self.marks.lock().is_repeated = true;
    }

    /// The engine hands the operation to a link.
    pub(crate) fn begun(&self) {
        self.begun_to(self.slot_count);
    }

    /// Every byte of these slots is visible at the destination.
    pub fn landed(&self, slots: Range<u64>) {
        self.note_count.fetch_add(1, Ordering::Relaxed);
        let slots = slots.start..slots.end.min(self.slot_count);
        if slots.start < slots.end {
            self.marks.lock().land(slots);
        }
    }

    /// Everything that has landed was noted, and nothing else of the operation will land.
    pub fn settle(&self) {
        let mut marks = self.marks.lock();
        marks.is_settled = !marks.is_repeated;
    }

    /// Bytes are on their way, or have come.
    #[cfg_attr(kv_loom, allow(dead_code))] // For backends.
    pub(crate) fn moved(&self, bytes: u64) {
        self.moved_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes that were taken by the transport, or have come from it, frames among them.
    pub(crate) fn moved_bytes(&self) -> u64 {
        self.moved_bytes.load(Ordering::Relaxed)
    }

    /// Changes whenever the operation goes on.
    pub(crate) fn activity(&self) -> u64 {
        let notes = self.note_count.load(Ordering::Relaxed);
        self.moved_bytes().wrapping_add(notes)
    }

    /// What is known now.
    pub(crate) fn now(&self) -> Landed {
        let marks = self.marks.lock();
        let begun = match marks.is_settled {
            true => 0,
            false => marks.begun,
        };
        let mut now = Landed { spans: Vec::new() };
        let prefix = 0..marks.prefix;
        for range in std::iter::once(&prefix).chain(&marks.beyond) {
            now.rest(range.start, begun);
            now.push(range.end, SlotState::Landed);
        }
        now.rest(self.slot_count, begun);
        now
    }
}

impl Landed {
    /// Appends slots up to `end` that are not known to have landed.
    fn rest(&mut self, end: u64, begun: u64) {
        self.push(end.min(begun), SlotState::Unknown);
        self.push(end, SlotState::NotLanded);
    }
}

impl Marks {
    fn land(&mut self, slots: Range<u64>) {
        if slots.start <= self.prefix {
            self.prefix = self.prefix.max(slots.end);
        } else {
            let at = self.beyond.partition_point(|range| range.end < slots.start);
            let mut joined = slots;
            while let Some(range) = self.beyond.get(at).filter(|r| r.start <= joined.end) {
                joined = joined.start.min(range.start)..joined.end.max(range.end);
                self.beyond.remove(at);
            }
            self.beyond.insert(at, joined);
        }
        while let Some(range) = self.beyond.first().filter(|r| r.start <= self.prefix) {
            self.prefix = self.prefix.max(range.end);
            self.beyond.remove(0);
        }
    }
}

#[cfg(all(test, not(kv_loom)))]
mod tests {
    use super::*;
    use SlotState::{Landed as Yes, NotLanded as No, Unknown};

    fn spans(landing: &Landing) -> Vec<(Range<u64>, SlotState)> {
        landing.now().spans().collect()
    }

    #[test]
    fn the_three_states_stay_apart() {
        let landing = Landing::new(10);
        assert_eq!(spans(&landing), [(0..10, No)], "nobody has begun");
        landing.begun();
        assert_eq!(
            spans(&landing),
            [(0..10, Unknown)],
            "a link that tells nothing"
        );
        landing.begun_to(6);
        landing.landed(0..3);
        assert_eq!(spans(&landing), [(0..3, Yes), (3..6, Unknown), (6..10, No)]);
        let now = landing.now();
        assert_eq!(
            [now.slot(2), now.slot(3), now.slot(9)],
            [Some(Yes), Some(Unknown), Some(No)]
        );
        assert_eq!(now.slot(10), None);
        assert_eq!([Yes, Unknown, No].map(|state| now.count(state)), [3, 3, 4]);
        assert!(!now.is_complete());
        landing.settle();
        assert_eq!(spans(&landing), [(0..3, Yes), (3..10, No)]);
    }

    #[test]
    fn what_an_attempt_has_left_stays_unknown() {
        let landing = Landing::new(10);
        landing.begun_to(6);
        landing.landed(0..2);
        landing.repeated();
        landing.begun_again_to(1);
        landing.settle();
        assert_eq!(spans(&landing), [(0..2, Yes), (2..6, Unknown), (6..10, No)]);
    }

    #[test]
    fn what_lands_out_of_order_is_joined() {
        let landing = Landing::new(100);
        landing.begun();
        for part in [20..30, 60..70, 40..50, 30..40] {
            landing.landed(part);
        }
        let expected = [
            (0..20, Unknown),
            (20..50, Yes),
            (50..60, Unknown),
            (60..70, Yes),
            (70..100, Unknown),
        ];
        assert_eq!(spans(&landing), expected);
        landing.landed(0..20);
        landing.landed(10..65);
        assert_eq!(spans(&landing), [(0..70, Yes), (70..100, Unknown)]);
        landing.landed(90..u64::MAX);
        landing.landed(70..90);
        assert!(landing.now().is_complete());
        assert_eq!(landing.marks.lock().beyond, []);
    }
}
