//! Where the bytes of a row lie inside its page. Placement only: what the bytes mean is the
//! business of the kernels.
//!
//! Two families: slot-major pages (row `s` at `s * row_bytes`) and sectioned pages, which hold all
//! data rows first and all scale rows behind them (`v4` latents, fp8 indexer keys).

mod sectioned;

use std::ops::Range;

pub use sectioned::{INDEX_FP8, LATENT_V4, Sections};

/// Every page stride is a multiple of this, in bytes.
pub const STRIDE_ALIGN_BYTES: u64 = 16;

/// How the bytes of one row lie in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowFormat {
    /// Packed latent row: 448 e4m3, 64 bf16; 7 ue8m0 scales and a pad byte in the scale section.
    LatentV4 {
        /// Rows per page (P). The scale section starts at `P * 576`.
        rows: u32,
    },
    /// One f32 value per channel, slot-major.
    F32 {
        /// Channels of the row.
        channels: u32,
    },
    /// 128 e4m3 values; one f32 scale in the scale section. 64 rows a page.
    IndexFp8,
    /// 128 bf16 values, slot-major, no scale section.
    IndexBf16,
    /// Compressor state: `parts` vectors of `channels` f32 values one after the other.
    F32Rows {
        /// Channels of one part.
        channels: u32,
        /// Parts of the row: 4 (kv Ca, kv Cb, gate Ca, gate Cb) or 3 (max, sum, mean).
        parts: u32,
    },
}

/// The bytes of one row, relative to the start of its page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowPlace {
    /// The row's data.
    pub data: Range<u64>,
    /// The row's scales without padding. Empty where the format has no scale section.
    pub scale: Range<u64>,
}

impl RowFormat {
    /// Bytes of one row, pad byte included.
    pub fn row_bytes(self) -> u64 {
        match self {
            RowFormat::LatentV4 { .. } => LATENT_V4.row_bytes(),
            RowFormat::F32 { channels } => 4 * u64::from(channels),
            RowFormat::IndexFp8 => INDEX_FP8.row_bytes(),
            RowFormat::IndexBf16 => 256,
            RowFormat::F32Rows { channels, parts } => 4 * u64::from(channels) * u64::from(parts),
        }
    }

    /// Bytes of a page of `rows` rows that hold rows, without tail padding.
    pub fn used_bytes(self, rows: u32) -> u64 {
        u64::from(rows) * self.row_bytes()
    }

    /// Distance from one page to the next, in bytes. A transfer moves all of it.
    pub fn stride_bytes(self, rows: u32) -> u64 {
        let align_bytes = match self {
            RowFormat::LatentV4 { .. } => LATENT_V4.data_stride_bytes,
            _ => STRIDE_ALIGN_BYTES,
        };
        self.used_bytes(rows).next_multiple_of(align_bytes)
    }

    /// Distance from one row's data to the next, in bytes.
    pub fn data_stride_bytes(self) -> u64 {
        match self.sections() {
            Some(sections) => sections.data_stride_bytes,
            None => self.row_bytes(),
        }
    }

    /// Where the scale section of a page of `rows` rows starts, and the distance between its rows;
    /// `None` for slot-major pages.
    pub fn scale_section(self, rows: u32) -> Option<(u64, u64)> {
        let sections = self.sections()?;
        let base_bytes = u64::from(rows) * sections.data_stride_bytes;
        Some((base_bytes, sections.scale_stride_bytes))
    }

    /// The bytes of row `row` of a page of `rows` rows.
    pub fn row_place(self, row: u32, rows: u32) -> RowPlace {
        debug_assert!(row < rows, "I-16: row {row} of a page of {rows} rows");
        let start = u64::from(row) * self.data_stride_bytes();
        let data = start..start + self.data_stride_bytes();
        let scale = match (self.sections(), self.scale_section(rows)) {
            (Some(sections), Some((base_bytes, stride_bytes))) => {
                let start = base_bytes + u64::from(row) * stride_bytes;
                start..start + sections.scale_live_bytes
            }
            _ => data.end..data.end,
        };
        RowPlace { data, scale }
    }

    /// The section geometry of a sectioned format.
    pub fn sections(self) -> Option<Sections> {
        match self {
            RowFormat::LatentV4 { .. } => Some(LATENT_V4),
            RowFormat::IndexFp8 => Some(INDEX_FP8),
            _ => None,
        }
    }

    /// The parts of a half (overlap) row that are read again: kv Ca and gate Ca, parts 0 and 2 of a
    /// four-part state row. `None` for other formats.
    pub fn overlap_parts(self, row: u32) -> Option<[Range<u64>; 2]> {
        let RowFormat::F32Rows { channels, parts: 4 } = self else {
            return None;
        };
        let part_bytes = 4 * u64::from(channels);
        let start = u64::from(row) * self.row_bytes();
        let part = |index: u64| start + index * part_bytes..start + (index + 1) * part_bytes;
        Some([part(0), part(2)])
    }

    /// Name of the encoding in the format descriptor.
    pub fn encoding(self) -> &'static str {
        match self {
            RowFormat::LatentV4 { .. } => "v4",
            RowFormat::F32 { .. } => "f32",
            RowFormat::IndexFp8 => "fp8",
            RowFormat::IndexBf16 => "bf16",
            RowFormat::F32Rows { parts: 3, .. } => "f32online",
            RowFormat::F32Rows { .. } => "f32rows",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latent_v4_page_table() {
        for (rows, used, stride, scale_base) in [
            (2, 1_168, 1_728, 1_152),
            (64, 37_376, 37_440, 36_864),
            (256, 149_504, 149_760, 147_456),
        ] {
            let format = RowFormat::LatentV4 { rows };
            assert_eq!(format.row_bytes(), 584);
            assert_eq!(format.used_bytes(rows), used);
            assert_eq!(format.stride_bytes(rows), stride);
            assert_eq!(format.scale_section(rows), Some((scale_base, 8)));
            let last = format.row_place(rows - 1, rows);
            assert_eq!(last.data.end, scale_base);
            assert_eq!(last.scale.end + 1, used);
        }
    }

    #[test]
    fn index_k_pages() {
        assert_eq!(RowFormat::IndexFp8.row_bytes(), 132);
        assert_eq!(RowFormat::IndexFp8.stride_bytes(64), 8_448);
        let row = RowFormat::IndexFp8.row_place(3, 64);
        assert_eq!((row.data, row.scale), (384..512, 8_204..8_208));
        assert_eq!(RowFormat::IndexBf16.stride_bytes(64), 16_384);
        let row = RowFormat::IndexBf16.row_place(3, 64);
        assert_eq!((row.data, row.scale.is_empty()), (768..1_024, true));
    }

    #[test]
    fn state_rows() {
        let c4 = RowFormat::F32Rows {
            channels: 512,
            parts: 4,
        };
        assert_eq!((c4.row_bytes(), c4.stride_bytes(8)), (8_192, 65_536));
        let index = RowFormat::F32Rows {
            channels: 128,
            parts: 4,
        };
        assert_eq!((index.row_bytes(), index.stride_bytes(8)), (2_048, 16_384));
        let online = RowFormat::F32Rows {
            channels: 512,
            parts: 3,
        };
        assert_eq!(online.stride_bytes(1), 6_144);
        assert_eq!(c4.overlap_parts(1), Some([8_192..10_240, 12_288..14_336]));
        assert_eq!(online.overlap_parts(0), None);
    }

    #[test]
    fn every_row_lies_inside_its_page_and_apart_from_the_others() {
        let formats = [
            (RowFormat::LatentV4 { rows: 64 }, 64),
            (RowFormat::IndexFp8, 64),
            (RowFormat::IndexBf16, 64),
            (RowFormat::F32 { channels: 20 }, 64),
            (
                RowFormat::F32Rows {
                    channels: 7,
                    parts: 3,
                },
                1,
            ),
        ];
        for (format, rows) in formats {
            let mut owner = vec![u32::MAX; format.stride_bytes(rows) as usize];
            assert_eq!(format.stride_bytes(rows) % STRIDE_ALIGN_BYTES, 0);
            for row in 0..rows {
                let place = format.row_place(row, rows);
                for byte in place.data.chain(place.scale) {
                    assert!(byte < format.used_bytes(rows));
                    assert_eq!(owner[byte as usize], u32::MAX, "{format:?} row {row}");
                    owner[byte as usize] = row;
                }
            }
        }
    }
}
