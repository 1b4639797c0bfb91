//! A checkpoint folder: one safetensors file or the shards of an index, checked against the
//! configuration before any weight is read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::safetensors::{Dtype, SafetensorsFile, Tensor};
use super::spec::{Role, Specs, TensorSpec, draft_specs, hub_name, main_specs};
use super::{Source, shape_error};
use crate::config::Config;
use crate::error::{ErrorKind, ModelError};

/// Name of a single-file checkpoint.
pub(crate) const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The open files of a checkpoint and where each hub name lies.
pub(crate) struct Checkpoint {
    files: Vec<SafetensorsFile>,
    /// Hub name → file and name in it.
    places: BTreeMap<String, (usize, String)>,
}

impl Checkpoint {
    /// Opens the files of `dir` and checks names, shapes and types.
    pub(crate) fn open(dir: &Path, config: &Config) -> Result<Self, ModelError> {
        let files = open_files(dir)?;
        let (main, drafts) = (main_specs(config), draft_specs(config));
        let mut places = BTreeMap::new();
        let mut unknown = None;
        for (index, file) in files.iter().enumerate() {
            for (name, info) in file.tensors() {
                let Some(hub) = hub_name(name) else { continue };
                refuse_quantised(name, &hub, info.dtype)?;
                match main.get(&hub).or_else(|| drafts.get(&hub)) {
                    Some(spec) => check_tensor(&hub, spec, info.dtype, &info.shape)?,
                    None => {
                        unknown.get_or_insert_with(|| name.clone());
                        continue;
                    }
                }
                if places.insert(hub.clone(), (index, name.clone())).is_some() {
                    return Err(ModelError::new(ErrorKind::TensorDuplicate { name: hub }));
                }
            }
        }
        if let Some(name) = unknown {
            return Err(ModelError::new(ErrorKind::TensorUnknown { name }));
        }
        match missing(&main, &places) {
            Some(name) => Err(ModelError::new(ErrorKind::TensorMissing { name })),
            None => Ok(Self { files, places }),
        }
    }
}

impl Source for Checkpoint {
    fn read(&mut self, name: &str) -> Result<Tensor, ModelError> {
        let Some((file, stored_name)) = self.places.get(name) else {
            return Err(ModelError::new(ErrorKind::TensorMissing {
                name: name.to_owned(),
            }));
        };
        self.files[*file].read(stored_name)
    }
}

fn missing(main: &Specs, places: &BTreeMap<String, (usize, String)>) -> Option<String> {
    main.keys()
        .find(|name| !places.contains_key(*name))
        .cloned()
}

/// Packed weights need their scales; this loader takes plain tensors only.
fn refuse_quantised(name: &str, hub: &str, dtype: Dtype) -> Result<(), ModelError> {
    let is_plain = match dtype {
        Dtype::Bf16 | Dtype::F32 => !hub.ends_with(".scale") && !hub.contains("weight_scale"),
        Dtype::I64 | Dtype::I32 => hub.ends_with(".tid2eid"),
        _ => false,
    };
    if is_plain {
        return Ok(());
    }
    let expected = if hub.ends_with(".tid2eid") {
        "I64"
    } else {
        "BF16 or F32 (packed weights are not supported)"
    };
    Err(ModelError::new(ErrorKind::TensorDtype {
        name: name.to_owned(),
        got: dtype.name().to_owned(),
        expected,
    }))
}

fn check_tensor(
    hub: &str,
    spec: &TensorSpec,
    dtype: Dtype,
    shape: &[usize],
) -> Result<(), ModelError> {
    let (fits, expected) = match spec.role {
        Role::ExpertIds => (matches!(dtype, Dtype::I64 | Dtype::I32), "I64"),
        Role::Weight | Role::Parameter => {
            (matches!(dtype, Dtype::Bf16 | Dtype::F32), "BF16 or F32")
        }
    };
    if !fits {
        let got = dtype.name().to_owned();
        return Err(ModelError::new(ErrorKind::TensorDtype {
            name: hub.to_owned(),
            got,
            expected,
        }));
    }
    if shape == spec.shape {
        Ok(())
    } else {
        Err(shape_error(hub, shape, &spec.shape))
    }
}

fn open_files(dir: &Path) -> Result<Vec<SafetensorsFile>, ModelError> {
    let single = dir.join(SINGLE_FILE);
    let index_path = dir.join(INDEX_FILE);
    if single.exists() || !index_path.exists() {
        return Ok(vec![SafetensorsFile::open(&single)?]);
    }
    let text = std::fs::read(&index_path).map_err(|e| ModelError::io(&index_path, e))?;
    let index: Index = serde_json::from_slice(&text)
        .map_err(|e| ModelError::corrupt(&index_path, format!("not a weight index: {e}")))?;
    let names: BTreeSet<&String> = index.weight_map.values().collect();
    let mut files = Vec::with_capacity(names.len());
    for name in names {
        if PathBuf::from(name)
            .file_name()
            .is_none_or(|plain| plain != name.as_str())
        {
            return Err(ModelError::corrupt(
                &index_path,
                format!("shard {name:?} is not a plain file name"),
            ));
        }
        let file = SafetensorsFile::open(&dir.join(name))?;
        check_shard(&index_path, &index, name, &file)?;
        files.push(file);
    }
    Ok(files)
}

/// A shard holds exactly the tensors that the index says.
fn check_shard(
    index_path: &Path,
    index: &Index,
    shard: &str,
    file: &SafetensorsFile,
) -> Result<(), ModelError> {
    let mapped = |name: &String| index.weight_map.get(name).is_some_and(|s| s == shard);
    if let Some(name) = file.tensors().keys().find(|name| !mapped(name)) {
        return Err(ModelError::corrupt(
            index_path,
            format!("tensor {name} of {shard} is not in the index"),
        ));
    }
    let promised = index.weight_map.iter().filter(|(_, s)| *s == shard);
    match promised
        .map(|(name, _)| name)
        .find(|name| !file.tensors().contains_key(*name))
    {
        Some(name) => Err(ModelError::corrupt(
            file.path(),
            format!("tensor {name} of the index is not in it"),
        )),
        None => Ok(()),
    }
}
