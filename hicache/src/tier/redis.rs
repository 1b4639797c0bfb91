//! Records in a Redis or Valkey server, which keeps and evicts them as it is configured.
//!
//! A record is cut into parts of at most 1 MiB, one value each, named
//! `PREFIX:KIND-KEY:PART`. The first part is written last: without it there is no record. Parts that the
//! server has evicted, cut, swapped or made up are a miss like any damage; a damaged record is removed, so
//! that it can be stored again.

use std::fmt;
use std::time::Duration;

use kvgate_kvcache::identity::NamespaceDigest;
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::Mutex;
use redis::{Client, Connection, ErrorKind as RedisKind, RedisError, cmd, pipe};

use super::{Presence, Stored, Tier, TierStats};
use crate::error::{Error, ErrorKind};
use crate::miss::Miss;
use crate::record::{Intake, Record, RecordId, Verified, Wanted};

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
    spare: Mutex<Vec<Connection>>,
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

    /// Runs `work` over a connection. One that failed is not used again.
    fn with<T>(
        &self,
        deadline: Deadline,
        work: impl FnOnce(&mut Connection) -> Result<T, RedisError>,
    ) -> Result<T, RedisError> {
        let left = deadline.remaining();
        if left.is_zero() {
            return Err(RedisError::from((RedisKind::Io, "the deadline has passed")));
        }
        let spare = self.spare.lock().pop();
        let mut connection = match spare {
            Some(connection) => connection,
            None => self.client.get_connection_with_timeout(left)?,
        };
        let left = deadline.remaining().max(Duration::from_millis(1));
        connection.set_read_timeout(Some(left))?;
        connection.set_write_timeout(Some(left))?;
        let done = work(&mut connection)?;
        let mut spare = self.spare.lock();
        if spare.len() < SPARE_COUNT {
            spare.push(connection);
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
        for part in 0..record_bytes.div_ceil(PART_BYTES) {
            // One byte more than there should be: enough to see that a value is too long.
            let name = self.name_of(&wanted.id, part);
            query.cmd("GETRANGE").arg(name).arg(0).arg(PART_BYTES);
        }
        let parts: Vec<Vec<u8>> = self
            .with(deadline, |connection| query.query(connection))
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
        let outcome = self.with(deadline, |connection| {
            let is_present: bool = cmd("EXISTS").arg(&first).query(connection)?;
            if is_present {
                return Ok(Stored::Present);
            }
            let bytes = record.to_bytes(0);
            let mut query = pipe();
            for (part, value) in bytes.chunks(PART_BYTES).enumerate().rev() {
                let name = self.name_of(&record.id, part);
                query.cmd("SET").arg(name).arg(value).ignore();
            }
            query.query::<()>(connection)?;
            Ok(Stored::Written)
        });
        outcome.map_err(|error| match is_late(&error) {
            true => Error::new(ErrorKind::Late {
                deadline_ms: deadline.allowed_ms(),
            }),
            false => unavailable(&error),
        })
    }

    /// Removes the parts of a record, the first one first.
    fn delete(&self, id: &RecordId, deadline: Deadline) -> Result<bool, RedisError> {
        self.with(deadline, |connection| {
            let removed: u32 = cmd("DEL").arg(self.name_of(id, 0)).query(connection)?;
            let others = RECORD_LIMIT_BYTES as usize / PART_BYTES;
            let mut query = cmd("DEL");
            for part in 1..others {
                query.arg(self.name_of(id, part));
            }
            query.query::<u32>(connection)?;
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

fn is_late(error: &RedisError) -> bool {
    error.is_timeout()
}

fn miss_of(error: &RedisError, deadline: Deadline) -> Miss {
    match is_late(error) {
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
            let answer: Result<Vec<bool>, _> =
                self.with(deadline, |connection| query.query(connection));
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
        let was_there = self.delete(&id, deadline).map_err(|e| unavailable(&e))?;
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
