//! Records in the memory of the process, verified like those of any other tier, and kept without the zeros that fill
//! their pages elsewhere. Buffers are used again, so that a tier that is full touches no new pages.

use std::collections::{HashMap, VecDeque};
use std::fmt;

use kvgate_kvcache::identity::NamespaceDigest;
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::{Arc, Mutex};

use super::{Presence, Stored, Tier, TierStats};
use crate::error::{Error, ErrorKind};
use crate::evicted::Evicted;
use crate::miss::Miss;
#[cfg(feature = "testkit")]
use crate::record::Intake;
use crate::record::{Packed, Record, RecordId, Verified, Wanted};

/// Most buffers that wait to be used again.
const SPARE_COUNT: usize = 64;

/// A tier in memory: first in, first out.
pub struct MemoryTier {
    capacity_bytes: u64,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    records: HashMap<RecordId, Arc<Held>>,
    /// In the order in which they came; also of records that were removed.
    order: VecDeque<RecordId>,
    spare: Vec<Vec<u8>>,
    used_bytes: u64,
    evicted: Evicted,
    stats: TierStats,
}

/// A record in memory.
enum Held {
    Packed(Packed),
    /// Damaged where it has zeros otherwise, or in its length.
    #[cfg(feature = "testkit")]
    Whole(Vec<u8>),
}

impl Held {
    fn read<'b>(&self, wanted: Wanted<'_>, into: &'b mut [u8]) -> Result<Verified<'b>, Miss> {
        match self {
            Held::Packed(packed) => packed.read(wanted, into),
            #[cfg(feature = "testkit")]
            Held::Whole(bytes) => Intake::of_bytes(wanted, bytes, into),
        }
    }

    fn record_bytes(&self) -> u64 {
        match self {
            Held::Packed(packed) => packed.record_bytes(),
            #[cfg(feature = "testkit")]
            Held::Whole(bytes) => bytes.len() as u64,
        }
    }

    fn into_buffer(self) -> Vec<u8> {
        match self {
            Held::Packed(packed) => packed.into_buffer(),
            #[cfg(feature = "testkit")]
            Held::Whole(bytes) => bytes,
        }
    }
}

impl MemoryTier {
    /// An empty tier of at most `capacity_bytes` bytes of records.
    pub fn new(capacity_bytes: u64) -> MemoryTier {
        MemoryTier {
            capacity_bytes,
            inner: Mutex::new(Inner::default()),
        }
    }

    /// Changes the bytes of a record behind the tier's back. Answers whether it was there.
    #[cfg(feature = "testkit")]
    pub fn damage(&self, id: &RecordId, change: impl FnOnce(&mut Vec<u8>)) -> bool {
        let mut inner = self.inner.lock();
        let Some(held) = inner.records.get(id) else {
            return false;
        };
        let (packed, mut changed) = match &**held {
            Held::Packed(packed) => (Some(packed.clone()), packed.unpacked()),
            Held::Whole(bytes) => (None, bytes.clone()),
        };
        change(&mut changed);
        let packed = packed.and_then(|mut packed| packed.change(&changed).then_some(packed));
        let held_before_bytes = held.record_bytes();
        let held = packed.map_or_else(|| Held::Whole(changed), Held::Packed);
        inner.used_bytes = inner.used_bytes + held.record_bytes() - held_before_bytes;
        inner.records.insert(*id, Arc::new(held));
        true
    }
}

impl Inner {
    fn take(&mut self, id: &RecordId) -> bool {
        let Some(bytes) = self.records.remove(id) else {
            return false;
        };
        self.used_bytes = self.used_bytes.saturating_sub(bytes.record_bytes());
        // A reader may still have it.
        if let Ok(held) = Arc::try_unwrap(bytes)
            && self.spare.len() < SPARE_COUNT
        {
            self.spare.push(held.into_buffer());
        }
        true
    }

    /// Answers whether there is room: what others are about to copy cannot go.
    fn make_room(&mut self, needed_bytes: u64, capacity_bytes: u64) -> bool {
        while self.used_bytes + needed_bytes > capacity_bytes {
            let Some(oldest) = self.order.pop_front() else {
                return false;
            };
            if self.take(&oldest) {
                self.evicted.push(oldest);
                self.stats.evicted_count += 1;
            }
        }
        true
    }

    /// Removes a damaged record, if it is still this one: what is stored anew is whole.
    fn remove_damaged(&mut self, id: &RecordId, damaged: &Arc<Held>) {
        let found = self.records.get(id);
        if found.is_some_and(|found| Arc::ptr_eq(found, damaged)) && self.take(id) {
            self.order.retain(|other| other != id);
            self.evicted.push(*id);
        }
    }

    fn buffer(&mut self, bytes: usize) -> Option<Vec<u8>> {
        let at = self.spare.iter().position(|spare| spare.len() == bytes)?;
        Some(self.spare.swap_remove(at))
    }
}

impl Tier for MemoryTier {
    fn name(&self) -> &str {
        "memory"
    }

    fn probe(&self, ids: &[RecordId], _deadline: Deadline) -> Vec<Presence> {
        let inner = self.inner.lock();
        let presence = |id| match inner.records.contains_key(id) {
            true => Presence::Present,
            false => Presence::Absent,
        };
        ids.iter().map(presence).collect()
    }

    fn read<'b>(
        &self,
        wanted: Wanted<'_>,
        into: &'b mut [u8],
        _deadline: Deadline,
    ) -> Result<Verified<'b>, Miss> {
        let found = self.inner.lock().records.get(&wanted.id).cloned();
        let outcome = match &found {
            Some(held) => held.read(wanted, into),
            None => Err(Miss::Absent),
        };
        let mut inner = self.inner.lock();
        inner.stats.count_read(&outcome);
        if let (Some(held), Err(miss)) = (&found, &outcome)
            && miss.is_damage()
        {
            inner.remove_damaged(&wanted.id, held);
        }
        outcome
    }

    fn write(&self, record: &Record<'_>, _deadline: Deadline) -> Result<Stored, Error> {
        let record_bytes = record.shape.record_bytes();
        let mut inner = self.inner.lock();
        if inner.records.contains_key(&record.id) {
            inner.stats.duplicate_count += 1;
            return Ok(Stored::Present);
        }
        let is_possible = record_bytes <= self.capacity_bytes;
        if !is_possible || !inner.make_room(record_bytes, self.capacity_bytes) {
            inner.stats.failed_count += 1;
            return Err(Error::new(ErrorKind::Full {
                needed_bytes: record_bytes,
                capacity_bytes: self.capacity_bytes,
            }));
        }
        let packed_bytes = Packed::bytes_of(record.shape);
        let spare = inner.buffer(packed_bytes);
        // Counted before the copy, so that those who come meanwhile leave room for it.
        inner.used_bytes += record_bytes;
        drop(inner);
        let buffer = spare.unwrap_or_else(|| vec![0; packed_bytes]);
        let packed = Packed::encode(record, buffer);
        let mut inner = self.inner.lock();
        if inner.records.contains_key(&record.id) {
            inner.used_bytes -= record_bytes;
            inner.spare.push(packed.into_buffer());
            inner.stats.duplicate_count += 1;
            return Ok(Stored::Present);
        }
        inner
            .records
            .insert(record.id, Arc::new(Held::Packed(packed)));
        inner.order.push_back(record.id);
        inner.stats.stored_count += 1;
        inner.stats.written_bytes += record_bytes;
        Ok(Stored::Written)
    }

    fn remove(
        &self,
        _namespace: NamespaceDigest,
        id: RecordId,
        _deadline: Deadline,
    ) -> Result<bool, Error> {
        let mut inner = self.inner.lock();
        let was_there = inner.take(&id);
        if was_there {
            inner.order.retain(|other| *other != id);
            inner.stats.removed_count += 1;
        }
        Ok(was_there)
    }

    fn record_limit_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn drain_evicted(&self) -> Vec<RecordId> {
        self.inner.lock().evicted.take()
    }

    fn stats(&self) -> TierStats {
        let inner = self.inner.lock();
        TierStats {
            record_count: Some(inner.records.len() as u64),
            used_bytes: Some(inner.used_bytes),
            capacity_bytes: Some(self.capacity_bytes),
            ..inner.stats.clone()
        }
    }
}

impl fmt::Debug for MemoryTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryTier")
            .field("stats", &self.stats())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::RecordKind::Block;
    use crate::testkit::Sample;

    /// Its room is taken and there is nothing of it yet that could be evicted.
    #[test]
    fn a_record_that_is_being_copied_keeps_its_room() {
        let sample = Sample::small(3);
        let bytes = sample.shape(Block).record_bytes();
        let tier = MemoryTier::new(2 * bytes);
        let put = |k| sample.with_record(Block, k, |record| tier.write(record, Deadline::now()));
        put(0).expect("room for two");
        // As another writer does before it copies.
        tier.inner.lock().used_bytes += bytes;
        put(1).expect("the first one goes");
        tier.inner.lock().used_bytes += bytes;
        let error = put(2).expect_err("both are taken");
        assert!(matches!(error.kind(), ErrorKind::Full { .. }), "{error}");
        let stats = tier.stats();
        assert_eq!((stats.failed_count, stats.evicted_count), (1, 2));
        tier.inner.lock().used_bytes -= 2 * bytes;
        put(2).expect("they have failed");
        assert_eq!(tier.stats().used_bytes, Some(bytes));
    }
}
