//! `--out`: what the decode side produced, as safetensors, written before anything is compared.

use std::fs::OpenOptions;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize};

use super::compare::Outcome;
use super::failure::{Failure, FailureKind};

/// Checks early that the file can be written, so that a wrong path costs no run. A file that this check
/// had to create is removed again: a run that fails leaves none.
pub fn check(path: &Path) -> Result<(), Failure> {
    let is_new = !path.exists();
    OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)
        .map_err(|error| refusal(path, &error))?;
    if is_new {
        std::fs::remove_file(path).map_err(|error| refusal(path, &error))
    } else {
        Ok(())
    }
}

/// Writes `prompt_ids` `[N]` i64, `output_ids` `[M]` i64, `decode_logits` `[M, V]` f32 and, if there are any,
/// `prefill_last_logits` `[V]` f32.
pub fn write(
    path: &Path,
    prompt_ids: &[u32],
    outcome: &Outcome,
    prefill_last: Option<&[u32]>,
    vocab_size: u32,
) -> Result<(), Failure> {
    let wide = |ids: &[u32]| -> Vec<u8> {
        ids.iter()
            .flat_map(|id| i64::from(*id).to_le_bytes())
            .collect()
    };
    let prompt_bytes = wide(prompt_ids);
    let output_bytes = wide(&outcome.output_ids);
    let logit_bytes: Vec<u8> = outcome
        .logits
        .iter()
        .flat_map(|logit| logit.to_le_bytes())
        .collect();
    let last_bytes: Vec<u8> = prefill_last
        .unwrap_or_default()
        .iter()
        .flat_map(|bits| bits.to_le_bytes())
        .collect();
    let steps = outcome.output_ids.len();
    let vocab = vocab_size as usize;
    let view = |dtype, shape, bytes| {
        TensorView::new(dtype, shape, bytes)
            .map_err(|error| Failure::internal(format!("--out: {error}")))
    };
    let mut tensors = vec![
        (
            "prompt_ids",
            view(Dtype::I64, vec![prompt_ids.len()], &prompt_bytes)?,
        ),
        ("output_ids", view(Dtype::I64, vec![steps], &output_bytes)?),
        (
            "decode_logits",
            view(Dtype::F32, vec![steps, vocab], &logit_bytes)?,
        ),
    ];
    if prefill_last.is_some() {
        tensors.push((
            "prefill_last_logits",
            view(Dtype::F32, vec![vocab], &last_bytes)?,
        ));
    }
    let bytes =
        serialize(tensors, None).map_err(|error| Failure::internal(format!("--out: {error}")))?;
    std::fs::write(path, bytes).map_err(|error| refusal(path, &error))
}

fn refusal(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(
        FailureKind::Output,
        format!("--out {}: {error}", path.display()),
    )
    .with_field("out", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_tensors_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.safetensors");
        let outcome = Outcome {
            output_ids: vec![9, 8],
            logits: vec![0.5, -0.0, 1.5, 2.5],
            ..Outcome::default()
        };
        write(&path, &[3, 4, 5], &outcome, None, 2).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("prompt_ids").unwrap().shape(), [3]);
        assert_eq!(
            file.tensor("output_ids").unwrap().data(),
            [9_i64, 8].map(i64::to_le_bytes).concat()
        );
        assert_eq!(file.tensor("decode_logits").unwrap().shape(), [2, 2]);
        assert_eq!(
            file.tensor("decode_logits").unwrap().data()[4..8],
            (-0.0_f32).to_le_bytes()
        );
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let failure = check(Path::new("/no/such/folder/out.safetensors")).unwrap_err();
        assert_eq!(
            (failure.exit_code(), failure.field.as_deref()),
            (2, Some("out"))
        );
    }
}
