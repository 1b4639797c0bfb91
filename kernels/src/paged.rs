//! Rows of KV pages, addressed by absolute entry number.
//!
//! A view is a pool base, a page table and the encoding of its rows. Entry `e` lies in physical page
//! `table[(e / entries_per_page) % table.len()]`, row `e % rows_per_page`; the modulo makes a ring of
//! a table that is shorter than the sequence. Byte layouts:
//!
//! | encoding | data of row s | scales of row s |
//! |---|---|---|
//! | `LatentV4` | `s*576`: 448 e4m3, 64 bf16 | `P*576 + s*8`: 7 ue8m0 bytes and a zero |
//! | `F32 { channels }` | `s*4*channels` | |
//! | `Bf16 { channels }` | `s*2*channels` | |
//! | `Fp8 { channels }` | `s*channels` e4m3 | `P*channels + s*4`: f32 |
//! | `Fp4 { channels }` | `s*channels/2`, even channel in the low nibble | `(P*channels)/2 + s*channels/32`: ue8m0 per 32 |
//!
//! This is the only file that turns a pool address into row bytes. A view never makes a reference to
//! more than one row, because other rows of the pool may be written by a transfer at the same time.

use std::marker::PhantomData;

use crate::error::{ErrorKind, KernelError};
use crate::number as num;

/// Channels of a `LatentV4` row.
const V4_CHANNELS: usize = 512;
/// e4m3 channels of a `LatentV4` row; the rest is bf16.
const V4_FP8: usize = 448;
const V4_BLOCK: usize = 64;

/// How the values of one row lie in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RowEncoding {
    /// 448 e4m3 channels with ue8m0 scales per 64, then 64 bf16 channels.
    LatentV4,
    /// Plain f32.
    F32 {
        /// Values per row.
        channels: u32,
    },
    /// Plain bf16.
    Bf16 {
        /// Values per row.
        channels: u32,
    },
    /// e4m3 with one plain f32 scale per row.
    Fp8 {
        /// Values per row.
        channels: u32,
    },
    /// e2m1 with ue8m0 scales per 32 channels.
    Fp4 {
        /// Values per row, a multiple of 32.
        channels: u32,
    },
}

impl RowEncoding {
    /// Values per row.
    pub fn channels(self) -> usize {
        match self {
            Self::LatentV4 => V4_CHANNELS,
            Self::F32 { channels }
            | Self::Bf16 { channels }
            | Self::Fp8 { channels }
            | Self::Fp4 { channels } => channels as usize,
        }
    }

    /// Bytes of the data part of a row.
    pub fn data_bytes(self) -> usize {
        match self {
            Self::LatentV4 => V4_FP8 + 2 * (V4_CHANNELS - V4_FP8),
            Self::F32 { channels } => 4 * channels as usize,
            Self::Bf16 { channels } => 2 * channels as usize,
            Self::Fp8 { channels } => channels as usize,
            Self::Fp4 { channels } => channels as usize / 2,
        }
    }

    /// Bytes of the scale part of a row.
    pub fn scale_bytes(self) -> usize {
        match self {
            Self::LatentV4 => 8,
            Self::F32 { .. } | Self::Bf16 { .. } => 0,
            Self::Fp8 { .. } => 4,
            Self::Fp4 { channels } => channels as usize / 32,
        }
    }

    /// Used bytes of a page of `rows` rows.
    pub fn page_bytes(self, rows: usize) -> usize {
        rows.saturating_mul(self.data_bytes() + self.scale_bytes())
    }

    /// Writes whole rows as the first rows of a page of `rows_per_page` rows; other bytes stay.
    /// The values are quantised as they are: [`PagedMut::store_row`] rounds latents to bf16 before.
    ///
    /// # Errors
    /// `values` is not whole rows, or the page cannot hold them.
    pub fn encode_page(
        self,
        values: &[f32],
        page: &mut [u8],
        rows_per_page: usize,
    ) -> Result<(), KernelError> {
        let channels = self.channels().max(1);
        let rows = values.len() / channels;
        check_channels(self, values.len() - rows.saturating_sub(1) * channels)?;
        let used_bytes = self.page_bytes(rows_per_page);
        if used_bytes > page.len() || rows > rows_per_page {
            let kind = ErrorKind::PageTooSmall;
            return Err(KernelError::new(kind, "page bytes", page.len(), used_bytes));
        }
        let (data_bytes, scale_bytes) = (self.data_bytes(), self.scale_bytes());
        let (data, scales) = page.split_at_mut(rows_per_page * data_bytes);
        for (i, row) in values.chunks_exact(channels).enumerate() {
            let data = &mut data[i * data_bytes..(i + 1) * data_bytes];
            self.encode(
                row,
                data,
                &mut scales[i * scale_bytes..(i + 1) * scale_bytes],
            );
        }
        Ok(())
    }

    /// Writes `values` as the data and scale bytes of one row.
    fn encode(self, values: &[f32], data: &mut [u8], scales: &mut [u8]) {
        match self {
            Self::LatentV4 => encode_v4(values, data, scales),
            Self::F32 { .. } => {
                for (bytes, v) in data.chunks_exact_mut(4).zip(values) {
                    bytes.copy_from_slice(&v.to_le_bytes());
                }
            }
            Self::Bf16 { .. } => encode_bf16(values, data),
            Self::Fp8 { .. } => {
                let scale = num::fp8_row_scale(values);
                let inverse = 1.0 / scale;
                for (byte, v) in data.iter_mut().zip(values) {
                    *byte = num::e4m3_code(*v * inverse);
                }
                scales.copy_from_slice(&scale.to_le_bytes());
            }
            Self::Fp4 { .. } => {
                for ((block, codes), byte) in values.chunks(32).zip(data.chunks_mut(16)).zip(scales)
                {
                    *byte = num::fp4_block_scale(block);
                    let scale = num::ue8m0_value(*byte);
                    for (pair, code) in block.chunks(2).zip(codes) {
                        *code =
                            fp4_page_code(pair[0] / scale) | (fp4_page_code(pair[1] / scale) << 4);
                    }
                }
            }
        }
    }

    /// Reads one row back into `out`.
    fn decode(self, data: &[u8], scales: &[u8], out: &mut [f32]) {
        match self {
            Self::LatentV4 => {
                for ((codes, byte), block) in data[..V4_FP8]
                    .chunks_exact(V4_BLOCK)
                    .zip(scales)
                    .zip(out.chunks_exact_mut(V4_BLOCK))
                {
                    let scale = num::ue8m0_value(*byte);
                    for (v, code) in block.iter_mut().zip(codes) {
                        *v = num::e4m3_value(*code) * scale;
                    }
                }
                decode_bf16(&data[V4_FP8..], &mut out[V4_FP8..]);
            }
            Self::F32 { .. } => decode_f32(data, out),
            Self::Bf16 { .. } => decode_bf16(data, out),
            Self::Fp8 { .. } => {
                let scale = f32::from_le_bytes([scales[0], scales[1], scales[2], scales[3]]);
                for (v, code) in out.iter_mut().zip(data) {
                    *v = num::e4m3_value(*code) * scale;
                }
            }
            Self::Fp4 { .. } => {
                for (i, v) in out.iter_mut().enumerate() {
                    let code = data[i / 2] >> (4 * (i & 1));
                    *v = num::e2m1_value(code) * num::ue8m0_value(scales[i / 32]);
                }
            }
        }
    }
}

/// e2m1 code for a page: values that round to zero store code 0, never the negative zero.
fn fp4_page_code(x: f32) -> u8 {
    let code = num::e2m1_code(x);
    if code == 8 { 0 } else { code }
}

fn encode_v4(values: &[f32], data: &mut [u8], scales: &mut [u8]) {
    let (codes, rope) = data.split_at_mut(V4_FP8);
    for (g, bytes) in codes.chunks_exact_mut(V4_BLOCK).enumerate() {
        let block = &values[g * V4_BLOCK..(g + 1) * V4_BLOCK];
        scales[g] = num::fp8_block_scale(block);
        let scale = num::ue8m0_value(scales[g]);
        for (byte, v) in bytes.iter_mut().zip(block) {
            *byte = num::e4m3_code(*v / scale);
        }
    }
    scales[7] = 0;
    encode_bf16(&values[V4_FP8..], rope);
}

fn encode_bf16(values: &[f32], data: &mut [u8]) {
    for (bytes, v) in data.chunks_exact_mut(2).zip(values) {
        bytes.copy_from_slice(&num::bf16_bits(*v).to_le_bytes());
    }
}

fn decode_bf16(data: &[u8], out: &mut [f32]) {
    for (v, b) in out.iter_mut().zip(data.chunks_exact(2)) {
        *v = num::bf16_value(u16::from_le_bytes([b[0], b[1]]));
    }
}

fn decode_f32(data: &[u8], out: &mut [f32]) {
    for (v, b) in out.iter_mut().zip(data.chunks_exact(4)) {
        *v = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    }
}

/// Where the rows of a component lie inside its pool.
#[derive(Clone, Copy, Debug)]
pub struct Placement<'a> {
    /// Distance of two physical pages.
    pub stride_bytes: usize,
    /// Physical pages of the pool.
    pub slot_count: u32,
    /// Rows of a physical page.
    pub rows_per_page: u32,
    /// Entries that one table element stands for.
    pub entries_per_page: u32,
    /// Physical pages of the sequence.
    pub table: &'a [u32],
    /// Bytes of a row.
    pub encoding: RowEncoding,
    /// Entries before this one are read only: their pages are shared. 0 where nothing is.
    pub first_writable_entry: u32,
}

impl Placement<'_> {
    fn check(&self) -> Result<(), KernelError> {
        let empty = |what| Err(KernelError::new(ErrorKind::EmptyView, what, 0, 1));
        if self.table.is_empty() {
            return empty("page table length");
        }
        if self.rows_per_page == 0 || self.entries_per_page == 0 {
            return empty("rows per page");
        }
        let used_bytes = self.encoding.page_bytes(self.rows_per_page as usize);
        if used_bytes > self.stride_bytes {
            return Err(KernelError::new(
                ErrorKind::PageTooSmall,
                "page stride bytes",
                self.stride_bytes,
                used_bytes,
            ));
        }
        match self.table.iter().find(|slot| **slot >= self.slot_count) {
            Some(slot) => Err(KernelError::new(
                ErrorKind::SlotOutOfRange,
                "page table slot",
                *slot as usize,
                self.slot_count as usize,
            )),
            None => Ok(()),
        }
    }

    /// Byte offsets of the data and scale parts of an entry from the pool base.
    fn offsets(&self, entry: u32) -> (usize, usize) {
        let page = self.table[(entry / self.entries_per_page) as usize % self.table.len()] as usize;
        let row = (entry % self.rows_per_page) as usize;
        let base = page * self.stride_bytes;
        let data_bytes = self.encoding.data_bytes();
        let scale_base = base + self.rows_per_page as usize * data_bytes;
        (
            base + row * data_bytes,
            scale_base + row * self.encoding.scale_bytes(),
        )
    }

    /// Entries that can be live at the same time.
    fn entry_capacity(&self) -> usize {
        self.table
            .len()
            .saturating_mul(self.entries_per_page as usize)
    }
}

/// Rows of one component that may be read.
#[derive(Clone, Copy, Debug)]
pub struct PagedRef<'a> {
    base: *const u8,
    placement: Placement<'a>,
}

impl<'a> PagedRef<'a> {
    /// A read view of the pool at `base`.
    ///
    /// # Safety
    /// For `'a`, `base` points to `slot_count * stride_bytes` readable bytes, and nobody writes the
    /// pages of the table while a method of this view runs.
    ///
    /// # Errors
    /// The table is empty, names a slot outside the pool, or a page cannot hold its rows.
    pub unsafe fn from_raw(base: *const u8, placement: Placement<'a>) -> Result<Self, KernelError> {
        placement.check()?;
        Ok(Self { base, placement })
    }

    /// Encoding of the rows.
    pub fn encoding(&self) -> RowEncoding {
        self.placement.encoding
    }

    /// Entries that can be live at the same time.
    pub fn entry_capacity(&self) -> usize {
        self.placement.entry_capacity()
    }

    /// Decodes the row of `entry`.
    ///
    /// # Errors
    /// `out` has another length than the row.
    pub fn load_row(&self, entry: u32, out: &mut [f32]) -> Result<(), KernelError> {
        check_channels(self.placement.encoding, out.len())?;
        let (data, scales) = self.row(entry);
        self.placement.encoding.decode(data, scales, out);
        Ok(())
    }

    /// Reads the channels from `first_channel` of an f32 row, and touches no other byte of it.
    ///
    /// # Errors
    /// The rows are not f32, or the channels reach past the row.
    pub fn load_channels(
        &self,
        entry: u32,
        first_channel: usize,
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        let RowEncoding::F32 { channels } = self.placement.encoding else {
            return Err(KernelError::new(
                ErrorKind::Shape,
                "f32 channels of the row",
                0,
                first_channel + out.len(),
            ));
        };
        let end = first_channel + out.len();
        if end > channels as usize {
            return Err(KernelError::new(
                ErrorKind::ChannelCount,
                "last channel",
                end,
                channels as usize,
            ));
        }
        let (data, _) = self.row(entry);
        decode_f32(&data[4 * first_channel..4 * end], out);
        Ok(())
    }

    /// The data and scale bytes of the row of `entry`.
    pub fn row(&self, entry: u32) -> (&'a [u8], &'a [u8]) {
        let p = &self.placement;
        let (data, scales) = p.offsets(entry);
        // SAFETY: I-16: `check` proved table[..] < slot_count and page_bytes <= stride, so both parts
        // lie inside the pool; I-1: the caller of `from_raw` holds the right to read it for 'a.
        unsafe {
            (
                std::slice::from_raw_parts(self.base.add(data), p.encoding.data_bytes()),
                std::slice::from_raw_parts(self.base.add(scales), p.encoding.scale_bytes()),
            )
        }
    }
}

/// Rows of one component that may be written and read.
#[derive(Debug)]
pub struct PagedMut<'a> {
    base: *mut u8,
    placement: Placement<'a>,
    exclusive: PhantomData<&'a mut [u8]>,
}

impl<'a> PagedMut<'a> {
    /// A write view of the pool at `base`.
    ///
    /// # Safety
    /// For `'a`, `base` points to `slot_count * stride_bytes` writable bytes. Nobody else writes the pages of
    /// the table, and nobody else reads those with an entry from `first_writable_entry` on.
    ///
    /// # Errors
    /// As [`PagedRef::from_raw`].
    pub unsafe fn from_raw(base: *mut u8, placement: Placement<'a>) -> Result<Self, KernelError> {
        placement.check()?;
        Ok(Self {
            base,
            placement,
            exclusive: PhantomData,
        })
    }

    /// The same rows for reading.
    pub fn as_ref(&self) -> PagedRef<'_> {
        PagedRef {
            base: self.base,
            placement: self.placement,
        }
    }

    /// Encoding of the rows.
    pub fn encoding(&self) -> RowEncoding {
        self.placement.encoding
    }

    /// Entries that can be live at the same time.
    pub fn entry_capacity(&self) -> usize {
        self.placement.entry_capacity()
    }

    /// Encodes `values` as the row of `entry`; a `LatentV4` row is rounded to bf16 first.
    ///
    /// # Errors
    /// `values` has another length than the row, or the row is shared.
    pub fn store_row(&mut self, entry: u32, values: &[f32]) -> Result<(), KernelError> {
        let encoding = self.placement.encoding;
        check_channels(encoding, values.len())?;
        let first = self.placement.first_writable_entry;
        if entry < first {
            let kind = ErrorKind::SharedRow;
            return Err(KernelError::new(
                kind,
                "entry to write",
                entry as usize,
                first as usize,
            ));
        }
        let (data, scales) = self.row_mut(entry);
        if encoding == RowEncoding::LatentV4 {
            let mut rounded = [0.0f32; V4_CHANNELS];
            for (r, v) in rounded.iter_mut().zip(values) {
                *r = num::round_bf16(*v);
            }
            encoding.encode(&rounded, data, scales);
        } else {
            encoding.encode(values, data, scales);
        }
        Ok(())
    }

    /// The data and scale bytes of the row of `entry`, for writing.
    fn row_mut(&mut self, entry: u32) -> (&mut [u8], &mut [u8]) {
        let p = &self.placement;
        let (data, scales) = p.offsets(entry);
        // SAFETY: I-16: in bounds as in `PagedRef::row`; data and scale parts are disjoint, since the
        // scales begin behind the last data row. I-1, I-19: the caller of `from_raw` holds the
        // exclusive right to these pages for 'a, and `&mut self` keeps the two slices unique.
        unsafe {
            (
                std::slice::from_raw_parts_mut(self.base.add(data), p.encoding.data_bytes()),
                std::slice::from_raw_parts_mut(self.base.add(scales), p.encoding.scale_bytes()),
            )
        }
    }
}

fn check_channels(encoding: RowEncoding, channels: usize) -> Result<(), KernelError> {
    if channels == encoding.channels() {
        return Ok(());
    }
    Err(KernelError::new(
        ErrorKind::ChannelCount,
        "row channels",
        channels,
        encoding.channels(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENCODINGS: [RowEncoding; 5] = [
        RowEncoding::LatentV4,
        RowEncoding::F32 { channels: 96 },
        RowEncoding::Bf16 { channels: 128 },
        RowEncoding::Fp8 { channels: 128 },
        RowEncoding::Fp4 { channels: 128 },
    ];

    fn placement(encoding: RowEncoding, table: &[u32]) -> Placement<'_> {
        Placement {
            stride_bytes: encoding.page_bytes(4) + 32,
            slot_count: 4,
            rows_per_page: 4,
            entries_per_page: 4,
            table,
            encoding,
            first_writable_entry: 0,
        }
    }

    #[test]
    fn rows_round_trip_and_stay_apart() {
        for encoding in ENCODINGS {
            let table = [3, 1];
            let p = placement(encoding, &table);
            let mut pool = vec![0xA5u8; 4 * p.stride_bytes];
            // SAFETY: I-1: the pool outlives the view and nothing else touches it.
            let mut view = unsafe { PagedMut::from_raw(pool.as_mut_ptr(), p) }.unwrap();
            let n = encoding.channels();
            let row = |e: u32| {
                (0..n)
                    .map(|c| ((c * 7 + e as usize * 3) % 13) as f32 - 6.0)
                    .collect::<Vec<_>>()
            };
            for e in 0..8 {
                view.store_row(e, &row(e)).unwrap();
            }
            for e in 0..8 {
                let mut got = vec![0.0; n];
                view.as_ref().load_row(e, &mut got).unwrap();
                for (g, w) in got.iter().zip(row(e)) {
                    assert!(
                        (g - w).abs() <= 0.21 * w.abs().max(1.0),
                        "{encoding:?} {g} {w}"
                    );
                }
            }
            let shared = Placement {
                first_writable_entry: 3,
                ..p
            };
            // SAFETY: I-1: as above; the view before is not used with it.
            let mut behind = unsafe { PagedMut::from_raw(pool.as_mut_ptr(), shared) }.unwrap();
            let refused = behind.store_row(2, &row(2)).unwrap_err();
            assert_eq!((refused.kind, refused.expected), (ErrorKind::SharedRow, 3));
            behind.store_row(3, &row(3)).unwrap();
            // SAFETY: I-1: as above.
            let mut view = unsafe { PagedMut::from_raw(pool.as_mut_ptr(), p) }.unwrap();
            // Entry 9 wraps onto entry 1.
            view.store_row(9, &row(5)).unwrap();
            let mut got = vec![0.0; n];
            view.as_ref().load_row(1, &mut got).unwrap();
            let mut want = vec![0.0; n];
            view.as_ref().load_row(5, &mut want).unwrap();
            assert_eq!(got, want);
            let stride = p.stride_bytes;
            assert!(
                pool[..stride].iter().all(|b| *b == 0xA5),
                "page 0 untouched"
            );
            assert!(
                pool[2 * stride - 32..2 * stride].iter().all(|b| *b == 0xA5),
                "padding untouched"
            );
        }
    }

    #[test]
    fn bad_views_are_refused() {
        let e = RowEncoding::F32 { channels: 8 };
        let mut pool = vec![0u8; 4 * 160];
        let mut kind = |p: Placement<'_>| {
            // SAFETY: I-1: the pool outlives the call; no row is touched.
            unsafe { PagedMut::from_raw(pool.as_mut_ptr(), p) }
                .err()
                .map(|e| e.kind)
        };
        assert_eq!(kind(placement(e, &[4])), Some(ErrorKind::SlotOutOfRange));
        assert_eq!(kind(placement(e, &[])), Some(ErrorKind::EmptyView));
        let small = Placement {
            stride_bytes: 127,
            ..placement(e, &[0])
        };
        assert_eq!(kind(small), Some(ErrorKind::PageTooSmall));
        assert_eq!(
            kind(Placement {
                rows_per_page: 0,
                ..placement(e, &[0])
            }),
            Some(ErrorKind::EmptyView)
        );
        assert_eq!(kind(placement(e, &[0])), None);
    }
}
