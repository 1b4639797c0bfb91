//! Conversations, and the rows that each of them has.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use kvgate_kvcache::canary::{PageDigest, page_digests};
use kvgate_kvcache::{PoolSet, Room, WriteLease};

use crate::common::{ROOMY, World, image};

/// Tokens of a page.
pub const PAGE: u32 = 256;

/// Whose tokens a conversation has at a place: 5 is a branch of 1, 6 one of 5.
fn owner(number: u32, token: u32) -> u32 {
    match number {
        5 if token < PAGE => 1,
        6 if token < 2 * PAGE => owner(5, token),
        _ => number,
    }
}

pub fn tokens_of(number: u32, count: u32) -> Vec<u32> {
    (0..count)
        .map(|token| owner(number, token) * 100_000 + token)
        .collect()
}

/// Writes the rows of a conversation for `from..end`, as a forward would, and answers the witnesses.
pub fn write_rows(
    pools: &PoolSet,
    lease: &mut WriteLease,
    number: u32,
    from: u32,
    end: u32,
) -> Vec<kvgate_kvcache::WrittenLayer> {
    let mut written = Vec::new();
    for layer in pools.schema().layers() {
        let view = lease.layer_mut(layer).unwrap();
        for row in pools.schema().rows_of(layer) {
            let mut rows = view.component(row.component).unwrap();
            let group = row.component.spec().group_tokens;
            let is_paged = row.space == kvgate_kvcache::schema::Space::Page;
            for entry in row.live_entries(end, 128) {
                let token = if is_paged { entry * group } else { entry };
                if token >= from {
                    let image = image(row, entry, owner(number, token), rows.row_image_bytes());
                    rows.write_row(entry, &image).unwrap();
                }
            }
        }
        written.push(lease.commit_layer(layer, from..end).unwrap());
    }
    written
}

/// What a prefix is: the rows of a run that no cache has had a part in.
pub fn expected(number: u32, blocks: u32) -> Vec<PageDigest> {
    static ALL: OnceLock<BTreeMap<(u32, u32), Vec<PageDigest>>> = OnceLock::new();
    let compute = || {
        let world = World::local(&ROOMY);
        let all = (1..=6).flat_map(|number| (1..=4).map(move |blocks| (number, blocks)));
        let rows = |(number, blocks)| {
            let (pools, end) = (world.pools(), blocks * PAGE);
            let mut lease = pools.reserve(end + 8, Room(0)).unwrap();
            write_rows(pools, &mut lease, number, 0, end);
            let digests = page_digests(pools, lease.block_table(), end);
            ((number, blocks), digests)
        };
        all.map(rows).collect()
    };
    ALL.get_or_init(compute)[&(number, blocks)].clone()
}
