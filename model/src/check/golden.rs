//! Gates on logits (G1, G2, G3) and on the decode state (G4a, G4b).

use super::{
    CheckReport, LOGIT_BOUND, Tensors, f32_caches, floats, get, max_error, token_ids, unknown,
};
use crate::caches::LayerCaches;
use crate::dsv4::{Logits, Model};
use crate::error::{ErrorKind, ModelError};
use crate::probe::Probe;
use crate::state::DecodeState;
use crate::weights::safetensors::Tensor;

/// Chunk bounds of G3.
const CHUNKS: [usize; 3] = [50, 51, 133];

/// What a tensor of golden.safetensors is compared with.
enum Golden<'a> {
    /// The ids of a prompt: an input.
    Ids,
    /// Logits of a whole prompt.
    All { prompt: &'a str },
    /// Logits of the last of N prompt tokens.
    Last { tokens: usize },
    /// Logits of the tokens that follow N prompt tokens one by one.
    Decode { tokens: usize },
    /// A gate that is not supported yet.
    Later(&'static str),
}

fn classify(name: &str) -> Option<Golden<'_>> {
    Some(match name {
        "a.ids" | "b.ids" => Golden::Ids,
        "a.logits" => Golden::All { prompt: "a" },
        "b.logits" => Golden::All { prompt: "b" },
        "a.mtp_logits" => Golden::Later("G6"),
        "a.latent_logits" | "a.kv8_logits" | "a.kv_logits" => Golden::Later("G8"),
        "a.sim_logits" => Golden::Later("G9"),
        _ => {
            let (tokens, kind) = name.strip_prefix("a.prefill")?.split_once('.')?;
            let tokens = tokens.parse().ok()?;
            match kind {
                "last_logits" => Golden::Last { tokens },
                "decode_logits" => Golden::Decode { tokens },
                _ => return None,
            }
        }
    })
}

/// G1, G2 and G3.
pub(super) fn check_logits(
    model: &Model,
    golden: &Tensors,
    report: &mut CheckReport,
) -> Result<(), ModelError> {
    for name in golden.keys() {
        match classify(name).ok_or_else(|| unknown(name))? {
            Golden::Ids => {}
            Golden::Later(gate) => report.later(gate, name),
            Golden::All { prompt } => {
                let ids = token_ids(golden, &format!("{prompt}.ids"))?;
                let expected = floats(golden, name)?;
                let chunks = CHUNKS.iter().copied().filter(|c| *c < ids.len());
                let mut modes = vec![("G1", "one shot", vec![ids.len()])];
                if prompt == "a" {
                    modes.push(("G3", "token by token", (1..=ids.len()).collect()));
                    modes.push((
                        "G3",
                        "chunks 50, 51, 133, end",
                        chunks.chain([ids.len()]).collect(),
                    ));
                }
                for (gate, how, ends) in modes {
                    let mut caches = f32_caches(model, ids.len())?;
                    let got = run_chunks(model, &ids, 0, &ends, &mut caches)?;
                    report.push(
                        gate,
                        name,
                        how,
                        max_error(name, &got, &expected)?,
                        LOGIT_BOUND,
                    );
                }
            }
            Golden::Last { tokens } => {
                let ids = prompt_of(golden, name, tokens)?;
                let got =
                    model.forward(&ids, 0, &mut f32_caches(model, tokens)?, Logits::Last, None)?;
                report.push(
                    "G2",
                    name,
                    "",
                    max_error(name, &got, &floats(golden, name)?)?,
                    LOGIT_BOUND,
                );
            }
            Golden::Decode { tokens } => {
                let steps = *get(golden, name)?.shape.first().unwrap_or(&0);
                let ids = prompt_of(golden, name, tokens + steps)?;
                let mut caches = f32_caches(model, ids.len())?;
                model.forward(&ids[..tokens], 0, &mut caches, Logits::None, None)?;
                let ends: Vec<usize> = (tokens + 1..=ids.len()).collect();
                let got = run_chunks(model, &ids, tokens, &ends, &mut caches)?;
                report.push(
                    "G2",
                    name,
                    "",
                    max_error(name, &got, &floats(golden, name)?)?,
                    LOGIT_BOUND,
                );
            }
        }
    }
    Ok(())
}

/// The first `tokens` ids of prompt a.
fn prompt_of(golden: &Tensors, name: &str, tokens: usize) -> Result<Vec<u32>, ModelError> {
    let ids = token_ids(golden, "a.ids")?;
    match ids.get(..tokens) {
        Some(ids) => Ok(ids.to_vec()),
        None => {
            let (name, value) = (name.to_owned(), format!("{tokens} tokens"));
            let expected = format!("at most the {} tokens of a.ids", ids.len());
            Err(ModelError::new(ErrorKind::TensorValue {
                name,
                value,
                expected,
            }))
        }
    }
}

/// Logits of ids[start..], in calls that end at `ends`.
fn run_chunks(
    model: &Model,
    ids: &[u32],
    start: usize,
    ends: &[usize],
    caches: &mut dyn LayerCaches,
) -> Result<Vec<f32>, ModelError> {
    let (mut from, mut logits) = (start, Vec::new());
    for end in ends {
        logits.extend(model.forward(&ids[from..*end], from as u32, caches, Logits::All, None)?);
        from = *end;
    }
    Ok(logits)
}

/// Keeps the streams behind the last layer at one position.
struct LastStreams {
    layer: u16,
    position: u32,
    values: Vec<f32>,
}

impl Probe for LastStreams {
    fn row(&mut self, layer: u16, name: &'static str, position: u32, values: &[f32]) {
        if (layer, name, position) == (self.layer, "out", self.position) {
            self.values = values.to_vec();
        }
    }
}

/// G4a: the state after the stored prompt, and the decode from the stored state; G4b: prompt a from there.
pub(super) fn check_state(
    model: &Model,
    golden: &Tensors,
    handoff: &Tensors,
    report: &mut CheckReport,
) -> Result<(), ModelError> {
    let state = DecodeState::from_tensors(handoff.clone(), model)?;
    let ids = token_ids(handoff, "ids")?;
    let last = state.tokens() - 1;
    let mut caches = f32_caches(model, ids.len())?;
    let layer = model.config().num_hidden_layers as u16 - 1;
    let mut probe = LastStreams {
        layer,
        position: last,
        values: Vec::new(),
    };
    let logits = model.forward(&ids, 0, &mut caches, Logits::Last, Some(&mut probe))?;
    let own = DecodeState::read(model, &mut caches, state.tokens())?;
    for (name, stored) in handoff {
        let got = match name.as_str() {
            "ids" | "next_ids" => continue,
            "decode_logits" => decode_from(model, &state, &token_ids(handoff, "next_ids")?)?,
            "last_logits" => logits.clone(),
            "final_streams_last" => probe.values.clone(),
            _ => match own.tensors().get(name) {
                Some(own) => own.to_f32().unwrap_or_default(),
                None => {
                    check_open_group(model, &state, &own, name, report)?;
                    continue;
                }
            },
        };
        let error = max_error(name, &got, &floats(handoff, name)?)?;
        debug_assert_eq!(stored.shape.iter().product::<usize>(), got.len());
        report.push("G4a", name, "", error, LOGIT_BOUND);
    }
    if let Some(rows) = golden.get("a.logits").filter(|_| continues(golden, &ids)) {
        check_continuation(model, &state, golden, rows, report)?;
    }
    Ok(())
}

/// Whether prompt a begins with the ids of the state.
fn continues(golden: &Tensors, ids: &[u32]) -> bool {
    token_ids(golden, "a.ids").is_ok_and(|a| a.len() > ids.len() && a.starts_with(ids))
}

fn decode_from(model: &Model, state: &DecodeState, next: &[u32]) -> Result<Vec<f32>, ModelError> {
    let start = state.tokens() as usize;
    let mut caches = f32_caches(model, start + next.len())?;
    state.store(model, &mut caches)?;
    let mut logits = Vec::new();
    for (position, id) in (state.tokens()..).zip(next) {
        logits.extend(model.forward(&[*id], position, &mut caches, Logits::Last, None)?);
    }
    Ok(logits)
}

/// Raw ratio-128 rows are compared in the running form; the kv tensor stands for both.
fn check_open_group(
    model: &Model,
    state: &DecodeState,
    own: &DecodeState,
    name: &str,
    report: &mut CheckReport,
) -> Result<(), ModelError> {
    let layer = name.strip_prefix("layers.").and_then(|n| n.split_once('.'));
    let Some((layer, part)) = layer.and_then(|(l, part)| Some((l.parse::<u16>().ok()?, part)))
    else {
        return Err(unknown(name));
    };
    if !["comp.open_kv", "comp.open_gate"].contains(&part) {
        return Err(unknown(name));
    }
    let error = max_error(name, &own.online(model, layer), &state.online(model, layer))?;
    report.push(
        "G4a",
        name,
        "running softmax of kv and gate rows",
        error,
        LOGIT_BOUND,
    );
    Ok(())
}

/// G4b: the rest of prompt a, across the next group of 128.
fn check_continuation(
    model: &Model,
    state: &DecodeState,
    golden: &Tensors,
    rows: &Tensor,
    report: &mut CheckReport,
) -> Result<(), ModelError> {
    let ids = token_ids(golden, "a.ids")?;
    let start = state.tokens() as usize;
    let expected = rows.to_f32().unwrap_or_default();
    let vocabulary = model.config().vocab_size as usize;
    let Some(expected) = expected.get(start * vocabulary..) else {
        return Err(ModelError::new(ErrorKind::TensorShape {
            name: "a.logits".into(),
            got: rows.shape.clone(),
            expected: vec![ids.len(), vocabulary],
        }));
    };
    let one_by_one: Vec<usize> = (start + 1..=ids.len()).collect();
    for (how, ends) in [
        ("one call from the state", vec![ids.len()]),
        ("token by token from the state", one_by_one),
    ] {
        let mut caches = f32_caches(model, ids.len())?;
        state.store(model, &mut caches)?;
        let got = run_chunks(model, &ids, start, &ends, &mut caches)?;
        report.push(
            "G4b",
            "a.logits",
            how,
            max_error("a.logits", &got, expected)?,
            LOGIT_BOUND,
        );
    }
    Ok(())
}
