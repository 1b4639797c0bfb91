//! Records in a Redis or Valkey server, which keeps and evicts them as it is configured.
//!
//! A record is cut into parts of at most 1 MiB, one value each, named
//! `PREFIX:KIND-KEY:PART`. The first part is written last: without it there is no record. Parts that the
//! server has evicted, cut, swapped or made up are a miss like any damage; a damaged record is removed, so
//! that it can be stored again.
//!
//! Every call ends at its deadline however slowly the server answers, and reads no more than the longest right
//! answer has. Only the look-up of a host name takes what the resolver of the system takes.

mod link;

use std::fmt;

use kvgate_kvcache::identity::NamespaceDigest;
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::Mutex;
use redis::{Client, RedisError, cmd, pipe};

use super::{Presence, Stored, Tier, TierStats};
use crate::error::{Error, ErrorKind};
use crate::miss::Miss;
use crate::record::{Intake, Record, RecordId, Verified, Wanted};
use link::{Link, REPLY_BYTES};

/// Longest value, in bytes.
const PART_BYTES: usize = 1 << 20;
/// Longest record: far above any model, and a bound on what a server can make us read.
const RECORD_LIMIT_BYTES: u64 = 64 << 20;
/// Most names that are asked for at once.
const PROBE_COUNT: usize = 1024;
/// Connections that wait to be used again.
const SPARE_COUNT: usize = 16;

/// A tier in a Redis server.
pub struct RedisTier {
    client: Client,
    prefix: String,
    spare: Mutex<Vec<Link>>,
    stats: Mutex<TierStats>,
}

impl RedisTier {
    /// A tier at `url`, for example `redis://127.0.0.1:6379/0`, whose names begin with `prefix`. Connects
    /// when it is first asked.
    ///
    /// # Errors
    /// `Unavailable` for a URL that is none.
    pub fn new(url: &str, prefix: &str) -> Result<RedisTier, Error> {
        let client = Client::open(url).map_err(|error| unavailable(&error))?;
        Ok(RedisTier {
            client,
            prefix: prefix.to_owned(),
            spare: Mutex::new(Vec::new()),
            stats: Mutex::new(TierStats::default()),
        })
    }

    fn name_of(&self, id: &RecordId, part: usize) -> String {
        format!("{}:{id}:{part}", self.prefix)
    }

    /// Runs `work` over a connection, whose replies have at most `reply_bytes` bytes together. One that
    /// failed is not used again.
    fn with<T>(
        &self,
        deadline: Deadline,
        reply_bytes: u64,
        work: impl FnOnce(&mut Link) -> Result<T, RedisError>,
    ) -> Result<T, RedisError> {
        let spare = self.spare.lock().pop();
        let mut link = match spare {
            Some(link) => link,
            None => Link::connect(self.client.get_connection_info(), deadline)?,
        };
        link.begin(deadline, reply_bytes);
        let done = work(&mut link)?;
        let mut spare = self.spare.lock();
        if spare.len() < SPARE_COUNT {
            spare.push(link);
        }
        Ok(done)
    }

    fn fetch<'b>(
        &self,
        wanted: Wanted<'_>,
        into: &'b mut [u8],
        deadline: Deadline,
    ) -> Result<Verified<'b>, Miss> {
        let mut intake = Intake::new(wanted, into);
        let record_bytes = intake.record_bytes() as usize;
        let mut query = pipe();
        let part_count = record_bytes.div_ceil(PART_BYTES);
        for part in 0..part_count {
            let part_bytes = (record_bytes - part * PART_BYTES).min(PART_BYTES);
            // One byte more than there should be: enough to see that a value is too long.
            let name = self.name_of(&wanted.id, part);
            query.cmd("GETRANGE").arg(name).arg(0).arg(part_bytes);
        }
        let reply_bytes = record_bytes as u64 + part_count as u64 * REPLY_BYTES;
        let parts: Vec<Vec<u8>> = self
            .with(deadline, reply_bytes, |link| query.query(link))
            .map_err(|error| miss_of(&error, deadline))?;
        let found_bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        if parts.first().is_none_or(Vec::is_empty) {
            return Err(Miss::Absent);
        }
        intake.check_length(found_bytes)?;
        for mut rest in parts.iter().map(Vec::as_slice) {
            while !rest.is_empty() {
                let space = intake.space(rest.len().min(crate::record::crc::PIECE_BYTES));
                let count = space.len();
                let (piece, behind) = rest.split_at(count);
                space.copy_from_slice(piece);
                intake.filled(count)?;
                rest = behind;
            }
        }
        intake.finish()
    }

    fn store(&self, record: &Record<'_>, deadline: Deadline) -> Result<Stored, Error> {
        let record_bytes = record.shape.record_bytes();
        if record_bytes > RECORD_LIMIT_BYTES {
            return Err(Error::new(ErrorKind::Full {
                needed_bytes: record_bytes,
                capacity_bytes: RECORD_LIMIT_BYTES,
            }));
        }
        let first = self.name_of(&record.id, 0);
        let reply_count = 1 + record_bytes.div_ceil(PART_BYTES as u64);
        let outcome = self.with(deadline, reply_count * REPLY_BYTES, |link| {
            let is_present: bool = cmd("EXISTS").arg(&first).query(link)?;
            if is_present {
                return Ok(Stored::Present);
            }
            let bytes = record.to_bytes(0);
            let mut query = pipe();
            for (part, value) in bytes.chunks(PART_BYTES).enumerate().rev() {
                let name = self.name_of(&record.id, part);
                query.cmd("SET").arg(name).arg(value).ignore();
            }
            query.query::<()>(link)?;
            Ok(Stored::Written)
        });
        outcome.map_err(|error| error_of(&error, deadline))
    }

    /// Removes the parts of a record, the first one first.
    fn delete(&self, id: &RecordId, deadline: Deadline) -> Result<bool, RedisError> {
        self.with(deadline, 2 * REPLY_BYTES, |link| {
            let removed: u32 = cmd("DEL").arg(self.name_of(id, 0)).query(link)?;
            let others = RECORD_LIMIT_BYTES as usize / PART_BYTES;
            let mut query = cmd("DEL");
            for part in 1..others {
                query.arg(self.name_of(id, part));
            }
            query.query::<u32>(link)?;
            Ok(removed > 0)
        })
    }
}

fn unavailable(error: &RedisError) -> Error {
    Error::new(ErrorKind::Unavailable {
        store: "redis".to_owned(),
        reason: error.to_string(),
    })
}

fn error_of(error: &RedisError, deadline: Deadline) -> Error {
    match error.is_timeout() {
        true => Error::new(ErrorKind::Late {
            deadline_ms: deadline.allowed_ms(),
        }),
        false => unavailable(error),
    }
}

fn miss_of(error: &RedisError, deadline: Deadline) -> Miss {
    match error.is_timeout() {
        true => Miss::Late {
            deadline_ms: deadline.allowed_ms(),
        },
        false => Miss::Unavailable {
            reason: error.to_string(),
        },
    }
}

impl Tier for RedisTier {
    fn name(&self) -> &str {
        "redis"
    }

    fn probe(&self, ids: &[RecordId], deadline: Deadline) -> Vec<Presence> {
        let mut found = Vec::with_capacity(ids.len());
        for ids in ids.chunks(PROBE_COUNT) {
            let mut query = pipe();
            for id in ids {
                query.cmd("EXISTS").arg(self.name_of(id, 0));
            }
            let reply_bytes = ids.len() as u64 * REPLY_BYTES;
            let answer: Result<Vec<bool>, _> =
                self.with(deadline, reply_bytes, |link| query.query(link));
            match answer {
                Ok(answer) if answer.len() == ids.len() => {
                    let presence = |is_there| match is_there {
                        true => Presence::Present,
                        false => Presence::Absent,
                    };
                    found.extend(answer.into_iter().map(presence));
                }
                _ => found.extend(ids.iter().map(|_| Presence::Unknown)),
            }
        }
        found
    }

    fn read<'b>(
        &self,
        wanted: Wanted<'_>,
        into: &'b mut [u8],
        deadline: Deadline,
    ) -> Result<Verified<'b>, Miss> {
        let outcome = self.fetch(wanted, into, deadline);
        self.stats.lock().count_read(&outcome);
        if outcome.as_ref().is_err_and(Miss::is_damage) {
            // What cannot be removed is damaged the next time too.
            let _is_removed = self.delete(&wanted.id, deadline);
        }
        outcome
    }

    fn write(&self, record: &Record<'_>, deadline: Deadline) -> Result<Stored, Error> {
        let outcome = self.store(record, deadline);
        let record_bytes = record.shape.record_bytes();
        self.stats.lock().count_write(&outcome, record_bytes);
        outcome
    }

    fn remove(
        &self,
        _namespace: NamespaceDigest,
        id: RecordId,
        deadline: Deadline,
    ) -> Result<bool, Error> {
        let was_there = self
            .delete(&id, deadline)
            .map_err(|error| error_of(&error, deadline))?;
        self.stats.lock().removed_count += u64::from(was_there);
        Ok(was_there)
    }

    fn record_limit_bytes(&self) -> u64 {
        RECORD_LIMIT_BYTES
    }

    fn drain_evicted(&self) -> Vec<RecordId> {
        Vec::new()
    }

    fn stats(&self) -> TierStats {
        self.stats.lock().clone()
    }
}

impl fmt::Debug for RedisTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisTier")
            .field("prefix", &self.prefix)
            .field("stats", &self.stats())
            .finish()
    }
}
