//! Numbers, texts and lists as bytes.

use super::WireError;
use crate::ids::PageId;

/// Longest text, in bytes.
const TEXT_LIMIT_BYTES: usize = 4096;

#[derive(Default)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub(super) fn raw(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.raw(&value.to_le_bytes());
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.raw(&value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.raw(&value.to_le_bytes());
    }

    pub(super) fn u128(&mut self, value: u128) {
        self.raw(&value.to_le_bytes());
    }

    /// A text; what is beyond the limit is cut off at a character.
    pub(super) fn text(&mut self, text: &str) {
        let text = &text[..text.floor_char_boundary(TEXT_LIMIT_BYTES)];
        self.u32(text.len() as u32);
        self.raw(text.as_bytes());
    }

    pub(super) fn list<T>(&mut self, items: &[T], mut write: impl FnMut(&mut Writer, &T)) {
        self.u32(items.len() as u32);
        items.iter().for_each(|item| write(self, item));
    }

    pub(super) fn page(&mut self, page: &PageId) {
        self.u32(page.index);
        self.u32(page.generation);
    }

    /// Fills in the body length and appends the checksum.
    pub(super) fn finish(mut self, head_bytes: usize) -> Vec<u8> {
        let body_bytes = (self.0.len() - head_bytes) as u32;
        self.0[8..12].copy_from_slice(&body_bytes.to_le_bytes());
        let crc = crc32c::crc32c(&self.0);
        self.u32(crc);
        self.0
    }
}

pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader(bytes)
    }

    pub(super) fn array<const N: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<[u8; N], WireError> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(WireError::Field {
            field,
            reason: "cut off",
        })?;
        self.0 = rest;
        Ok(*head)
    }

    pub(super) fn u16(&mut self, field: &'static str) -> Result<u16, WireError> {
        self.array(field).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        self.array(field).map(u64::from_le_bytes)
    }

    pub(super) fn u128(&mut self, field: &'static str) -> Result<u128, WireError> {
        self.array(field).map(u128::from_le_bytes)
    }

    pub(super) fn text(&mut self, field: &'static str) -> Result<String, WireError> {
        let len_bytes = self.u32(field)? as usize;
        if len_bytes > TEXT_LIMIT_BYTES {
            return Err(WireError::Field {
                field,
                reason: "longer than any text",
            });
        }
        let Some((text, rest)) = self.0.split_at_checked(len_bytes) else {
            return Err(WireError::Field {
                field,
                reason: "cut off",
            });
        };
        self.0 = rest;
        let text = std::str::from_utf8(text);
        text.map(str::to_owned).map_err(|_| WireError::Field {
            field,
            reason: "not UTF-8",
        })
    }

    /// A list whose items take at least `item_bytes` each.
    pub(super) fn list<T>(
        &mut self,
        field: &'static str,
        item_bytes: usize,
        mut read: impl FnMut(&mut Reader<'a>) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let count = self.u32(field)? as usize;
        if count > self.0.len() / item_bytes {
            return Err(WireError::Field {
                field,
                reason: "more items than the message can hold",
            });
        }
        (0..count).map(|_| read(self)).collect()
    }

    pub(super) fn page(&mut self, field: &'static str) -> Result<PageId, WireError> {
        Ok(PageId {
            index: self.u32(field)?,
            generation: self.u32(field)?,
        })
    }

    /// Nothing may be left.
    pub(super) fn end(self) -> Result<(), WireError> {
        match self.0.len() {
            0 => Ok(()),
            _ => Err(WireError::Field {
                field: "body",
                reason: "longer than its fields",
            }),
        }
    }
}
