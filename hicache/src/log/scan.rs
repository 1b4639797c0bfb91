//! Reading a segment record by record, every byte of each.

use std::io;

use crate::miss::Miss;
use crate::record::{FOOTER_BYTES, Head, PAGE_BYTES, PayloadCheck, check_footer};

use super::medium::{MediumFile, read_exact_at};
use super::segment::{Entry, begins_index, is_blank};

/// Bytes that are read at once.
const CHUNK_BYTES: usize = 1 << 20;

/// What a scan found at one place.
#[derive(Debug)]
pub(crate) enum Step {
    /// A whole, verified record, and the bytes of its segment that had been synced when it was written.
    Record(Entry, u64),
    /// The end of the file.
    End,
    /// Something that is no whole record.
    Bad(Bad),
}

/// Why the record at a place does not exist.
#[derive(Debug)]
pub(crate) struct Bad {
    pub(crate) miss: Miss,
    /// Its header, if that is right.
    pub(crate) head: Option<Head>,
    /// Whether the place can be the rest of a write that a crash cut off: its commit mark is missing, or
    /// a sector of it was never written.
    pub(crate) is_torn: bool,
}

impl Bad {
    fn torn(miss: Miss) -> Step {
        Step::Bad(Bad {
            miss,
            head: None,
            is_torn: true,
        })
    }
}

/// Looks at the record at `offset_bytes` of a file of `len_bytes` bytes.
///
/// # Errors
/// What the device answers.
pub(crate) fn step(file: &dyn MediumFile, offset_bytes: u64, len_bytes: u64) -> io::Result<Step> {
    if offset_bytes >= len_bytes {
        return Ok(Step::End);
    }
    let left_bytes = len_bytes - offset_bytes;
    let short = Miss::Length {
        expected_bytes: PAGE_BYTES,
        found_bytes: left_bytes,
    };
    let mut header = vec![0; left_bytes.min(PAGE_BYTES) as usize];
    read_exact_at(file, &mut header, offset_bytes)?;
    if left_bytes < PAGE_BYTES {
        return Ok(Bad::torn(short));
    }
    let header_bytes = match Head::length_of(&header) {
        Ok(bytes) => bytes,
        Err(miss) => {
            // An index that was not finished begins here, or nothing does.
            let is_torn = begins_index(&header) || has_blank_sector(&header);
            let head = None;
            return Ok(Step::Bad(Bad {
                miss,
                head,
                is_torn,
            }));
        }
    };
    if header_bytes > left_bytes {
        return Ok(Bad::torn(short));
    }
    header.resize(header_bytes as usize, 0);
    read_exact_at(file, &mut header, offset_bytes)?;
    let head = match Head::parse(&header) {
        Ok(head) => head,
        Err(miss) => {
            let is_torn = has_blank_sector(&header);
            let head = None;
            return Ok(Step::Bad(Bad {
                miss,
                head,
                is_torn,
            }));
        }
    };
    if head.record_bytes > left_bytes {
        return Ok(Bad::torn(Miss::Length {
            expected_bytes: head.record_bytes,
            found_bytes: left_bytes,
        }));
    }
    body(file, offset_bytes, head)
}

/// The rest of a record whose header is right.
fn body(file: &dyn MediumFile, offset_bytes: u64, head: Head) -> io::Result<Step> {
    let mut check = PayloadCheck::new(&head);
    let mut found: Result<(), Miss> = Ok(());
    let mut has_blank = false;
    let mut at = head.header_bytes;
    let payload_end = head.header_bytes + head.payload_bytes;
    let mut chunk = vec![0; CHUNK_BYTES.min(head.payload_bytes as usize)];
    while at < payload_end {
        let count = (payload_end - at).min(chunk.len() as u64) as usize;
        read_exact_at(file, &mut chunk[..count], offset_bytes + at)?;
        found = found.and_then(|()| check.update(&chunk[..count]));
        has_blank |= found.is_err() && has_blank_sector(&chunk[..count]);
        at += count as u64;
    }
    let mut tail = vec![0; (head.record_bytes - payload_end) as usize];
    read_exact_at(file, &mut tail, offset_bytes + payload_end)?;
    let (zeros, mark) = tail.split_at(tail.len() - FOOTER_BYTES as usize);
    if let Some(index) = crate::record::crc::first_nonzero(zeros) {
        let offset_bytes = payload_end + index as u64;
        found = found.and(Err(Miss::Padding { offset_bytes }));
    }
    let is_committed = check_footer(&head, mark);
    if found.is_ok() && is_committed {
        let entry = Entry::of(&head, offset_bytes);
        return Ok(Step::Record(entry, head.synced_bytes));
    }
    let miss = found.err().unwrap_or(Miss::Commit);
    let is_torn = match is_committed {
        true => has_blank,
        false => is_blank(mark),
    };
    Ok(Step::Bad(Bad {
        miss,
        head: Some(head),
        is_torn,
    }))
}

/// Whether one of the 512-byte sectors is all zeros: what a sector of a growing file holds before it is
/// written.
fn has_blank_sector(bytes: &[u8]) -> bool {
    bytes.chunks(512).any(is_blank)
}

/// Every record from `offset_bytes` on, and what stopped the scan.
///
/// # Errors
/// What the device answers.
pub(crate) fn records(
    file: &dyn MediumFile,
    mut offset_bytes: u64,
    len_bytes: u64,
) -> io::Result<(Vec<Entry>, Option<Bad>)> {
    let mut entries = Vec::new();
    loop {
        match step(file, offset_bytes, len_bytes)? {
            Step::Record(entry, _) => {
                offset_bytes = entry.end_bytes();
                entries.push(entry);
            }
            Step::End => return Ok((entries, None)),
            Step::Bad(bad) => return Ok((entries, Some(bad))),
        }
    }
}

/// Every committed record of a segment, also those behind a place that is damaged.
///
/// # Errors
/// What the device answers.
pub(crate) fn all_records(file: &dyn MediumFile, len_bytes: u64) -> io::Result<Vec<Entry>> {
    match readable_records(file, len_bytes) {
        (entries, None) => Ok(entries),
        (_, Some(error)) => Err(error),
    }
}

/// As [`all_records`], up to the first place that the device cannot read, and what it answers there: a
/// device that breaks is asked no more than once per segment.
pub(crate) fn readable_records(
    file: &dyn MediumFile,
    len_bytes: u64,
) -> (Vec<Entry>, Option<io::Error>) {
    let (mut entries, mut at) = (Vec::new(), PAGE_BYTES);
    loop {
        match step(file, at, len_bytes) {
            Ok(Step::Record(entry, _)) => {
                at = entry.end_bytes();
                entries.push(entry);
            }
            Ok(Step::Bad(_)) => at += PAGE_BYTES,
            Ok(Step::End) => return (entries, None),
            Err(error) => return (entries, Some(error)),
        }
    }
}

/// Whether a committed record begins at a page behind `offset_bytes`.
///
/// # Errors
/// What the device answers.
pub(crate) fn any_record_behind(
    file: &dyn MediumFile,
    offset_bytes: u64,
    len_bytes: u64,
) -> io::Result<bool> {
    let mut at = offset_bytes + PAGE_BYTES;
    while at < len_bytes {
        if let Step::Record(..) = step(file, at, len_bytes)? {
            return Ok(true);
        }
        at += PAGE_BYTES;
    }
    Ok(false)
}

/// Whether the bad place at `offset_bytes` is damage, and not the rest of a group that a crash cut off. The
/// records of a group reach the disk in any order, so a whole one may lie behind a torn one. But the place
/// was whole once if any record behind it was written when the segment had been synced beyond it.
///
/// # Errors
/// What the device answers.
pub(crate) fn is_damage(
    file: &dyn MediumFile,
    offset_bytes: u64,
    len_bytes: u64,
    bad: &Bad,
) -> io::Result<bool> {
    let mut at = offset_bytes + PAGE_BYTES;
    while at < len_bytes {
        match step(file, at, len_bytes)? {
            Step::Record(_, synced_bytes) if synced_bytes > offset_bytes || !bad.is_torn => {
                return Ok(true);
            }
            Step::Record(entry, _) => at = entry.end_bytes(),
            Step::Bad(_) | Step::End => at += PAGE_BYTES,
        }
    }
    Ok(false)
}
