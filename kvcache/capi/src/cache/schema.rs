//! The shape of a cache.

use std::ffi::c_char;
use std::sync::Arc;

use kvgate_kvcache::{
    CacheSchema, Component, Formats, IndexKFormat, LatentFormat, LayerId, RowFormat, WindowPage,
};

use crate::arg::{self, Versioned};
use crate::cache::config::geometry_of;
use crate::handle::{Handle, handle};
use crate::status::{Failure, Outcome, guard, kv_status};

/// Bytes of a digest and of a fingerprint.
pub const KV_DIGEST_BYTES: usize = 32;

/// What a cache consists of: every component of every layer, with its bytes.
pub struct kv_schema {
    _opaque: (),
}

handle!(kv_schema => Arc<CacheSchema>, "schema");

/// How a latent row is stored.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_latent_format {
    /// 584 bytes: 448 e4m3 and 64 bf16 values, 7 ue8m0 scales. Needs `head_dim` 512 and a rope of 64.
    PackedFp8 = 1,
    /// One f32 per channel.
    F32 = 2,
}

/// How an indexer key is stored.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_index_k_format {
    /// 128 bf16 values.
    Bf16 = 1,
    /// 128 e4m3 values and one f32 scale.
    Fp8 = 2,
    /// One f32 per channel.
    F32 = 3,
}

/// The kinds of buffers that a layer can have.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_component {
    /// Latents of the sliding window; every layer but the draft block.
    SwaLatent = 0,
    /// Compressed latents of ratio 4.
    C4Latent = 1,
    /// Indexer keys of ratio 4.
    IndexK = 2,
    /// Compressed latents of ratio 128.
    C128Latent = 3,
    /// Projections of the open and the last group of ratio 4.
    C4State = 4,
    /// The same for the indexer's compressor.
    IndexState = 5,
    /// Running softmax of the open group of ratio 128.
    C128State = 6,
    /// Latents of the draft block's window.
    MtpLatent = 7,
}

/// How the bytes of a row lie in a page.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_row_format {
    /// 448 e4m3 and 64 bf16 values; 7 ue8m0 scales and a pad byte in the scale section of the page.
    LatentV4 = 1,
    /// `channels` f32 values.
    F32 = 2,
    /// 128 e4m3 values; one f32 in the scale section of the page.
    IndexFp8 = 3,
    /// 128 bf16 values.
    IndexBf16 = 4,
    /// `parts` vectors of `channels` f32 values, one after the other.
    F32Rows = 5,
}

/// What decides the shape and the meaning of a cache.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kv_schema_options {
    /// `sizeof(struct kv_schema_options)`.
    pub struct_bytes: u32,
    /// An `enum kv_latent_format`.
    pub latent: u32,
    /// An `enum kv_index_k_format`.
    pub index_k: u32,
    /// Rows of a page of the window: 64, 256, or 0 for 64.
    pub window_page_rows: u32,
    /// 1 when the window of the draft block is part of the cache, else 0.
    pub drafting: u32,
    /// Zero.
    pub reserved: u32,
    /// The text of the model's `config.json` (DeepSeek-V4).
    pub config_json: *const c_char,
    /// Digest of the weights, `KV_DIGEST_BYTES` bytes: caches of different weights are never exchanged. Any
    /// convention will do that both sides share.
    pub weights_digest: *const u8,
    /// Digest of the configuration, `KV_DIGEST_BYTES` bytes; NULL for the SHA-256 of the text, whatever its
    /// spacing and the order of its fields.
    pub config_digest: *const u8,
}

// SAFETY: `repr(C)`, numbers and pointers, `struct_bytes` first.
unsafe impl Versioned for kv_schema_options {
    const NAME: &'static str = "kv_schema_options";
}

/// The pages of one component of one layer. Entry `e` (a token position for windows and states, the number of
/// a compressed entry for the others) lies in page `(e / entries_per_page) % page_count` of the sequence
/// (`kv_page.page_count`), in row `e % rows_per_page`. The data of row `r` begin at `r * data_stride_bytes`
/// from the page's address, its scales, if any, at `scale_offset_bytes + r * scale_stride_bytes`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct kv_component_info {
    /// `sizeof(struct kv_component_info)`; set it before the call.
    pub struct_bytes: u32,
    /// 1 when the layer has this component. If 0, all that follows is 0.
    pub is_present: u32,
    /// An `enum kv_row_format`.
    pub format: u32,
    /// Values of a part of a row, where the format leaves them open.
    pub channels: u32,
    /// Parts of a row.
    pub parts: u32,
    /// Tokens of an entry: 1, 4 or 128.
    pub group_tokens: u32,
    /// Rows of a page.
    pub rows_per_page: u32,
    /// Entries after which the next page begins.
    pub entries_per_page: u32,
    /// Bytes of a row, scales and padding included.
    pub row_bytes: u64,
    /// Bytes of a page that hold rows.
    pub used_bytes: u64,
    /// Bytes of a page: what a transfer moves.
    pub stride_bytes: u64,
    /// Distance between the data of two rows.
    pub data_stride_bytes: u64,
    /// Where the scales of row 0 begin; 0 where there are none.
    pub scale_offset_bytes: u64,
    /// Distance between the scales of two rows; 0 where there are none.
    pub scale_stride_bytes: u64,
}

// SAFETY: `repr(C)`, numbers, `struct_bytes` first.
unsafe impl Versioned for kv_component_info {
    const NAME: &'static str = "kv_component_info";
}

/// Makes the schema of a model's cache. The message names the field of the configuration that does not
/// fit, with its value and what was expected.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_schema_create(
    options: *const kv_schema_options,
    schema: *mut *mut kv_schema,
) -> kv_status {
    guard(|| {
        // SAFETY: the contract of the header.
        let (options, out) = unsafe {
            let options: kv_schema_options = arg::versioned(options)?;
            (options, arg::out(schema, "schema")?)
        };
        // SAFETY: as above.
        let config = unsafe { arg::text(options.config_json, "kv_schema_options.config_json")? };
        // SAFETY: as above.
        let weights = unsafe { digest(options.weights_digest)? };
        // SAFETY: as above.
        let own_digest = unsafe { digest(options.config_digest)? };
        let formats = formats_of(&options)?;
        let mut geometry = geometry_of(config)?;
        geometry.drafting = options.drafting == 1;
        geometry.config_digest = own_digest.unwrap_or(geometry.config_digest);
        geometry.weights_digest =
            weights.ok_or_else(|| Failure::argument("kv_schema_options.weights_digest is NULL"))?;
        let made = CacheSchema::deepseek_v4(&geometry, &formats)?;
        out.set(kv_schema::create(Arc::new(made)));
        Ok(())
    })
}

/// A digest, if there is one.
///
/// # Safety
/// Not NULL: `KV_DIGEST_BYTES` bytes.
unsafe fn digest(pointer: *const u8) -> Outcome<Option<[u8; KV_DIGEST_BYTES]>> {
    let count = if pointer.is_null() {
        0
    } else {
        KV_DIGEST_BYTES
    };
    // SAFETY: the caller's promise.
    let bytes = unsafe { arg::slice(pointer, count, "digest")? };
    Ok(bytes.first_chunk().copied())
}

fn formats_of(options: &kv_schema_options) -> Outcome<Formats> {
    let wrong = |field: &str, value: u32| {
        Failure::argument(format!("kv_schema_options.{field} cannot be {value}"))
    };
    for (field, value, most) in [
        ("drafting", options.drafting, 1),
        ("reserved", options.reserved, 0),
    ] {
        if value > most {
            return Err(wrong(field, value));
        }
    }
    Ok(Formats {
        latent: match options.latent {
            1 => LatentFormat::PackedFp8,
            2 => LatentFormat::F32,
            other => return Err(wrong("latent", other)),
        },
        index_k: match options.index_k {
            1 => IndexKFormat::Bf16,
            2 => IndexKFormat::Fp8,
            3 => IndexKFormat::F32,
            other => return Err(wrong("index_k", other)),
        },
        window_page: match options.window_page_rows {
            0 | 64 => WindowPage::P64,
            256 => WindowPage::P256,
            other => return Err(wrong("window_page_rows", other)),
        },
    })
}

/// Layers with storage: the main layers, and behind them the draft block when drafting.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_schema_layer_count(
    schema: *const kv_schema,
    layer_count: *mut u32,
) -> kv_status {
    guard(|| {
        let schema = kv_schema::open(schema)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::out(layer_count, "layer_count")? };
        out.set(schema.layer_count().into());
        Ok(())
    })
}

/// How the pages of one component of one layer are made. `component` is an `enum kv_component`; that a layer
/// does not have it is an answer (`is_present` 0) and no failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_schema_component(
    schema: *const kv_schema,
    layer: u32,
    component: u32,
    info: *mut kv_component_info,
) -> kv_status {
    guard(|| {
        let schema = kv_schema::open(schema)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::versioned_out(info)? };
        let (layer, component) = (layer_of(layer)?, component_of(component)?);
        schema.check_layer(layer)?;
        let struct_bytes = size_of::<kv_component_info>() as u32;
        let Some(row) = schema.row(layer, component) else {
            out.set(kv_component_info {
                struct_bytes,
                ..Default::default()
            });
            return Ok(());
        };
        let (format, channels, parts) = describe(row.format);
        let scales = row
            .format
            .scale_section(row.rows_per_page)
            .unwrap_or((0, 0));
        out.set(kv_component_info {
            struct_bytes,
            is_present: 1,
            format: format as u32,
            channels,
            parts,
            group_tokens: component.spec().group_tokens,
            rows_per_page: row.rows_per_page,
            entries_per_page: row.entries_per_page,
            row_bytes: row.row_bytes,
            used_bytes: row.used_bytes,
            stride_bytes: row.stride_bytes,
            data_stride_bytes: row.format.data_stride_bytes(),
            scale_offset_bytes: scales.0,
            scale_stride_bytes: scales.1,
        });
        Ok(())
    })
}

/// Format, channels and parts of a row.
fn describe(format: RowFormat) -> (kv_row_format, u32, u32) {
    match format {
        RowFormat::LatentV4 { .. } => (kv_row_format::LatentV4, 512, 1),
        RowFormat::F32 { channels } => (kv_row_format::F32, channels, 1),
        RowFormat::IndexFp8 => (kv_row_format::IndexFp8, 128, 1),
        RowFormat::IndexBf16 => (kv_row_format::IndexBf16, 128, 1),
        RowFormat::F32Rows { channels, parts } => (kv_row_format::F32Rows, channels, parts),
    }
}

/// The slots that a request of `total_tokens` tokens, prompt and output, takes from pools: logical pages of
/// 256 tokens, and window slots. Beside those it takes one request slot.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_schema_slots(
    schema: *const kv_schema,
    total_tokens: u32,
    pages: *mut u32,
    windows: *mut u32,
) -> kv_status {
    guard(|| {
        let schema = kv_schema::open(schema)?;
        // SAFETY: the contract of the header.
        let (pages, windows) =
            unsafe { (arg::out(pages, "pages")?, arg::out(windows, "windows")?) };
        let counts = schema.slots_for(total_tokens);
        pages.set(counts.pages);
        windows.set(counts.windows);
        Ok(())
    })
}

/// The hash over every field that decides the shape or the meaning of a byte, `KV_DIGEST_BYTES` bytes. Offers
/// carry these fields and are refused where one differs; this is for logs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_schema_fingerprint(
    schema: *const kv_schema,
    fingerprint: *mut u8,
) -> kv_status {
    guard(|| {
        let schema = kv_schema::open(schema)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::out(fingerprint.cast::<[u8; KV_DIGEST_BYTES]>(), "fingerprint")? };
        out.set(schema.fingerprint());
        Ok(())
    })
}

/// Ends the handle; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_schema_release(schema: *mut kv_schema) -> kv_status {
    guard(|| kv_schema::release(schema))
}

pub(crate) fn layer_of(layer: u32) -> Outcome<LayerId> {
    arg::small(layer, "layer").map(LayerId)
}

pub(crate) fn component_of(component: u32) -> Outcome<Component> {
    Component::from_index(component as usize)
        .ok_or_else(|| Failure::argument(format!("{component} is no kv_component")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_have_the_numbers_of_the_schema() {
        let named = [
            (kv_component::SwaLatent, Component::SwaLatent),
            (kv_component::C4Latent, Component::C4Latent),
            (kv_component::IndexK, Component::IndexK),
            (kv_component::C128Latent, Component::C128Latent),
            (kv_component::C4State, Component::C4State),
            (kv_component::IndexState, Component::IndexState),
            (kv_component::C128State, Component::C128State),
            (kv_component::MtpLatent, Component::MtpLatent),
        ];
        assert_eq!(named.len(), Component::COUNT);
        for (number, component) in named {
            assert_eq!(component_of(number as u32).unwrap(), component);
        }
    }
}
