//! [`Tier`]: a place that keeps records. One can be written for any store.
//!
//! A tier owes nothing: it may refuse a record, lose it, evict it. What it may not do is give a record
//! that is not the one asked for, whole and right, and the signature of [`Tier::read`] sees to that: a hit
//! is a [`Verified`], the payload itself, and that comes only out of an
//! [`Intake`](crate::record::Intake), which has looked at every byte. An error of the store is a miss with a cause, never a hit.
//!
//! Every call has a deadline. It ends the wait for others and for a network, and changes nothing else; what
//! memory and the local disk have begun goes on to its end.
//!
//! The `testkit` feature has the contract that each tier here passes; run it over one of your own with
//! `kvgate_hicache::tier_contract!`.

mod file;
mod memory;
#[cfg(feature = "object")]
mod object;
#[cfg(feature = "redis")]
mod redis;

use std::collections::BTreeMap;

use kvgate_kvcache::identity::NamespaceDigest;
use kvgate_kvcache::schema::CacheSchema;
use kvgate_transfer::Deadline;

pub use crate::log::Stored;
pub use memory::MemoryTier;
#[cfg(feature = "object")]
pub use object::ObjectTier;
#[cfg(feature = "redis")]
pub use redis::RedisTier;

use crate::error::{Error, ErrorKind};
use crate::miss::Miss;
use crate::record::{Record, RecordId, RecordShape, Verified, Wanted};

/// Whether a tier has a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It had it when it was asked. The read decides.
    Present,
    /// It does not have it.
    Absent,
    /// It could not be asked. Not a hit.
    Unknown,
}

/// A place that keeps records.
pub trait Tier: Send + Sync {
    /// Name in metrics and messages, for example `file`.
    fn name(&self) -> &str;

    /// Which records are there. Asking renews nothing and keeps nothing from being evicted.
    fn probe(&self, ids: &[RecordId], deadline: Deadline) -> Vec<Presence>;

    /// Reads a record, its payload into `into`, and answers the payload there.
    ///
    /// # Errors
    /// Why there is no verified record. What `into` holds then means nothing.
    ///
    /// # Panics
    /// If `into` has not the payload's length.
    fn read<'b>(
        &self,
        wanted: Wanted<'_>,
        into: &'b mut [u8],
        deadline: Deadline,
    ) -> Result<Verified<'b>, Miss>;

    /// Stores a record. It is there when this comes back, as durably as the tier is configured.
    ///
    /// # Errors
    /// Why it was not stored. `Late`: it may be stored or not.
    fn write(&self, record: &Record<'_>, deadline: Deadline) -> Result<Stored, Error>;

    /// Removes a record; nobody finds it any more when this comes back. Answers whether it was there.
    ///
    /// # Errors
    /// Why it may still be there.
    fn remove(
        &self,
        namespace: NamespaceDigest,
        id: RecordId,
        deadline: Deadline,
    ) -> Result<bool, Error>;

    /// Longest record that it takes, in bytes.
    fn record_limit_bytes(&self) -> u64;

    /// Records that have left by themselves since the last call, as far as the tier knows. Nobody has to ask: a
    /// tier keeps a bounded number of them, the newest.
    fn drain_evicted(&self) -> Vec<RecordId>;

    /// Its figures.
    fn stats(&self) -> TierStats;
}

/// Checks that a tier can hold every record of a schema: a tier that cannot hold one component would
/// never give a whole prefix, so it is refused when it is attached.
///
/// # Errors
/// `ComponentRefused` naming the largest component of the record that does not fit.
pub fn check_tier(tier: &dyn Tier, schema: &CacheSchema, block_tokens: u32) -> Result<(), Error> {
    // A checkpoint is longest where a whole window lies before it.
    let far_tokens = (schema.geometry().window_tokens / block_tokens.max(1) + 2) * block_tokens;
    let shapes = [
        RecordShape::block(schema, block_tokens)?,
        RecordShape::checkpoint(schema, block_tokens, far_tokens)?,
    ];
    let limit_bytes = tier.record_limit_bytes();
    for shape in &shapes {
        if shape.record_bytes() <= limit_bytes {
            continue;
        }
        let largest = shape.parts().iter().max_by_key(|part| part.length_bytes());
        return Err(Error::new(ErrorKind::ComponentRefused {
            component: largest.map_or("nothing", |part| part.component.id()),
            reason: format!(
                "a {} has {} bytes, {} takes {limit_bytes}",
                shape.kind(),
                shape.record_bytes(),
                tier.name()
            ),
        }));
    }
    Ok(())
}

/// Figures of a tier. Counts are since it was opened; what a remote store has is not known here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Records that can be read.
    pub record_count: Option<u64>,
    /// Bytes that it takes, by what the medium holds.
    pub used_bytes: Option<u64>,
    /// Bytes that it may take.
    pub capacity_bytes: Option<u64>,
    /// Reads that gave a verified record.
    pub hit_count: u64,
    /// Payload bytes of these.
    pub read_bytes: u64,
    /// Reads that gave none, by cause.
    pub misses: BTreeMap<&'static str, u64>,
    /// Records stored.
    pub stored_count: u64,
    /// Bytes written to the medium: the wear.
    pub written_bytes: u64,
    /// Records that were there already when they were to be stored.
    pub duplicate_count: u64,
    /// Records that were refused or failed.
    pub failed_count: u64,
    /// Records that left to make room.
    pub evicted_count: u64,
    /// Records removed by their name.
    pub removed_count: u64,
}

impl TierStats {
    /// Counts the outcome of a read.
    pub fn count_read(&mut self, outcome: &Result<Verified<'_>, Miss>) {
        match outcome {
            Ok(verified) => {
                self.hit_count += 1;
                self.read_bytes += verified.payload_bytes();
            }
            Err(miss) => *self.misses.entry(miss.label()).or_default() += 1,
        }
    }

    /// Counts the outcome of a write of so many bytes.
    pub fn count_write(&mut self, outcome: &Result<Stored, Error>, record_bytes: u64) {
        match outcome {
            Ok(Stored::Written) => {
                self.stored_count += 1;
                self.written_bytes += record_bytes;
            }
            Ok(Stored::Present) => self.duplicate_count += 1,
            Err(_) => self.failed_count += 1,
        }
    }

    /// Misses of all causes.
    pub fn miss_count(&self) -> u64 {
        self.misses.values().sum()
    }
}
