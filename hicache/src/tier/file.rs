//! The segment log as a tier.
//!
//! A deadline ends the wait for a turn and for the writer of a group. A call of the disk is not cut off: a read,
//! and the one group that a caller writes itself, end when the disk has answered.

use kvgate_kvcache::identity::NamespaceDigest;
use kvgate_transfer::Deadline;

use super::{Presence, Stored, Tier, TierStats};
use crate::error::Error;
use crate::log::SegmentLog;
use crate::miss::Miss;
use crate::record::{Record, RecordId, Verified, Wanted};

impl Tier for SegmentLog {
    fn name(&self) -> &str {
        "file"
    }

    fn probe(&self, ids: &[RecordId], _deadline: Deadline) -> Vec<Presence> {
        let presence = |is_there| match is_there {
            true => Presence::Present,
            false => Presence::Absent,
        };
        self.contains(ids).into_iter().map(presence).collect()
    }

    fn read<'b>(
        &self,
        wanted: Wanted<'_>,
        into: &'b mut [u8],
        _deadline: Deadline,
    ) -> Result<Verified<'b>, Miss> {
        SegmentLog::read(self, wanted, into)
    }

    fn write(&self, record: &Record<'_>, deadline: Deadline) -> Result<Stored, Error> {
        self.append(record, deadline)
    }

    fn remove(
        &self,
        namespace: NamespaceDigest,
        id: RecordId,
        deadline: Deadline,
    ) -> Result<bool, Error> {
        SegmentLog::remove(self, namespace, id, deadline)
    }

    fn record_limit_bytes(&self) -> u64 {
        self.longest_record_bytes()
    }

    fn drain_evicted(&self) -> Vec<RecordId> {
        SegmentLog::drain_evicted(self)
    }

    fn stats(&self) -> TierStats {
        let stats = SegmentLog::stats(self);
        TierStats {
            record_count: Some(stats.record_count),
            used_bytes: Some(stats.file_bytes + stats.held_bytes),
            capacity_bytes: Some(stats.capacity_bytes),
            hit_count: stats.hit_count,
            read_bytes: stats.read_bytes,
            misses: stats.misses,
            stored_count: stats.stored_count,
            written_bytes: stats.written_bytes,
            duplicate_count: stats.duplicate_count,
            failed_count: stats.failed_count,
            evicted_count: stats.evicted_count,
            removed_count: stats.removed_count,
        }
    }
}
