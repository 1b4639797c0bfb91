//! Rows between the pages of a pool and the payload of a record.
//!
//! A record holds the image of each row, data and scales, one behind the other; of an overlap row only the
//! first half of its keys and of its gates, which is all that is read again. Where the rows lie in their pages is
//! the business of the views.

use std::ops::Range;

use kvgate_kvcache::schema::{CacheSchema, ComponentRow, PAGE_TOKENS};
use kvgate_kvcache::{ComponentView, LayerId, PrefixLease, WriteLease};
use kvgate_transfer::Deadline;

use crate::record::{Part, RecordKind, RecordShape, Verified};

/// The entries of one component that a record holds: of the block behind `position`, or of the boundary there.
fn entries_of(
    schema: &CacheSchema,
    row: &ComponentRow,
    kind: RecordKind,
    position: u32,
) -> Range<u32> {
    match kind {
        RecordKind::Block => {
            let group = row.component.spec().group_tokens;
            position / group..(position + PAGE_TOKENS) / group
        }
        RecordKind::Checkpoint => row.live_entries(position, schema.geometry().window_tokens),
    }
}

/// Copies the rows of one record out of a prefix that is whole and ready.
///
/// # Errors
/// `Gate` when a layer of the prefix is not ready; `UnknownLayer` for a shape of another schema.
pub(super) fn gather(
    schema: &CacheSchema,
    from: &PrefixLease,
    shape: &RecordShape,
    position: u32,
    payload: &mut [u8],
) -> Result<(), kvgate_kvcache::Error> {
    let mut rows = RowImage::default();
    for_parts(shape, |layer, parts| {
        let ready = from.layer(layer, Deadline::now())?;
        for part in parts {
            let (row, view) = place_of(schema, part, ready.view().component(part.component))?;
            let entries = entries_of(schema, row, shape.kind(), position);
            let kept = payload[part.range()].chunks_exact_mut(part.row_bytes as usize);
            for (entry, kept) in entries.zip(kept) {
                view.read_row(entry, rows.of_length(view.row_image_bytes()));
                rows.keep(part.is_half, kept);
            }
        }
        Ok(())
    })
}

/// Writes the rows of one verified record into slots that nobody else sees yet.
///
/// # Errors
/// `ReadOnly` when the slots of the rows are shared, `UnknownLayer` for a shape of another schema.
pub(super) fn scatter(
    schema: &CacheSchema,
    into: &mut WriteLease,
    shape: &RecordShape,
    position: u32,
    record: &Verified<'_>,
) -> Result<(), kvgate_kvcache::Error> {
    let (mut rows, payload) = (RowImage::default(), record.payload());
    for_parts(shape, |layer, parts| {
        let writable = into.layer_mut(layer)?;
        for part in parts {
            let (row, mut view) = place_of(schema, part, writable.component(part.component))?;
            let entries = entries_of(schema, row, shape.kind(), position);
            let kept = payload[part.range()].chunks_exact(part.row_bytes as usize);
            for (entry, kept) in entries.zip(kept) {
                let image = rows.of_length(view.row_image_bytes());
                restore(part.is_half, kept, image);
                view.write_row(entry, image)?;
            }
        }
        Ok(())
    })
}

/// Runs `work` once per layer with its parts; a shape has them ordered by layer.
fn for_parts(
    shape: &RecordShape,
    mut work: impl FnMut(LayerId, &[Part]) -> Result<(), kvgate_kvcache::Error>,
) -> Result<(), kvgate_kvcache::Error> {
    let same_layer = |a: &Part, b: &Part| a.layer == b.layer;
    shape
        .parts()
        .chunk_by(same_layer)
        .try_for_each(|parts| work(parts[0].layer, parts))
}

fn place_of<'s, 'v>(
    schema: &'s CacheSchema,
    part: &Part,
    view: Option<ComponentView<'v>>,
) -> Result<(&'s ComponentRow, ComponentView<'v>), kvgate_kvcache::Error> {
    schema
        .row(part.layer, part.component)
        .zip(view)
        .ok_or_else(|| {
            kvgate_kvcache::ErrorKind::InvalidRequest {
                field: "component of a record",
                value: part.component.index() as u64,
                expected: format!("one that layer {} has slots of", part.layer),
            }
            .into()
        })
}

/// Room for the image of one row.
#[derive(Default)]
struct RowImage(Vec<u8>);

impl RowImage {
    fn of_length(&mut self, bytes: usize) -> &mut [u8] {
        self.0.resize(bytes, 0);
        &mut self.0
    }

    /// Puts what a record keeps of the row into `kept`. A pad byte, which no reader reads, becomes zero.
    fn keep(&self, is_half: bool, kept: &mut [u8]) {
        if is_half {
            let [kv, gate] = overlap_halves(self.0.len());
            let (kept_kv, kept_gate) = kept.split_at_mut(kv.len());
            kept_kv.copy_from_slice(&self.0[kv]);
            kept_gate.copy_from_slice(&self.0[gate]);
            return;
        }
        let (row, pad) = kept.split_at_mut(self.0.len());
        row.copy_from_slice(&self.0);
        pad.fill(0);
    }
}

/// Makes the image of a row from what a record keeps of it. What nobody reads again is zero.
fn restore(is_half: bool, kept: &[u8], image: &mut [u8]) {
    if is_half {
        let [kv, gate] = overlap_halves(image.len());
        image.fill(0);
        let (kept_kv, kept_gate) = kept.split_at(kv.len());
        image[kv].copy_from_slice(kept_kv);
        image[gate].copy_from_slice(kept_gate);
        return;
    }
    let bytes = image.len();
    image.copy_from_slice(&kept[..bytes]);
}

/// Of four equal parts of a state row, keys and gates of the group before come first and third.
fn overlap_halves(row_bytes: usize) -> [Range<usize>; 2] {
    let quarter = row_bytes / 4;
    [0..quarter, 2 * quarter..3 * quarter]
}
