//! Appending in groups: whoever finds nobody writing writes for all who wait.

use std::io;

use kvgate_kvcache::identity::NamespaceDigest;
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::{MutexGuard, Ordering::Relaxed};

use super::state::{Place, State};
use super::writer::Writer;
use super::{Durability, SegmentLog};
use crate::error::{Error, ErrorKind};
use crate::record::{FOOTER_BYTES, Head, Record, RecordId, write_footer};

use super::segment::{Entry, SegmentId};

/// A record that waits to be written.
pub(crate) struct Pending {
    pub(crate) ticket: u64,
    pub(crate) bytes: Vec<u8>,
    /// Its place in the segment is filled in by the writer.
    pub(crate) entry: Entry,
}

/// Why a record of a group was not stored; shared by several waiters.
#[derive(Clone, Debug)]
pub(crate) enum GroupError {
    Io {
        action: &'static str,
        kind: io::ErrorKind,
        code: Option<i32>,
    },
    Full {
        needed_bytes: u64,
        capacity_bytes: u64,
    },
}

impl GroupError {
    pub(crate) fn io(action: &'static str, error: &io::Error) -> GroupError {
        GroupError::Io {
            action,
            kind: error.kind(),
            code: error.raw_os_error(),
        }
    }

    pub(crate) fn into_error(self, log: &SegmentLog) -> Error {
        Error::new(match self {
            GroupError::Io { action, kind, code } => ErrorKind::Io {
                action,
                path: log.medium.path(),
                source: code.map_or(io::Error::from(kind), io::Error::from_raw_os_error),
            },
            GroupError::Full {
                needed_bytes,
                capacity_bytes,
            } => ErrorKind::Full {
                needed_bytes,
                capacity_bytes,
            },
        })
    }
}

/// What became of a record that was to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// It is stored, as durably as the log is configured.
    Written,
    /// A record of that name was there; nothing was written.
    Present,
}

/// Kept by whoever has taken the writer out. If it is dropped before the writer is back, by a panic, nobody knows what is
/// on the disk behind the last group: nothing more is written, and whoever waits hears why.
pub(crate) struct Turn<'a> {
    log: &'a SegmentLog,
    is_over: bool,
}

impl Turn<'_> {
    pub(crate) fn of(log: &SegmentLog) -> Turn<'_> {
        let is_over = false;
        Turn { log, is_over }
    }

    /// The writer is back; called under the lock that guards it.
    pub(crate) fn over(mut self) {
        self.is_over = true;
        self.log.turn.notify_all();
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.log.state.lock().read_only = Some("a writer panicked".to_owned());
            self.log.turn.notify_all();
        }
    }
}

impl SegmentLog {
    /// Stores a record. Comes back when it is as durable as configured.
    ///
    /// # Errors
    /// `Full`, `Io`, `ReadOnly`, and `Late` when `deadline` has passed before the record's turn, or passes
    /// while another one writes for the group: the record may be stored or not then.
    ///
    /// # Panics
    /// If the payload has not the length of the shape.
    pub fn append(&self, record: &Record<'_>, deadline: Deadline) -> Result<Stored, Error> {
        let Some((bytes, entry)) = self.encode_new(record)? else {
            return Ok(Stored::Present);
        };
        self.put(bytes, entry, deadline)?;
        Ok(Stored::Written)
    }

    /// Stores several records, one behind the other and with one sync as far as a group has room for
    /// them. Answers for each what [`SegmentLog::append`] would.
    ///
    /// # Panics
    /// If a payload has not the length of its shape.
    pub fn append_all(
        &self,
        records: &[Record<'_>],
        deadline: Deadline,
    ) -> Vec<Result<Stored, Error>> {
        let encoded: Vec<_> = records.iter().map(|r| self.encode_new(r)).collect();
        let mut state = self.state.lock();
        let tickets: Vec<Result<Option<u64>, Error>> = encoded
            .into_iter()
            .map(|encoded| Ok(encoded?.map(|(bytes, entry)| state.enqueue(bytes, entry))))
            .collect();
        drop(state);
        let wait = |ticket: Result<Option<u64>, Error>| match ticket? {
            None => Ok(Stored::Present),
            Some(ticket) => {
                self.wait_for(self.state.lock(), ticket, deadline)?;
                Ok(Stored::Written)
            }
        };
        tickets.into_iter().map(wait).collect()
    }

    /// The bytes of a record and what the index will say of it; `None` if it is there already.
    fn encode_new(&self, record: &Record<'_>) -> Result<Option<(Vec<u8>, Entry)>, Error> {
        if self.answer_present(&record.id)? {
            return Ok(None);
        }
        let sequence = self.next_sequence.fetch_add(1, Relaxed);
        let bytes = record.to_bytes(sequence);
        let head = Head::parse(&bytes[..record.shape.header_bytes() as usize])
            .expect("I-18: what was just encoded has a header");
        Ok(Some((bytes, Entry::of(&head, 0))))
    }

    /// Stores the bytes of a record that was verified before.
    pub(crate) fn append_bytes(
        &self,
        bytes: Vec<u8>,
        entry: Entry,
        deadline: Deadline,
    ) -> Result<Stored, Error> {
        if self.answer_present(&entry.id)? {
            return Ok(Stored::Present);
        }
        self.put(bytes, entry, deadline)?;
        Ok(Stored::Written)
    }

    /// Removes a record. Comes back when the removal is as durable as configured; readers that have begun
    /// go on. Answers whether it was there.
    ///
    /// # Errors
    /// As [`SegmentLog::append`]. The record is not found any more after that, but it may be back when the
    /// log is opened again: the removal is owed, and asking once more writes it.
    pub fn remove(
        &self,
        namespace: NamespaceDigest,
        id: RecordId,
        deadline: Deadline,
    ) -> Result<bool, Error> {
        let sequence = self.next_sequence.fetch_add(1, Relaxed);
        let mut head = Head::removal(namespace, id, sequence);
        let mut bytes = vec![0; head.record_bytes as usize];
        let (header, tail) = bytes.split_at_mut(head.header_bytes as usize);
        head.header_crc32c = head.write(header);
        debug_assert_eq!(tail.len() as u64, FOOTER_BYTES);
        write_footer(&id, sequence, head.record_bytes, head.header_crc32c, tail);
        let mut state = self.state.lock();
        self.check_writable(&state)?;
        // The index first: nobody finds it from now on. And in one go with the place in the queue: who
        // stores it anew stores it behind the removal.
        if let Some(place) = state.index.remove(&id) {
            state.owed_removals.insert(id, place.segment);
            state.stats.removed_count += 1;
        } else if state.survivors.remove(&id) || state.forget_writing(&id) {
            // It is being written, in a segment that is not known yet.
            state.owed_removals.insert(id, SegmentId(u32::MAX));
            state.stats.removed_count += 1;
        } else if !state.owed_removals.contains_key(&id) {
            return Ok(false);
        }
        let ticket = state.enqueue(bytes, Entry::of(&head, 0));
        self.wait_for(state, ticket, deadline)?;
        Ok(true)
    }

    fn check_writable(&self, state: &State) -> Result<(), Error> {
        match &state.read_only {
            Some(reason) => Err(Error::new(ErrorKind::ReadOnly {
                reason: reason.clone(),
            })),
            None => Ok(()),
        }
    }

    fn answer_present(&self, id: &RecordId) -> Result<bool, Error> {
        let mut state = self.state.lock();
        self.check_writable(&state)?;
        let is_present = state.index.contains(id);
        state.stats.duplicate_count += u64::from(is_present);
        Ok(is_present)
    }

    /// Queues the record and waits for its group, leading one if nobody does.
    fn put(&self, bytes: Vec<u8>, entry: Entry, deadline: Deadline) -> Result<(), Error> {
        let mut state = self.state.lock();
        self.check_writable(&state)?;
        let ticket = state.enqueue(bytes, entry);
        if state.gathering.is_enough(state.queue.len()) {
            self.turn.notify_all();
        }
        self.wait_for(state, ticket, deadline)
    }

    /// Waits for the group of a record that is in the queue, leading one if nobody does. Behind the deadline
    /// no group is begun; the one that is being led goes on until the disk has answered.
    fn wait_for<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        ticket: u64,
        deadline: Deadline,
    ) -> Result<(), Error> {
        loop {
            if let Some(result) = state.results.remove(&ticket) {
                drop(state);
                return result.map_err(|error| error.into_error(self));
            }
            if let Err(error) = self.check_writable(&state) {
                return self.give_up(state, ticket, error);
            }
            if deadline.has_passed() {
                return self.give_up(state, ticket, late(deadline));
            }
            let put_off = match &state.writer {
                Some(_) => state.put_off_group(&self.config),
                None => None,
            };
            if let Some(until) = put_off {
                let until = deadline.instant().min(until);
                let _told_or_over = self.turn.wait_until(&mut state, until);
            } else if let Some(writer) = state.writer.take() {
                state = self.lead(state, writer);
            } else if self.turn.wait_until(&mut state, deadline.instant()) {
                return self.give_up(state, ticket, late(deadline));
            }
        }
    }

    /// The deadline has passed, or nothing is written any more. What is still in the queue is taken out again; what is
    /// being written goes on without a waiter.
    fn give_up(
        &self,
        mut state: MutexGuard<'_, State>,
        ticket: u64,
        error: Error,
    ) -> Result<(), Error> {
        if let Some(result) = state.results.remove(&ticket) {
            drop(state);
            return result.map_err(|error| error.into_error(self));
        }
        let before = state.queue.len();
        state.queue.retain(|pending| pending.ticket != ticket);
        if state.queue.len() == before {
            state.abandoned.insert(ticket);
        }
        state.stats.failed_count += 1;
        Err(error)
    }

    /// Writes one group and gives the right to append back.
    fn lead<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        mut writer: Writer,
    ) -> MutexGuard<'a, State> {
        let turn = Turn::of(self);
        let group = self.next_group(&mut state);
        drop(state);
        let outcomes = self.write_group(&mut writer, group);
        let mut state = self.state.lock();
        let written = std::mem::take(&mut state.writing);
        state.stats.group_count += 1;
        let sync_time = std::mem::take(&mut writer.sync_time);
        state.gathering.note_group(outcomes.len(), sync_time);
        // In the order in which they lie on the disk: the index is then what the next open finds.
        for (ticket, entry, mut outcome) in outcomes {
            match &outcome {
                Ok(_) if entry.is_removal => {
                    state.index.remove(&entry.id);
                    state.owed_removals.remove(&entry.id);
                }
                // The group itself had no room for it any more.
                Ok(segment) if !state.segments.contains_key(segment) => {
                    state.stats.failed_count += 1;
                    outcome = Err(GroupError::Full {
                        needed_bytes: entry.record_bytes,
                        capacity_bytes: self.config.capacity_bytes,
                    });
                }
                Ok(segment) if written.get(&entry.id) == Some(&true) => {
                    state.stats.stored_count += 1;
                    state.owed_removals.insert(entry.id, *segment);
                }
                Ok(segment) => {
                    state.stats.stored_count += 1;
                    state.index.insert(entry.id, Place::of(*segment, &entry));
                    state.owed_removals.remove(&entry.id);
                }
                Err(_) => state.stats.failed_count += 1,
            }
            if !state.abandoned.remove(&ticket) {
                state.results.insert(ticket, outcome.map(|_| ()));
            }
        }
        state.writer = Some(writer);
        turn.over();
        state
    }

    fn next_group(&self, state: &mut State) -> Vec<Pending> {
        let mut group = Vec::new();
        let mut bytes = 0;
        let limit_bytes = match self.config.durability {
            Durability::Strict => 1,
            // A longer group would evict what it has just written.
            Durability::None | Durability::Batch => {
                self.config.group_bytes.min(self.config.segment_bytes)
            }
        };
        while bytes < limit_bytes {
            let Some(pending) = state.queue.pop_front() else {
                break;
            };
            bytes += pending.bytes.len() as u64;
            if !pending.entry.is_removal {
                state.writing.insert(pending.entry.id, false);
            }
            group.push(pending);
        }
        group
    }
}

fn late(deadline: Deadline) -> Error {
    Error::new(ErrorKind::Late {
        deadline_ms: deadline.allowed_ms(),
    })
}
