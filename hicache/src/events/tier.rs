//! [`ReportingTier`]: a tier that tells which blocks it has.

use kvgate_kvcache::identity::{BlockKey, NamespaceDigest};
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::{Arc, Mutex};

use super::{Event, KvEvents, Medium};
use crate::error::Error;
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
    /// What has left by itself and was not asked for yet.
    evicted: Mutex<Vec<RecordId>>,
    tier: Arc<T>,
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
            evicted: Mutex::new(Vec::new()),
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

    fn removed(&self, id: &RecordId) {
        if id.kind == RecordKind::Block {
            let (key, medium) = (id.key, self.medium);
            self.events.tell(Event::Removed { key, medium });
        }
    }

    fn note_evicted(&self) {
        // One at a time, so that none is told of as gone that another call has stored again since.
        let mut evicted = self.evicted.lock();
        let gone = self.tier.drain_evicted();
        gone.iter().for_each(|id| self.removed(id));
        evicted.extend(gone);
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
        let outcome = self.tier.read(wanted, into, deadline);
        match &outcome {
            Ok(_) => self.stored(&wanted.id, wanted.parent, wanted.position),
            Err(miss) if *miss == Miss::Absent || miss.is_damage() => self.removed(&wanted.id),
            Err(_) => {}
        }
        outcome
    }

    fn write(&self, record: &Record<'_>, deadline: Deadline) -> Result<Stored, Error> {
        let outcome = self.tier.write(record, deadline);
        self.note_evicted();
        if outcome.is_ok() {
            self.stored(&record.id, record.parent, record.position);
        }
        outcome
    }

    fn remove(
        &self,
        namespace: NamespaceDigest,
        id: RecordId,
        deadline: Deadline,
    ) -> Result<bool, Error> {
        // Before it goes: nobody is sent to what may be gone.
        self.removed(&id);
        self.tier.remove(namespace, id, deadline)
    }

    fn record_limit_bytes(&self) -> u64 {
        self.tier.record_limit_bytes()
    }

    fn drain_evicted(&self) -> Vec<RecordId> {
        self.note_evicted();
        std::mem::take(&mut self.evicted.lock())
    }

    fn stats(&self) -> TierStats {
        self.tier.stats()
    }
}
