//! [`ReportingTier`]: a tier that tells which blocks it has.

use std::collections::HashMap;

use kvgate_kvcache::identity::{BlockKey, NamespaceDigest};
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::{Arc, Mutex};

use super::{Event, KvEvents, Medium};
use crate::error::Error;
use crate::evicted::Evicted;
use crate::miss::Miss;
use crate::record::{Record, RecordId, RecordKind, Verified, Wanted};
use crate::tier::{Presence, Stored, Tier, TierStats};

/// Another tier, whose blocks are told of: stored when a write or a read has found them there, removed when a
/// removal, an eviction or a read has found them gone. Their tokens are not known here; they are told of where
/// the block was computed.
#[derive(Debug)]
pub struct ReportingTier<T: ?Sized> {
    events: KvEvents,
    medium: Medium,
    block_tokens: u32,
    told: Mutex<Told>,
    tier: Arc<T>,
}

/// What keeps the order of what is told. **Lock order.** Before that of the events and of the tier's own.
#[derive(Debug, Default)]
struct Told {
    /// What has left by itself and was not asked for yet.
    evicted: Evicted,
    /// Records that calls are about to tell of as stored: how many calls, and whether it was told of as gone since the
    /// first of them began. Nobody knows then which came first, and it is not told of: fewer are known than there are.
    under_way: HashMap<RecordId, (usize, bool)>,
}

impl<T: Tier + ?Sized> ReportingTier<T> {
    /// `tier`, whose blocks of `block_tokens` tokens are at `medium`.
    pub fn new(
        tier: Arc<T>,
        events: &KvEvents,
        medium: Medium,
        block_tokens: u32,
    ) -> ReportingTier<T> {
        ReportingTier {
            events: events.clone(),
            medium,
            block_tokens,
            told: Mutex::default(),
            tier,
        }
    }

    fn stored(&self, id: &RecordId, parent: BlockKey, position: u64) {
        // Ends are no blocks.
        if id.kind != RecordKind::Block {
            return;
        }
        self.events.tell(Event::Stored {
            key: id.key,
            parent: (position > 0).then_some(parent),
            tokens: Box::default(),
            block_tokens: self.block_tokens,
            medium: self.medium,
        });
    }

    fn begin(&self, told: &mut Told, id: &RecordId) {
        told.under_way.entry(*id).or_default().0 += 1;
    }

    /// Tells of a record that was found or stored, unless it was told of as gone meanwhile.
    fn end(&self, told: &mut Told, id: &RecordId, place: Option<(BlockKey, u64)>) {
        let Some((calls, is_gone)) = told.under_way.get_mut(id) else {
            return;
        };
        *calls -= 1;
        let (is_last, is_gone) = (*calls == 0, *is_gone);
        if is_last {
            told.under_way.remove(id);
        }
        if let Some((parent, position)) = place.filter(|_| !is_gone) {
            self.stored(id, parent, position);
        }
    }

    fn removed(&self, told: &mut Told, id: &RecordId) {
        if let Some((_, is_gone)) = told.under_way.get_mut(id) {
            *is_gone = true;
        }
        if id.kind == RecordKind::Block {
            let (key, medium) = (id.key, self.medium);
            self.events.tell(Event::Removed { key, medium });
        }
    }

    fn note_evicted(&self, told: &mut Told) {
        // One at a time, so that none is told of as gone that another call has stored again since.
        let gone = self.tier.drain_evicted();
        gone.iter().for_each(|id| self.removed(told, id));
        told.evicted.extend(gone);
    }
}

impl<T: Tier + ?Sized> Tier for ReportingTier<T> {
    fn name(&self) -> &str {
        self.tier.name()
    }

    fn probe(&self, ids: &[RecordId], deadline: Deadline) -> Vec<Presence> {
        self.tier.probe(ids, deadline)
    }

    fn read<'b>(
        &self,
        wanted: Wanted<'_>,
        into: &'b mut [u8],
        deadline: Deadline,
    ) -> Result<Verified<'b>, Miss> {
        self.begin(&mut self.told.lock(), &wanted.id);
        let outcome = self.tier.read(wanted, into, deadline);
        let mut told = self.told.lock();
        let is_hit = outcome.is_ok();
        let place = is_hit.then_some((wanted.parent, wanted.position));
        self.end(&mut told, &wanted.id, place);
        if let Err(miss) = &outcome
            && (*miss == Miss::Absent || miss.is_damage())
        {
            self.removed(&mut told, &wanted.id);
        }
        outcome
    }

    fn write(&self, record: &Record<'_>, deadline: Deadline) -> Result<Stored, Error> {
        let mut told = self.told.lock();
        // What has gone before is told of before.
        self.note_evicted(&mut told);
        self.begin(&mut told, &record.id);
        drop(told);
        let outcome = self.tier.write(record, deadline);
        let mut told = self.told.lock();
        self.note_evicted(&mut told);
        let place = outcome.is_ok().then_some((record.parent, record.position));
        self.end(&mut told, &record.id, place);
        outcome
    }

    fn remove(
        &self,
        namespace: NamespaceDigest,
        id: RecordId,
        deadline: Deadline,
    ) -> Result<bool, Error> {
        // Before it goes: nobody is sent to what may be gone.
        self.removed(&mut self.told.lock(), &id);
        self.tier.remove(namespace, id, deadline)
    }

    fn record_limit_bytes(&self) -> u64 {
        self.tier.record_limit_bytes()
    }

    fn drain_evicted(&self) -> Vec<RecordId> {
        let mut told = self.told.lock();
        self.note_evicted(&mut told);
        told.evicted.take()
    }

    fn stats(&self) -> TierStats {
        self.tier.stats()
    }
}
