//! One process computes everything.

use std::path::Path;

use kvgate_kvcache::Formats;
use kvgate_model::{DecodeState, Logits, Model, ModelError, MonoCaches};

use super::{Answer, Job, schema};
use crate::handoff::failure::Failure;
use crate::tool::model_failure;

/// The prompt in chunks, then the steps.
pub(super) fn run(model: &Model, job: &Job) -> Result<Answer, Failure> {
    let failure = |error: ModelError| model_failure(&error);
    let total = job.prompt.len() + job.steps.len();
    let mut caches = caches(model, &job.formats, total)?;
    let mut start = 0u32;
    let mut prefill_last = Vec::new();
    for chunk in job.prompt.chunks(job.chunk as usize) {
        let end = start + chunk.len() as u32;
        let want = if end as usize == job.prompt.len() {
            Logits::Last
        } else {
            Logits::None
        };
        prefill_last = model
            .forward(chunk, start, &mut caches, want, None)
            .map_err(failure)?;
        start = end;
    }
    let decode = decode(model, &job.steps, start, &mut caches).map_err(failure)?;
    Ok(Answer {
        prefill_last,
        decode,
    })
}

/// The steps from a stored state.
pub(super) fn resume(
    model: &Model,
    path: &Path,
    next: &[u32],
    formats: &Formats,
) -> Result<Answer, Failure> {
    let failure = |error: ModelError| model_failure(&error);
    let state = DecodeState::open(path, model).map_err(failure)?;
    let total = state.tokens() as usize + next.len();
    let mut caches = caches(model, formats, total)?;
    state.store(model, &mut caches).map_err(failure)?;
    let decode = decode(model, next, state.tokens(), &mut caches).map_err(failure)?;
    Ok(Answer {
        prefill_last: Vec::new(),
        decode,
    })
}

fn caches(model: &Model, formats: &Formats, total_tokens: usize) -> Result<MonoCaches, Failure> {
    let context = model.config().max_position_embeddings;
    let tokens = u32::try_from(total_tokens).ok().filter(|t| *t <= context);
    let Some(tokens) = tokens else {
        let expected = format!("at most {context} tokens (max_position_embeddings)");
        return Err(Failure::input("prompt and steps", total_tokens, &expected));
    };
    MonoCaches::new(&schema(model, formats)?, tokens).map_err(|error| model_failure(&error))
}

fn decode(
    model: &Model,
    ids: &[u32],
    start: u32,
    caches: &mut MonoCaches,
) -> Result<Vec<f32>, ModelError> {
    let mut logits = Vec::with_capacity(ids.len() * model.config().vocab_size as usize);
    for (position, id) in (start..).zip(ids) {
        logits.extend(model.forward(&[*id], position, caches, Logits::Last, None)?);
    }
    Ok(logits)
}
