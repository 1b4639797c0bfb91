//! Attention over rows decoded from packed pages equals f64 maths on the same rows.
#![allow(clippy::unwrap_used)]

use kvgate_kernels::cpu::attention::{KeyRows, attend};
use kvgate_kernels::{Isa, PagedMut, Placement, RowEncoding};

const ROWS: usize = 50;

fn wave(i: usize, j: usize) -> f32 {
    ((i * 31 + j * 17) as f32 * 0.37).sin() * (1.0 + (i % 5) as f32)
}

/// The rows as a page gives them back.
fn decoded(encoding: RowEncoding) -> KeyRows {
    let channels = encoding.channels();
    let mut page = vec![0u8; encoding.page_bytes(64)];
    let placement = Placement {
        stride_bytes: page.len(),
        slot_count: 1,
        rows_per_page: 64,
        entries_per_page: 64,
        table: &[0],
        encoding,
        first_writable_entry: 0,
    };
    // SAFETY: I-1: the page outlives the view and nothing else touches it.
    let mut view = unsafe { PagedMut::from_raw(page.as_mut_ptr(), placement) }.unwrap();
    let mut rows = KeyRows::zeroed(ROWS, channels);
    for i in 0..ROWS {
        let row: Vec<f32> = (0..channels).map(|c| wave(i, c)).collect();
        view.store_row(i as u32, &row).unwrap();
        view.as_ref().load_row(i as u32, rows.row_mut(i)).unwrap();
    }
    rows
}

#[test]
fn attention_over_decoded_rows() {
    for encoding in [RowEncoding::LatentV4, RowEncoding::F32 { channels: 96 }] {
        let keys = decoded(encoding);
        let channels = encoding.channels();
        let sinks = [0.3, -1.0, 2.0];
        let mut q = KeyRows::zeroed(sinks.len(), channels);
        for h in 0..sinks.len() {
            for (c, v) in q.row_mut(h).iter_mut().enumerate() {
                *v = wave(h + 90, c) * 0.2;
            }
        }
        let picks: Vec<u32> = (0..ROWS as u32).filter(|i| i % 3 != 1).collect();
        let scale = 1.0 / (channels as f32).sqrt();
        let mut out = KeyRows::zeroed(sinks.len(), channels);
        attend(Isa::detect(), &q, &keys, &picks, &sinks, scale, &mut out).unwrap();
        for (h, sink) in sinks.iter().enumerate() {
            let dot = |i: u32| -> f64 {
                let pairs = q.row(h).iter().zip(keys.row(i as usize));
                pairs
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum::<f64>()
                    * f64::from(scale)
            };
            let weights: Vec<f64> = picks.iter().map(|i| dot(*i).exp()).collect();
            let total = weights.iter().sum::<f64>() + f64::from(*sink).exp();
            for (c, got) in out.row(h).iter().enumerate() {
                let rows = picks.iter().zip(&weights);
                let want: f64 = rows
                    .map(|(i, w)| w / total * f64::from(keys.row(*i as usize)[c]))
                    .sum();
                assert!(
                    (f64::from(*got) - want).abs() < 1e-5,
                    "{encoding:?} head {h} channel {c}"
                );
            }
        }
    }
}
