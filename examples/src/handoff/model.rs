//! The model of a side and what follows from it: schema, limits, names.

use std::path::Path;
use std::sync::Arc;

use kvgate_kvcache::{
    self as kvcache, CacheSchema, Formats, IndexKFormat, LatentFormat, WindowPage,
};
use kvgate_model::{Config, Model, ModelError};

use super::failure::{Failure, FailureKind};
use super::options::{HostOptions, IndexK, Latent};

/// A loaded model and the schema of its cache.
#[derive(Debug)]
pub struct Host {
    /// Computes.
    pub model: Model,
    /// Enumerates the cache.
    pub schema: Arc<CacheSchema>,
}

impl Host {
    /// Loads the checkpoint, or makes tiny-v4.
    pub fn load(options: &HostOptions) -> Result<Self, Failure> {
        let model = match &options.model {
            None => {
                Model::tiny_v4(options.seed).map_err(|error| refuse_model("tiny-v4", &error))?
            }
            Some(dir) => Model::load(dir)
                .map_err(|error| refuse_model(&dir.display().to_string(), &error))?,
        };
        let digest = model.weights().digest();
        let schema = schema(model.config(), options, digest)?;
        Ok(Self {
            model,
            schema: Arc::new(schema),
        })
    }

    /// Rows of a logit vector.
    #[must_use]
    pub fn vocab_size(&self) -> u32 {
        self.model.config().vocab_size
    }

    /// Tokens that a sequence may have.
    #[must_use]
    pub fn context_tokens(&self) -> u32 {
        self.model.config().max_position_embeddings
    }

    /// Entries that the indexer picks; with at most so many it picks all of them.
    #[must_use]
    pub fn index_topk(&self) -> u32 {
        self.model.config().index_topk
    }
}

/// The configuration alone: enough to refuse a run before anything is started.
pub fn config(options: &HostOptions) -> Result<Config, Failure> {
    match &options.model {
        None => Ok(Config::tiny_v4()),
        Some(dir) => {
            Config::from_dir(dir).map_err(|error| refuse_model(&dir.display().to_string(), &error))
        }
    }
}

/// The schema of a configuration in the formats of the options.
pub fn schema(
    config: &Config,
    options: &HostOptions,
    weights_digest: [u8; 32],
) -> Result<CacheSchema, Failure> {
    CacheSchema::deepseek_v4(&config.geometry(weights_digest), &formats(options))
        .map_err(|error| cache_failure(&error))
}

fn formats(options: &HostOptions) -> Formats {
    Formats {
        latent: match options.latent {
            Latent::PackedFp8 => LatentFormat::PackedFp8,
            Latent::F32 => LatentFormat::F32,
        },
        index_k: match options.index_k {
            IndexK::Bf16 => IndexKFormat::Bf16,
            IndexK::Fp8 => IndexKFormat::Fp8,
            IndexK::F32 => IndexKFormat::F32,
        },
        window_page: WindowPage::P64,
    }
}

/// Writes the built-in model as a hub checkpoint.
pub fn dump_built_in(dir: &Path, seed: u64) -> Result<(), Failure> {
    let config = Config::tiny_v4();
    let dump = |error: ModelError| {
        Failure::new(
            FailureKind::Output,
            format!("--dump-model {}: {error}", dir.display()),
        )
        .with_field("dump_model", dir.display())
    };
    kvgate_model::dump_generated(dir, &config, seed).map_err(dump)
}

/// What the JSON calls the model.
#[must_use]
pub fn label(options: &HostOptions) -> String {
    options
        .model
        .as_ref()
        .map_or("tiny-v4".to_owned(), |dir| dir.display().to_string())
}

/// An error of the model during a run as the failure of the run.
#[must_use]
pub fn model_failure(error: &ModelError) -> Failure {
    Failure::internal(format!("model: {error}"))
}

fn refuse_model(name: &str, error: &ModelError) -> Failure {
    Failure::new(FailureKind::BadInput, format!("--model {name}: {error}"))
        .with_field("model", name)
}

/// An error of the cache as the failure of the run.
#[must_use]
pub fn cache_failure(error: &kvcache::Error) -> Failure {
    use kvcache::ErrorKind;
    match error.kind() {
        ErrorKind::FormatNotAllowed { field, value, .. }
        | ErrorKind::ImpossibleGeometry { field, value, .. } => {
            Failure::new(FailureKind::BadInput, error.to_string()).with_field(field, value)
        }
        ErrorKind::OutOfMemory { asked_bytes, .. } => {
            Failure::new(FailureKind::OutOfMemory, error.to_string())
                .with_field("pool_pages", asked_bytes)
        }
        ErrorKind::ImpossiblePool { value, .. } => {
            Failure::new(FailureKind::BadInput, error.to_string()).with_field("pool_pages", value)
        }
        ErrorKind::NeverFits { capacity, .. } => {
            Failure::new(FailureKind::BadInput, error.to_string())
                .with_field("pool_pages", capacity)
        }
        _ => Failure::internal(error.to_string()),
    }
}
