//! Which bytes a record has: every component that the schema declares for its kind, in one order.

use kvgate_kvcache::LayerId;
use kvgate_kvcache::identity::BLOCK_TOKENS;
use kvgate_kvcache::layout::RowFormat;
use kvgate_kvcache::schema::{CacheSchema, Component, ComponentRow, LiveRule};

use super::{FOOTER_BYTES, HEAD_FIXED_BYTES, HEAD_PART_BYTES, PAGE_BYTES, RecordKind};
use crate::error::{Error, ErrorKind};

/// Every part begins at a multiple of this, from the start of the payload.
pub const PART_ALIGN_BYTES: u64 = 64;

/// One component of one layer in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The component.
    pub component: Component,
    /// Its layer.
    pub layer: LayerId,
    /// Code of the row format, see [`format_code`].
    pub format: u8,
    /// Whether only the overlap halves of each row are kept.
    pub is_half: bool,
    /// Bytes of one kept row.
    pub row_bytes: u32,
    /// Rows.
    pub row_count: u32,
    /// Where they begin, from the start of the payload.
    pub offset_bytes: u64,
}

impl Part {
    /// Bytes of all rows.
    pub fn length_bytes(&self) -> u64 {
        u64::from(self.row_bytes) * u64::from(self.row_count)
    }

    /// Bytes of the payload that belong to this part.
    pub fn range(&self) -> std::ops::Range<usize> {
        let start = self.offset_bytes as usize;
        start..start + self.length_bytes() as usize
    }
}

/// Code of a row format in a component table.
pub fn format_code(format: RowFormat) -> u8 {
    match format {
        RowFormat::LatentV4 { .. } => 1,
        RowFormat::F32 { .. } => 2,
        RowFormat::IndexFp8 => 3,
        RowFormat::IndexBf16 => 4,
        RowFormat::F32Rows { parts: 3, .. } => 6,
        RowFormat::F32Rows { .. } => 5,
    }
}

/// The parts of one kind of record and the lengths that follow from them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordShape {
    kind: RecordKind,
    parts: Vec<Part>,
    payload_bytes: u64,
}

impl RecordShape {
    /// The compressed rows of one block of `block_tokens` tokens, all layers.
    ///
    /// # Errors
    /// `InvalidConfig` for a block length other than 256 and 128, and for a schema of which a block has
    /// no rows: no layer is compressed.
    pub fn block(schema: &CacheSchema, block_tokens: u32) -> Result<RecordShape, Error> {
        check_block(block_tokens)?;
        let rows_of = |row: &ComponentRow| match row.component.spec().live {
            LiveRule::ClosedGroups => block_tokens / row.component.spec().group_tokens,
            _ => 0,
        };
        let shape = RecordShape::of(schema, RecordKind::Block, rows_of);
        if shape.parts.is_empty() {
            return Err(ErrorKind::InvalidConfig {
                field: "compressed layers",
                value: 0,
                expected: "1 and more".to_owned(),
            }
            .into());
        }
        Ok(shape)
    }

    /// What is needed to go on at `position`, a multiple of the block length above 0: the window and
    /// the overlap halves of the last group. Nothing is open there.
    ///
    /// # Errors
    /// `InvalidConfig` for another position or block length.
    pub fn checkpoint(
        schema: &CacheSchema,
        block_tokens: u32,
        position: u32,
    ) -> Result<RecordShape, Error> {
        check_block(block_tokens)?;
        if position == 0 || !position.is_multiple_of(block_tokens) {
            return Err(ErrorKind::InvalidConfig {
                field: "position",
                value: u64::from(position),
                expected: format!("a multiple of {block_tokens} above 0"),
            }
            .into());
        }
        let window_tokens = schema.geometry().window_tokens;
        let rows_of = |row: &ComponentRow| match row.component.spec().live {
            LiveRule::ClosedGroups => 0,
            _ => row.live_entries(position, window_tokens).len() as u32,
        };
        Ok(RecordShape::of(schema, RecordKind::Checkpoint, rows_of))
    }

    fn of(
        schema: &CacheSchema,
        kind: RecordKind,
        rows_of: impl Fn(&ComponentRow) -> u32,
    ) -> RecordShape {
        let mut offset_bytes = 0;
        let mut parts = Vec::new();
        for row in schema.rows() {
            let row_count = rows_of(row);
            if row_count == 0 {
                continue;
            }
            let is_half = row.component.spec().live == LiveRule::OverlapAndOpen;
            let row_bytes = row.row_bytes as u32 / if is_half { 2 } else { 1 };
            let part = Part {
                component: row.component,
                layer: row.layer,
                format: format_code(row.format),
                is_half,
                row_bytes,
                row_count,
                offset_bytes,
            };
            offset_bytes = (offset_bytes + part.length_bytes()).next_multiple_of(PART_ALIGN_BYTES);
            parts.push(part);
        }
        RecordShape {
            kind,
            parts,
            payload_bytes: offset_bytes,
        }
    }

    /// The kind of the record.
    pub fn kind(&self) -> RecordKind {
        self.kind
    }

    /// The parts, ordered by layer, then by component.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The part of one component of one layer.
    pub fn part(&self, layer: LayerId, component: Component) -> Option<&Part> {
        let is_it = |part: &&Part| part.layer == layer && part.component == component;
        self.parts.iter().find(is_it)
    }

    /// Bytes of the payload: all parts, and zeros between them.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// Bytes of all rows, without what lies between the parts.
    pub fn row_bytes(&self) -> u64 {
        self.parts.iter().map(Part::length_bytes).sum()
    }

    /// Bytes of the header; the payload begins there.
    pub fn header_bytes(&self) -> u64 {
        header_bytes(self.parts.len(), self.payload_bytes)
    }

    /// Bytes of the whole record, a multiple of 4,096.
    pub fn record_bytes(&self) -> u64 {
        record_bytes(self.header_bytes(), self.payload_bytes)
    }
}

fn check_block(block_tokens: u32) -> Result<(), Error> {
    if BLOCK_TOKENS.contains(&block_tokens) {
        return Ok(());
    }
    Err(ErrorKind::InvalidConfig {
        field: "block_tokens",
        value: u64::from(block_tokens),
        expected: "256 or 128".to_owned(),
    }
    .into())
}

/// Bytes of a header with so many parts. Without a payload the commit mark shares its page.
pub(crate) fn header_bytes(part_count: usize, payload_bytes: u64) -> u64 {
    let used_bytes = HEAD_FIXED_BYTES + HEAD_PART_BYTES * part_count as u64 + 4;
    match payload_bytes {
        0 => PAGE_BYTES - FOOTER_BYTES,
        _ => used_bytes.next_multiple_of(PAGE_BYTES),
    }
}

pub(crate) fn record_bytes(header_bytes: u64, payload_bytes: u64) -> u64 {
    (header_bytes + payload_bytes + FOOTER_BYTES).next_multiple_of(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvgate_kvcache::{Formats, IndexKFormat, V4Geometry};

    fn schema(geometry: &V4Geometry, index_k: IndexKFormat) -> CacheSchema {
        let formats = Formats {
            index_k,
            ..Formats::default()
        };
        CacheSchema::deepseek_v4(geometry, &formats).unwrap()
    }

    /// The byte counts of the published layouts.
    #[test]
    fn flash_and_pro_have_the_known_sizes() {
        let (flash, pro) = (V4Geometry::flash(), V4Geometry::pro());
        for (geometry, index_k, tokens, block, checkpoint) in [
            (&flash, IndexKFormat::Fp8, 256, 985_664, 3_644_416),
            (&flash, IndexKFormat::Bf16, 256, 1_152_320, 3_644_416),
            (&flash, IndexKFormat::Fp8, 128, 492_832, 3_644_416),
            (&pro, IndexKFormat::Fp8, 256, 1_410_928, 5_174_272),
            (&pro, IndexKFormat::Bf16, 256, 1_649_008, 5_174_272),
        ] {
            let schema = schema(geometry, index_k);
            let shape = RecordShape::block(&schema, tokens).unwrap();
            assert_eq!(shape.row_bytes(), block);
            assert_eq!(shape.header_bytes(), 4_096);
            assert!(shape.record_bytes() - block < 16_384);
            let shape = RecordShape::checkpoint(&schema, tokens, 512).unwrap();
            assert_eq!(shape.row_bytes(), checkpoint);
        }
    }

    #[test]
    fn every_component_that_lasts_is_in_one_of_the_two() {
        let mut geometry = V4Geometry::flash();
        geometry.drafting = true;
        let schema = schema(&geometry, IndexKFormat::Bf16);
        let shapes = [
            RecordShape::block(&schema, 256).unwrap(),
            RecordShape::checkpoint(&schema, 256, 256).unwrap(),
        ];
        for row in schema.rows() {
            let found = shapes.iter().filter(|shape| {
                let part = shape.part(row.layer, row.component);
                part.is_some()
            });
            // Nothing of an open group is left where none is open.
            let expected = usize::from(row.component.spec().live != LiveRule::OpenGroup);
            assert_eq!(
                found.count(),
                expected,
                "{} of {}",
                row.component,
                row.layer
            );
        }
        for shape in &shapes {
            let mut end = 0;
            for part in shape.parts() {
                assert!(part.offset_bytes >= end && part.offset_bytes - end < PART_ALIGN_BYTES);
                end = part.offset_bytes + part.length_bytes();
            }
            assert_eq!(
                end.next_multiple_of(PART_ALIGN_BYTES),
                shape.payload_bytes()
            );
        }
    }

    #[test]
    fn other_boundaries_are_refused() {
        let schema = schema(&V4Geometry::flash(), IndexKFormat::Fp8);
        assert!(RecordShape::block(&schema, 64).is_err());
        for position in [0, 1, 128, 300] {
            assert!(RecordShape::checkpoint(&schema, 256, position).is_err());
        }
        assert!(RecordShape::checkpoint(&schema, 128, 128).is_ok());
    }
}
