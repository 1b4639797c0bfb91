//! Records in an object store: S3 and what speaks like it, Google Cloud Storage, Azure, a folder.
//!
//! A record is one object, `PREFIX/KIND/KEY`, written whole or not at all. Objects that are shorter, longer,
//! damaged or another record are a miss with a cause; such an object is removed, so that the record can be
//! stored again.
//!
//! The client needs a runtime, which has a thread of its own here and ends with the tier. Whatever a call
//! still does at its deadline is given up there, tries of the client included, and no answer is taken that is
//! longer than a right one.

mod place;
mod worker;

use std::fmt;

use bytes::Bytes;
use futures_util::StreamExt;
use kvgate_kvcache::identity::NamespaceDigest;
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::{Arc, Mutex};
use object_store::path::Path;
use object_store::{
    Error as StoreError, GetResult, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
};

use super::{Presence, Stored, Tier, TierStats};
use crate::error::{Error, ErrorKind};
use crate::miss::Miss;
use crate::record::{Intake, Record, RecordId, Verified, Wanted};
use place::Place;
use worker::Worker;

/// Longest record: far above any model, and a bound on what a store can make us read.
const RECORD_LIMIT_BYTES: u64 = 64 << 20;
/// Records that are asked for at once.
const PROBE_COUNT: usize = 32;
/// Longest reason that is passed on from a store, in characters.
const REASON_CHARS: usize = 300;

/// A tier in an object store.
pub struct ObjectTier {
    worker: Worker,
    place: Place,
    stats: Mutex<TierStats>,
}

/// What a look for an object has found.
enum Fetched {
    Pieces(Vec<Bytes>),
    /// It has so many bytes, which is not right. None of them was taken.
    Length(u64),
}

impl ObjectTier {
    /// A tier at `url`: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`,
    /// `file:///FOLDER`, or `memory://` for the memory of this process. `options` are named as in the crate
    /// `object_store`, for S3 for example `endpoint`, `region`, `access_key_id`, `secret_access_key`, and
    /// `allow_http` for an endpoint without TLS. Nothing is taken from the environment: credentials, or
    /// where to get them, have to be among the options. Connects when it is first asked; see
    /// [`ObjectTier::check`].
    ///
    /// # Errors
    /// `Unavailable` for a URL or an option that is none, for missing credentials, and when there is no
    /// thread to be had.
    pub fn open(url: &str, options: &[(&str, &str)]) -> Result<ObjectTier, Error> {
        let place = place::open(url, options)?;
        let worker = Worker::start().map_err(|error| unavailable(url, error.to_string()))?;
        Ok(ObjectTier {
            worker,
            place,
            stats: Mutex::new(TierStats::default()),
        })
    }

    /// Asks the store whether it is there: its bucket exists, and its credentials may list it.
    ///
    /// # Errors
    /// `Unavailable` with the store's reason; `Late`.
    pub fn check(&self, deadline: Deadline) -> Result<(), Error> {
        let (store, prefix) = (self.place.store.clone(), self.place.prefix.clone());
        let first = self.worker.run(deadline, async move {
            let mut names = store.list(Some(&prefix));
            names.next().await.transpose()
        });
        match first {
            None => Err(late(deadline)),
            Some(Ok(_any)) => Ok(()),
            Some(Err(error)) => Err(self.error_of(&error)),
        }
    }

    fn name_of(&self, id: &RecordId) -> Path {
        let folder = self.place.prefix.clone();
        folder.join(id.kind.to_string()).join(id.key.to_string())
    }

    fn fetch<'b>(
        &self,
        wanted: Wanted<'_>,
        into: &'b mut [u8],
        deadline: Deadline,
    ) -> Result<Verified<'b>, Miss> {
        let mut intake = Intake::new(wanted, into);
        let record_bytes = intake.record_bytes();
        let (store, name) = (self.place.store.clone(), self.name_of(&wanted.id));
        let fetched = self.worker.run(deadline, async move {
            take(store.get(&name).await?, record_bytes).await
        });
        let pieces = match fetched {
            None => {
                return Err(Miss::Late {
                    deadline_ms: deadline.allowed_ms(),
                });
            }
            Some(Err(error)) => return Err(self.miss_of(&error)),
            Some(Ok(Fetched::Length(found_bytes))) => {
                intake.check_length(found_bytes)?;
                return Err(Miss::Commit);
            }
            Some(Ok(Fetched::Pieces(pieces))) => pieces,
        };
        intake.check_length(pieces.iter().map(|piece| piece.len() as u64).sum())?;
        for mut rest in pieces.iter().map(|piece| &piece[..]) {
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
        let (store, name) = (self.place.store.clone(), self.name_of(&record.id));
        // A duplicate costs a question, not the record.
        let asked = (store.clone(), name.clone());
        let found = self
            .worker
            .run(deadline, async move { asked.0.head(&asked.1).await });
        let mode = match found {
            None => return Err(late(deadline)),
            Some(Ok(meta)) if meta.size == record_bytes => return Ok(Stored::Present),
            // Something is there that nobody could read.
            Some(Ok(_)) => PutMode::Overwrite,
            Some(Err(StoreError::NotFound { .. })) => PutMode::Create,
            Some(Err(error)) => return Err(self.error_of(&error)),
        };
        let payload = PutPayload::from(record.to_bytes(0));
        let stored = self.worker.run(deadline, async move {
            match put(&*store, &name, payload.clone(), mode).await {
                // A store without conditions: two writers of one name write the same bytes.
                Err(StoreError::NotImplemented { .. } | StoreError::NotSupported { .. }) => {
                    put(&*store, &name, payload, PutMode::Overwrite).await
                }
                done => done,
            }
        });
        match stored {
            None => Err(late(deadline)),
            Some(Ok(())) => Ok(Stored::Written),
            Some(Err(StoreError::AlreadyExists { .. })) => Ok(Stored::Present),
            Some(Err(error)) => Err(self.error_of(&error)),
        }
    }

    /// Removes an object; whether it was there.
    fn delete(&self, id: &RecordId, deadline: Deadline) -> Result<bool, Error> {
        let (store, name) = (self.place.store.clone(), self.name_of(id));
        let removed = self.worker.run(deadline, async move {
            // Most stores remove what is not there as well.
            store.head(&name).await?;
            store.delete(&name).await
        });
        match removed {
            None => Err(late(deadline)),
            Some(Ok(())) => Ok(true),
            Some(Err(StoreError::NotFound { .. })) => Ok(false),
            Some(Err(error)) => Err(self.error_of(&error)),
        }
    }

    fn error_of(&self, error: &StoreError) -> Error {
        unavailable(&self.place.name, reason_of(error))
    }

    fn miss_of(&self, error: &StoreError) -> Miss {
        let reason = reason_of(error);
        match error {
            StoreError::NotFound { .. } if reason != NO_BUCKET => Miss::Absent,
            _ => Miss::Unavailable { reason },
        }
    }
}

async fn put(
    store: &dyn ObjectStore,
    name: &Path,
    payload: PutPayload,
    mode: PutMode,
) -> object_store::Result<()> {
    let options = PutOptions {
        mode,
        ..PutOptions::default()
    };
    store.put_opts(name, payload, options).await.map(drop)
}

/// Takes an object of `record_bytes` bytes. One that says that it has others is left alone.
async fn take(found: GetResult, record_bytes: u64) -> object_store::Result<Fetched> {
    if found.meta.size != record_bytes {
        return Ok(Fetched::Length(found.meta.size));
    }
    let (mut pieces, mut found_bytes) = (Vec::new(), 0);
    let mut stream = found.into_stream();
    while let Some(piece) = stream.next().await {
        let piece = piece?;
        found_bytes += piece.len() as u64;
        if found_bytes > record_bytes {
            return Ok(Fetched::Length(found_bytes));
        }
        pieces.push(piece);
    }
    Ok(Fetched::Pieces(pieces))
}

/// What is said when the store has no such bucket, whatever it was asked for.
const NO_BUCKET: &str = "the bucket does not exist";

/// Why, in one line. An answer of the store may be part of it, so it is cut.
fn reason_of(error: &StoreError) -> String {
    let text = error.to_string();
    if ["NoSuchBucket", "ContainerNotFound", "bucket does not exist"]
        .iter()
        .any(|word| text.contains(word))
    {
        return NO_BUCKET.to_owned();
    }
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    words.chars().take(REASON_CHARS).collect()
}

fn unavailable(store: &str, reason: String) -> Error {
    Error::new(ErrorKind::Unavailable {
        store: store.to_owned(),
        reason,
    })
}

fn late(deadline: Deadline) -> Error {
    Error::new(ErrorKind::Late {
        deadline_ms: deadline.allowed_ms(),
    })
}

impl Tier for ObjectTier {
    fn name(&self) -> &str {
        "object"
    }

    fn probe(&self, ids: &[RecordId], deadline: Deadline) -> Vec<Presence> {
        let store = self.place.store.clone();
        let names: Vec<Path> = ids.iter().map(|id| self.name_of(id)).collect();
        let answers = Arc::new(Mutex::new(vec![Presence::Unknown; ids.len()]));
        let into = answers.clone();
        let asked = self.worker.run(deadline, async move {
            let mut found = futures_util::stream::iter(names.into_iter().enumerate())
                .map(|(at, name)| {
                    let store = store.clone();
                    async move { (at, store.head(&name).await) }
                })
                .buffer_unordered(PROBE_COUNT);
            while let Some((at, answer)) = found.next().await {
                into.lock()[at] = match answer {
                    Ok(_) => Presence::Present,
                    Err(StoreError::NotFound { .. }) => Presence::Absent,
                    Err(_) => Presence::Unknown,
                };
            }
        });
        // What was not answered in time stays unknown.
        let _all_or_late = asked;
        answers.lock().clone()
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
        let was_there = self.delete(&id, deadline)?;
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

impl fmt::Debug for ObjectTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectTier")
            .field("place", &self.place)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
