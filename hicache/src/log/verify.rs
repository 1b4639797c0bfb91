//! Looking at every byte of a directory without changing one.

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use kvgate_kvcache::LayerId;
use kvgate_kvcache::schema::Component;

use super::manifest::{MANIFEST_DRAFT_NAME, MANIFEST_NAME, Manifest, ManifestSegment};
use super::medium::{LOCK_NAME, Medium, MediumFile, read_exact_at};
use super::open::{Files, Mode, files_of, io_error, lock, was_never_synced};
use super::scan::{self, Bad, Step};
use super::segment::{
    Entry, SegmentId, check_header_page, entries_crc, index_bytes, is_gapless, read_index,
};
use crate::error::Error;
use crate::miss::Miss;
use crate::record::{PAGE_BYTES, RecordId};

/// Something that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The file.
    pub file: String,
    /// Where in it, in bytes.
    pub offset_bytes: u64,
    /// The record that the place belongs to, if it still says which.
    pub record: Option<RecordId>,
    /// The component and the layer, if it is the bytes of one.
    pub component: Option<(Component, LayerId)>,
    /// What is wrong.
    pub reason: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}", self.file, self.offset_bytes)?;
        if let Some(record) = &self.record {
            write!(f, ", record {record}")?;
        }
        if let Some((component, layer)) = &self.component {
            write!(f, ", {component} of layer {layer}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// What a look at a directory has given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Segments looked at.
    pub segment_count: u64,
    /// Committed, whole records, removals included.
    pub record_count: u64,
    /// Bytes of all files of the log.
    pub file_bytes: u64,
    /// Whether the log was closed.
    pub was_closed: bool,
    /// Bytes that a crash has left of what was not synced. Not a fault.
    pub tail_bytes: u64,
    /// What is wrong.
    pub findings: Vec<Finding>,
}

impl VerifyReport {
    fn push(&mut self, file: &str, offset_bytes: u64, reason: impl Into<String>) {
        self.findings.push(Finding {
            file: file.to_owned(),
            offset_bytes,
            record: None,
            component: None,
            reason: reason.into(),
        });
    }
}

/// Verifies every byte of every file in a directory. Changes nothing.
///
/// # Errors
/// `Locked` when another one has the directory open; `Io`.
pub fn verify(medium: &dyn Medium) -> Result<VerifyReport, Error> {
    let (_lock, _) = lock(medium, Mode::ReadOnly)?;
    let files = files_of(medium).map_err(|error| io_error(medium, "list", error))?;
    let mut report = VerifyReport::default();
    for name in &files.foreign {
        report.push(name, 0, "not a file of this log");
    }
    if let Some(bytes) = files.lock_bytes.filter(|bytes| *bytes > 0) {
        report.push(
            LOCK_NAME,
            0,
            format!("{bytes} bytes in a file that is empty"),
        );
    }
    let manifest = match Manifest::load(medium) {
        Ok(manifest) => manifest,
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            report.push(MANIFEST_NAME, 0, error.to_string());
            None
        }
        Err(error) => return Err(io_error(medium, "read the manifest of", error)),
    };
    report.was_closed = manifest.is_some();
    match files.draft_bytes {
        // The close was cut off.
        Some(bytes) if manifest.is_none() => report.tail_bytes += bytes,
        Some(_) => report.push(MANIFEST_DRAFT_NAME, 0, "a second manifest"),
        None => {}
    }
    report.segment_count = files.segments.len() as u64;
    verify_list(&files, manifest.as_ref(), &mut report);
    let sealed = sealed_segments(medium, &files);
    for (&id, &len_bytes) in &files.segments {
        report.file_bytes += len_bytes;
        let told = manifest.as_ref().and_then(|manifest| {
            let segments = &manifest.segments;
            segments.iter().find(|segment| segment.id == id).copied()
        });
        let look = Look {
            id,
            name: id.file_name(),
            len_bytes,
            told,
            may_have_tail: manifest.is_none() && !sealed.contains_key(&id),
        };
        if let Some(&bytes) = sealed.get(&id).filter(|bytes| **bytes != len_bytes) {
            let reason = format!("{len_bytes} bytes, sealed with {bytes}");
            report.push(&look.name, len_bytes.min(bytes), reason);
        }
        let outcome = medium
            .open(&look.name, false)
            .and_then(|file| look.segment(&*file, &mut report));
        if let Err(error) = outcome {
            report.push(&look.name, 0, format!("cannot be read: {error}"));
        }
    }
    Ok(report)
}

/// The segments that were sealed, with their lengths, as the one behind each says.
pub(super) fn sealed_segments(medium: &dyn Medium, files: &Files) -> BTreeMap<SegmentId, u64> {
    let mut page = vec![0; PAGE_BYTES as usize];
    let mut before = |id: &SegmentId| {
        let file = medium.open(&id.file_name(), false).ok()?;
        read_exact_at(&*file, &mut page, 0).ok()?;
        check_header_page(*id, &page).ok()?
    };
    files.segments.keys().filter_map(&mut before).collect()
}

/// Which segments there are, against the manifest.
fn verify_list(files: &Files, manifest: Option<&Manifest>, report: &mut VerifyReport) {
    let Some(manifest) = manifest else { return };
    for segment in &manifest.segments {
        let name = segment.id.file_name();
        match files.segments.get(&segment.id) {
            None => report.push(&name, 0, "the segment is missing"),
            Some(&found) if found != segment.len_bytes => {
                let reason = format!("{found} bytes, closed with {}", segment.len_bytes);
                report.push(&name, found.min(segment.len_bytes), reason);
            }
            Some(_) => {}
        }
    }
    for id in files.segments.keys() {
        if !manifest.segments.iter().any(|segment| segment.id == *id) {
            report.push(&id.file_name(), 0, "the manifest does not know the segment");
        }
    }
}

struct Look {
    id: SegmentId,
    name: String,
    len_bytes: u64,
    told: Option<ManifestSegment>,
    /// Whether a crash may have left something behind the last record.
    may_have_tail: bool,
}

impl Look {
    fn segment(&self, file: &dyn MediumFile, report: &mut VerifyReport) -> io::Result<()> {
        let mut page = vec![0; self.len_bytes.min(PAGE_BYTES) as usize];
        read_exact_at(file, &mut page, 0)?;
        let header = check_header_page(self.id, &page);
        if self.may_have_tail
            && was_never_synced(&page, self.len_bytes, &header)
            && !scan::any_record_behind(file, 0, self.len_bytes)?
        {
            report.tail_bytes += self.len_bytes;
            return Ok(());
        }
        match header {
            Ok(_) => {}
            // What the bytes of another version mean is not known here.
            Err(Miss::Version { found }) if !self.may_have_tail && self.told.is_none() => {
                report.push(
                    &self.name,
                    8,
                    format!("format version {found} is not known"),
                );
                return Ok(());
            }
            Err(miss) => report.push(&self.name, 0, miss.to_string()),
        }
        let index = read_index(self.id, file, self.len_bytes)?;
        let told_end = self.told.and_then(|told| {
            let index = index_bytes(told.entry_count as usize);
            told.len_bytes.checked_sub(index)
        });
        let end_bytes = match (&index, told_end) {
            (Some((_, end_bytes)), _) => *end_bytes,
            (None, Some(end_bytes)) => end_bytes.min(self.len_bytes),
            (None, None) => self.len_bytes,
        };
        let found = self.records(file, end_bytes, index.is_some(), report)?;
        self.compare(index, &found, end_bytes, report);
        Ok(())
    }

    /// Every record up to `end_bytes`.
    fn records(
        &self,
        file: &dyn MediumFile,
        end_bytes: u64,
        has_index: bool,
        report: &mut VerifyReport,
    ) -> io::Result<Vec<Entry>> {
        let mut found = Vec::new();
        let mut at = PAGE_BYTES;
        loop {
            match scan::step(file, at, end_bytes)? {
                Step::End => return Ok(found),
                Step::Record(entry, _) => {
                    at = entry.end_bytes();
                    report.record_count += 1;
                    found.push(entry);
                }
                Step::Bad(bad) => {
                    let is_tail = self.may_have_tail
                        && !has_index
                        && bad.is_torn
                        && !scan::is_damage(file, at, end_bytes, &bad)?;
                    if is_tail {
                        report.tail_bytes += end_bytes - at;
                        return Ok(found);
                    }
                    report.findings.push(self.finding(at, &bad));
                    at = self.behind(file, at, end_bytes, &bad)?;
                }
            }
        }
    }

    fn finding(&self, at: u64, bad: &Bad) -> Finding {
        let head = bad.head.as_ref();
        let (component, offset_bytes) = match (&bad.miss, head) {
            (Miss::Checksum { component, layer }, Some(head)) => {
                let is_it = |part: &&crate::record::HeadPart| {
                    part.part.component == *component && part.part.layer == *layer
                };
                let part = head.parts.iter().find(is_it);
                let inside = part.map_or(0, |part| head.header_bytes + part.part.offset_bytes);
                (Some((*component, *layer)), at + inside)
            }
            (Miss::Padding { offset_bytes }, _) => (None, at + offset_bytes),
            _ => (None, at),
        };
        Finding {
            file: self.name.clone(),
            offset_bytes,
            record: head.map(|head| head.id),
            component,
            reason: bad.miss.to_string(),
        }
    }

    /// Where the next record may begin behind a bad one.
    fn behind(&self, file: &dyn MediumFile, at: u64, end_bytes: u64, bad: &Bad) -> io::Result<u64> {
        if let Some(head) = &bad.head {
            return Ok(at + head.record_bytes);
        }
        let mut next = at + PAGE_BYTES;
        while next < end_bytes {
            if let Step::Record(..) = scan::step(file, next, end_bytes)? {
                return Ok(next);
            }
            next += PAGE_BYTES;
        }
        Ok(end_bytes)
    }

    /// The index against the records, and both against the manifest.
    fn compare(
        &self,
        index: Option<(Vec<Entry>, u64)>,
        found: &[Entry],
        end_bytes: u64,
        report: &mut VerifyReport,
    ) {
        let Some((entries, _)) = index else {
            if !self.may_have_tail {
                report.push(&self.name, end_bytes, "the index of the segment");
            }
            return;
        };
        if !is_gapless(&entries, end_bytes) {
            report.push(&self.name, end_bytes, "the index contradicts itself");
        }
        for entry in &entries {
            let other = found.iter().find(|f| f.offset_bytes == entry.offset_bytes);
            if other.is_some_and(|other| other != entry) {
                report.findings.push(Finding {
                    file: self.name.clone(),
                    offset_bytes: entry.offset_bytes,
                    record: Some(entry.id),
                    component: None,
                    reason: "another record lies here than the index says".to_owned(),
                });
            }
        }
        let is_as_told = self.told.is_none_or(|told| {
            told.index_crc32c == entries_crc(&entries) && told.entry_count as usize == entries.len()
        });
        if !is_as_told {
            report.push(
                &self.name,
                end_bytes,
                "the index is not the one of the manifest",
            );
        }
    }
}
