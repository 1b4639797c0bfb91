//! Gate on intermediates (G5): rows of single tokens in every layer.

use std::collections::HashMap;

use super::{
    CheckReport, LOGIT_BOUND, Tensors, f32_caches, floats, get, max_error, token_ids, unknown,
};
use crate::dsv4::{Logits, Model};
use crate::error::ModelError;
use crate::probe::Probe;

/// Tensors compared value by value.
const VALUES: [&str; 9] = [
    "hc_attn_x",
    "hc_attn_post",
    "hc_attn_comb",
    "attn.q",
    "attn.kv",
    "attn.o_pre_proj",
    "attn_out",
    "ffn_out",
    "out",
];

/// Probed rows of the positions of interest.
struct Recorder {
    positions: Vec<u32>,
    rows: HashMap<(u16, &'static str, u32), Vec<f32>>,
}

impl Probe for Recorder {
    fn row(&mut self, layer: u16, name: &'static str, position: u32, values: &[f32]) {
        if self.positions.contains(&position) {
            self.rows.insert((layer, name, position), values.to_vec());
        }
    }
}

impl Recorder {
    fn row(&self, layer: u16, name: &'static str, position: u32) -> &[f32] {
        self.rows
            .get(&(layer, name, position))
            .map_or(&[], Vec::as_slice)
    }

    /// The rows of all positions, each padded to `width` with `fill`.
    fn table(&self, layer: u16, name: &'static str, width: usize, fill: f32) -> Vec<f32> {
        let row = |p: &u32| {
            let mut row = self.row(layer, name, *p).to_vec();
            row.resize(width.max(row.len()), fill);
            row
        };
        self.positions.iter().flat_map(row).collect()
    }
}

/// Runs prompt a up to the last stored row and compares every stored intermediate.
pub(super) fn check(
    model: &Model,
    golden: &Tensors,
    debug: &Tensors,
    report: &mut CheckReport,
) -> Result<(), ModelError> {
    let positions = token_ids(debug, "rows")?;
    let ids = token_ids(golden, "a.ids")?;
    let count = positions.iter().max().map_or(0, |p| *p as usize + 1);
    if count > ids.len() {
        return Err(ModelError::input(
            "debug row",
            count as u64 - 1,
            format!("a position below {}", ids.len()),
        ));
    }
    let mut recorder = Recorder {
        positions,
        rows: HashMap::new(),
    };
    let mut caches = f32_caches(model, count)?;
    model.forward(
        &ids[..count],
        0,
        &mut caches,
        Logits::None,
        Some(&mut recorder),
    )?;
    for name in debug.keys().filter(|n| *n != "rows") {
        let place = name.strip_prefix("layers.").and_then(|n| n.split_once('.'));
        let Some((layer, part)) = place.and_then(|(l, part)| Some((l.parse::<u16>().ok()?, part)))
        else {
            return Err(unknown(name));
        };
        if u32::from(layer) >= model.config().num_hidden_layers {
            return Err(unknown(name));
        }
        let (error, bound) = compare(&recorder, debug, name, layer, part)?;
        report.push("G5", name, "", error, bound);
    }
    Ok(())
}

fn compare(
    recorder: &Recorder,
    debug: &Tensors,
    name: &str,
    layer: u16,
    part: &str,
) -> Result<(f64, f64), ModelError> {
    let width = get(debug, name)?.shape.get(1).copied().unwrap_or(0);
    if let Some(probe) = VALUES.into_iter().find(|v| *v == part) {
        let got = recorder.table(layer, probe, 0, 0.0);
        return Ok((max_error(name, &got, &floats(debug, name)?)?, LOGIT_BOUND));
    }
    match part {
        "attn.indexer.score" => {
            let got = recorder.table(layer, "attn.indexer.score", width, f32::NEG_INFINITY);
            Ok((max_error(name, &got, &floats(debug, name)?)?, LOGIT_BOUND))
        }
        "attn.indexer.selected" => {
            let mut mask = vec![0.0f32; recorder.positions.len() * width];
            for (i, position) in recorder.positions.iter().enumerate() {
                for entry in recorder.row(layer, "attn.indexer.selected", *position) {
                    if let Some(bit) = mask.get_mut(i * width + *entry as usize) {
                        *bit = 1.0;
                    }
                }
            }
            let stored: Vec<f32> = token_ids(debug, name)?.iter().map(|v| *v as f32).collect();
            Ok((max_error(name, &mask, &stored)?, 0.0))
        }
        "ffn.expert_idx" => {
            let got = sorted(&recorder.table(layer, "ffn.expert_idx", 0, 0.0), width);
            let stored: Vec<f32> = token_ids(debug, name)?.iter().map(|v| *v as f32).collect();
            Ok((max_error(name, &got, &sorted(&stored, width))?, 0.0))
        }
        "ffn.expert_weight" => {
            // As sets of pairs: both sides in the order of their expert ids.
            let ids = recorder.table(layer, "ffn.expert_idx", 0, 0.0);
            let got = by_id(
                &recorder.table(layer, "ffn.expert_weight", 0, 0.0),
                &ids,
                width,
            );
            let id_name = name.replace("expert_weight", "expert_idx");
            let stored_ids: Vec<f32> = token_ids(debug, &id_name)?
                .iter()
                .map(|v| *v as f32)
                .collect();
            let stored = by_id(&floats(debug, name)?, &stored_ids, width);
            Ok((max_error(name, &got, &stored)?, LOGIT_BOUND))
        }
        _ => Err(unknown(name)),
    }
}

fn sorted(rows: &[f32], width: usize) -> Vec<f32> {
    by_id(rows, rows, width)
}

/// Every row in ascending order of the ids beside it.
fn by_id(rows: &[f32], ids: &[f32], width: usize) -> Vec<f32> {
    let width = width.max(1);
    let mut out = Vec::with_capacity(rows.len());
    for (row, ids) in rows.chunks(width).zip(ids.chunks(width)) {
        let mut pairs: Vec<(f32, f32)> = ids.iter().copied().zip(row.iter().copied()).collect();
        pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
        out.extend(pairs.iter().map(|p| p.1));
    }
    out
}
