//! `v4-logits`: the logits of given tokens, computed by one host or across a hand-off.

mod handoff;
mod mono;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Parser, ValueEnum};
use kvgate_kvcache::{CacheSchema, Formats, IndexKFormat, LatentFormat, WindowPage};
use kvgate_model::Model;
use kvgate_model::safetensors::{SafetensorsFile, Tensor, write_tensors};
use serde_json::json;

use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::options::{IndexK, Latent, Transport};
use crate::handoff::version;
use crate::tool::{Finished, model_failure};

/// Names the JSON object.
pub const SCHEMA: &str = "kvgate.v4-logits/1";

/// Where the prompt is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "kebab-case")]
pub enum Mode {
    /// One process computes everything.
    #[default]
    Mono,
    /// One process computes the prompt, another one decodes from its cache.
    Handoff,
}

/// Computes logits with a checkpoint and writes them as safetensors.
#[derive(Clone, Debug, Parser)]
#[command(name = "v4-logits", version = version::LINE)]
pub struct Args {
    /// Checkpoint folder with hub names.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Token ids: a safetensors file and the name of an i64 or i32 tensor `[T]`.
    #[arg(long, value_name = "FILE:TENSOR", required_unless_present = "state")]
    pub ids: Option<String>,
    /// Prompt tokens.
    #[arg(
        long,
        value_name = "N",
        required_unless_present = "state",
        conflicts_with = "state"
    )]
    pub prefill: Option<u32>,
    /// Tokens fed one by one after the prompt, or after the stored state.
    #[arg(long, value_name = "M", required_unless_present = "state")]
    pub steps: Option<u32>,
    /// Prompt tokens of one call; the whole prompt if left out.
    #[arg(long, value_name = "C", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunk: Option<u32>,
    /// Where the prompt is computed.
    #[arg(long, value_enum, default_value_t)]
    pub mode: Mode,
    /// How the bytes travel in mode handoff.
    #[arg(long, value_enum, default_value_t)]
    pub transport: Transport,
    /// Storage of the indexer keys.
    #[arg(long, value_enum, default_value_t = IndexK::F32)]
    pub index_k: IndexK,
    /// Storage of the latents.
    #[arg(long, value_enum, default_value_t = Latent::F32)]
    pub latent: Latent,
    /// Start from a stored decode state.
    #[arg(long, value_name = "FILE")]
    pub state: Option<PathBuf>,
    /// The file to write.
    #[arg(long, value_name = "OUT")]
    pub out: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Tokens and formats of a run: what a mode needs to know.
#[derive(Clone, Debug)]
pub struct Job {
    /// Prompt.
    pub prompt: Vec<u32>,
    /// Tokens fed one by one.
    pub steps: Vec<u32>,
    /// Prompt tokens of one call.
    pub chunk: u32,
    /// Storage formats.
    pub formats: Formats,
}

/// Logits of a run.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// `[V]` of the last prompt token; empty when the run starts from a state.
    pub prefill_last: Vec<f32>,
    /// `[M, V]`, row i after the i-th fed token.
    pub decode: Vec<f32>,
}

/// Runs the tool.
///
/// # Errors
/// The model, the ids, the state or the formats are refused, or the output cannot be written.
pub fn run(args: &Args) -> Result<Finished, Failure> {
    let model = Model::load(&args.model).map_err(|error| model_failure(&error))?;
    let (answer, fed) = match &args.state {
        Some(state) => from_state(args, &model, state)?,
        None => from_prompt(args, &model)?,
    };
    let vocabulary = model.config().vocab_size as usize;
    let mut tensors = BTreeMap::new();
    if args.state.is_none() {
        tensors.insert(
            "prefill_last_logits".to_owned(),
            Tensor::f32(&[vocabulary], &answer.prefill_last),
        );
    }
    tensors.insert(
        "decode_logits".to_owned(),
        Tensor::f32(&[fed, vocabulary], &answer.decode),
    );
    write_tensors(&args.out, &tensors).map_err(|error| {
        Failure::new(FailureKind::Output, error.to_string()).with_field("out", args.out.display())
    })?;
    let json = json!({
        "schema": SCHEMA, "verdict": "ok", "isa": model.isa().name(), "steps": fed,
        "prefill": args.prefill, "out": args.out.display().to_string(),
    });
    let line = format!(
        "wrote {} ({fed} decoded rows, isa {})",
        args.out.display(),
        model.isa().name()
    );
    Ok(Finished {
        json,
        lines: vec![line],
        exit_code: 0,
    })
}

fn from_prompt(args: &Args, model: &Model) -> Result<(Answer, usize), Failure> {
    let (prefill, steps) = (
        args.prefill.unwrap_or(0) as usize,
        args.steps.unwrap_or(0) as usize,
    );
    if prefill == 0 {
        return Err(Failure::input("prefill", 0, "at least one token"));
    }
    let (name, ids) = read_ids(args.ids.as_deref().unwrap_or_default())?;
    if ids.len() < prefill + steps {
        let expected = format!("at least prefill + steps = {} ids", prefill + steps);
        return Err(Failure::input(
            &format!("length of {name}"),
            ids.len(),
            &expected,
        ));
    }
    let job = Job {
        prompt: ids[..prefill].to_vec(),
        steps: ids[prefill..prefill + steps].to_vec(),
        chunk: args.chunk.unwrap_or(prefill as u32),
        formats: formats(args),
    };
    let answer = match args.mode {
        Mode::Mono => mono::run(model, &job)?,
        Mode::Handoff => handoff::run(args, &job)?,
    };
    Ok((answer, steps))
}

fn from_state(args: &Args, model: &Model, path: &Path) -> Result<(Answer, usize), Failure> {
    if args.mode != Mode::Mono {
        return Err(Failure::input("mode", "handoff", "mono with --state"));
    }
    let mut next = match &args.ids {
        Some(ids) => read_ids(ids)?.1,
        None => read_tensor(path, "next_ids")?,
    };
    if let Some(steps) = args.steps {
        if next.len() < steps as usize {
            let expected = format!("at least steps = {steps} ids");
            return Err(Failure::input("length of the ids", next.len(), &expected));
        }
        next.truncate(steps as usize);
    }
    let answer = mono::resume(model, path, &next, &formats(args))?;
    let fed = next.len();
    Ok((answer, fed))
}

fn formats(args: &Args) -> Formats {
    Formats {
        latent: match args.latent {
            Latent::PackedFp8 => LatentFormat::PackedFp8,
            Latent::F32 => LatentFormat::F32,
        },
        index_k: match args.index_k {
            IndexK::Bf16 => IndexKFormat::Bf16,
            IndexK::Fp8 => IndexKFormat::Fp8,
            IndexK::F32 => IndexKFormat::F32,
        },
        window_page: WindowPage::P64,
    }
}

/// The schema of the model's cache in these formats.
fn schema(model: &Model, formats: &Formats) -> Result<CacheSchema, Failure> {
    let geometry = model.config().geometry(model.weights().digest());
    CacheSchema::deepseek_v4(&geometry, formats).map_err(|error| {
        let failure = Failure::new(FailureKind::BadInput, error.to_string());
        match error.kind() {
            kvgate_kvcache::ErrorKind::FormatNotAllowed { field, value, .. }
            | kvgate_kvcache::ErrorKind::ImpossibleGeometry { field, value, .. } => {
                failure.with_field(field, value)
            }
            _ => failure,
        }
    })
}

/// The ids of `FILE:TENSOR`.
fn read_ids(argument: &str) -> Result<(String, Vec<u32>), Failure> {
    let Some((file, tensor)) = argument
        .rsplit_once(':')
        .filter(|(f, t)| !f.is_empty() && !t.is_empty())
    else {
        return Err(Failure::input("ids", argument, "FILE.safetensors:TENSOR"));
    };
    Ok((tensor.to_owned(), read_tensor(Path::new(file), tensor)?))
}

fn read_tensor(path: &Path, name: &str) -> Result<Vec<u32>, Failure> {
    let mut file = SafetensorsFile::open(path).map_err(|error| model_failure(&error))?;
    let tensor = file.read(name).map_err(|error| model_failure(&error))?;
    let dtype = tensor.dtype.name();
    let values = tensor
        .to_i64()
        .filter(|_| tensor.shape.len() == 1 && matches!(dtype, "I64" | "I32"));
    let Some(values) = values else {
        let shown = format!("{dtype} {:?}", tensor.shape);
        return Err(Failure::input(name, shown, "an i64 or i32 tensor [T]"));
    };
    let ids: Result<Vec<u32>, i64> = values
        .into_iter()
        .map(|v| u32::try_from(v).map_err(|_| v))
        .collect();
    ids.map_err(|value| Failure::input(name, value, "token ids"))
}
