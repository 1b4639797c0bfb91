//! Figures of the storage tiers.

use std::collections::BTreeMap;

use crate::figures::ComponentTable;

/// What happened since the start. Each number only grows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StorageCounts {
    /// One entry for each tier, nearest first.
    pub tiers: Vec<StorageTierCounts>,
    /// Prefixes on their way into the tiers.
    pub stores: StoreCounts,
    /// Prefixes on their way out of them.
    pub fetches: FetchCounts,
}

/// What one tier did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StorageTierCounts {
    /// Its name.
    pub name: String,
    /// Lookups that went on from a prefix of which a record came from here and none from a tier behind.
    pub hits: u64,
    /// Tokens of these prefixes.
    pub hit_tokens: u64,
    /// Verified records that came from here.
    pub read_records: u64,
    /// Payload bytes of these.
    pub read_bytes: u64,
    /// Time in reads that gave a record, in microseconds.
    pub read_us: u64,
    /// Reads that gave none, by [`crate::Miss::label`]. What a probe did not find is no read.
    pub misses: BTreeMap<&'static str, u64>,
    /// Records stored.
    pub stored: u64,
    /// Bytes of these records.
    pub stored_bytes: u64,
    /// Records that were not stored because they were there.
    pub present: u64,
    /// Records that could not be stored.
    pub failed: u64,
    /// Of these, those whose turn came too late by the limit of bandwidth, or were too many for the day.
    pub limited: u64,
    /// Time in writes that stored a record, in microseconds.
    pub stored_us: u64,
    /// What each component came to.
    pub components: ComponentTable,
    /// Bytes stored in this day, of 24 hours from the first record on.
    pub today_bytes: u64,
    /// Bytes stored in a full day, on average; `None` in the first one.
    pub bytes_per_day: Option<u64>,
}

/// Prefixes that were to be stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreCounts {
    /// Put into the queue.
    pub queued: u64,
    /// Not taken: the queue was full or the end had come. Always allowed.
    pub dropped: u64,
    /// Every record is in every tier.
    pub complete: u64,
    /// At least one record is missing in a tier.
    pub failed: u64,
}

/// Prefixes that were to be brought into the host tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FetchCounts {
    /// Begun.
    pub started: u64,
    /// Not begun: the queue was full or the end had come.
    pub dropped: u64,
    /// Requests that joined one that was under way.
    pub joined: u64,
    /// Ended with a longer prefix in the host tier.
    pub published: u64,
    /// Of these, shorter than what the tiers had said to have.
    pub shortened: u64,
    /// Ended without: the tiers have nothing longer.
    pub empty: u64,
    /// Ended without for want of room in the host tier.
    pub no_room: u64,
    /// Ended without: another one brought the same records meanwhile, or did not end in time.
    pub shared: u64,
    /// Ended without: by the measured rates, computing is faster.
    pub computed: u64,
    /// Begun for a shorter prefix, the rest of which is computed faster than it is read.
    pub trimmed: u64,
    /// Begun although a rate was not known yet.
    pub unweighed: u64,
    /// Begun from a slow tier, to see whether it still is one.
    pub retried: u64,
    /// Ended without: nothing that was read was enough to go on from.
    pub failed: u64,
    /// Waits that ended at their deadline: the request was computed.
    pub late: u64,
}
