//! Comparison of this implementation with a folder of reference tensors (gates G1 to G10).
//!
//! A folder holds a model (`config.json`, `model.safetensors`) with `golden.safetensors`,
//! `debug.safetensors` and `handoff.safetensors`, or `primitives.safetensors`. Every tensor of these
//! files is an input, is compared, or belongs to a gate that is not supported yet; any other tensor
//! is an error, so that nothing is passed over in silence.

mod debug;
mod golden;
mod primitives;

use std::path::Path;

use kvgate_kvcache::{CacheSchema, Formats, IndexKFormat, LatentFormat, WindowPage};

use crate::caches::MonoCaches;
use crate::dsv4::Model;
use crate::error::{ErrorKind, ModelError};
use crate::weights::safetensors::{SafetensorsFile, Tensor};

type Tensors = std::collections::BTreeMap<String, Tensor>;

/// Tolerance of the gates on logits and intermediates.
const LOGIT_BOUND: f64 = 1e-4;

/// One comparison.
#[derive(Clone, Debug)]
pub struct CheckRow {
    /// Gate, for example `G1`.
    pub gate: &'static str,
    /// Tensor of the folder.
    pub tensor: String,
    /// How the compared value came about, where a tensor is compared more than once.
    pub how: String,
    /// Largest deviation; infinite where a value is not a number.
    pub max_error: f64,
    /// Largest accepted deviation.
    pub bound: f64,
    /// Whether the deviation is within the bound.
    pub ok: bool,
}

/// A tensor whose gate is not supported yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotYet {
    /// Gate.
    pub gate: &'static str,
    /// Tensor of the folder.
    pub tensor: String,
}

/// All comparisons of a folder.
#[derive(Clone, Debug, Default)]
pub struct CheckReport {
    /// Compared tensors.
    pub rows: Vec<CheckRow>,
    /// Tensors that wait for later work.
    pub not_yet: Vec<NotYet>,
}

impl CheckReport {
    /// Whether every compared tensor is within its bound.
    pub fn is_ok(&self) -> bool {
        self.rows.iter().all(|row| row.ok)
    }

    fn push(&mut self, gate: &'static str, tensor: &str, how: &str, max_error: f64, bound: f64) {
        let ok = max_error <= bound;
        self.rows.push(CheckRow {
            gate,
            tensor: tensor.to_owned(),
            how: how.to_owned(),
            max_error,
            bound,
            ok,
        });
    }

    fn later(&mut self, gate: &'static str, tensor: &str) {
        self.not_yet.push(NotYet {
            gate,
            tensor: tensor.to_owned(),
        });
    }
}

/// Runs every gate whose files lie in `dir`.
///
/// # Errors
/// The folder holds nothing to compare, a file is damaged, or a tensor is unknown or mis-shaped.
pub fn check_dir(dir: &Path) -> Result<CheckReport, ModelError> {
    let mut report = CheckReport::default();
    let load = |name: &str| -> Result<Option<Tensors>, ModelError> {
        let path = dir.join(name);
        if path.exists() {
            Ok(Some(SafetensorsFile::open(&path)?.read_all()?))
        } else {
            Ok(None)
        }
    };
    let primitives = load("primitives.safetensors")?;
    let (golden, debug, handoff) = (
        load("golden.safetensors")?,
        load("debug.safetensors")?,
        load("handoff.safetensors")?,
    );
    if primitives.is_none() && golden.is_none() && debug.is_none() && handoff.is_none() {
        let reason = "no golden, debug, handoff or primitives.safetensors in this folder";
        return Err(ModelError::corrupt(dir, reason));
    }
    if let Some(tensors) = primitives {
        primitives::check(&tensors, &mut report)?;
    }
    if golden.is_none() && debug.is_none() && handoff.is_none() {
        return Ok(report);
    }
    let model = match Model::load(dir) {
        Ok(model) => model,
        Err(e) if matches!(e.kind(), ErrorKind::TensorDtype { .. }) => {
            // Packed weights: every gate of this folder is part of G7.
            for tensors in [golden, debug, handoff].into_iter().flatten() {
                for name in tensors.keys() {
                    report.later("G7", name);
                }
            }
            return Ok(report);
        }
        Err(e) => return Err(e),
    };
    let golden = golden.unwrap_or_default();
    golden::check_logits(&model, &golden, &mut report)?;
    if let Some(tensors) = debug {
        debug::check(&model, &golden, &tensors, &mut report)?;
    }
    if let Some(tensors) = handoff {
        golden::check_state(&model, &golden, &tensors, &mut report)?;
    }
    Ok(report)
}

/// Caches in plain f32 for `tokens` tokens.
fn f32_caches(model: &Model, tokens: usize) -> Result<MonoCaches, ModelError> {
    let formats = Formats {
        latent: LatentFormat::F32,
        index_k: IndexKFormat::F32,
        window_page: WindowPage::P64,
    };
    let geometry = model.config().geometry(model.weights().digest());
    let schema = CacheSchema::deepseek_v4(&geometry, &formats)?;
    MonoCaches::new(&schema, u32::try_from(tokens).unwrap_or(u32::MAX))
}

fn get<'a>(tensors: &'a Tensors, name: &str) -> Result<&'a Tensor, ModelError> {
    tensors.get(name).ok_or_else(|| {
        ModelError::new(ErrorKind::TensorMissing {
            name: name.to_owned(),
        })
    })
}

fn unknown(name: &str) -> ModelError {
    ModelError::new(ErrorKind::TensorUnknown {
        name: name.to_owned(),
    })
}

/// The f32 values of a tensor.
fn floats(tensors: &Tensors, name: &str) -> Result<Vec<f32>, ModelError> {
    let tensor = get(tensors, name)?;
    tensor.to_f32().ok_or_else(|| {
        let got = tensor.dtype.name().to_owned();
        ModelError::new(ErrorKind::TensorDtype {
            name: name.to_owned(),
            got,
            expected: "F32",
        })
    })
}

/// The token ids of a tensor.
fn token_ids(tensors: &Tensors, name: &str) -> Result<Vec<u32>, ModelError> {
    let tensor = get(tensors, name)?;
    let ids: Option<Vec<u32>> = tensor
        .to_i64()
        .and_then(|ids| ids.iter().map(|id| u32::try_from(*id).ok()).collect());
    ids.ok_or_else(|| {
        let (name, expected) = (name.to_owned(), "token ids of type I64".to_owned());
        ModelError::new(ErrorKind::TensorValue {
            name,
            value: tensor.dtype.name().to_owned(),
            expected,
        })
    })
}

/// Compares `got` with a tensor of the folder; the lengths must agree.
fn max_error(name: &str, got: &[f32], expected: &[f32]) -> Result<f64, ModelError> {
    if got.len() != expected.len() {
        let (got, expected) = (vec![expected.len()], vec![got.len()]);
        return Err(ModelError::new(ErrorKind::TensorShape {
            name: name.to_owned(),
            got,
            expected,
        }));
    }
    Ok(got.iter().zip(expected).fold(0.0, |top: f64, (g, e)| {
        let error = if g == e {
            0.0
        } else {
            (f64::from(*g) - f64::from(*e)).abs()
        };
        if error.is_nan() {
            f64::INFINITY
        } else {
            top.max(error)
        }
    }))
}
