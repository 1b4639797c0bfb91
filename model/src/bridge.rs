//! Cache views → kernel arguments: the only place where a view's address becomes rows.
//!
//! A layer asks its lease for a view per component; the bridge checks that each has the encoding and
//! width the layer computes with, and hands the kernels a [`PagedMut`] that lives as long as the view.

use kvgate_kernels::{PagedMut, PagedRef, Placement, RowEncoding};
use kvgate_kvcache::{Component, ComponentView, LayerMut, RowFormat};

use crate::config::Config;
use crate::error::ModelError;

/// The pages of one layer, as the forward pass uses them.
#[derive(Debug)]
pub(crate) struct LayerPages<'a> {
    layer: u16,
    pub(crate) swa: PagedMut<'a>,
    /// Main compressor of a ratio-4 layer.
    pub(crate) c4: Option<CompressedPages<'a>>,
    /// Indexer compressor of a ratio-4 layer.
    pub(crate) index: Option<CompressedPages<'a>>,
    /// Compressor of a ratio-128 layer.
    pub(crate) c128: Option<CompressedPages<'a>>,
}

/// Emitted rows and open state of one compressor.
#[derive(Debug)]
pub(crate) struct CompressedPages<'a> {
    layer: u16,
    component: &'static str,
    pub(crate) entries: PagedMut<'a>,
    pub(crate) state: PagedMut<'a>,
    /// Whether stored rows are Hadamard-rotated.
    pub(crate) is_rotated: bool,
}

impl LayerPages<'_> {
    /// The compressed latents of the layer.
    pub(crate) fn compressed_latent(&self) -> Result<PagedRef<'_>, ModelError> {
        match self.c4.as_ref().or(self.c128.as_ref()) {
            Some(pages) => Ok(pages.entries.as_ref()),
            None => Err(ModelError::cache(
                self.layer,
                "c4_latent",
                "the view lacks compressed rows",
            )),
        }
    }
}

impl CompressedPages<'_> {
    pub(crate) fn refuse_rotation(&self, channels: usize) -> ModelError {
        let reason =
            format!("rows of {channels} channels cannot be Hadamard-rotated (not a power of two)");
        ModelError::cache(self.layer, self.component, reason)
    }
}

/// The pages of a layer from its view.
///
/// # Errors
/// A component of the layer's kind is missing, or its rows do not have the encoding or width that the
/// configuration asks for.
pub(crate) fn layer_pages<'a>(
    view: &'a mut LayerMut<'_>,
    config: &Config,
    layer: u16,
) -> Result<LayerPages<'a>, ModelError> {
    let (dim, index_dim) = (config.head_dim, config.index_head_dim);
    let view = &*view;
    let take = |component: Component, channels: u32| paged(view, layer, component, channels);
    let compressor = |rows: Component, state: Component, channels: u32, parts: u32| {
        let entries = take(rows, channels)?;
        let is_rotated =
            rows == Component::IndexK && !matches!(entries.encoding(), RowEncoding::F32 { .. });
        let state = take(state, channels * parts)?;
        Ok::<_, ModelError>(Some(CompressedPages {
            layer,
            component: rows.id(),
            entries,
            state,
            is_rotated,
        }))
    };
    let ratio = config.compress_ratios[usize::from(layer)];
    let mut pages = LayerPages {
        layer,
        swa: take(Component::SwaLatent, dim)?,
        c4: None,
        index: None,
        c128: None,
    };
    if ratio == 4 {
        pages.c4 = compressor(Component::C4Latent, Component::C4State, dim, 4)?;
        pages.index = compressor(Component::IndexK, Component::IndexState, index_dim, 4)?;
    }
    if ratio == 128 {
        pages.c128 = compressor(Component::C128Latent, Component::C128State, dim, 3)?;
    }
    Ok(pages)
}

/// One component's rows. The returned views of different components never share bytes, since every
/// component has a pool of its own.
fn paged<'a>(
    view: &'a LayerMut<'_>,
    layer: u16,
    component: Component,
    channels: u32,
) -> Result<PagedMut<'a>, ModelError> {
    let id = component.id();
    let Some(v) = view.component(component) else {
        return Err(ModelError::cache(
            layer,
            id,
            "the view lacks this component",
        ));
    };
    if !v.is_writable() {
        return Err(ModelError::cache(layer, id, "the view is read-only"));
    }
    let encoding = encoding(v.format());
    if encoding.channels() != channels as usize {
        let reason = format!(
            "rows of {} channels, expected {channels}",
            encoding.channels()
        );
        return Err(ModelError::cache(layer, id, reason));
    }
    if v.base_ptr().is_null() {
        return Err(ModelError::cache(layer, id, "the pools have no memory"));
    }
    let placement = placement(&v, encoding)?;
    // SAFETY: I-1, I-19: the view comes from a write or append lease of this sequence, borrowed for 'a,
    // so its pages are live, and nobody else touches those that it may write; each component is taken once per call, and
    // components have separate pools. I-16: base, stride and slot count are the pool's own.
    Ok(unsafe { PagedMut::from_raw(v.base_ptr(), placement) }?)
}

fn placement<'a>(
    v: &ComponentView<'a>,
    encoding: RowEncoding,
) -> Result<Placement<'a>, ModelError> {
    let stride_bytes = usize::try_from(v.stride_bytes()).map_err(|_| {
        let expected = "a stride of this address space";
        ModelError::input("page stride bytes", v.stride_bytes(), expected)
    })?;
    Ok(Placement {
        stride_bytes,
        slot_count: v.slot_count(),
        rows_per_page: v.rows_per_page(),
        entries_per_page: v.entries_per_page(),
        table: v.table(),
        encoding,
        first_writable_entry: v.first_writable_entry(),
    })
}

/// How the kernels read the rows of a format.
pub(crate) fn encoding(format: RowFormat) -> RowEncoding {
    match format {
        RowFormat::LatentV4 { .. } => RowEncoding::LatentV4,
        RowFormat::F32 { channels } => RowEncoding::F32 { channels },
        RowFormat::IndexFp8 => RowEncoding::Fp8 { channels: 128 },
        RowFormat::IndexBf16 => RowEncoding::Bf16 { channels: 128 },
        RowFormat::F32Rows { channels, parts } => RowEncoding::F32 {
            channels: channels * parts,
        },
    }
}
