//! Digests of cache rows: what the comparison compares beside the logits.

use kvgate_kvcache::{CacheSchema, ComponentRow, ComponentView, LayerId};
use sha2::{Digest, Sha256};

use super::compare::RowDigests;

/// Digests of every live row of one layer after `tokens` tokens. `view` gives the pages of a component
/// of that layer; the caller holds whatever lease they need.
pub fn of_layer<'a>(
    schema: &CacheSchema,
    layer: LayerId,
    tokens: u32,
    view: impl Fn(&ComponentRow) -> Option<ComponentView<'a>>,
) -> Vec<RowDigests> {
    let digests = schema
        .rows_of(layer)
        .iter()
        .filter_map(|row| Some(of_component(schema, row, tokens, &view(row)?)));
    digests.collect()
}

fn of_component(
    schema: &CacheSchema,
    row: &ComponentRow,
    tokens: u32,
    view: &ComponentView<'_>,
) -> RowDigests {
    let live = row.live_entries(tokens, schema.geometry().window_tokens);
    let mut image = vec![0; view.row_image_bytes()];
    // A running state has one row for all the tokens of its group.
    let is_one_row = row.entries_per_page == u32::MAX;
    let last = if is_one_row {
        live.start + u32::from(!live.is_empty())
    } else {
        live.end
    };
    let digest = |entry: u32| {
        view.read_row(entry, &mut image);
        if row.is_overlap_row(entry, tokens) {
            overlap_digest(&image)
        } else {
            digest_of([&image[..]])
        }
    };
    RowDigests {
        component: row.component.id().to_owned(),
        layer: row.layer.0,
        first_entry: live.start,
        digests: (live.start..last).map(digest).collect(),
    }
}

/// Of a row of the closed group only the first of the two parts of kv and of the gates is read again.
fn overlap_digest(image: &[u8]) -> u64 {
    let (kv, gate) = image.split_at(image.len() / 2);
    digest_of([kv, gate].map(|parts| parts.split_at(parts.len() / 2).0))
}

fn digest_of<const N: usize>(parts: [&[u8]; N]) -> u64 {
    let mut sha = Sha256::new();
    for part in parts {
        sha.update(part);
    }
    let bytes: [u8; 32] = sha.finalize().into();
    bytes
        .iter()
        .take(8)
        .fold(0, |digest, byte| (digest << 8) | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlap_row_counts_without_the_parts_that_nobody_reads() {
        let row = |changed: usize| {
            let mut image = [0_u8; 16];
            image[changed] = 1;
            overlap_digest(&image)
        };
        let zero = overlap_digest(&[0; 16]);
        for (byte, is_read) in [
            (0, true),
            (3, true),
            (4, false),
            (7, false),
            (8, true),
            (11, true),
            (12, false),
        ] {
            assert_eq!(row(byte) != zero, is_read, "byte {byte}");
        }
    }
}
