//! A decode state as tensors: what a host must hold to go on after N tokens.
//!
//! The form is that of the fixtures: per layer the window rows, the compressed entries, and the raw
//! projections and gates of the open and the overlapping group. Gates are raw (without the position
//! bias), index entries are not rotated. The caches hold ratio-128 groups as a running softmax, so
//! raw rows are folded when they are stored and come back as `comp.online` [3, D].

use std::collections::BTreeMap;
use std::path::Path;

use kvgate_kernels::cpu::compress::{OnlinePool, Source};
use kvgate_kernels::cpu::hadamard::hadamard;
use kvgate_kernels::{PagedMut, PagedRef};
use kvgate_kvcache::{LayerId, LayerMut};

use crate::bridge::{self, CompressedPages};
use crate::caches::LayerCaches;
use crate::dsv4::Model;
use crate::error::{ErrorKind, ModelError};
use crate::weights::safetensors::{SafetensorsFile, Tensor};

/// The state after `tokens` tokens.
#[derive(Clone, Debug)]
pub struct DecodeState {
    tokens: u32,
    tensors: BTreeMap<String, Tensor>,
}

/// Row counts of the tensors of one compressor at a length.
struct Groups {
    ratio: u32,
    width: usize,
    /// Channels of a projection row: both halves for ratio 4.
    row_width: usize,
    entries: u32,
    first_open: u32,
    open: u32,
    /// Rows of the group before the open one that the next entry needs.
    overlap: u32,
}

impl Groups {
    fn new(ratio: u32, width: usize, tokens: u32) -> Self {
        let entries = tokens / ratio;
        let overlaps = ratio == 4;
        Self {
            ratio,
            width,
            row_width: if overlaps { 2 * width } else { width },
            entries,
            first_open: entries * ratio,
            open: tokens % ratio,
            overlap: if overlaps && entries > 0 { 4 } else { 0 },
        }
    }
}

impl DecodeState {
    /// Reads a state file: `ids` `[N]` and the tensors of every layer.
    ///
    /// # Errors
    /// The file is damaged or a tensor is missing or mis-shaped.
    pub fn open(path: &Path, model: &Model) -> Result<Self, ModelError> {
        Self::from_tensors(SafetensorsFile::open(path)?.read_all()?, model)
    }

    /// A state from the tensors of such a file. Tensors that belong to no layer are left out.
    ///
    /// # Errors
    /// A tensor is missing, unknown or mis-shaped.
    pub fn from_tensors(
        mut tensors: BTreeMap<String, Tensor>,
        model: &Model,
    ) -> Result<Self, ModelError> {
        let ids = tensors.get("ids").and_then(Tensor::to_i64);
        let Some(ids) = ids.filter(|ids| !ids.is_empty()) else {
            return Err(ModelError::new(ErrorKind::TensorMissing {
                name: "ids (at least one)".into(),
            }));
        };
        let context = model.config().max_position_embeddings;
        let tokens = u32::try_from(ids.len()).unwrap_or(u32::MAX);
        if tokens > context {
            return Err(ModelError::input(
                "length of ids",
                ids.len() as u64,
                format!("at most {context}"),
            ));
        }
        tensors.retain(|name, _| name.starts_with("layers."));
        let shapes = shapes(model, tokens);
        for (name, tensor) in &tensors {
            let Some(expected) = shapes.get(name) else {
                return Err(ModelError::new(ErrorKind::TensorUnknown {
                    name: name.clone(),
                }));
            };
            if tensor.shape != expected || tensor.to_f32().is_none() {
                let (name, got, expected) = (name.clone(), tensor.shape.clone(), expected.to_vec());
                return Err(ModelError::new(ErrorKind::TensorShape {
                    name,
                    got,
                    expected,
                }));
            }
        }
        match shapes
            .iter()
            .find(|(name, shape)| shape[0] > 0 && !tensors.contains_key(*name))
        {
            Some((name, _)) => Err(ModelError::new(ErrorKind::TensorMissing {
                name: name.clone(),
            })),
            None => Ok(Self { tokens, tensors }),
        }
    }

    /// Tokens processed so far.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// The tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }

    /// The same length with other tensors of the same shapes, for damage tests.
    #[must_use]
    pub fn with_tensors(&self, tensors: BTreeMap<String, Tensor>) -> Self {
        Self {
            tokens: self.tokens,
            tensors,
        }
    }

    fn values(&self, name: &str) -> Vec<f32> {
        self.tensors
            .get(name)
            .and_then(Tensor::to_f32)
            .unwrap_or_default()
    }

    /// Writes the rows of the state into caches, in their format.
    ///
    /// # Errors
    /// The caches refuse.
    pub fn store(&self, model: &Model, caches: &mut dyn LayerCaches) -> Result<(), ModelError> {
        for index in 0..model.config().num_hidden_layers as u16 {
            self.store_layer(model, index, &mut caches.layer(LayerId(index))?)?;
            caches.layer_done(LayerId(index), 0..self.tokens)?;
        }
        Ok(())
    }

    fn store_layer(
        &self,
        model: &Model,
        index: u16,
        view: &mut LayerMut<'_>,
    ) -> Result<(), ModelError> {
        let config = model.config();
        let p = format!("layers.{index}");
        let mut pages = bridge::layer_pages(view, config, index)?;
        let window = self.tokens.min(config.sliding_window);
        let rows = self.values(&format!("{p}.window_kv"));
        store_rows(&mut pages.swa, self.tokens - window, &rows)?;
        if let Some(c4) = &mut pages.c4 {
            self.store_overlapping(&format!("{p}.comp"), config.head_dim, c4)?;
        }
        if let Some(pages) = &mut pages.index {
            self.store_overlapping(&format!("{p}.index"), config.index_head_dim, pages)?;
        }
        if let Some(c128) = &mut pages.c128 {
            let entries = self.values(&format!("{p}.comp.entries"));
            store_rows(&mut c128.entries, 0, &entries)?;
            if !self.tokens.is_multiple_of(128) {
                let open = self.online(model, index);
                c128.state.store_row(self.tokens / 128, &open)?;
            }
        }
        Ok(())
    }

    /// The open ratio-128 group of a layer as running softmax [3 * D]: folded from raw rows, or as read.
    pub fn online(&self, model: &Model, layer: u16) -> Vec<f32> {
        let p = format!("layers.{layer}.comp");
        let stored = self.values(&format!("{p}.online"));
        let compressor = &model.weights().layers[usize::from(layer)].attn.compressor;
        let Some(w) = compressor.as_ref().filter(|_| stored.is_empty()) else {
            return stored;
        };
        let width = w.norm.len();
        let mut state = vec![0.0; 3 * width];
        let (kv, gate) = (
            self.values(&format!("{p}.open_kv")),
            self.values(&format!("{p}.open_gate")),
        );
        let rows = kv
            .chunks_exact(width)
            .zip(gate.chunks_exact(width))
            .zip(w.ape.chunks_exact(width));
        for (i, ((kv, gate), ape)) in rows.enumerate() {
            let mut online = OnlinePool::new(&mut state);
            match i {
                0 => online.start(Source { kv, gate, ape }),
                _ => online.push(Source { kv, gate, ape }),
            }
        }
        state
    }

    fn store_overlapping(
        &self,
        p: &str,
        width: u32,
        pages: &mut CompressedPages<'_>,
    ) -> Result<(), ModelError> {
        let width = width as usize;
        let groups = Groups::new(4, width, self.tokens);
        let mut entries = self.values(&format!("{p}.entries"));
        if pages.is_rotated {
            for row in entries.chunks_exact_mut(width) {
                if !hadamard(row) {
                    return Err(pages.refuse_rotation(width));
                }
            }
        }
        store_rows(&mut pages.entries, 0, &entries)?;
        let mut row = vec![0.0f32; 4 * width];
        let halves = [
            self.values(&format!("{p}.overlap_kv")),
            self.values(&format!("{p}.overlap_gate")),
        ];
        for i in 0..groups.overlap as usize {
            row[..width].copy_from_slice(&halves[0][i * width..(i + 1) * width]);
            row[2 * width..3 * width].copy_from_slice(&halves[1][i * width..(i + 1) * width]);
            pages
                .state
                .store_row(groups.first_open - 4 + i as u32, &row)?;
        }
        let open = [
            self.values(&format!("{p}.open_kv")),
            self.values(&format!("{p}.open_gate")),
        ];
        for i in 0..groups.open as usize {
            row[..2 * width].copy_from_slice(&open[0][2 * i * width..2 * (i + 1) * width]);
            row[2 * width..].copy_from_slice(&open[1][2 * i * width..2 * (i + 1) * width]);
            pages.state.store_row(groups.first_open + i as u32, &row)?;
        }
        Ok(())
    }

    /// Reads the state after `tokens` tokens back from caches.
    ///
    /// # Errors
    /// The caches refuse.
    pub fn read(
        model: &Model,
        caches: &mut dyn LayerCaches,
        tokens: u32,
    ) -> Result<Self, ModelError> {
        let config = model.config();
        let mut tensors = BTreeMap::new();
        for index in 0..config.num_hidden_layers as u16 {
            let p = format!("layers.{index}");
            let mut view = caches.layer(LayerId(index))?;
            let pages = bridge::layer_pages(&mut view, config, index)?;
            let window = tokens.min(config.sliding_window);
            tensors.insert(
                format!("{p}.window_kv"),
                read_rows(pages.swa.as_ref(), tokens - window, window)?,
            );
            if let Some(c4) = &pages.c4 {
                read_overlapping(
                    &format!("{p}.comp"),
                    config.head_dim,
                    tokens,
                    c4,
                    &mut tensors,
                )?;
            }
            if let Some(index_pages) = &pages.index {
                read_overlapping(
                    &format!("{p}.index"),
                    config.index_head_dim,
                    tokens,
                    index_pages,
                    &mut tensors,
                )?;
            }
            if let Some(c128) = &pages.c128 {
                let entries = read_rows(c128.entries.as_ref(), 0, tokens / 128)?;
                tensors.insert(format!("{p}.comp.entries"), entries);
                if !tokens.is_multiple_of(128) {
                    let mut row = vec![0.0; 3 * config.head_dim as usize];
                    c128.state.as_ref().load_row(tokens / 128, &mut row)?;
                    tensors.insert(
                        format!("{p}.comp.online"),
                        Tensor::f32(&[3, config.head_dim as usize], &row),
                    );
                }
            }
        }
        Ok(Self { tokens, tensors })
    }
}

/// Names and shapes of the layer tensors at a length.
fn shapes(model: &Model, tokens: u32) -> BTreeMap<String, [usize; 2]> {
    let config = model.config();
    let dim = config.head_dim as usize;
    let mut shapes = BTreeMap::new();
    for (i, ratio) in config.compress_ratios.iter().enumerate() {
        let window = tokens.min(config.sliding_window) as usize;
        shapes.insert(format!("layers.{i}.window_kv"), [window, dim]);
        let mut compressors = Vec::new();
        if *ratio != 0 {
            compressors.push(("comp", Groups::new(*ratio, dim, tokens)));
        }
        if *ratio == 4 {
            compressors.push((
                "index",
                Groups::new(4, config.index_head_dim as usize, tokens),
            ));
        }
        for (name, g) in compressors {
            let mut add = |part: &str, rows: u32, width| {
                shapes.insert(format!("layers.{i}.{name}.{part}"), [rows as usize, width]);
            };
            add("entries", g.entries, g.width);
            add("open_kv", g.open, g.row_width);
            add("open_gate", g.open, g.row_width);
            if g.ratio == 4 {
                add("overlap_kv", g.overlap, g.width);
                add("overlap_gate", g.overlap, g.width);
            }
        }
    }
    shapes
}

fn store_rows(pages: &mut PagedMut<'_>, first: u32, rows: &[f32]) -> Result<(), ModelError> {
    let width = pages.encoding().channels();
    for (entry, row) in (first..).zip(rows.chunks_exact(width)) {
        pages.store_row(entry, row)?;
    }
    Ok(())
}

fn read_rows(pages: PagedRef<'_>, first: u32, count: u32) -> Result<Tensor, ModelError> {
    let width = pages.encoding().channels();
    let mut values = vec![0.0f32; count as usize * width];
    for (entry, row) in (first..).zip(values.chunks_exact_mut(width)) {
        pages.load_row(entry, row)?;
    }
    Ok(Tensor::f32(&[count as usize, width], &values))
}

fn read_overlapping(
    p: &str,
    width: u32,
    tokens: u32,
    pages: &CompressedPages<'_>,
    tensors: &mut BTreeMap<String, Tensor>,
) -> Result<(), ModelError> {
    let width = width as usize;
    let groups = Groups::new(4, width, tokens);
    let mut entries = read_rows(pages.entries.as_ref(), 0, groups.entries)?;
    if pages.is_rotated {
        let mut values = entries.to_f32().unwrap_or_default();
        if values.chunks_exact_mut(width).any(|row| !hadamard(row)) {
            return Err(pages.refuse_rotation(width));
        }
        entries = Tensor::f32(&[groups.entries as usize, width], &values);
    }
    tensors.insert(format!("{p}.entries"), entries);
    let mut part = |name: &str, first: u32, count: u32, channel: usize, channels: usize| {
        let mut values = vec![0.0f32; count as usize * channels];
        for (entry, row) in (first..).zip(values.chunks_exact_mut(channels)) {
            pages.state.as_ref().load_channels(entry, channel, row)?;
        }
        tensors.insert(
            format!("{p}.{name}"),
            Tensor::f32(&[count as usize, channels], &values),
        );
        Ok::<_, ModelError>(())
    };
    let overlap_first = groups.first_open - groups.overlap;
    part("overlap_kv", overlap_first, groups.overlap, 0, width)?;
    part(
        "overlap_gate",
        overlap_first,
        groups.overlap,
        2 * width,
        width,
    )?;
    part("open_kv", groups.first_open, groups.open, 0, 2 * width)?;
    part(
        "open_gate",
        groups.first_open,
        groups.open,
        2 * width,
        2 * width,
    )
}
