//! [`Intake`]: the only way from stored bytes to a payload.

use std::fmt;

use kvgate_kvcache::identity::{BlockKey, NamespaceDigest};

use super::crc::first_nonzero;
use super::head::PayloadCheck;
use super::{FOOTER_BYTES, Head, RecordId, RecordShape, check_footer};
use crate::miss::Miss;

/// What a reader asks for. All of it is compared with what is found.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The namespace.
    pub namespace: NamespaceDigest,
    /// The name.
    pub id: RecordId,
    /// The key of the block before the block that `id` names.
    pub parent: BlockKey,
    /// Tokens before the block, or before the boundary.
    pub position: u64,
    /// The parts that the schema declares.
    pub shape: &'a RecordShape,
}

/// The payload of a whole, verified record. Made by [`Intake::finish`] only, and it keeps the borrow of the
/// buffer that the payload came into: nobody can change a byte of it while the proof lives.
#[must_use = "it is the payload that was verified"]
pub struct Verified<'b> {
    id: RecordId,
    payload: &'b [u8],
}

impl<'b> Verified<'b> {
    /// The record.
    pub fn id(&self) -> RecordId {
        self.id
    }

    /// Its payload, laid out as the parts of its shape say.
    pub fn payload(&self) -> &'b [u8] {
        self.payload
    }

    /// Bytes of its payload.
    pub fn payload_bytes(&self) -> u64 {
        self.payload.len() as u64
    }
}

impl fmt::Debug for Verified<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verified")
            .field("id", &self.id)
            .field("payload_bytes", &self.payload_bytes())
            .finish()
    }
}

/// Takes the bytes of a record from the first to the last and verifies each.
///
/// Ask for [`Intake::space`], put the next bytes of the record there, report them with
/// [`Intake::filled`]; repeat until the space is empty, then [`Intake::finish`]. The payload goes
/// straight into the caller's buffer. Whatever has gone wrong once stays wrong.
///
/// The proof comes from here and has no constructor:
/// ```
/// use kvgate_hicache::Miss;
/// use kvgate_hicache::record::{Intake, Verified};
/// fn proof<'b>(intake: Intake<'_, 'b>) -> Result<Verified<'b>, Miss> {
///     intake.finish()
/// }
/// ```
/// ```compile_fail,E0451
/// use kvgate_hicache::record::{RecordId, Verified};
/// fn forged(id: RecordId, payload: &[u8]) -> Verified<'_> {
///     Verified { id, payload }
/// }
/// ```
/// It speaks for the bytes that were verified and for no others: the buffer stays as it is until the proof
/// is gone.
/// ```compile_fail,E0506
/// use kvgate_hicache::Miss;
/// use kvgate_hicache::record::{Intake, Wanted};
/// fn changed(wanted: Wanted<'_>, record: &[u8], into: &mut [u8]) -> Result<u8, Miss> {
///     let verified = Intake::of_bytes(wanted, record, into)?;
///     into[0] = 0;
///     Ok(verified.payload()[0])
/// }
/// ```
#[derive(Debug)]
pub struct Intake<'w, 'b> {
    wanted: Wanted<'w>,
    into: &'b mut [u8],
    header: Vec<u8>,
    tail: Vec<u8>,
    head: Option<Head>,
    check: Option<PayloadCheck>,
    /// Bytes of the record so far.
    at: usize,
    failed: Option<Miss>,
}

impl<'w, 'b> Intake<'w, 'b> {
    /// For one record; its payload goes into `into`.
    ///
    /// # Panics
    /// If `into` has not [`RecordShape::payload_bytes`] bytes.
    pub fn new(wanted: Wanted<'w>, into: &'b mut [u8]) -> Intake<'w, 'b> {
        let shape = wanted.shape;
        assert_eq!(
            into.len() as u64,
            shape.payload_bytes(),
            "bytes of the payload"
        );
        let tail_bytes = shape.record_bytes() - shape.header_bytes() - shape.payload_bytes();
        Intake {
            wanted,
            into,
            header: vec![0; shape.header_bytes() as usize],
            tail: vec![0; tail_bytes as usize],
            head: None,
            check: None,
            at: 0,
            failed: None,
        }
    }

    /// Bytes of the whole record. Fewer or more in the store are [`Miss::Length`].
    pub fn record_bytes(&self) -> u64 {
        (self.header.len() + self.into.len() + self.tail.len()) as u64
    }

    /// Checks the length of what is stored before any of it is read.
    ///
    /// # Errors
    /// `Length`.
    pub fn check_length(&self, found_bytes: u64) -> Result<(), Miss> {
        let expected_bytes = self.record_bytes();
        match found_bytes == expected_bytes {
            true => Ok(()),
            false => Err(Miss::Length {
                expected_bytes,
                found_bytes,
            }),
        }
    }

    /// Where the next bytes of the record go, at most `limit_bytes`; empty at its end.
    pub fn space(&mut self, limit_bytes: usize) -> &mut [u8] {
        let (header, payload) = (self.header.len(), self.into.len());
        let space = match self.at {
            at if at < header => &mut self.header[at..],
            at if at < header + payload => &mut self.into[at - header..],
            at => &mut self.tail[at - header - payload..],
        };
        let bytes = space.len().min(limit_bytes);
        &mut space[..bytes]
    }

    /// Says that `bytes` bytes of the space are filled, and verifies them.
    ///
    /// # Errors
    /// What is wrong with the record.
    ///
    /// # Panics
    /// If the space was shorter.
    pub fn filled(&mut self, bytes: usize) -> Result<(), Miss> {
        if let Some(miss) = &self.failed {
            self.at += bytes;
            return Err(miss.clone());
        }
        let outcome = self.advance(bytes);
        self.failed = outcome.clone().err();
        outcome
    }

    fn advance(&mut self, bytes: usize) -> Result<(), Miss> {
        let (header, payload) = (self.header.len(), self.into.len());
        let start = self.at;
        let end = start + bytes;
        let section_end = match start {
            at if at < header => header,
            at if at < header + payload => header + payload,
            _ => header + payload + self.tail.len(),
        };
        assert!(end <= section_end, "more bytes than there was space for");
        self.at = end;
        if end == header && start < header {
            let head = Head::parse(&self.header)?;
            head.matches(&self.wanted)?;
            self.check = Some(PayloadCheck::new(&head));
            self.head = Some(head);
        }
        if start >= header && start < header + payload {
            let check = self.check.as_mut().ok_or(Miss::Header {
                reason: "not read yet",
            })?;
            check.update(&self.into[start - header..end - header])?;
        }
        Ok(())
    }

    /// The proof, if every byte was there and right.
    ///
    /// # Errors
    /// What is wrong with the record.
    pub fn finish(self) -> Result<Verified<'b>, Miss> {
        if let Some(miss) = self.failed {
            return Err(miss);
        }
        let expected_bytes = (self.header.len() + self.into.len() + self.tail.len()) as u64;
        let (Some(head), Some(check)) = (self.head, self.check) else {
            return Err(Miss::Length {
                expected_bytes,
                found_bytes: self.at as u64,
            });
        };
        if self.at as u64 != expected_bytes || !check.is_complete() {
            return Err(Miss::Length {
                expected_bytes,
                found_bytes: self.at as u64,
            });
        }
        let (zeros, mark) = self.tail.split_at(self.tail.len() - FOOTER_BYTES as usize);
        if let Some(index) = first_nonzero(zeros) {
            let offset_bytes = head.header_bytes + head.payload_bytes + index as u64;
            return Err(Miss::Padding { offset_bytes });
        }
        if !check_footer(&head, mark) {
            return Err(Miss::Commit);
        }
        Ok(Verified {
            id: head.id,
            payload: self.into,
        })
    }

    /// Verifies a record that memory keeps without the zeros of its format, copying its payload.
    ///
    /// # Errors
    /// What is wrong with it.
    ///
    /// # Panics
    /// If `into` has not the payload's length.
    #[cfg(not(kv_loom))]
    pub(super) fn of_packed(
        wanted: Wanted<'w>,
        packed: &super::packed::Sections<'_>,
        into: &'b mut [u8],
    ) -> Result<Verified<'b>, Miss> {
        let shape = wanted.shape;
        let (expected_bytes, found_bytes) = (shape.record_bytes(), packed.record_bytes);
        assert_eq!(
            into.len() as u64,
            shape.payload_bytes(),
            "bytes of the payload"
        );
        if found_bytes != expected_bytes {
            return Err(Miss::Length {
                expected_bytes,
                found_bytes,
            });
        }
        let head = Head::parse_used(packed.used, packed.header_bytes, packed.header_crc32c)?;
        head.matches(&wanted)?;
        let mut check = PayloadCheck::new(&head);
        // As long as its table says, which is that of the shape, or this is no record.
        if packed.payload.len() != into.len() {
            return Err(Miss::Header {
                reason: "its payload is not that of its table",
            });
        }
        let pieces = packed.payload.chunks(super::crc::PIECE_BYTES);
        for (to, from) in into.chunks_mut(super::crc::PIECE_BYTES).zip(pieces) {
            to.copy_from_slice(from);
            check.update(to)?;
        }
        if !check.is_complete() || !check_footer(&head, packed.mark) {
            return Err(Miss::Commit);
        }
        Ok(Verified {
            id: head.id,
            payload: into,
        })
    }

    /// Verifies a record that lies in memory, copying its payload.
    ///
    /// # Errors
    /// What is wrong with the record.
    pub fn of_bytes(
        wanted: Wanted<'w>,
        record: &[u8],
        into: &'b mut [u8],
    ) -> Result<Verified<'b>, Miss> {
        let mut intake = Intake::new(wanted, into);
        intake.check_length(record.len() as u64)?;
        intake.feed(record)?;
        intake.finish()
    }

    /// Takes the next bytes of the record from memory and verifies them while they are in the cache.
    ///
    /// # Errors
    /// What is wrong with the record.
    ///
    /// # Panics
    /// If they are more than the record has left.
    pub(crate) fn feed(&mut self, mut bytes: &[u8]) -> Result<(), Miss> {
        while !bytes.is_empty() {
            let space = self.space(super::crc::PIECE_BYTES.min(bytes.len()));
            let count = space.len();
            assert!(count > 0, "more bytes than there was space for");
            let (piece, behind) = bytes.split_at(count);
            space.copy_from_slice(piece);
            bytes = behind;
            self.filled(count)?;
        }
        Ok(())
    }
}
