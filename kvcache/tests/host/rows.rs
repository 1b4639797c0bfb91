//! The oracle: what every row of a request holds, computed from nothing but its place and its request.

use std::ops::Range;

use kvgate_kvcache::*;

use super::Request;
use crate::common::image;

/// The entries of a component that stand for the pages of `tokens`. Windows and states are final with the
/// last token only.
fn entries(row: &ComponentRow, request: Request, tokens: &Range<u32>) -> Range<u32> {
    let live = row.live_entries(request.tokens, 128);
    if row.space != Space::Page {
        return match tokens.end == request.tokens {
            true => live,
            false => 0..0,
        };
    }
    let first = tokens.start / 256 * row.entries_per_page;
    let end = tokens.end.div_ceil(256) * row.entries_per_page;
    live.start.max(first)..live.end.min(end)
}

/// Writes the rows of one layer for whole pages of tokens.
pub fn write(
    schema: &CacheSchema,
    lease: &mut WriteLease,
    layer: LayerId,
    request: Request,
    tokens: Range<u32>,
) {
    for row in schema.rows_of(layer) {
        write_component(schema, lease, layer, row.component, request, tokens.clone());
    }
}

/// Writes the rows of one component of one layer.
pub fn write_component(
    schema: &CacheSchema,
    lease: &mut WriteLease,
    layer: LayerId,
    component: Component,
    request: Request,
    tokens: Range<u32>,
) {
    let row = schema.row(layer, component).unwrap();
    let view = lease.layer_mut(layer).unwrap();
    let mut view = view.component(component).unwrap();
    for entry in entries(row, request, &tokens) {
        let image = image(row, entry, request.content, view.row_image_bytes());
        view.write_row(entry, &image).unwrap();
    }
}

/// The first row of a layer that is not the request's, in words; `None` when all are.
pub fn foreign(schema: &CacheSchema, view: &LayerRef<'_>, request: Request) -> Option<String> {
    let rows = schema.rows_of(view.layer()).iter();
    rows.filter_map(|row| Some((row, view.component(row.component)?)))
        .find_map(|(row, view)| foreign_row(row, &view, request))
}

/// [`foreign`] for slots that this process writes itself.
pub fn foreign_own(
    schema: &CacheSchema,
    lease: &mut WriteLease,
    request: Request,
) -> Option<String> {
    schema.layers().find_map(|layer| {
        let view = lease.layer_mut(layer).unwrap();
        let rows = schema.rows_of(layer).iter();
        rows.filter_map(|row| Some((row, view.component(row.component)?)))
            .find_map(|(row, view)| foreign_row(row, &view, request))
    })
}

fn foreign_row(row: &ComponentRow, view: &ComponentView<'_>, request: Request) -> Option<String> {
    let mut found = vec![0; view.row_image_bytes()];
    let entry = row.live_entries(request.tokens, 128).find(|entry| {
        view.read_row(*entry, &mut found);
        found != image(row, *entry, request.content, found.len())
    })?;
    let (component, layer, room) = (row.component, row.layer, request.room);
    let bytes = &found[..8];
    Some(format!(
        "{component} of layer {layer}, entry {entry}: {bytes:?} are not the bytes of room {room}"
    ))
}
