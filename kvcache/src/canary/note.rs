//! The records as bytes: the note that travels with the arrival of a transfer.

use std::fmt;
use std::ops::Range;

use bytes::{BufMut, Bytes, BytesMut};

use crate::ids::Room;
use crate::schema::PoolIndex;

/// Bytes of one record.
const RECORD_BYTES: usize = 32;

/// Where the rows of one page came from, as the sender says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provenance {
    /// The row of the schema: which component of which layer.
    pub pool: PoolIndex,
    /// Physical page in the receiver's pool.
    pub page: u32,
    /// The tenancy of the receiver's slot that the rows are for.
    pub generation: u32,
    /// The request.
    pub room: Room,
    /// The entries (token positions, or compressed entries) whose rows are valid.
    pub entries: Range<u32>,
    /// CRC-32C over these rows.
    pub checksum: u32,
}

/// A note that is not a list of records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoteError {
    /// Bytes of the note.
    pub len_bytes: usize,
    /// What is wrong.
    pub reason: &'static str,
}

impl fmt::Display for NoteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "provenance note of {} bytes: {}",
            self.len_bytes, self.reason
        )
    }
}

impl std::error::Error for NoteError {}

impl Provenance {
    /// Records as a note: little-endian, 32 bytes each, in order.
    pub fn encode(records: &[Provenance]) -> Bytes {
        let mut note = BytesMut::with_capacity(records.len() * RECORD_BYTES);
        for record in records {
            note.put_u32_le(record.pool.0);
            note.put_u32_le(record.page);
            note.put_u32_le(record.generation);
            note.put_u64_le(record.room.0);
            note.put_u32_le(record.entries.start);
            note.put_u32_le(record.entries.end);
            note.put_u32_le(record.checksum);
        }
        note.freeze()
    }

    /// The records of a note.
    ///
    /// # Errors
    /// [`NoteError`] when the length is no multiple of a record or an entry range is reversed.
    pub fn decode(note: &[u8]) -> Result<Vec<Provenance>, NoteError> {
        let error = |reason| NoteError {
            len_bytes: note.len(),
            reason,
        };
        let (records, rest) = note.as_chunks::<RECORD_BYTES>();
        if !rest.is_empty() {
            return Err(error("not a whole number of records"));
        }
        let decode_one = |record: &[u8; RECORD_BYTES]| {
            let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| record[at + i]));
            let entries = word(20)..word(24);
            if entries.start > entries.end {
                return Err(error("an entry range ends before it starts"));
            }
            Ok(Provenance {
                pool: PoolIndex(word(0)),
                page: word(4),
                generation: word(8),
                room: Room(u64::from(word(12)) | u64::from(word(16)) << 32),
                entries,
                checksum: word(28),
            })
        };
        records.iter().map(decode_one).collect()
    }
}

#[cfg(all(test, not(kv_loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record() -> impl Strategy<Value = Provenance> {
        let numbers = (
            any::<u32>(),
            any::<u32>(),
            any::<u32>(),
            any::<u64>(),
            any::<u32>(),
            any::<u32>(),
        );
        (numbers, any::<u32>()).prop_map(|((pool, page, generation, room, a, b), checksum)| {
            Provenance {
                pool: PoolIndex(pool),
                page,
                generation,
                room: Room(room),
                entries: a.min(b)..a.max(b),
                checksum,
            }
        })
    }

    proptest! {
        #[test]
        fn a_note_comes_back_as_it_was(records in proptest::collection::vec(record(), 0..9)) {
            let note = Provenance::encode(&records);
            prop_assert_eq!(note.len(), records.len() * RECORD_BYTES);
            prop_assert_eq!(Provenance::decode(&note), Ok(records));
        }

        #[test]
        fn any_bytes_are_records_or_an_error(note in proptest::collection::vec(any::<u8>(), 0..100)) {
            match Provenance::decode(&note) {
                Ok(records) => prop_assert_eq!(records.len() * RECORD_BYTES, note.len()),
                Err(error) => prop_assert_eq!(error.len_bytes, note.len()),
            }
        }
    }
}
