//! Pages with a data section and a scale section behind it.

/// The geometry of a sectioned page: all data rows first, then all scale rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sections {
    /// Distance between the data of two rows; the data fills it.
    pub data_stride_bytes: u64,
    /// Distance between the scales of two rows.
    pub scale_stride_bytes: u64,
    /// Scale bytes of a row that carry meaning, at the start of its scale row; the rest is padding.
    pub scale_live_bytes: u64,
}

impl Sections {
    /// Bytes of one row, scale padding included.
    pub const fn row_bytes(self) -> u64 {
        self.data_stride_bytes + self.scale_stride_bytes
    }
}

/// Packed latents: 448 e4m3 + 64 bf16; 7 ue8m0 scales and a pad byte.
pub const LATENT_V4: Sections = Sections {
    data_stride_bytes: 576,
    scale_stride_bytes: 8,
    scale_live_bytes: 7,
};

/// Indexer keys: 128 e4m3; one f32 scale.
pub const INDEX_FP8: Sections = Sections {
    data_stride_bytes: 128,
    scale_stride_bytes: 4,
    scale_live_bytes: 4,
};
