//! The baseline: one thread copies the same pages, page by page, from one buffer to another.

use std::time::Instant;

use kvgate_kvcache::{BlockTable, CacheSchema, ComponentRow, LayerId, TransferPlan};

/// Where the pages of a hand-off lie, in buffers that are laid out as the pools are.
#[derive(Debug)]
pub struct Copy {
    source: Vec<u8>,
    target: Vec<u8>,
    /// Start in the source, start in the target, length; in the order of the posts.
    pages: Vec<(usize, usize, usize)>,
}

impl Copy {
    /// Buffers for the pages that `plan` moves from one table to the other.
    #[must_use]
    pub fn new(
        schema: &CacheSchema,
        plan: &TransferPlan,
        from: &BlockTable,
        to: &BlockTable,
        pool_bytes: u64,
    ) -> Self {
        let starts = pool_starts(schema, from, to);
        let mut pages = Vec::new();
        for layer in schema.layers() {
            for segment in 0..plan.segment_ends().len() as u32 {
                pages.extend(pages_of(schema, plan, (layer, segment), from, to, &starts));
            }
        }
        let end = pages
            .iter()
            .map(|(from, to, bytes)| from.max(to) + bytes)
            .max()
            .unwrap_or(0);
        let bytes = end.max(pool_bytes as usize);
        // Both buffers are touched, so that no page is mapped while the clock runs.
        let source = (0..bytes).map(|index| index as u8).collect();
        Self {
            source,
            target: vec![1; bytes],
            pages,
        }
    }

    /// Bytes of one run.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pages.iter().map(|(_, _, bytes)| *bytes as u64).sum()
    }

    /// Copies everything once; GB/s.
    pub fn run(&mut self) -> f64 {
        self.run_with(<[u8]>::copy_from_slice)
    }

    /// Copies everything once with `copy`, which gets the target and the source of each page; GB/s.
    pub fn run_with(&mut self, mut copy: impl FnMut(&mut [u8], &[u8])) -> f64 {
        let began = Instant::now();
        for &(from, to, bytes) in &self.pages {
            if let (Some(target), Some(source)) = (
                self.target.get_mut(to..to + bytes),
                self.source.get(from..from + bytes),
            ) {
                copy(target, source);
            }
        }
        let seconds = began.elapsed().as_secs_f64();
        std::hint::black_box(&self.target);
        self.bytes() as f64 / seconds / 1e9
    }
}

/// The pools one after the other, as large as the tables need them.
fn pool_starts(schema: &CacheSchema, from: &BlockTable, to: &BlockTable) -> Vec<usize> {
    let mut next = 0;
    let size = |row: &ComponentRow| {
        let pages = from
            .table_of(row)
            .iter()
            .chain(to.table_of(row))
            .max()
            .map_or(0, |page| page + 1);
        pages as usize * row.stride_bytes as usize
    };
    let place = |row: &ComponentRow| {
        let start = next;
        next += size(row);
        start
    };
    schema.rows().iter().map(place).collect()
}

fn pages_of(
    schema: &CacheSchema,
    plan: &TransferPlan,
    (layer, segment): (LayerId, u32),
    from: &BlockTable,
    to: &BlockTable,
    starts: &[usize],
) -> Vec<(usize, usize, usize)> {
    let mut pages = Vec::new();
    for planned in plan
        .chunks(layer)
        .into_iter()
        .filter(|planned| planned.segment == segment)
    {
        let index = planned.pool.index();
        let (Some(row), Some(start)) = (schema.rows().get(index), starts.get(index)) else {
            continue;
        };
        let bytes = row.stride_bytes as usize;
        let place = |table: &BlockTable, ordinal| {
            start + table.physical_page(row, ordinal) as usize * bytes
        };
        pages.extend(
            planned
                .ordinals
                .map(|ordinal| (place(from, ordinal), place(to, ordinal), bytes)),
        );
    }
    pages
}
