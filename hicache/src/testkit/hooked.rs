//! A tier with something of the test's own before each read and each write.

use std::fmt;

use kvgate_kvcache::identity::NamespaceDigest;
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::Arc;

use crate::error::Error;
use crate::miss::Miss;
use crate::record::{Record, RecordId, Verified, Wanted};
use crate::tier::{Presence, Stored, Tier, TierStats};

/// What happens before a read: nothing, or a miss in its place.
type BeforeRead = dyn Fn(&RecordId, Deadline) -> Result<(), Miss> + Send + Sync;
/// What happens before a write.
type BeforeWrite = dyn Fn(&RecordId) + Send + Sync;

/// Wraps a tier. What is to happen runs on the thread that reads or writes; it may wait there, and it may panic.
pub struct Hooked {
    tier: Arc<dyn Tier>,
    before_read: Box<BeforeRead>,
    before_write: Box<BeforeWrite>,
}

impl Hooked {
    /// Nothing happens before a write.
    pub fn reads(
        tier: Arc<dyn Tier>,
        before_read: impl Fn(&RecordId, Deadline) -> Result<(), Miss> + Send + Sync + 'static,
    ) -> Hooked {
        Hooked {
            tier,
            before_read: Box::new(before_read),
            before_write: Box::new(|_| {}),
        }
    }

    /// Nothing happens before a read.
    pub fn writes(
        tier: Arc<dyn Tier>,
        before_write: impl Fn(&RecordId) + Send + Sync + 'static,
    ) -> Hooked {
        Hooked {
            tier,
            before_read: Box::new(|_, _| Ok(())),
            before_write: Box::new(before_write),
        }
    }
}

impl Tier for Hooked {
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
        (self.before_read)(&wanted.id, deadline)?;
        self.tier.read(wanted, into, deadline)
    }

    fn write(&self, record: &Record<'_>, deadline: Deadline) -> Result<Stored, Error> {
        (self.before_write)(&record.id);
        self.tier.write(record, deadline)
    }

    fn remove(
        &self,
        namespace: NamespaceDigest,
        id: RecordId,
        deadline: Deadline,
    ) -> Result<bool, Error> {
        self.tier.remove(namespace, id, deadline)
    }

    fn record_limit_bytes(&self) -> u64 {
        self.tier.record_limit_bytes()
    }

    fn drain_evicted(&self) -> Vec<RecordId> {
        self.tier.drain_evicted()
    }

    fn stats(&self) -> TierStats {
        self.tier.stats()
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooked")
            .field("tier", &self.tier.name())
            .finish_non_exhaustive()
    }
}
