//! From the host tier into the storage tiers.

use std::time::Instant;

use kvgate_kvcache::identity::BlockKey;
use kvgate_kvcache::schema::PAGE_TOKENS;
use kvgate_transfer::Deadline;

use super::stack::Shared;
use super::{contained, rows};
use crate::error::{Error, ErrorKind};
use crate::figures::note_parts;
use crate::host::HostLease;
use crate::record::{Record, RecordId, RecordKind, RecordShape};
use crate::tier::{Presence, Stored};

/// A prefix that is to be stored, and the pin that keeps it until it is.
#[derive(Debug)]
pub(super) struct StoreJob {
    /// Its own, for its age.
    pub(super) number: u64,
    pub(super) lease: HostLease,
    /// The keys of its blocks.
    pub(super) keys: Vec<BlockKey>,
    /// It goes to so many tiers, from the nearest on.
    pub(super) tier_count: usize,
}

/// Stores until the queue is closed.
pub(super) fn work(shared: &Shared) {
    let mut payload = Vec::new();
    while let Some((job, running)) = shared.stores.pop() {
        let is_complete = contained(|| store(shared, &job, &mut payload)).unwrap_or(false);
        let mut counts = shared.counts.lock();
        match is_complete {
            true => counts.stores.complete += 1,
            false => counts.stores.failed += 1,
        }
        drop(counts);
        shared.end_store(job.number);
        // The pin ends with the last write, and before the store counts as over.
        drop(job);
        drop(running);
    }
}

/// Stores the blocks in order, the end last. Answers whether all of it is in every tier.
fn store(shared: &Shared, job: &StoreJob, payload: &mut Vec<u8>) -> bool {
    let schema = shared.host.pools().schema();
    let end = job.lease.tokens();
    let Ok(checkpoint) = RecordShape::checkpoint(schema, PAGE_TOKENS, end) else {
        return false;
    };
    let ids: Vec<RecordId> = ids_of(&job.keys).collect();
    let mut missing = missing_in(shared, job.tier_count, &ids);
    let mut is_complete = missing.iter().all(Option::is_some);
    for (index, id) in ids.iter().enumerate() {
        let wanted: Vec<usize> = (0..job.tier_count)
            .filter(|tier| missing[*tier].as_ref().is_some_and(|lacks| lacks[index]))
            .collect();
        if wanted.is_empty() {
            continue;
        }
        if shared.is_ending() {
            return false;
        }
        let (shape, position) = match id.kind {
            RecordKind::Block => (&shared.block, index as u32 * PAGE_TOKENS),
            RecordKind::Checkpoint => (&checkpoint, end),
        };
        payload.resize(shape.payload_bytes() as usize, 0);
        if rows::gather(schema, job.lease.prefix(), shape, position, payload).is_err() {
            return false;
        }
        let block = index.min(job.keys.len() - 1);
        let record = Record {
            namespace: shared.namespace.digest(),
            id: *id,
            parent: match block {
                0 => shared.namespace.root(),
                _ => job.keys[block - 1],
            },
            position: u64::from(position),
            shape,
            payload,
        };
        for tier in wanted {
            if let Err(error) = write(shared, tier, &record) {
                is_complete = false;
                // A tier that cannot be asked is not asked for every record in turn.
                if !matches!(error.kind(), ErrorKind::Damaged { .. }) {
                    missing[tier] = None;
                }
            }
        }
    }
    is_complete
}

/// The records of a prefix: its blocks, and its end.
fn ids_of(keys: &[BlockKey]) -> impl Iterator<Item = RecordId> + '_ {
    let block = |key: &BlockKey| RecordId {
        kind: RecordKind::Block,
        key: *key,
    };
    let end = keys.last().map(|key| RecordId {
        kind: RecordKind::Checkpoint,
        key: *key,
    });
    keys.iter().map(block).chain(end)
}

/// For each tier, which of the records it lacks; `None` for one that cannot be asked.
fn missing_in(shared: &Shared, tier_count: usize, ids: &[RecordId]) -> Vec<Option<Vec<bool>>> {
    let deadline = Deadline::after_ms(shared.config.store_deadline_ms);
    let tiers = shared.config.tiers.iter().take(tier_count).enumerate();
    let lacks = |(index, tier): (usize, &super::StorageTier)| {
        let found = tier.tier.probe(ids, deadline);
        let mut counts = shared.counts.lock();
        let counts = &mut counts.tiers[index];
        // An answer of another length answers nobody knows what.
        if found.len() != ids.len() || found.contains(&Presence::Unknown) {
            counts.failed += 1;
            return None;
        }
        let lacks: Vec<bool> = found
            .iter()
            .map(|found| *found == Presence::Absent)
            .collect();
        counts.present += lacks.iter().filter(|lacks| !**lacks).count() as u64;
        Some(lacks)
    };
    tiers.map(lacks).collect()
}

fn write(shared: &Shared, tier: usize, record: &Record<'_>) -> Result<(), Error> {
    let deadline = Deadline::after_ms(shared.config.store_deadline_ms);
    let (gate, record_bytes) = (&shared.gates[tier], record.shape.record_bytes());
    if let Err(error) = gate.pass_write(record_bytes, deadline) {
        let counts = &mut shared.counts.lock().tiers[tier];
        counts.failed += 1;
        counts.limited += 1;
        return Err(error);
    }
    let begun = Instant::now();
    let outcome = shared.config.tiers[tier].tier.write(record, deadline);
    if let Ok(Stored::Written) = &outcome {
        gate.written(record_bytes);
    }
    let mut counts = shared.counts.lock();
    let counts = &mut counts.tiers[tier];
    match outcome {
        Ok(Stored::Written) => {
            counts.stored += 1;
            counts.stored_us += begun.elapsed().as_micros() as u64;
            note_parts(&mut counts.components, record.shape, |c| {
                &mut c.stored_bytes
            });
            counts.stored_bytes += record_bytes;
        }
        Ok(Stored::Present) => counts.present += 1,
        Err(error) => {
            counts.failed += 1;
            return Err(error);
        }
    }
    Ok(())
}
