//! Temporary.
#![allow(missing_docs, missing_debug_implementations)]
use crate::{LayerCaches, ModelError};
use kvgate_kvcache::*;
use std::ops::Range;
pub struct ComponentView<'a> {
    pub base: *mut u8,
    pub stride_bytes: u64,
    pub slot_count: u32,
    pub format: RowFormat,
    pub rows_per_page: u32,
    pub entries_per_page: u32,
    pub table: &'a [u32],
    pub writable: bool,
}
pub struct LayerMut<'a> {
    pub pools: &'a mut Vec<Pool>,
    pub layer: LayerId,
}
pub struct Pool {
    pub row: ComponentRow,
    pub bytes: Vec<u8>,
    pub table: Vec<u32>,
}
impl LayerMut<'_> {
    pub fn component(&self, c: Component) -> Option<ComponentView<'_>> {
        let p = self
            .pools
            .iter()
            .find(|p| p.row.layer == self.layer && p.row.component == c)?;
        Some(ComponentView {
            base: p.bytes.as_ptr() as *mut u8,
            stride_bytes: p.row.stride_bytes,
            slot_count: (p.bytes.len() as u64 / p.row.stride_bytes) as u32,
            format: p.row.format,
            rows_per_page: p.row.rows_per_page,
            entries_per_page: p.row.entries_per_page,
            table: &p.table,
            writable: true,
        })
    }
}
pub struct MonoCaches {
    pools: Vec<Pool>,
}
impl MonoCaches {
    pub fn new(schema: &CacheSchema, tokens: u32) -> Result<Self, ModelError> {
        let counts = schema.slots_for(tokens);
        let pools = schema
            .rows()
            .iter()
            .map(|row| {
                let n = counts.of(row.space) * row.pages_per_slot;
                Pool {
                    row: *row,
                    bytes: vec![0xA7; (n as u64 * row.stride_bytes) as usize],
                    table: (0..n).rev().collect(),
                }
            })
            .collect();
        Ok(Self { pools })
    }
}
impl LayerCaches for MonoCaches {
    fn layer(&mut self, layer: LayerId) -> Result<LayerMut<'_>, ModelError> {
        Ok(LayerMut {
            pools: &mut self.pools,
            layer,
        })
    }
    fn layer_done(&mut self, _: LayerId, _: Range<u32>) -> Result<(), ModelError> {
        Ok(())
    }
}
